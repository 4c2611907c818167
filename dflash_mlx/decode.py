"""Draft, verify, accept, commit: the loop. Knows token ids only, no text.

Plain decoding has blocks of one row and no drafter, and chooses by the same sampler.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx

from dflash_mlx.drafter import Draft, Embed, Head
from dflash_mlx.errors import NumericsError
from dflash_mlx.events import Block, Event, Finished, FinishReason, Prefilled, Prefilling, TokenLogprob
from dflash_mlx.sampling import Choice, Sampler
from dflash_mlx.target.caches import Cache, Checkpoint, arrays
from dflash_mlx.target.target import Target

CLEAR_EVERY = 256
"""Tokens between two releases of MLX's buffer cache, as in mlx-lm."""

Take = Callable[[Sequence[int]], tuple[int, bool]]
"""Newly chosen tokens -> how many of them belong to the reply, and whether it ends with the last of those."""

Blocks = Generator[Block, None, FinishReason]


class Proposer(Protocol):
    """What the loop asks of a drafter; `dflash_mlx.drafter.Drafter` is one."""

    @property
    def arrays(self) -> list[mx.array]:
        """What `extend` leaves to evaluate."""

    def extend(self, taps: mx.array) -> None:
        """Take in the taps of committed rows."""

    def propose(
        self,
        anchor: int,
        block_size: int,
        embed: Embed,
        head: Head,
        temperature: float,
        noise: mx.array | None,
    ) -> Draft:
        """Draft `block_size - 1` tokens after the anchor."""


def everything(tokens: Sequence[int]) -> tuple[int, bool]:
    """A reply that only its length ends."""
    return len(tokens), False


def until(eos: frozenset[int]) -> Take:
    """A reply that ends with the first of these ids."""

    def take(tokens: Sequence[int]) -> tuple[int, bool]:
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), None)
        return (len(tokens), False) if end is None else (end, True)

    return take


