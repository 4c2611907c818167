"""What goes wrong around the chat, and what the reader sees of it: one line, and nothing lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from dflash_chat.chat_file import Chat
from dflash_chat.client import Client
from dflash_chat.engine import IN_USE, Engine
from dflash_chat.store import Store

from chat import logs
from chat.fake_engine import FakeEngine
from chat.stage import COMMON, SIZES, WIDE, Stage, play
from dflash_mlx.errors import UsageError
from dflash_mlx.server.serving import listen
from dflash_mlx.terminal import printable

CHILD = [sys.executable, str(Path(__file__).parent / "fake_child.py")]


@pytest.mark.parametrize("size", SIZES)
def test_hostile_text_reaches_no_terminal_and_crashes_nothing(
    size: tuple[int, int], engine: FakeEngine, tmp_path: Path
) -> None:
    engine.replies = [logs.compose(logs.HOSTILE, logs.HOSTILE)]
    engine.health |= {"model": "a\x1b]0;b/[red]c[/b]", "notes": ["[/x]\x9b31m"]}

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.ask("[/b] \x1b[31m \u202e question")
        seen = stage.text
        for _ in range(40):
            await stage.press("pageup")
            seen += stage.text
        await stage.press("tab", "enter")
        seen += stage.text
        await stage.press("ctrl+g", "r")
        seen += stage.text
        await stage.press("escape")
        await stage.type("/rename [/b]\x1b x")
        await stage.press("ctrl+o")
        seen += stage.text
        assert seen.replace("\n", "") == printable(seen).replace("\n", "")
        if size == COMMON:
            assert "closing [/b] and [bold red]tags[/]" in seen
            assert "<script>alert(1)</script>" in seen

    app = play(story, engine, tmp_path, size=size)
    assert app.talk.state.turns[0].reply.text == logs.HOSTILE


@pytest.mark.parametrize("first", [{"role": None}, {"role": "", "content": None}, {}])
def test_a_first_delta_of_any_shape(first: dict[str, object], engine: FakeEngine, tmp_path: Path) -> None:
    engine.replies = [logs.compose("Hello.", first_delta=first)]

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.ask("question")
        assert "Hello." in stage.text

    play(story, engine, tmp_path)


def test_what_ends_a_line_elsewhere_is_text_within_a_frame(engine: FakeEngine, tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four\r\n"
    engine.replies = [[logs.chunk({"content": text}), logs.chunk({}, {"phase": "finished"}, "stop")]]

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.ask("question")

    app = play(story, engine, tmp_path)
    assert [(turn.reply.phase, turn.reply.text) for turn in app.talk.state.turns] == [("done", text)]


def test_an_error_that_nobody_foresaw_fails_the_reply(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Client, request: object) -> AsyncIterator[object]:
        raise KeyError("what\never")
        yield

    async def story(stage: Stage) -> None:
        await stage.ready()
        with monkeypatch.context() as patch:
            patch.setattr(Client, "reply", broken)
            await stage.ask("question")
        assert "the chat could not go on: KeyError: 'what" in stage.words
        assert stage.app.prompt.text == "question"
        await stage.press("enter")
        await stage.done()
        assert "Hello." in stage.text

    play(story, engine, tmp_path)


def test_an_engine_that_cannot_be_asked_is_unreachable(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Client) -> object:
        raise OverflowError("too large")

    async def story(stage: Stage) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Client, "health", broken)
            await stage.until(lambda: stage.app.talk.state.engine.status == "unreachable")
            await stage.ask("question")
            assert "the engine cannot be asked: OverflowError: too large" in stage.words
        await stage.ready()

    play(story, engine, tmp_path)


def test_a_server_that_wants_a_key_is_told_apart(engine: FakeEngine, tmp_path: Path) -> None:
    engine.locked = True

    async def story(stage: Stage) -> None:
        await stage.until(lambda: stage.app.talk.state.engine.message)
        await stage.drawn()
        assert "this server wants an API key, which dflash-chat cannot send" in stage.words

    play(story, engine, tmp_path)


def test_a_chat_that_cannot_be_saved_says_so_once_and_goes_on(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    chat = Chat(tmp_path / "file" / "x.jsonl", "/here")

    async def story(stage: Stage) -> None:
        await stage.ready()
        for times in (1, 0):
            await stage.ask("question")
            assert stage.words.count("this chat cannot be saved: ") == times
            stage.clock.now += 10

    app = play(story, engine, tmp_path, chat=chat)
    assert [turn.reply.text for turn in app.talk.state.turns] == ["Hello.", "Hello."]


@pytest.mark.parametrize(("gone", "said"), [(False, "open in another window"), (True, "No such file")])
def test_a_chat_of_another_window_is_not_deleted(
    gone: bool, said: str, engine: FakeEngine, tmp_path: Path
) -> None:
    other = Store(tmp_path / "sessions").new("/here")
    other.user("another window's")
    assert other.path is not None

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.press("ctrl+o", "delete")
        assert other.path is not None
        if gone:
            other.path.unlink()
        await stage.press("delete")
        assert said in stage.words
        assert ("another window's" in stage.text) == other.path.exists() == (not gone)

    play(story, engine, tmp_path, size=WIDE)
    other.close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((400, {}, json.dumps({"error": {"message": "too long\nby far", "code": "x"}})), "too long by far"),
        ((500, {}, "<html>oops</html>"), "HTTP 500: <html>oops</html>"),
        ((401, {}, ""), "HTTP 401: no reason given"),
    ],
)
def test_a_refused_message_returns_to_the_prompt(
    answer: tuple[int, dict[str, str], str], said: str, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.refuse = [answer]

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.ask("question")
        assert said in stage.text
        assert stage.app.prompt.text == "question"
        await stage.press("enter")
        await stage.done()
        assert said not in stage.text
        assert [turn.reply.phase for turn in stage.app.talk.state.turns] == ["done"]

    play(story, engine, tmp_path)


def test_an_error_in_the_middle_keeps_the_text_and_what_was_typed(engine: FakeEngine, tmp_path: Path) -> None:
    half = [*logs.compose(logs.PROSE)[:12], {"error": {"message": "NaN in the logits"}}]
    engine.replies = [half, logs.compose("better")]
    engine.hold = 12

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.type("question")
        await stage.until(lambda: engine.sent == 12)
        await stage.type("next thought", enter=False)
        engine.release()
        await stage.done()
        assert "✗ NaN in the logits" in stage.text
        assert "196 factors" in stage.text
        assert stage.app.prompt.text == "next thought"
        engine.hold = None
        await stage.press("ctrl+r")
        await stage.done()
        assert "better" in stage.text

    app = play(story, engine, tmp_path)
    assert len(app.talk.state.turns) == 1


def test_a_server_that_is_loading_and_busy_and_then_recovers(engine: FakeEngine, tmp_path: Path) -> None:
    engine.health["status"] = "loading"
    busy = json.dumps({"error": {"message": "no room"}})
    engine.refuse = [(503, {"Retry-After": "0"}, busy), (429, {"Retry-After": "0"}, busy)]

    async def story(stage: Stage) -> None:
        await stage.until(lambda: stage.app.talk.state.engine.status == "loading")
        await stage.type("early")
        await stage.drawn()
        assert "your message is next" in stage.text
        assert not engine.requests
        engine.health["status"] = "ok"
        await stage.done()
        assert "Hello." in stage.text

    play(story, engine, tmp_path)
    assert len(engine.requests) == 3


def test_a_server_that_stays_busy_is_given_up(engine: FakeEngine, tmp_path: Path) -> None:
    busy = json.dumps({"error": {"message": "not enough memory for this"}})
    engine.refuse = [(503, {"Retry-After": "0"}, busy)] * 10

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.ask("question")
        assert "not enough memory" in stage.text
        assert stage.app.prompt.text == "question"

    play(story, engine, tmp_path)


def test_a_dead_address_says_so_and_a_server_that_comes_is_found(engine: FakeEngine, tmp_path: Path) -> None:
    engine.close()

    async def story(stage: Stage) -> None:
        await stage.until(lambda: stage.app.talk.state.engine.status == "unreachable")
        await stage.drawn()
        assert "no server answers" in stage.text
        await stage.ask("question")
        assert stage.app.prompt.text == "question"
        assert "no server answers" in stage.text
        engine.reopen()
        await stage.ready()
        await stage.press("enter")
        await stage.done()
        assert "Hello." in stage.text

    play(story, engine, tmp_path)


def test_an_address_of_another_server_says_so(engine: FakeEngine, tmp_path: Path) -> None:
    engine.health = {"hello": "I am another"}

    async def story(stage: Stage) -> None:
        await stage.until(lambda: stage.app.talk.state.engine.message)
        await stage.drawn()
        assert "not as dflash-chat's own server does" in stage.text

    play(story, engine, tmp_path)


def test_kill_9_of_the_engine_loses_nothing_and_f5_starts_it_again(
    engine: FakeEngine, tmp_path: Path
) -> None:
    child = Engine([], tmp_path / "engine.log", CHILD)
    child.start()

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.type("first question")
        reply = stage.app.talk.state.turns[0].reply
        await stage.until(lambda: reply.text)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await stage.done()
        assert "was killed by signal 9: the last words" in stage.words, stage.text
        assert "engine.log)" in "".join(stage.text.split())
        half = reply.text
        assert (logs.PROSE * 200).startswith(half)
        await stage.until(lambda: stage.app.talk.state.engine.status == "dead")
        await stage.drawn()
        assert "F5 starts it again" in stage.text
        await stage.press("f5")
        await stage.ready()
        assert stage.app.talk.state.turns[0].reply.text == half
        await stage.press("ctrl+r")
        await stage.until(lambda: stage.app.talk.state.turns[0].reply.text)
        await stage.press("escape")

    try:
        app = play(story, engine, tmp_path, url=child.url, process=child)
    finally:
        child.stop()
    assert child.pid is None
    assert app.talk.chat.path is not None
    saved = Chat(app.talk.chat.path, "").open()
    assert [turn.prompt for turn in saved.turns] == ["first question"]


def test_ctrl_r_starts_a_dead_engine(engine: FakeEngine, tmp_path: Path) -> None:
    child = Engine([], tmp_path / "engine.log", CHILD)
    child.start()

    async def story(stage: Stage) -> None:
        await stage.ready()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await stage.ask("question")
        assert stage.app.prompt.text == "question"
        await stage.press("ctrl+r")
        await stage.until(lambda: stage.app.talk.state.turns[0].reply.text)
        assert stage.app.prompt.text == "question"

    try:
        play(story, engine, tmp_path, url=child.url, process=child)
    finally:
        child.stop()


def test_f5_starts_an_engine_again_that_lives_and_has_failed(engine: FakeEngine, tmp_path: Path) -> None:
    engine.health |= {"status": "failed", "message": "ValueError: no luck"}
    child = Engine([], tmp_path / "engine.log", CHILD)
    child.start()
    before = child.pid

    async def story(stage: Stage) -> None:
        await stage.until(lambda: stage.app.talk.state.engine.status == "failed")
        await stage.drawn()
        assert "ValueError: no luck F5 starts it again" in stage.words
        await stage.press("f5")
        await stage.ready()
        assert child.pid not in (None, before)
        await stage.press("f5")
        assert "the engine is running" in stage.text

    try:
        play(story, engine, tmp_path, url=engine.url, process=child)
    finally:
        child.stop()


def test_an_engine_of_somebody_else_is_not_offered_to_be_started(engine: FakeEngine, tmp_path: Path) -> None:
    engine.health |= {"status": "failed", "message": "ValueError: no luck"}

    async def story(stage: Stage) -> None:
        await stage.until(lambda: stage.app.talk.state.engine.status == "failed")
        await stage.drawn()
        assert "ValueError: no luck" in stage.text
        assert "F5" not in stage.text

    play(story, engine, tmp_path)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_that_is_taken_at_either_address_is_not_used(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        taken = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip("no IPv6 here")
    with taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("dflash_chat.engine.PORT", port)
        child = Engine([], tmp_path / "engine.log", [sys.executable, "-c", ""])
        child.start()
        child.stop()
        assert not child.url.endswith(f":{port}")
        with pytest.raises(UsageError, match=IN_USE):
            listen(address, port)


def test_an_engine_whose_port_was_taken_meanwhile_starts_on_another(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        ports = [taken.getsockname()[1], free.getsockname()[1]]
        free.close()
        monkeypatch.setattr("dflash_chat.engine._free_port", lambda *_: ports.pop(0))
        child = Engine([], tmp_path / "engine.log", CHILD)
        child.start()

        async def story(stage: Stage) -> None:
            await stage.ready()
            await stage.type("question")
            await stage.until(lambda: stage.app.talk.state.turns[0].reply.text)

        try:
            play(story, engine, tmp_path, url=child.url, process=child)
        finally:
            child.stop()
    assert not ports


def test_an_engine_that_cannot_start_says_why(engine: FakeEngine, tmp_path: Path) -> None:
    child = Engine(
        [], tmp_path / "engine.log", [sys.executable, "-c", "import sys; sys.exit('error: no such model')"]
    )
    child.start()

    async def story(stage: Stage) -> None:
        await stage.until(lambda: stage.app.talk.state.engine.status == "dead")
        await stage.drawn()
        assert "ended with exit code 1: error: no such model" in stage.words

    play(story, engine, tmp_path, url=child.url, process=child)
    child.stop()


def test_ten_thousand_lines(engine: FakeEngine, tmp_path: Path) -> None:
    text = logs.ten_thousand_lines()
    lines = [text[at : at + 4000] for at in range(0, len(text), 4000)]
    chunks = [logs.chunk({"content": part}) for part in lines]
    engine.replies = [[*chunks, logs.chunk({}, {"phase": "finished"}, "stop")]]

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.ask("question")
        assert "line 9999" in stage.text
        await stage.press("pageup", "pageup")
        assert "line 9950" in stage.text

    app = play(story, engine, tmp_path)
    assert app.talk.state.turns[0].reply.text == text


def test_a_chat_of_2000_turns_opens_with_its_end_and_scrolls_back(engine: FakeEngine, tmp_path: Path) -> None:
    store = Store(tmp_path / "sessions")
    chat = store.new("/here")
    chat.user("question 0")
    assert chat.path is not None
    with chat.path.open("a") as file:
        for number in range(1, 2000):
            file.write(json.dumps({"type": "part", "text": f"Answer *{number}*.\n"}) + "\n")
            file.write('{"type": "end", "phase": "done", "figures": {}}\n')
            file.write(json.dumps({"type": "user", "text": f"question {number}"}) + "\n")
    chat.close()
    saved = chat.open()

    async def story(stage: Stage) -> None:
        transcript = stage.app.transcript
        await stage.until(lambda: "question 1999" in stage.text)
        assert len(transcript.query("TurnView")) == 10
        for _ in range(12):
            await stage.press("pageup")
        await stage.until(lambda: len(transcript.query("TurnView")) >= 20)
        assert "earlier turns" in stage.text or transcript.scroll_y > 0
        await stage.ready()
        await stage.ask("one more")
        assert "Hello." in stage.text

    play(story, engine, tmp_path, chat=chat, saved=saved)
    assert len(engine.requests[0]["messages"]) == 2 * 1999 + 1
