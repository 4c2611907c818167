"""The embedded pair's verify pass, every quantized layer by the kernel's own text: bits of one row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx import nn

from dflash_mlx import SamplingParams, Session, load
from dflash_mlx.kernels import Choice, Device, Kernels, Matrix, Route
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.target import Target
from dflash_mlx.target.attach import Mixin, attach
from dflash_mlx.target.linears import Linears
from dflash_mlx.target.stacked import matrix_of
from metal.emulator import Emulator

PARAMS = SamplingParams(max_tokens=10)
EXACTLY = Choice(Route.BLOCK)


class OneRow(Mixin):
    """Mixin of a quantized layer: a lone row goes through the kernel too, in place of MLX's GPU."""

    _linears: Linears

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) if x.shape[:-1] != (1, 1) else self._one(x)

    def as_linear(self, x: mx.array) -> mx.array:
        return super().as_linear(x) if x.shape[:-1] != (1, 1) else self._one(x)

    def _one(self, x: mx.array) -> mx.array:
        return self._linears.kernels.product(EXACTLY, x[0], matrix_of(cast(nn.Module, self)))[None]


@pytest.fixture(scope="module")
def emulated(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """The pair on a pretended M3 Max; its self-test compares the kernel with itself alone."""
    here = load(EMBEDDED.target)
    assert here.drafter is not None
    folder: Path = tmp_path_factory.mktemp("verdicts")
    device = Device(True, "applegpu_g15s", "emulated", "0.32.4")

    def one_row(x: mx.array, *layer: Any) -> mx.array:
        return Kernels(device, make=emulator.metal_kernel).product(EXACTLY, x, Matrix(*layer))

    kernels = Kernels(device, make=emulator.metal_kernel, one_row=one_row, folder=folder)
    target = Target(here.target.model, here.target.context_length, kernels)
    here.close()
    session = Session(target, here.tokenizer, here.drafter, block_size=5)
    for module in target.model.modules():
        if any(kind in type(module).__name__ for kind in ("_BlockLinear", "_BlockHead")):
            attach(module, OneRow)
    return session


def test_the_kernels_are_what_runs(emulated: Session) -> None:
    table = emulated.target.linears.table
    assert sum(count for (_, choice), count in table.items() if choice.route is Route.BLOCK) > 10
    assert not [line for line in emulated.fallbacks if "self-test" in line]


def test_a_block_has_the_bits_of_one_token_at_a_time(emulated: Session, held_out: list[str]) -> None:
    target, ids = emulated.target, emulated.encode(held_out[0])[:14]
    caches = target.make_cache()
    target.forward(mx.array(ids[:9]), caches)
    alone = [target.forward(mx.array([token]), caches)[0] for token in ids[9:]]
    caches = target.make_cache()
    target.forward(mx.array(ids[:9]), caches)
    block, _ = target.verify(mx.array(ids[9:]), caches)
    target.commit(5, 5)
    assert mx.array_equal(block, mx.concatenate(alone))


def test_the_tokens_are_those_of_stock_ops(emulated: Session, held_out: list[str]) -> None:
    stock = load(EMBEDDED.target).generate(held_out[0], PARAMS, speculative=False)
    result = emulated.generate(held_out[0], PARAMS)
    assert result.tokens == stock.tokens
    assert sum(cycle.accepted for cycle in result.cycles) > 0
    assert sum(cycle.drafted - cycle.accepted for cycle in result.cycles) > 0
