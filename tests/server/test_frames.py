"""Events -> frames, byte for byte."""

import json
from typing import Any

import pytest

from dflash_mlx.errors import NumericsError
from dflash_mlx.events import Block, Event, Finished, Prefilled, Prefilling, TokenLogprob
from dflash_mlx.server.chat_frames import ChatFrames
from dflash_mlx.server.frames import Answer, CompletionFrames, Frames
from dflash_mlx.server.jobs import Begun, Failed, Message, Queued, Step
from dflash_mlx.server.metrics import Counts
from dflash_mlx.server.refusals import encode

ANSWER = Answer(id="i", created=7, model="m")
HEAD = '"id":"i","object":"chat.completion.chunk","created":7,"model":"m"'
TEXTS = {1: "a", 2: "b", 3: "c", 9: "\ufffd"}
EVENTS: list[Event] = [
    Prefilled((1,), "", "a", prompt_tokens=5, seconds=0.25, seed=11),
    Block(
        (2, 3, 1),
        "c",
        "bé",
        drafted=4,
        accepted=2,
        rejected=(9, 9),
        copied=True,
        seconds=0.5,
        wait_seconds=0.25,
    ),
    Block((2,), "", drafted=2, accepted=0, rejected=(3, 1), seconds=0.5, wait_seconds=0.125),
    Finished((), "🙂", finish_reason="stop"),
]


def chunk(delta: str, finish: str = "null", extra: str = "") -> bytes:
    choice = f'{{"index":0,"delta":{delta},"finish_reason":{finish}}}'
    return f'data: {{{HEAD},"choices":[{choice}]{extra}}}\n\n'.encode()


def told(frames: Frames, events: list[Event] = EVENTS) -> list[bytes]:
    return [frames.add(Step(event, TEXTS)) for event in events]


def test_a_plain_chat_stream() -> None:
    frames = ChatFrames(ANSWER)
    assert frames.begin() == chunk('{"role":"assistant","content":""}')
    assert frames.heartbeat() == chunk("{}")
    assert frames.add(Queued(2)) == frames.add(Begun(5)) == b""
    assert frames.add(Step(Prefilling(done=2, total=5))) == b""
    assert told(frames) == [
        chunk('{"reasoning_content":"a","reasoning":"a"}'),
        chunk('{"reasoning_content":"bé","reasoning":"bé"}') + chunk('{"content":"c"}'),
        b"",
        chunk('{"content":"🙂"}') + chunk("{}", '"stop"') + b"data: [DONE]\n\n",
    ]


USAGE = (
    '"usage":{"prompt_tokens":5,"completion_tokens":5,"total_tokens":10,'
    '"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":3}},'
    '"timings":{"prompt_n":5,"prompt_ms":250.0,"predicted_n":5,"predicted_ms":1000.0,'
    '"draft_n":6,"draft_n_accepted":2,"cache_n":0},'
    '"dflash":{"tau":2.0,"cycles":2,"seed":11}'
)


def test_usage_comes_after_the_finish_and_only_if_asked_for() -> None:
    last = told(ChatFrames(Answer("i", 7, "m", include_usage=True)))[-1]
    usage = f'data: {{{HEAD},"choices":[],{USAGE}}}\n\n'.encode()
    assert last.endswith(chunk("{}", '"stop"') + usage + b"data: [DONE]\n\n")


def test_whole_is_what_the_stream_says() -> None:
    frames = ChatFrames(ANSWER)
    told(frames)
    message = '{"role":"assistant","content":"c🙂","reasoning_content":"abé","reasoning":"abé"}'
    head = HEAD.replace(".chunk", "")
    choice = f'{{"index":0,"message":{message},"logprobs":null,"finish_reason":"stop"}}'
    expected = f'{{{head},"choices":[{choice}],{USAGE}}}'
    assert json.dumps(frames.body(), ensure_ascii=False, separators=(",", ":")) == expected


def test_a_frame_is_one_line_for_whoever_reads_it_by_lines() -> None:
    text = "one\u2028two\u2029three\x85four\x0b\x1cé\ud83d"
    [line] = encode({"text": text}).decode().splitlines()
    assert json.loads(line) == {"text": text}
    assert "é" in line


def test_tau_counts_the_tokens_of_a_block_in_which_the_reply_ended() -> None:
    frames, counts = ChatFrames(ANSWER), Counts()
    events: list[Event] = [
        Prefilled((1,), "a"),
        Block((2, 3, 1, 2, 3), "b", drafted=4, accepted=4),
        Block((2,), "c", drafted=4, accepted=4),
        Block((2,), "d"),
        Finished(),
    ]
    told(frames, events)
    for event in events:
        counts.count(event)
    assert frames.body()["dflash"] == {"tau": 3.0, "cycles": 3, "seed": 0}
    assert counts.drafted_tokens / counts.drafted_cycles == 3.0


def test_without_reasoning_no_field_says_so() -> None:
    frames = ChatFrames(ANSWER)
    told(frames, [Prefilled((1,), "a"), Finished((), "")])
    assert frames.body()["choices"][0]["message"] == {"role": "assistant", "content": "a"}


