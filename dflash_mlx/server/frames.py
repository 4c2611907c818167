"""What becomes of a request -> bytes for its client, streamed or whole. Pure.

A streamed answer is `begin`, `add` for every message, and `heartbeat` when nothing was said for long; the
other kind is `add` for every message, then `body`. Both are made of the same parts.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.events import Block, Event, Finished, Prefilled, Prefilling, TokenLogprob
from dflash_mlx.server.calls import Offer
from dflash_mlx.server.jobs import Begun, Failed, Message, Queued, Step
from dflash_mlx.server.refusals import encode, refusal
from dflash_mlx.server.tally import Tally

LEAST_LOGPROB = -9999.0
"""JSON knows no infinity; OpenAI writes this for it."""

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Answer:
    """What all parts of one answer share.

    Attributes:
        model: the real name of what answers.
        logprobs: they were asked for.
        offer: what the model may call.
        facts: what the `dflash` object of the answer says besides the figures.
    """

    id: str
    created: int
    model: str
    include_usage: bool = False
    include_dflash: bool = False
    logprobs: bool = False
    offer: Offer | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Frames(ABC):
    """One answer, from its first frame to its last.

    Attributes:
        over: it is complete, whatever the engine still says.
        error: what ended it, if it failed.
    """

    chunk_object: str
    body_object: str

    def __init__(self, answer: Answer) -> None:
        self.tally = Tally()
        self.over = False
        self.error: BaseException | None = None
        self._answer = answer
        self._logprobs: list[Any] = []

    # --- streamed -------------------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> bytes:
        """The first frame, before anything is known."""

    def heartbeat(self) -> bytes:
        """A frame that says nothing, for clients that give up on silence."""
        return self._chunk(self._choice())

    def add(self, message: Message) -> bytes:
        """Take in the next message; the frames that report it, often none."""
        if self.over:
            return b""
        match message:
            case Failed(error):
                self.over, self.error = True, error
                return _data(refusal(error, self._answer.id).body) + DONE
            case Queued(ahead):
                return self._dflash_only({"phase": "queued", "ahead": ahead})
            case Begun(prompt_tokens):
                return self._dflash_only({"phase": "prefill", "done": 0, "total": prompt_tokens})
            case Step(event, texts):
                self.tally.add(event)
                frames = self._event(event, texts)
                self.over = isinstance(event, Finished)
                return frames + self.add(Step(Finished())) if self._enough and not self.over else frames

    def slow(self, message: Message) -> bool:
        """Whether to take in this message may take long."""
        return False

    def texts_of(self, event: Event) -> set[int]:
        """The tokens of an event that its frames show one by one."""
        ids: set[int] = set()
        if self._answer.include_dflash:
            ids.update(event.tokens, event.rejected if isinstance(event, Block) else ())
        for entry in event.logprobs:
            ids.update([entry.token], (token for token, _ in entry.top))
        return ids

    def _event(self, event: Event, texts: Mapping[int, str]) -> bytes:
        logprobs = None
        if self._answer.logprobs and event.logprobs:
            logprobs = self._read_logprobs(event.logprobs, texts)
            self._logprobs.append(logprobs)
        choices = self._texts(event)
        finished = isinstance(event, Finished)
        dflash = _phase(event, texts) if self._answer.include_dflash else None
        if not choices and not finished and (logprobs is not None or dflash is not None):
            choices = [self._choice()]
        if logprobs is not None:
            choices[-1]["logprobs"] = logprobs
        frames = [self._chunk(choice) for choice in choices]
        if isinstance(event, Finished):
            frames = [*frames, self._chunk(self._choice(self._finish_reason), dflash), *self._end()]
        elif choices and dflash is not None:
            frames[0] = self._chunk(choices[0], dflash)
        return b"".join(frames)

    def _end(self) -> list[bytes]:
        if not self._answer.include_usage:
            return [DONE]
        figures = {"usage": self.tally.usage, "timings": self.tally.timings, "dflash": self._figures()}
        return [_data({**self._head(self.chunk_object), "choices": [], **figures}), DONE]

    def _dflash_only(self, dflash: dict[str, Any]) -> bytes:
        return self._chunk(self._choice(), dflash) if self._answer.include_dflash else b""

    def _chunk(self, choice: dict[str, Any], dflash: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._head(self.chunk_object), "choices": [choice]}
        return _data(chunk if dflash is None else {**chunk, "dflash": dflash})

    # --- whole ------------------------------------------------------------------------------------

    def body(self) -> dict[str, Any]:
        """The whole answer, after the last message."""
        choice = {
            "index": 0,
            **self._whole(),
            "logprobs": self._join_logprobs(self._logprobs) if self._answer.logprobs else None,
            "finish_reason": self._finish_reason,
        }
        return {
            **self._head(self.body_object),
            "choices": [choice],
            "usage": self.tally.usage,
            "timings": self.tally.timings,
            "dflash": self._figures(),
        }

    # --- parts --------------------------------------------------------------------------------------

    def _head(self, kind: str) -> dict[str, Any]:
        answer = self._answer
        return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}

    def _figures(self) -> dict[str, Any]:
        figures = {"tau": self.tally.tau, "cycles": self.tally.cycles, "seed": self.tally.seed}
        return {**figures, **self._answer.facts}

    @property
    def _finish_reason(self) -> str:
        return self.tally.finish_reason

    @property
    def _enough(self) -> bool:
        """Whether the answer ends here, though the reply would go on."""
        return False

    @abstractmethod
    def _choice(self, finish_reason: str | None = None) -> dict[str, Any]:
        """A choice without text."""

    @abstractmethod
    def _texts(self, event: Event) -> list[dict[str, Any]]:
        """The choices that hold an event's texts, none of them empty."""

    @abstractmethod
    def _whole(self) -> dict[str, Any]:
        """What of the only choice holds the texts."""

    @abstractmethod
    def _read_logprobs(self, entries: Sequence[TokenLogprob], texts: Mapping[int, str]) -> Any:
        """An event's log probabilities."""

    @abstractmethod
    def _join_logprobs(self, parts: list[Any]) -> Any:
        """A reply's, from its events'."""


