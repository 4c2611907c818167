"""The commands that begin like what is being typed."""

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import Static

from dflash_chat.commands import Command
from dflash_chat.widgets import view

ROWS = 8


class Suggestions(Static):
    """A short list above the prompt; the prompt keeps the focus."""

    def __init__(self) -> None:
        super().__init__(id="suggestions")
        self._commands: Sequence[Command] = ()
        self._at = 0
        self.display = False

    @property
    def chosen(self) -> Command | None:
        """The command under the cursor."""
        return self._commands[self._at] if self._commands else None

    def offer(self, commands: Sequence[Command]) -> None:
        """Show these; none hides the list."""
        if list(commands) != list(self._commands):
            self._commands, self._at = commands, 0
        self.display = bool(commands)
        self._draw()

    def move(self, by: int) -> None:
        """Up or down, around the ends."""
        if self._commands:
            self._at = (self._at + by) % len(self._commands)
            self._draw()

    def _draw(self) -> None:
        first = max(0, min(self._at - ROWS + 2, len(self._commands) - ROWS))
        lines = []
        for number, command in enumerate(self._commands[first : first + ROWS], first):
            mark, style = ("❯ ", view.ACCENT) if number == self._at else ("  ", "$primary")
            lines.append(
                Content.assemble((mark, style), (f"{command.slash:<18} ", style), (command.help, view.DIM))
            )
        self.update(Content("\n").join(lines))
