"""The first stage: the target answers prompts, and every batch of answers becomes a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_mlx.chat_template import render
from dflash_mlx.errors import UsageError
from dflash_mlx.target.target import Target
from dflash_mlx.train.job import Job, Workplace, writing
from dflash_mlx.train.prompts import Prompt, own_prompts, read_prompts
from dflash_mlx.train.respond import GREEDY, Responder, Sampling, batch_prompts
from dflash_mlx.train.shards import load_samples, save_samples

Say = Callable[[str], None]

HELD_OUT_SHARE = 50  # held-out tokens are one in so many, within these bounds
HELD_OUT_TOKENS = (1000, 16_000)
TOKENS_PER_PROMPT = 40  # an own prompt yields more, and so most batches are full


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


def generate(job: Job, place: Workplace, target: Target, tokenizer: Any, layers: list[int], say: Say) -> None:
    """Write shards until there are tokens enough; those that exist already count.

    Raises:
        DFlashError: a shard cannot be written.
    """
    held_out, train = split(prompts_of(job))
    low, high = HELD_OUT_TOKENS
    enough = max(low, min(job.tokens // HELD_OUT_SHARE, high))
    stop_ids = frozenset(int(token) for token in tokenizer.eos_token_ids)
    with Responder(target, layers, stop_ids) as responder:
        for name, chosen, sampling, tokens in (
            ("held_out", held_out, GREEDY, enough),
            ("train", train, Sampling(), job.tokens),
        ):
            _respond(name, encode(tokenizer, chosen), sampling, tokens, place, responder, say)


def _respond(
    name: str,
    prompts: list[tuple[int, ...]],
    sampling: Sampling,
    tokens: int,
    place: Workplace,
    responder: Responder,
    say: Say,
) -> None:
    """One set: batch by batch until there are `tokens`, or no more prompts."""
    existing = {file.name: file for file in place.shards(name)}
    written = sum(sample.written for sample in load_samples(existing.values()))
    begun, before = time.monotonic(), written
    for number, batch in enumerate(_spread(batch_prompts(prompts, sampling.rows))):
        if written >= tokens:
            return
        file = place.responses / f"{name}-{number:04d}.safetensors"
        if file.name in existing:
            continue
        samples = responder.respond([prompts[i] for i in batch], sampling, seed=number)
        with writing(file):
            save_samples(samples, file)
        written += sum(sample.written for sample in samples)
        pace = (written - before) / (time.monotonic() - begun)
        left = max(tokens - written, 0) / pace / 60
        say(f"generate: {name} {written:,} of {tokens:,} tokens, {pace:.0f} tokens/s, {left:.0f} min left")
    if written < tokens:
        say(f"generate: {name} has {written:,} of {tokens:,} tokens: there are no more prompts")


def _spread(batches: list[list[int]]) -> list[list[int]]:
    """Full batches in random order, then the others: else the commonest prompt lengths would come first."""
    full = max(len(batch) for batch in batches)
    order = np.random.default_rng(0).permutation(len(batches))
    return sorted((batches[i] for i in order), key=lambda batch: len(batch) < full)
