"""Decode one reply: read the prompt, choose the first token, then go on in cycles.

Plain decoding has blocks of one row and no drafter, and chooses by the same sampler.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from dflash_mlx.cycles import Cycles, Proposer, Take
from dflash_mlx.events import Event, Finished, FinishReason
from dflash_mlx.sampling import Sampler
from dflash_mlx.schedule import PLAIN, Policy
from dflash_mlx.target.caches import Cache
from dflash_mlx.target.target import Target


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
    policy: Policy = PLAIN,
    max_tokens: int | None = None,
    take: Take = everything,
    prefill_step: int = 2048,
    cancelled: Callable[[], bool] = lambda: False,
    done: int = 0,
    stops: Sequence[int] = (),
    reached: Callable[[int], None] = lambda rows: None,
) -> Generator[Event]:
    """Decode one reply: `Prefilling` between prompt chunks, `Prefilled`, a `Block` per cycle, `Finished`.

    After any exit, also when the caller stops iterating, `caches` hold exactly the prompt and the committed
    tokens but the last one, and the drafter has taken in exactly those rows. Between two events more may be
    under way.

    Args:
        target: with `attach` done if there is a drafter.
        caches: of this target; they are filled.
        prompt: token ids, at least one.
        sampler: a fresh one for this prompt.
        policy: how many rows each verify pass has, the anchor included, and where their drafts come from;
            without a drafter it is not asked.
        max_tokens: tokens of the reply at most; None: until `take` ends it.
        take: asked once for all newly chosen tokens, before they are committed.
        prefill_step: prompt rows per forward pass.
        cancelled: asked between chunks and between blocks.
        done: tokens of the prompt, not all, whose rows are in the caches and the drafter already.
        stops: where in the prompt passes end too, besides the multiples of `prefill_step`.
        reached: told how many rows there are after each pass over a part of the prompt, up to its last token.

    Raises:
        NumericsError: the target's or, in its first block, the drafter's logits are not finite.
    """
    reply = Cycles(target, caches, sampler, drafter, policy if drafter else PLAIN, take, max_tokens)
    start = time.perf_counter()
    ends = chunk_ends(len(prompt) - 1, prefill_step, done, stops)
    logits = yield from reply.prefill(prompt, done, ends, cancelled, reached)
    if logits is None:
        yield Finished(finish_reason="cancelled")
        return
    prefilled, ended = reply.first(logits)
    seconds = time.perf_counter() - start
    yield replace(prefilled, prompt_tokens=len(prompt), cached_tokens=done, seconds=seconds)

    reason: FinishReason = "stop" if ended else "length"
    if not ended and max_tokens != 1:
        context = [*prompt, *prefilled.tokens] if reply.policy.copies else None
        reason = yield from reply.blocks(cancelled, context)
    yield Finished(finish_reason=reason)


def chunk_ends(total: int, step: int, done: int, stops: Sequence[int]) -> list[int]:
    """Where the passes over a prompt end, the last of them after `total` tokens.

    Steps count from the beginning whatever was done, so that it was done in the same passes.
    """
    return sorted(end for end in {*range(step, total, step), *stops, total} if done < end <= total)
