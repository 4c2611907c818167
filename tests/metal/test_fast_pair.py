"""The embedded pair in fast numerics, by the kernels' own text: speculation is invisible there too."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx import SamplingParams, Session, load
from dflash_mlx.kernels import Device, Kernels, Route
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.target import Target
from metal.emulator import Emulator


@pytest.fixture(scope="module", params=["with qmm_few", "by the tile alone"])
def session(
    request: pytest.FixtureRequest, emulator: Emulator, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Session:
    """The pair in bfloat16, on a pretended M3 Max whose matrix unit adds as qmm_few does, or does not."""
    if request.param != "with qmm_few":
        emulator = Emulator(cache / "emulated", "descending")
    here = load(EMBEDDED.target)
    assert here.drafter is not None
    here.target.model.set_dtype(mx.bfloat16)
    device = Device(True, "applegpu_g15s", "emulated", "0.32.4")
    folder: Path = tmp_path_factory.mktemp("verdicts")
    kernels = Kernels(device, fast=True, make=emulator.metal_kernel, folder=folder, outputs=40)
    target = Target(here.target.model, here.target.context_length, kernels)
    here.close()
    session = Session(target, here.tokenizer, here.drafter, block_size=5)
    [choice] = {choice for _, choice in target.linears.table if choice.route is Route.TILE}
    assert choice.tile is not None
    assert choice.tile.has_few == (request.param == "with qmm_few")
    return session


@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_tokens=10), SamplingParams(max_tokens=10, temperature=0.8, seed=3)],
    ids=["greedy", "sampled"],
)
def test_on_equals_off(session: Session, held_out: list[str], params: SamplingParams) -> None:
    plain = session.generate(held_out[0], params, speculative=False)
    result = session.generate(held_out[0], params)
    assert result.tokens == plain.tokens
    assert sum(cycle.accepted for cycle in result.cycles) > 0
    assert sum(cycle.drafted - cycle.accepted for cycle in result.cycles) > 0
