"""All chats of a user, and what leaves them."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_chat.chat_file import Chat, entry_of, string_of
from dflash_chat.state import ChatState, Turn
from dflash_mlx.errors import UsageError

_USER = b'{"type": "user"'
_TITLE = b'{"type": "title"'
_REWIND = b'{"type": "rewind"'


@dataclass(frozen=True)
class Summary:
    """A chat in the list of chats."""

    id: str
    path: Path
    title: str
    folder: str
    turns: int
    time: float


def data_folder() -> Path:
    """Where chats live: `~/Library/Application Support/dflash-chat` on macOS, XDG's folder elsewhere."""
    from platformdirs import user_data_path

    return user_data_path("dflash-chat", appauthor=False)


class Store:
    """All chats of this user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def new(self, folder: str) -> Chat:
        """A chat that becomes a file when something is said."""
        name = time.strftime("%Y-%m-%d-%H%M%S") + "-" + os.urandom(2).hex()
        return Chat(self.folder / f"{name}.jsonl", folder)

    def find(self, name: str) -> Chat:
        """The chat of this id, unambiguous beginning of an id, or path.

        Raises:
            UsageError: there is none, or more than one.
        """
        if os.sep in name or name.endswith(".jsonl"):
            return Chat(_expanded(name), "")
        found = sorted(path for path in self.folder.glob("*.jsonl") if path.stem.startswith(name))
        exact = [path for path in found if path.stem == name]
        if len(exact or found) != 1:
            what = f"{len(found)} chats begin with {name!r}" if found else f"there is no chat {name!r}"
            raise UsageError(f"{what}; the chats are in {self.folder}")
        return Chat((exact or found)[0], "")

    def last(self, folder: str) -> Chat | None:
        """The chat of this folder that was written last, or None."""
        return next((Chat(each.path, folder) for each in self.all() if each.folder == folder), None)

    def all(self) -> Iterator[Summary]:
        """All chats, the one written last first. A file that is no chat is left out."""
        found = []
        for path in self.folder.glob("*.jsonl"):
            try:
                found.append((path.stat().st_mtime, path))
            except OSError:
                continue
        for modified, path in sorted(found, reverse=True):
            if summary := _summary(path, modified):
                yield summary

    def prompts(self, folder: str, chats: int = 5) -> list[str]:
        """What was asked lately in this folder, oldest first."""
        found: list[list[str]] = []
        for summary in self.all():
            if summary.folder == folder and len(found) < chats:
                try:
                    lines = summary.path.read_bytes().split(b"\n")
                except OSError:  # another window has just deleted it
                    continue
                asked = (entry_of(line) for line in lines if line.startswith(_USER))
                found.append([string_of(entry, "text") for entry in asked])
        return [prompt for prompts in reversed(found) for prompt in prompts]


def _summary(path: Path, modified: float) -> Summary | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    head, _, rest = data.partition(b"\n")
    header = entry_of(head)
    if header.get("type") != "chat":
        return None
    title, asked, turns = "", "", 0
    for line in rest.split(b"\n"):
        if line.startswith(_USER):
            turns += 1
            asked = asked or string_of(entry_of(line), "text")
        elif line.startswith(_REWIND):
            kept = entry_of(line).get("turns")
            turns = min(turns, kept) if isinstance(kept, int) else turns
        elif line.startswith(_TITLE):
            title = string_of(entry_of(line), "text")
    return Summary(path.stem, path, title or asked, string_of(header, "folder"), turns, modified)


def save(name: str, state: ChatState) -> Path:
    """Write the conversation as Markdown into a new file, and say where it is.

    Raises:
        UsageError: there is such a file, or it cannot be written.
    """
    file = _expanded(name)
    try:
        with file.open("x", encoding="utf-8", errors="replace") as out:
            out.write(markdown(state.title, state.system, state.turns))
    except FileExistsError:
        raise UsageError(f"{file} is there already; choose another name") from None
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
    return file.absolute()


def markdown(title: str, system: str, turns: list[Turn]) -> str:
    """The conversation as a Markdown document, for /save."""
    parts = [f"# {title}"] if title else []
    parts += [f"> {line}" for line in system.splitlines()]
    for turn in turns:
        quoted = "\n".join(f"> {line}" for line in turn.prompt.split("\n"))
        parts += [f"**You**\n\n{quoted}", turn.reply.text or "*(no answer)*"]
    return "\n\n".join(parts) + "\n"


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UsageError(f"{name} names a user who is not known here; choose another path") from None
