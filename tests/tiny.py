"""Tiny random targets in mlx-lm's own model classes, and scripted drafters to set against them."""

import importlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from dflash_mlx.drafter import Draft
from dflash_mlx.target import Target

VOCAB = 128
WINDOW = 8

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_PARTIAL_ROPE = {"type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "llama": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "qwen3_5": ("qwen3_5", {**_DELTA, "rope_parameters": _PARTIAL_ROPE}),
    "qwen3_5_moe": (  # so many experts that mlx-lm sorts the rows of a block of eight by them
        "qwen3_5_moe",
        {
            **_DELTA,
            **_EXPERTS,
            "num_experts": 16,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "rope_parameters": _PARTIAL_ROPE,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 64, "partial_rotary_factor": 0.25},
    ),
}
"""Caches that can be trimmed, and recurrent ones that are replayed."""

ROW_WISE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (  # MLA attention
        "deepseek_v3",
        {
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "qk_nope_head_dim": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 4,
        },
    ),
    "falcon_h1": (  # Mamba 2 beside attention
        "falcon_h1",
        {"mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_heads": 4, "mamba_d_state": 32},
    ),
}
"""Families with modules that take another path for a single row."""

_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}

WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 32,
            "rope_global_base_freq": 1e4,
            "rope_local_base_freq": 1e4,
        },
    ),
    "gemma4": (  # the last two layers use keys and values of the first two
        "gemma4_text",
        {
            **_ALTERNATING,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 2,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_moe": (  # values of the full layers are their keys
        "gemma4_text",
        {
            **_ALTERNATING,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 0,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_ALTERNATING,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "muse_glimmer": (
        "muse_glimmer",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
}
"""Sliding windows, some layers returning tuples."""

EXACT = {**FAMILIES, **ROW_WISE, **WINDOWED}
"""All of them: block verification and rollback give the bits of one token at a time."""


GROUPS = {"affine": 32, "mxfp4": 32, "nvfp4": 16, "mxfp8": 32}
"""Quantization modes, and their weights per scale; affine could have others."""


def tiny_model(
    family: str, *, bits: int | None = None, mode: str = "affine", seed: int = 0, **changes: Any
) -> nn.Module:
    """A random model of `family`: float32, or its linear layers quantized to `bits`.

    `changes` replace entries of its config.
    """
    name, extra = EXACT[family]
    return random_model(name, {**_BASE, **extra, **changes}, bits=bits, mode=mode, seed=seed)


def random_model(
    name: str, config: dict[str, Any], *, bits: int | None = None, mode: str = "affine", seed: int = 0
) -> nn.Module:
    """A random model of mlx-lm's module `name`."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict({**config, "model_type": name}))
    mx.random.seed(seed)
    parameters: Any = tree_flatten(model.parameters())
    weights = [(path, _random_weight(path, weight)) for path, weight in parameters]
    model.load_weights(weights)
    if bits is not None:
        nn.quantize(model, GROUPS[mode], bits, mode=mode, class_predicate=lambda _, m: _divisible(m))
    model.eval()
    mx.eval(model.parameters())
    return model


def tiny_target(
    family: str, *, bits: int | None = None, mode: str = "affine", layer_ids: Sequence[int] = (0, 2)
) -> Target:
    """The same, ready for speculation."""
    target = Target(tiny_model(family, bits=bits, mode=mode), context_length=4096)
    target.attach(layer_ids)
    return target


def _random_weight(path: str, weight: Any) -> mx.array:
    """Large enough that greedy text wanders, so that a wrong state shows in the tokens."""
    if path.endswith("A_log"):
        return mx.random.uniform(-1, 1, weight.shape)
    if path.endswith("dt_bias"):
        return mx.random.normal(weight.shape) * 0.5
    if weight.ndim >= 2 or path.endswith("sinks"):
        return mx.random.normal(weight.shape) * (0.4 if "conv" in path else 0.15)
    return mx.array(weight).astype(mx.float32)


def _divisible(module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


class Scripted:
    """A drafter that knows the target's reply and what to make of it.

    Args:
        prompt_length: rows of the prompt, after which the reply's own rows begin.
        reply: the target's plain reply, from its first token.
        script: (slot, the right token) -> the token to propose.
    """

    def __init__(self, prompt_length: int, reply: Sequence[int], script: Callable[[int, int], int]) -> None:
        self.rows = -prompt_length  # committed rows taken in, counted from the reply's first token
        self.reply = reply
        self.script = script
        self.arrays: list[mx.array] = []

    def extend(self, taps: mx.array) -> None:
        self.rows += taps.shape[1]

    def propose(self, anchor: int, block_size: int, *others: Any) -> Draft:
        if others[-1] is not None:
            self.extend(others[-1])
        assert self.reply[self.rows] == anchor, "the drafter's context is not the committed text"
        right = [*self.reply[self.rows + 1 :], *[0] * block_size][: block_size - 1]
        return Draft(mx.array([self.script(i, t) for i, t in enumerate(right)]), mx.array(True))


def scripts(seed: int = 7) -> dict[str, Callable[[int, int], int]]:
    """Drafters that are always right, always wrong, random, and right up to a slot."""
    dice = random.Random(seed)
    return {
        "right": lambda _slot, token: token,
        "wrong": lambda _slot, token: (token + 1) % VOCAB,
        "random": lambda _slot, token: token if dice.random() < 0.6 else dice.randrange(VOCAB),
        "right until slot 2": lambda slot, token: token if slot < 2 else (token + 1) % VOCAB,
    }
