"""A reply as it adds up: what usage, timings and the whole body report."""

from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.events import Block, Event, Finished, FinishReason, Prefilled


@dataclass
class Tally:
    """Of one reply, from its events.

    Attributes:
        reasoning_tokens: where one verify cycle ends the reasoning and begins the answer, its tokens are
            shared out by the lengths of the two texts.
        prefill_seconds, decode_seconds: on the engine's thread, whatever the network did.
        drafted_tokens: committed by cycles with a draft, of which there were `drafted_cycles`.
    """

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    reasoning_tokens: int = 0
    seed: int = 0
    finish_reason: FinishReason = "stop"
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_cycles: int = 0
    drafted_tokens: int = 0

    def add(self, event: Event) -> None:
        """Take in the next event."""
        self.text.append(event.text)
        self.reasoning.append(event.reasoning)
        self.tokens += len(event.tokens)
        if event.reasoning:
            share = len(event.reasoning) / (len(event.reasoning) + len(event.text))
            self.reasoning_tokens += round(share * len(event.tokens))
        match event:
            case Prefilled():
                self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
                self.prefill_seconds, self.seed = event.seconds, event.seed
            case Block():
                self.cycles += 1
                self.decode_seconds += event.seconds
                self.drafted += event.drafted
                self.accepted += event.accepted
                if event.drafted:
                    self.drafted_cycles += 1
                    self.drafted_tokens += event.committed
            case Finished():
                self.finish_reason = event.finish_reason

    @property
    def usage(self) -> dict[str, Any]:
        """As OpenAI counts; an end-of-sequence token that the model chose is a completion token."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    @property
    def timings(self) -> dict[str, Any]:
        """As llama.cpp reports them."""
        return {
            "prompt_n": self.prompt_tokens - self.cached_tokens,
            "prompt_ms": round(1e3 * self.prefill_seconds, 3),
            "predicted_n": self.tokens,
            "predicted_ms": round(1e3 * self.decode_seconds, 3),
            "draft_n": self.drafted,
            "draft_n_accepted": self.accepted,
            "cache_n": self.cached_tokens,
        }

    @property
    def tau(self) -> float | None:
        """Acceptance length: tokens per verify cycle with a draft, bonus included."""
        return self.drafted_tokens / self.drafted_cycles if self.drafted_cycles else None
