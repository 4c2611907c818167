"""All chats: type to find one, ⏎ continues it, del twice deletes it."""

import time
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from dflash_chat import figures
from dflash_chat.chat_file import discard
from dflash_chat.store import Store, Summary
from dflash_chat.widgets import view
from dflash_mlx.errors import UsageError


class Chats(ModalScreen[Path | None]):
    """Returns the file of the chat to continue.

    Args:
        store: where the chats are.
        current: the file of the open chat, which is not offered for deletion.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", show=False),
        Binding("up", "move(-1)", show=False, priority=True),
        Binding("down", "move(1)", show=False, priority=True),
        Binding("delete", "delete", show=False, priority=True),
    ]

    def __init__(self, store: Store, current: Path | None) -> None:
        super().__init__()
        self._store = store
        self._current = current
        self._all: list[Summary] = []
        self._shown: list[Summary] = []
        self._doomed: Path | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Static(Content.styled("chats", view.ACCENT), classes="title")
            yield Input(placeholder="type to find", id="filter")
            yield OptionList(id="list", markup=False)
            yield Static(id="foot", classes="foot")

    def on_mount(self) -> None:
        """Read the list."""
        self.query_one("#list").can_focus = False
        self._all = list(self._store.all())
        self._show("")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Narrow the list down."""
        self._show(event.value)

    def on_input_submitted(self) -> None:
        """Continue the chat under the cursor."""
        self._close(self._options.highlighted)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """The same by mouse."""
        self._close(event.option_index)

    def action_move(self, by: int) -> None:
        """Up or down."""
        self._doomed = None
        if self._shown:
            self._options.highlighted = ((self._options.highlighted or 0) + by) % len(self._shown)
        self._foot()

    def action_delete(self) -> None:
        """Ask, then delete."""
        at = self._options.highlighted
        if at is None or not self._shown:
            return
        path = self._shown[at].path
        if path == self._current:
            self._foot("this chat is open; /delete deletes it")
        elif self._doomed != path:
            self._doomed = path
            self._foot("del again deletes this chat")
        else:
            self._doomed = None
            try:
                said = f"moved to {discard(path).parent}"
            except UsageError as error:
                said = str(error)
            self._all = [each for each in self._all if each.path.exists()]  # another window may delete, too
            self._show(self.query_one(Input).value)
            self._foot(view.safe(said))

    @property
    def _options(self) -> OptionList:
        return self.query_one("#list", OptionList)

    def _close(self, at: int | None) -> None:
        if at is not None and at < len(self._shown):
            self.dismiss(self._shown[at].path)

    def _show(self, wanted: str) -> None:
        words = wanted.lower().split()
        self._shown = [each for each in self._all if all(word in _text(each).lower() for word in words)]
        now, home = time.time(), str(Path.home())
        self._options.clear_options()
        self._options.add_options([Option(_line(each, now, home, self._current)) for each in self._shown])
        if self._shown:
            self._options.highlighted = 0
        self._foot()

    def _foot(self, text: str = "") -> None:
        keys = "⏎ continue · ↑↓ · del delete · esc" if self._shown else "no chat found · esc"
        self.query_one("#foot", Static).update(Content.styled(text or keys, view.DIM))


def _text(each: Summary) -> str:
    return f"{each.title} {each.folder} {each.id}"


def _line(each: Summary, now: float, home: str, current: Path | None) -> Content:
    title = figures.shorten(view.safe(each.title), 60) or "(empty)"
    folder = view.safe(each.folder.replace(home, "~", 1))
    mark = "● " if each.path == current else "  "
    facts = f"{figures.ago(now - each.time)} · {figures.plural(each.turns, 'turn')} · {folder}"
    return Content.assemble((mark, "$primary"), title, "\n  ", (figures.shorten(facts, 70), view.DIM))
