"""Layers that read the same rows are one product, and their bits are those of each alone."""

from pathlib import Path

import mlx.core as mx
import pretend
import pytest
from tiny import tiny_model

from dflash_mlx.kernels import Choice, Route
from dflash_mlx.target import Target
from dflash_mlx.target.stacked import Product, Stack, siblings


def test_a_part_has_the_bits_of_its_layer_and_its_weights(tmp_path: Path) -> None:
    kernels = pretend.kernels(tmp_path, pretend.Maker())
    attention = tiny_model("qwen3", bits=8, hidden_size=96).layers[0].self_attn
    [modules] = siblings(attention)
    assert [module.weight.shape[0] for module in modules] == [128, 64, 64]
    x, choice = mx.random.normal((1, 5, 96)), Choice(Route.BLOCK)
    alone = [Product(kernels, choice, module)(x) for module in modules]
    weights = [mx.array(module.weight) for module in modules]
    stack = Stack(kernels, choice, modules)
    for index, (module, weight, product) in enumerate(zip(modules, weights, alone, strict=True)):
        assert mx.array_equal(stack.part(index, x), product)
        assert mx.array_equal(module.weight, weight)


def test_other_rows_are_computed_anew_and_nothing_is_kept(tmp_path: Path) -> None:
    kernels = pretend.kernels(tmp_path, pretend.Maker())
    [modules] = siblings(tiny_model("qwen3", bits=8, hidden_size=96).layers[0].mlp)
    choice = Choice(Route.BLOCK)
    stack = Stack(kernels, choice, modules)
    x, y = mx.random.normal((1, 3, 96)), mx.random.normal((1, 3, 96))
    first = stack.part(0, x)
    assert not mx.array_equal(stack.part(0, y), first)
    assert mx.array_equal(stack.part(1, x), Product(kernels, choice, modules[1])(x))
    stack.part(0, x)
    assert stack._rows is None
    assert stack._product is None


@pytest.mark.parametrize("fast", [False, True])
def test_a_pass_launches_once_for_layers_of_the_same_rows(tmp_path: Path, fast: bool) -> None:
    maker = pretend.Maker()
    model = tiny_model("qwen3", bits=8, hidden_size=96, head_dim=64)
    model.set_dtype(mx.bfloat16 if fast else mx.float32)
    target = Target(model, 4096, pretend.kernels(tmp_path, maker, fast=fast))
    target.attach([0])
    maker.calls.clear()
    target.verify(mx.arange(5), target.make_cache())
    target.commit(5, 5)
    # q|k|v, o, gate|up and down of four layers, and the head.
    assert maker.calls == {("dflash_qmm_block" if fast else "dflash_qmv_block", 5): 4 * 4 + 1}
