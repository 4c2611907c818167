"""What a training will need, before it starts: refused here rather than after a day."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from dflash_mlx import memory
from dflash_mlx.config import DrafterConfig
from dflash_mlx.drafter.model import DrafterModel
from dflash_mlx.errors import OutOfMemoryError, UsageError
from dflash_mlx.progress import readable
from dflash_mlx.target.target import Target
from dflash_mlx.train.fit import FitRecipe, fit_recipe
from dflash_mlx.train.job import Job
from dflash_mlx.train.losses import Goal
from dflash_mlx.train.respond import Sampling

RESPONSE_TOKENS = 100  # of a typical response
LOSS_VOCABULARY = Goal.common + Goal.others + 1000  # the last: a step's own, beyond the common ones
BACKWARD = 3  # a forward and its backward cost three forwards
# Of the speed of a lone large matrix product, measured on two CPU cores.
GENERATE_EFFICIENCY = 0.3  # 64 rows at a time and fewer, and all that is not a product
FIT_EFFICIENCY = 0.4


@dataclass(frozen=True)
class Plan:
    """Bytes and seconds that a job is estimated to take, and what there is.

    Attributes:
        memory: at the peak, the target's weights included.
        disk: responses, checkpoints and the drafter.
        generate_seconds, fit_seconds: by multiplications alone, on an otherwise idle machine: a rough guide.
    """

    tokens: int
    steps: int
    memory: int
    memory_there: int
    disk: int
    disk_there: int
    generate_seconds: float
    fit_seconds: float

    def check(self) -> None:
        """Refuse what cannot fit.

        Raises:
            OutOfMemoryError: or UsageError, for the disk.
        """
        if self.disk > self.disk_there:
            raise UsageError(
                f"this training would write {readable(self.disk)}, and {readable(self.disk_there)} are free: "
                "ask for fewer --tokens, or another --out"
            )
        if self.memory > self.memory_there:
            raise OutOfMemoryError(
                f"this training would need {readable(self.memory)} of memory, and "
                f"{readable(self.memory_there)} are available: take a smaller or quantized target"
            )

    def __str__(self) -> str:
        return (
            f"plan: {self.tokens:,} tokens from the target (about {_time(self.generate_seconds)}), then "
            f"{self.steps:,} training steps (about {_time(self.fit_seconds)}); "
            f"memory {readable(self.memory)} of {readable(self.memory_there)}, "
            f"disk {readable(self.disk)} of {readable(self.disk_there)} free"
        )


def plan(job: Job, target: Target, config: DrafterConfig, prompts: Sequence[int], out: Path) -> Plan:
    """Estimate a job on this machine; multiplies some large matrices to know its speed.

    Of the target nothing is evaluated.

    Args:
        prompts: tokens of each, or of some of them.
    """
    speed = _multiply_speed()
    sampling = Sampling()
    held = memory.plan(target, None)
    drafter = DrafterModel(config)
    small = sum(value.size for value in _values(drafter))
    taps = len(config.target_layer_ids) + 1
    responses = job.tokens / RESPONSE_TOKENS
    recipe = fit_recipe(job, round(responses))
    length = max(prompts) + sampling.max_tokens
    prompt = statistics.fmean(prompts)
    tokens = job.tokens + responses * prompt
    states = taps * target.hidden_size * 2  # bytes of a token
    answering = sampling.rows * (sum(cache.at(length) for cache in held.caches) + length * states)
    rows = recipe.rows * recipe.anchors * config.block_size
    training = 16 * small + 4 * rows * (5 * LOSS_VOCABULARY + 60 * target.hidden_size)
    return Plan(
        tokens=job.tokens,
        steps=recipe.steps,
        memory=held.weights + max(answering, training),
        memory_there=memory.available(),
        disk=int(tokens * states + 30 * small),
        disk_there=shutil.disk_usage(_existing(out)).free,
        generate_seconds=tokens * _multiplications(target.model) / (GENERATE_EFFICIENCY * speed),
        fit_seconds=recipe.steps * _step_multiplications(drafter, recipe, prompt) / (FIT_EFFICIENCY * speed),
    )


def tokens_for(hours: float, job: Job, estimate: Plan) -> int:
    """How many tokens a job of `hours` can have, from the estimate of one with another number."""
    seconds_per_token = (estimate.generate_seconds + estimate.fit_seconds) / job.tokens
    return max(int(hours * 3600 / seconds_per_token), 1000)


def _multiply_speed() -> float:
    """Multiplications per second: of several short products the quickest, as other programs slow some."""
    a = mx.random.normal((512, 1024))
    mx.eval(a)
    times: list[float] = []
    while len(times) < 16 and sum(times) < 0.2:
        started = time.perf_counter()
        mx.eval((a + len(times)) @ a.T)
        times.append(time.perf_counter() - started)
    return 512 * 512 * 1024 / min(times)


def _step_multiplications(drafter: DrafterModel, recipe: FitRecipe, prompt: float) -> int:
    """Of one training step: every layer by the rows that go through it, and the head by the slots.

    `prompt` is the tokens of a typical prompt.
    """
    config = drafter.config
    context = round(recipe.rows * (prompt + RESPONSE_TOKENS))
    blocks = recipe.rows * recipe.anchors
    block_rows, slots = blocks * config.block_size, blocks * (config.block_size - 1)
    rows = {"fc": context, "k_proj": context + block_rows, "v_proj": context + block_rows}
    network = sum(
        module.weight.size * rows.get(name.rpartition(".")[2], block_rows)
        for name, module in drafter.named_modules()
        if isinstance(module, nn.Linear)
    )
    unary = slots * min(LOSS_VOCABULARY, config.vocab_size) * config.hidden_size
    edges = slots * min(LOSS_VOCABULARY, config.vocab_size) * config.selector_rank
    # The target's own distribution is the head once more, without a backward.
    return BACKWARD * (network + unary + edges) + unary


def _multiplications(model: nn.Module) -> int:
    """Of one token: one for each weight. Mixtures of experts need fewer."""
    packed = [m for m in model.modules() if isinstance(m, nn.QuantizedLinear | nn.QuantizedEmbedding)]
    return sum(v.size for v in _values(model)) + sum(m.weight.size * (32 // m.bits - 1) for m in packed)


def _values(model: nn.Module) -> list[mx.array]:
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]  # a list here
    return [value for _, value in flat]


def _existing(path: Path) -> Path:
    """The nearest folder above that is there."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.0f} min"
