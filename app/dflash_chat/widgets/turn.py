"""One turn: what the reader said, and the reply as it grows."""

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Static

from dflash_chat import figures
from dflash_chat.blocks import TEXT_LIMIT, Block, Code, Splitter
from dflash_chat.state import Turn
from dflash_chat.widgets import blocks, view
from dflash_mlx.terminal import printable

PROMPT_LINES = 12  # of a long message; the rest is in the file
LIVE_THINKING = 4000  # characters of unfolded thinking that are shown while it grows
NO_TEXT = Content()


class Thinking(Static, can_focus=True):
    """The reply's thinking, folded into one line until asked for."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "fold", show=False)]

    def __init__(self, turn: Turn) -> None:
        super().__init__(classes="thinking")
        self.turn = turn
        self.folded = True

    def action_fold(self) -> None:
        """Unfold or fold."""
        self.folded = not self.folded
        self.show(self.app.now())  # type: ignore[attr-defined]

    def on_click(self, event: events.Click) -> None:
        """The same by mouse."""
        event.stop()
        self.action_fold()

    def show(self, now: float) -> None:
        """Draw it as it stands."""
        view.show(self, view.thinking(self.turn.reply, now, folded=self.folded), layout=True)


class TurnView(Vertical):
    """Shows one turn. `refresh_reply` adds what came since the last call."""

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self.turn = turn
        self._splitter = Splitter()
        self._shown = 0  # characters of the reply that the splitter has seen
        self._code = ""  # what is shown of the fence that is open
        self._thinking = Thinking(turn)
        self._tail = Static(classes="tail")
        self._summary = Static(classes="summary")
        self._complete = False

    def compose(self) -> ComposeResult:
        with Horizontal(classes="asked"):
            yield Static("❯", classes="mark")
            yield Static(_shortened(self.turn.prompt), classes="prompt-text")
        yield self._thinking
        yield self._tail
        yield self._summary

    def on_mount(self) -> None:
        """Show what is there already."""
        self.refresh_reply(self.app.now())  # type: ignore[attr-defined]

    def refresh_reply(self, now: float) -> None:
        """Bring the screen up to the state."""
        if self._complete:
            return
        reply = self.turn.reply
        self._thinking.display = bool(reply.reasoning)
        if reply.reasoning and (
            self._thinking.folded or len(reply.reasoning) < LIVE_THINKING or not reply.live
        ):
            self._thinking.show(now)
        new = printable(reply.text[self._shown :])
        self._shown = len(reply.text)
        finished = self._splitter.add(new) if new else []
        if not reply.live:
            finished += self._splitter.finish()
            self._complete = True
        if finished:
            self.mount_all([self._block(block) for block in finished], before=self._tail)
        if new or finished or self._complete:
            self._show_tail()
        self._summary.display = self._complete
        if self._complete:
            self._summary.update(view.summary(reply))

    def _block(self, block: Block) -> Static | blocks.ProseBlock:
        if not isinstance(block, Code):
            self._code = ""
            return blocks.widget(block)
        before = "" if block.begins else self._code
        self._code = f"{before}\n{block.text}" if before else block.text
        return blocks.widget(block, before)

    def _show_tail(self) -> None:
        tail = None if self._complete else self._splitter.tail
        self._tail.display = tail is not None
        self._tail.set_class(isinstance(tail, Code), "code")
        match tail:
            case Code() if len(tail.text) <= TEXT_LIMIT:
                self._tail.update(blocks.coloured(tail))
            case None:
                self._tail.update(NO_TEXT)
            case _:
                self._tail.update(Content(tail.text.strip("\n")[-TEXT_LIMIT:]))


def _shortened(prompt: str) -> Content:
    text = printable(prompt).strip("\n")
    lines = text.split("\n")
    if len(lines) <= PROMPT_LINES and len(text) <= 100 * PROMPT_LINES:
        return Content(text)
    shown = "\n".join(lines[: PROMPT_LINES - 2])[: 100 * PROMPT_LINES]
    return Content.assemble(shown, (f"\n… {figures.spaced(len(prompt))} characters in all", view.DIM))
