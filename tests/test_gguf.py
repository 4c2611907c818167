"""A tiny model in llama.cpp's file format, unpacked: its tokens and logits are those of what was packed."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model, load_tokenizer
from packed import packed, tiny_llama

from dflash_mlx.gguf import convert


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gguf")
    packed(tiny_llama(), made / "tiny.gguf")
    convert(made / "tiny.gguf", made / "model")
    return made / "model"


def test_the_unpacked_model_computes_what_the_packed_one_does(folder: Path) -> None:
    unpacked, _ = load_model(folder)
    unpacked.set_dtype(mx.float32)
    tokens = mx.array([[5, 9, 100, 3, 7]])
    np.testing.assert_allclose(unpacked(tokens), tiny_llama()(tokens), atol=1e-5)


def test_the_tokenizer_splits_digits_and_keeps_special_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("hello12<|end|>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["hello", "1", "2", "<|end|>"]
    for text in ("hello wörld\n\t 3", "日本語 🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert tokenizer.convert_ids_to_tokens(rendered) == ["<|start|>", "hello", "<|end|>"]
    assert set(tokenizer.eos_token_ids) == {0}
