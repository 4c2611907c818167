"""The first stage: the target answers prompts, and every batch of answers becomes a file.

Our own prompts are of as many kinds as there are templates, and a drafter learns these by heart. So where the
target can write the user's turn too, half of the responses are from conversations that it makes up.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dflash_mlx.chat_template import render
from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import UsageError
from dflash_mlx.prefix_cache import shared
from dflash_mlx.target.target import Target
from dflash_mlx.train.evaluate import walkable
from dflash_mlx.train.job import Job, Workplace, writing
from dflash_mlx.train.prompts import Prompt, own_prompts, read_prompts
from dflash_mlx.train.respond import GREEDY, Opening, Responder, Sampling, batch_prompts
from dflash_mlx.train.shards import Sample, load_samples, save_samples

Say = Callable[[str], None]
Make = Callable[[], list[Sample]]
"""Makes the samples of a batch; none: there are no more."""

HELD_OUT_SHARE = 50  # held-out tokens are one in so many, within these bounds
HELD_OUT_TOKENS = (1000, 16_000)
TOKENS_PER_PROMPT = 40  # an own prompt yields more, and so most batches are full
CONVERSED = "train-conversed"  # the set of conversations that the target makes up
CONVERSED_SHARE = 0.5  # of the tokens to train on
CONVERSANT = 0.25  # a target that gets to its reply in fewer conversations cannot make them up


def prompts_of(job: Job) -> list[Prompt]:
    """The job's own prompts, or those of its file."""
    if job.prompts is not None:
        return read_prompts(Path(job.prompts))
    return own_prompts(max(job.tokens // TOKENS_PER_PROMPT, 2000))


def split(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Those to measure on, and those to train on.

    Raises:
        UsageError: there is none of one kind.
    """
    held_out = [p for p in prompts if p.held_out]
    train = [p for p in prompts if not p.held_out]
    if not held_out or not train:
        raise UsageError(f"{len(prompts)} prompts are too few to train on some and measure on others")
    return held_out, train


def encode(tokenizer: Any, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Token ids of prompts; targets without a chat template continue the last turn as it is."""
    if not tokenizer.has_chat_template:
        return [tuple(tokenizer.encode(prompt.turns[-1])) for prompt in prompts]
    return [render(tokenizer, prompt.messages).ids for prompt in prompts]


def opening_of(tokenizer: Any) -> Opening | None:
    """What is around the user's turn: the tokens that any two conversations have in common."""
    if not tokenizer.has_chat_template:
        return None
    one, other = encode(tokenizer, [Prompt((turn,), turn) for turn in ("apple", "Seven")])
    before = one[: shared(one, other)]
    after = one[len(one) - shared(one[::-1], other[::-1]) :]
    return Opening(before, after) if before and after else None


def generate(
    job: Job, place: Workplace, target: Target, tokenizer: Any, config: DrafterConfig, say: Say
) -> None:
    """Write shards until there are tokens enough; those that exist already count.

    Raises:
        DFlashError: a shard cannot be written.
        UsageError: the replies are so short that nothing could be measured on them.
    """
    held_out, train = split(prompts_of(job))
    low, high = HELD_OUT_TOKENS
    enough = max(low, min(job.tokens // HELD_OUT_SHARE, high))
    stop_ids = frozenset(int(token) for token in tokenizer.eos_token_ids)
    opening = opening_of(tokenizer) if job.prompts is None else None
    with Responder(target, config.target_layer_ids, stop_ids) as responder:
        measuring = _answers(responder, encode(tokenizer, held_out), GREEDY)
        _record("held_out", measuring, enough, place, say)
        walkable(load_samples(place.shards("held_out")), config.block_size)  # before the long part
        if opening is not None:
            conversations = _conversations(responder, opening, Sampling())
            _record(CONVERSED, conversations, int(job.tokens * CONVERSED_SHARE), place, say)
        answers = _answers(responder, encode(tokenizer, train), Sampling())
        _record("train", answers, job.tokens, place, say)


def _answers(responder: Responder, prompts: Sequence[tuple[int, ...]], sampling: Sampling) -> Iterator[Make]:
    """Answers to all prompts."""
    for number, batch in enumerate(_spread(batch_prompts(prompts, sampling.rows))):
        yield partial(responder.respond, [prompts[i] for i in batch], sampling, number)


def _conversations(responder: Responder, opening: Opening, sampling: Sampling) -> Iterator[Make]:
    """Conversations that the target makes up, without end if it can."""

    def converse(number: int) -> list[Sample]:
        samples = responder.converse(opening, sampling, number)
        return samples if len(samples) >= CONVERSANT * sampling.rows else []

    for number in itertools.count():
        yield partial(converse, number)


def _record(name: str, batches: Iterable[Make], tokens: int, place: Workplace, say: Say) -> None:
    """One set: batch by batch until there are `tokens`, or no more batches."""
    existing = {file.name: file for file in place.shards(name)}
    written = sum(sample.written for sample in load_samples(existing.values()))
    begun, before = time.monotonic(), written
    for number, make in enumerate(batches):
        if written >= tokens:
            return
        file = place.responses / f"{name}-{number:04d}.safetensors"
        if file.name in existing:
            continue
        samples = make()
        if not samples:
            break
        with writing(file):
            save_samples(samples, file)
        written += sum(sample.written for sample in samples)
        pace = (written - before) / (time.monotonic() - begun)
        left = max(tokens - written, 0) / pace / 60
        say(f"generate: {name} {written:,} of {tokens:,} tokens, {pace:.0f} tokens/s, {left:.0f} min left")
    if written < tokens:
        say(f"generate: {name} has {written:,} of {tokens:,} tokens: there are no more")


def _spread(batches: list[list[int]]) -> list[list[int]]:
    """Full batches in random order, then the others: else the commonest prompt lengths would come first."""
    full = max(len(batch) for batch in batches)
    order = np.random.default_rng(0).permutation(len(batches))
    return sorted((batches[i] for i in order), key=lambda batch: len(batch) < full)
