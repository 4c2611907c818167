"""Whatever is wrong with a folder is said in one line with exit code 3; what only looks odd loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from byte_tokenizer import byte_tokenizer
from drafter.build import config, network, random_weights, raw_config, save
from mlx import nn
from mlx.utils import tree_flatten
from tiny import tiny_model

from dflash_mlx.errors import ModelError
from dflash_mlx.generate import main

VOCAB = 260
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "num_target_layers": 4, "num_hidden_layers": 2}
IDS = {"target_layer_ids": [0, 2, 3]}
QUANTIZED = {"bits": 4, "group_size": 32}

Folder = Callable[[Path], object]
"""What a case does to a good folder."""


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and drafters of both generations that fit it."""
    root = tmp_path_factory.mktemp("good")
    target = root / "target"
    target.mkdir()
    model = tiny_model("qwen3", vocab_size=VOCAB)
    parameters: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), parameters, metadata={"format": "mlx"})
    args = {key: value for key, value in vars(model.args).items() if value is not None}
    (target / "config.json").write_text(json.dumps({**args, "eos_token_id": 256}))
    save_tokenizer(target)
    for generation in (1, 2):
        raw = raw_config(generation, IDS, **SIZES)
        save(root / f"drafter{generation}", raw, random_weights(config(generation, IDS, **SIZES)))
    return root


def save_tokenizer(folder: Path) -> None:
    """Of bytes and an end."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def generate(capsys: pytest.CaptureFixture[str], target: Path, drafter: Path | str) -> tuple[int, str, str]:
    block = [] if drafter == "none" else ["--block-size", "2"]
    pair = ["--model", str(target), "--draft", str(drafter)]
    code = main(["ab", "--raw", "--max-tokens", "4", *block, *pair])
    done = capsys.readouterr()
    return code, done.out, done.err


# --- changes -----------------------------------------------------------------------------------


def setting(dflash: dict[str, Any] | None = None, without: str = "", **top: Any) -> Folder:
    """Other entries in config.json; None removes nothing but is written as null."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        raw = json.loads(path.read_text())
        raw |= top
        if "dflash_config" in raw:
            raw["dflash_config"] |= dflash or {}
        for entries in (raw, raw.get("dflash_config", {})):
            entries.pop(without, None)
        path.write_text(json.dumps(raw))

    return change


def writing(name: str, content: bytes) -> Folder:
    return lambda folder: (folder / name).write_bytes(content)