def test_the_cycles_of_a_stream() -> None:
    frames = ChatFrames(Answer("i", 7, "m", include_dflash=True))
    messages: list[Message] = [
        Queued(2),
        Begun(5),
        Step(Prefilling(done=2, total=5), {}),
        *(Step(e, TEXTS) for e in EVENTS),
    ]
    parts = [json.loads(f[6:]) for m in messages for f in frames.add(m).split(b"\n\n") if f[6:7] == b"{"]
    token = [{"id": i, "text": t} for i, t in TEXTS.items()]
    assert [part["dflash"] for part in parts if "dflash" in part] == [
        {"phase": "queued", "ahead": 2},
        {"phase": "prefill", "done": 0, "total": 5},
        {"phase": "prefill", "done": 2, "total": 5},
        {
            "phase": "prefilled",
            "prompt_tokens": 5,
            "cached_tokens": 0,
            "seconds": 0.25,
            "seed": 11,
            "tokens": [token[0] | {"origin": "target"}],
        },
        {
            "phase": "block",
            "drafted": 4,
            "accepted": 2,
            "copied": True,
            "seconds": 0.5,
            "wait_seconds": 0.25,
            "tokens": [
                token[1] | {"origin": "draft"},
                token[2] | {"origin": "draft"},
                token[0] | {"origin": "target"},
            ],
            "rejected": [token[3], token[3]],
        },
        {
            "phase": "block",
            "drafted": 2,
            "accepted": 0,
            "copied": False,
            "seconds": 0.5,
            "wait_seconds": 0.125,
            "tokens": [token[1] | {"origin": "target"}],
            "rejected": [token[2], token[0]],
        },
        {"phase": "finished", "finish_reason": "stop"},
    ]
    silent = [part["choices"][0]["delta"] for part in parts[:3]]
    assert silent == [{}, {}, {}]
    assert parts[-1]["dflash"]["phase"] == "finished"
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    assert "dflash" not in parts[-2]  # the text that was held comes before
    [mixed] = [part for part in parts if part.get("dflash", {}).get("accepted") == 2]
    assert "reasoning" in mixed["choices"][0]["delta"]  # of two frames for an event, the first tells of it


def test_tokens_are_read_one_by_one_only_if_they_are_shown() -> None:
    entry = TokenLogprob(1, -0.5, ((1, -0.5), (3, -1.0)))
    event = Block((1,), "a", logprobs=(entry,), drafted=2, rejected=(9,))
    assert ChatFrames(ANSWER).texts_of(EVENTS[1]) == set()
    assert ChatFrames(ANSWER).texts_of(event) == {1, 3}
    assert ChatFrames(Answer("i", 7, "m", include_dflash=True)).texts_of(EVENTS[1]) == {1, 2, 3, 9}


LOGPROBS = (
    TokenLogprob(1, -0.5, ((1, -0.5), (9, float("-inf")))),
    TokenLogprob(2, -2.0, ((3, -1.0),)),
)


def test_chat_logprobs() -> None:
    frames = ChatFrames(Answer("i", 7, "m", logprobs=True))
    [first, silent, _] = told(
        frames, [Prefilled((1, 2), "ab", logprobs=LOGPROBS), Block((2,), logprobs=LOGPROBS[1:]), Finished()]
    )
    one = {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "\ufffd", "logprob": -9999.0, "bytes": None},
        ],
    }
    two = {
        "token": "b",
        "logprob": -2.0,
        "bytes": [98],
        "top_logprobs": [{"token": "c", "logprob": -1.0, "bytes": [99]}],
    }
    assert json.loads(first[6:])["choices"][0] == {
        "index": 0,
        "delta": {"content": "ab"},
        "finish_reason": None,
        "logprobs": {"content": [one, two], "refusal": None},
    }
    assert json.loads(silent[6:])["choices"][0]["logprobs"] == {"content": [two], "refusal": None}
    assert frames.body()["choices"][0]["logprobs"] == {"content": [one, two, two], "refusal": None}


def test_a_completion() -> None:
    frames = CompletionFrames(Answer("i", 7, "m", logprobs=True))
    head = '"id":"i","object":"text_completion","created":7,"model":"m"'
    empty = f'data: {{{head},"choices":[{{"index":0,"text":"","logprobs":null,"finish_reason":null}}]}}\n\n'
    assert frames.begin() == frames.heartbeat() == empty.encode()
    [first, second, last] = told(
        frames,
        [
            Prefilled((1, 2), "ab", logprobs=LOGPROBS),
            Block((2,), "b", logprobs=LOGPROBS[1:]),
            Finished((), "!"),
        ],
    )
    entry: dict[str, Any] = {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"a": -0.5, "\ufffd": -9999.0}, {"c": -1.0}],
        "text_offset": [0, 1],
    }
    assert json.loads(first[6:])["choices"][0] == {
        "index": 0,
        "text": "ab",
        "logprobs": entry,
        "finish_reason": None,
    }
    assert json.loads(second[6:])["choices"][0]["logprobs"]["text_offset"] == [2]
    assert [json.loads(f[6:])["choices"][0]["text"] for f in last.split(b"\n\n")[:2]] == ["!", ""]
    whole = frames.body()
    assert whole["object"] == "text_completion"
    [choice] = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abb!", "stop")
    assert choice["logprobs"]["tokens"] == ["a", "b", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NumericsError("not finite"), "not finite (request i)"),
        (KeyError("secret"), "internal error in request i: the server's log says more"),
    ],
)
def test_a_failure_is_a_frame_and_the_end(error: Exception, message: str) -> None:
    frame, done, rest = ChatFrames(ANSWER).add(Failed(error)).split(b"\n\n")
    assert done == b"data: [DONE]"
    assert rest == b""
    said = json.loads(frame[6:])
    assert said["error"]["message"] == message
    assert said["error"]["type"] == "server_error"
    assert set(said["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in frame.decode()
