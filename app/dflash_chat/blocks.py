"""A growing reply as finished blocks and an unfinished tail, so that no part is rendered twice.

A block is finished when later text cannot change how it reads: a paragraph at its blank line, a fence at its
end. What would grow without end is cut where the seam does not show: code every twenty lines, a list
before one of its items, other text at a line, a line at a space.
"""

import re
from dataclasses import dataclass

CODE_LINES = 20
LIST_LINES = 12
TEXT_LIMIT = 8000  # characters of a tail that is neither code nor a list

_FENCE = re.compile(r"( {0,3})(`{3,}(?=[^`]*$)|~{3,})[ \t]*([^\s`]*)")
_INDENT = "    "  # in the place of a fence: an indented block ends where the indent does
_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])[ \t]")


@dataclass(frozen=True)
class Prose:
    """Markdown that is no fence; `cut`: what follows goes right under it."""

    text: str
    cut: bool = False


@dataclass(frozen=True)
class Code:
    """A piece of a fenced or indented block, without fence or indent.

    A piece that does not begin its fence goes right under the piece before it.
    """

    text: str
    language: str
    begins: bool
    ends: bool


Block = Prose | Code


class Splitter:
    """Takes text as it comes; `add` and `finish` return blocks that are final, `tail` is the rest."""

    def __init__(self) -> None:
        self._lines: list[str] = []  # whole lines of the unfinished block, with their ends
        self._rest = ""  # the line that has no end yet
        self._fence: tuple[str, str] | None = None  # marker and language, inside one
        self._indent = 0  # of the fence, which its lines share
        self._begins = True
        self._size = 0  # characters in _lines

    @property
    def tail(self) -> Block | None:
        """What is not finished, to be shown as it stands."""
        text = "".join(self._lines)
        if self._fence is not None:
            text = (text + self._dedented(self._rest)).removesuffix("\n")
            return Code(text, self._fence[1], self._begins, ends=False)
        text += self._rest
        return Prose(text) if text.strip() else None

    def add(self, text: str) -> list[Block]:
        """Blocks that this text finishes."""
        *lines, self._rest = (self._rest + text).split("\n")
        done = [block for line in lines for block in self._line(line + "\n")]
        while self._fence is None and len(self._rest) > TEXT_LIMIT:
            cut = self._rest.rfind(" ", 0, TEXT_LIMIT) + 1 or TEXT_LIMIT
            self._lines.append(self._rest[:cut])
            self._rest = self._rest[cut:]
            done += self._flush(cut=True)
        return done

    def finish(self) -> list[Block]:
        """The rest, whatever it is: the reply is over."""
        done = self._line(self._rest) if self._rest else []
        self._rest = ""
        return done + (self._flush_code(ends=True) if self._fence is not None else self._flush())

    def _line(self, line: str) -> list[Block]:
        if self._fence is not None:
            return self._code_line(line)
        if opened := _FENCE.match(line.rstrip("\n")):
            done = self._flush()
            self._indent, self._fence = len(opened[1]), (opened[2], opened[3])
            self._begins = True
            return done
        if line.startswith(_INDENT) and line.strip() and not self._lines:
            self._indent, self._fence, self._begins = len(_INDENT), (_INDENT, ""), True
            return self._code_line(line)
        done = []
        if _ITEM.match(line) and len(self._lines) >= LIST_LINES and _ITEM.match(self._lines[0]):
            done = self._flush(cut=True)
        self._lines.append(line)
        self._size += len(line)
        blank = not line.strip()
        if (blank and not self._in_list()) or self._size > TEXT_LIMIT:
            done += self._flush(cut=not blank)
        elif len(self._lines) > 1 and self._lines[-2].strip() == "" and not _continues_list(line):
            # After a list's blank line, text at the margin is no part of the list.
            self._lines.pop()
            done += self._flush()
            self._lines, self._size = [line], len(line)
        return done

    def _in_list(self) -> bool:
        return bool(self._lines and _ITEM.match(self._lines[0]))

    def _code_line(self, line: str) -> list[Block]:
        assert self._fence is not None
        marker = self._fence[0]
        bare = line.strip()
        if marker == _INDENT and bare and not line.startswith(_INDENT):
            done = self._flush_code(ends=True)
            self._fence = None
            return done + self._line(line)
        if bare and len(bare) >= len(marker) and set(bare) == {marker[0]}:
            done = self._flush_code(ends=True)
            self._fence = None
            return done
        done = self._flush_code(ends=False) if len(self._lines) >= CODE_LINES else []
        self._lines.append(self._dedented(line))
        return done

    def _dedented(self, line: str) -> str:
        return line[min(self._indent, len(line) - len(line.lstrip(" "))) :]

    def _flush(self, *, cut: bool = False) -> list[Block]:
        text, self._lines, self._size = "".join(self._lines), [], 0
        return [Prose(text, cut)] if text.strip() else []

    def _flush_code(self, *, ends: bool) -> list[Block]:
        assert self._fence is not None
        text, self._lines = "".join(self._lines).removesuffix("\n"), []
        if self._fence[0] == _INDENT:
            text = text.rstrip("\n")
        block = Code(text, self._fence[1], self._begins, ends)
        self._begins = False
        return [block]


def _continues_list(line: str) -> bool:
    return not line.strip() or line[0] in " \t" or bool(_ITEM.match(line))


def split(text: str) -> list[Block]:
    """All blocks of a finished reply."""
    splitter = Splitter()
    return splitter.add(text) + splitter.finish()


def code_blocks(text: str) -> list[str]:
    """The contents of a reply's fences, in order."""
    found: list[str] = []
    for block in split(text):
        if isinstance(block, Code):
            if block.begins:
                found.append(block.text)
            else:
                found[-1] += "\n" + block.text
    return found
