"""A llama model in llama.cpp's file format -> an mlx-lm model folder, its quantized weights as they are.

What differs is the order of rows in two projections, and how the tokenizer is spelt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_SPECIAL = (3, 4)  # GGUF token types: control, user defined

Metadata = dict[str, Any]


def convert(gguf: Path, folder: Path) -> None:
    """Write an mlx-lm model folder: config, tokenizer, and the same quantized weights."""
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    arrays, metadata = loaded
    heads = _number(metadata, "llama.attention.head_count")
    kv_heads = _number(metadata, "llama.attention.head_count_kv")
    interleaved = {"attn_q": heads, "attn_k": kv_heads}
    weights = {}
    for name, value in arrays.items():
        stem, _, leaf = name.rpartition(".")
        layer, _, module = stem.removeprefix("blk.").rpartition(".")
        prefix = f"model.layers.{layer}." if layer else ""
        count = interleaved.get(module)
        ordered = value if count is None else _halves(value, count)
        weights[f"{prefix}{MODULES[module]}.{leaf}"] = _bfloat16(ordered)
    folder.mkdir(parents=True)
    config = _config(metadata, weights, heads, kv_heads)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer = json.dumps(_tokenizer(metadata), ensure_ascii=False)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(metadata), indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _halves(rows: mx.array, heads: int) -> mx.array:
    """A head's rows from llama.cpp's order, rotary pairs side by side, to mlx-lm's: in two halves."""
    count = rows.shape[0]
    return rows.reshape(heads, count // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _bfloat16(value: mx.array) -> mx.array:
    """Scales and norms from float16, which this model's largest activations nearly exceed."""
    return value if value.dtype == mx.uint32 else value.astype(mx.bfloat16)


def _config(metadata: Metadata, weights: dict[str, mx.array], heads: int, kv_heads: int) -> Metadata:
    hidden = _number(metadata, "llama.embedding_length")
    inner = _number(metadata, "llama.feed_forward_length")
    quantization: Metadata = {"group_size": 32, "bits": 4}
    for name, scales in weights.items():
        if name.endswith(".scales"):
            module = name.removesuffix(".scales")
            columns = inner if module.endswith("down_proj") else hidden
            bits = weights[f"{module}.weight"].shape[-1] * 32 // columns
            group = columns // scales.shape[-1]
            if (bits, group) != (4, 32):
                quantization[module] = {"group_size": group, "bits": bits}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": _number(metadata, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": _number(metadata, "llama.vocab_size"),
        "rms_norm_eps": round(float(_number(metadata, "llama.attention.layer_norm_rms_epsilon")), 9),
        "rope_theta": _number(metadata, "llama.rope.freq_base"),
        "max_position_embeddings": _number(metadata, "llama.context_length"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": _number(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _number(metadata, "tokenizer.ggml.eos_token_id"),
        "quantization": quantization,
    }


def _tokenizer(metadata: Metadata) -> Metadata:
    """Byte-level BPE in which digits stand alone."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"].tolist()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": number, "content": token, "special": True, **flags}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in _SPECIAL
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(metadata: Metadata) -> Metadata:
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: tokens[_number(metadata, f"tokenizer.ggml.{name}_token_id")] for key, name in named.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": _number(metadata, "llama.context_length"),
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _number(metadata: Metadata, key: str) -> Any:
    value = metadata[key]
    return value.item() if isinstance(value, mx.array) else value
