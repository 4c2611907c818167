"""A reply with reasoning and tool calls: what is streamed joins to what comes whole, at any block size."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dflash_mlx.chat_template import CHANNELS
from dflash_mlx.events import Block, Event, Finished, FinishReason, Prefilled, TokenLogprob
from dflash_mlx.server.chat_frames import ChatFrames
from dflash_mlx.server.frames import Answer
from dflash_mlx.server.jobs import Failed, Step
from dflash_mlx.text import Reply, Thinking
from server.formats import NOW, SAMPLES, WEATHER, offer

CLOSED = Thinking("<think>", "</think>", open=False)
OPEN = Thinking("<think>", "</think>", open=True)
HARMONY = CHANNELS["<|channel|>", "<|message|>"]
NOW_CALL = '<tool_call>{"name": "now"}</tool_call>'
WEATHER_CALL = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
ANSWER = Answer(id="i", created=7, model="m", offer=offer("json_tools"))


class Bytes:
    """A tokenizer of bytes."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")


def events(
    text: str, thinking: Thinking | None = None, *, seed: int | None = None, reason: FinishReason = "stop"
) -> Iterator[Event]:
    """A reply of this text in blocks of any sizes, or without a seed in single tokens."""
    dice = random.Random(seed)
    most = 1 if seed is None else 12
    reply = Reply(Bytes(), eos=frozenset(), thinking=thinking)
    ids = tuple(text.encode())
    kind: type[Prefilled | Block] = Prefilled
    while ids:
        size = dice.randint(1, most)
        reply.take(ids[:size])
        yield kind(ids[:size], *reply.drain())
        ids, kind = ids[size:], Block
    yield Finished((), *reply.finish(), finish_reason=reason)


def parts(stream: bytes) -> list[dict[str, Any]]:
    frames = stream.decode().split("\n\n")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames if frame.startswith("data: {")]


def told(told_events: Iterator[Event], answer: Answer = ANSWER) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice of a whole answer, and the same put together from the stream of the same events."""
    frames = ChatFrames(answer)
    stream = frames.begin() + b"".join(frames.add(Step(event)) for event in told_events)
    [whole] = frames.body()["choices"]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    reasons = []
    for part in parts(stream):
        [choice] = part["choices"]
        delta = choice["delta"]
        assert len(delta) <= 2
        for name in ("content", "reasoning_content", "reasoning"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", []):
            assert call.pop("index") == len(calls)
            calls.append(call)
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    [reason] = reasons
    return whole, {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}


def read(choice: dict[str, Any]) -> tuple[str, str | None, list[Any], str]:
    """Reasoning, content, names and arguments of the calls, and how it ended."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    meant = [(call["name"], json.loads(call["arguments"])) for call in calls]
    return message.get("reasoning_content", ""), message["content"], meant, choice["finish_reason"]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_format_streamed_and_whole(name: str) -> None:
    text, calls = SAMPLES[name]
    answer = replace(ANSWER, offer=offer(name))
    whole, streamed = told(events(f"<think>\nWhy?\n</think>\n\nSo: {text}", CLOSED), answer)
    assert whole == streamed
    assert read(whole) == ("Why?", "So:", list(calls), "tool_calls")
    for seed in range(20):
        again, streamed = told(events(f"<think>\nWhy?\n</think>\n\nSo: {text}", CLOSED, seed=seed), answer)
        assert again == streamed == whole


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("Hi", None, ("", "Hi", [], "stop")),
        (NOW_CALL, None, ("", None, [NOW], "tool_calls")),
        (f"Hi\n{NOW_CALL}\n", None, ("", "Hi", [NOW], "tool_calls")),
        (f"<think>a</think>{NOW_CALL}", CLOSED, ("a", None, [NOW], "tool_calls")),
        (f"a</think>b{NOW_CALL}c", OPEN, ("a", "bc", [NOW], "tool_calls")),
        (f"a {NOW_CALL} b</think>c", OPEN, (f"a {NOW_CALL} b", "c", [], "stop")),
        (f"a {NOW_CALL}</think>c", OPEN, (f"a {NOW_CALL}", "c", [], "stop")),
        (f"a {NOW_CALL}</think>{NOW_CALL}", OPEN, (f"a {NOW_CALL}", None, [NOW], "tool_calls")),
        # reasoning that the model forgot to end
        (f"a {NOW_CALL}", OPEN, (f"a {NOW_CALL}", None, [NOW], "tool_calls")),
        (f"a {NOW_CALL}\n{NOW_CALL}\n", OPEN, (f"a {NOW_CALL}\n{NOW_CALL}\n", None, [NOW] * 2, "tool_calls")),
        (f"{NOW_CALL} a {NOW_CALL}", OPEN, (f"{NOW_CALL} a {NOW_CALL}", None, [NOW], "tool_calls")),
        (f"a {NOW_CALL} b", OPEN, (f"a {NOW_CALL} b", "", [], "stop")),
        (f"```\n{NOW_CALL}", OPEN, (f"```\n{NOW_CALL}", "", [], "stop")),
        # what is cut short
        ('<tool_call>{"name": "now"}', None, ("", '<tool_call>{"name": "now"}', [], "stop")),
        ("<think>a", CLOSED, ("a", "", [], "stop")),
    ],
)
def test_calls_and_reasoning(text: str, thinking: Thinking | None, expected: Any) -> None:
    for seed in (None, *range(10)):
        whole, streamed = told(events(text, thinking, seed=seed))
        assert whole == streamed
        assert read(whole) == expected


