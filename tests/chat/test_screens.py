"""The screen as text, at three sizes and without colour; run as a program, this file writes it anew."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from chat import logs
from chat.fake_engine import FakeEngine
from chat.stage import SIZES, WIDE, Stage, play

SCREENS = Path(__file__).parent / "data" / "screens"
FIRST, SECOND = "How many positive divisors does 196 have?", "Write it in Python."


async def empty(stage: Stage) -> None:
    await stage.ready()


async def loading(stage: Stage) -> None:
    await stage.until(lambda: stage.app.talk.state.engine.status == "loading")
    await stage.type("Early question")
    await stage.drawn()


async def reading(stage: Stage) -> None:
    stage.engine.hold = 4
    await stage.ready()
    await stage.type(FIRST)
    await stage.until(lambda: stage.app.talk.state.reply and stage.app.talk.state.reply.read)
    await stage.drawn()


async def generating(stage: Stage) -> None:
    await done(stage)
    stage.engine.hold = 22
    await stage.type(SECOND)
    reply = stage.app.talk.state.turns[-1].reply
    await stage.until(lambda: len(reply.cycles) == 22 - 6)
    await stage.drawn()


async def done(stage: Stage) -> None:
    await stage.ready()
    await stage.ask(FIRST)


async def failed(stage: Stage) -> None:
    stage.engine.refuse = [(400, {}, '{"error": {"message": "maximum context length is 4096 tokens"}}')]
    await stage.ready()
    await stage.ask(FIRST)


async def tokens(stage: Stage) -> None:
    await done(stage)
    await stage.press("ctrl+g", "r")
    await stage.drawn()


async def commands(stage: Stage) -> None:
    await stage.ready()
    await stage.type("/s", enter=False)
    await stage.drawn()


async def help_page(stage: Stage) -> None:
    await stage.ready()
    await stage.press("f1")
    await stage.drawn()


STORIES = {
    story.__name__: story
    for story in (empty, loading, reading, generating, done, failed, tokens, commands, help_page)
}


def shot(name: str, size: tuple[int, int], folder: Path) -> str:
    engine = FakeEngine(logs.compose(logs.PROSE, logs.REASONING), logs.compose(logs.CODE, seed=3))
    engine.health["plain_tokens_per_second"] = 52.0
    if name == "loading":
        progress = {"phase": "loading weights", "done": 4.1e9, "total": 5.6e9}
        engine.health |= {"status": "loading", "progress": progress}
    seen = []

    async def story(stage: Stage) -> None:
        await STORIES[name](stage)
        await stage.settle()
        seen.append(stage.text)

    try:
        play(story, engine, folder, size=size)
    finally:
        engine.close()
    return seen[0] + "\n"


def golden(name: str, size: tuple[int, int]) -> Path:
    return SCREENS / f"{name}-{size[0]}x{size[1]}.txt"


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", STORIES)
def test_the_screen_looks_as_it_did(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    assert shot(name, size, tmp_path) == golden(name, size).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["generating", "tokens"])
def test_without_colour_it_says_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert shot(name, WIDE, tmp_path) == golden(name, WIDE).read_text(encoding="utf-8")


def main() -> int:
    SCREENS.mkdir(parents=True, exist_ok=True)
    for name in STORIES:
        for size in SIZES:
            with tempfile.TemporaryDirectory() as folder:
                golden(name, size).write_text(shot(name, size, Path(folder)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
