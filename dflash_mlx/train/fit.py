"""Fit a drafter to recorded responses.

Every step draws its rows, anchors and vocabulary from the seed and its own number alone, so a run that was
killed goes on from its checkpoint exactly as if it had not been.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from dflash_mlx.drafter.model import DrafterModel
from dflash_mlx.errors import UsageError
from dflash_mlx.target.target import Target
from dflash_mlx.train.blocks import Batch, make_batch
from dflash_mlx.train.job import Job, write_text
from dflash_mlx.train.losses import Draws, Goal, LossVocabulary, block_loss
from dflash_mlx.train.optimizer import make_optimizer
from dflash_mlx.train.shards import Sample
from dflash_mlx.train.step import make_step


@dataclass(frozen=True)
class FitRecipe:
    """How a drafter is trained."""

    steps: int = 1200
    rows: int = 8
    anchors: int = 64
    peak_rate: float = 2e-3
    warmup: int = 60
    weight_decay: float = 0.01
    goal: Goal = field(default_factory=Goal)
    seed: int = 0


def fit_recipe(job: Job, responses: int) -> FitRecipe:
    """Steps for so many responses; a drafter that goes on from another takes smaller ones."""
    steps = max(round(job.epochs * responses / FitRecipe.rows), 1)
    if job.start is None:
        return FitRecipe(steps=steps)
    return FitRecipe(steps=steps, peak_rate=FitRecipe.peak_rate / 4, warmup=20)


@dataclass(frozen=True)
class Point:
    """Where a training stood: what it says in its live line, and what the curves are drawn from.

    Attributes:
        step: steps done.
        tokens: response tokens learned from so far, repetitions counted.
        loss: mean over the steps since the last point.
        tau, slots: as measured on held-out responses; None and empty between two measurements.
        seconds: of training so far.
    """

    step: int
    tokens: int
    loss: float
    seconds: float
    tau: float | None = None
    slots: tuple[float, ...] = ()


Measure = Callable[[DrafterModel], tuple[float, tuple[float, ...]]]
"""A drafter's tau and slot accuracies on held-out responses."""