def test_messages_to_tools_among_others() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + SAMPLES["harmony"][0]
    )
    for seed in (None, *range(10)):
        whole, streamed = told(events(text, HARMONY, seed=seed), replace(ANSWER, offer=offer("harmony")))
        assert whole == streamed
        assert read(whole) == ("Hm.", "I look.", [WEATHER], "tool_calls")


@pytest.mark.parametrize("text", [f"a {NOW_CALL}", f"<think>{NOW_CALL}"])
def test_a_reply_that_was_cut_off_says_so(text: str) -> None:
    whole, streamed = told(events(text, CLOSED, reason="length"))
    assert whole == streamed
    assert whole["finish_reason"] == "length"
    assert ("tool_calls" in whole["message"]) == text.startswith("a")


def test_without_an_offer_nothing_is_a_call() -> None:
    whole, streamed = told(events(NOW_CALL), replace(ANSWER, offer=None))
    assert whole == streamed
    assert read(whole) == ("", NOW_CALL, [], "stop")


# --- frames -----------------------------------------------------------------------------------------


def test_the_frames_of_calls() -> None:
    frames = ChatFrames(ANSWER)
    said = [
        parts(frames.add(Step(event)))
        for event in (
            Prefilled((1,), "I"),
            Block((2,), " look.\n\n<tool_"),
            Block((3,), 'call>{"name": "get_weather", "arguments": {"city": "é"}}</tool_call>\n<tool_call>'),
            Block((4,), '{"name": "now"}'),
            Block((5,), f"</tool_call> {NOW_CALL}\n"),
            Finished(),
        )
    ]
    deltas = [[part["choices"][0]["delta"] for part in one] for one in said]

    def call(index: int, name: str, arguments: str) -> dict[str, Any]:
        [entry] = [c for one in deltas for d in one for c in d.get("tool_calls", []) if c["index"] == index]
        function = {"name": name, "arguments": arguments}
        assert entry == {"index": index, "id": entry["id"], "type": "function", "function": function}
        return {"tool_calls": [entry]}

    weather, now = call(0, "get_weather", '{"city": "é"}'), [call(1, "now", "{}"), call(2, "now", "{}")]
    assert deltas == [[{"content": "I"}], [{"content": " look."}], [weather], [], now, [{}]]
    assert said[-1][0]["choices"][0]["finish_reason"] == "tool_calls"
    ids = [entry["tool_calls"][0]["id"] for entry in (weather, *now)]
    assert len(set(ids)) == 3
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    message = frames.body()["choices"][0]["message"]
    assert [entry["id"] for entry in message["tool_calls"]] == ids
    assert all(entry.keys() == {"id", "type", "function"} for entry in message["tool_calls"])
    other = ChatFrames(replace(ANSWER, id="j"))
    other.add(Step(Finished((), NOW_CALL)))
    assert other.body()["choices"][0]["message"]["tool_calls"][0]["id"] not in ids


