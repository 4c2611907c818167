"""A link shows where it leads before anything opens."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from dflash_chat.widgets import view

OPENABLE = ("http://", "https://", "mailto:")


class Link(ModalScreen[str | None]):
    """Returns "open", "copy" or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,o", "close('open')", show=False),
        Binding("c", "close('copy')", show=False),
        Binding("escape,q", "dismiss", show=False),
    ]

    def __init__(self, href: str) -> None:
        super().__init__()
        self.href = href

    def compose(self) -> ComposeResult:
        keys = "⏎ opens it in the browser · " if self.href.startswith(OPENABLE) else ""
        with Vertical(classes="window small"):
            yield Static(Content.styled("This link leads to", view.ACCENT), classes="title")
            yield Static(Content(view.safe(self.href)))
            yield Static(Content.styled(f"{keys}c copies it · esc", view.DIM), classes="foot")

    def action_close(self, choice: str) -> None:
        """End with this choice, unless it is to open what no browser should."""
        if choice == "copy" or self.href.startswith(OPENABLE):
            self.dismiss(choice)
