"""What a session emits while it decodes, as frozen dataclasses that survive JSON.

A stream is one `Prefilling` between two chunks of the prompt, one `Prefilled`, then one `Block` per verify
cycle, then one `Finished`. Every event has `tokens` and `text`, so that joining either over a stream gives
the whole reply.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a token under the target's raw logits, and of the most probable ids, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @staticmethod
    def from_json(obj: dict[str, Any]) -> "TokenLogprob":
        """From the JSON object that an event holds."""
        return TokenLogprob(obj["token"], obj["logprob"], tuple((t, p) for t, p in obj["top"]))


@dataclass(frozen=True)
class Event:
    """What a step added to the reply.

    Attributes:
        tokens: ids that were committed.
        text, reasoning: whole characters of the answer and of the thinking before it.
        logprobs: one per token, if they were asked for.
    """

    tokens: tuple[int, ...] = ()
    text: str = ""
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` turns back into an equal event."""
        return {"event": type(self).__name__, **asdict(self)}

    @staticmethod
    def from_json(obj: dict[str, Any]) -> "Event":
        """The event that `to_json` described.

        Raises:
            ValueError: `obj["event"]` names no event.
        """
        kinds = {cls.__name__: cls for cls in (Prefilling, Prefilled, Block, Finished)}
        fields = dict(obj)
        name = fields.pop("event", None)
        if name not in kinds:
            raise ValueError(f"event is {name!r}, expected one of {sorted(kinds)}")
        for field in {"tokens", "rejected", "fallbacks"} & fields.keys():
            fields[field] = tuple(fields[field])
        fields["logprobs"] = tuple(TokenLogprob.from_json(entry) for entry in fields["logprobs"])
        return kinds[name](**fields)


@dataclass(frozen=True)
class Prefilling(Event):
    """A part of the prompt is in the cache: `done` of `total` tokens."""

    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Prefilled(Event):
    """The prompt is in the cache; `tokens` is the first token, chosen from the prompt's last row.

    Attributes:
        cached_tokens: of the prompt's, those whose rows an earlier request had left.
        seed: the one that was given or drawn: with the same settings it gives the same reply.
        fallbacks: what runs slower than it could, because a kernel does not exist or failed here, and why.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    seed: int = 0
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block(Event):
    """One verify cycle.

    Attributes:
        drafted: draft tokens that the target verified (0 in a plain cycle).
        accepted: how many of them the target itself would have chosen, in a row from the first.
        rejected: the other drafts, which are no part of the reply.
        copied: whether the drafts are not the drafter's, but what followed the same tokens earlier.
        seconds: the whole cycle, from drafting to commit.
        wait_seconds: the part of it that was spent waiting for the device.
    """

    drafted: int = 0
    accepted: int = 0
    rejected: tuple[int, ...] = ()
    copied: bool = False
    seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def committed(self) -> int:
        """Tokens that this cycle added: `accepted + 1`, fewer only where the reply ended inside the block."""
        return len(self.tokens)


@dataclass(frozen=True)
class Finished(Event):
    """The reply is complete; `text` is what the detokeniser still held."""

    finish_reason: FinishReason = "stop"
