"""Where code is in a growing Markdown text. Knows nothing else of Markdown."""

import re

_PIECES = re.compile(r"`+|\n|[^`\n]+")
_OPEN = re.compile(r"[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*(`{3,}|~{3,})")
_CLOSE = re.compile(r"[ \t>]*(`{3,}|~{3,})\s*")
_HEAD = 200  # characters of a line among which its fence must be


class Code:
    """Follows a text and says whether what comes next is code.

    A fence counts at any depth of lists and quotes; one that nothing closes goes on to the end. A span of
    inline code ends with its line.
    """

    def __init__(self) -> None:
        self._fence = ""  # what opened the block that we are in
        self._head = ""  # the beginning of this line
        self._runs = 0  # of backticks in this line
        self._run = 0  # backticks at the end of the text, which may become more
        self._span = 0  # backticks that opened the span that we are in

    def add(self, text: str) -> None:
        """Take in what comes next."""
        for piece in _PIECES.findall(text):
            if piece[0] == "`":
                self._runs += not self._run
                self._run += len(piece)
            else:
                self._span, self._run = self.span, 0
            if piece == "\n":
                self._end_line()
            else:
                self._head += piece[: _HEAD - len(self._head)]

    @property
    def fenced(self) -> bool:
        """Inside a fenced block, or on the line that seems to open one."""
        return bool(self._fence or self._opening())

    @property
    def span(self) -> int:
        """Backticks that opened a span of this line and will close it, if as many follow in it; else 0."""
        if not self._run or self._run == self._span:
            return 0 if self._run else self._span
        return self._span or self._run

    def _opening(self) -> str:
        """What opens a fenced block with this line, if it goes on as it began."""
        found = _OPEN.match(self._head)
        # A fence of backticks is followed by no others, or it is inline code.
        return found[1] if found and (found[1][0] == "~" or self._runs == 1) else ""

    def _end_line(self) -> None:
        if not self._fence:
            self._fence = self._opening()
        elif (found := _CLOSE.fullmatch(self._head)) and found[1].startswith(self._fence):
            self._fence = ""
        self._head, self._runs, self._span = "", 0, 0
