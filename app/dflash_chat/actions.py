"""What the commands of the table do: a method per command, named like it, that takes the text after it."""

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_chat import commands, figures
from dflash_chat.blocks import code_blocks
from dflash_chat.chat_file import Chat
from dflash_chat.screens.chats import Chats
from dflash_chat.screens.page import Page, help_text, memory_text, stats_text
from dflash_chat.screens.tokens import Tokens
from dflash_chat.store import save
from dflash_mlx.errors import UsageError
from dflash_mlx.terminal import printable

if TYPE_CHECKING:
    from dflash_chat.app import ChatApp

TWICE = 2.0  # seconds within which a key pressed again means more


class Actions:
    """The commands, for one app."""

    def __init__(self, app: "ChatApp") -> None:
        self.app = app
        self._copied = -TWICE

    def run(self, name: str, argument: str = "") -> None:
        """Do a command; what goes wrong is said in the status line."""
        try:
            getattr(self, name)(argument)
        except UsageError as error:
            self.app.say(str(error), bad=True)

    # --- the reply ------------------------------------------------------------------------------

    def stop(self, _: str = "") -> None:
        """Stop the reply, or else leave what is being edited."""
        if self.app.talk.state.live:
            self.app.talk.stop()
            self.app.draw()
        else:
            self.app.cancel_edit()

    def retry(self, _: str = "") -> None:
        """Ask again; an engine of ours that has ended is started first."""
        if self.app.talk.state.last is None:
            raise UsageError("nothing was asked yet")
        self.app.talk.restart()
        self.app.take_back_prompt()
        self.app.talk.retry()
        self.app.follow()

    def edit(self, _: str = "") -> None:
        """Put the last message back into the prompt."""
        if self.app.talk.state.last is None:
            raise UsageError("nothing was asked yet")
        self.app.talk.stop()
        self.app.begin_edit()

    def think(self, level: str) -> None:
        """Choose a level; without one, switch between off and the model's own."""
        state = self.app.talk.state
        levels = state.engine.reasoning_levels
        if not levels:
            raise UsageError(
                "this model has no thinking to switch" if state.engine.ready else "the engine is not ready"
            )
        if level and level not in (*levels, "off", "default"):
            raise UsageError(
                f"/think knows default, off, {', '.join(x for x in levels if x != 'off')}; not {level!r}"
            )
        if not level:
            level = "default" if state.thinking == "off" else "off"
        state.thinking = None if level == "default" else level
        self.app.say("thinking as the model likes" if state.thinking is None else f"thinking: {level}")

    def tokens(self, _: str = "") -> None:
        """Open the tokens view."""
        screen = Tokens(self.app.talk.state.turns)
        if not screen.turns:
            raise UsageError("no reply of this run has tokens to show yet")
        self.app.push_screen(screen)

    # --- chats ----------------------------------------------------------------------------------

    def new(self, _: str = "") -> None:
        """Start a chat of this folder."""
        self.app.open_chat(self.app.new_chat())

    def open(self, name: str) -> None:
        """Open a chat by name, or show them all."""
        if name:
            self._open(self.app.store.find(name))
        else:
            self.app.push_screen(Chats(self.app.store, self.app.talk.chat.path), self._chosen)

    def _chosen(self, path: Path | None) -> None:
        if path is not None and path != self.app.talk.chat.path:
            try:
                self._open(Chat(path, ""))
            except UsageError as error:
                self.app.say(str(error), bad=True)

    def _open(self, chat: Chat) -> None:
        self.app.open_chat(chat, chat.open())

    def rename(self, title: str) -> None:
        """Name the chat."""
        title = " ".join(printable(title).split())
        if not title:
            raise UsageError("/rename needs a title")
        self.app.talk.chat.title(title)
        self.app.talk.state.title = title
        self.app.say(f"named: {title}")

    def delete(self, _: str = "") -> None:
        """Delete the open chat, start a new one."""
        old = self.app.talk.chat
        self.app.talk.stop()
        where = old.delete()
        self.app.open_chat(self.app.new_chat())
        self.app.say(f"moved to {where}" if where else "this chat had not been saved")

    def save(self, name: str) -> None:
        """Write the conversation."""
        if not name:
            raise UsageError("/save needs a file name, such as /save chat.md")
        self.app.say(f"written to {save(name, self.app.talk.state)}")

    # --- copying --------------------------------------------------------------------------------

    def copy(self, number: str) -> None:
        """The last reply, or one of its code blocks."""
        text = self._last_reply()
        if number:
            found = code_blocks(text)
            if not number.isdigit() or not 1 <= int(number) <= len(found):
                raise UsageError(
                    f"the last reply has {figures.plural(len(found), 'code block')}, not {number!r}"
                )
            text = found[int(number) - 1]
        self.app.copy_to_clipboard(text)

    def copy_code(self, _: str = "") -> None:
        """The last code block; again at once, or without one, the whole reply."""
        text, now = self._last_reply(), self.app.now()
        found = code_blocks(text)
        again, self._copied = now - self._copied < TWICE, now
        self.app.copy_to_clipboard(
            text if again or not found else found[-1], "the reply" if again or not found else "the code"
        )

    def _last_reply(self) -> str:
        texts = [turn.reply.text for turn in self.app.talk.state.turns if turn.reply.text]
        if not texts:
            raise UsageError("there is no reply to copy yet")
        return printable(texts[-1])

    # --- settings -------------------------------------------------------------------------------

    def system(self, text: str) -> None:
        """Show, set or remove the system message."""
        state = self.app.talk.state
        if not text:
            self.app.say(
                f"system message: {figures.shorten(printable(state.system), 200)}"
                if state.system
                else "no system message"
            )
            return
        state.system = "" if text == "none" else text
        self.app.talk.chat.system(state.system)
        self.app.say(
            "system message set; it counts from the next message on"
            if state.system
            else "system message removed"
        )

    def set(self, argument: str) -> None:
        """Set a sampling option, or show them."""
        options = self.app.talk.state.options
        if argument:
            try:
                name, value = commands.option(argument)
            except ValueError as error:
                raise UsageError(str(error)) from None
            if value is None:
                options.pop(name, None)
            else:
                options[name] = value
        shown = ", ".join(f"{name} {value:g}" for name, value in options.items())
        self.app.say(f"set: {shown}" if shown else "everything as the model's makers set it")

    # --- the screen -----------------------------------------------------------------------------

    def panel(self, _: str = "") -> None:
        """Show or hide the side panel."""
        self.app.toggle_panel()

    def end(self, _: str = "") -> None:
        """Go to the end."""
        self.app.follow()

    def palette(self, _: str = "") -> None:
        """Open the palette."""
        self.app.action_command_palette()

    def stats(self, _: str = "") -> None:
        """Open the statistics."""
        self.app.push_screen(Page("statistics", lambda: stats_text(self.app.talk.state)))

    def memory(self, _: str = "") -> None:
        """Open the engine's memory."""
        self.app.push_screen(Page("engine", lambda: memory_text(self.app.talk.state.engine)))

    def help(self, _: str = "") -> None:
        """Open the help."""
        self.app.push_screen(Page("keys and commands", help_text))

    def restart(self, _: str = "") -> None:
        """Start the engine again."""
        if self.app.talk.process is None:
            raise UsageError("this engine was not started here; start it where it runs")
        if not self.app.talk.engine_ended:
            raise UsageError("the engine is running")
        self.app.talk.restart()
        self.app.say("starting the engine again")

    def quit(self, _: str = "") -> None:
        """Quit."""
        self.app.exit()
