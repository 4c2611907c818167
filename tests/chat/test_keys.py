"""Each key of the table, pressed in a running app."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from dflash_chat import commands
from dflash_chat.screens.chats import Chats
from dflash_chat.screens.link import Link
from dflash_chat.screens.page import Page
from dflash_chat.screens.tokens import Tokens
from dflash_chat.store import Store
from textual import events
from textual.widgets import Input, Markdown

from chat import logs
from chat.fake_engine import FakeEngine
from chat.stage import COMMON, SIZES, SMALL, WIDE, Stage, play

TESTED: set[str] = set()


def covers(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Says which keys of the table a test presses."""
    TESTED.update(keys)
    return lambda test: test


def test_every_key_of_the_table_is_pressed_below() -> None:
    assert {each.shown for each in commands.COMMANDS if each.shown} - TESTED == set()


@covers("⏎", "^j")
@pytest.mark.parametrize("size", SIZES)
def test_enter_sends_and_ctrl_j_breaks_the_line(
    size: tuple[int, int], engine: FakeEngine, tmp_path: Path
) -> None:
    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.press("h", "i", "ctrl+j", "x", "shift+enter", "alt+enter", "enter")
        await stage.done()
        assert stage.app.talk.state.turns[0].prompt == "hi\nx\n\n"
        assert stage.app.prompt.text == ""
        assert "Hello." in stage.text

    play(story, engine, tmp_path, size=size)
    assert engine.requests[0]["messages"] == [{"role": "user", "content": "hi\nx\n\n"}]


def test_a_paste_of_200_kilobytes_is_one_message_and_needs_enter(engine: FakeEngine, tmp_path: Path) -> None:
    text = "".join(f"line {n} of the paste\r\n" for n in range(9000)) + "\x1b[31mend"

    async def story(stage: Stage) -> None:
        await stage.ready()
        stage.app.prompt.post_message(events.Paste(text))
        await stage.until(lambda: stage.app.prompt.text.endswith("[31mend"))
        assert not stage.app.talk.state.turns
        await stage.press("enter")
        await stage.done()

    play(story, engine, tmp_path)
    [message] = engine.requests[0]["messages"]
    assert message["content"] == text.replace("\r\n", "\n").replace("\x1b", "")


PHASES = {"queue": 2, "prefill": 4, "decode": 12}


@covers("esc")
@pytest.mark.parametrize("phase", PHASES)
def test_esc_stops_in_each_phase(phase: str, engine: FakeEngine, tmp_path: Path) -> None:
    engine.replies = [logs.compose(logs.PROSE)]
    engine.hold = PHASES[phase]

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.type("question")
        reply = stage.app.talk.state.turns[0].reply
        await stage.until(lambda: engine.sent == engine.hold)
        await stage.until(
            lambda: reply.phase == {"queue": "waiting", "prefill": "reading", "decode": "generating"}[phase]
        )
        stage.app.prompt.fill("draft" if phase == "decode" else "")
        await stage.press("escape")
        assert reply.phase == "stopped"
        engine.release()
        await stage.until(lambda: engine.left == 1, "the connection was closed")
        await stage.drawn()
        kept = "draft" if phase == "decode" else "question"
        assert stage.app.prompt.text == kept
        assert logs.PROSE.startswith(reply.text)
        assert bool(reply.text) == (phase == "decode")

    engine.replies = [logs.compose(logs.PROSE) + [logs.chunk({"content": "x" * 200_000})] * 60]
    play(story, engine, tmp_path)


@covers("^r")
def test_ctrl_r_asks_again(engine: FakeEngine, tmp_path: Path) -> None:
    engine.replies = [logs.compose("alpha"), logs.compose("beta")]

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.press("ctrl+r")
        assert "nothing was asked yet" in stage.text
        await stage.ask("question")
        await stage.press("ctrl+r")
        await stage.done()
        assert "beta" in stage.text
        assert "alpha" not in stage.text

    app = play(story, engine, tmp_path)
    assert [turn.reply.text for turn in app.talk.state.turns] == ["beta"]
    assert engine.requests[0]["messages"] == engine.requests[1]["messages"]
    assert app.talk.chat.path is not None
    assert "alpha" in app.talk.chat.path.read_text()


