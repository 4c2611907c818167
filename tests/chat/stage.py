"""Runs the app against a fake engine, without a terminal, and reads its screen."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from dflash_chat.app import ChatApp
from dflash_chat.chat_file import Chat, Saved
from dflash_chat.engine import Engine
from dflash_chat.store import Store
from textual._wait import wait_for_idle
from textual.pilot import Pilot

from chat.fake_engine import FakeEngine

WIDE, COMMON, SMALL = (100, 30), (80, 24), (40, 12)
SIZES = (WIDE, COMMON, SMALL)
PATIENCE = 20.0  # seconds; the machine may be busy


class Clock:
    """Time that moves when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """An app on its way, and what a test does with it."""

    def __init__(self, app: ChatApp, pilot: Pilot[None], engine: FakeEngine, clock: Clock) -> None:
        self.app, self.pilot, self.engine, self.clock = app, pilot, engine, clock

    async def press(self, *keys: str) -> None:
        """Keys, and the screen after them."""
        await self.app._press_keys(keys)
        await self.settle()

    async def type(self, text: str, *, enter: bool = True) -> None:
        """Put text into the prompt at once, as a paste of one line does, and press ⏎."""
        self.app.prompt.fill(text)
        await self.settle()
        if enter:
            await self.press("enter")

    async def until(self, true: Callable[[], object], what: str = "") -> None:
        """Wait for it."""
        end = asyncio.get_running_loop().time() + PATIENCE
        while not true():
            if asyncio.get_running_loop().time() > end:
                raise AssertionError(f"never happened: {what}\n{self.text}")
            await asyncio.sleep(0.01)
            self.app.screen._on_timer_update()

    async def ready(self) -> None:
        """The engine answers and the screen says so."""
        await self.until(lambda: self.app.talk.state.engine.ready, "ready")
        await self.drawn()

    async def done(self) -> None:
        """The reply is over and drawn."""
        await self.until(lambda: self.app.talk.state.turns and not self.app.talk.state.live, "done")
        await self.drawn()

    async def ask(self, text: str) -> None:
        """Ask, and wait for the whole reply."""
        await self.type(text)
        await self.done()

    async def drawn(self) -> None:
        """Everything that is known is on the screen."""
        self.app.pump()
        self.app.draw()
        for _ in range(3):
            await self.settle()

    async def settle(self) -> None:
        """Let messages arrive. The pilot's own pause waits 30 s for a widget that is removed meanwhile."""
        await wait_for_idle(0)
        self.app.screen._on_timer_update()

    @property
    def text(self) -> str:
        """The screen as lines of text."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(part.text for part in strip).rstrip() for strip in strips)

    @property
    def words(self) -> str:
        """The same without regard to where lines end."""
        return " ".join(self.text.split())


Story = Callable[[Stage], Awaitable[None]]


def play(
    story: Story,
    engine: FakeEngine,
    folder: Path,
    *,
    size: tuple[int, int] = COMMON,
    chat: Chat | None = None,
    saved: Saved | None = None,
    url: str | None = None,
    process: Engine | None = None,
    temporary: bool = False,
) -> ChatApp:
    """Run the app and do the story; returns the app after its end."""
    store, clock = Store(folder / "sessions"), Clock()
    opened = chat or (Chat(None, "/here") if temporary else store.new("/here"))
    where = url or engine.url
    app = ChatApp(store, opened, where, process, saved=saved, temporary=temporary, clock=clock)

    async def acts() -> None:
        async with app.run_test(size=size) as pilot:
            await story(Stage(app, pilot, engine, clock))

    asyncio.run(acts())
    return app
