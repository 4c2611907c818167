"""The chat line by line, for pipes, dumb terminals and screen readers. One summary line per turn."""

import asyncio
import contextlib
import io
import signal
import sys
import threading
from typing import TextIO

from dflash_chat import commands, figures
from dflash_chat.chat_file import Chat, Saved
from dflash_chat.conversation import Conversation
from dflash_chat.engine import Engine
from dflash_chat.state import Reply
from dflash_chat.store import save
from dflash_mlx.errors import UsageError
from dflash_mlx.terminal import printable

TICK = 0.05
HERE = ("retry", "system", "set", "think", "save", "help", "quit")  # the commands that need no screen


def run(chat: Chat, saved: Saved | None, url: str, process: Engine | None) -> int:
    """Chat until the input ends.

    Returns:
        0, or 1 if the last message got no answer.
    """

    async def chatting() -> int:
        return await _Plain(Conversation(chat, url, process, saved)).run()

    return asyncio.run(chatting())


class _Plain:
    def __init__(self, talk: Conversation) -> None:
        self.talk = talk
        self.asks = sys.stdin.isatty()
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()

    async def run(self) -> int:
        self.talk.start()
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True).start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        code = 0
        try:
            while (line := await self._line()) is not None:
                typed = commands.typed(line)
                if typed is not None:
                    if typed[0] == "quit":
                        break
                    ask = self._command(*typed)
                else:
                    ask = bool(line.strip())
                    if ask:
                        self.talk.send(line)
                if ask:
                    code = await self._turn()
                if trouble := self.talk.new_trouble():
                    _print(sys.stderr, f"error: {trouble}")
        finally:
            await self.talk.close()
        if self.talk.chat.farewell:
            _print(sys.stderr, self.talk.chat.farewell)
        return code

    async def _line(self) -> str | None:
        """The next line of input; None at its end, or if the reader interrupts."""
        if self.asks:
            sys.stdout.write("> ")
            sys.stdout.flush()
        return await self._lines.get()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """On a thread of its own, which ends with the process: nothing can wake it from a read."""

        def put(line: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the chat has ended meanwhile
                loop.call_soon_threadsafe(self._lines.put_nowait, line)

        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # a pipe may hold any bytes
        try:
            with contextlib.suppress(OSError):  # the terminal has gone
                for line in sys.stdin:
                    put(line.rstrip("\n"))
        finally:
            put(None)

    def _interrupt(self) -> None:
        if self.talk.state.live:
            self.talk.stop()
        else:
            self._lines.put_nowait(None)

    async def _turn(self) -> int:
        """Print the reply as it comes, then its summary."""
        reply = self.talk.state.turns[-1].reply
        shown = said = 0
        phase = ""
        while True:
            self.talk.pump()
            if reply.phase != phase and reply.phase in ("loading", "waiting") and self.asks:
                _print(sys.stderr, f"({reply.phase})")
            phase = reply.phase
            if len(reply.reasoning) > said:
                sys.stderr.write(printable(reply.reasoning[said:]))
                sys.stderr.flush()
                said = len(reply.reasoning)
            if len(reply.text) > shown:
                if said and not shown:
                    _print(sys.stderr, "")
                sys.stdout.write(printable(reply.text[shown:]))
                sys.stdout.flush()
                shown = len(reply.text)
            if not reply.live:
                break
            await asyncio.sleep(TICK)
        if shown and not reply.text.endswith("\n"):
            _print(sys.stdout, "")
        _print(sys.stderr, summary(reply))
        return int(reply.phase == "failed")

    def _command(self, name: str, argument: str) -> bool:
        """Do a slash command; True if a reply is on its way then."""
        state = self.talk.state
        match name:
            case "retry" if state.turns:
                self.talk.retry()
                return True
            case "system":
                state.system = "" if argument == "none" else argument or state.system
                self.talk.chat.system(state.system)
                _print(sys.stderr, f"system message: {printable(state.system) or 'none'}")
            case "set" if argument:
                try:
                    field, value = commands.option(argument)
                except ValueError as error:
                    _print(sys.stderr, f"error: {error}")
                else:
                    state.options.pop(field, None)
                    state.options.update({} if value is None else {field: value})
            case "think" if argument:
                state.thinking = None if argument == "default" else argument
            case "save" if argument:
                try:
                    _print(sys.stderr, f"written to {save(argument, state)}")
                except UsageError as error:
                    _print(sys.stderr, f"error: {error}")
            case "help":
                for command in commands.SLASH.values():
                    if command.name in HERE:
                        _print(sys.stderr, f"{command.slash:<18} {command.help}")
            case _:
                _print(sys.stderr, f"error: /{printable(name)} does not work here like this; see /help")
        return False


def summary(reply: Reply) -> str:
    """One line about a reply."""
    if reply.phase == "failed":
        return f"[failed: {printable(reply.error)}]"
    facts = {"stopped": ["stopped"], "length": ["cut at the token limit"]}.get(reply.phase, [])
    facts.append(figures.plural(reply.tokens, "token"))
    if reply.speed is not None:
        facts.append(f"{figures.speed(reply.speed)} tok/s")
    if reply.accepted is not None:
        facts.append(f"{reply.accepted:.2f} accepted per block")
    return f"[{' · '.join(facts)}]"


def _print(stream: TextIO, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(text, file=stream, flush=True)
