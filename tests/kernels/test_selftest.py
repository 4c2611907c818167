"""A kernel with a wrong bit, or one that does not compile, is found out, replaced, and talked about."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pretend
import pytest

from dflash_mlx import SamplingParams, Session, load
from dflash_mlx.generate import statistics
from dflash_mlx.kernels import Layer, Route
from dflash_mlx.kernels.choice import Tile
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.target import Target
from dflash_mlx.target.stacked import siblings

LAYER = Layer(K=1024, N=64, dtype=mx.float32, bits=4, group_size=64)
PARAMS = SamplingParams(max_tokens=24)
LOG = "program_source:12:3: error: use of undeclared identifier 'simd_sum'"


def test_a_right_kernel_passes_once_and_is_remembered(tmp_path: Path) -> None:
    maker = pretend.Maker()
    assert pretend.kernels(tmp_path, maker).choose(LAYER).route is Route.BLOCK
    assert maker.calls == {("dflash_qmv_block", rows): 1 for rows in range(2, 9)}
    assert pretend.kernels(tmp_path, maker).choose(LAYER).route is Route.BLOCK
    assert sum(maker.calls.values()) == 7


@pytest.mark.parametrize("change", [{"architecture": "applegpu_g16s"}, {"mlx": "0.32.5"}])
def test_another_chip_or_mlx_is_tried_again(tmp_path: Path, change: dict[str, Any]) -> None:
    maker = pretend.Maker()
    pretend.kernels(tmp_path, maker).choose(LAYER)
    pretend.kernels(tmp_path, maker, **change).choose(LAYER)
    assert sum(maker.calls.values()) == 14


def test_a_wrong_bit_is_found(tmp_path: Path) -> None:
    choice = pretend.kernels(tmp_path, pretend.Maker(error=2**-20)).choose(LAYER)
    assert choice.route is Route.ROWS
    assert (
        "failed its self-test: qmv_block, 4 bits, groups of 64, float32, aligned: with 2 rows"
        in choice.reason
    )


def test_what_the_compiler_says_is_kept(tmp_path: Path) -> None:
    kernels = pretend.kernels(tmp_path, pretend.Maker(problem=f"Unable to build\n{LOG}\n1 error"))
    assert kernels.choose(LAYER).route is Route.ROWS
    assert LOG in kernels.verdict(LAYER).detail


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Layer(1024, 64, mx.bfloat16), "not quantized"),
        (Layer(1024, 64, mx.uint8, 4, 32, "mxfp4"), "mxfp4"),
        (Layer(1024, 64, mx.bfloat16, 3, 64), "3 bits"),
        (Layer(128, 64, mx.bfloat16, 4, 64), "a kernel of its own"),
    ],
)
def test_formats_without_a_kernel_run_row_by_row(tmp_path: Path, layer: Layer, reason: str) -> None:
    choice = pretend.kernels(tmp_path, pretend.Maker()).choose(layer)
    assert choice.route is Route.ROWS
    assert reason in choice.reason


def test_an_unknown_gpu_runs_row_by_row(tmp_path: Path) -> None:
    maker = pretend.Maker()
    choice = pretend.kernels(tmp_path, maker, architecture="applegpu_g19s").choose(LAYER)
    assert choice.route is Route.ROWS
    assert "unknown GPU applegpu_g19s" in choice.reason
    assert not maker.calls


def test_the_common_formats_are_tried_again(tmp_path: Path) -> None:
    """And one that fails is told apart from those that pass."""

    class HalfBroken(pretend.Maker):
        def __call__(self, *, name: str, **rest: object) -> object:
            good, bad = super().__call__(name=name), pretend.Maker(problem=LOG)(name=name)

            def run(*, template: list[tuple[str, object]], **arguments: object) -> object:
                return (bad if ("BITS", 8) in template else good)(template=template, **arguments)

            return run

    maker = pretend.Maker()
    first = pretend.kernels(tmp_path, maker).selftest.common()
    assert len(first) == 11
    assert all(verdict.ok for verdict in first.values())
    again = pretend.kernels(tmp_path, HalfBroken()).selftest.common()
    assert {name for name, verdict in again.items() if not verdict.ok} == {n for n in first if "8 bits" in n}
    assert all(LOG in verdict.detail for verdict in again.values() if not verdict.ok)


HALF = Layer(K=512, N=64, dtype=mx.bfloat16, bits=4, group_size=64)


@pytest.mark.parametrize(
    ("architecture", "operands"), [("applegpu_g15s", mx.bfloat16), ("applegpu_g13g", mx.float32)]
)
def test_fast_numerics_take_the_tile(tmp_path: Path, architecture: str, operands: mx.Dtype) -> None:
    choice = pretend.kernels(tmp_path, pretend.Maker(), architecture=architecture, fast=True).choose(HALF)
    assert (choice.route, choice.reason) == (Route.TILE, "")
    assert choice.tile == Tile(operands, has_few=True)


def test_fast_numerics_leave_other_layers_exact(tmp_path: Path) -> None:
    kernels = pretend.kernels(tmp_path, pretend.Maker(), fast=True)
    choice = kernels.choose(LAYER)
    assert choice.route is Route.BLOCK
    assert "no tile: type" in choice.reason
    assert pretend.kernels(tmp_path, pretend.Maker()).choose(HALF).route is Route.BLOCK


def test_a_tile_that_does_not_compile_is_tried_with_float_matrices_and_then_left(tmp_path: Path) -> None:
    class NoBfloatMatrix(pretend.Maker):
        def __call__(self, *, name: str, **rest: object) -> object:
            good, bad = super().__call__(name=name), pretend.Maker(problem=LOG)(name=name)

            def run(*, template: list[tuple[str, object]], **arguments: object) -> object:
                return (bad if ("O", mx.bfloat16) in template else good)(template=template, **arguments)

            return run

    choice = pretend.kernels(tmp_path / "a", NoBfloatMatrix(), fast=True).choose(HALF)
    assert choice.tile == Tile(mx.float32, has_few=True)
    wrong = pretend.kernels(tmp_path / "b", pretend.Maker(error=1.0), fast=True).choose(HALF)
    assert wrong.route is Route.ROWS  # the other kernel is wrong as well
    broken = pretend.kernels(tmp_path / "c", pretend.Maker(problem=LOG), fast=True)
    assert "failed its self-test" in broken.choose(HALF).reason


def test_a_twin_that_differs_from_the_tile_is_not_used(tmp_path: Path) -> None:
    class OtherOrder(pretend.Maker):
        def __call__(self, *, name: str, **rest: object) -> object:
            return pretend.Maker(error=1e-3)(name=name) if "few" in name else super().__call__(name=name)

    choice = pretend.kernels(tmp_path, OtherOrder(), fast=True).choose(HALF)
    assert choice.tile == Tile(mx.bfloat16, has_few=False)


def session(folder: Path, maker: pretend.Maker) -> Session:
    """The embedded pair as a Mac would load it."""
    here = load(EMBEDDED.target)
    assert here.drafter is not None
    target = Target(here.target.model, here.target.context_length, pretend.kernels(folder, maker))
    here.close()
    return Session(target, here.tokenizer, here.drafter, block_size=5)


def test_the_pair_gives_the_same_tokens_with_and_without_its_kernels(
    tmp_path: Path, held_out: list[str]
) -> None:
    maker, broken = pretend.Maker(), pretend.Maker(problem=LOG)
    good, bad = session(tmp_path / "good", maker), session(tmp_path / "bad", broken)
    stock = load(EMBEDDED.target).generate(held_out[0], PARAMS, speculative=False)
    maker.calls.clear()
    results = [s.generate(held_out[0], PARAMS) for s in (good, bad)]
    for result in results:
        assert result.tokens == stock.tokens
        assert sum(c.accepted for c in result.cycles) > 0
        assert sum(c.drafted - c.accepted for c in result.cycles) > 0
    assert good.exactness == bad.exactness == "exact"

    cycles = sum(c.drafted > 0 for c in results[0].cycles)
    assert sum(count for (name, _), count in maker.calls.items() if name == "dflash_selector_walk") == cycles
    layers = sum(n for (_, choice), n in good.target.linears.table.items() if choice.route is Route.BLOCK)
    together = sum(len(group) - 1 for m in good.target.model.modules() for group in siblings(m))
    assert layers - together > 10
    launches = sum(n for (name, _), n in maker.calls.items() if name == "dflash_qmv_block")
    assert launches == (layers - together) * cycles
    assert not any("self-test" in line for line in good.fallbacks)

    assert results[1].fallbacks == bad.fallbacks
    assert any(LOG in line and "linear layers" in line for line in bad.fallbacks)
    assert any(LOG in line and "candidate walk" in line for line in bad.fallbacks)
    assert LOG in statistics(results[1], bad.exactness)
    plain = bad.generate(held_out[0], PARAMS, speculative=False)
    assert plain.fallbacks == ()
