"""What a drafter is trained towards.

The unary logits and the selector's edges are trained by one softmax over their sum, with the gold
predecessor; in a share of the slots the edges are left out, so that the unary logits stay good enough to
rank candidates by themselves. Half of the goal is the token that was written, half the target's own
distribution at that place, which says more about a place than one token does. Besides, the drafter's final
states are drawn towards those from which the target made its logits, as in EAGLE (Li et al., 2024): a step
then says something about every token at the price of none.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.drafter.model import DrafterModel, Head
from dflash_mlx.target.target import Target
from dflash_mlx.train.blocks import Batch, block_states


@dataclass(frozen=True)
class Goal:
    """Weights of the loss.

    Attributes:
        gamma: slot k weighs exp(-(k - 1) / gamma), since it counts only if all before it do.
        edge_dropout: the share of slots that are trained without the selector's edges.
        soft: the weight of the target's distribution; the rest is the written token's.
        states: the weight of the final states' squared distance, relative to the size of the target's.
        prefix: how far a slot's weight follows the probability that all slots before it are right.
        common: ids in the loss's vocabulary that the responses use most.
        others: random ids in it besides those and the step's own.
    """

    gamma: float = 4.0
    edge_dropout: float = 0.3
    soft: float = 0.5
    states: float = 2.0
    prefix: float = 0.5
    common: int = 2048
    others: int = 512


@dataclass(frozen=True)
class Draws:
    """What chance decides in a step's loss.

    Attributes:
        ids: the token ids of the softmax, [n], sorted.
        gold: where the slots' true tokens are among them, [B, N, L - 1].
        edges: whether a slot has the selector's edges, [B, N, L - 1].
    """

    ids: mx.array
    gold: mx.array
    edges: mx.array


class LossVocabulary:
    """Draws the ids of a step's softmax: the batch's own tokens, those used most, and others at random.

    A softmax over a whole vocabulary would be most of a step's work, and nearly all of it about tokens that
    this target hardly ever writes.
    """

    def __init__(self, used: np.ndarray, size: int, goal: Goal) -> None:
        """`used`: the ids of all responses, those used most first; `size`: of the whole vocabulary."""
        self._common = used[: goal.common]
        self._others = np.setdiff1d(np.arange(size), self._common)
        self._drawn = min(goal.others, len(self._others))
        self._dropout = goal.edge_dropout

    def draw(self, gold: mx.array, rng: np.random.Generator) -> Draws:
        """For slots whose true tokens are `gold` [B, N, L - 1]."""
        true = np.array(gold)
        others = rng.choice(self._others, self._drawn, replace=False)
        ids = np.unique(np.concatenate([self._common, others, true.ravel()])).astype(np.int32)
        edges = rng.random(true.shape) >= self._dropout
        return Draws(mx.array(ids), mx.array(np.searchsorted(ids, true)), mx.array(edges))


def block_loss(model: DrafterModel, target: Target, batch: Batch, draws: Draws, goal: Goal) -> mx.array:
    """The mean loss of a batch's slots."""
    head = target.head_rows(draws.ids)
    hidden = block_states(model, target.embed, batch.taps, batch.anchors, batch.gold[:, :, 0])[:, :, 1:]
    known, before = batch.known[:, :, 1:], batch.gold[:, :, :-1]
    scores = _scores(model, hidden, head, before, draws)  # [B, N, L - 1, n]
    norm = mx.logsumexp(scores, axis=-1)
    right = mx.take_along_axis(scores, draws.gold[..., None], axis=-1)[..., 0] - norm
    agreement = right
    if goal.soft:
        theirs = mx.softmax(model.cap(head(batch.final)), axis=-1)
        agreement = goal.soft * ((theirs * scores).sum(axis=-1) - norm) + (1 - goal.soft) * right
    if goal.states:
        distance = (hidden - batch.final).square().mean(axis=-1)
        size = (known * batch.final.square().mean(axis=-1)).sum() / known.sum()
        agreement = agreement - goal.states * distance / size
    weight = known * slot_weights(right, goal)
    return -(agreement * weight).sum() / weight.sum()


def slot_weights(right: mx.array, goal: Goal) -> mx.array:
    """Weights of slots [..., L - 1], from the log probabilities of their true tokens."""
    slots = right.shape[-1]
    distance = mx.exp(-mx.arange(slots) / goal.gamma)
    reached = mx.exp(mx.cumsum(right, axis=-1, inclusive=False))
    return mx.stop_gradient(distance * (1 - goal.prefix + goal.prefix * reached))


def _scores(model: DrafterModel, hidden: mx.array, head: Head, before: mx.array, draws: Draws) -> mx.array:
    """Unary logits plus the edges after the true predecessors `before`, [B, N, L - 1, n]."""
    unary = model.logits(hidden, head)
    if not model.config.selector_rank:
        return unary
    selector = model.candidate_selector
    bridge = selector.predecessor_codebook[before] * selector.hidden_projection(hidden)  # [B, N, L - 1, R]
    return unary + (bridge * draws.edges[..., None]) @ selector.successor_codebook[draws.ids].T
