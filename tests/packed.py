"""A tiny llama model with a tokenizer, packed as llama.cpp packs one, and as a package on the path."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import pre_tokenizers

from dflash_mlx.gguf import MODULES

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
    names = {ours: theirs for theirs, ours in MODULES.items()}
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


def tiny_llama() -> llama.Model:
    """Random weights that bfloat16 holds exactly."""
    mx.random.seed(0)
    made = llama.Model(llama.ModelArgs.from_dict(ARGUMENTS))
    made.set_dtype(mx.bfloat16)
    made.set_dtype(mx.float32)
    mx.eval(made.parameters())
    return made


def install(name: str, version: str, file: Path | None, site: Path) -> None:
    """What pip leaves of a package of this name: the file, if any, and the list of its files."""
    stem = name.replace("-", "_")
    info = site / f"{stem}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    record = [f"{stem}-{version}.dist-info/METADATA,,"]
    if file is not None:
        (site / stem).mkdir()
        (site / stem / file.name).write_bytes(file.read_bytes())
        record.append(f"{stem}/{file.name},,")
    (info / "RECORD").write_text("\n".join(record) + "\n")
