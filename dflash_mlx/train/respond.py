"""Training data: responses that the target writes itself, with the hidden states of that very decoding.

Keeping the taps of the decode pass costs nothing, needs no second pass over the text, and gives the drafter
in training the numbers that it will get at work.

A chat target can write the user's turn too, if it is let begin where that would stand (Magpie, Xu et al.,
2024): what it asks is far more varied than any set of templates.

This file knows token ids and hidden states, and nothing about text or drafters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_map

from dflash_mlx.errors import UnsupportedTargetError
from dflash_mlx.target.caches import Cache
from dflash_mlx.target.taps import Taps
from dflash_mlx.target.target import Target
from dflash_mlx.train.shards import Sample, narrow

LEAVE_AT = 0.1  # a batch is left when so few of its rows are unfinished: they would run almost alone
SHRINK_AT = 0.75  # finished rows leave the caches when so few go on
TURN_TOKENS = 64  # of a user's turn that the target writes; longer ones are given up
TURN_TEMPERATURE = 0.9
UNKNOWN = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Sampling:
    """How responses are decoded: a share of greedy rows, the others at `temperature`."""

    max_tokens: int = 160
    rows: int = 64
    greedy_share: float = 0.6
    temperature: float = 0.7


@dataclass(frozen=True)
class Opening:
    """The token ids around the user's turn of a conversation, which the target is to write itself."""

    before: tuple[int, ...]
    after: tuple[int, ...]


GREEDY = Sampling(rows=16, greedy_share=1.0, temperature=0.0)
"""What a drafter is measured on. Prompts of one length come from few templates: many small batches."""


def final_norm(target: Target) -> nn.Module:
    """The norm whose output the head is given.

    Raises:
        UnsupportedTargetError: this family does more than that between the two.
    """
    if target.norm is None:
        raise UnsupportedTargetError(
            "this target's head is not given what a norm puts out, so what it is given cannot be recorded: "
            "no drafter can be trained for this family"
        )
    return target.norm


