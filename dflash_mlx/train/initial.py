"""Where a drafter's training starts: its config, and weights from what the target already knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from dflash_mlx.config import DrafterConfig
from dflash_mlx.drafter.model import DrafterModel
from dflash_mlx.errors import UsageError
from dflash_mlx.target.target import Target
from dflash_mlx.train.job import Job, tapped_layers
from dflash_mlx.train.respond import final_norm

CONV_GROUP = 16
TOP_K = 16


def drafter_config(job: Job, target: Target, raw: Mapping[str, Any], mask_token_id: int) -> dict[str, Any]:
    """The config.json of a new drafter, in the public layout.

    Args:
        raw: the target's own config.json; its sizes are taken over, so that its layers' weights fit.
        mask_token_id: a token that never occurs in text.
    """
    text = raw.get("text_config", raw)
    hidden = target.hidden_size
    heads = int(text.get("num_attention_heads") or max(hidden // 64, 1))
    rope = text.get("rope_parameters") or {}
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": job.layers,
        "hidden_size": hidden,
        "intermediate_size": int(text.get("intermediate_size") or 3 * hidden),
        "num_attention_heads": heads,
        "num_key_value_heads": int(text.get("num_key_value_heads") or heads),
        "head_dim": int(text.get("head_dim") or hidden // heads),
        "vocab_size": target.vocab_size,
        "rms_norm_eps": float(text.get("rms_norm_eps", 1e-6)),
        "max_position_embeddings": int(text.get("max_position_embeddings", 32768)),
        "attention_bias": False,
        "rope_theta": float(text.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        "final_logit_softcapping": text.get("final_logit_softcapping"),
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "num_target_layers": len(target.layers),
        "layer_types": ["full_attention"] * job.layers,
        "is_causal": False,
        "dflash_config": {
            "block_size": job.block_size,
            "mask_token_id": mask_token_id,
            "target_layer_ids": tapped_layers(len(target.layers)),
            "conv_kernel_size": 2,
            "conv_group_size": next(g for g in (CONV_GROUP, 8, 4, 2, 1) if hidden % g == 0),
            "selector_rank": job.rank,
            "selector_top_k": TOP_K,
            **({"draft_head_size": job.draft_head} if job.draft_head else {}),
        },
    }


def choose_mask(tokenizer: Any, used: frozenset[int]) -> int:
    """A special token to stand for what is not known yet: the tokenizer's own mask, or an unused one.

    Raises:
        UsageError: every special token occurs in prompts or ends them.
    """
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None:
        return int(own)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    free = special - used - {int(i) for i in tokenizer.eos_token_ids} - {tokenizer.bos_token_id}
    if not free:
        raise UsageError("this target's tokenizer has no special token to spare for the drafter's mask")
    return max(free)


def new_drafter(config: DrafterConfig, target: Target, seed: int) -> DrafterModel:
    """A drafter that starts from what the target already knows.

    Layers take what fits in shape from the target's last layers, the final norm is the target's, and fc
    passes on the last tap. Convolutions start as the identity and edges near zero.
    """
    mx.random.seed(seed)
    model = DrafterModel(config)
    sources = target.layers[-config.num_hidden_layers :]
    for layer, source in zip(model.layers[-len(sources) :], sources, strict=True):
        _copy_fitting(layer, source)
    for layer in model.layers:
        for name in ("attention_conv", "mlp_conv"):
            if name in layer:
                projection = layer[name].kernel_projection
                projection.weight = mx.zeros_like(projection.weight)
    _copy_fitting(model.norm, final_norm(target))
    hidden = config.hidden_size
    mixed = mx.random.normal(model.fc.weight.shape) * (0.1 * hidden**-0.5)
    mixed[:, -hidden:] += mx.eye(hidden)
    model.fc.weight = mixed
    if config.selector_rank:
        selector = model.candidate_selector
        selector.predecessor_codebook = mx.random.normal(selector.predecessor_codebook.shape) * 0.5
        selector.successor_codebook = mx.random.normal(selector.successor_codebook.shape) * 0.02
    mx.eval(model.parameters())
    return model


def _copy_fitting(module: nn.Module, source: nn.Module) -> None:
    """Copy parameters of `source` whose name and shape `module` has."""
    theirs: dict[str, mx.array] = dict(tree_flatten(source.parameters()))
    ours: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    fitting = [(k, v.astype(mx.float32)) for k, v in theirs.items() if k in ours and ours[k].shape == v.shape]
    module.load_weights(fitting, strict=False)
