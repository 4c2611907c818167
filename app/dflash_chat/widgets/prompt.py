"""Where the reader types."""

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

from dflash_chat.history import History
from dflash_mlx.terminal import printable

NEWLINE = ("ctrl+j", "shift+enter", "alt+enter")


class Prompt(TextArea):
    """A text area that sends with ⏎, and goes through history from its first and last line."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "app.interrupt", show=False)]

    class Sent(Message):
        """The reader pressed ⏎."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class EditLast(Message):
        """↑ on an empty prompt."""

    class Step(Message):
        """↑, ↓ or ⇥ while commands are suggested."""

        def __init__(self, by: int) -> None:
            super().__init__()
            self.by = by

    def __init__(self, history: History) -> None:
        super().__init__(
            soft_wrap=True,
            show_line_numbers=False,
            tab_behavior="focus",
            compact=True,
            highlight_cursor_line=False,
            placeholder="Ask anything · / for commands",
            id="prompt",
        )
        self.earlier = history
        self.suggesting = False
        self._recalled: str | None = None  # the history entry that stands in the prompt

    def fill(self, text: str) -> None:
        """Replace everything, as one step that can be undone, and go to the end."""
        self.replace(printable(text), self.document.start, self.document.end)
        self.move_cursor(self.document.end)

    def put_back(self, text: str) -> None:
        """What was sent could not be taken; it stands before what was typed since."""
        self.fill(text + self.text)

    async def _on_key(self, event: events.Key) -> None:
        if not self._special(event.key):
            return
        event.stop()
        event.prevent_default()

    def _special(self, key: str) -> bool:
        """Do what a key means here and nowhere else; False leaves it to the text area."""
        if key == "enter":
            # Emptied at once: what is typed next must not be taken for a part of this, nor be wiped with it.
            self.post_message(self.Sent(self.text))
            self.fill("")
            return True
        if key in NEWLINE:
            start, end = self.selection
            self.move_cursor(self.replace("\n", start, end).end_location)
            return True
        if self.suggesting and key in ("up", "down", "tab"):
            self.post_message(self.Step({"up": -1, "down": 1, "tab": 0}[key]))
            return True
        if key == "up" and self.navigator.is_first_wrapped_line(self.cursor_location):
            return self._back()
        if key == "down" and self.navigator.is_last_wrapped_line(self.cursor_location):
            return self._forward()
        return False

    def _back(self) -> bool:
        if not self.text and self._recalled is None:
            self.post_message(self.EditLast())
            return True
        return self.recall_earlier()

    def recall_earlier(self) -> bool:
        """One step back in history; False at the oldest."""
        if self._recalled != self.text:
            self.earlier.leave()
        entry = self.earlier.back(self.text)
        if entry is not None:
            self._recalled = entry
            self.fill(entry)
        return entry is not None

    def _forward(self) -> bool:
        if self._recalled != self.text:
            return False
        entry = self.earlier.forward()
        if entry is None:
            return False
        self._recalled = entry
        self.fill(entry)
        return True

    async def _on_paste(self, event: events.Paste) -> None:
        """A paste of many lines is text like any other: it needs ⏎ to be sent."""
        event.stop()
        event.prevent_default()
        text = printable(event.text.replace("\r\n", "\n").replace("\r", "\n"))
        start, end = self.selection
        self.move_cursor(self.replace(text, start, end).end_location)
