"""How far a drafter gets on responses it has not seen, without decoding anything.

A greedy response is walked as speculative decoding would walk it: draft at an anchor, count how many drafts
agree with the recorded tokens, commit those and the target's own next token, go on from there. That gives
exactly the acceptance length that greedy decoding would show, at the cost of the drafter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.drafter.model import DrafterModel
from dflash_mlx.errors import UsageError
from dflash_mlx.target.target import Target
from dflash_mlx.train.blocks import block_states
from dflash_mlx.train.shards import Sample, widen

REPETITION = 4  # tokens

Propose = Callable[[mx.array, mx.array, int], mx.array]
"""(hidden states [L, H], logits [L, V], anchor token) -> draft tokens [L]. V may be a draft head's."""


@dataclass(frozen=True)
class DraftReport:
    """What the model card says about a drafter.

    Attributes:
        tau: tokens committed per verify cycle, the target's own included, with the candidate selector.
        tau_unary: the same with the best unary logit at every slot.
        tau_fresh: tau over the cycles that do not continue a repetition; small targets repeat themselves
            much under greedy decoding, and repetitions are easy to draft.
        fresh_share: how many of the cycles those are.
        slots: per slot, how often its draft is right, given that all before it were.
        recall: per slot, how often the right token is among the selector's candidates, over the same cycles.
        cycles: verify cycles walked.
    """

    tau: float
    tau_unary: float
    tau_fresh: float
    fresh_share: float
    slots: tuple[float, ...]
    recall: tuple[float, ...]
    cycles: int


def walkable(samples: Sequence[Sample], block_size: int) -> list[Sample]:
    """The responses that are long enough for a verify cycle.

    Raises:
        UsageError: there is none.
    """
    long_enough = [sample for sample in samples if sample.written >= block_size]
    if not long_enough:
        longest = max((sample.written for sample in samples), default=0)
        raise UsageError(
            f"the longest held-out reply has {longest} tokens, too few to measure blocks of {block_size} on: "
            "begin anew in another --out, with prompts that get longer replies, or a smaller --block-size"
        )
    return long_enough


def evaluate_drafter(model: DrafterModel, target: Target, samples: Sequence[Sample]) -> DraftReport:
    """Walk greedy `samples`, one of them `walkable`. Cycles that their ends would cut short are left out."""
    slots = model.config.block_size - 1
    unary = _unary(model)
    accepted: list[int] = []
    accepted_unary: list[int] = []
    found: list[np.ndarray] = []
    fresh: list[bool] = []
    for sample in samples:
        anchors = np.arange(sample.prompt, len(sample.tokens) - slots)
        if not len(anchors):
            continue
        hidden, logits = _draft_everywhere(model, target, sample, anchors)
        walked = _walk(sample, hidden, logits, slots, _proposer(model))
        accepted += [count for _, count in walked]
        fresh += [_is_fresh(sample.tokens[: anchor + 1]) for anchor, _ in walked]
        accepted_unary += [count for _, count in _walk(sample, hidden, logits, slots, unary)]
        at = np.array([anchor - sample.prompt for anchor, _ in walked])
        gold = sample.tokens[at[:, None] + sample.prompt + 1 + np.arange(slots)]  # [cycles, L - 1]
        found.append(_in_top(np.array(logits[mx.array(at)]), gold, model))
    counts = np.array(accepted)
    reached = [int((counts >= slot).sum()) for slot in range(slots + 1)]
    return DraftReport(
        tau=float(counts.mean() + 1),
        tau_unary=float(np.mean(accepted_unary) + 1),
        tau_fresh=float(counts[fresh].mean() + 1) if any(fresh) else float("nan"),
        fresh_share=float(np.mean(fresh)),
        slots=tuple(reached[slot + 1] / max(reached[slot], 1) for slot in range(slots)),
        recall=tuple(float(share) for share in np.concatenate(found).mean(axis=0)),
        cycles=len(counts),
    )


def _draft_everywhere(
    model: DrafterModel, target: Target, sample: Sample, anchors: np.ndarray
) -> tuple[mx.array, mx.array]:
    """Hidden states [N, L - 1, H] and logits [N, L - 1, V] of a block at every anchor."""
    first = mx.array(sample.tokens[anchors])[None]
    taps = widen(sample.taps)[None]
    hidden = block_states(model, target.embed, taps, mx.array(anchors.astype(np.int32))[None], first)[
        0, :, 1:
    ]
    logits = model.logits(hidden, target.head if model.head_ids is None else target.head_rows(model.head_ids))
    mx.eval(hidden, logits)
    return hidden, logits


def _walk(
    sample: Sample, hidden: mx.array, logits: mx.array, slots: int, propose: Propose
) -> list[tuple[int, int]]:
    """The cycles of one response: (anchor position, drafts accepted)."""
    cycles = []
    anchor = sample.prompt
    while anchor < len(sample.tokens) - slots:
        at = anchor - sample.prompt
        drafts = np.array(propose(hidden[at], logits[at], int(sample.tokens[anchor])))
        agree = drafts == sample.tokens[anchor + 1 : anchor + 1 + slots]
        count = int(np.cumprod(agree).sum())
        cycles.append((anchor, count))
        anchor += count + 1
    return cycles


def _proposer(model: DrafterModel) -> Propose:
    """As the drafter does at work, greedily."""
    if not model.config.selector_rank:
        return _unary(model)
    walk = model.candidate_selector.walk
    return lambda hidden, logits, anchor: walk(hidden, logits, anchor, ids=model.head_ids)


def _unary(model: DrafterModel) -> Propose:
    """The best logit of each slot by itself."""

    def propose(_hidden: mx.array, logits: mx.array, _anchor: int) -> mx.array:
        best = mx.argmax(logits, axis=-1)
        return best if model.head_ids is None else model.head_ids[best]

    return propose


def _is_fresh(tokens: np.ndarray) -> bool:
    """Whether the last `REPETITION` tokens stand together nowhere before."""
    if len(tokens) <= REPETITION:
        return True
    earlier = np.lib.stride_tricks.sliding_window_view(tokens[:-1], REPETITION)
    return not bool((earlier == tokens[-REPETITION:]).all(axis=1).any())


def _in_top(logits: np.ndarray, gold: np.ndarray, model: DrafterModel) -> np.ndarray:
    """Whether the tokens `gold` [N, L] are among the selector's candidates, by `logits` [N, L, V]."""
    places, proposed = gold, np.ones(gold.shape, dtype=bool)
    if model.head_ids is not None:
        ids = np.array(model.head_ids)
        places = np.minimum(np.searchsorted(ids, gold), len(ids) - 1)
        proposed = ids[places] == gold
    score = np.take_along_axis(logits, places[..., None], axis=-1)
    better = (logits > score).sum(axis=-1) < (model.config.selector_top_k or 1)
    return np.asarray(better & proposed)
