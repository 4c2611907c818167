"""Each slash command, typed in a running app."""

from __future__ import annotations

from pathlib import Path

import pytest
from dflash_chat import commands
from dflash_chat.screens.chats import Chats
from dflash_chat.screens.page import Page
from dflash_chat.screens.tokens import Tokens

from chat import logs
from chat.fake_engine import FakeEngine
from chat.stage import COMMON, Stage, play


def test_what_each_command_does(engine: FakeEngine, tmp_path: Path) -> None:
    """One long evening; every name of the table is typed, and what it did is looked at."""
    typed: set[str] = set()
    engine.replies = [logs.compose(logs.CODE)]

    async def story(stage: Stage) -> None:
        app, state = stage.app, stage.app.talk.state

        async def command(text: str) -> str:
            typed.add(text.split()[0][1:])
            stage.clock.now += 10
            await stage.type(text)
            await stage.drawn()
            return stage.words

        await stage.ready()
        assert "nothing was asked yet" in await command("/edit")
        await command("/system answer in rhymes")
        await command("/set temp 0.7")
        assert "temp 0.7" in await command("/set seed 3")
        await command("/think low")
        await stage.ask("question")
        body = engine.requests[-1]
        assert body["messages"][0] == {"role": "system", "content": "answer in rhymes"}
        assert (body["temperature"], body["seed"], body["reasoning_effort"]) == (0.7, 3, "low")
        assert "answer in rhymes" in await command("/system")
        await command("/system none")
        await command("/set temp default")
        assert "needs a whole number" in await command("/set seed x")
        assert "knows default, off, low, high" in await command("/think much")
        await command("/think default")
        await command("/retry")
        await stage.done()
        body = engine.requests[-1]
        assert [message["role"] for message in body["messages"]] == ["user"]
        assert "temperature" not in body
        assert "reasoning_effort" not in body

        await command("/edit")
        assert app.prompt.text == "question"
        await stage.press("escape")
        await command("/copy")
        assert app.clipboard == logs.CODE
        await command("/copy 1")
        assert app.clipboard.startswith("def divisors")
        assert "1 code block" in await command("/copy 2")
        assert "written to" in await command(f"/save {tmp_path / 'x.md'}")
        assert "def divisors" in (tmp_path / "x.md").read_text()
        assert "is there already" in await command(f"/save {tmp_path / 'x.md'}")

        await command("/tokens")
        assert isinstance(app.screen, Tokens)
        for name, sign in (
            ("stats", "3.67 accepted per block"),
            ("memory", "11.2 GB"),
            ("help", "send the message"),
        ):
            await stage.press("escape")
            assert sign in (seen := await command(f"/{name}")), seen
            assert isinstance(app.screen, Page)
        await stage.press("escape")

        assert "Numbers" in await command("/rename Numbers")
        [chat] = app.store.all()
        assert chat.title == "Numbers"
        await command("/new")
        assert not state.turns
        await command(f"/open {chat.id}")
        assert [turn.prompt for turn in state.turns] == ["question"]
        assert "there is no chat" in await command("/open nonsense")
        await command("/open")
        assert isinstance(app.screen, Chats)
        await stage.press("escape")
        assert "moved to" in await command("/delete")
        assert not list(app.store.all())
        assert not state.turns
        assert "not started here" in await command("/restart")
        await command("/quit")
        assert app._exit

    play(story, engine, tmp_path)
    assert typed == set(commands.SLASH)


def test_suggestions_complete_and_choose(engine: FakeEngine, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.press("/")
        assert "❯ /retry" in stage.text
        await stage.press("s", "down", "tab")
        assert stage.app.prompt.text == "/system "
        assert not stage.app.suggestions.display
        await stage.type("/hel")
        assert isinstance(stage.app.screen, Page)
        await stage.press("escape")
        assert stage.app.prompt.text == ""

    play(story, engine, tmp_path, size=COMMON)


@pytest.mark.parametrize(
    ("text", "kept", "said"),
    [("/nonsense", "/nonsense", "there is no command /nonsense"), ("/save", "/save ", "/save FILE")],
)
def test_what_cannot_be_done_stays_in_the_prompt(
    text: str, kept: str, said: str, engine: FakeEngine, tmp_path: Path
) -> None:
    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.type(text)
        assert stage.app.prompt.text == kept
        assert said in stage.text

    play(story, engine, tmp_path)
    assert not engine.requests


def test_a_path_is_no_command(engine: FakeEngine, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.ask("/etc/hosts: what is it?")

    play(story, engine, tmp_path)
    assert engine.requests[0]["messages"][0]["content"].startswith("/etc/hosts")


def test_a_temporary_chat_leaves_nothing(engine: FakeEngine, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.ask("secret")
        await stage.type("/new")
        await stage.ask("secret")

    play(story, engine, tmp_path, temporary=True)
    assert not list(tmp_path.rglob("*.jsonl"))
