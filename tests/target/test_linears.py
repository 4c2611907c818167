"""Families on a GPU that is not there: a block's rows keep their bits, whatever way the layers take."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pretend
import pytest
from tiny import EXACT, FAMILIES, VOCAB, WINDOW, WINDOWED, tiny_model

from dflash_mlx.kernels import Route
from dflash_mlx.target import Target
from dflash_mlx.target.attach import Mixin, attach
from dflash_mlx.target.call import Call
from dflash_mlx.target.exactness import measure_exactness
from dflash_mlx.target.rowwise import Parts
from dflash_mlx.target.window import WindowCache

LAYER_IDS = (0, 2)


def target_on(folder: Path, maker: pretend.Maker, family: str, bits: int | None, **changes: Any) -> Target:
    kernels = pretend.kernels(folder, maker)
    target = Target(tiny_model(family, bits=bits, **changes), 4096, kernels)
    target.attach(LAYER_IDS)
    return target


class CountNoise(Mixin):
    """Mixin of a linear layer: as on a GPU, several rows get other bits than one."""

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = super().__call__(x)
        return out if x.ndim < 3 or x.shape[1] == 1 else out * 1.25


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("family", EXACT)
def test_a_block_never_meets_the_stock_op_of_several_rows(
    tmp_path: Path, family: str, bits: int | None
) -> None:
    model = tiny_model(family, bits=bits, hidden_size=96)  # with 64 inputs there is no kernel
    maker = pretend.Maker()
    target = Target(model, 4096, pretend.kernels(tmp_path, maker))
    for module in [m for m in model.modules() if type(m).__name__ in ("Linear", "QuantizedLinear")]:
        attach(module, CountNoise)
    target.attach(LAYER_IDS)
    # The prompt of the measurement has the same rows both times; only blocks may differ.
    assert measure_exactness(target, [2, 3, 8, 9], LAYER_IDS) == "exact"
    assert Route.STOCK not in {choice.route for _, choice in target.linears.table}
    assert maker.calls or bits is None


def test_prompts_and_plain_steps_are_mlx_lms_own(tmp_path: Path) -> None:
    maker = pretend.Maker()
    target = target_on(tmp_path, maker, "qwen3", 8, hidden_size=96)
    maker.calls.clear()
    caches = target.make_cache()
    target.forward(mx.array([1, 2, 3]), caches)
    target.forward(mx.array([4]), caches)
    assert not maker.calls
    target.verify(mx.array([5, 6, 7]), caches)
    target.commit(3, 3)
    assert set(maker.calls) == {("dflash_qmv_block", 3)}
    maker.calls.clear()
    target.verify(mx.array([5]), caches)
    target.commit(1, 1)
    assert not maker.calls


def test_more_rows_than_the_kernel_takes_are_shared_out_evenly(tmp_path: Path) -> None:
    maker = pretend.Maker()
    target = target_on(tmp_path, maker, "qwen3", 8, hidden_size=96)
    maker.calls.clear()
    target.verify(mx.arange(13), target.make_cache())
    target.commit(13, 13)
    assert {rows for _, rows in maker.calls} == {6, 7}


def test_detach_restores_every_class(tmp_path: Path) -> None:
    model = tiny_model("qwen3_5", bits=8)
    classes = [type(m) for m in model.modules()]
    target = Target(model, 4096, pretend.kernels(tmp_path, pretend.Maker()))
    target.attach(LAYER_IDS)
    assert [type(m) for m in model.modules()] != classes
    target.detach()
    assert [type(m) for m in model.modules()] == classes


def test_experts_are_never_sorted_in_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm sorts 64 chosen experts and more, which one row never has."""
    from mlx_lm.models import switch_layers

    sorted_sizes = []
    stock = switch_layers._gather_sort

    def spy(x: mx.array, indices: mx.array) -> Any:
        sorted_sizes.append(indices.size)
        return stock(x, indices)

    monkeypatch.setattr(switch_layers, "_gather_sort", spy)
    target = target_on(tmp_path, pretend.Maker(), "qwen3_moe", 8, num_experts_per_tok=8)
    target.verify(mx.arange(16), target.make_cache())
    target.commit(16, 16)
    assert sorted_sizes == []
    target.forward(mx.arange(16), target.make_cache())
    assert set(sorted_sizes) == {128}


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_attention_in_parts_has_the_bits_of_single_rows(tmp_path: Path, family: str) -> None:
    """Heads of 64, and many for each key head: blocks of 8 rows must be cut, also where keys are shared."""
    shape = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 1}
    target = target_on(tmp_path, pretend.Maker(), family, None, **shape)
    sizes: list[list[int]] = []
    for rows in target._row_wise:
        rows.parts = recorded(rows.parts, sizes)
    assert measure_exactness(target, [2, 5, 8], LAYER_IDS) == "exact"
    assert [4, 4] in sizes


@pytest.mark.parametrize("family", ["gemma4", "gemma3"])
def test_parts_on_both_sides_of_a_windows_step(tmp_path: Path, family: str) -> None:
    """The window's keys start later for a block's second part, and layers that share them must not notice."""
    shape = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 1}
    target = target_on(tmp_path, pretend.Maker(), family, None, **shape)
    prompt, rows = mx.arange(WindowCache.align + WINDOW - 3) % VOCAB, mx.array([3, 1, 4, 1, 5, 9, 2, 6])
    caches, cold = target.make_cache(), target.make_cache()
    target.forward(prompt, caches)
    target.forward(prompt, cold)
    block, _ = target.verify(rows, caches)
    target.commit(8, 8)
    assert mx.array_equal(block, mx.concatenate([target.forward(row[None], cold)[0] for row in rows]))


def recorded(parts: Parts, sizes: list[list[int]]) -> Parts:
    def record(call: Call) -> list[int]:
        sizes.append(parts(call))
        return sizes[-1]

    return record
