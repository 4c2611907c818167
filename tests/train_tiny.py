"""A random hybrid target and drafter of a few thousand weights, for the tests of the trainer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3_5

from dflash_mlx.config import FULL, DrafterConfig, Rope
from dflash_mlx.target.target import Target
from dflash_mlx.train.respond import GREEDY, Responder, Sampling
from dflash_mlx.train.shards import Sample

TARGET: dict[str, Any] = {
    "model_type": "qwen3_5",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}
DRAFTER = DrafterConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    block_size=4,
    mask_token_id=1,
    target_layer_ids=(0, 2),
    num_target_layers=4,
    rope=Rope(10000.0),
    layer_types=(FULL,),
    is_causal=(False,),
    conv_kernel_size=2,
    conv_group_size=8,
    selector_rank=4,
    selector_top_k=4,
)


def make_target() -> Target:
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(dict(TARGET)))
    mx.eval(model.parameters())
    return Target(model)


def make_samples(target: Target, sampling: Sampling | None = None) -> list[Sample]:
    """Two responses to prompts of 5 tokens, two to prompts of 7; greedy and 12 tokens long by default."""
    rng = np.random.default_rng(0)
    sampling = sampling or Sampling(max_tokens=12, greedy_share=GREEDY.greedy_share)
    with Responder(target, DRAFTER.target_layer_ids, frozenset([0])) as responder:
        return [
            sample
            for length in (5, 7)
            for sample in responder.respond(rng.integers(2, 64, (2, length)).tolist(), sampling, seed=0)
        ]
