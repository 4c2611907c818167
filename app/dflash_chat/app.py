"""The terminal app: puts state, widgets and commands together. The pump redraws; nothing else does."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.theme import Theme
from textual.widgets import Markdown, Static, TextArea

from dflash_chat import clipboard, commands
from dflash_chat.actions import TWICE, Actions
from dflash_chat.chat_file import Chat, Saved
from dflash_chat.conversation import Conversation
from dflash_chat.engine import Engine
from dflash_chat.history import History
from dflash_chat.palette import Commands
from dflash_chat.screens.link import Link
from dflash_chat.store import Store
from dflash_chat.widgets import view
from dflash_chat.widgets.prompt import Prompt
from dflash_chat.widgets.suggestions import Suggestions
from dflash_chat.widgets.transcript import Transcript
from dflash_mlx.terminal import printable

PUMP = 1 / 10  # seconds between redraws
PANEL_EVERY = 4  # redraws; numbers that change faster cannot be read
SHARE = 0.2  # of a core, for drawing a reply that streams
SLOWEST = 0.5  # seconds between redraws on a machine that is too busy for more
HINTS = view.hints()
SAID = 5.0  # seconds that a message stays in the status line

THEME = Theme(
    name="dflash",
    primary="#7fd1c2",
    secondary="#8fb3f5",
    accent="#c9a7f5",
    warning="#e3b866",
    error="#ef7d84",
    success="#93cf8f",
    foreground="#d9dce3",
    background="#0f1218",
    surface="#151922",
    panel="#1b202b",
)


class ChatApp(App[None]):
    """One chat on the screen.

    Args:
        store: all chats.
        chat: the chat to open; `saved` is what it holds already.
        url: the engine's address.
        process: the engine, if it is our child.
        temporary: keep nothing.
        clock: seconds; tests bring their own.
    """

    TITLE = "dflash-chat"
    CSS_PATH = "chat.tcss"
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {Commands}
    COMMAND_PALETTE_BINDING = "ctrl+p"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-medium"), (96, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (16, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(each.key, f"command('{each.name}')", each.help, show=False, priority=each.key != "escape")
            for each in commands.COMMANDS
            if each.key
        ),
        Binding("ctrl+c", "interrupt", show=False),
        Binding("pageup", "page(-1)", show=False, priority=True),
        Binding("pagedown", "page(1)", show=False, priority=True),
    ]

    def __init__(
        self,
        store: Store,
        chat: Chat,
        url: str,
        process: Engine | None = None,
        *,
        saved: Saved | None = None,
        temporary: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.store = store
        self.now = clock
        self.talk = Conversation(chat, url, process, saved, clock)
        self.actions = Actions(self)
        self._temporary = temporary
        self._folder = chat.folder or str(Path.cwd())
        self._said: tuple[float, Content] | None = None
        self._editing: int | None = None  # the turn that ⏎ will ask again
        self._interrupted = -TWICE
        self._frames = 0
        self._drawn = (0.0, 0.0)  # wall and processor time of the last redraw
        self.header = Static(id="header")
        self.transcript = Transcript(self.talk.state)
        self.suggestions = Suggestions()
        self.status = Static(id="status")
        self.prompt = Prompt(History(self._earlier))
        self.panel = Static(id="panel")
        self.hints = Static(id="hints")
        self.register_theme(THEME)
        self.theme = "dflash"

    def compose(self) -> ComposeResult:
        yield self.header
        with Horizontal(id="body"):
            with Vertical(id="main"):
                yield self.transcript
                yield self.suggestions
                yield self.status
                with Horizontal(id="ask"):
                    yield Static("❯", classes="mark")
                    yield self.prompt
            yield self.panel
        yield self.hints

    def on_mount(self) -> None:
        """Begin to watch the engine and to draw."""
        self.prompt.focus()
        self.talk.start()
        self.draw()
        self.set_interval(PUMP, self.pump)

    async def on_unmount(self) -> None:
        """The file is complete before the terminal is given back."""
        await self.talk.close()

    # --- drawing --------------------------------------------------------------------------------

    def pump(self) -> None:
        """Apply what has arrived, give back a prompt that got no answer, say what went wrong, redraw."""
        self.talk.pump()
        if self.talk.returned is not None:
            self.take_back_prompt()
        if trouble := self.talk.new_trouble():
            self.say(trouble, bad=True)
        if not self.talk.state.live:
            self.draw()
        elif self._affordable():
            self._frames += 1
            self.draw(panel=self._frames % PANEL_EVERY == 0)

    def _affordable(self) -> bool:
        """Whether drawing keeps to its share of a core: the engine may need the cores more than the eye."""
        wall, cpu = time.monotonic(), time.process_time()
        since, used = wall - self._drawn[0], cpu - self._drawn[1]
        if used > SHARE * since and since < SLOWEST:
            return False
        self._drawn = wall, cpu
        return True

    def draw(self, *, panel: bool = True) -> None:
        """Show the state as it is now; lines that did not change cost nothing."""
        if len(self.screen_stack) > 1:
            return  # behind an open window nothing moves: to blend it anew costs more than all the rest
        now, state = self.now(), self.talk.state
        self.transcript.sync(now)
        view.show(self.header, view.header(state, self.size.width))
        self._show_status(now)
        if panel and self.panel.display:
            view.show(self.panel, view.panel(state, now))
        view.show(self.hints, HINTS)

    def _show_status(self, now: float) -> None:
        # A line that changes ten times a second keeps its one row; a message may take what it needs.
        message = not self.talk.state.live or self._says(now)
        self.status.set_class(message, "message")
        view.show(self.status, self._status(now), layout=message)

    def _says(self, now: float) -> bool:
        return self._said is not None and now < self._said[0]

    def _status(self, now: float) -> Content:
        state = self.talk.state
        parts: list[Content | tuple[str, str]]
        if self._said is not None and self._says(now):
            parts = [self._said[1]]
        elif state.live and state.reply is not None:
            numbers = not self.panel.display
            parts = [view.live_line(state, state.reply, now, numbers=numbers), ("   esc stops", view.DIM)]
        elif self._editing is not None:
            parts = [("editing · ⏎ asks again from here · esc leaves it as it was", view.DIM)]
        else:
            parts = [view.engine_line(state, now)]
        if not self.transcript.following:
            parts.append(("   ↓ more below · ^l", "$warning"))
        return Content.assemble(*parts)

    def say(self, text: str, *, bad: bool = False) -> None:
        """A message for the status line."""
        text = view.safe(text)
        line = Content.assemble(("✗ ", view.BAD), text) if bad else Content(text)
        self._said = (self.now() + SAID, line)
        self._show_status(self.now())

    def toggle_panel(self) -> None:
        """Show or hide the panel; from then on the window's width no longer decides."""
        shown = not self.panel.display
        self.panel.set_class(shown, "shown")
        self.panel.set_class(not shown, "hidden")

    def follow(self) -> None:
        """Show the end, and everything that comes."""
        self.transcript.follow()
        self.draw()

    # --- asking ---------------------------------------------------------------------------------

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        """⏎: a command, or a message."""
        text = event.text
        chosen = self.suggestions.chosen
        if (command := commands.typed(text)) is not None:
            self._typed(text, *command, chosen)
        elif not text.strip():
            return
        elif self.talk.state.live:
            self.prompt.put_back(text)
            self.say("still answering: esc stops it, then ⏎ sends")
        else:
            self._ask(text)

    def _ask(self, text: str) -> None:
        editing, self._editing = self._editing, None
        self.transcript.mark_edited(None)
        self.prompt.earlier.add(text)
        self._said = None
        if editing is None:
            self.talk.send(text)
        else:
            self.talk.resend(editing, text)
        self.follow()

    def _typed(self, text: str, name: str, argument: str, chosen: commands.Command | None) -> None:
        command = commands.SLASH.get(name) or (chosen if not argument else None)
        if command is None:
            self.prompt.put_back(text)
            self.say(f"there is no command /{name}: / lists them", bad=True)
        elif command.needs_argument and not argument:
            self.prompt.put_back(f"/{command.name} ")
            self.say(f"{command.slash}: {command.help}")
        else:
            self.actions.run(command.name, argument)

    def choose(self, command: commands.Command) -> None:
        """Do a command of the palette, or let the reader type its argument."""
        if command.needs_argument:
            self.prompt.fill(f"/{command.name} ")
            self.prompt.focus()
        else:
            self.actions.run(command.name)

    def begin_edit(self) -> None:
        """The last message is in the prompt; ⏎ asks it again."""
        turns = self.talk.state.turns
        self._editing = len(turns) - 1
        self.prompt.fill(turns[-1].prompt)
        self.transcript.mark_edited(turns[-1])
        self.draw()

    def cancel_edit(self) -> None:
        """Leave the last message as it was."""
        if self._editing is not None:
            self._editing = None
            self.prompt.fill("")
            self.transcript.mark_edited(None)

    def take_back_prompt(self) -> None:
        """A prompt that got no answer returns to the input, if nothing else stands there."""
        returned, self.talk.returned = self.talk.returned, None
        if returned is not None and not self.prompt.text:
            self.prompt.fill(returned)

    def on_prompt_edit_last(self) -> None:
        """↑ on an empty prompt: the last message; in a new chat, those of earlier chats."""
        if self.talk.state.turns:
            self.actions.edit()
        else:
            self.prompt.recall_earlier()

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        """Suggest commands while one is being typed."""
        self.suggestions.offer(commands.suggestions(event.text_area.text))
        self.prompt.suggesting = self.suggestions.display

    def on_prompt_step(self, event: Prompt.Step) -> None:
        """Through the suggestions, or take one."""
        chosen = self.suggestions.chosen
        if event.by:
            self.suggestions.move(event.by)
        elif chosen is not None:
            self.prompt.fill(f"/{chosen.name}" + (" " if chosen.usage else ""))

    # --- chats ----------------------------------------------------------------------------------

    def new_chat(self) -> Chat:
        """A chat of this folder that is not yet a file."""
        return Chat(None, self._folder) if self._temporary else self.store.new(self._folder)

    def open_chat(self, chat: Chat, saved: Saved | None = None) -> None:
        """Show another chat."""
        self.cancel_edit()
        self.talk.switch(chat, saved)
        self.transcript.reload()
        self.draw()

    def _earlier(self) -> list[str]:
        asked = [turn.prompt for turn in self.talk.state.turns]
        return [*self.store.prompts(self._folder), *asked]

    # --- keys -----------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Over an open window the window's own keys count, and ^q."""
        ours = action in ("command", "page") and parameters != ("quit",)
        return not (ours and len(self.screen_stack) > 1)

    def action_command(self, name: str) -> None:
        """A key of the table."""
        self.actions.run(name)

    def action_page(self, by: int) -> None:
        """Scroll by most of a screen."""
        if not self.transcript.max_scroll_y:
            return
        self.transcript.scroll_relative(y=by * max(1, self.transcript.size.height - 2), animate=False)

    def action_interrupt(self) -> None:
        """^c: copy a selection, else stop a reply, else quit when pressed twice."""
        selected = self.prompt.selected_text or self.screen.get_selected_text()
        if selected:
            self.copy_to_clipboard(selected)
            self.screen.clear_selection()
        elif self.talk.state.live:
            self.actions.stop()
        elif self.now() - self._interrupted < TWICE:
            self.exit()
        else:
            self._interrupted = self.now()
            self.say("^c again quits")

    def copy_to_clipboard(self, text: str, what: str = "") -> None:
        """Copy by the ways that work here, and say which did."""
        self._clipboard = text
        write = self._driver.write if self._driver is not None and not self.is_headless else None
        how = clipboard.copy(printable(text), write, self.store.folder.parent)
        self.say(f"{what}: {how}" if what else how)

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """A link shows its address first."""
        event.stop()

        def done(choice: str | None) -> None:
            if choice == "open":
                self.open_url(event.href)
            elif choice == "copy":
                self.copy_to_clipboard(event.href)

        self.push_screen(Link(event.href), done)

    def on_resize(self, event: events.Resize) -> None:
        """The header is laid out by hand."""
        self.call_after_refresh(self.draw)