class CompletionFrames(Frames):
    """Of `/completions`."""

    chunk_object = body_object = "text_completion"

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._offset = 0  # of the next token in the reply's text

    def begin(self) -> bytes:
        return self.heartbeat()

    def _choice(self, finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": 0, "text": "", "logprobs": None, "finish_reason": finish_reason}

    def _texts(self, event: Event) -> list[dict[str, Any]]:
        return [self._choice() | {"text": event.text}] if event.text else []

    def _whole(self) -> dict[str, Any]:
        return {"text": "".join(self.tally.text)}

    def _read_logprobs(self, entries: Sequence[TokenLogprob], texts: Mapping[int, str]) -> Any:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(texts[entry.token])
        return {
            "tokens": [texts[entry.token] for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [{texts[t]: finite(value) for t, value in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _join_logprobs(self, parts: list[Any]) -> Any:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [entry for part in parts for entry in part[name]] for name in names}


def _data(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def finite(value: float) -> float:
    """A log probability as JSON can write it."""
    return max(value, LEAST_LOGPROB)


def _phase(event: Event, texts: Mapping[int, str]) -> dict[str, Any]:
    """An event as the `dflash` object of a frame."""

    def tokens(ids: Sequence[int]) -> list[dict[str, Any]]:
        return [{"id": token, "text": texts[token]} for token in ids]

    match event:
        case Prefilling():
            return {"phase": "prefill", "done": event.done, "total": event.total}
        case Prefilled():
            return {
                "phase": "prefilled",
                "prompt_tokens": event.prompt_tokens,
                "cached_tokens": event.cached_tokens,
                "seconds": event.seconds,
                "seed": event.seed,
                "tokens": [token | {"origin": "target"} for token in tokens(event.tokens)],
            }
        case Block():
            return {
                "phase": "block",
                "drafted": event.drafted,
                "accepted": event.accepted,
                "copied": event.copied,
                "seconds": event.seconds,
                "wait_seconds": event.wait_seconds,
                "tokens": [
                    token | {"origin": "draft" if i < event.accepted else "target"}
                    for i, token in enumerate(tokens(event.tokens))
                ],
                "rejected": tokens(event.rejected),
            }
        case Finished():
            return {"phase": "finished", "finish_reason": event.finish_reason}
    raise AssertionError(event)
