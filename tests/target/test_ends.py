"""A target's embedding, final norm and head are found by what they do, whatever they are called."""

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.tuner.lora import LoRALinear
from tiny import VOCAB, tiny_model
from zoo import zoo_model

from dflash_mlx.errors import OutOfMemoryError, UnsupportedTargetError
from dflash_mlx.target import Target
from dflash_mlx.target.attach import Mixin, attach
from dflash_mlx.target.ends import find_ends


def at(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = model[name]
    return model


@pytest.mark.parametrize(
    ("name", "embedding", "norm", "head"),
    [
        ("llama", "model.embed_tokens", "model.norm", "lm_head"),
        ("qwen3_5_moe", "language_model.model.embed_tokens", "language_model.model.norm", None),
        ("bailing_moe", "model.word_embeddings", "model.norm", "lm_head"),
        ("internlm2", "model.tok_embeddings", "model.norm", "output"),
        ("gpt2", "model.wte", "model.ln_f", None),
        ("mamba2", "backbone.embeddings", "backbone.norm_f", "lm_head"),
    ],
)
@pytest.mark.parametrize("bits", [None, 4])
def test_ends_are_found(name: str, embedding: str, norm: str, head: str | None, bits: int | None) -> None:
    model: Any = zoo_model(name, bits=bits)
    tied = head is None and "lm_head" not in at(model, embedding.partition(".")[0])
    classes = [type(m) for m in model.modules()]
    ends = find_ends(model)
    assert [type(m) for m in model.modules()] == classes
    assert ends.embedding is at(model, embedding)
    assert ends.norm is at(model, norm)
    rows = mx.random.normal((1, 3, 64))
    module = at(model, embedding).as_linear if tied else at(model, head or "language_model.lm_head")
    assert ends.head is not None
    assert mx.array_equal(ends.head(rows), module(rows))
    assert ends.vocab_size == 128


def test_the_head_is_the_module_as_it_is_when_called() -> None:
    """Kernels and adapters may be attached to it later."""
    target = Target(tiny_model("qwen3"))
    rows = mx.random.normal((1, 2, 64))
    before = target.head(rows)
    undo = attach(target.model.model.embed_tokens, _Doubled)
    assert mx.array_equal(target.head(rows), 2 * before)
    undo()


class _Doubled(Mixin):
    def as_linear(self, x: mx.array) -> mx.array:
        out: mx.array = super().as_linear(x)
        return 2 * out


def test_the_head_has_its_adapter() -> None:
    model: Any = tiny_model("llama")
    model.lm_head = LoRALinear.from_base(model.lm_head, r=4)
    model.lm_head.lora_b = mx.random.normal(model.lm_head.lora_b.shape)
    rows = mx.random.normal((1, 2, 64))
    assert mx.array_equal(Target(model).head(rows), model.lm_head(rows))


def test_what_was_found_keeps_no_weight_alive() -> None:
    """Weights may be cast after the probe, as on the CPU."""
    gc.collect()  # what earlier tests left
    before = mx.get_active_memory()
    model = tiny_model("llama")
    target = Target(model)
    held = mx.get_active_memory() - before
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    mx.clear_cache()
    assert target.vocab_size == VOCAB
    assert mx.get_active_memory() - before < 0.6 * held


def test_a_target_without_a_head_of_its_own_decodes_plainly_and_takes_no_drafter() -> None:
    model: Any = tiny_model("llama", vocab_size=131)  # a width that nothing else has
    weight = model.lm_head.weight
    model.lm_head = lambda x: x @ weight.T
    target = Target(model)
    logits, _ = target.forward(mx.array([1, 2]), target.make_cache())
    assert logits.shape == (2, target.vocab_size)
    with pytest.raises(UnsupportedTargetError, match=r"a head that makes logits.*'none'"):
        target.attach([0])


def test_a_family_that_the_probes_do_not_understand_is_refused_and_left_as_it_was() -> None:
    model = tiny_model("llama")
    failures = {
        IndexError("no such rows"): (
            UnsupportedTargetError,
            "prepared for a drafter: no such rows",
        ),
        RuntimeError("[metal::malloc] Unable to allocate"): (OutOfMemoryError, "out of memory"),
    }
    for failure, (kind, message) in failures.items():
        undo = attach(model.layers[0].self_attn, _Surprising, _failure=failure)
        target = Target(model)
        classes = [type(m) for m in model.modules()]
        with pytest.raises(kind, match=message):
            target.attach([0, 2])
        assert [type(m) for m in model.modules()] == classes
        undo()


class _Surprising(Mixin):
    _failure: Exception

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        if x.shape[1] == 1:
            raise self._failure
        return super().__call__(x, *args, **kwargs)


def test_quantized_experts_are_quantization() -> None:
    model = tiny_model("gpt_oss")
    assert not Target(model).quantized
    nn.quantize(
        model, 32, 4, class_predicate=lambda name, m: "experts" in name and hasattr(m, "to_quantized")
    )
    assert not any(isinstance(m, nn.QuantizedLinear) for m in model.modules())
    assert Target(model).quantized