def decode(
    target: Target,
    caches: list[Cache],
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    drafter: Proposer | None = None,
    block_size: int = 1,
    max_tokens: int | None = None,
    take: Take = everything,
    prefill_step: int = 2048,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Decode one reply: `Prefilling` between prompt chunks, `Prefilled`, a `Block` per cycle, `Finished`.

    After any exit, also when the caller stops iterating, `caches` hold exactly the prompt and the committed
    tokens but the last one, and the drafter has taken in exactly those rows. With a drafter that is so
    whenever an event is handed out.

    Args:
        target: with `attach` done if there is a drafter.
        caches: an empty cache of this target, which is filled.
        prompt: token ids, at least one.
        sampler: a fresh one for this prompt.
        block_size: rows of a verify pass, the anchor included.
        max_tokens: tokens of the reply at most; None: until `take` ends it.
        take: asked once for all newly chosen tokens, before they are committed.
        prefill_step: prompt rows per forward pass.
        cancelled: asked between chunks and between blocks.

    Raises:
        NumericsError: the target's or, in the first block, the drafter's logits are not finite.
    """
    reply = _Reply(target, caches, sampler, drafter, take)
    start = time.perf_counter()
    logits = yield from reply.prefill(prompt, prefill_step, cancelled)
    if logits is None:
        yield Finished(finish_reason="cancelled")
        return
    prefilled, ended = reply.first(logits)
    yield replace(prefilled, prompt_tokens=len(prompt), seconds=time.perf_counter() - start)

    reason: FinishReason = "stop" if ended else "length"
    if not ended and max_tokens != 1:
        [anchor] = prefilled.tokens
        if drafter is None:
            reason = yield from reply.plainly(anchor, max_tokens, cancelled)
        else:
            reason = yield from reply.speculatively(anchor, block_size, max_tokens, cancelled)
    yield Finished(finish_reason=reason)


@dataclass(frozen=True)
class _Pass:
    """A forward pass over one row that is under way, and where the caches stood before it."""

    checkpoint: Checkpoint
    logits: mx.array


@dataclass(frozen=True)
class _Reply:
    """The parts of one decoding, and its steps."""

    target: Target
    caches: list[Cache]
    sampler: Sampler
    drafter: Proposer | None
    take: Take

    def prefill(
        self, prompt: Sequence[int], step: int, cancelled: Callable[[], bool]
    ) -> Generator[Prefilling, None, mx.array | None]:
        """Read the prompt in chunks, then its last token alone, as mlx-lm does: the numbers are the same.

        Returns:
            Logits of the last row `[1, V]`, or None if cancelled.
        """
        for start in range(0, len(prompt) - 1, step):
            if start:
                yield Prefilling(done=start, total=len(prompt))
            if cancelled():
                return None
            chunk = prompt[start : min(start + step, len(prompt) - 1)]
            _, taps = self.target.forward(mx.array(list(chunk)), self.caches)
            self._extend(taps)
            mx.eval(arrays(self.caches))
            mx.clear_cache()
        if cancelled():
            return None
        logits, taps = self.target.forward(mx.array([prompt[-1]]), self.caches)
        self._extend(taps)
        return logits

    def first(self, logits: mx.array) -> tuple[Prefilled, bool]:
        """Choose the first token; also whether the reply ends with it."""
        tokens, logprobs, _ = _Decision(self.sampler.choose(logits, None, self.sampler.noise(1))).wait()
        _, ended = self.take(tokens)
        self.sampler.commit(tokens)
        return Prefilled(tuple(tokens), logprobs=logprobs, seed=self.sampler.seed), ended

    def speculatively(
        self, anchor: int, block_size: int, max_tokens: int | None, cancelled: Callable[[], bool]
    ) -> Blocks:
        """Verify cycles after the first token, the anchor, until the reply ends; returns why."""
        count, cycles, ended = 1, 0, False
        while not ended and count != max_tokens:
            if cancelled():
                return "cancelled"
            rows = block_size if max_tokens is None else min(block_size, max_tokens - count)
            block, ended = self.cycle(anchor, rows, check_draft=cycles == 0)
            anchor, count, cycles = block.tokens[-1], count + block.committed, cycles + 1
            _release_buffers(count, block.committed)
            yield block
        return "stop" if ended else "length"

    def plainly(self, anchor: int, max_tokens: int | None, cancelled: Callable[[], bool]) -> Blocks:
        """The same with one row a cycle: the next pass is under way before the host knows this one's token.

        So Python's share of a step costs no time, as in mlx-lm. A pass too many is undone at the end.
        """
        count, ended = 1, False
        ahead: _Pass | None = self._launch(mx.array([anchor]))
        try:
            while ahead is not None:
                if cancelled():
                    return "cancelled"
                start = time.perf_counter()
                decision = _Decision(self.sampler.choose(ahead.logits, None, self.sampler.noise(1)))
                count += 1
                following = None if count == max_tokens else self._launch(decision.choice.tokens)
                waiting = time.perf_counter()
                tokens, logprobs, _ = decision.wait()
                waited = time.perf_counter() - waiting
                _, ended = self.take(tokens)
                self.sampler.commit(tokens)
                ahead = following
                _release_buffers(count, 1)
                seconds = time.perf_counter() - start
                yield Block(tuple(tokens), logprobs=logprobs, seconds=seconds, wait_seconds=waited)
                if ended:
                    return "stop"
            return "length"
        finally:
            if ahead is not None:
                ahead.checkpoint.restore(0)

    def _launch(self, token: mx.array) -> _Pass:
        """Start a pass over one token `[1]`, which need not be known yet."""
        checkpoint = Checkpoint(self.caches)
        try:
            logits, _ = self.target.forward(token, self.caches)
        except BaseException:
            checkpoint.restore(0)
            raise
        mx.async_eval(logits)
        return _Pass(checkpoint, logits)

    def cycle(self, anchor: int, rows: int, *, check_draft: bool) -> tuple[Block, bool]:
        """Draft, verify, accept and commit one block; also whether the reply ends with it."""
        start = time.perf_counter()
        block, draft, noise = mx.array([anchor]), None, self.sampler.noise(rows)
        assert self.drafter is not None
        if rows > 1:
            coupled = None if noise is None else noise[:-1]
            draft = self.drafter.propose(
                anchor, rows, self.target.embed, self.target.head, self.sampler.temperature, coupled
            )
            mx.async_eval(draft.tokens)  # The device drafts while Python builds the verify pass.
            block = mx.concatenate([block, draft.tokens.astype(block.dtype)])
        try:
            logits, taps = self.target.verify(block, self.caches)
            choice = self.sampler.choose(logits, None if draft is None else draft.tokens, noise)
            waiting = time.perf_counter()
            choices, logprobs, drafts = _Decision(choice, draft, check_draft=check_draft).wait()
            waited = time.perf_counter() - waiting
            accepted = _accept(choices, drafts)
            kept, ended = self.take(choices[: accepted + 1])
        except BaseException:
            self.target.commit(0, rows)
            raise
        self.target.commit(kept, rows)
        self.sampler.commit(choices[:kept])
        self._extend(None if taps is None else taps[:, :kept])
        event = Block(
            tuple(choices[:kept]),
            logprobs=logprobs[:kept],
            drafted=len(drafts),
            accepted=min(accepted, kept),
            rejected=tuple(drafts[min(accepted, kept) :]),
            seconds=time.perf_counter() - start,
            wait_seconds=waited,
        )
        return event, ended

    def _extend(self, taps: mx.array | None) -> None:
        if self.drafter is not None and taps is not None:
            self.drafter.extend(taps)
            # Else cycles without a draft would pile up a graph that holds their taps.
            mx.async_eval(*self.drafter.arrays)


def _release_buffers(count: int, committed: int) -> None:
    """Give MLX's unused buffers back now and then."""
    if count // CLEAR_EVERY > (count - committed) // CLEAR_EVERY:
        mx.clear_cache()


class _Decision:
    """Everything that a cycle decides, on its way to the host: it is waited for once."""

    def __init__(self, choice: Choice, draft: Draft | None = None, *, check_draft: bool = False) -> None:
        self.choice = choice
        flags = [choice.finite] if draft is None or not check_draft else [choice.finite, draft.finite]
        self._flags = len(flags)
        ids = [choice.tokens] if draft is None else [choice.tokens, draft.tokens]
        parts = [*ids, *(flag[None] for flag in flags)]
        self._synced = mx.concatenate([part.astype(mx.int32) for part in parts])
        # Started by itself: waiting for an array waits for all that was started with it.
        mx.async_eval(self._synced, *choice.arrays)

    def wait(self) -> tuple[list[int], tuple[TokenLogprob, ...], list[int]]:
        """Chosen ids, their log probabilities if asked for, and draft ids.

        Raises:
            NumericsError: some logits are not finite.
        """
        values: Any = self._synced.tolist()
        ids, (target_ok, *draft_ok) = values[: -self._flags], values[-self._flags :]
        if not target_ok:
            raise NumericsError("the target's logits are not finite; are its weights damaged?")
        if not all(draft_ok):
            raise NumericsError(
                "the drafter's logits are not finite; are its weights damaged, or its activations float16?"
            )
        rows = self.choice.tokens.shape[0]
        return ids[:rows], _logprobs(ids[:rows], self.choice), ids[rows:]


def _logprobs(tokens: list[int], choice: Choice) -> tuple[TokenLogprob, ...]:
    if choice.logprobs is None:
        return ()
    chosen: Any = choice.logprobs.tolist()
    tops: Any = [()] * len(tokens)
    if choice.top_ids is not None and choice.top_logprobs is not None:
        pairs: Any = zip(choice.top_ids.tolist(), choice.top_logprobs.tolist(), strict=True)  # type: ignore[arg-type]  # two axes
        tops = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    return tuple(TokenLogprob(t, p, top) for t, p, top in zip(tokens, chosen, tops, strict=True))


def _accept(choices: list[int], drafts: list[int]) -> int:
    """How many draft tokens, from the first, are what the target would have chosen."""
    return next((i for i, token in enumerate(drafts) if token != choices[i]), len(drafts))