@covers("↑", "↑ ↓")
def test_up_edits_the_last_message_and_walks_through_history(engine: FakeEngine, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        prompt = stage.app.prompt
        await stage.ready()
        await stage.ask("one")
        await stage.ask("two")
        await stage.press("up")
        assert prompt.text == "two"
        assert "asks again from here" in stage.text
        await stage.press("escape")
        assert prompt.text == ""
        await stage.press("up", "!", "enter")
        await stage.done()
        assert [turn.prompt for turn in stage.app.talk.state.turns] == ["one", "two!"]
        await stage.type("my draft", enter=False)
        await stage.press("up")
        assert prompt.text == "two!"
        await stage.press("up", "up")
        assert prompt.text == "one"
        await stage.press("down", "down", "down")
        assert prompt.text == "my draft"

    play(story, engine, tmp_path)
    assert [message["content"] for message in engine.requests[2]["messages"]][::2] == ["one", "two!"]


def test_up_in_a_new_chat_brings_prompts_of_earlier_ones(engine: FakeEngine, tmp_path: Path) -> None:
    chat = Store(tmp_path / "sessions").new("/here")
    chat.user("from yesterday")
    chat.close()

    async def story(stage: Stage) -> None:
        await stage.press("up")
        assert stage.app.prompt.text == "from yesterday"

    play(story, engine, tmp_path)


@covers("^o", "^n")
def test_chats_are_found_continued_and_deleted(engine: FakeEngine, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        app = stage.app
        await stage.ready()
        for question in ("about apples", "about pears"):
            await stage.press("ctrl+n")
            assert not app.talk.state.turns
            await stage.ask(question)
        await stage.press("ctrl+o")
        assert isinstance(app.screen, Chats)
        await stage.press(*"apples")
        assert app.screen.query_one(Input).value == "apples"
        assert "about pears" not in stage.text.split("chats")[1]
        await stage.press("enter")
        assert [turn.prompt for turn in app.talk.state.turns] == ["about apples"]
        await stage.press("ctrl+o", *"pears", "delete")
        assert "del again" in stage.text
        assert len(list(app.store.all())) == 2
        await stage.press("delete")
        assert [each.title for each in app.store.all()] == ["about apples"]
        await stage.press("escape")
        assert not isinstance(app.screen, Chats)

    play(story, engine, tmp_path)


@covers("^t")
def test_ctrl_t_switches_thinking(engine: FakeEngine, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.press("ctrl+t")
        assert "thinking: off" in stage.text
        await stage.ask("one")
        await stage.press("ctrl+t")
        await stage.ask("two")

    play(story, engine, tmp_path)
    assert [body.get("reasoning_effort") for body in engine.requests] == ["none", None]


@pytest.mark.parametrize("how", ["key", "mouse"])
def test_thinking_unfolds_and_folds(how: str, engine: FakeEngine, tmp_path: Path) -> None:
    engine.replies = [logs.compose(logs.PROSE, logs.REASONING)]

    async def story(stage: Stage) -> None:
        async def toggle() -> None:
            if how == "mouse":
                await stage.pilot.click(".thinking")
            else:
                await stage.press("tab", "enter") if stage.app.prompt.has_focus else await stage.press(
                    "enter"
                )
            await stage.drawn()

        await stage.ready()
        await stage.ask("question")
        assert "▶ thought for" in stage.text
        assert "14 = 2 × 7" not in stage.text
        await toggle()
        assert "14 = 2 × 7" in stage.text
        await toggle()
        assert "14 = 2 × 7" not in stage.text

    play(story, engine, tmp_path, size=WIDE)


@covers("^g")
def test_the_tokens_view(engine: FakeEngine, tmp_path: Path) -> None:
    chunks = logs.compose(logs.CODE, seed=3)
    engine.replies = [logs.compose("short"), chunks]

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.press("ctrl+g")
        assert "no reply of this run" in stage.text
        await stage.ask("one")
        await stage.ask("two")
        await stage.press("ctrl+g")
        assert isinstance(stage.app.screen, Tokens)
        blocks = [part["dflash"] for part in chunks if part.get("dflash", {}).get("phase") == "block"]
        drafted, copied = (sum(b["accepted"] for b in blocks if b["copied"] == c) for c in (False, True))
        assert f"drafted {drafted}   copied {copied} " in stage.text
        assert "print(len(divisors(196)))" in stage.text
        assert " no" not in stage.text
        await stage.press("r")
        assert " no" in stage.text
        await stage.press("left")
        await stage.drawn()
        assert "reply 1 of 2" in stage.text
        await stage.press("right", "c")
        await stage.drawn()
        assert "+1 from the target" in stage.text
        await stage.press("up", "pageup", "ctrl+g")
        assert not isinstance(stage.app.screen, Tokens)

    play(story, engine, tmp_path, size=COMMON)


def test_the_tokens_view_grows_with_the_reply(engine: FakeEngine, tmp_path: Path) -> None:
    engine.replies = [logs.compose(logs.CODE, seed=3)]
    engine.hold = 12

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.type("question")
        reply = stage.app.talk.state.turns[0].reply
        await stage.until(lambda: len(reply.cycles) == 6)
        await stage.press("ctrl+g")
        assert "√n steps" not in stage.text
        engine.release()
        await stage.until(lambda: "√n steps" in stage.text)

    play(story, engine, tmp_path, size=WIDE)


@covers("^\\")
def test_the_panel_hides_and_shows(engine: FakeEngine, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ready()
        assert "for editors" in stage.text
        await stage.press("ctrl+backslash")
        assert "for editors" not in stage.text
        await stage.pilot.resize_terminal(*COMMON)
        await stage.press("ctrl+backslash")
        await stage.drawn()
        assert "for editors" in stage.text

    play(story, engine, tmp_path, size=WIDE)


@covers("PgUp PgDn", "^l")
def test_the_reader_is_not_pulled_down(engine: FakeEngine, tmp_path: Path) -> None:
    engine.replies = [logs.compose(logs.LONG_LIST), logs.compose(logs.LONG_LIST)]
    engine.hold = 60

    async def story(stage: Stage) -> None:
        transcript = stage.app.transcript
        await stage.ready()
        await stage.type("question")
        await stage.until(lambda: engine.sent == 60)
        await stage.drawn()
        assert transcript.scroll_y == transcript.max_scroll_y
        await stage.press("pageup")
        await stage.drawn()
        at = transcript.scroll_y
        assert at < transcript.max_scroll_y
        engine.release()
        await stage.done()
        assert transcript.scroll_y == at
        assert "more below" in stage.text
        await stage.press("ctrl+l")
        await stage.drawn()
        assert transcript.scroll_y == transcript.max_scroll_y
        assert "more below" not in stage.text
        assert "Done." in stage.text
        await stage.press("pageup", "pagedown", "pagedown")
        await stage.drawn()
        assert "more below" not in stage.text

    play(story, engine, tmp_path)


@covers("^s")
def test_ctrl_s_copies_code_then_the_reply(engine: FakeEngine, tmp_path: Path) -> None:
    engine.replies = [logs.compose(logs.CODE)]

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.press("ctrl+s")
        assert "no reply to copy" in stage.text
        await stage.ask("question")
        await stage.press("ctrl+s")
        assert stage.app.clipboard.startswith("def divisors")
        assert "the code: " in stage.text
        await stage.press("ctrl+s")
        assert stage.app.clipboard == logs.CODE
        stage.clock.now += 10
        await stage.press("ctrl+s")
        assert stage.app.clipboard.startswith("def divisors")

    play(story, engine, tmp_path)


@covers("^p")
def test_the_palette_does_commands(engine: FakeEngine, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.press("ctrl+p", *"keys and commands")
        await stage.until(lambda: "all keys and commands" in stage.text)
        await stage.press("enter")
        await stage.until(lambda: isinstance(stage.app.screen, Page))
        await stage.press("escape", "ctrl+p", *"name this chat")
        await stage.until(lambda: "name this chat" in stage.text)
        await stage.press("enter")
        await stage.until(lambda: stage.app.prompt.text == "/rename ")
        assert stage.app.prompt.has_focus

    play(story, engine, tmp_path)


@covers("F1")
@pytest.mark.parametrize("size", SIZES)
def test_help_shows_every_key_and_command(size: tuple[int, int], engine: FakeEngine, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.press("f1")
        seen = ""
        for _ in range(12):
            seen += stage.text
            await stage.press("pagedown")
        if size != SMALL:
            for shown, slash, help in commands.rows():
                assert shown in seen
                assert slash in seen
                assert help in seen or size != WIDE
        await stage.press("up", "f1")
        assert not isinstance(stage.app.screen, Page)

    play(story, engine, tmp_path, size=size)


@covers("^c")
def test_ctrl_c_copies_stops_and_quits_when_pressed_twice(engine: FakeEngine, tmp_path: Path) -> None:
    engine.replies = [logs.compose(logs.PROSE)]
    engine.hold = 12

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.type("copy me", enter=False)
        await stage.press("shift+home", "ctrl+c")
        assert stage.app.clipboard == "copy me"
        await stage.press("end", "enter")
        reply = stage.app.talk.state.turns[0].reply
        await stage.until(lambda: reply.text)
        await stage.press("ctrl+c")
        assert reply.phase == "stopped"
        stage.clock.now += 10
        await stage.press("ctrl+c")
        assert "^c again quits" in stage.text
        stage.clock.now += 10
        await stage.press("ctrl+c")
        assert stage.app.is_running
        await stage.press("ctrl+c")
        assert stage.app._exit

    play(story, engine, tmp_path)


@covers("^q", "F5")
def test_ctrl_q_quits_and_f5_needs_an_engine_of_ours(engine: FakeEngine, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.press("f5")
        assert "not started here" in stage.text
        await stage.press("f1")
        await stage.press("ctrl+q")
        assert stage.app._exit

    play(story, engine, tmp_path)


def test_a_message_while_a_reply_is_on_its_way_stays_in_the_prompt(
    engine: FakeEngine, tmp_path: Path
) -> None:
    engine.hold = 6

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.type("one")
        await stage.type("two")
        assert "still answering" in stage.text
        assert stage.app.prompt.text == "two"
        engine.hold = None
        engine.release()
        await stage.done()
        await stage.press("enter")
        await stage.done()
        assert len(engine.requests) == 2

    play(story, engine, tmp_path)


def test_resizing_while_it_streams(engine: FakeEngine, tmp_path: Path) -> None:
    engine.replies = [logs.compose(logs.PROSE + logs.CODE, logs.REASONING)]
    engine.pace = 0.01

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.type("question")
        for size in (*SIZES, (20, 5), (200, 60), COMMON):
            await stage.pilot.resize_terminal(*size)
            await stage.settle()
        await stage.done()
        assert "√n steps" in stage.text
        assert "for editors" not in stage.text

    play(story, engine, tmp_path, size=WIDE)


def test_links_show_where_they_lead(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("dflash_chat.app.ChatApp.open_url", lambda _, url: opened.append(url))

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.ask("question")
        for href, keys in (
            ("https://example.org/a", "enter"),
            ("file:///etc/passwd", "enter"),
            ("javascript:x", "c"),
        ):
            stage.app.post_message(Markdown.LinkClicked(stage.app.query_one(Markdown), href))
            await stage.until(lambda: isinstance(stage.app.screen, Link))
            await stage.drawn()
            assert href in stage.text
            await stage.press(keys)
            await stage.press("escape")

    app = play(story, engine, tmp_path)
    assert opened == ["https://example.org/a"]
    assert app.clipboard == "javascript:x"
