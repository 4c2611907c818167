"""The one table of what the reader can do; keys, slash commands, palette, help and docs come from it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One thing to do.

    Attributes:
        name: its slash name and the method of `Actions` that does it; "" for a key that only edits.
        help: what it does, as a phrase.
        usage: the arguments of the slash command; those in brackets may be left out.
        key: Textual's name of its key, if the app handles it; "" if a widget does, or there is none.
        shown: the key as the help shows it.
        hint: a word for the line at the bottom; "" leaves it out there.
    """

    name: str
    help: str
    usage: str = ""
    key: str = ""
    shown: str = ""
    hint: str = ""

    @property
    def slash(self) -> str:
        """As it is typed: `/copy [n]`."""
        return f"/{self.name} {self.usage}".rstrip() if self.name else ""

    @property
    def needs_argument(self) -> bool:
        """Whether it does nothing without one."""
        return bool(self.usage) and not self.usage.startswith("[")


COMMANDS = (
    Command("", "send the message", shown="⏎", hint="send"),
    Command("", "new line (⇧⏎ and ⌥⏎ where the terminal can tell)", shown="^j", hint="line"),
    Command("stop", "stop the reply, keep its text", key="escape", shown="esc"),
    Command("retry", "ask the last message again", key="ctrl+r", shown="^r", hint="retry"),
    Command("edit", "change the last message (on an empty prompt)", shown="↑"),
    Command("", "earlier messages; what you were writing is kept", shown="↑ ↓"),
    Command("open", "all chats: continue, find or delete one", "[ID]", "ctrl+o", "^o", "chats"),
    Command("new", "start a new chat", key="ctrl+n", shown="^n", hint="new"),
    Command("think", "thinking on and off, or a level of the model's", "[LEVEL]", "ctrl+t", "^t"),
    Command("", "unfold the thinking (⇥ goes there; a click does it)", shown="⏎"),
    Command("tokens", "where each token came from", key="ctrl+g", shown="^g", hint="tokens"),
    Command("panel", "show or hide the side panel", key="ctrl+backslash", shown="^\\"),
    Command("end", "jump to the end and follow the reply", key="ctrl+l", shown="^l"),
    Command("", "scroll the conversation", shown="PgUp PgDn"),
    Command("copy", "copy the last reply, or its N-th code block", "[N]"),
    Command("copy_code", "copy the last code block; twice: the whole reply", key="ctrl+s", shown="^s"),
    Command("save", "write the conversation as Markdown", "FILE"),
    Command("rename", "name this chat", "TITLE"),
    Command("delete", "move this chat to the folder of deleted chats"),
    Command("system", "show or set the system message; none removes it", "[TEXT]"),
    Command("set", "temp, top_p, top_k, min_p, seed, max_tokens", "[NAME VALUE]"),
    Command("stats", "speeds and acceptance of this chat"),
    Command("memory", "what the engine holds in memory"),
    Command("restart", "start the engine again", key="f5", shown="F5"),
    Command("palette", "find a command", key="ctrl+p", shown="^p", hint="palette"),
    Command("help", "all keys and commands", key="f1", shown="F1", hint="help"),
    Command("", "copy the selection; stop a reply; twice: quit", shown="^c"),
    Command("quit", "quit; the chat is saved", key="ctrl+q", shown="^q"),
)

NOT_TYPED = {"stop", "panel", "end", "copy_code", "palette"}  # they have a key and no slash name
SLASH = {command.name: command for command in COMMANDS if command.name and command.name not in NOT_TYPED}
OPTIONS = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "max_tokens": "max_tokens",
}
"""What /set sets, and the request's name for it."""
WHOLE = ("top_k", "seed", "max_tokens")


def typed(text: str) -> tuple[str, str] | None:
    """Name and argument of a slash command; None for a message, such as one about `/etc/hosts`."""
    first, _, rest = text.strip().partition(" ")
    if not first.startswith("/") or "/" in first[1:] or "\n" in first:
        return None
    return first[1:], rest.strip()


def suggestions(text: str) -> list[Command]:
    """The slash commands that begin like what is being typed."""
    if not text.startswith("/") or " " in text or "\n" in text:
        return []
    return [command for name, command in SLASH.items() if name.startswith(text[1:])]


def rows() -> Iterator[tuple[str, str, str]]:
    """Key, slash command and help of every command, for the help and the documentation."""
    for command in COMMANDS:
        yield command.shown, command.slash if command.name in SLASH else "", command.help


def option(argument: str) -> tuple[str, float | None]:
    """What `/set NAME VALUE` means: the request's field and its value; None takes it back.

    Raises:
        ValueError: saying what is wrong with it.
    """
    name, _, value = argument.partition(" ")
    value = value.strip()
    if name not in OPTIONS:
        raise ValueError(f"/set knows {', '.join(OPTIONS)}, not {name!r}")
    if value in ("default", "none"):
        return OPTIONS[name], None
    try:
        number = int(value) if name in WHOLE else float(value)
        if not math.isfinite(number):
            raise ValueError
    except (ValueError, OverflowError):
        kind = "whole number" if name in WHOLE else "number"
        raise ValueError(f"/set {name} needs a {kind} or `default`, not {value!r}") from None
    return OPTIONS[name], number
