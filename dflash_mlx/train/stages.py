"""The three stages on one workplace: generate, fit, check. Each can be killed at any time and goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.config import DrafterConfig
from dflash_mlx.drafter.load import load_drafter
from dflash_mlx.drafter.model import DrafterModel
from dflash_mlx.errors import ContextLengthError, UsageError
from dflash_mlx.session import Session
from dflash_mlx.target.target import Target
from dflash_mlx.train.card import render_card
from dflash_mlx.train.check import EndToEnd, end_to_end
from dflash_mlx.train.curves import draw_curves
from dflash_mlx.train.evaluate import DraftReport, evaluate_drafter, walkable
from dflash_mlx.train.fit import Fit, Point, fit_recipe, most_used, save_drafter
from dflash_mlx.train.generate import CONVERSED, Say, encode, generate, prompts_of, split
from dflash_mlx.train.initial import choose_mask, drafter_config, new_drafter
from dflash_mlx.train.job import Job, Workplace, write_text, writing
from dflash_mlx.train.prompts import Prompt, free_form_prompts
from dflash_mlx.train.respond import Sampling, final_norm
from dflash_mlx.train.shards import Sample, load_samples

STAGES = ("generate", "fit", "check")
CHECKPOINT_SECONDS = 300
MEASURED = 24  # held-out responses for the live line; all of them for the card
MEASUREMENTS = 12  # in one training
TICK = 10  # steps between two live lines
CHECKED = 40  # prompts of each kind that are decoded to the end
SAMPLED = 50  # of our own prompts, to know what they are like


@dataclass(frozen=True)
class Training:
    """A job with everything that it works on.

    Attributes:
        raw_config: of the drafter, as it is written.
        prompt_lengths: tokens of each prompt of a file, or of a sample of our own.
    """

    job: Job
    place: Workplace
    target: Target
    tokenizer: Any
    raw_config: Mapping[str, Any]
    start: DrafterModel | None
    prompt_lengths: Sequence[int]
    say: Say

    @property
    def config(self) -> DrafterConfig:
        return DrafterConfig.from_dict(self.raw_config)

    def generate(self) -> None:
        """Record responses.

        Raises:
            UsageError: they are too short to measure anything on.
        """
        generate(self.job, self.place, self.target, self.tokenizer, self.config, self.say)

    def fit(self) -> None:
        """Train; the best drafter so far is in the folder at any time.

        Raises:
            UsageError: there are no responses, or only some that are too short.
        """
        train, held_out = (load_samples(self.place.shards(name)) for name in ("train", "held_out"))
        if not train or not held_out:
            raise UsageError(f"{self.place.folder} has no recorded responses: run the generate stage first")
        if self.place.fitted.exists():
            self.say("fit: done before")
            return
        held_out = walkable(held_out, self.config.block_size)
        measured = held_out[:: -(-len(held_out) // MEASURED)]
        model = self.new_model(train)
        fit = Fit(model, self.target, train, fit_recipe(self.job, len(train)))
        if self.place.checkpoint.exists():
            fit.restore(self.place.checkpoint)
            self.say(f"fit: going on from step {fit.step}")
        best = max((point.tau or 0.0 for point in fit.points), default=0.0)
        # By the steps' own numbers, so that a run that was killed measures where it would have.
        every = max(fit.recipe.steps // MEASUREMENTS, 1)
        tick = min(every, TICK)
        saved = time.monotonic()
        for point in fit.run(every=tick):
            if fit.step % (every - every % tick) == 0 or fit.step == fit.recipe.steps:
                report = evaluate_drafter(model, self.target, measured)
                point = replace(point, tau=report.tau, slots=report.slots)
            fit.points.append(point)
            self.say(_live(point, fit))
            with writing(self.place.folder):
                if point.tau is not None and point.tau >= best:
                    best = point.tau
                    save_drafter(model, self.raw_config, self.place.folder)
                if point.tau is not None or time.monotonic() - saved > CHECKPOINT_SECONDS:
                    fit.save(self.place.checkpoint)
                    write_text(self.place.folder / "curves.svg", draw_curves(fit.points))
                    saved = time.monotonic()
        with writing(self.place.folder):
            conversed = load_samples(self.place.shards(CONVERSED))
            summary = {
                "train_responses": len(train),
                "train_tokens": sum(s.written for s in train),
                "conversed_tokens": sum(s.written for s in conversed),
            }
            write_text(self.place.fitted, json.dumps({**summary, "points": [asdict(p) for p in fit.points]}))

    def check(self) -> None:
        """Measure what was saved, and write the card.

        Raises:
            UsageError: there is no drafter yet.
        """
        if not self.place.fitted.exists():
            raise UsageError(f"{self.place.folder} has no finished drafter: run the fit stage first")
        drafter = load_drafter(self.place.folder)
        held_out = load_samples(self.place.shards("held_out"))
        walked = evaluate_drafter(drafter, self.target, held_out)
        self.say(f"check: tau {walked.tau:.2f} over {walked.cycles} cycles of held-out responses")
        session = Session(self.target, self.tokenizer, drafter)
        try:
            prompts, _ = split(prompts_of(self.job))
            rng = np.random.default_rng(0)
            chosen = [prompts[i] for i in rng.permutation(len(prompts))[:CHECKED]]
            ends = {
                "held-out templates" if self.job.prompts is None else "held-out prompts": chosen,
                "free-form prompts": free_form_prompts()[:CHECKED],
            }
            ended = {
                name: end_to_end(session, encode(self.tokenizer, chosen), self.say)
                for name, chosen in ends.items()
            }
        finally:
            session.close()
        self._write_card(walked, ended)
        for name, result in ended.items():
            self.say(
                f"check: {name}: tau {result.tau:.2f}, "
                f"{result.identical} of {result.prompts} replies identical, "
                f"speed over plain decoding [95 %] {result.speedup or '-'}"
            )

    def new_model(self, train: list[Sample]) -> DrafterModel:
        """The drafter before its first step."""
        if self.start is not None:
            return self.start
        model = new_drafter(self.config, self.target, seed=0)
        if self.config.draft_head_size:
            model.draft_head_ids = mx.array(most_used(train, self.config.draft_head_size))
        return model

    def _write_card(self, walked: DraftReport, ended: Mapping[str, EndToEnd]) -> None:
        facts = json.loads(self.place.fitted.read_text())
        results = {"walked": asdict(walked), "end_to_end": {k: v.to_json() for k, v in ended.items()}}
        with writing(self.place.folder):
            write_text(self.place.checked, json.dumps(results, indent=2) + "\n")
            write_text(
                self.place.folder / "README.md", render_card(self.job, self.config, facts, walked, ended)
            )


def prepare(
    job: Job,
    place: Workplace,
    target: Target,
    tokenizer: Any,
    target_config: Mapping[str, Any],
    start_folder: Path | None,
    say: Callable[[str], None],
) -> Training:
    """Settle the drafter's config: a new one, or that of the drafter to go on from.

    Raises:
        PairError: that drafter belongs to another target.
        UnsupportedTargetError: this target cannot be speculated on, or not be trained for.
        UsageError: the prompts cannot be used, as one that is too long for the target, or the drafter to go
            on from is quantized.
    """
    target.attach([0])  # what speculation would refuse later is refused now
    target.detach()
    final_norm(target)
    prompts = prompts_of(job)
    split(prompts)
    if job.prompts is None:
        prompts = prompts[:SAMPLED]
    encoded = encode(tokenizer, prompts)
    if job.prompts is not None:
        _check_context(prompts, encoded, target.context_length)
    lengths = tuple(map(len, encoded))
    if start_folder is not None:
        start = load_drafter(start_folder)
        target.check_fit(start.config)
        if start.config.quantization is not None:
            raise UsageError(f"{job.start} is quantized: go on from the drafter that it was made from")
        start.set_dtype(mx.float32)
        raw = json.loads((start_folder / "config.json").read_text(encoding="utf-8"))
        return Training(job, place, target, tokenizer, raw, start, lengths, say)
    mask = choose_mask(tokenizer, frozenset(token for ids in encoded for token in ids))
    raw = drafter_config(job, target, target_config, mask)
    return Training(job, place, target, tokenizer, raw, None, lengths, say)


def _check_context(
    prompts: Sequence[Prompt], encoded: Sequence[Sequence[int]], context_length: int | None
) -> None:
    """Refuse what leaves no room for a reply: beyond its context a target writes nothing worth learning.

    Raises:
        ContextLengthError: for the longest prompt.
    """
    longest, ids = max(zip(prompts, encoded, strict=True), key=lambda pair: len(pair[1]))
    whole = len(ids) + Sampling.max_tokens
    if context_length is not None and whole > context_length:
        raise ContextLengthError(
            f"the prompt that begins {longest.turns[0][:40]!r} has {len(ids):,} tokens, with a reply up to "
            f"{whole:,}, and this target's context is {context_length:,}: leave it out, or shorten it"
        )


def _live(point: Point, fit: Fit) -> str:
    left = point.seconds / point.step * (fit.recipe.steps - point.step) / 60
    line = f"fit: step {point.step}/{fit.recipe.steps} loss {point.loss:.3f}, {left:.0f} min left"
    if point.tau is None:
        return line
    slots = " ".join(f"{share:.2f}" for share in point.slots)
    return f"{line}, held-out tau {point.tau:.2f}, slots {slots}"