class Fit:
    """A training under way: the model, its optimizer, and how it went so far.

    Raises:
        UsageError: no sample has a second token, which a drafter could learn to foretell.
    """

    def __init__(
        self, model: DrafterModel, target: Target, samples: Sequence[Sample], recipe: FitRecipe
    ) -> None:
        self.model = model
        self.recipe = recipe
        self.points: list[Point] = []
        self.step = 0
        self._tokens = 0
        self._seconds = 0.0
        self._target = target
        self._usable = [sample for sample in samples if sample.written >= 2]
        if not self._usable:
            raise UsageError(
                f"each of the {len(samples)} replies to learn from ends with its first token: begin anew in "
                "another --out, with prompts that get longer replies"
            )
        self._vocabulary = LossVocabulary(by_use(self._usable), target.vocab_size, recipe.goal)
        self._optimizer = make_optimizer(
            recipe.steps, recipe.peak_rate, min(recipe.warmup, -(-recipe.steps // 10)), recipe.weight_decay
        )
        self._optimizer.init(model.trainable_parameters())

        def loss(drafter: DrafterModel, batch: Batch, draws: Draws) -> mx.array:
            return block_loss(drafter, target, batch, draws, recipe.goal)

        self._move = make_step(model, self._optimizer, loss)

    def run(self, every: int = 20) -> Iterator[Point]:
        """Train to the end; a point every so many steps, and after the last."""
        self.model.train()
        losses: list[float] = []
        while self.step < self.recipe.steps:
            started = time.monotonic()
            losses.append(self._one())
            self._seconds += time.monotonic() - started
            if self.step % every == 0 or self.step == self.recipe.steps:
                yield Point(self.step, self._tokens, float(np.mean(losses)), self._seconds)
                losses = []
        self.model.eval()

    def _one(self) -> float:
        recipe = self.recipe
        rng = np.random.default_rng((recipe.seed, self.step))
        rows = [self._usable[i] for i in self._order(self.step)]
        batch = make_batch(rows, recipe.anchors, self.model.config.block_size, rng)
        loss = self._move(batch, self._vocabulary.draw(batch.gold[:, :, 1:], rng))
        self.step += 1
        self._tokens += sum(sample.written for sample in rows)
        return loss

    def _order(self, step: int) -> list[int]:
        """The samples of a step: every epoch goes through all of them, in an order of its own."""
        count, rows = len(self._usable), self.recipe.rows
        places = range(step * rows, (step + 1) * rows)
        epochs = {place // count for place in places}
        orders = {e: np.random.default_rng((self.recipe.seed, e, 1)).permutation(count) for e in epochs}
        return [int(orders[place // count][place % count]) for place in places]

    # --- checkpoints --------------------------------------------------------------------------

    def save(self, file: Path) -> None:
        """Write everything that the training needs to go on."""
        arrays: dict[str, mx.array] = {f"model.{k}": v for k, v in _flat(self.model.parameters())}
        arrays |= {f"optimizer.{k}": v for k, v in _flat(self._optimizer.state)}
        progress = {
            "step": self.step,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "points": [asdict(point) for point in self.points],
        }
        partial = file.with_name(f".{file.name}")
        mx.save_safetensors(str(partial), arrays, metadata={"progress": json.dumps(progress)})
        partial.replace(file)

    def restore(self, file: Path) -> None:
        """Take up what `save` wrote."""
        loaded: Any = mx.load(str(file), return_metadata=True)
        arrays, metadata = loaded
        weights = [(k.removeprefix("model."), v) for k, v in arrays.items() if k.startswith("model.")]
        state = [(k.removeprefix("optimizer."), v) for k, v in arrays.items() if k.startswith("optimizer.")]
        self.model.load_weights(weights)
        self._optimizer.state = tree_unflatten(state)
        progress = json.loads(metadata["progress"])
        self.step, self._tokens, self._seconds = (progress[k] for k in ("step", "tokens", "seconds"))
        self.points = [Point(**{**p, "slots": tuple(p["slots"])}) for p in progress["points"]]


def fit_drafter(model: DrafterModel, target: Target, samples: Sequence[Sample], recipe: FitRecipe) -> float:
    """Train `model` in place without checkpoints; returns the mean loss of the last steps."""
    fit = Fit(model, target, samples, recipe)
    loss = float("nan")
    for point in fit.run():
        loss = point.loss
        pace = point.seconds / point.step
        print(f"drafter: step {point.step}/{recipe.steps} loss {loss:.3f} {pace:.2f} s/step", flush=True)
    return loss


def by_use(samples: Sequence[Sample]) -> np.ndarray:
    """The token ids of the responses, those used most first."""
    used, times = np.unique(np.concatenate([s.tokens[s.prompt :] for s in samples]), return_counts=True)
    return np.asarray(used[np.argsort(-times, kind="stable")])


def most_used(samples: Sequence[Sample], count: int) -> np.ndarray:
    """The `count` token ids that responses use most, sorted.

    Where fewer occur at all, the lowest others follow: byte-pair vocabularies are sorted by frequency.
    """
    chosen = by_use(samples)[:count]
    others = np.setdiff1d(np.arange(count + len(chosen)), chosen)[: count - len(chosen)]
    return np.sort(np.concatenate([chosen, others])).astype(np.int32)


def save_drafter(model: DrafterModel, raw_config: Mapping[str, Any], folder: Path) -> None:
    """Write the public layout in bf16: config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.astype(mx.bfloat16) if mx.issubdtype(value.dtype, mx.floating) else value
        for name, value in _flat(model.parameters())
    }
    partial = folder / ".model.safetensors"
    mx.save_safetensors(str(partial), weights, metadata={"format": "mlx"})
    partial.replace(folder / "model.safetensors")
    write_text(folder / "config.json", json.dumps(raw_config, indent=2) + "\n")


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    flat: list[tuple[str, mx.array]] = tree_flatten(tree)  # type: ignore[assignment]  # a list here
    return flat
