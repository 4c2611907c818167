"""A target's embedding has the scale with which it enters the first layer."""

from typing import Any

import mlx.core as mx
import pytest
from tiny import EXACT, tiny_model

from dflash_mlx.target import Target
from dflash_mlx.target.attach import Mixin, attach

TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
NORMED = {"muse_glimmer"}


def first_layer_input(model: Any) -> mx.array:
    seen: list[mx.array] = []
    undo = attach(model.layers[0], Seeing, _seen=seen)
    model(TOKENS)
    undo()
    return seen[0]


class Seeing(Mixin):
    _seen: list[mx.array]

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        self._seen.append(x)
        return super().__call__(x, *args, **kwargs)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("family", sorted(EXACT.keys() - NORMED))
def test_it_is_what_the_first_layer_receives(family: str, dtype: mx.Dtype) -> None:
    model = tiny_model(family)
    model.set_dtype(dtype)
    target = Target(model)
    assert mx.array_equal(target.embed(TOKENS), first_layer_input(model))
    assert target._embedding_scale == (8 if family.startswith("gemma") else 1)


@pytest.mark.parametrize("width", [96, 160])
def test_a_scale_that_is_no_power_of_two_is_rounded_as_the_target_rounds_it(width: int) -> None:
    for family in ("gemma3", "gemma4"):
        model = tiny_model(family, hidden_size=width)
        model.set_dtype(mx.bfloat16)
        assert mx.array_equal(Target(model).embed(TOKENS), first_layer_input(model))


def test_a_norm_behind_the_embedding_is_no_scale() -> None:
    model = tiny_model("muse_glimmer")
    embedded = Target(model).embed(TOKENS)
    assert mx.array_equal(embedded, model.model.embed_tokens(TOKENS))
    assert mx.array_equal(mx.fast.rms_norm(embedded, None, 1e-6), first_layer_input(model))


def test_measuring_leaves_no_trace() -> None:
    model = tiny_model("gemma3")
    classes = [type(m) for m in model.modules()]
    Target(model)
    assert [type(m) for m in model.modules()] == classes
    assert not any("_rows" in vars(m) for m in model.modules())
