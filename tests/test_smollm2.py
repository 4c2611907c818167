"""A tiny model in SmolLM2's file format, unpacked: its tokens and logits are those of what was packed."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import load_model, load_tokenizer
from tokenizers import pre_tokenizers

from dflash_mlx import smollm2

TOKENS = [
    "<|end|>",
    "<|start|>",
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    "he",
    "ll",
    "hell",
    "hello",
    "12",
]
MERGES = ["h e", "l l", "he ll", "hell o", "1 2"]
TEMPLATE = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
ARGUMENTS = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": len(TOKENS),
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
}


def packed(model: llama.Model, file: Path) -> None:
    """Write the model as llama.cpp does: rotary pairs of a head side by side."""
    names = {ours: theirs for theirs, ours in smollm2._MODULES.items()}
    arrays = {}
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]  # a list
    for path, value in weights:
        name, _, leaf = path.rpartition(".")
        if name.startswith("model.layers."):
            _, _, layer, module = name.split(".", 3)
            theirs = names[module]
            heads = {"attn_q": 4, "attn_k": 2}.get(theirs)
            if heads:
                value = value.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(value.shape)
            arrays[f"blk.{layer}.{theirs}.{leaf}"] = value
        else:
            arrays[f"{names[name]}.{leaf}"] = value
    metadata: dict[str, mx.array | str | list[str]] = {
        "llama.attention.head_count": mx.array(4),
        "llama.attention.head_count_kv": mx.array(2),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.embedding_length": mx.array(32),
        "llama.feed_forward_length": mx.array(64),
        "llama.block_count": mx.array(2),
        "llama.vocab_size": mx.array(len(TOKENS)),
        "llama.rope.freq_base": mx.array(1e5),
        "llama.context_length": mx.array(512),
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": mx.array([3, 3] + [1] * (len(TOKENS) - 2)),
        "tokenizer.ggml.bos_token_id": mx.array(1),
        "tokenizer.ggml.eos_token_id": mx.array(0),
        "tokenizer.ggml.padding_token_id": mx.array(0),
        "tokenizer.ggml.unknown_token_id": mx.array(0),
        "tokenizer.chat_template": TEMPLATE,
    }
    mx.save_gguf(str(file), arrays, metadata)


@pytest.fixture(scope="module")
def model() -> llama.Model:
    mx.random.seed(0)
    made = llama.Model(llama.ModelArgs.from_dict(ARGUMENTS))
    made.set_dtype(mx.bfloat16)
    made.set_dtype(mx.float32)  # numbers that bfloat16 holds exactly
    mx.eval(made.parameters())
    return made


@pytest.fixture(scope="module")
def gguf(model: llama.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    packed(model, file)
    return file


def test_the_unpacked_model_computes_what_the_packed_one_does(
    model: llama.Model, gguf: Path, tmp_path: Path
) -> None:
    smollm2.convert(gguf, tmp_path / "model")
    unpacked, _ = load_model(tmp_path / "model")
    unpacked.set_dtype(mx.float32)
    tokens = mx.array([[5, 9, 100, 3, 7]])
    np.testing.assert_allclose(unpacked(tokens), model(tokens), atol=1e-5)


def test_the_tokenizer_splits_digits_and_keeps_special_tokens(gguf: Path, tmp_path: Path) -> None:
    smollm2.convert(gguf, tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello12<|end|>")) == [
        "hello",
        "1",
        "2",
        "<|end|>",
    ]
    for text in ("hello wörld\n\t 3", "日本語 🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert tokenizer.convert_ids_to_tokens(rendered) == ["<|start|>", "hello", "<|end|>"]
    assert set(tokenizer.eos_token_ids) == {0}


def test_without_the_package_there_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> None:
        raise PackageNotFoundError

    monkeypatch.setattr(smollm2, "files", missing)
    assert smollm2.installed_folder() is None


def test_the_package_is_unpacked_once_and_an_interrupted_attempt_is_made_good(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "installed_file", lambda: gguf)
    monkeypatch.setattr(smollm2, "user_cache_path", lambda _name: tmp_path)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "model.safetensors").write_text("half a file")
    folder = smollm2.installed_folder()
    assert folder == tmp_path / "smollm2"
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    load_model(folder)
    gguf_only_once = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2.installed_folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == gguf_only_once
