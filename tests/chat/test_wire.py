"""Frames become events, whatever they look like."""

from __future__ import annotations

import json

import pytest
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
    error,
    parse,
    sse_data,
)

from chat import logs


def events(chunk: object) -> list[Event]:
    return parse(json.dumps(chunk))


@pytest.mark.parametrize(
    ("facts", "event"),
    [
        ({"phase": "queued", "ahead": 2}, Waiting(2)),
        ({"phase": "prefill", "done": 5, "total": 9}, Reading(5, 9)),
        (
            {
                "phase": "prefilled",
                "prompt_tokens": 9,
                "cached_tokens": 4,
                "seconds": 0.5,
                "tokens": [{"id": 5, "text": "Hi", "origin": "target"}],
            },
            Started(9, 4, 0.5, (Token("Hi"),)),
        ),
        (
            {
                "phase": "block",
                "drafted": 2,
                "accepted": 1,
                "seconds": 0.1,
                "tokens": [{"id": 1, "text": "a", "origin": "draft"}, {"id": 2, "text": "b"}],
                "rejected": [{"id": 3, "text": "c"}],
                "copied": True,
            },
            Cycle(2, 1, 0.1, (Token("a", drafted=True), Token("b")), ("c",), copied=True),
        ),
    ],
)
def test_each_phase(facts: dict[str, object], event: Event) -> None:
    assert events(logs.chunk({}, facts)) == [event]


def test_text_and_finish_in_one_chunk() -> None:
    chunk = logs.chunk({"content": "a", "reasoning_content": "b"}, {"phase": "finished"}, "length")
    assert events(chunk) == [Said("a", "b"), Ended("length")]
    assert events(logs.chunk({}, {"phase": "finished", "finish_reason": "cancelled"}, "stop")) == [
        Ended("cancelled")
    ]


def test_totals_of_the_usage_chunk() -> None:
    chunk = {
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": 7},
        "timings": {"predicted_ms": 250},
        "dflash": {"tau": 3.5, "cycles": 2},
    }
    assert events(chunk) == [Totals(3, 7, 0.25, 3.5)]


@pytest.mark.parametrize(
    "delta",
    [
        {"role": None},
        {"role": "", "content": None},
        {},
        None,
        {"role": "assistant"},
        {"content": 7},
        "text",
        [],
    ],
)
def test_a_first_delta_of_any_shape_says_nothing(delta: object) -> None:
    assert events({"choices": [{"index": 0, "delta": delta}]}) == []


@pytest.mark.parametrize(
    "chunk", [{}, {"choices": None}, {"choices": [None]}, {"choices": [[]], "dflash": 3}]
)
def test_frames_that_are_nothing(chunk: object) -> None:
    assert events(chunk) == []


def test_numbers_that_are_none() -> None:
    facts = {
        "phase": "block",
        "drafted": None,
        "accepted": "x",
        "seconds": True,
        "tokens": [None, {"text": 3}],
    }
    assert events(logs.chunk({}, facts)) == [Cycle(0, 0, 0.0, (Token(""), Token("")))]


@pytest.mark.parametrize("data", ["<html>", "[1]", '"x"', "{", "[" * 10**5])
def test_what_is_no_frame_is_a_failure_that_shows_it(data: str) -> None:
    [event] = parse(data)
    assert isinstance(event, Failed)
    assert data[:80] in event.message


def test_errors_inside_a_stream() -> None:
    body = {"error": {"message": "out\nof memory", "code": "memory"}}
    assert events(body) == [Failed("out of memory", "memory")]
    assert events({"error": "just text"}) == [Failed("just text")]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        ("<html><h1>Bad\n Gateway</h1>", "HTTP 502: <html><h1>Bad Gateway</h1>"),
        ("", "HTTP 502: no reason given"),
        ({"detail": "x"}, 'HTTP 502: {"detail": "x"}'),
    ],
)
def test_error_bodies_of_any_kind(body: object, message: str) -> None:
    assert error(body, 502).message == message


def test_sse_lines() -> None:
    lines = [": heartbeat", "event: x", "data: {}", "", "data:{}", "data: [DONE]"]
    assert list(sse_data(iter(lines))) == ["{}", "{}"]
