"""Training data: responses that the target writes itself, with the hidden states of that very decoding.

Keeping the taps of the decode pass costs nothing, needs no second pass over the text, and gives the drafter
in training the numbers that it will get at work.

This file knows token ids and hidden states, and nothing about text or drafters.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.target.taps import Taps

FINISHED_SHARE = (
    0.9  # a batch is left when so many of its rows are complete: the last few would run almost alone
)


@dataclass(frozen=True)
class Sampling:
    """How responses are decoded: a share of greedy rows, the others at `temperature`."""

    max_tokens: int = 160
    rows: int = 64
    greedy_share: float = 0.6
    temperature: float = 0.7


@dataclass(frozen=True)
class Sample:
    """One prompt with its response.

    `tokens` [n] begins with `prompt` prompt tokens; `taps` [n - 1, taps * H] are the tapped hidden states
    of all tokens but the last, which was never fed.
    """

    tokens: np.ndarray
    taps: mx.array
    prompt: int


def respond(
    model: nn.Module,
    layer_ids: Sequence[int],
    prompts: Sequence[Sequence[int]],
    stop_ids: frozenset[int],
    sampling: Sampling,
    seed: int,
) -> list[Sample]:
    """Let the target answer every prompt; prints a line per batch.

    Prompts of one length form a batch, so no cache ever holds padding and any model whose caches take
    several rows will do.
    """
    mx.random.seed(seed)
    taps = Taps(model.layers, layer_ids)
    samples: list[Sample] = []
    started = time.monotonic()
    try:
        for batch in _batches(prompts, sampling.rows):
            samples += _respond_batch(model, taps, batch, stop_ids, sampling)
            written = sum(len(sample.tokens) - sample.prompt for sample in samples)
            pace = written / (time.monotonic() - started)
            print(
                f"data: {len(samples)}/{len(prompts)} responses, {written:,} tokens, {pace:.0f} tok/s",
                flush=True,
            )
    finally:
        for undo in taps.undos:
            undo()
    return samples


def _batches(prompts: Sequence[Sequence[int]], rows: int) -> Iterator[list[Sequence[int]]]:
    """Prompts grouped by length, at most `rows` to a batch."""
    by_length: dict[int, list[Sequence[int]]] = defaultdict(list)
    for prompt in prompts:
        by_length[len(prompt)].append(prompt)
    for group in by_length.values():
        for start in range(0, len(group), rows):
            yield group[start : start + rows]


def _respond_batch(
    model: nn.Module, taps: Taps, prompts: list[Sequence[int]], stop_ids: frozenset[int], sampling: Sampling
) -> list[Sample]:
    """Decode one batch of prompts of equal length."""
    rows, prompt = len(prompts), len(prompts[0])
    greedy = mx.arange(rows) < round(rows * sampling.greedy_share)
    caches = make_prompt_cache(model)
    fed = mx.array(prompts)  # [B, P], then [B, 1]
    states: list[mx.array] = []
    columns: list[np.ndarray] = []
    running = np.ones(rows, dtype=bool)
    while len(columns) < sampling.max_tokens and running.mean() > 1 - FINISHED_SHARE:
        logits = model(fed, cache=caches)[:, -1].astype(mx.float32)  # [B, V]
        states.append(taps.take().astype(mx.bfloat16))
        chosen = _choose(logits, greedy, sampling.temperature)
        mx.eval(chosen, states[-1])
        columns.append(np.array(chosen))
        running &= ~np.isin(columns[-1], list(stop_ids))
        fed = chosen[:, None]
    tokens = np.concatenate([np.array(prompts), np.stack(columns, axis=1)], axis=1)  # [B, P + n]
    hidden = mx.concatenate(states, axis=1)  # [B, P + n - 1, taps * H]
    samples = []
    for row in range(rows):
        stops = np.flatnonzero(np.isin(tokens[row, prompt:], list(stop_ids)))
        length = prompt + (int(stops[0]) + 1 if len(stops) else len(columns))
        samples.append(
            Sample(tokens[row, :length].astype(np.int32), mx.contiguous(hidden[row, : length - 1]), prompt)
        )
    mx.eval([sample.taps for sample in samples])
    return samples


def _choose(logits: mx.array, greedy: mx.array, temperature: float) -> mx.array:
    """Next tokens [B] from logits [B, V]: the best where `greedy`, else a draw."""
    best = mx.argmax(logits, axis=-1)
    if not temperature:
        return best
    return mx.where(greedy, best, mx.random.categorical(logits / temperature).astype(best.dtype))


def save_samples(samples: Sequence[Sample], file: Path) -> None:
    """Write samples to one safetensors file, end to end."""
    lengths = mx.array([[len(sample.tokens), sample.prompt] for sample in samples])
    tokens = mx.array(np.concatenate([sample.tokens for sample in samples]))
    taps = mx.concatenate([sample.taps for sample in samples])
    mx.save_safetensors(str(file), {"lengths": lengths, "tokens": tokens, "taps": taps})


def load_samples(file: Path) -> list[Sample]:
    """Read what `save_samples` wrote."""
    arrays = mx.load(str(file))
    assert isinstance(arrays, dict)
    tokens, taps = np.array(arrays["tokens"]), arrays["taps"]
    samples, token, tap = [], 0, 0
    for length, prompt in np.array(arrays["lengths"]).tolist():
        samples.append(Sample(tokens[token : token + length], taps[tap : tap + length - 1], prompt))
        token, tap = token + length, tap + length - 1
    return samples
