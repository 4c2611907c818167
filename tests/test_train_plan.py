"""What a training is said to need, before it starts."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from packed import ARGUMENTS
from train_tiny import DRAFTER, make_target

from dflash_mlx.config import DrafterConfig
from dflash_mlx.drafter.model import DrafterModel
from dflash_mlx.errors import OutOfMemoryError, UsageError
from dflash_mlx.target import Target
from dflash_mlx.train import plan as plan_module
from dflash_mlx.train.fit import FitRecipe
from dflash_mlx.train.initial import drafter_config
from dflash_mlx.train.job import Job
from dflash_mlx.train.plan import Plan, plan, tokens_for

PROMPTS = (40, 50, 90)  # tokens, 60 on the average
JOB = Job("x", tokens=10_000, layers=1, block_size=4, rank=4)
FITS = Plan(1000, 10, 100, 200, 100, 200, 3600.0, 1800.0)


def test_a_step_is_counted_by_the_rows_that_each_layer_sees() -> None:
    """Fractions of the whole tell the layers apart: no two see the same rows of the same size."""
    recipe = FitRecipe(rows=2, anchors=3)
    model = DrafterModel(replace(DRAFTER, conv_kernel_size=0))
    context = 2 * (60 + plan_module.RESPONSE_TOKENS)
    block_rows, slots = 2 * 3 * 4, 2 * 3 * 3
    hidden, inner, keys = 32, 48, 2 * 8
    fc = context * 2 * hidden * hidden
    q_and_o = block_rows * 2 * hidden * hidden
    k_and_v = (context + block_rows) * 2 * hidden * keys
    mlp = block_rows * 3 * hidden * inner
    projection = block_rows * hidden * 4
    head, edges = slots * 64 * hidden, slots * 64 * 4
    expected = 3 * (fc + q_and_o + k_and_v + mlp + projection + head + edges) + head
    assert plan_module._step_multiplications(model, recipe, 60.0) == expected


def test_the_plan_grows_with_the_tokens() -> None:
    target = make_target()
    raw = drafter_config(JOB, target, {}, 1)
    small, large = (
        plan(replace(JOB, tokens=tokens), target, DrafterConfig.from_dict(raw), PROMPTS, Path("/nowhere/yet"))
        for tokens in (10_000, 100_000)
    )
    assert small.steps * 10 == pytest.approx(large.steps, rel=0.01)
    states = 90_000 * 1.6 * (len(raw["dflash_config"]["target_layer_ids"]) + 1) * 32 * 2
    assert large.disk - small.disk == pytest.approx(states, rel=0.01)
    assert large.memory == small.memory > 0
    assert large.generate_seconds > 2 * small.generate_seconds  # ten times, but for what the machine does
    assert large.fit_seconds > 2 * small.fit_seconds
    small.check()


def test_the_plan_counts_the_tokens_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disk and time by their mean, memory by the longest."""
    monkeypatch.setattr(plan_module, "_multiply_speed", lambda: 1e9)
    target = make_target()
    config = DrafterConfig.from_dict(drafter_config(JOB, target, {}, 1))
    even, uneven, long = (
        plan(JOB, target, config, prompts, Path()) for prompts in ((5000, 5000), (1000, 9000), (8000, 12000))
    )
    state = (len(config.target_layer_ids) + 1) * 32 * 2
    assert uneven.disk == even.disk
    assert long.disk - even.disk == pytest.approx(JOB.tokens / 100 * 5000 * state, rel=0.01)
    assert even.memory < uneven.memory < long.memory
    assert long.memory - uneven.memory >= 64 * 3000 * state
    assert uneven.generate_seconds == even.generate_seconds
    assert long.generate_seconds / even.generate_seconds == pytest.approx(10_100 / 5_100)
    assert uneven.fit_seconds == even.fit_seconds < long.fit_seconds


def test_of_the_target_nothing_is_evaluated() -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32000}
    config = {**ARGUMENTS, **sizes, "num_attention_heads": 32, "head_dim": 64}
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    target = Target(llama.Model(llama.ModelArgs.from_dict(config)))
    drafter = DrafterConfig.from_dict(drafter_config(JOB, target, config, 1))
    planned = plan(JOB, target, drafter, PROMPTS, Path())
    assert planned.memory > 4_000_000_000
    assert mx.get_peak_memory() - before < 20_000_000


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    FITS.check()
    with pytest.raises(UsageError, match=r"would write 3.0 GB, and 2.0 GB are free: ask for fewer --tokens"):
        replace(FITS, disk=3 * 10**9, disk_there=2 * 10**9).check()
    with pytest.raises(OutOfMemoryError, match=r"would need 3.0 GB of memory, and 2.0 GB are available"):
        replace(FITS, memory=3 * 10**9, memory_there=2 * 10**9).check()


def test_hours_become_tokens() -> None:
    assert tokens_for(3.0, replace(JOB, tokens=1000), FITS) == pytest.approx(2000, abs=1)
    assert tokens_for(0.0001, replace(JOB, tokens=1000), FITS) == 1000
    assert "about 60 min" in str(FITS)
