"""Clients that leave, queues that fill, requests that fail: the next one is served as if nothing had been."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

import dflash_mlx.session
from dflash_mlx import Block, Event, Finished, Prefilled, SamplingParams
from dflash_mlx.cycles import Take
from dflash_mlx.errors import ModelError
from dflash_mlx.server.engine import Engine
from dflash_mlx.server.jobs import Job, Message
from dflash_mlx.session import Prepared
from dflash_mlx.target.attach import Mixin, attach
from dflash_mlx.text import Thinking
from server.live import (
    CODE,
    Live,
    Watched,
    chunks,
    joined,
    parse,
    read_all,
    read_until,
    request,
    running,
    serving,
    wait_for,
)

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": CODE}],
    "max_tokens": 400,
    "temperature": 1,
    "seed": 1,
}
DEEP: dict[str, Any] = {"messages": [{"role": "user", "content": CODE * 100}], "max_tokens": 4}


@pytest.fixture(autouse=True)
def serves_as_before(live: Live) -> Iterator[None]:
    """After every fault the same request has the same answer."""
    before = live.chat(max_tokens=8)["choices"]
    yield
    live.session.pause = 0
    live.idle()
    assert live.chat(max_tokens=8)["choices"] == before


def at_work(live: Live, count: int) -> bool:
    """Whether so many requests run or wait."""
    return live.engine.queue["running"] + live.engine.queue["waiting"] == count


def leave(connection: socket.socket, how: str) -> None:
    """Close as a client that ends does, or as one that is killed."""
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()


# --- clients that leave -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "reset"])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_decoding_ends_it_within_a_block(live: Live, stream: bool, how: str) -> None:
    live.session.watch(pause=0.05)
    connection = live.connect()
    connection.sendall(request({**LONG, "stream": stream}))
    if stream:
        read_until(connection, b'"content":"')
    wait_for(lambda: live.session.events >= 3, 60)
    leave(connection, how)
    live.idle(5)
    assert live.session.events < 100
    assert live.session.late <= 1


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_the_prompt_is_read_ends_it_within_a_chunk(live: Live, stream: bool) -> None:
    live.session.watch(pause=0.1)
    connection = live.connect()
    connection.sendall(request({**DEEP, "stream": stream}))
    wait_for(lambda: live.session.events >= 2, 60)
    connection.close()
    live.idle(5)
    assert live.session.events < 15  # of 20 chunks and more
    assert live.session.late == 0


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_waiting_frees_the_place(live: Live, stream: bool) -> None:
    live.session.watch(pause=0.05)
    first, second = live.connect(), live.connect()
    first.sendall(request(LONG))
    wait_for(lambda: live.engine.queue["running"] == 1, 60)
    second.sendall(request({**LONG, "stream": stream}))
    wait_for(lambda: live.engine.queue["waiting"] == 1, 60)
    second.close()
    wait_for(lambda: live.engine.queue["waiting"] == 0, 5)
    assert live.engine.queue["running"] == 1
    first.close()
    live.idle(5)


def test_a_server_that_stops_says_so_to_those_who_wait() -> None:
    with running() as own:
        own.session.watch(pause=0.05)
        with own.connect() as first, own.connect() as second:
            first.sendall(request({**LONG, "stream": True}))
            read_until(first, b'"content":"')
            second.sendall(request(LONG))
            wait_for(lambda: own.engine.queue["waiting"] == 1, 60)
            assert own.engine.stop(10)
            end = read_all(first)
            assert b'"the server is stopping"' in end
            assert b"data: [DONE]" in end
            assert parse(read_all(second))[0] == 503
        answer = own.post(**LONG)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0


# --- the queue ----------------------------------------------------------------------------------------


def test_requests_beyond_the_queue_are_told_to_come_back(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.engine, "max_queue", 1)
    live.session.watch(pause=0.05)
    connections = [live.connect() for _ in range(2)]
    for number, connection in enumerate(connections):
        connection.sendall(request(LONG))
        wait_for(partial(at_work, live, number + 1), 60)
    wait_for(lambda: live.engine.queue["running"] == 1, 60)
    for stream in (False, True):
        answer = live.post(**LONG, stream=stream)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["code"] == "queue_full"
    for connection in connections:
        connection.close()


def test_a_stream_that_waits_has_its_headers_is_told_its_place_and_kept_alive(live: Live) -> None:
    live.session.watch(pause=0.05)
    with live.beside(heartbeat=0.15) as quick, live.connect() as first, quick.connect() as second:
        first.sendall(request(LONG))
        wait_for(lambda: live.engine.queue["running"] == 1, 60)
        second.sendall(request({**LONG, "stream": True, "stream_options": {"include_dflash": True}}))
        begun = read_until(second, b'{"phase":"queued","ahead":1}')
        assert begun.startswith(b"HTTP/1.1 200")
        assert b'"delta":{"role":"assistant","content":""}' in begun
        beats = b""
        while beats.count(b'"delta":{},"finish_reason":null}]}') < 3:
            beats += second.recv(65536)
        assert b"dflash" not in beats
        first.close()
        read_until(second, b'"phase":"prefilled"')


def test_a_long_prompt_and_a_held_text_keep_a_plain_stream_alive(live: Live) -> None:
    live.session.watch(pause=0.1)
    with live.beside(heartbeat=0.15) as quick:
        parts = quick.stream(CODE * 20, max_tokens=3)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:4] == [{}, {}, {}]


def test_twenty_clients_at_once_each_get_their_own_answer(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.engine, "max_queue", 20)
    asked: list[dict[str, Any]] = [
        {"content": f"def f{i}(", "max_tokens": 4 + i % 8, "seed": i, "temperature": (i % 3) / 2}
        for i in range(20)
    ]

    def ask(number: int) -> str:
        if number % 2:
            return joined(live.stream(**asked[number]))
        return str(live.chat(**asked[number])["choices"][0]["message"]["content"])

    alone = [ask(number) for number in range(20)]
    with ThreadPoolExecutor(20) as clients:
        together = list(clients.map(ask, range(20)))
    assert together == alone
    assert len(set(alone)) > 12


# --- requests that fail -------------------------------------------------------------------------------


class Poisoned(Mixin):
    """A model that answers a prompt with this id with NaN."""

    poison = 777

    def __call__(self, tokens: mx.array, *args: object, **kwargs: object) -> mx.array:
        logits: mx.array = super().__call__(tokens, *args, **kwargs)
        return logits * mx.where((tokens == self.poison).any(), mx.nan, 1.0)


def test_nan_logits_fail_one_request_alone(live: Live) -> None:
    undo = attach(live.session.target.model, Poisoned)
    try:
        with ThreadPoolExecutor(3) as clients:
            good = clients.submit(live.chat, max_tokens=24)
            bad = clients.submit(live.post, "/v1/completions", prompt=[5, 777], max_tokens=4)
            streamed = clients.submit(live.post, "/v1/completions", prompt=[777], max_tokens=4, stream=True)
        assert bad.result().status_code == 500
        assert "not finite" in bad.result().json()["error"]["message"]
        assert bad.result().headers["x-request-id"] in bad.result().json()["error"]["message"]
        assert streamed.result().status_code == 200
        error, end = streamed.result().text.split("\n\n")[-3:-1]
        assert "not finite" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert end == "data: [DONE]"
        assert good.result()["usage"]["completion_tokens"] == 24
    finally:
        undo()


def test_a_template_that_raises_fails_one_request_alone(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = "{% if 'bad' in m.content %}{{ raise_exception('no\\nbad') }}{% endif %}"
    template = f"{{% for m in messages %}}{refuses}{{{{ m.content }}}}{{% endfor %}}"
    monkeypatch.setattr(live.session.tokenizer._tokenizer, "chat_template", template)
    for stream in (False, True):
        answer = live.post(messages=[{"role": "user", "content": "bad"}], stream=stream)
        assert answer.status_code == 400
        assert "cannot render these messages: no" in answer.json()["error"]["message"]
    assert live.chat("good", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_an_unforeseen_error_is_500_with_an_id_and_without_its_text(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Watched, request: Prepared) -> Iterator[Event]:
        raise KeyError("secret")

    def unprepared(self: Watched, *args: object, **kwargs: object) -> Prepared:
        raise KeyError("secret")

    for name, fault in (("run", broken), ("prepare", unprepared)):
        with monkeypatch.context() as patch:
            patch.setattr(Watched, name, fault)
            answer = live.post(**LONG)
        assert answer.status_code == 500
        assert answer.headers["x-request-id"] in answer.json()["error"]["message"]
        assert answer.headers["x-request-id"] in caplog.text
        assert "secret" not in answer.text


def test_the_log_holds_no_word_of_a_prompt_or_a_reply(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "dflash_mlx"):
        answer = live.chat("password = hunter2\n", max_tokens=8, strange="hunter2")
        live.post(messages=[{"role": "user", "content": [{"type": "hunter2"}]}])
        live.idle()
    assert "reply 8 tokens" in caplog.text
    assert "hunter2" not in caplog.text
    assert answer["choices"][0]["message"]["content"].strip() not in caplog.text


# --- text ---------------------------------------------------------------------------------------------


def say(monkeypatch: pytest.MonkeyPatch, ids: list[int], width: int) -> None:
    """Let the model say these ids, in blocks of this many."""

    def scripted(*_: object, take: Take, **__: object) -> Iterator[Event]:
        blocks = [Block(tuple(ids[i : i + width])) for i in range(1, len(ids), width)]
        for event in (Prefilled((ids[0],)), *blocks):
            kept, ended = take(event.tokens)
            yield replace(event, tokens=event.tokens[:kept])
            if ended:
                break
        yield Finished()

    monkeypatch.setattr(dflash_mlx.session, "decode", scripted)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_characters_split_over_tokens_come_whole(
    live: Live, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    text = "s = '你好 🙂 👩\u200d👩\u200d👧 é'"
    ids = live.session.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    with monkeypatch.context() as patch:
        say(patch, ids, width)
        parts = live.stream("x")
        whole = live.chat("x")["choices"][0]["message"]["content"]
    assert joined(parts) == whole == text
    assert not any("\ufffd" in joined([part]) for part in parts)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("opened", "said", "reasoning", "content"),
    [
        (False, "<think>a b\n</think>\n\nc d", "a b", "c d"),
        (True, "a b</think>c d", "a b", "c d"),
        (True, "a b c", "a b c", ""),
        (False, "a b c", "", "a b c"),
        (False, "<think></think>c", "", "c"),
    ],
)
def test_reasoning_is_told_apart_in_every_kind_of_answer(
    live: Live,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    opened: bool,
    said: str,
    reasoning: str,
    content: str,
) -> None:
    prepare = Watched.prepare
    thinking = Thinking("<think>", "</think>", open=opened)
    ids = live.session.tokenizer.encode(said, add_special_tokens=False)
    with monkeypatch.context() as patch:
        say(patch, ids, width)
        patch.setattr(Watched, "prepare", lambda *a, **k: replace(prepare(*a, **k), thinking=thinking))
        parts = live.stream("x", stream_options={"include_usage": True})
        whole = live.chat("x")
    message = whole["choices"][0]["message"]
    assert joined(parts) == message["content"] == content
    for name in ("reasoning_content", "reasoning"):
        assert joined(parts, name) == message.get(name, "") == reasoning
    counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert parts[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == counted
    assert bool(reasoning) <= counted <= whole["usage"]["completion_tokens"] if reasoning else counted == 0


# --- the engine itself --------------------------------------------------------------------------------


def test_an_engine_that_dies_leaves_a_server_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fatal(BaseException):
        pass

    def die(self: Watched, request: Prepared) -> Iterator[Event]:
        raise Fatal("gone")

    with running() as own:
        with monkeypatch.context() as patch:
            patch.setattr(Watched, "run", die)
            assert own.post(**LONG).status_code == 500
        wait_for(lambda: own.engine.status.state == "failed", 10)
        health = own.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "failed"
        assert "Fatal: gone" in health.json()["message"]
        answer = own.post(**LONG)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_failed"


def test_while_loading_health_says_how_far_and_requests_are_told_to_come_back(live: Live) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load(progress: Any) -> Watched:
        progress("downloading owner/name", 3, 7)
        loading.set()
        go_on.wait(60)
        raise ModelError("no such model")

    failures: list[BaseException] = []
    engine = Engine(load, on_failed=failures.append)
    engine.start()
    assert loading.wait(30)
    with serving(engine, live.session) as early:
        health = early.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "loading"
        assert health.json()["progress"] == {"phase": "downloading owner/name", "done": 3, "total": 7}
        answer = early.post(**LONG)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert answer.headers["retry-after"]
        assert early.get("/v1/models").json()["data"][0]["id"] == "demo"
        go_on.set()
        wait_for(lambda: engine.status.state == "failed", 30)
        assert "no such model" in early.get("/health").json()["message"]
    assert [str(error) for error in failures] == ["no such model"]
    assert engine.stop(10)


def test_the_context_can_be_limited(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.session.target, "context_length", 4096)
    live.session.limit_context(9000)
    assert live.session.target.context_length == 4096
    live.session.limit_context(20)
    answer = live.chat()
    assert answer["usage"]["total_tokens"] == 20
    assert answer["choices"][0]["finish_reason"] == "length"
    refused = live.post(messages=[{"role": "user", "content": CODE * 4}])
    assert "maximum context length is 20 tokens" in refused.json()["error"]["message"]


def test_requests_run_in_the_order_in_which_they_came(live: Live) -> None:
    live.session.watch(pause=0.02)
    told: list[tuple[int, Message]] = []
    jobs = []

    def note(number: int, message: Message) -> None:
        told.append((number, message))

    for number in range(4):
        prepared = live.session.prepare(CODE, SamplingParams(max_tokens=8))
        job = Job(prepared, partial(note, number), lambda event: set())
        jobs.append(job)
        live.engine.submit(job)
    live.engine.cancel(jobs[2])
    live.idle()
    finished = [
        n for n, message in told if getattr(message, "event", None) == Finished(finish_reason="length")
    ]
    assert finished == [0, 1, 3]
    ahead = [message.ahead for n, message in told if n == 3 and hasattr(message, "ahead")]
    assert ahead == sorted(ahead, reverse=True)
    assert ahead[-1] == 1


def test_health_answers_at_once_while_prompts_are_read_and_replies_written(live: Live) -> None:
    slowest = 0.0
    with live.connect() as first, live.connect() as second:
        first.sendall(request({**LONG, "stream": True, "max_tokens": 30}))
        second.sendall(request({**DEEP, "stream": True}))
        for _ in range(10):
            start = time.perf_counter()
            assert live.get("/health").json()["status"] == "ok"
            slowest = max(slowest, time.perf_counter() - start)
        chunks(parse(read_all(first))[2])
        chunks(parse(read_all(second))[2])
    assert slowest < 2.0  # scripts/measure_endpoint.py measures; this finds a server that does not answer
