"""A small config for every model of mlx-lm, and what is known of those that cannot be built here."""

import contextlib
import dataclasses
import importlib
import io
import pkgutil
from functools import cache
from typing import Any

import mlx_lm.models
from mlx import nn
from tiny import VOCAB, WINDOW, random_model

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ALTERNATING = [_SLIDING, _FULL] * 2

NOT_BUILT = {
    "bitnet": "needs Metal: its kernels have no CPU version",
    "muse_spark": "needs Metal: its kernels have no CPU version",
    "olmo": "needs the package ai2-olmo",
    "phi3small": "mlx-lm's own model crashes MLX's CPU backend",
    "prism_hadamard_qwen35": "needs a packed checkpoint",
}
"""Models of mlx-lm that cannot be tried on this machine."""

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-06,
    "layer_norm_eps": 1e-06,
    "layer_norm_epsilon": 1e-06,
    "norm_eps": 1e-06,
    "layernorm_epsilon": 1e-06,
    "norm_epsilon": 1e-06,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "moe_layer_freq": 1,
    "moe_topk": 2,
    "num_shared_expert": 1,
    "use_mixed_mlp_moe": True,
    "num_dense_layers": 1,
    "use_expert_bias": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_num_experts": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "linear_allow_neg_eigval": False,
    "sliding_window": WINDOW,
    "window_size": WINDOW,
    "attention_window_size": WINDOW,
    "mamba_d_ssm": 64,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_d_state": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "n_groups": 1,
    "state_size": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_rank": 4,
    "time_step_limit": [0.0, 1000000000.0],
    "num_heads": 8,
    "use_qk_norm": True,
    "qk_norm": True,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": WINDOW,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 4096,
    "n_ctx": 4096,
    "n_inner": 96,
    "n_kv_heads": 2,
}
"""Small values for the fields of mlx-lm's configs, by name."""

