"""What is attached to a target leaves its classes, parameters and numbers alone, and can be undone."""

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny import EXACT, FAMILIES, WINDOWED, tiny_model

from dflash_mlx.config import DrafterConfig, Rope
from dflash_mlx.errors import PairError
from dflash_mlx.target import Target


@pytest.mark.parametrize("family", EXACT)
def test_attach_changes_no_class_and_no_parameter_and_is_undone(family: str) -> None:
    model = tiny_model(family)
    classes = [type(m) for m in model.modules()]
    functions = [vars(cls).get("__call__") for cls in classes]
    parameters: Any = tree_flatten(model.parameters())
    x = mx.array([[1, 2, 3]])
    before = model(x)

    target = Target(model)
    target.attach([0, 1])
    assert [type(m) for m in model.modules()] != classes
    assert all(isinstance(m, cls) for m, cls in zip(model.modules(), classes, strict=True))
    assert [vars(cls).get("__call__") for cls in classes] == functions
    after: Any = tree_flatten(model.parameters())
    assert [(k, id(v)) for k, v in after] == [(k, id(v)) for k, v in parameters]
    assert mx.array_equal(model(x), before)

    target.detach()
    assert [type(m) for m in model.modules()] == classes
    assert not any(name.startswith("_tape") or name == "_taps" for m in model.modules() for name in vars(m))


def test_taps_are_the_outputs_of_the_named_layers_in_the_named_order() -> None:
    target = Target(tiny_model("qwen3"))
    target.attach([2, 0])
    _, taps = target.forward(mx.array([5, 6, 7]), target.make_cache())
    model = target.model
    target.detach()
    h = model.model.embed_tokens(mx.array([[5, 6, 7]]))
    outputs = []
    for layer in model.layers:
        h = layer(h, "causal", None)
        outputs.append(h)
    assert taps is not None
    assert mx.array_equal(taps, mx.concatenate([outputs[2], outputs[0]], axis=-1))


def test_taps_do_not_outlive_a_pass() -> None:
    target = Target(tiny_model("qwen3_5"))
    target.attach([0, 1, 2])
    target.forward(mx.array([1, 2]), target.make_cache())
    assert target._taps is not None
    assert target._taps._outputs == {}
    target.verify(mx.array([1, 2]), target.make_cache())
    target.commit(1, 2)
    assert all(tape.outputs == {} and tape.call is None for tape in target._tapes)


def test_two_targets_of_one_family_do_not_disturb_each_other() -> None:
    first, second = Target(tiny_model("qwen3_5", seed=1)), Target(tiny_model("qwen3_5", seed=2))
    first.attach([0])
    alone, _ = first.forward(mx.array([1, 2, 3]), first.make_cache())
    second.attach([1, 3])
    caches, others = first.make_cache(), second.make_cache()
    first.forward(mx.array([1, 2, 3]), caches)
    first.verify(mx.array([4, 5, 6]), caches)
    second.verify(mx.array([7, 8, 9]), others)
    second.commit(1, 3)
    first.commit(2, 3)
    second.detach()
    again, taps = first.forward(mx.array([1, 2, 3]), first.make_cache())
    assert mx.array_equal(alone, again)
    assert taps is not None


def fitting(**changes: object) -> DrafterConfig:
    fields: dict[str, object] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 128,
        "block_size": 4,
        "mask_token_id": 1,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "rope": Rope(1e4),
        "layer_types": ("full_attention",),
        "is_causal": (False,),
    }
    return DrafterConfig(**{**fields, **changes})  # type: ignore[arg-type]  # one table for every field


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_a_drafter_for_another_target_is_refused_with_both_numbers(family: str, bits: int | None) -> None:
    target = Target(tiny_model(family, bits=bits))
    target.check_fit(fitting())
    with pytest.raises(PairError, match="hidden size 32, this target has 64"):
        target.check_fit(fitting(hidden_size=32))
    with pytest.raises(PairError, match="layer count 64, this target has 4"):
        target.check_fit(fitting(num_target_layers=64))
    with pytest.raises(PairError, match="vocabulary 151936, this target has 128"):
        target.check_fit(fitting(vocab_size=151936))
    with pytest.raises(PairError, match="blocks of 64 rows, at most 32 can be rolled back"):
        target.check_fit(fitting(block_size=64))