def batch_prompts(prompts: Sequence[Sequence[int]], rows: int) -> list[list[int]]:
    """Indices of prompts, grouped by length, at most `rows` to a batch; full batches come first.

    With one length to a batch no cache ever holds padding, so any model whose caches take several rows
    will do.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    full = []
    for index, prompt in enumerate(prompts):
        group = by_length[len(prompt)]
        group.append(index)
        if len(group) == rows:
            full.append(by_length.pop(len(prompt)))
    return full + list(by_length.values())


class Responder:
    """Decodes with a target whose layers are tapped until the context is left."""

    def __init__(self, target: Target, layer_ids: Sequence[int], stop_ids: frozenset[int]) -> None:
        self._target = target
        self._width = target.hidden_size
        self._stop_ids = list(stop_ids)
        modules = [*target.layers, final_norm(target)]
        self._taps = Taps(modules, [*layer_ids, len(target.layers)])

    def __enter__(self) -> Responder:
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._taps.undos:
            undo()

    def respond(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Sample]:
        """Let the target answer prompts of one length, as one batch."""
        begins = np.full(len(prompts), len(prompts[0]))
        batch = _Batch(np.array(prompts, dtype=np.int32), self._target.make_cache(), begins)
        return self._decode(batch, sampling, seed)

    def converse(self, opening: Opening, sampling: Sampling, seed: int) -> list[Sample]:
        """Let the target ask and answer, in `sampling.rows` conversations; those that get to an answer."""
        prompts = np.tile(np.array(opening.before, dtype=np.int32), (sampling.rows, 1))
        begins = np.full(sampling.rows, UNKNOWN)
        return self._decode(_Batch(prompts, self._target.make_cache(), begins, opening.after), sampling, seed)

    def _decode(self, batch: _Batch, sampling: Sampling, seed: int) -> list[Sample]:
        count = len(batch.prompts)
        rng = np.random.default_rng(seed)
        temperatures = np.where(
            np.arange(count) < round(count * sampling.greedy_share), 0, sampling.temperature
        )
        fed = mx.array(batch.prompts)  # [B, P], then [B, 1]
        if fed.shape[1] > 1:
            # Apart from the last token, whose logits alone are wanted: here the head is never computed.
            self._pass(fed[:, :-1], batch)
            fed = fed[:, -1:]
        while batch.running.sum() > LEAVE_AT * count:
            if batch.running[batch.rows].mean() <= SHRINK_AT:
                fed = batch.shrink(fed)
            logits = self._pass(fed, batch)[:, -1].astype(mx.float32)  # [B, V]
            warmth = np.where(batch.begins == UNKNOWN, TURN_TEMPERATURE, temperatures)[batch.rows]
            batch.take(np.array(_choose(logits, warmth, rng)), self._stop_ids, sampling.max_tokens)
            fed = mx.array(batch.tokens[batch.rows, -1:])
        return batch.samples(self._width)

    def _pass(self, fed: mx.array, batch: _Batch) -> mx.array:
        """Feed tokens [rows, L]; their hidden states are kept. Returns logits [rows, L, V], not evaluated."""
        logits: mx.array = self._target.model(fed, cache=batch.caches)
        states = self._taps.take().astype(mx.bfloat16)
        mx.eval(states)
        batch.states[-1][1].append(states)
        return logits


@dataclass
class _Batch:
    """Rows at work. Arrays are by original row, but for `rows`, which says which of them the caches hold.

    `begins` is where a row's response begins, UNKNOWN while it still writes the user's turn; `after` are the
    tokens that are put after such a turn. `states` are periods between two shrinkings: the rows of one, and
    its hidden states [rows, L, width].
    """

    prompts: np.ndarray
    caches: list[Cache]
    begins: np.ndarray
    after: tuple[int, ...] = ()
    states: list[tuple[np.ndarray, list[mx.array]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.prompts
        self.rows = np.arange(len(self.prompts))
        self.running = np.ones(len(self.prompts), dtype=bool)
        self.lengths = np.full(len(self.prompts), self.prompts.shape[1])
        self.states.append((self.rows, []))

    def take(self, chosen: np.ndarray, stop_ids: list[int], max_tokens: int) -> None:
        """One step's tokens [rows]."""
        column = np.zeros(len(self.prompts), dtype=np.int32)
        column[self.rows] = chosen
        if self.after:
            self._take_turns(column)
        self.tokens = np.concatenate([self.tokens, column[:, None]], axis=1)
        self.lengths[self.running] += 1
        written = self.lengths - self.begins  # below 0 in the user's turn
        ended = (written > 0) & (np.isin(column, stop_ids) | (written >= max_tokens))
        rambling = (self.begins == UNKNOWN) & (self.lengths >= self.prompts.shape[1] + TURN_TOKENS)
        self.running &= ~(ended | rambling)

    def _take_turns(self, column: np.ndarray) -> None:
        """End the user's turn where its end was chosen, and put the rest of `after` behind it."""
        ends = self.running & (self.begins == UNKNOWN) & (column == self.after[0])
        self.begins[ends] = self.lengths[ends] + len(self.after)
        given = self.running & (self.begins != UNKNOWN) & (self.begins > self.lengths)
        column[given] = np.array(self.after)[len(self.after) - (self.begins - self.lengths)[given]]

    def shrink(self, fed: mx.array) -> mx.array:
        """Drop finished rows from the caches and from what is fed next."""
        kept = np.flatnonzero(self.running[self.rows])
        keep = mx.array(kept.astype(np.int32))
        for cache in self.caches:
            cache.state = tree_map(lambda a: a[keep] if isinstance(a, mx.array) else a, cache.state)
        self.rows = self.rows[kept]
        self.states.append((self.rows, []))
        return fed[keep]

    def samples(self, width: int) -> list[Sample]:
        """Rows with a response; the last `width` columns of the hidden states are the final ones."""
        periods = [(rows, narrow(mx.concatenate(parts, axis=1))) for rows, parts in self.states if parts]
        samples = []
        for row in np.flatnonzero(self.lengths > self.begins):
            length = self.lengths[row]
            pieces = [states[rows == row][0] for rows, states in periods if row in rows]
            states = np.concatenate(pieces)[: length - 1]
            tokens = self.tokens[row, :length].astype(np.int32)
            samples.append(Sample(tokens, states[:, :-width], states[:, -width:], int(self.begins[row])))
        return samples


def _choose(logits: mx.array, temperatures: np.ndarray, rng: np.random.Generator) -> mx.array:
    """Next tokens [B] from logits [B, V]: the best where the temperature is 0, else a draw.

    A draw needs one random number a row, not one for every token of the vocabulary.
    """
    best = mx.argmax(logits, axis=-1)
    warm = np.flatnonzero(temperatures)
    if not len(warm):
        return best
    drawn = mx.array(warm.astype(np.int32))
    scaled = logits[drawn] / mx.array(temperatures[warm, None].astype(np.float32))
    sums = mx.cumsum(mx.softmax(scaled, axis=-1), axis=-1)
    threshold = mx.array(rng.random((len(warm), 1), dtype=np.float32)) * sums[:, -1:]
    best[drawn] = mx.minimum((sums <= threshold).sum(axis=-1), logits.shape[-1] - 1).astype(best.dtype)
    return best