_OTHERS: dict[str, dict[str, Any]] = {
    "afm7": {
        "hidden_dim": 64,
        "num_layers": 3,
        "num_kv_reuse_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim_scale_factor": 1.5,
    },
    "afmoe": {"layer_types": _ALTERNATING},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "cohere2": {"head_dim": 16, "sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 64,
        "n_layers": 4,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        "topk_method": "greedy",
    },
    "exaone": {"num_layers": 4, "tie_word_embeddings": True, "head_dim": 16},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": _ALTERNATING, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": _ALTERNATING},
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", "sliding_window_pattern": 2, "query_pre_attn_scalar": 32}
    },
    "gemma3_text": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
    "gemma3n": {
        "text_config": {
            "model_type": "gemma3n",
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": _ALTERNATING,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
            "hidden_size_per_layer_input": 32,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 16,
        }
    },
    "gemma4": {
        "text_config": {
            "model_type": "gemma4_text",
            "layer_types": _ALTERNATING,
            "num_kv_shared_layers": 2,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB,
            "tie_word_embeddings": True,
        }
    },
    "gemma4_text": {
        "layer_types": _ALTERNATING,
        "num_kv_shared_layers": 2,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {"layer_types": _ALTERNATING},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25},
    "gptj": {"rotary_dim": 16},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "hunyuan": {
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_linear": {
        "model_max_length": 4096,
        "mla_use_nope": True,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "kimi_k3": {
        "text_config": {
            "model_type": "kimi_linear",
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_key_value_heads": 4,
            "activation_situ_beta": 4.0,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "head_dim": 32,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        }
    },
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {"full_attn_idxs": [1, 3]},
    "lfm2-vl": {"text_config": {"model_type": "lfm2", "full_attn_idxs": [1, 3]}},
    "lille-130m": {"block_size": 4096},
    "llama4": {
        "text_config": {
            "model_type": "llama4_text",
            "attention_chunk_size": 8,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
        }
    },
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 64,
        "zero_expert_num": 2,
        "num_layers": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 64,
        "zero_expert_num": 2,
        "num_layers": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "mellum": {
        "layer_types": _ALTERNATING,
        "rope_parameters": {
            _SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
            _FULL: {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
    },
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12.0},
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            "long_factor": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            "original_max_position_embeddings": 4096,
        },
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 12.0,
    },
    "minimax": {"rotary_dim": 16},
    "minimax_m3_vl": {
        "text_config": {
            "moe_layer_freq": [0, 1, 1, 1],
            "dense_intermediate_size": 96,
            "rotary_dim": 16,
            "sparse_attention_freq": [0, 1, 0, 1],
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_block_size": 4,
            "index_topk_blocks": 2,
        }
    },
    "ministral3": {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "type": "default",
            "original_max_position_embeddings": 1024,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "mistral3": {
        "text_config": {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_theta": 10000.0,
                "type": "default",
                "original_max_position_embeddings": 1024,
                "llama_4_scaling_beta": 0.1,
            },
        }
    },
    "mistral4": {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "type": "default",
            "original_max_position_embeddings": 1024,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "muse_spark": {
        "text_config": {
            "num_shared_experts": 0,
            "post_norm_eps": 1e-08,
            "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0, 10000.0, 0],
            "layer_types": _ALTERNATING,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.2,
            "moe_hidden_size": 64,
        }
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
        ]
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "M", "E"],
        "moe_shared_expert_intermediate_size": 64,
    },
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 64,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4, 4, 4, 4],
        "num_kv_heads": [2, 2, 2, 2],
        "ffn_multipliers": [1.0, 1.0, 1.0, 1.0],
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 64,
        "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2,
    },
    "phimoe": {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            "long_factor": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            "short_mscale": 1.0,
            "long_mscale": 1.0,
        }
    },
    "plamo": {"n_shared_head": 2},
    "qwen2_vl": {"text_config": {"model_type": "qwen2"}},
    "qwen3_vl": {"text_config": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe"}},
    "phixtral": {"num_vocab": VOCAB, "model_dim": 64, "num_heads": 4, "num_layers": 4, "rotary_dim": 8},
    "pixtral": {"text_config": {"model_type": "llama"}},
    "plamo2": {
        "hidden_size_per_head": 32,
        "mamba_num_heads": 4,
        "mamba_step": 2,
        "full_attention_idx": [1, 3],
    },
    "plamo3": {"sliding_window_pattern": 2},
    "qwen": {"kv_channels": 16},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16},
    "spark2_5": {"rope_parameters": {_SLIDING: {"rope_theta": 10000.0}, _FULL: {"rope_theta": 10000.0}}},
    "stablelm": {"use_qkv_bias": True},
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": [_FULL, _SLIDING, _FULL, _SLIDING],
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 64,
        "moe_layers_enum": "1,2,3",
    },
    "talkie": {"head_dim": 16},
    "kimi_vl": {"text_config": {"num_key_value_heads": 4}},
    "kimi_k25": {"text_config": {"model_type": "kimi_k25", "num_key_value_heads": 4}},
}
"""What these models need besides."""


@cache
def models() -> tuple[str, ...]:
    """The names of mlx-lm's models, those not built included."""
    names = sorted(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))
    return tuple(name for name in names if name in NOT_BUILT or hasattr(_module(name), "ModelArgs"))


def zoo_model(name: str, *, bits: int | None = None) -> nn.Module:
    """A random model, small."""
    return random_model(name, zoo_config(name), bits=bits)


def zoo_config(name: str) -> dict[str, Any]:
    """Its config.json, but for the model's type."""
    fields = {field.name for field in dataclasses.fields(_module(name).ModelArgs)}
    others = dict(_OTHERS.get(name, {}))
    if "text_config" in fields:
        others["text_config"] = {**_SIZES, **others.get("text_config", {})}
    return {**{key: value for key, value in _SIZES.items() if key in fields}, **others}


def _module(name: str) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return importlib.import_module(f"mlx_lm.models.{name}")
