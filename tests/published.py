"""Public drafters: their configs as published, and what they mean.

Values that are not known (some widths, depths and ids) are made up, and not among those compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_mlx.config import FULL, SLIDING, Rope

SECOND_GENERATION = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}


def flat(block_size: int | None, mask: int, ids: list[int], layers: int, **top: Any) -> dict[str, Any]:
    """A config as the first drafters were published: block size and rope at top level."""
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 248320,
        "num_target_layers": layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "max_position_embeddings": 40960,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": ids},
    }
    return raw | ({} if block_size is None else {"block_size": block_size}) | top


def nested(
    block_size: int, mask: int, ids: list[int], layers: int, theta: float, dflash: dict[str, Any], **top: Any
) -> dict[str, Any]:
    """A config as later drafters were published: block size in `dflash_config`, rope in `rope_parameters`."""
    raw = flat(None, mask, ids, layers, **top)
    del raw["rope_theta"]
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    raw["dflash_config"] |= {"block_size": block_size, **dflash}
    return raw


def second(
    block_size: int, mask: int, ids: list[int], layers: int, theta: float, **top: Any
) -> dict[str, Any]:
    dflash = SECOND_GENERATION | top.pop("dflash", {})
    raw = nested(block_size, mask, ids, layers, theta, dflash, **top)
    return raw | {
        "architectures": ["DFlash2DraftModel"],
        "layer_types": [SLIDING] * 5,
        "sliding_window": 2048,
        "is_causal": False,
    }


YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}

PUBLIC: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3.8-27B-DFlash2": (
        second(8, 248070, [5, 19, 33, 47, 61], 64, 1e7, hidden_size=5120, intermediate_size=17408),
        {
            "generation": 2,
            "block_size": 8,
            "mask_token_id": 248070,
            "target_layer_ids": (5, 19, 33, 47, 61),
            "num_target_layers": 64,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_types": (SLIDING,) * 5,
            "sliding_window": 2048,
            "is_causal": (False,) * 5,
            "rope": Rope(1e7),
            "rms_norm_eps": 1e-6,
            "vocab_size": 248320,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
            "final_logit_softcapping": None,
            "output_multiplier": 1.0,
            "input_embedding_scale": 1.0,
            "attention_bias": False,
            "quantization": None,
        },
    ),
    "Muse-Glimmer-30B-DFlash2": (
        second(
            16,
            201818,
            [1, 13, 25, 37, 49],
            52,
            5e5,
            hidden_size=6656,
            intermediate_size=19968,
            rms_norm_eps=1e-5,
            vocab_size=202048,
            dflash={"final_logit_softcapping": 20, "output_multiplier": 0.19611613513818404},
        ),
        {
            "generation": 2,
            "block_size": 16,
            "mask_token_id": 201818,
            "target_layer_ids": (1, 13, 25, 37, 49),
            "num_target_layers": 52,
            "hidden_size": 6656,
            "intermediate_size": 19968,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.19611613513818404,
            "rope": Rope(5e5),
            "rms_norm_eps": 1e-5,
            "vocab_size": 202048,
            "num_hidden_layers": 5,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_types": (SLIDING,) * 5,
            "sliding_window": 2048,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
        },
    ),
    "Qwen3.5-4B": (
        flat(16, 248070, [1, 8, 15, 22, 29], 32),
        {
            "generation": 1,
            "block_size": 16,
            "mask_token_id": 248070,
            "target_layer_ids": (1, 8, 15, 22, 29),
            "rope": Rope(1e7),
            "conv_kernel_size": 0,
            "selector_top_k": 0,
        },
    ),
    "Qwen3.5-9B": (
        flat(16, 248070, [1, 8, 15, 22, 29], 32, hidden_size=4096),
        {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": (1, 8, 15, 22, 29)},
    ),
    "Qwen3.5-27B": (
        flat(16, 248070, [1, 16, 31, 46, 61], 64, hidden_size=5120),
        {
            "block_size": 16,
            "target_layer_ids": (1, 16, 31, 46, 61),
            "layer_types": (FULL,) * 5,
            "is_causal": (False,) * 5,
            "sliding_window": None,
        },
    ),
    "Qwen3.6-27B": (
        flat(
            16,
            248070,
            [1, 16, 31, 46, 61],
            64,
            hidden_size=5120,
            layer_types=[SLIDING] * 4 + [FULL],
            sliding_window=2048,
            use_sliding_window=False,
        ),
        {
            "block_size": 16,
            "target_layer_ids": (1, 16, 31, 46, 61),
            "layer_types": (SLIDING, SLIDING, SLIDING, SLIDING, FULL),
            "is_causal": (True, True, True, True, False),
            "sliding_window": 2048,
        },
    ),
    "Qwen3.6-35B-A3B": (
        nested(16, 248070, [1, 10, 19, 28, 37], 40, 1e7, {}, hidden_size=2048),
        {"block_size": 16, "rope": Rope(1e7), "target_layer_ids": (1, 10, 19, 28, 37)},
    ),
    "Qwen3.6-35B-A3B, another revision": (
        nested(16, 248070, [2, 11, 20, 29, -1], 40, 1e7, {}, hidden_size=2048),
        {"block_size": 16, "rope": Rope(1e7), "target_layer_ids": (2, 11, 20, 29, 39)},
    ),
    "Qwen3.5-122B-A10B": (
        nested(
            16,
            248077,
            [1, 7, 13, 19, 25, 31, 37, 43],
            48,
            1e7,
            {},
            hidden_size=3072,
            num_hidden_layers=6,
            layer_types=[SLIDING] * 5 + [FULL],
            sliding_window=4096,
        ),
        {
            "block_size": 16,
            "mask_token_id": 248077,
            "target_layer_ids": (1, 7, 13, 19, 25, 31, 37, 43),
            "num_hidden_layers": 6,
            "sliding_window": 4096,
            "hidden_size": 3072,
        },
    ),
    "Qwen3-4B-b16": (
        flat(16, 151669, [1, 9, 17, 25, 33], 36, rope_theta=1e6, vocab_size=151936),
        {
            "block_size": 16,
            "mask_token_id": 151669,
            "target_layer_ids": (1, 9, 17, 25, 33),
            "num_target_layers": 36,
            "layer_types": (FULL,) * 5,
            "rope": Rope(1e6),
        },
    ),
    "Qwen3-8B-b16": (
        flat(16, 151669, [1, 9, 17, 25, 33], 36, hidden_size=4096, rope_theta=1e6, vocab_size=151936),
        {"block_size": 16, "mask_token_id": 151669, "layer_types": (FULL,) * 5, "rope": Rope(1e6)},
    ),
    "Gemma-4-31B": (
        flat(
            16,
            4,
            [1, 12, 23, 34, 45, 57],
            60,
            hidden_size=5376,
            vocab_size=262144,
            layer_types=[SLIDING] * 4 + [FULL],
            sliding_window=2048,
            final_logit_softcapping=30.0,
        ),
        {
            "block_size": 16,
            "mask_token_id": 4,
            "target_layer_ids": (1, 12, 23, 34, 45, 57),
            "layer_types": (SLIDING, SLIDING, SLIDING, SLIDING, FULL),
            "sliding_window": 2048,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma-4-26B-A4B": (
        flat(
            16,
            4,
            [1, 6, 12, 17, 23, 28],
            30,
            hidden_size=2816,
            vocab_size=262144,
            layer_types=[SLIDING] * 4 + [FULL],
            sliding_window=2048,
            final_logit_softcapping=30.0,
        ),
        {
            "block_size": 16,
            "mask_token_id": 4,
            "layer_types": (SLIDING, SLIDING, SLIDING, SLIDING, FULL),
            "sliding_window": 2048,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gpt-oss-20b": (
        flat(
            8,
            200000,
            [1, 6, 11, 16, 21],
            24,
            hidden_size=2880,
            num_attention_heads=64,
            head_dim=64,
            vocab_size=201088,
            rope_theta=150000,
            rope_scaling=YARN,
            attention_bias=True,
        ),
        {
            "block_size": 8,
            "mask_token_id": 200000,
            "target_layer_ids": (1, 6, 11, 16, 21),
            "attention_bias": True,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope": Rope(
                150000.0,
                "yarn",
                (
                    ("beta_fast", 32.0),
                    ("beta_slow", 1.0),
                    ("factor", 32.0),
                    ("original_max_position_embeddings", 4096),
                ),
            ),
        },
    ),
    "LLaMA-3.1-8B-UltraChat": (
        flat(10, 128002, [1, 8, 15, 22, 29], 32, hidden_size=4096, vocab_size=128256),
        {"block_size": 10, "mask_token_id": 128002, "target_layer_ids": (1, 8, 15, 22, 29)},
    ),
}


@dataclass(frozen=True)
class Published:
    """A target that has a public drafter.

    Attributes:
        family: its class, as a tiny target; None: mlx-lm has none.
        drafter: the config in `PUBLIC` that its drafter has or, where `known` is false, that it is tried
            with; None: the drafter follows later.
    """

    family: str | None
    drafter: str | None = None
    known: bool = True


TARGETS: dict[str, Published] = {
    "Qwen3.8-27B": Published("qwen3_5", "Qwen3.8-27B-DFlash2"),
    "Muse-Glimmer-30B": Published("muse_glimmer", "Muse-Glimmer-30B-DFlash2"),
    "Qwen3.6-27B": Published("qwen3_5", "Qwen3.6-27B"),
    "Qwen3.6-35B-A3B": Published("qwen3_5_moe", "Qwen3.6-35B-A3B"),
    "Qwen3.5-4B": Published("qwen3_5", "Qwen3.5-4B"),
    "Qwen3.5-9B": Published("qwen3_5", "Qwen3.5-9B"),
    "Qwen3.5-27B": Published("qwen3_5", "Qwen3.5-27B"),
    "Qwen3.5-35B-A3B": Published("qwen3_5_moe", "Qwen3.6-35B-A3B", known=False),
    "Qwen3.5-122B-A10B": Published("qwen3_5_moe", "Qwen3.5-122B-A10B"),
    "Qwen3.5-397B-A17B": Published("qwen3_5_moe", "Qwen3.5-122B-A10B", known=False),
    "Qwen3-4B": Published("qwen3", "Qwen3-4B-b16"),
    "Qwen3-8B": Published("qwen3", "Qwen3-8B-b16"),
    "Qwen3-Coder-Next": Published("qwen3_next", "Qwen3.6-35B-A3B", known=False),
    "Qwen3-Coder-30B-A3B": Published("qwen3_moe", "Qwen3-4B-b16", known=False),
    "Gemma 4 12B": Published("gemma4", "Gemma-4-31B", known=False),
    "Gemma 4 31B": Published("gemma4", "Gemma-4-31B"),
    "Gemma 4 26B-A4B": Published("gemma4_moe", "Gemma-4-26B-A4B"),
    "gpt-oss-20b": Published("gpt_oss", "gpt-oss-20b"),
    "gpt-oss-120b": Published("gpt_oss", "gpt-oss-20b", known=False),
    "Llama-3.1-8B": Published("llama", "LLaMA-3.1-8B-UltraChat"),
    "MiniMax M2.5, M2.7": Published("minimax"),
    "Kimi K2.5, K2.6, K2.7-Code": Published("kimi_k25"),
    "GLM 5.1": Published("glm_moe_dsa"),
    "Alpamayo 1.5, R1 10B": Published(None),
}
"""Every target that the drafters' authors list."""
