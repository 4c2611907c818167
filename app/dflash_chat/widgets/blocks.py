"""Finished pieces of a reply. Each is laid out once and never changes."""

from functools import cache

from markdown_it import MarkdownIt
from pygments.util import ClassNotFound
from textual.app import ComposeResult
from textual.content import Content
from textual.events import Mount
from textual.highlight import highlight
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownFence

from dflash_chat.blocks import TEXT_LIMIT, Block, Code, Prose

SEAM = 30  # lines before a piece of code that its colours depend on
CELLS = 200  # of the tables in one block; each is a widget, and many of them stop the screen for seconds


@cache
def _parser() -> MarkdownIt:
    # What looks like HTML is shown: a reply is no web page, and Textual would drop it.
    return MarkdownIt("gfm-like", {"html": False})


class Fence(MarkdownFence):
    """A fence inside a list or a quote. Without a language it stays plain: a guess is often wrong."""

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        """Textual's, with no language as text."""
        return super().highlight(code, language or "text", ansi, dark)


class ProseBlock(Markdown):
    """Markdown that is complete. Its parts are there from the first frame on, so nothing jumps."""

    BLOCKS = {**Markdown.BLOCKS, "fence": Fence, "code_block": Fence}  # noqa: RUF012

    def __init__(self, block: Prose) -> None:
        classes = "cut" if block.cut else ""
        super().__init__(block.text, parser_factory=_parser, open_links=False, classes=classes)

    def compose(self) -> ComposeResult:
        """The blocks that Textual's own widget would mount later."""
        self._markdown = self._initial_markdown or ""
        self._theme = self.app.theme
        yield from self._build_from_source(self._markdown)

    async def _on_mount(self, event: Mount) -> None:  # type: ignore[override]
        """Keeps Textual's own from parsing once more."""
        event.prevent_default()


class PlainBlock(Static):
    """Markdown as it was written, where it would take too long to lay it out."""

    def __init__(self, block: Prose) -> None:
        super().__init__(Content(block.text.expandtabs(4).strip("\n")), classes="cut" if block.cut else "")
        self.auto_links = False


class CodeBlock(Static):
    """A piece of a fenced block."""

    def __init__(self, block: Code, before: str = "") -> None:
        """`before` is the code above this piece in the same fence."""
        super().__init__(coloured(block, before), classes="ends" if block.ends else "")
        self.auto_links = False


def coloured(block: Code, before: str = "") -> Content:
    """The piece with its syntax coloured, unless a line is so long that colouring stops the screen."""
    code = block.text.expandtabs(4)
    context = "\n".join(before.expandtabs(4).split("\n")[-SEAM:]) + "\n" if before else ""
    if any(len(line) > TEXT_LIMIT for line in (context + code).split("\n")):
        return Content(code)
    try:
        whole = highlight(context + code, language=block.language.lower() or "text")
    except (ClassNotFound, ValueError, AssertionError):
        return Content(code)
    if not before:
        return whole
    lines = whole.split("\n", allow_blank=True)
    return Content("\n").join(lines[-max(1, len(code.splitlines())) :])


def widget(block: Block, before: str = "") -> ProseBlock | PlainBlock | CodeBlock:
    """The widget for a finished block."""
    if isinstance(block, Code):
        return CodeBlock(block, before)
    return PlainBlock(block) if _cells(block.text) > CELLS else ProseBlock(block)


def _cells(text: str) -> int:
    """How many cells the tables of a text have."""
    if "|" not in text:
        return 0
    return sum(token.type in ("th_open", "td_open") for token in _parser().parse(text))
