"""What a training will need, before it starts: refused here rather than after a day."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from dflash_mlx.config import DrafterConfig
from dflash_mlx.drafter.model import DrafterModel
from dflash_mlx.errors import OutOfMemoryError, UsageError
from dflash_mlx.target.caches import arrays
from dflash_mlx.target.target import Target
from dflash_mlx.train.fit import fit_recipe
from dflash_mlx.train.job import Job
from dflash_mlx.train.respond import Sampling

PROMPT_TOKENS = 60  # of a typical prompt
RESPONSE_TOKENS = 100  # of a typical response
LOSS_VOCABULARY = 12_000
BACKWARD = 3  # a forward and its backward cost three forwards
EFFICIENCY = 0.5  # of a lone large matrix product


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
                f"this training would write {_size(self.disk)}, and {_size(self.disk_there)} are free: "
                "ask for fewer --tokens, or another --out"
            )
        if self.memory > self.memory_there:
            raise OutOfMemoryError(
                f"this training would need {_size(self.memory)} of memory, and this machine has "
                f"{_size(self.memory_there)}: take a smaller or quantized target"
            )

    def __str__(self) -> str:
        return (
            f"plan: {self.tokens:,} tokens from the target (about {_time(self.generate_seconds)}), then "
            f"{self.steps:,} training steps (about {_time(self.fit_seconds)}); "
            f"memory {_size(self.memory)} of {_size(self.memory_there)}, "
            f"disk {_size(self.disk)} of {_size(self.disk_there)} free"
        )


def plan(job: Job, target: Target, config: DrafterConfig, out: Path) -> Plan:
    """Estimate a job on this machine; multiplies one large matrix to know its speed."""
    speed = EFFICIENCY * _multiply_speed()  # multiplications per second
    sampling = Sampling()
    weights = _multiplications(target.model)
    small = _multiplications(DrafterModel(config))
    taps = len(config.target_layer_ids) + 1
    recipe = fit_recipe(job, round(job.tokens / RESPONSE_TOKENS))
    length = PROMPT_TOKENS + sampling.max_tokens
    responses = job.tokens / RESPONSE_TOKENS
    tokens = job.tokens + responses * PROMPT_TOKENS
    rows = recipe.rows * recipe.anchors * config.block_size
    context = recipe.rows * (PROMPT_TOKENS + RESPONSE_TOKENS)
    head = rows * LOSS_VOCABULARY * target.hidden_size
    per_step = BACKWARD * ((rows + context) * small + head)
    states = tokens * taps * target.hidden_size * 2
    cache = sampling.rows * length * _cache_bytes(target)
    training = 16 * small + 4 * rows * (5 * LOSS_VOCABULARY + 60 * target.hidden_size)
    return Plan(
        tokens=job.tokens,
        steps=recipe.steps,
        memory=int(
            _bytes(target.model)
            + max(cache + sampling.rows * length * taps * target.hidden_size * 2, training)
        ),
        memory_there=_memory(),
        disk=int(states + 30 * small),
        disk_there=shutil.disk_usage(_existing(out)).free,
        generate_seconds=tokens * weights / speed,
        fit_seconds=recipe.steps * per_step / speed,
    )


def tokens_for(hours: float, job: Job, estimate: Plan) -> int:
    """How many tokens a job of `hours` can have, from the estimate of one with another number."""
    seconds_per_token = (estimate.generate_seconds + estimate.fit_seconds) / job.tokens
    return max(int(hours * 3600 / seconds_per_token), 1000)


def _multiply_speed() -> float:
    a = mx.random.normal((512, 1024))
    mx.eval(a @ a.T)
    started = time.perf_counter()
    mx.eval([(a + i) @ a.T for i in range(4)])
    return 4 * 512 * 512 * 1024 / (time.perf_counter() - started)


def _cache_bytes(target: Target) -> int:
    """Bytes of cache for one token of one row."""
    caches = target.make_cache()
    mx.eval(target.model(mx.zeros((1, 1), dtype=mx.int32), cache=caches))
    return sum(array.nbytes for array in arrays(caches))


def _multiplications(model: nn.Module) -> int:
    """Of one token: one for each weight. Mixtures of experts need fewer."""
    packed = [m for m in model.modules() if isinstance(m, nn.QuantizedLinear | nn.QuantizedEmbedding)]
    return sum(v.size for v in _values(model)) + sum(m.weight.size * (32 // m.bits - 1) for m in packed)


def _bytes(model: nn.Module) -> int:
    return sum(value.nbytes for value in _values(model))


def _values(model: nn.Module) -> list[mx.array]:
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]  # a list here
    return [value for _, value in flat]


def _memory() -> int:
    """What this machine has; on a Mac, what MLX says the GPU may use."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    return int(limit) if limit else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _existing(path: Path) -> Path:
    """The nearest folder above that is there."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.0f} min"
