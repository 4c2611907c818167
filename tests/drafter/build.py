"""Small random drafters, the two ends of a target, and a look at what a proposal computes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from dflash_mlx.config import FULL, SLIDING, DrafterConfig
from dflash_mlx.drafter import Drafter, DrafterModel
from dflash_mlx.drafter.selector import CandidateSelector

Weights = dict[str, mx.array]

MASK = 7
SECOND_GENERATION = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 16,
}
LAYERS = {
    "full": [FULL] * 3,
    "sliding": [SLIDING] * 3,
    "mixed": [SLIDING, FULL, SLIDING],
}


def raw_config(
    generation: int = 2, dflash: Mapping[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """A config.json as published; `dflash` and `changes` replace entries in and beside `dflash_config`."""
    nested = {"block_size": 6, "mask_token_id": MASK, "target_layer_ids": [0, 3, 6]}
    return {
        "architectures": ["DFlash2DraftModel" if generation == 2 else "DFlashDraftModel"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 160,
        "num_target_layers": 7,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "dflash_config": {
            **nested,
            **(SECOND_GENERATION if generation == 2 else {}),
            **(dflash or {}),
        },
        **changes,
    }


def config(generation: int = 2, dflash: Mapping[str, Any] | None = None, **changes: Any) -> DrafterConfig:
    return DrafterConfig.from_dict(raw_config(generation, dflash, **changes))


def random_weights(config: DrafterConfig, seed: int = 0) -> Weights:
    """Tensors of a size at which every part of the network has a say in the result."""
    rng = np.random.default_rng(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return 1.5 + 0.3 * noise  # attention that prefers some keys
        if name.endswith("norm.weight"):
            return 1 + 0.2 * noise
        if name.endswith("base_kernel"):
            return 0.7 + 0.3 * noise
        if name.endswith(("codebook", "bias")):
            return 0.5 * noise
        gain = 0.3 if "kernel_projection" in name else 1.0
        return gain * noise / np.sqrt(shape[-1])

    parameters = sorted(dict(tree_flatten(DrafterModel(config).parameters())).items())
    return {name: mx.array(tensor(name, old.shape).astype(np.float32)) for name, old in parameters}


def network(config: DrafterConfig, weights: Weights | None = None) -> DrafterModel:
    model = DrafterModel(config)
    model.load_weights(list((weights or random_weights(config)).items()))
    model.eval()
    return model


def random_taps(config: DrafterConfig, rows: int, seed: int = 1) -> mx.array:
    """Tapped hidden states, `[1, rows, taps * H]`."""
    width = len(config.target_layer_ids) * config.hidden_size
    noise = np.random.default_rng(seed).standard_normal((1, rows, width))
    return mx.array(noise.astype(np.float32))


class Ends:
    """What the drafter borrows from its target: the embedding, with its scale, and the head."""

    def __init__(self, config: DrafterConfig, embed_scale: float = 1.0, seed: int = 2) -> None:
        rng = np.random.default_rng(seed)
        shape = config.vocab_size, config.hidden_size
        self.embed_scale = embed_scale
        self.embed_tokens = nn.Embedding(*shape)
        self.embed_tokens.weight = mx.array(rng.standard_normal(shape).astype(np.float32))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = mx.array((rng.standard_normal(shape) / 8).astype(np.float32))

    def embed(self, ids: mx.array) -> mx.array:
        return self.embed_tokens(ids) * self.embed_scale


@dataclass
class Seen:
    """What one proposal computed for its draft slots; logits only where a selector receives them."""

    tokens: list[int]
    finite: bool
    hidden: np.ndarray
    logits: np.ndarray | None
    blocks: list[list[int]] = field(default_factory=list)


def propose(drafter: Drafter, ends: Ends, anchor: int, block_size: int) -> Seen:
    blocks: list[list[int]] = []
    hidden: list[mx.array] = []

    def embed(ids: mx.array) -> mx.array:
        blocks.extend(np.array(ids).tolist())
        return ends.embed(ids)

    def head(rows: mx.array) -> mx.array:
        hidden.append(rows)
        return ends.lm_head(rows)

    walk = patch.object(CandidateSelector, "walk", autospec=True, side_effect=CandidateSelector.walk)
    with walk as walked:
        draft = drafter.propose(anchor, block_size, embed, head)
    logits = np.array(walked.call_args.args[2]) if walked.called else None
    (rows,) = hidden
    return Seen(np.array(draft.tokens).tolist(), bool(draft.finite.item()), np.array(rows[0]), logits, blocks)


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Bit for bit with MLX's own BLAS, where a row's bits do not depend on the rows beside it."""
    if sys.platform == "linux":
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def save(folder: Path, raw: object, weights: Weights, name: str = "model.safetensors") -> Path:
    """Write a checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(raw if isinstance(raw, str) else json.dumps(raw))
    mx.save_safetensors(str(folder / name), weights)
    return folder
