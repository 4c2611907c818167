"""An answer to `/chat/completions`: content, reasoning and tool calls. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_mlx.events import Event, Finished, TokenLogprob
from dflash_mlx.server.calls import Call, Splitter, last_thoughts
from dflash_mlx.server.frames import Answer, Frames, finite
from dflash_mlx.server.jobs import Message, Step

QUICK = 2048
"""Characters of a call that any parser reads in a fraction of a second."""


class ChatFrames(Frames):
    """Of `/chat/completions`."""

    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._splitter = None if answer.offer is None else Splitter(answer.offer)
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def begin(self) -> bytes:
        return self._chunk(self._choice() | {"delta": {"role": "assistant", "content": ""}})

    def slow(self, message: Message) -> bool:
        last = isinstance(message, Step) and isinstance(message.event, Finished)
        return self._splitter is not None and (last or self._splitter.held > QUICK)

    def _choice(self, finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": 0, "delta": {}, "finish_reason": finish_reason}

    def _texts(self, event: Event) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if event.reasoning:
            deltas.append(_reasoning(event.reasoning))
        for part in self._parts(event):
            if isinstance(part, Call):
                call = self._entry(part)
                deltas.append({"tool_calls": [{"index": len(self._calls), **call}]})
                self._calls.append(call)
            else:
                deltas.append({"content": part})
                self._content.append(part)
        return [self._choice() | {"delta": delta} for delta in deltas]

    def _parts(self, event: Event) -> list[str | Call]:
        if self._splitter is None or self._answer.offer is None:
            return [event.text] if event.text else []
        parts = self._splitter.add(event.text, last=isinstance(event, Finished))
        if self._splitter.silent and isinstance(event, Finished) and event.finish_reason == "stop":
            parts += last_thoughts("".join(self.tally.reasoning), self._answer.offer)
        return parts

    def _entry(self, call: Call) -> dict[str, Any]:
        """Some templates insist on an id of nine letters and digits, others on the model's own."""
        fresh = hashlib.sha256(f"{self._answer.id} {len(self._calls)}".encode()).hexdigest()[:9]
        known = call.id is None or any(call.id == other["id"] for other in self._calls)
        return {
            "id": fresh if known else call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    @property
    def _finish_reason(self) -> str:
        reason = self.tally.finish_reason
        return "tool_calls" if self._calls and reason == "stop" else reason

    @property
    def _enough(self) -> bool:
        return self._splitter is not None and self._splitter.over

    def _whole(self) -> dict[str, Any]:
        text, reasoning = "".join(self._content), "".join(self.tally.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message |= _reasoning(reasoning)
        if self._calls:
            message |= {"content": text or None, "tool_calls": self._calls}
        return {"message": message}

    def _read_logprobs(self, entries: Sequence[TokenLogprob], texts: Mapping[int, str]) -> Any:
        return {
            "content": [
                {
                    **_logprob(texts[entry.token], entry.logprob),
                    "top_logprobs": [_logprob(texts[token], value) for token, value in entry.top],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def _join_logprobs(self, parts: list[Any]) -> Any:
        return {"content": [entry for part in parts for entry in part["content"]], "refusal": None}


def _reasoning(text: str) -> dict[str, str]:
    """Under both names that clients know."""
    return {"reasoning_content": text, "reasoning": text}


def _logprob(text: str, value: float) -> dict[str, Any]:
    whole = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": finite(value), "bytes": whole}
