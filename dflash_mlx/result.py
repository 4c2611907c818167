"""A whole reply, gathered from the events of its stream."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_mlx.events import Block, Event, Finished, FinishReason, Prefilled, TokenLogprob


@dataclass(frozen=True)
class Result:
    """A whole reply.

    Attributes:
        tokens: ids of the reply; the last one is the end-of-sequence token if the target chose it.
        text: the answer; contains neither the end-of-sequence token nor a stop string.
        reasoning: the thinking before it, if the model's template marks it.
        cached_tokens: of the prompt's, those whose rows an earlier request had left.
        seed: with the same settings it gives the same reply.
        logprobs: one per token, if they were asked for.
        fallbacks: what ran slower than it could, and why.
        cycles: one per verify pass.
        prefill_seconds, decode_seconds: time to the first token, and from there to the end.
    """

    tokens: tuple[int, ...]
    text: str
    reasoning: str
    finish_reason: FinishReason
    prompt_tokens: int
    cycles: tuple[Block, ...]
    prefill_seconds: float
    decode_seconds: float
    seed: int
    logprobs: tuple[TokenLogprob, ...]
    fallbacks: tuple[str, ...] = ()
    cached_tokens: int = 0

    @property
    def tau(self) -> float | None:
        """Acceptance length: mean tokens per verify cycle, bonus included, over cycles with drafts."""
        drafted = [cycle.committed for cycle in self.cycles if cycle.drafted]
        return sum(drafted) / len(drafted) if drafted else None

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second, of those that were not cached."""
        read = self.prompt_tokens - self.cached_tokens
        return read / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first per second."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else 0.0


def collect(events: Iterator[Event]) -> Result:
    """Drain a stream into a `Result`."""
    tokens: list[int] = []
    text: list[str] = []
    reasoning: list[str] = []
    logprobs: list[TokenLogprob] = []
    cycles: list[Block] = []
    seed = 0
    fallbacks: tuple[str, ...] = ()
    reason: FinishReason = "cancelled"
    prompt_tokens, cached_tokens, prefill_seconds = 0, 0, 0.0
    first = last = time.perf_counter()
    for event in events:
        last = time.perf_counter()
        first = last if not tokens else first
        tokens += event.tokens
        text.append(event.text)
        reasoning.append(event.reasoning)
        logprobs += event.logprobs
        match event:
            case Prefilled():
                prompt_tokens, cached_tokens = event.prompt_tokens, event.cached_tokens
                seed, fallbacks = event.seed, event.fallbacks
                prefill_seconds = event.seconds
            case Block():
                cycles.append(event)
            case Finished():
                reason = event.finish_reason
    return Result(
        tokens=tuple(tokens),
        text="".join(text),
        reasoning="".join(reasoning),
        finish_reason=reason,
        prompt_tokens=prompt_tokens,
        cycles=tuple(cycles),
        prefill_seconds=prefill_seconds,
        decode_seconds=last - first,
        seed=seed,
        logprobs=tuple(logprobs),
        fallbacks=fallbacks,
        cached_tokens=cached_tokens,
    )
