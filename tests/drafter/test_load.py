"""A checkpoint on disk becomes the network that was saved, or one line that says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from dflash_mlx.config import FULL, DrafterConfig
from dflash_mlx.drafter import Drafter, DrafterModel, load_drafter
from dflash_mlx.drafter.load import activation_dtype
from dflash_mlx.errors import CheckpointError, ConfigError, ModelError
from drafter.build import (
    Ends,
    Seen,
    Weights,
    config,
    network,
    propose,
    random_taps,
    random_weights,
    raw_config,
    save,
)

CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def draft(model: DrafterModel, taps: mx.array | None = None) -> Seen:
    drafter = Drafter(model)
    drafter.extend(random_taps(model.config, 9) if taps is None else taps)
    return propose(drafter, Ends(model.config), 3, 6)


def assert_drafts_alike(model: DrafterModel, other: DrafterModel) -> None:
    found, expected = draft(model), draft(other)
    np.testing.assert_array_equal(found.hidden, expected.hidden)
    assert found.tokens == expected.tokens


# --- what loads --------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_loads_both_spellings_of_the_codebooks(tmp_path: Path, suffix: str) -> None:
    weights = random_weights(config())
    renamed = {name + suffix if name in CODEBOOKS else name: t for name, t in weights.items()}
    assert_drafts_alike(load_drafter(save(tmp_path, raw_config(), renamed)), network(config(), weights))


def test_loads_the_first_generation(tmp_path: Path) -> None:
    weights = random_weights(config(1))
    assert_drafts_alike(load_drafter(save(tmp_path, raw_config(1), weights)), network(config(1), weights))


def test_loads_attention_biases(tmp_path: Path) -> None:
    ours = config(attention_bias=True)
    weights = random_weights(ours)
    assert sum(name.endswith(".bias") for name in weights) == 4 * ours.num_hidden_layers
    folder = save(tmp_path, raw_config(attention_bias=True), weights)
    assert_drafts_alike(load_drafter(folder), network(ours, weights))


def test_loads_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    weights = random_weights(config())
    names = sorted(weights)
    save(tmp_path, raw_config(), {name: weights[name] for name in names[:20]}, "model-1.safetensors")
    save(tmp_path, raw_config(), {name: weights[name] for name in names[20:]}, "model-2.safetensors")
    assert_drafts_alike(load_drafter(tmp_path), network(config(), weights))


@pytest.mark.parametrize("name", [".model.safetensors", "._model.safetensors"])
def test_hidden_files_are_none_of_it(tmp_path: Path, name: str) -> None:
    """Half a file of a save that was killed, and what macOS writes beside each file on some disks."""
    weights = random_weights(config())
    folder = save(tmp_path, raw_config(), weights)
    (folder / name).write_bytes(b"\x00" * 100)
    assert_drafts_alike(load_drafter(folder), network(config(), weights))


def test_has_the_tensors_of_the_public_files() -> None:
    """15 per layer and 6 more."""
    per_layer = {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"self_attn.{name}_norm.weight" for name in "qk"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *(f"{name}_conv.base_kernel" for name in ("attention", "mlp")),
        *(f"{name}_conv.kernel_projection.weight" for name in ("attention", "mlp")),
    }
    others = {
        *(f"{name}.weight" for name in ("fc", "hidden_norm", "norm")),
        "candidate_selector.hidden_projection.weight",
        *CODEBOOKS,
    }
    assert (len(per_layer), len(others)) == (15, 6)
    expected = {f"layers.{i}.{name}" for i in range(3) for name in per_layer} | others
    assert set(random_weights(config())) == expected
    second = {name for name in expected if "_conv." in name or "selector" in name}
    assert set(random_weights(config(1))) == expected - second


# --- what does not -----------------------------------------------------------------------------


def removed(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.pop(name)


def added(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: mx.zeros(4)})


def cut(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: weights[name][:-1]})


def transposed(weights: Weights) -> None:
    weights["fc.weight"] = weights["fc.weight"].T


MISMATCHES: dict[str, tuple[Callable[[Weights], object], tuple[str, ...]]] = {
    "missing": (
        removed("layers.1.self_attn.q_norm.weight"),
        ("layers.1.self_attn.q_norm.weight is missing",),
    ),
    "no codebook": (removed(CODEBOOKS[0]), (f"{CODEBOOKS[0]} is missing",)),
    "no norm": (removed("norm.weight"), ("norm.weight is missing",)),
    "extra": (added("layers.0.self_attn.sink"), ("layers.0.self_attn.sink", "not part of the network")),
    "one layer more": (added("layers.3.input_layernorm.weight"), ("layers.3.input_layernorm.weight",)),
    "unexpected bias": (added("layers.0.self_attn.q_proj.bias"), ("layers.0.self_attn.q_proj.bias",)),
    "transposed": (transposed, ("fc.weight", "[192, 64]", "[64, 192]")),
    "fewer tokens": (cut(CODEBOOKS[1]), (CODEBOOKS[1], "[159, 8]", "[160, 8]")),
    "fewer channels": (cut("hidden_norm.weight"), ("hidden_norm.weight", "[63]", "[64]")),
}


def assert_refused(folder: Path, error: type[ModelError], *parts: str, bits: int | None = None) -> None:
    with pytest.raises(error) as caught:
        load_drafter(folder, bits=bits)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("case", MISMATCHES)
def test_refuses_tensors_that_do_not_match(tmp_path: Path, case: str) -> None:
    change, parts = MISMATCHES[case]
    weights = random_weights(config())
    change(weights)
    folder = save(tmp_path / "my-drafter", raw_config(), weights)
    assert_refused(folder, CheckpointError, "my-drafter", *parts)


def test_counts_the_mismatches_that_it_does_not_name(tmp_path: Path) -> None:
    weights = {name: t for name, t in random_weights(config()).items() if "mlp" not in name}
    assert_refused(save(tmp_path, raw_config(), weights), CheckpointError, "and 12 more")


def test_refuses_ids_of_another_number_of_taps(tmp_path: Path) -> None:
    raw = raw_config(dflash={"target_layer_ids": [0, 2, 4, 6]})
    folder = save(tmp_path, raw, random_weights(config()))
    assert_refused(folder, CheckpointError, "fc.weight", "[64, 192]", "[64, 256]")


@pytest.mark.parametrize(
    "ids",
    [[3, 4, 160], [-1, 3, 4], [4, 3, 5], [3, 3, 4], [3, 4]],
    ids=["beyond", "below", "order", "twice", "few"],
)
def test_refuses_a_list_of_ids_that_a_head_cannot_have(tmp_path: Path, ids: list[int]) -> None:
    ours = {"draft_head_size": 3, "selector_top_k": 2}
    weights = random_weights(config()) | {"draft_head_ids": mx.array([3, 4, 159])}
    good = load_drafter(save(tmp_path / "good", raw_config(dflash=ours), weights))
    assert good.head_ids is not None
    assert good.head_ids.tolist() == [3, 4, 159]
    weights["draft_head_ids"] = mx.array(ids)
    with pytest.raises(CheckpointError, match=r"token ids|draft_head_ids") as caught:
        load_drafter(save(tmp_path / "bad", raw_config(dflash=ours), weights))
    assert "\n" not in str(caught.value)


def test_refuses_a_generation_that_the_tensors_are_not(tmp_path: Path) -> None:
    folder = save(tmp_path, raw_config(1), random_weights(config(2)))
    assert_refused(folder, CheckpointError, "candidate_selector", "not part of the network")


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
def test_refuses_a_truncated_file(tmp_path: Path, kept: float) -> None:
    file = save(tmp_path, raw_config(), random_weights(config())) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    assert_refused(tmp_path, CheckpointError, str(file), "download")


def test_refuses_a_folder_without_tensors(tmp_path: Path) -> None:
    file = save(tmp_path, raw_config(), random_weights(config())) / "model.safetensors"
    file.unlink()
    assert_refused(tmp_path, CheckpointError, str(tmp_path), "no .safetensors")


@pytest.mark.parametrize("text", ["", "{", '{"hidden_size": 64,}', "\x00\xff", "[1, 2]", '"DFlash"', "null"])
def test_refuses_a_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path, raw_config(), random_weights(config()))
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert_refused(folder, ConfigError, str(folder / "config.json"))


def test_refuses_a_folder_without_config(tmp_path: Path) -> None:
    (save(tmp_path, raw_config(), random_weights(config())) / "config.json").unlink()
    assert_refused(tmp_path, ConfigError, str(tmp_path / "config.json"))


@pytest.mark.parametrize(("file", "part"), [("mask_embedding.pt", "MiMo"), ("drafter-Q4_K_M.gguf", "GGUF")])
def test_refuses_foreign_formats_by_name(tmp_path: Path, file: str, part: str) -> None:
    folder = save(tmp_path / "other", raw_config(), random_weights(config()))
    (folder / file).write_bytes(b"")
    assert_refused(folder, ConfigError, "other", part, "safetensors")


# --- quantization ------------------------------------------------------------------------------


def quantized(model: DrafterModel, bits: int, group_size: int = 64) -> DrafterModel:
    nn.quantize(model, group_size, bits, class_predicate=lambda _, module: isinstance(module, nn.Linear))
    return model


def flat(model: DrafterModel) -> Weights:
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantizes_the_linear_layers_and_nothing_else(tmp_path: Path, bits: int) -> None:
    weights = random_weights(config())
    model = load_drafter(save(tmp_path, raw_config(), weights), bits=bits)
    assert_drafts_alike(model, quantized(network(config(), weights), bits))
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.QuantizedLinear)}
    assert len(linear) == 3 * 9 + 2
    for name, tensor in flat(model).items():
        if name.rpartition(".")[0] in linear:
            continue
        assert name.endswith(("norm.weight", "base_kernel", "codebook"))
        np.testing.assert_array_equal(tensor, weights[name])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (8, 64), (4, 32)])
def test_loads_a_quantized_checkpoint(tmp_path: Path, bits: int, group_size: int, dtype: mx.Dtype) -> None:
    """Whatever its scales are stored in, the result is what quantizing these weights here gives."""
    stored = network(config(), random_weights(config()))
    stored.set_dtype(dtype)
    quantized(stored, bits, group_size)
    entry = {"bits": bits, "group_size": group_size}
    model = load_drafter(save(tmp_path, raw_config(quantization=entry), flat(stored)))
    assert {module.bits for module in model.modules() if isinstance(module, nn.QuantizedLinear)} == {bits}
    stored.set_dtype(mx.float32)
    assert_drafts_alike(model, stored)


def test_loads_a_checkpoint_that_is_partly_quantized(tmp_path: Path) -> None:
    stored = network(config())
    nn.quantize(stored, 64, 4, class_predicate=lambda name, module: name.endswith("gate_proj"))
    folder = save(tmp_path, raw_config(quantization={"bits": 4, "group_size": 64}), flat(stored))
    model = load_drafter(folder)
    assert sum(isinstance(module, nn.QuantizedLinear) for module in model.modules()) == 3
    assert_drafts_alike(model, stored)


@pytest.mark.parametrize(
    "entry", [{"bits": 8}, {"bits": 4, "group_size": 32}, {"bits": 4, "group_size": 128}]
)
def test_refuses_a_quantization_entry_that_the_tensors_are_not(tmp_path: Path, entry: dict[str, int]) -> None:
    stored = quantized(network(config()), bits=4)
    folder = save(tmp_path, raw_config(quantization=entry), flat(stored))
    assert_refused(folder, CheckpointError, "candidate_selector.hidden_projection")


def test_refuses_quantized_tensors_without_an_entry(tmp_path: Path) -> None:
    folder = save(tmp_path, raw_config(), flat(quantized(network(config()), bits=4)))
    assert_refused(folder, CheckpointError, ".biases is not part of the network")


def test_refuses_to_quantize_twice(tmp_path: Path) -> None:
    folder = save(tmp_path, raw_config(quantization={"bits": 4}), flat(quantized(network(config()), 4)))
    assert_refused(folder, ConfigError, "draft_bits is 8", "already quantized to 4 bits", bits=8)


def test_leaves_layers_that_no_group_divides(tmp_path: Path) -> None:
    raw = raw_config(intermediate_size=96)
    model = load_drafter(save(tmp_path, raw, random_weights(DrafterConfig.from_dict(raw))), bits=4)
    mlp = model.layers[0].mlp
    assert not isinstance(mlp.down_proj, nn.QuantizedLinear)
    assert isinstance(mlp.up_proj, nn.QuantizedLinear)
    assert draft(model).finite


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("bits", [None, 4])
def test_half_precision_checkpoints_compute_in_float32(
    tmp_path: Path, generation: int, bits: int | None
) -> None:
    """Taps of large targets reach 3e6, and 65504 is the most that float16 holds."""
    weights = {name: t.astype(mx.float16) for name, t in random_weights(config(generation)).items()}
    model = load_drafter(save(tmp_path, raw_config(generation), weights), bits=bits)
    kinds = {tensor.dtype for tensor in flat(model).values()}
    assert kinds == ({mx.float32} if bits is None else {mx.float32, mx.uint32})
    taps = random_taps(model.config, 9)
    taps = taps * (3e6 / mx.abs(taps).max())
    rows = model.inject(taps)
    assert rows.dtype == mx.float32
    assert mx.isfinite(rows).all().item()
    drafter = Drafter(model)
    drafter.extend(taps)
    assert {array.dtype for array in drafter.arrays} == {mx.float32}
    assert draft(model, taps).finite


@pytest.mark.parametrize(
    ("device", "stored", "computed"),
    [
        (mx.gpu, mx.float16, mx.bfloat16),
        (mx.gpu, mx.bfloat16, mx.bfloat16),
        (mx.gpu, mx.float32, mx.float32),
        (mx.cpu, mx.float16, mx.float32),
        (mx.cpu, mx.bfloat16, mx.float32),
        (mx.cpu, mx.float32, mx.float32),
    ],
)
def test_activations_are_never_float16(
    monkeypatch: pytest.MonkeyPatch, device: mx.DeviceType, stored: mx.Dtype, computed: mx.Dtype
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    assert activation_dtype({"norm.weight": mx.ones(4, dtype=stored)}) == computed


@pytest.mark.parametrize("taps_dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_target_does_not_choose_the_precision(taps_dtype: mx.Dtype) -> None:
    model = network(config())
    model.set_dtype(mx.bfloat16)
    drafter, ends = Drafter(model), Ends(config())
    ends.embed_tokens.set_dtype(taps_dtype)
    drafter.extend(random_taps(config(), 9).astype(taps_dtype))
    hidden: list[mx.array] = []

    def head(rows: mx.array) -> mx.array:
        hidden.append(rows)
        return ends.lm_head(rows)

    drafter.propose(3, 6, ends.embed, head)
    assert {array.dtype for array in [*hidden, *drafter.arrays]} == {mx.bfloat16}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["norm.weight", "layers.2.mlp.down_proj.weight", "layers.0.self_attn.v_proj.weight", "fc.weight"]
)
@pytest.mark.parametrize("generation", [1, 2])
def test_weights_that_are_not_finite_are_noticed(
    tmp_path: Path, generation: int, name: str, value: float
) -> None:
    weights = random_weights(config(generation))
    weights[name] = mx.concatenate([mx.full(weights[name][:1].shape, value), weights[name][1:]])
    assert not draft(load_drafter(save(tmp_path, raw_config(generation), weights))).finite


def test_finite_logits_are_reported_as_such(tmp_path: Path) -> None:
    folder = save(tmp_path, raw_config(layer_types=[FULL] * 3), random_weights(config()))
    assert draft(load_drafter(folder)).finite


def test_one_bad_logit_is_enough() -> None:
    """A target's head that overflows for one token of one slot."""
    ends = Ends(config())

    def head(rows: mx.array) -> Any:
        logits = ends.lm_head(rows)
        logits[0, 2, 5] = float("nan")
        return logits

    drafter = Drafter(network(config()))
    drafter.extend(random_taps(config(), 4))
    assert not drafter.propose(3, 6, ends.embed, head).finite.item()
