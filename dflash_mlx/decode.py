"""Draft, verify, accept, commit: the loop. Knows token ids only, no text.

Plain decoding is the same loop with blocks of one row and no drafter.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx

from dflash_mlx.drafter import Draft, Embed, Head
from dflash_mlx.errors import NumericsError
from dflash_mlx.events import Block, Event, Finished, Prefilled
from dflash_mlx.target.caches import Cache, arrays
from dflash_mlx.target.target import Target

CLEAR_EVERY = 256
"""Tokens between two releases of MLX's buffer cache, as in mlx-lm."""


class Proposer(Protocol):
    """What the loop asks of a drafter; `dflash_mlx.drafter.Drafter` is one."""

    @property
    def arrays(self) -> list[mx.array]:
        """What `extend` leaves to evaluate."""

    def extend(self, taps: mx.array) -> None:
        """Take in the taps of committed rows."""

    def propose(self, anchor: int, block_size: int, embed: Embed, head: Head) -> Draft:
        """Draft `block_size - 1` tokens after the anchor."""


def decode(
    target: Target,
    caches: list[Cache],
    prompt: Sequence[int],
    *,
    drafter: Proposer | None = None,
    block_size: int = 1,
    max_tokens: int | None = None,
    eos: frozenset[int] = frozenset(),
    prefill_step: int = 2048,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Decode greedily: one `Prefilled`, one `Block` per verify cycle, one `Finished`.

    Whenever an event is handed out, and after any exit, `caches` hold exactly the prompt and the committed
    tokens but the last one, and the drafter has taken in exactly those rows.

    Args:
        target: with `attach` done if there is a drafter.
        caches: an empty cache of this target, which is filled.
        prompt: token ids, at least one.
        block_size: rows of a verify pass, the anchor included.
        max_tokens: tokens of the reply at most; None: until an `eos` token.
        eos: token ids that end the reply; the one that was chosen is its last token.
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
    [anchor] = _choose(logits[-1:], None, check_draft=False)[0]
    yield Prefilled((anchor,), prompt_tokens=len(prompt), seconds=time.perf_counter() - start)

    count, cycles = 1, 0
    while anchor not in eos and count != max_tokens:
        if cancelled():
            yield Finished(finish_reason="cancelled")
            return
        start = time.perf_counter()
        rows = block_size if max_tokens is None else min(block_size, max_tokens - count)
        block, draft = mx.array([anchor]), None
        if drafter is not None and rows > 1:
            draft = drafter.propose(anchor, rows, target.embed, target.head)
            mx.async_eval(draft.tokens)  # The device drafts while Python builds the verify pass.
            block = mx.concatenate([block, draft.tokens.astype(block.dtype)])
        try:
            logits, taps = target.verify(block, caches)
            waiting = time.perf_counter()
            choices, drafts = _choose(logits, draft, check_draft=cycles == 0)
            waited = time.perf_counter() - waiting
        except BaseException:
            target.commit(0, len(block))
            raise
        accepted = _accept(choices, drafts)
        tokens = _until(choices[: accepted + 1], eos)
        accepted = min(accepted, len(tokens))
        target.commit(len(tokens), len(block))
        _extend(drafter, None if taps is None else taps[:, : len(tokens)])
        if (count + len(tokens)) // CLEAR_EVERY > count // CLEAR_EVERY:
            mx.clear_cache()
        anchor, count, cycles = tokens[-1], count + len(tokens), cycles + 1
        yield Block(
            tuple(tokens),
            drafted=len(drafts),
            accepted=accepted,
            seconds=time.perf_counter() - start,
            wait_seconds=waited,
        )
    yield Finished(finish_reason="stop" if anchor in eos else "length")


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


def _choose(logits: mx.array, draft: Draft | None, *, check_draft: bool) -> tuple[list[int], list[int]]:
    """The target's greedy choice for each row `[L, V]`, and the draft tokens, in one host synchronisation.

    `argmax(logits - logsumexp(logits))` in the logits' own type is what mlx-lm does: rounding makes ties.
    """
    total = mx.logsumexp(logits, axis=-1, keepdims=True)  # [L, 1]; not finite if any logit is NaN or +inf
    choices = mx.argmax(logits - total, axis=-1)
    drafts = mx.array([], dtype=mx.int32) if draft is None else draft.tokens
    draft_ok = mx.array(True) if draft is None or not check_draft else draft.finite
    flags = mx.stack([mx.isfinite(total).all(), draft_ok])
    synced: Any = mx.concatenate([a.astype(mx.int32) for a in (choices, drafts, flags)]).tolist()
    *ids, target_ok, drafts_ok = synced
    if not target_ok:
        raise NumericsError("the target's logits are not finite; are its weights damaged?")
    if not drafts_ok:
        raise NumericsError(
            "the drafter's logits are not finite; are its weights damaged, or its activations float16?"
        )
    rows = logits.shape[0]
    return ids[:rows], ids[rows:]


def _accept(choices: list[int], drafts: list[int]) -> int:
    """How many draft tokens, from the first, are what the target would have chosen."""
    return next((i for i, token in enumerate(drafts) if token != choices[i]), len(drafts))


def _until(tokens: list[int], eos: frozenset[int]) -> list[int]:
    """The tokens up to and including the first that ends the reply."""
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens) - 1)
    return tokens[: end + 1]
