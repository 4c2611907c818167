"""The prompt before there is an app: drawn at once, while Textual loads, which takes most of a second.

What is typed meanwhile waits in the terminal, with ⏎ and ^j still told apart, and the app reads it first.
"""

import os
import sys
import termios
from types import TracebackType


class FirstFrame:
    """Takes the terminal, draws the prompt, and gives the terminal back as it was."""

    def __init__(self) -> None:
        self._input = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._input)
        self._drawn = False

    def __enter__(self) -> "FirstFrame":
        mode = termios.tcgetattr(self._input)
        mode[0] &= ~(termios.ICRNL | termios.IXON)  # ⏎ stays ⏎, and ^s and ^q stay keys
        mode[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(self._input, termios.TCSANOW, mode)
        size = os.get_terminal_size(sys.stdout.fileno())
        self._write("\x1b[?1049h\x1b[2J" + frame(size.columns, size.lines))
        self._drawn = True
        return self

    def hand_over(self) -> None:
        """The app draws from here on."""
        self._drawn = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn:
            self._write("\x1b[?1049l")
        termios.tcsetattr(self._input, termios.TCSANOW, self._before)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def frame(columns: int, lines: int) -> str:
    """Where the app will draw them: the line above the prompt and its mark; the cursor waits behind it."""
    bottom = lines if columns < 60 or lines < 16 else lines - 1
    rule = "─" * (columns if columns < 96 else columns - 33)
    return f"\x1b[{bottom - 1};1H{rule}\x1b[{bottom};2H❯ "
