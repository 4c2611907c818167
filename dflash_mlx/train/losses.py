"""What a drafter is trained towards.

The unary logits and the selector's edges are trained by one softmax over their sum, with the gold
predecessor; in a share of the slots the edges are left out, so that the unary logits stay good enough to
rank candidates by themselves. Half of the goal is the token that was written, half the target's own
distribution at that place, which says more about a place than one token does.
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
        prefix: how far a slot's weight follows the probability that all slots before it are right.
        others: random ids in the loss's vocabulary besides those that occur in the data.
    """

    gamma: float = 4.0
    edge_dropout: float = 0.3
    soft: float = 0.5
    prefix: float = 0.5
    others: int = 1024


class LossVocabulary:
    """The ids that a step's softmax runs over: all that occur in the data, and others at random.

    A softmax over a whole vocabulary would be most of a step's work, and nearly all of it about tokens that
    this target never writes.
    """

    def __init__(self, seen: np.ndarray, size: int, others: int) -> None:
        self.seen = np.sort(seen).astype(np.int32)
        self._unseen = np.setdiff1d(np.arange(size, dtype=np.int32), self.seen)
        self._others = min(others, len(self._unseen))
        places = np.zeros(size, dtype=np.int32)
        places[self.seen] = np.arange(len(self.seen))
        self._places = mx.array(places)

    def draw(self, rng: np.random.Generator) -> mx.array:
        """A step's ids, [n]; those seen come first."""
        return mx.array(np.concatenate([self.seen, rng.choice(self._unseen, self._others, replace=False)]))

    def places(self, tokens: mx.array) -> mx.array:
        """Where seen tokens are among the ids."""
        return self._places[tokens]


def block_loss(
    model: DrafterModel, target: Target, batch: Batch, vocabulary: LossVocabulary, ids: mx.array, goal: Goal
) -> mx.array:
    """The mean loss of a batch's slots."""
    head = target.head_rows(ids)
    hidden = block_states(model, target.embed, batch.taps, batch.anchors, batch.gold[:, :, 0])[:, :, 1:]
    gold, known = batch.gold[:, :, 1:], batch.known[:, :, 1:]
    scores = _scores(model, hidden, head, batch.gold[:, :, :-1], ids, goal.edge_dropout)  # [B, N, L - 1, n]
    norm = mx.logsumexp(scores, axis=-1)
    right = mx.take_along_axis(scores, vocabulary.places(gold)[..., None], axis=-1)[..., 0] - norm
    agreement = right
    if goal.soft:
        theirs = mx.softmax(model.cap(head(batch.final)), axis=-1)
        agreement = goal.soft * ((theirs * scores).sum(axis=-1) - norm) + (1 - goal.soft) * right
    weight = known * slot_weights(right, goal)
    return -(agreement * weight).sum() / weight.sum()


def slot_weights(right: mx.array, goal: Goal) -> mx.array:
    """Weights of slots [..., L - 1], from the log probabilities of their true tokens."""
    slots = right.shape[-1]
    distance = mx.exp(-mx.arange(slots) / goal.gamma)
    reached = mx.exp(mx.cumsum(right, axis=-1, inclusive=False))
    return mx.stop_gradient(distance * (1 - goal.prefix + goal.prefix * reached))


def _scores(
    model: DrafterModel, hidden: mx.array, head: Head, before: mx.array, ids: mx.array, edge_dropout: float
) -> mx.array:
    """Unary logits plus the edges after the true predecessors `before`, [B, N, L - 1, n]."""
    unary = model.logits(hidden, head)
    if not model.config.selector_rank:
        return unary
    selector = model.candidate_selector
    keep = mx.random.uniform(shape=before.shape) >= edge_dropout
    bridge = selector.predecessor_codebook[before] * selector.hidden_projection(hidden)  # [B, N, L - 1, R]
    return unary + (bridge * keep[..., None]) @ selector.successor_codebook[ids].T
