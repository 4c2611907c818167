"""A page of text over the conversation: help, statistics, memory."""

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from dflash_chat import figures
from dflash_chat.commands import rows
from dflash_chat.state import ChatState, Engine
from dflash_chat.widgets import view


class Page(ModalScreen[None]):
    """Text that scrolls, until a key closes it.

    Args:
        title: above the text.
        text: asked for again each second, so that numbers stay true.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,f1", "dismiss", show=False),
        Binding("up,k", "scroll(-1)", show=False),
        Binding("down,j", "scroll(1)", show=False),
        Binding("pageup", "scroll(-10)", show=False),
        Binding("pagedown,space", "scroll(10)", show=False),
    ]

    def __init__(self, title: str, text: Callable[[], Content]) -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Static(
                Content.assemble((self._title, view.ACCENT), ("   esc closes", view.DIM)), classes="title"
            )
            with VerticalScroll(can_focus=False):
                yield Static(self._text(), id="text")

    def on_mount(self) -> None:
        """Keep the numbers fresh."""
        self.set_interval(1, lambda: view.show(self.query_one("#text", Static), self._text(), layout=True))

    def action_scroll(self, by: int) -> None:
        """Move by lines."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)


def help_text() -> Content:
    """Every key and command, from the table."""
    table = list(rows())
    keys = max(len(key) for key, _, _ in table)
    names = max(len(name) for _, name, _ in table)
    lines = [
        Content.assemble((f"{key:<{keys}}  ", view.STRONG), (f"{name:<{names}}  ", "$primary"), help)
        for key, name, help in table
    ]
    return Content("\n").join(lines)


def stats_text(state: ChatState) -> Content:
    """All turns of the chat that have numbers."""
    replies = [turn.reply for turn in state.turns if turn.reply.tokens]
    if not replies:
        return Content("No reply yet.")
    lines = [Content.styled(f"{'turn':>5} {'prompt':>9} {'reply':>9} {'tok/s':>8} {'accepted':>9}", view.DIM)]
    for number, turn in enumerate(state.turns, 1):
        reply = turn.reply
        if reply.tokens:
            speed = figures.speed(reply.speed) if reply.speed else "–"
            accepted = f"{reply.accepted:.2f}" if reply.accepted is not None else "–"
            counts = f"{figures.spaced(reply.prompt_tokens):>9} {figures.spaced(reply.tokens):>9}"
            lines.append(Content(f"{number:>5} {counts} {speed:>8} {accepted:>9}"))
    tokens = sum(reply.tokens for reply in replies)
    spent = sum(reply.decode_seconds for reply in replies)
    cycles = sum(reply.histogram.total() for reply in replies)
    drawn = sum(size * n for reply in replies for size, n in reply.histogram.items())
    total = f"{figures.plural(tokens, 'token')} in {figures.seconds(spent)}"
    if cycles:
        total += f" · {figures.plural(cycles, 'verify cycle')} · {drawn / cycles:.2f} accepted per block"
    return Content("\n").join([*lines, Content(""), Content(total)])


def memory_text(engine: Engine) -> Content:
    """What /health says about memory, and about the pair."""
    if not engine.ready:
        return Content("The engine is not ready.")
    rows = [
        ("target", view.safe(engine.model)),
        ("drafter", view.safe(engine.drafter) or "none"),
        ("in use", figures.size(engine.memory)),
        ("at most", figures.size(engine.memory_peak)),
        ("machine", figures.size(engine.memory_total) if engine.memory_total else "unknown"),
        ("block", f"{engine.block_size} rows"),
        ("text", view.safe(engine.exactness) or "unknown"),
        *(("note", view.safe(note)) for note in engine.notes),
    ]
    return Content("\n").join(Content.assemble((f"{name:<10}", view.DIM), value) for name, value in rows)
