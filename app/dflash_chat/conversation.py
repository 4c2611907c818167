"""One open chat at work: state, its file, the engine. What the terminal app and plain mode both drive.

`send`, `stop`, `retry` act at once; what the engine answers waits in an inbox until `pump` applies it, so
that the screen changes ten times a second and not for every token.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_chat.chat_file import Chat, Saved
from dflash_chat.engine import Engine as Process
from dflash_chat.state import ChatState, Engine, Reply, Turn
from dflash_chat.wire import Event, Failed, Waiting
from dflash_mlx.errors import one_line

if TYPE_CHECKING:
    from dflash_chat.client import Client

CHECKPOINT = 1.0  # seconds of a growing reply that a crash may cost
BUSY_TRIES = 5  # how often a server that is up may say 503


class Conversation:
    """State, file and engine of the open chat.

    Args:
        chat: its file.
        url: the server's address, without `/v1`.
        process: the engine, if it is our child.
        saved: what the file holds already.
        clock: seconds; tests bring their own.
    """

    def __init__(
        self,
        chat: Chat,
        url: str,
        process: Process | None = None,
        saved: Saved | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.chat = chat
        self.url = url
        self.process = process
        self.clock = clock
        self.state = ChatState(engine=Engine(base_url=f"{url}/v1"), own_engine=process is not None)
        self.returned: str | None = None  # a prompt that got no answer and belongs back in the input
        self._unsaved = ""  # the trouble of the chat's file, when it was asked for last
        self._load(saved)
        self._inbox: deque[tuple[Turn, Event]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._look = asyncio.Event()  # the engine's state may have changed: look now
        self._known = asyncio.Event()  # it was looked at, and waits for nobody
        self._client: Client | None = None
        self._written = (0, 0)  # characters of the growing reply that are in the file
        self._checkpoint = 0.0

    # --- what the reader does -------------------------------------------------------------------

    def send(self, prompt: str) -> None:
        """Ask; the newest turn gives way if it holds no answer. Only while no reply is on its way."""
        assert not self.state.live
        if self.state.last is not None and not self.state.last.reply.text:
            self._rewind(len(self.state.turns) - 1)
        self.chat.user(prompt)
        self._written, self._checkpoint = (0, 0), self.clock()
        self.state.turns.append(turn := Turn(prompt, Reply(sent=self.clock())))
        self.returned = None
        self._task = asyncio.create_task(self._answer(turn))

    def resend(self, index: int, prompt: str) -> None:
        """Ask again from turn `index` on, with this prompt; what came after it is kept in the file only."""
        self.stop()
        self._rewind(index)
        self.send(prompt)

    def retry(self) -> None:
        """Ask the newest prompt again."""
        if self.state.last is not None:
            self.resend(len(self.state.turns) - 1, self.state.last.prompt)

    def stop(self) -> None:
        """End the reply that is on its way; closing the connection ends it in the engine too."""
        if not self.state.live or self.state.last is None:
            return
        if self._task is not None:
            self._task.cancel()
        self._drain()
        self.state.last.reply.stop(self.clock())
        self._settle(self.state.last)

    def switch(self, chat: Chat, saved: Saved | None = None) -> None:
        """Open another chat; the one that was open is in its file."""
        self.stop()
        self.chat.close()
        self.chat = chat
        self.returned = None
        self._load(saved)

    def new_trouble(self) -> str:
        """Why the chat cannot be saved, once when that begins; else nothing."""
        before, self._unsaved = self._unsaved, self.chat.trouble
        return self._unsaved if self._unsaved != before else ""

    @property
    def engine_ended(self) -> bool:
        """Whether our own engine is gone, or says that it answers no more."""
        return self.process is not None and (self.process.pid is None or self.state.engine.status == "failed")

    def restart(self) -> None:
        """Start the engine again after its end."""
        if self.process is not None and self.engine_ended:
            self.process.start()
            self._begin_anew(self.process.url)

    # --- what drives it -------------------------------------------------------------------------

    def start(self) -> None:
        """Watch the engine from now on."""
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop everything; the file is complete."""
        self.stop()
        for task in (self._task, self._watcher):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        self.chat.close()

    def pump(self) -> None:
        """Apply what has arrived."""
        live = self.state.live
        self._drain()
        last = self.state.last
        if last is None or not live:
            return
        if not last.reply.live:
            self._settle(last)
        elif self.clock() - self._checkpoint >= CHECKPOINT:
            self._save_part(last.reply)

    # --- inside ---------------------------------------------------------------------------------

    def _load(self, saved: Saved | None) -> None:
        self.state.turns = saved.turns if saved else []
        self.state.title = saved.title if saved else ""
        self.state.system = saved.system if saved else ""

    def _rewind(self, turns: int) -> None:
        self.chat.rewind(turns)
        del self.state.turns[turns:]

    def _drain(self) -> None:
        now = self.clock()
        while self._inbox:
            turn, event = self._inbox.popleft()
            turn.reply.apply(event, now)

    def _settle(self, turn: Turn) -> None:
        """The reply is over: complete the file, give back a prompt that got no answer."""
        self._save_part(turn.reply)
        self.chat.end(turn.reply)
        if not turn.reply.text:
            self.returned = turn.prompt
        self._look.set()  # memory has changed

    def _save_part(self, reply: Reply) -> None:
        text, reasoning = self._written
        self.chat.part(reply.text[text:], reply.reasoning[reasoning:])
        self._written, self._checkpoint = (len(reply.text), len(reply.reasoning)), self.clock()

    def _begin_anew(self, url: str) -> None:
        """Our engine has been started, and will answer there."""
        self.url, self._client = url, None
        self.state.engine = Engine(base_url=f"{url}/v1")
        self._known.clear()
        self._look.set()

    async def _answer(self, turn: Turn) -> None:
        """Ask, and put what is answered into the inbox; the reply ends, whatever happens here."""
        try:
            await self._ask(turn)
        except Exception as error:
            self._inbox.append((turn, Failed(f"the chat could not go on: {_reason(error)}")))

    async def _ask(self, turn: Turn) -> None:
        from dflash_chat.client import BusyError

        tries = 0
        while True:
            await self._known.wait()
            if not self.state.engine.ready:
                self._inbox.append((turn, Failed(self._trouble(), "unreachable")))
                return
            assert self._client is not None
            try:
                async for event in self._client.reply(self.state.request()):
                    if isinstance(event, Failed) and event.code in ("unreachable", "cut"):
                        event = await self._post_mortem(event)
                    self._inbox.append((turn, event))
                return
            except BusyError as busy:
                full = busy.failure.code == "429" or "queue" in busy.failure.code
                tries += not full
                self._known.clear()
                self._look.set()
                await self._known.wait()
                if tries > BUSY_TRIES and self.state.engine.ready:
                    self._inbox.append((turn, busy.failure))
                    return
                if full:
                    self._inbox.append((turn, Waiting(0)))
                await asyncio.sleep(busy.seconds)

    async def _post_mortem(self, failure: Failed) -> Failed:
        """A connection that breaks because our child died says how it died."""
        for _ in range(10):
            if self.process is None or self.process.death() is not None:
                break
            await asyncio.sleep(0.05)
        self._look.set()
        death = self.process.death() if self.process is not None else None
        return failure if death is None else replace(failure, message=death)

    def _trouble(self) -> str:
        engine = self.state.engine
        return engine.message if engine.status == "dead" else f"{engine.message} ({engine.base_url})"

    async def _watch(self) -> None:
        """Keep `state.engine` true: often until it is ready, seldom after."""
        while True:
            self._look.clear()
            try:
                engine = await self._examine()
            except Exception as error:  # the reader must hear of it, and a message that waits must fail
                reason = f"the engine cannot be asked: {_reason(error)}"
                engine = Engine("unreachable", reason, base_url=f"{self.url}/v1")
            self.state.engine = engine
            if engine.status in ("starting", "loading"):
                self._known.clear()
            else:
                self._known.set()
            pause = {"ok": 5.0, "unreachable": 1.0, "failed": 1.0, "dead": 1.0}.get(engine.status, 0.2)
            # Not wait_for: Python 3.11's forgets a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._look.wait()

    async def _examine(self) -> Engine:
        if self.process is not None:
            if self.process.move():
                self._begin_anew(self.process.url)
            if (death := self.process.death()) is not None:
                return replace(self.state.engine, status="dead", message=death)
        if self._client is None:
            # httpx takes a while to load, and the prompt should be on the screen first
            module = await asyncio.to_thread(__import__, "dflash_chat.client", fromlist=["Client"])
            self._client = module.Client(self.url)
        client = self._client
        engine: Engine = await client.health()
        if engine.status == "unreachable" and self.process is not None:
            # Our child lives: it has not opened its port yet, or is too busy to answer.
            return self.state.engine
        return engine if client is self._client else self.state.engine  # else it was started again meanwhile


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
