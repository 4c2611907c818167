"""Draft, verify, accept, commit: the loop. Knows token ids only, no text.

Plain decoding is the same loop with blocks of one row and no drafter.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx

from dflash_mlx.drafter import Draft, Embed, Head
from dflash_mlx.errors import NumericsError
from dflash_mlx.events import Block, Event, Finished, Prefilled, TokenLogprob
from dflash_mlx.sampling import Choice, Sampler
from dflash_mlx.target.caches import Cache, arrays
from dflash_mlx.target.target import Target

CLEAR_EVERY = 256
"""Tokens between two releases of MLX's buffer cache, as in mlx-lm."""


Take = Callable[[Sequence[int]], tuple[int, bool]]
"""Newly chosen tokens -> how many of them belong to the reply, and whether it ends with the last of those."""


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
    """Decode one reply: one `Prefilled`, one `Block` per verify cycle, one `Finished`.

    Whenever an event is handed out, and after any exit, `caches` hold exactly the prompt and the committed
    tokens but the last one, and the drafter has taken in exactly those rows.

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
    start = time.perf_counter()
    for chunk in _chunks(prompt, prefill_step):
        if cancelled():
            yield Finished(finish_reason="cancelled")
            return
        logits, taps = target.forward(mx.array(chunk), caches)
        _extend(drafter, taps)
        if len(prompt) > 1:
            mx.eval(arrays(caches))
            mx.clear_cache()
    choices, logprobs, _ = _synchronise(sampler.choose(logits[-1:], None, sampler.noise(1)), None, False)
    _, ended = take(choices)
    sampler.commit(choices)
    seconds = time.perf_counter() - start
    yield Prefilled(
        tuple(choices), logprobs=logprobs, prompt_tokens=len(prompt), seconds=seconds, seed=sampler.seed
    )

    [anchor], count, cycles = choices, 1, 0
    while not ended and count != max_tokens:
        if cancelled():
            yield Finished(finish_reason="cancelled")
            return
        start = time.perf_counter()
        rows = block_size if drafter is not None else 1
        rows = rows if max_tokens is None else min(rows, max_tokens - count)
        block, draft, noise = mx.array([anchor]), None, sampler.noise(rows)
        if drafter is not None and rows > 1:
            coupled = None if noise is None else noise[:-1]
            draft = drafter.propose(anchor, rows, target.embed, target.head, sampler.temperature, coupled)
            mx.async_eval(draft.tokens)  # The device drafts while Python builds the verify pass.
            block = mx.concatenate([block, draft.tokens.astype(block.dtype)])
        try:
            logits, taps = target.verify(block, caches)
            choice = sampler.choose(logits, None if draft is None else draft.tokens, noise)
            waiting = time.perf_counter()
            choices, logprobs, drafts = _synchronise(choice, draft, cycles == 0)
            waited = time.perf_counter() - waiting
            accepted = _accept(choices, drafts)
            kept, ended = take(choices[: accepted + 1])
        except BaseException:
            target.commit(0, rows)
            raise
        tokens, accepted = choices[:kept], min(accepted, kept)
        target.commit(kept, rows)
        sampler.commit(tokens)
        _extend(drafter, None if taps is None else taps[:, :kept])
        if (count + kept) // CLEAR_EVERY > count // CLEAR_EVERY:
            mx.clear_cache()
        anchor, count, cycles = tokens[-1], count + kept, cycles + 1
        yield Block(
            tuple(tokens),
            logprobs=logprobs[:kept],
            drafted=len(drafts),
            accepted=accepted,
            seconds=time.perf_counter() - start,
            wait_seconds=waited,
        )
    yield Finished(finish_reason="stop" if ended else "length")


def _chunks(prompt: Sequence[int], step: int) -> Iterator[list[int]]:
    """The prompt in chunks, then its last token alone: mlx-lm's own prefill, hence its numbers."""
    for start in range(0, len(prompt) - 1, step):
        yield list(prompt[start : min(start + step, len(prompt) - 1)])
    yield [prompt[-1]]


def _extend(drafter: Proposer | None, taps: mx.array | None) -> None:
    if drafter is not None and taps is not None:
        drafter.extend(taps)
        mx.async_eval(
            *drafter.arrays
        )  # Else cycles without a draft would pile up a graph that holds their taps.


def _synchronise(
    choice: Choice, draft: Draft | None, check_draft: bool
) -> tuple[list[int], tuple[TokenLogprob, ...], list[int]]:
    """Wait once for everything that a cycle decides: chosen ids, their log probabilities, draft ids."""
    drafts = mx.array([], dtype=mx.int32) if draft is None else draft.tokens
    drafts_finite = mx.array(True) if draft is None or not check_draft else draft.finite
    parts = (choice.tokens, drafts, mx.stack([choice.finite, drafts_finite]))
    synced = mx.concatenate([part.astype(mx.int32) for part in parts])
    mx.async_eval(synced, *choice.arrays)
    values: Any = synced.tolist()
    *ids, target_ok, drafts_ok = values
    if not target_ok:
        raise NumericsError("the target's logits are not finite; are its weights damaged?")
    if not drafts_ok:
        raise NumericsError(
            "the drafter's logits are not finite; are its weights damaged, or its activations float16?"
        )
    rows = choice.tokens.shape[0]
    return ids[:rows], _logprobs(ids[:rows], choice), ids[rows:]


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
