"""A chat on disk: an append-only file of JSON lines, so that nothing that was said is ever lost.

    {"type": "chat", "version": 1, "folder": …, …}         the first line
    {"type": "user", "text": …, "time": …}                 a message
    {"type": "part", "text": …, "reasoning": …}            a piece of the reply to it, as it comes
    {"type": "end", "phase": …, "figures": {…}, …}         the reply is over
    {"type": "rewind", "turns": n}                         from here on only the first n turns count
    {"type": "title", "text": …}, {"type": "system", "text": …}

A process that is killed leaves at most one torn last line, which is skipped; a reply without an `end` counts
as stopped. A file that is open is locked, so that two programs never write into one chat.
"""

import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_chat.state import Reply, Turn
from dflash_mlx.errors import UsageError

VERSION = 1


@dataclass
class Saved:
    """What a chat's file holds."""

    folder: str
    turns: list[Turn]
    title: str = ""
    system: str = ""


class Chat:
    """One chat's file, open for appending; it is made with the first line that is worth keeping.

    Args:
        path: the file; None keeps nothing.
        folder: the folder that a new chat belongs to.

    Attributes:
        trouble: why what was said last is not in the file; it is written as soon as that is possible.
    """

    def __init__(self, path: Path | None, folder: str) -> None:
        self.path = path
        self.folder = folder
        self.trouble = ""
        self._file: int | None = None
        self._unsaved = bytearray()

    @property
    def written(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    @property
    def farewell(self) -> str:
        """What its reader should know at the end: where it is, or why not; empty if nothing was said."""
        saved = self.path is not None and self.path.exists()
        return self.trouble or (f"chat saved in {self.path}" if saved else "")

    def open(self) -> Saved:
        """Read an existing chat and lock it.

        Raises:
            UsageError: the file cannot be read, is no chat, or another program has it open.
        """
        assert self.path is not None
        try:
            handle = _locked(self.path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise UsageError(f"cannot open the chat {self.path}: {error.strerror}") from None
        try:
            data = self.path.read_bytes()
            saved = read(data, self.path)
        except BaseException as error:
            os.close(handle)
            if isinstance(error, OSError):
                raise UsageError(f"cannot read the chat {self.path}: {error.strerror}") from None
            raise
        self._file = handle
        self.folder = saved.folder
        if not data.endswith(b"\n"):
            self._unsaved += b"\n"  # what was torn stays a line of its own
        return saved

    def user(self, text: str) -> None:
        """A message was sent."""
        self._write({"type": "user", "text": text, "time": round(time.time(), 3)})

    def part(self, text: str, reasoning: str) -> None:
        """A piece of the reply to it."""
        if text or reasoning:
            self._write({"type": "part", "text": text, "reasoning": reasoning})

    def end(self, reply: Reply) -> None:
        """The reply is over."""
        entry = {"type": "end", "phase": reply.phase, "error": reply.error, "figures": reply.figures()}
        self._write({**entry, "time": round(time.time(), 3)})

    def rewind(self, turns: int) -> None:
        """Only the first `turns` turns count from here on; the others stay in the file."""
        self._write({"type": "rewind", "turns": turns})

    def title(self, text: str) -> None:
        """The reader named the chat."""
        self._write({"type": "title", "text": text})

    def system(self, text: str) -> None:
        """The system message changed."""
        self._write({"type": "system", "text": text})

    def delete(self) -> Path | None:
        """Move the file to the folder of deleted chats, and say where it is now.

        Raises:
            UsageError: it cannot be moved.
        """
        where = None
        if self.path is not None and self._file is not None and self.path.exists():
            where = _move(self.path)
        self._unsaved.clear()
        self.close()
        return where

    def close(self) -> None:
        """Let another program have it."""
        if self._unsaved:
            self._save()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, entry: dict[str, Any]) -> None:
        if self.path is None:
            return
        if self._file is None and not self._unsaved:
            header = {"type": "chat", "version": VERSION, "id": self.path.stem, "folder": self.folder}
            self._unsaved += _line({**header, "time": round(time.time(), 3)})
        self._unsaved += _line(entry)
        self._save()

    def _save(self) -> None:
        """Write what is not in the file yet, from where an earlier try came to."""
        assert self.path is not None
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._file = _locked(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL)
            while self._unsaved:
                del self._unsaved[: os.write(self._file, self._unsaved)]
        except OSError as error:
            self.trouble = self.trouble or f"this chat cannot be saved: {error.strerror} ({self.path})"
        else:
            self.trouble = ""


def discard(path: Path) -> Path:
    """Move a chat's file to the folder `deleted` beside it.

    Raises:
        UsageError: it is gone, it is open in another window, or it cannot be moved.
    """
    try:
        handle = _locked(path, os.O_RDWR)
    except OSError as error:
        raise UsageError(f"cannot delete the chat {path}: {error.strerror}") from None
    try:
        return _move(path)
    finally:
        os.close(handle)


def _move(path: Path) -> Path:
    target = path.parent / "deleted" / path.name
    try:
        target.parent.mkdir(exist_ok=True, mode=0o700)
        return path.replace(target)
    except OSError as error:
        raise UsageError(f"cannot move the chat {path} to {target.parent}: {error.strerror}") from None


def _locked(path: Path, flags: int) -> int:
    """The file, opened, for this program alone.

    Raises:
        UsageError: another program has it.
        OSError: it cannot be opened.
    """
    handle = os.open(path, flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UsageError(f"the chat {path} is open in another window: close it there first") from None
    except OSError:
        os.close(handle)
        raise
    return handle


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def read(data: bytes, path: Path) -> Saved:
    """What the lines of a chat's file say, as far as they can be read.

    Raises:
        UsageError: the file does not begin like a chat, or is of a later version.
    """
    lines = data.split(b"\n")
    header = entry_of(lines[0])
    if header.get("type") != "chat":
        raise UsageError(f"{path} is not a chat of dflash-chat; its first line should say so")
    if not isinstance(version := header.get("version"), int) or version > VERSION:
        raise UsageError(f"{path} has version {version!r}, expected at most {VERSION}; update dflash-chat")
    saved = Saved(string_of(header, "folder"), [])
    reader = _Reader(saved)
    for line in lines[1:]:
        reader.take(entry_of(line))
    reader.close_reply("stopped", "", {})
    return saved


class _Reader:
    """Applies the lines of a file one by one."""

    def __init__(self, saved: Saved) -> None:
        self.saved = saved
        self.prompt: str | None = None  # of the turn whose reply is being read
        self.text: list[str] = []
        self.reasoning: list[str] = []

    def take(self, entry: dict[str, Any]) -> None:
        match entry.get("type"):
            case "user":
                self.close_reply("stopped", "", {})
                self.prompt = string_of(entry, "text")
            case "part":
                self.text.append(string_of(entry, "text"))
                self.reasoning.append(string_of(entry, "reasoning"))
            case "end":
                figures = entry.get("figures")
                error, phase = string_of(entry, "error"), string_of(entry, "phase")
                self.close_reply(phase, error, figures if isinstance(figures, dict) else {})
            case "rewind":
                self.close_reply("stopped", "", {})
                if isinstance(turns := entry.get("turns"), int) and turns >= 0:
                    del self.saved.turns[turns:]
            case "title":
                self.saved.title = string_of(entry, "text")
            case "system":
                self.saved.system = string_of(entry, "text")

    def close_reply(self, phase: str, error: str, figures: dict[str, Any]) -> None:
        if self.prompt is not None:
            texts = "".join(self.text), "".join(self.reasoning)
            self.saved.turns.append(Turn(self.prompt, Reply.from_figures(*texts, phase, error, figures)))
        self.prompt, self.text, self.reasoning = None, [], []


def entry_of(line: bytes) -> dict[str, Any]:
    """The object on a line; an empty one for a line that is torn or foreign."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def string_of(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    return value if isinstance(value, str) else ""