def tensors(change: Callable[[dict[str, mx.array]], object]) -> Folder:
    def rewrite(folder: Path) -> None:
        path = str(folder / "model.safetensors")
        held: Any = mx.load(path)
        change(held)
        mx.eval(held)
        mx.save_safetensors(path, held)

    return rewrite


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def replaced_by_folder(name: str) -> Folder:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def dangling(folder: Path) -> None:
    """A hub cache whose file was deleted."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "gone")


def renamed(old: str, new: str) -> Folder:
    return lambda folder: (folder / old).rename(folder / new)


def both(*changes: Folder) -> Folder:
    return lambda folder: [change(folder) for change in changes]


def cast(dtype: mx.Dtype) -> Folder:
    return tensors(lambda held: held.update({name: a.astype(dtype) for name, a in held.items()}))


def quantized(folder: Path) -> None:
    held = network(config(2, IDS, **SIZES), dict(mx.load(str(folder / "model.safetensors"))))  # type: ignore[arg-type]
    nn.quantize(held, 32, 4, class_predicate=lambda _, module: isinstance(module, nn.Linear))
    parameters: Any = dict(tree_flatten(held.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), parameters)


def suffixed(held: dict[str, mx.array]) -> None:
    for side in ("predecessor", "successor"):
        name = f"candidate_selector.{side}_codebook"
        held[f"{name}.weight"] = held.pop(name)


NORM = "layers.0.self_attn.q_norm.weight"

DRAFTERS: dict[str, tuple[Folder, tuple[str, ...]]] = {
    "no hidden size": (setting(without="hidden_size"), ("hidden_size is missing",)),
    "no mask": (setting(without="mask_token_id"), ("mask_token_id is missing",)),
    "mask outside the vocabulary": (setting({"mask_token_id": VOCAB}), ("mask_token_id is 260",)),
    "no ids": (setting(without="target_layer_ids"), ("target_layer_ids is missing",)),
    "ids beyond the target": (setting({"target_layer_ids": [0, 2, 4]}), ("[0, 2, 4]", "[0, 4)")),
    "ids too negative": (setting({"target_layer_ids": [0, 2, -5]}), ("[0, 2, -5]",)),
    "another number of ids": (setting({"target_layer_ids": [0, 2]}), ("fc.weight", "[64, 192]")),
    "another target's depth": (setting(num_target_layers=64), ("layer count 64", "this target has 4")),
    "another target's width": (setting(hidden_size=128), ("fc.weight",)),
    "another vocabulary": (setting(vocab_size=151936), ("codebook", "151936")),
    "unknown rope": (setting(rope_scaling={"rope_type": "longrope"}), ("rope_type is 'longrope'",)),
    "block of 1": (setting({"block_size": 1}), ("block_size is 1",)),
    "block of 64": (setting({"block_size": 64}), ("blocks of 64", "32")),
    "causal by word": (setting(is_causal="no"), ("is_causal is 'no'",)),
    "half a second generation": (setting(without="selector_rank"), ("selector_rank is missing",)),
    "sliding without a window": (setting(layer_types=["sliding_attention"] * 2), ("sliding_window",)),
    "another architecture": (
        both(setting(without="dflash_config"), setting(architectures=["LlamaForCausalLM"])),
        ("LlamaForCausalLM", "not a DFlash drafter"),
    ),
    "speculators, nested": (
        writing(
            "config.json",
            b'{"aux_hidden_state_layer_ids": [0, 2], "transformer_layer_config": {"hidden_size": 64}}',
        ),
        ("hidden_size is missing",),
    ),
    "EXL3": (setting(quantization_config={"quant_method": "exl3", "bits": 4}), ("exl3",)),
    "AWQ": (setting(quantization_config={"quant_method": "awq", "bits": 4}), ("awq",)),
    "mxfp4": (setting(quantization={"mode": "mxfp4", "bits": 4}), ("mxfp4", "affine")),
    "5 bits": (setting(quantization={"bits": 5}), ("'bits': 5",)),
    "quantized, unsaid": (quantized, ("biases is not part of the network",)),
    "GGUF": (renamed("model.safetensors", "drafter.gguf"), ("GGUF",)),
    "MiMo": (writing("mask_embedding.pt", b""), ("MiMo",)),
    "attention sinks": (
        tensors(lambda held: held.update({"layers.0.self_attn.sinks": mx.zeros(4)})),
        ("layers.0.self_attn.sinks is not part of the network",),
    ),
    "Laguna's norms": (
        tensors(lambda held: held.update({"aux_norms.0.weight": mx.zeros(64)})),
        ("aux_norms.0.weight is not part of the network",),
    ),
    "packed projections": (
        tensors(lambda held: held.update({"layers.0.self_attn.qkv.packed": mx.zeros(4, mx.uint8)})),
        ("layers.0.self_attn.qkv.packed is not part",),
    ),
    "no norm": (tensors(lambda held: held.pop(NORM)), (f"{NORM} is missing",)),
    "a longer norm": (tensors(lambda held: held.update({NORM: mx.zeros(33)})), (NORM, "[33]", "[32]")),
    "integers": (cast(mx.int32), ("int32",)),
    "PyTorch only": (renamed("model.safetensors", "pytorch_model.bin"), ("no .safetensors",)),
    "truncated": (truncated, ("cannot read", "download")),
    "no bytes": (writing("model.safetensors", b""), ("cannot read", "download")),
    "a web page": (writing("model.safetensors", b"<html>not found</html>"), ("cannot read",)),
    "a file that is gone": (dangling, ("model.safetensors",)),
    "tensors are a folder": (replaced_by_folder("model.safetensors"), ("model.safetensors",)),
    "config is a folder": (replaced_by_folder("config.json"), ("cannot read", "config.json")),
    "config is a list": (writing("config.json", b"[]"), ("holds a list",)),
    "config is no JSON": (writing("config.json", b"{'a': 1}"), ("cannot read",)),
    "config is no text": (writing("config.json", b"\xff\xfe{}"), ("cannot read",)),
    "a deep config": (writing("config.json", b"[" * 100000), ("cannot read",)),
    "nothing": (emptied, ("config.json",)),
}

TARGETS: dict[str, tuple[Folder, tuple[str, ...]]] = {
    "nothing": (emptied, ("cannot load the target",)),
    "config is a list": (writing("config.json", b"[]"), ("cannot load the target",)),
    "unknown family": (setting(model_type="nobody"), ("nobody", "not supported")),
    "no family": (setting(without="model_type"), ("model_type",)),
    "no width": (setting(without="hidden_size"), ("hidden_size",)),
    "unknown rope": (setting(rope_scaling={"rope_type": "spiral"}), ("spiral",)),
    "context length by word": (setting(max_position_embeddings="long"), ("long",)),
    "truncated": (truncated, ("cannot load the target",)),
    "no tensors": (renamed("model.safetensors", "model.bin"), ("safetensors",)),
    "a tensor less": (tensors(lambda held: held.pop("model.norm.weight")), ("model.norm.weight",)),
    "another width": (setting(hidden_size=128), ("cannot load the target",)),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), ("cannot load the target",)),
    "broken tokenizer": (writing("tokenizer.json", b"{}"), ("cannot load the target",)),
    "a drafter": (
        both(emptied, lambda f: [shutil.copy(p, f) for p in (f.parent / "drafter2").iterdir()]),
        ("cannot load the target",),
    ),
}

FINE: dict[str, Folder] = {
    "as it is": lambda folder: None,
    "ids from the end": setting({"target_layer_ids": [-4, -2, -1]}),
    "ids as speculators name them": both(
        setting(without="target_layer_ids"), setting({"aux_hidden_state_layer_ids": [0, 2, 3]})
    ),
    "rewritten architecture": setting(architectures=["Qwen3ForCausalLM"]),
    "block of 32": setting({"block_size": 32}),
    "float16": cast(mx.float16),
    "bfloat16": cast(mx.bfloat16),
    "quantized": both(quantized, setting(quantization=QUANTIZED, quantization_config=QUANTIZED)),
    "codebooks with a suffix": tensors(suffixed),
    "unknown keys": setting({"note": "x"}, torch_dtype="bfloat16", transformers_version="5.0"),
    "a broken index beside it": writing("model.safetensors.index.json", b"{"),
}


def assert_refused(
    capsys: pytest.CaptureFixture[str], target: Path, drafter: Path, words: tuple[str, ...]
) -> None:
    code, out, err = generate(capsys, target, drafter)
    assert (code, out) == (ModelError.exit_code, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    for word in words:
        assert word in err


def copied(good: Path, folder: Path) -> Path:
    shutil.copytree(good, folder / "models")
    return folder / "models"


@pytest.mark.parametrize("case", DRAFTERS)
def test_a_broken_drafter(case: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, words = DRAFTERS[case]
    root = copied(good, tmp_path)
    change(root / "drafter2")
    assert_refused(capsys, root / "target", root / "drafter2", words)


@pytest.mark.parametrize("case", TARGETS)
def test_a_broken_target(case: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, words = TARGETS[case]
    root = copied(good, tmp_path)
    change(root / "target")
    assert_refused(capsys, root / "target", root / "drafter2", words)


def test_a_drafter_for_another_vocabulary(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first generation has no tensor that would tell."""
    root = copied(good, tmp_path)
    setting(vocab_size=151936)(root / "drafter1")
    words = ("vocabulary 151936", "this target has 260")
    assert_refused(capsys, root / "target", root / "drafter1", words)


def test_a_target_in_the_place_of_the_drafter(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, good / "target", good / "target", ("not a DFlash drafter", "swapped"))


@pytest.mark.parametrize("case", FINE)
def test_what_only_looks_odd_loads(
    case: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copied(good, tmp_path)
    FINE[case](root / "drafter2")
    plain = generate(capsys, good / "target", "none")
    code, out, err = generate(capsys, root / "target", root / "drafter2")
    assert (code, out) == (0, plain[1]), err
    assert "tau " in err
