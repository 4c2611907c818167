"""The server's frames as typed events. Pure; a frame that is not what it should be never raises.

One SSE chunk may say several things at once (a block, its text, the finish), so a chunk becomes a list.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Token:
    """One token for display; `drafted`: it was proposed and the target kept it."""

    text: str
    drafted: bool = False


@dataclass(frozen=True)
class Waiting:
    """In the queue behind `ahead` other requests."""

    ahead: int


@dataclass(frozen=True)
class Reading:
    """The prompt is being read: `done` of `total` tokens."""

    done: int
    total: int


@dataclass(frozen=True)
class Started:
    """The prompt is in the cache and the first token is there."""

    prompt_tokens: int
    cached_tokens: int
    seconds: float
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Cycle:
    """One verify cycle: the accepted drafts and the target's own token; the drafts that were not kept.

    With `copied` the drafts are not the drafter's, but what followed the same tokens earlier.
    """

    drafted: int
    accepted: int
    seconds: float
    tokens: tuple[Token, ...]
    rejected: tuple[str, ...] = ()
    copied: bool = False


@dataclass(frozen=True)
class Said:
    """Text of the answer and of the thinking before it."""

    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Ended:
    """The reply is over: stop, length or cancelled."""

    reason: str


@dataclass(frozen=True)
class Totals:
    """The server's own account of the reply; zero or None where it said nothing."""

    prompt_tokens: int = 0
    reply_tokens: int = 0
    reply_seconds: float = 0.0
    tau: float | None = None


@dataclass(frozen=True)
class Failed:
    """The reply ended in an error. `code` is the server's, or "unreachable" where no server answered."""

    message: str
    code: str = ""


Event = Waiting | Reading | Started | Cycle | Said | Ended | Totals | Failed


def sse_data(lines: Iterator[str]) -> Iterator[str]:
    """The `data` of each SSE line that carries one, without the final [DONE]."""
    for line in lines:
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            yield data


def parse(data: str) -> list[Event]:
    """The events of one SSE chunk."""
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        return [Failed(f"the server sent {data[:80]!r}, which is not JSON")]
    if not isinstance(chunk, dict):
        return [Failed(f"the server sent {data[:80]!r}, expected an object")]
    if chunk.get("error"):
        return [error(chunk["error"])]
    events: list[Event] = []
    choice = _mapping(next(iter(_list(chunk.get("choices"))), None))
    delta = _mapping(choice.get("delta"))
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    facts = _mapping(chunk.get("dflash"))
    events += _facts(facts)
    if (text := _text(delta.get("content"))) or _text(reasoning):
        events.append(Said(text, _text(reasoning)))
    if isinstance(reason := choice.get("finish_reason"), str):
        events.append(Ended(_text(facts.get("finish_reason")) or reason))
    if usage := _mapping(chunk.get("usage")):
        timings = _mapping(chunk.get("timings"))
        tau = facts.get("tau")
        events.append(
            Totals(
                prompt_tokens=_int(usage.get("prompt_tokens")),
                reply_tokens=_int(usage.get("completion_tokens")),
                reply_seconds=number(timings.get("predicted_ms")) / 1e3,
                tau=number(tau) if tau is not None else None,
            )
        )
    return events


def error(body: Any, status: int | None = None) -> Failed:
    """The failure that an error object, or a body of any other kind, describes."""
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        if isinstance(inner, Mapping) and isinstance(inner.get("message"), str):
            return Failed(" ".join(inner["message"].split()), _text(inner.get("code")) or str(status or ""))
        body = json.dumps(body)
    first = " ".join(_text(body).split())[:200] or "no reason given"
    return Failed(first if status is None else f"HTTP {status}: {first}", str(status or ""))


def _facts(facts: Mapping[str, Any]) -> list[Event]:
    match facts.get("phase"):
        case "queued":
            return [Waiting(_int(facts.get("ahead")))]
        case "prefill":
            return [Reading(_int(facts.get("done")), _int(facts.get("total")))]
        case "prefilled":
            counts = _int(facts.get("prompt_tokens")), _int(facts.get("cached_tokens"))
            return [Started(*counts, number(facts.get("seconds")), _tokens(facts.get("tokens")))]
        case "block":
            rejected = tuple(_text(_mapping(token).get("text")) for token in _list(facts.get("rejected")))
            counts = _int(facts.get("drafted")), _int(facts.get("accepted"))
            seconds, copied = number(facts.get("seconds")), facts.get("copied") is True
            return [Cycle(*counts, seconds, _tokens(facts.get("tokens")), rejected, copied)]
    return []


def _tokens(value: Any) -> tuple[Token, ...]:
    tokens = map(_mapping, _list(value))
    return tuple(Token(_text(token.get("text")), token.get("origin") == "draft") for token in tokens)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _int(value: Any) -> int:
    return int(number(value))


def number(value: Any) -> float:
    """The number that a value of JSON is; 0 for what is none, or too large to be true."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    return float(value) if ok else 0.0
