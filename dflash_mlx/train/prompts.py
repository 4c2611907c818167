"""Prompts for the target to answer: a set of our own, or a file.

Our own set needs no download: templates and word lists (texts/) make as many different prompts as are wanted.
Whole templates are held out, so that what is measured on them says something about prompts of a new shape;
the free-form prompts come from no template at all.

This file knows conversations, and nothing about tokens or models.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.errors import UsageError

TEXTS = Path(__file__).parent / "texts"
HELD_OUT_SHARE = 10  # one group in ten
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Prompt:
    """A conversation that the target is to continue.

    Attributes:
        turns: what was said, user and assistant in turn; the user begins and ends.
        group: what it is held out by: its template, or the prompt itself.
    """

    turns: tuple[str, ...]
    group: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns as a chat template wants them."""
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(self.turns)]

    @property
    def held_out(self) -> bool:
        """Whether it is measured on and never trained on; by a hash, so that no order matters."""
        return hashlib.sha256(self.group.encode()).digest()[0] % HELD_OUT_SHARE == 0


def own_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """`count` different prompts in random order, every template about as often as every other."""
    words = _read_words()
    templates = _lines("templates.txt")
    rng = random.Random(seed)
    made: dict[tuple[str, ...], Prompt] = {}
    misses = 0
    while len(made) < count and misses < 100 * len(templates):
        template = rng.choice(templates)
        prompt = Prompt(tuple(_fill(template, words, rng).split(" || ")), template)
        misses += prompt.turns in made
        made[prompt.turns] = prompt
    return list(made.values())


def free_form_prompts() -> list[Prompt]:
    """Forty fixed prompts to measure with; never trained on."""
    return [Prompt((line,), line) for line in _lines("free_form.txt")]


def read_prompts(file: Path) -> list[Prompt]:
    """Prompts from JSON lines: `{"prompt": "..."}` or `{"messages": [...]}`, and perhaps a `"group"`.

    Raises:
        UsageError: with the number of the first bad line; or the file cannot be read, or holds no prompt.
    """
    try:
        # Not splitlines: it also splits at characters that JSON may hold as they are, such as U+2028.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read prompts from {file}: {error}") from error
    prompts = [
        _parse_prompt(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise UsageError(f"{file} holds no prompts; give one JSON object a line")
    return prompts


def _parse_prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON ({error}); give one object a line") from error
    if not isinstance(record, dict) or not ("prompt" in record) ^ ("messages" in record):
        raise UsageError(f'{where} must be an object with either "prompt" or "messages"')
    messages = record.get("messages", [{"role": "user", "content": record.get("prompt")}])
    try:
        turns = tuple(message["content"] for message in messages)
        roles = [message["role"] for message in messages]
    except (TypeError, KeyError) as error:
        raise UsageError(f'{where}: every message needs a "role" and a "content"') from error
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UsageError(f"{where}: a prompt is a text that is not empty")
    if roles != [("user", "assistant")[i % 2] for i in range(len(roles))] or len(roles) % 2 == 0:
        raise UsageError(f"{where}: messages must go user, assistant, ..., user")
    group = record.get("group", " || ".join(turns))
    if not isinstance(group, str):
        raise UsageError(f'{where}: "group" is {group!r}, expected a text')
    try:
        "".join((*turns, group)).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UsageError(f"{where} has {half!r}, half a character: write both halves, or none") from error
    return Prompt(turns, group)


def _fill(template: str, words: dict[str, list[str]], rng: random.Random) -> str:
    """One prompt of a template. A name that occurs twice is the same person, other lists draw anew."""
    once: dict[str, str] = {}

    def word(match: re.Match[str]) -> str:
        field = match[1]
        if field == "n":
            return str(rng.randint(2, 99))
        drawn = rng.choice(words[field.lower()])
        if field == "Name":
            return drawn
        if field in ("name", "hobby", "Hobby") and " || " in template:
            drawn = once.setdefault(field.lower(), drawn)
        return drawn[0].upper() + drawn[1:] if field[0].isupper() else drawn

    return _FIELD.sub(word, template).replace("\\n", "\n")


def _read_words() -> dict[str, list[str]]:
    """The word lists of words.txt by name."""
    lists = (line.split(": ", 1) for line in _lines("words.txt"))
    return {name: words.split(", ") for name, words in lists}


def _lines(name: str) -> list[str]:
    """The lines of one of our texts, without comments and [headings]."""
    return list(_content((TEXTS / name).read_text(encoding="utf-8")))


def _content(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.strip() and line[0] not in "#[":
            yield line