def test_the_models_own_id_is_kept_once() -> None:
    text = f"[TOOL_CALLS]{json.dumps([{'name': 'now', 'arguments': {}, 'id': 'x'}] * 2)}"
    frames = ChatFrames(replace(ANSWER, offer=offer("mistral")))
    frames.add(Step(Finished((), text)))
    first, second = frames.body()["choices"][0]["message"]["tool_calls"]
    assert first["id"] == "x"
    assert len(second["id"]) == 9


def test_one_call_ends_the_answer_if_there_may_be_no_more() -> None:
    answer = replace(
        ANSWER, offer=offer("json_tools", parallel=False), include_usage=True, include_dflash=True
    )
    frames = ChatFrames(answer)
    texts = {1: "a"}
    assert not frames.add(Step(Prefilled((1,), "Hi "), texts)).endswith(b"[DONE]\n\n")
    assert not frames.over
    last = frames.add(Step(Block((1, 1), f"{NOW_CALL} and {NOW_CALL}", drafted=2), texts))
    assert frames.over
    assert last.endswith(b"data: [DONE]\n\n")
    [call, finish, usage] = parts(last)
    assert call["dflash"]["phase"] == "block"
    assert call["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "now"
    assert finish["choices"] == [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]
    assert finish["dflash"] == {"phase": "finished", "finish_reason": "stop"}
    assert usage["usage"]["completion_tokens"] == 3
    before = frames.body()
    assert frames.add(Step(Block((1,), "more"), texts)) == b""
    assert frames.add(Step(Finished((), "", finish_reason="cancelled"))) == b""
    assert frames.add(Failed(ValueError())) == b""
    assert frames.body() == before
    assert read(before["choices"][0]) == ("", "Hi", [NOW], "tool_calls")
    replies = (
        (f"a{NOW_CALL}b{WEATHER_CALL}", None),
        (f"a{NOW_CALL}{WEATHER_CALL}", OPEN),
        (f"{WEATHER_CALL}a{NOW_CALL}", OPEN),
    )
    for text, thinking in replies:
        whole, streamed = told(
            events(text, thinking), replace(ANSWER, offer=offer("json_tools", parallel=False))
        )
        assert whole == streamed
        assert read(whole)[2:] == ([NOW], "tool_calls")


def test_the_engines_facts_and_logprobs_go_on_while_a_call_is_held() -> None:
    entry = TokenLogprob(1, -0.5, ((1, -0.5),))
    frames = ChatFrames(replace(ANSWER, logprobs=True, include_dflash=True))
    texts = {1: "a"}
    held = parts(frames.add(Step(Block((1,), "<tool_call>{", logprobs=(entry,), drafted=1), texts)))
    [frame] = held
    assert frame["choices"][0]["delta"] == {}
    assert frame["dflash"]["phase"] == "block"
    assert [one["token"] for one in frame["choices"][0]["logprobs"]["content"]] == ["a"]
    [frame] = parts(
        frames.add(Step(Block((1,), '"name": "now"}</tool_call>', logprobs=(entry,), drafted=1), texts))
    )
    assert "tool_calls" in frame["choices"][0]["delta"]
    assert len(frame["choices"][0]["logprobs"]["content"]) == 1
    assert len(frames.body()["choices"][0]["logprobs"]["content"]) == 2
