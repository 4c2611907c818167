"""What was asked before, one step at a time, with the draft kept safe. Pure."""

from collections.abc import Callable, Sequence


class History:
    """Earlier prompts under the draft.

    Args:
        earlier: prompts of earlier chats, oldest first; asked for on first use, because it reads files.
    """

    def __init__(self, earlier: Callable[[], Sequence[str]] = tuple) -> None:
        self._load = earlier
        self._entries: list[str] | None = None
        self._own: list[str] = []
        self._at: int | None = None  # index of the entry that is shown; None: the draft is
        self._draft = ""

    def add(self, prompt: str) -> None:
        """A prompt was sent; the next step back starts from it."""
        if not self._own or self._own[-1] != prompt:
            self._own.append(prompt)
        self._at = self._entries = None

    def leave(self) -> None:
        """What is in the input now is the draft."""
        self._at = None

    def back(self, shown: str) -> str | None:
        """The entry before the one shown; None at the oldest."""
        if self._entries is None:
            self._entries = _distinct([*self._load(), *self._own])
        at = len(self._entries) if self._at is None else self._at
        if at == 0:
            return None
        if self._at is None:
            self._draft = shown
        self._at = at - 1
        return self._entries[self._at]

    def forward(self) -> str | None:
        """The entry after the one shown, at last the draft; None if the draft is shown already."""
        if self._at is None or self._entries is None:
            return None
        self._at += 1
        if self._at < len(self._entries):
            return self._entries[self._at]
        self._at = None
        return self._draft


def _distinct(prompts: Sequence[str]) -> list[str]:
    """Each prompt once, where it was asked last."""
    return list(dict.fromkeys(reversed(prompts)))[::-1]
