"""Events in, numbers and phases out."""

from __future__ import annotations

import json

import pytest
from dflash_chat.state import ChatState, Engine, Reply, Turn
from dflash_chat.widgets import view
from dflash_chat.wire import (
    Cycle,
    Ended,
    Event,
    Failed,
    Reading,
    Said,
    Started,
    Token,
    Totals,
    Waiting,
    parse,
)

from chat import logs


def replay(chunks: list[logs.Chunk], reply: Reply | None = None) -> Reply:
    reply = reply or Reply()
    for chunk in chunks:
        for event in parse(json.dumps(chunk)):
            reply.apply(event, 1.0)
    return reply


def test_phases_in_order() -> None:
    reply, seen = Reply(), []
    steps: list[Event] = [
        Waiting(1),
        Reading(0, 9),
        Started(9, 0, 0.1, (Token("<think>"),)),
        Said("", "hm"),
        Said("yes"),
        Ended("stop"),
    ]
    for event in steps:
        reply.apply(event, 1.0)
        seen.append(reply.phase)
    assert seen == ["waiting", "reading", "generating", "thinking", "generating", "done"]


def test_a_whole_log_gives_its_text_and_its_counts() -> None:
    chunks = logs.compose(logs.PROSE, logs.REASONING)
    reply = replay(chunks)
    assert (reply.text, reply.reasoning, reply.phase) == (logs.PROSE, logs.REASONING, "done")
    assert (
        reply.tokens == logs.token_count(chunks) == len(logs.pieces(logs.PROSE) + logs.pieces(logs.REASONING))
    )
    assert reply.accepted == pytest.approx(chunks[-1]["dflash"]["tau"])
    assert reply.speed == pytest.approx((reply.tokens - 1) / (0.025 * len(reply.cycles)))


def test_acceptance_length_counts_drafted_cycles_only() -> None:
    reply = Reply()
    for drafted, accepted in ((4, 4), (4, 0), (0, 0)):
        reply.apply(Cycle(drafted, accepted, 0.1, (Token("x"),) * (accepted + 1)), 0.0)
    assert reply.accepted == 3.0
    assert dict(reply.histogram) == {5: 1, 1: 1}
    reply.apply(Cycle(4, 4, 0.1, (Token("end"),) * 3), 0.0)  # the reply ended inside the block
    assert dict(reply.histogram) == {5: 1, 3: 1, 1: 1}
    reply.apply(Totals(tau=2.5), 0.0)
    assert reply.accepted == 2.5


def test_recent_speed_looks_back_one_second() -> None:
    reply = Reply()
    reply.apply(Cycle(4, 0, 5.0, (Token("x"),)), 0.0)
    for _ in range(4):
        reply.apply(Cycle(4, 4, 0.25, (Token("x"),) * 5), 0.0)
    assert reply.recent_speed == 20.0
    assert reply.speeds[0] == pytest.approx(0.2)
    assert reply.speeds[-1] == 20.0


@pytest.mark.parametrize(("event", "phase"), [(Ended("length"), "length"), (Failed("x"), "failed")])
def test_nothing_counts_after_the_end_but_totals(event: Ended | Failed, phase: str) -> None:
    reply = Reply()
    reply.apply(event, 2.0)
    reply.apply(Said("late"), 3.0)
    reply.apply(Totals(reply_tokens=7), 3.0)
    assert (reply.phase, reply.text, reply.tokens, reply.ended) == (phase, "", 7, 2.0)


def test_stop_keeps_the_text() -> None:
    reply = Reply()
    reply.apply(Said("half"), 1.0)
    reply.stop(2.0)
    reply.stop(3.0)
    assert (reply.phase, reply.text, reply.ended) == ("stopped", "half", 2.0)


def test_the_model_is_told_of_answers_only() -> None:
    state = ChatState(system="be brief", options={"temperature": 0.5}, thinking="off")
    for text, phase in (("one", "done"), ("", "stopped"), ("part", "failed"), ("cut", "stopped")):
        state.turns.append(Turn(f"q{phase}{text}", Reply(text=text, phase=phase)))  # type: ignore[arg-type]
    state.turns.append(Turn("now", Reply()))
    body = state.request()
    said = [(message["role"], message["content"]) for message in body["messages"]]
    assert said == [
        ("system", "be brief"),
        ("user", "qdoneone"),
        ("assistant", "one"),
        ("user", "qstoppedcut"),
        ("assistant", "cut"),
        ("user", "now"),
    ]
    assert (body["temperature"], body["reasoning_effort"]) == (0.5, "none")
    assert body["stream_options"] == {"include_usage": True, "include_dflash": True}


def test_figures_survive_being_saved() -> None:
    reply = replay(logs.compose(logs.PROSE, logs.REASONING), Reply(sent=0.5))
    saved = json.loads(json.dumps(reply.figures()))
    again = Reply.from_figures(reply.text, reply.reasoning, "done", "", saved)
    assert again.figures() == reply.figures() | {"first_seconds": 0.5}
    assert again.speed == pytest.approx(reply.speed, rel=0.02)


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"tokens": "x", "histogram": [1], "tau": None},
        {"histogram": {"a": 1, "2": "b", "²": 1, "9" * 5000: 1, "3": 10**400}},
        {"tokens": float("inf"), "first_seconds": float("nan"), "tau": 10**400},
    ],
)
def test_odd_figures_count_as_zero(odd: dict[str, object]) -> None:
    reply = Reply.from_figures("t", "", "whatever", "", odd)
    assert (reply.phase, reply.tokens, reply.accepted) == ("stopped", 0, None)


def test_health_of_any_shape() -> None:
    assert Engine.from_health({"status": "ok", "memory": {"active": 3}}, "http://x").memory == 3
    odd = Engine.from_health(
        {"status": 7, "notes": "x", "progress": [], "memory": None, "model": 3}, "http://x"
    )
    assert (odd.status, odd.notes, odd.model, odd.base_url) == ("unreachable", (), "", "http://x/v1")
    huge = Engine.from_health({"status": "ok", "block_size": float("inf"), "context_window": 10**400}, "x")
    assert (huge.block_size, huge.context_window) == (0, 0)


@pytest.mark.parametrize(("drafted", "said"), [(4, "2.0x plain"), (0, "plain")])
def test_the_speed_is_compared_with_plain_decoding_only_if_it_is_not_just_that(
    drafted: int, said: str
) -> None:
    reply = Reply()
    for _ in range(8):
        reply.apply(Cycle(drafted, drafted, (drafted + 1) * 0.1, (Token("x"),) * (drafted + 1)), 0.0)
    state = ChatState([Turn("hello", reply)], Engine(plain_speed=5.0))
    first = view.panel(state, 1.0).plain.splitlines()[1]
    assert first.split("tok/s")[1].strip() == said
