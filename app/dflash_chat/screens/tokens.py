"""Where each token of a reply came from: drafted, copied from the context, or the target's own."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from dflash_chat import figures
from dflash_chat.state import Reply, Turn
from dflash_chat.widgets import view
from dflash_chat.wire import Cycle, Token
from dflash_mlx.terminal import printable

DRAFTED = "bold $primary"
COPIED = "$primary"
OWN = "underline"
REJECTED = "dim strike"
PIECE = 100  # cycles in one widget; only the last of them changes while the reply grows


class Tokens(ModalScreen[None]):
    """The reply as coloured text, and its verify cycles one by one; both grow with the reply."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,ctrl+g", "dismiss", show=False),
        Binding("r", "rejected", show=False),
        Binding("c,tab", "cycles", show=False, priority=True),
        Binding("left", "turn(-1)", show=False),
        Binding("right", "turn(1)", show=False),
        Binding("up", "scroll(-1)", show=False),
        Binding("down", "scroll(1)", show=False),
        Binding("pageup", "scroll(-10)", show=False),
        Binding("pagedown,space", "scroll(10)", show=False),
    ]

    def __init__(self, turns: Sequence[Turn]) -> None:
        super().__init__()
        self.turns = [turn for turn in turns if turn.reply.first_tokens or turn.reply.cycles]
        self._at = len(self.turns) - 1
        self._rejected = False
        self._cycles = False
        self._drawn = 0  # cycles that are on the screen
        self._pieces: list[tuple[Static, Static]] = []

    def compose(self) -> ComposeResult:
        yield Static(id="tokens-head")
        with Horizontal():
            yield VerticalScroll(id="tokens-text", can_focus=False)
            yield VerticalScroll(id="tokens-cycles", can_focus=False)
        yield Static(id="tokens-foot")

    def on_mount(self) -> None:
        """Draw, and follow a reply that is on its way."""
        for column in self.query(VerticalScroll):
            column.anchor()
        self._redraw()
        self.set_interval(0.25, self._grow)

    @property
    def reply(self) -> Reply:
        """The reply that is shown."""
        return self.turns[self._at].reply

    def action_rejected(self) -> None:
        """Show or hide the drafts that were not kept."""
        self._rejected = not self._rejected
        self._redraw()

    def action_cycles(self) -> None:
        """On a narrow screen: text or cycles."""
        self._cycles = not self._cycles
        self.set_class(self._cycles, "cycles")

    def action_turn(self, by: int) -> None:
        """Another reply."""
        self._at = max(0, min(len(self.turns) - 1, self._at + by))
        self._redraw()

    def action_scroll(self, by: int) -> None:
        """Move both columns by lines."""
        for column in self.query(VerticalScroll):
            column.scroll_relative(y=by, animate=False)

    def _redraw(self) -> None:
        for pair in self._pieces:
            for each in pair:
                each.remove()
        self._pieces, self._drawn = [], -1
        self._grow()

    def _grow(self) -> None:
        """Add what came since the last call."""
        reply = self.reply
        if self._drawn == len(reply.cycles):
            return
        first = max(0, len(self._pieces) - 1)
        for piece in range(first, max(1, -(-len(reply.cycles) // PIECE))):
            if piece == len(self._pieces):
                pair = Static(classes="piece"), Static()
                self._pieces.append(pair)
                self.query_one("#tokens-text").mount(pair[0])
                self.query_one("#tokens-cycles").mount(pair[1])
            low = piece * PIECE
            some = reply.cycles[low : low + PIECE]
            tokens = reply.first_tokens if piece == 0 else ()
            self._pieces[piece][0].update(flowing(tokens, some, rejected=self._rejected))
            self._pieces[piece][1].update(listed(some, low, rejected=self._rejected))
        self._drawn = len(reply.cycles)
        self.query_one("#tokens-head", Static).update(self._head())
        self.query_one("#tokens-foot", Static).update(self._foot())

    def _head(self) -> Content:
        reply = self.reply
        drafted = sum(cycle.drafted for cycle in reply.cycles)
        kept, copied = _kept(reply.cycles, copied=False), _kept(reply.cycles, copied=True)
        own = reply.tokens - kept - copied
        parts: list[str | tuple[str, str]] = [
            ("tokens", view.ACCENT),
            (f"  reply {self._at + 1} of {len(self.turns)}   ", view.DIM),
            ("drafted", DRAFTED),
            f" {figures.spaced(kept)}   ",
            ("copied", COPIED),
            f" {figures.spaced(copied)}   ",
            ("the target's", OWN),
            f" {figures.spaced(max(0, own))}   ",
            ("rejected", REJECTED),
            f" {figures.spaced(max(0, drafted - sum(cycle.accepted for cycle in reply.cycles)))}",
        ]
        return Content.assemble(*parts)

    def _foot(self) -> Content:
        accepted = self.reply.accepted
        tau = f"{accepted:.2f} tokens per verify cycle · " if accepted is not None else ""
        shown = "hides" if self._rejected else "shows"
        return Content.styled(f"{tau}r {shown} rejected · c cycles · ←→ replies · ↑↓ · esc", view.DIM)


def _kept(cycles: Sequence[Cycle], *, copied: bool) -> int:
    """Drafts of one origin that the target kept."""
    return sum(token.drafted for cycle in cycles if cycle.copied == copied for token in cycle.tokens)


def flowing(first: Sequence[Token], cycles: Sequence[Cycle], *, rejected: bool) -> Content:
    """The reply's text, each token in the style of its origin."""
    return Content.assemble(*_flow(first, cycles, rejected))


def _flow(first: Sequence[Token], cycles: Sequence[Cycle], rejected: bool) -> Iterator[tuple[str, str]]:
    for token in first:
        yield printable(token.text), OWN
    for cycle in cycles:
        for token in cycle.tokens:
            if not token.drafted and rejected:
                yield from _struck(cycle)
            yield printable(token.text), _style(token, cycle)


def _style(token: Token, cycle: Cycle) -> str:
    if not token.drafted:
        return OWN
    return COPIED if cycle.copied else DRAFTED


def _struck(cycle: Cycle) -> Iterator[tuple[str, str]]:
    for text in cycle.rejected:
        yield visible(text), REJECTED


def visible(text: str) -> str:
    """A token on one line: its newlines and tabs as signs."""
    return printable(text).replace("\n", "⏎").replace("\t", "⇥")


def listed(cycles: Sequence[Cycle], start: int, *, rejected: bool) -> Content:
    """A line for every cycle: what was drafted, kept and added, and the tokens themselves."""
    lines = []
    for number, cycle in enumerate(cycles, start + 1):
        drafts = f"{'copied' if cycle.copied else 'drafted'} {cycle.drafted}"
        drafted = f"{drafts} · kept {cycle.accepted} · +1 from the target"
        if not cycle.drafted:
            drafted = "not drafted · 1 from the target"
        parts: list[tuple[str, str]] = [(f"{number:>4} {drafted}", view.DIM), ("\n     ", "")]
        for token in cycle.tokens:
            if not token.drafted and rejected:
                parts += _struck(cycle)
            parts.append((visible(token.text), _style(token, cycle)))
        lines.append(Content.assemble(*parts))
    return Content("\n").join(lines)
