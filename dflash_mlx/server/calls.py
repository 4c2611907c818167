"""The text of an answer as it grows -> content and tool calls. Pure; knows no model's format."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_mlx.markdown import Code
from dflash_mlx.server.syntax import Syntax
from dflash_mlx.server.tools import Tool
from dflash_mlx.text import beginning, first, whole

LONGEST = 1 << 17
"""Characters of a call at most, for some parsers take the square of its length; what is longer is content."""

TRIES = 16
"""How many end markers may be no end, because they stand in an argument."""

PATIENCE = 1.0
"""Seconds that a parser may take to find no call; after that no more of the reply is read as one."""


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` is a JSON object, `id` what the model calls it, if its format has that."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Offer:
    """What a model may call, and how it writes that; unless `parallel`, one call ends the reply."""

    syntax: Syntax
    tools: tuple[Tool, ...]
    parallel: bool = True


class Splitter:
    """Content and calls, told apart as soon as they can be.

    Content is all that is no call: also a call that cannot be read, that names another tool, or that is not
    complete, markers and all, and a marker within Markdown's code. With a call that is cut out goes the
    whitespace between it and the beginning or the end of the content.

    Attributes:
        over: the reply ends here.
    """

    def __init__(self, offer: Offer) -> None:
        self.over = False
        self._offer, self._syntax = offer, offer.syntax
        self._names = {tool["function"]["name"] for tool in offer.tools}
        self._code = Code()
        self._text = ""  # undecided: content that may be the beginning of a marker, or a call's text
        self._start = ""  # the marker of the call that we are in
        self._unread: list[int] = []  # ends of that call with which it could not be read
        self._tired = False  # a parser took too long: the rest is content
        self._gap = ""  # whitespace at the end of the content
        self._called = False  # a call, since the last visible content
        self._said = False  # visible content

    @property
    def held(self) -> int:
        """Characters that are not decided yet."""
        return len(self._text)

    @property
    def silent(self) -> bool:
        """Nothing was said so far, neither a call nor visible content."""
        return not self._said and not self._called

    def add(self, text: str, *, last: bool = False) -> list[str | Call]:
        """What is now certain, in order; with `last`, all that is left."""
        parts: list[str | Call] = []
        self._text += text
        while not self.over and (self._read_call(parts, last) if self._start else self._read(parts, last)):
            pass
        if last and self._gap and not self._called:
            parts.append(self._gap)
        return parts

    def _read(self, parts: list[str | Call], last: bool) -> bool:
        """Content up to the next call; whether to go on."""
        found = None if self._tired else first(self._text, self._syntax.starts)
        if found is None:
            held = 0 if last or self._tired else beginning(self._text, self._syntax.starts)
            self._say(parts, len(self._text) - held)
            return False
        at, marker = found
        self._say(parts, at)
        quoted = self._quoted(marker, last)
        if quoted:
            self._say(parts, len(marker))
        elif quoted is not None:
            self._start, self._text = marker, self._text[len(marker) :]
        return quoted is not None

    def _quoted(self, marker: str, last: bool) -> bool | None:
        """Whether this marker, with which the text begins, is within code; None: its line will tell."""
        if self._code.fenced:
            return True
        if not (ticks := self._code.span):
            return False
        line, newline, _ = self._text[len(marker) :].partition("\n")
        whole = last or bool(newline)
        closing = re.search(rf"(?<!`)`{{{ticks}}}(?!`)", line)
        if closing and (whole or closing.end() < len(line)):
            return True
        return False if whole else None

    def _read_call(self, parts: list[str | Call], last: bool) -> bool:
        """The call that we are in; whether to go on."""
        end, after = self._syntax.end, self._unread[-1] if self._unread else 0
        limit = LONGEST + len(end)
        if end:
            at = self._text.find(end, after, limit)
        else:
            at = len(self._text) if last and len(self._text) <= limit else -1
        if after:
            # What could not be read may go on behind a marker in an argument, but not beyond another call.
            new = first(self._text[after : limit if at < 0 else at], self._syntax.starts)
            if new or len(self._unread) > TRIES:
                self._give_up(parts, after + new[0] if new else after)
                return True
        if at >= 0:
            calls = self._parse(self._text[:at])
            if calls is None and end and not self._tired:
                self._unread.append(at + len(end))
            elif calls is None or any(call.name not in self._names for call in calls):
                self._give_up(parts, at + len(end))
            else:
                self._report(parts, calls, at + len(end))
        elif last or len(self._text) > limit:
            self._give_up(parts, min(len(self._text), limit))
        else:
            return False
        return True

    def _parse(self, text: str) -> list[Call] | None:
        begun = time.monotonic()
        try:
            found = self._syntax.parse(text, self._offer.tools)
            return [_call(entry) for entry in (found if isinstance(found, list) else [found])] or None
        except Exception:  # parsers raise what they like at what they cannot read
            return None
        finally:
            self._tired = time.monotonic() - begun > PATIENCE

    def _report(self, parts: list[str | Call], calls: list[Call], size: int) -> None:
        parts += calls if self._offer.parallel else calls[:1]
        self.over = not self._offer.parallel
        self._start, self._text, self._unread = "", self._text[size:], []
        self._called, self._code = True, Code()
        self._tired = False  # a long call may take its time

    def _give_up(self, parts: list[str | Call], size: int) -> None:
        """What begins like a call, and this much after it, is content."""
        self._text, size = self._start + self._text, len(self._start) + size
        self._start, self._unread = "", []
        self._say(parts, size)

    def _say(self, parts: list[str | Call], size: int) -> None:
        """This much of the text is content."""
        said, self._text = self._text[:size], self._text[size:]
        self._code.add(said)
        said = self._gap + said
        if self._called and not self._said:
            said = said.lstrip()
        content = said.rstrip()
        self._gap = said[len(content) :]
        if content:
            before = parts.pop() if parts and isinstance(parts[-1], str) else ""
            parts.append(f"{before}{content}")
            self._said, self._called = True, False


def last_thoughts(reasoning: str, offer: Offer) -> list[Call]:
    """The calls with which reasoning ends: what a model says that forgets to end it before it calls."""
    parts = Splitter(replace(offer, parallel=True)).add(reasoning, last=True)
    calls: list[Call] = []
    for part in reversed(parts):
        if isinstance(part, str):
            break
        calls.insert(0, part)
    return calls if offer.parallel else calls[:1]


def _call(entry: Any) -> Call:
    """From what a parser returned.

    Raises:
        Exception: of any kind, it is no call.
    """
    if not isinstance(entry, Mapping) or not isinstance(entry["name"], str):
        raise TypeError(entry)
    arguments = entry["arguments"] if len(entry) > 1 else {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError(arguments)
    own = entry.get("id")
    text = whole(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    return Call(whole(entry["name"]), text, whole(own) if own and isinstance(own, str) else None)
