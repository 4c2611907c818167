"""What drafter configs mean, and what is wrong with those that are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from published import PUBLIC

from dflash_mlx.config import FULL, SLIDING, DrafterConfig, Quantization, Rope
from dflash_mlx.errors import ConfigError


def read(raw: dict[str, Any]) -> DrafterConfig:
    return DrafterConfig.from_dict(json.loads(json.dumps(raw)))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_drafters_mean_what_their_cards_say(name: str) -> None:
    raw, expected = PUBLIC[name]
    config = read(raw)
    assert {field: getattr(config, field) for field in expected} == expected


BASE = PUBLIC["Qwen3.8-27B-DFlash2"][0]


def changed(
    dflash: dict[str, Any] | None = None, without: tuple[str, ...] = (), **top: Any
) -> dict[str, Any]:
    """`BASE` with other entries; `without` removes keys inside and outside `dflash_config`."""
    raw = {**BASE, **top, "dflash_config": {**BASE["dflash_config"], **(dflash or {})}}
    for key in without:
        raw.pop(key, None)
        raw["dflash_config"].pop(key, None)
    return raw


MEANINGS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "nested block size wins": (changed({"block_size": 8}, block_size=16), "block_size", 8),
    "a block size of its own": (changed({"block_size": 32}), "block_size", 32),
    "no block size": (changed(without=("block_size",)), "block_size", 16),
    "flat theta wins": (changed(rope_theta=1e6), "rope", Rope(1e6)),
    "theta in rope_scaling": (
        changed(without=("rope_parameters",), rope_scaling={"rope_theta": 5e4}),
        "rope",
        Rope(5e4),
    ),
    "no theta": (changed(without=("rope_parameters",)), "rope", Rope(10000.0)),
    "old name of the rope type": (
        changed(rope_parameters={"type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        "rope",
        Rope(1e4, "linear", (("factor", 2.0),)),
    ),
    "yarn in rope_parameters": (
        changed(rope_parameters={"rope_type": "yarn", "factor": 4, "rope_theta": 1e4}),
        "rope",
        Rope(1e4, "yarn", (("factor", 4),)),
    ),
    "ids of the speculators format": (
        changed({"aux_hidden_state_layer_ids": [3, 9]}, without=("target_layer_ids",)),
        "target_layer_ids",
        (3, 9),
    ),
    "ids from the end": (changed({"target_layer_ids": [0, -1, -64]}), "target_layer_ids", (0, 63, 0)),
    "last id": (changed({"target_layer_ids": [63]}), "target_layer_ids", (63,)),
    "mask id 0": (changed({"mask_token_id": 0}), "mask_token_id", 0),
    "last mask id": (changed({"mask_token_id": 248319}), "mask_token_id", 248319),
    "causal": (changed(is_causal=True), "is_causal", (True,) * 5),
    "nested causal": (changed({"causal": True}, without=("is_causal",)), "is_causal", (True,) * 5),
    "nested causal, null flag": (changed({"causal": False}, is_causal=None), "is_causal", (False,) * 5),
    "no flag": (changed(without=("is_causal",)), "is_causal", (True,) * 5),
    "no layer types": (changed(without=("layer_types",)), "layer_types", (FULL,) * 5),
    "an unused window": (changed(layer_types=[FULL] * 5), "sliding_window", None),
    "use_sliding_window decides nothing": (changed(use_sliding_window=False), "sliding_window", 2048),
    "softcap at top level": (changed(final_logit_softcapping=30.0), "final_logit_softcapping", 30.0),
    "softcap 0": (changed({"final_logit_softcapping": 0}), "final_logit_softcapping", None),
    "softcap null": (changed({"final_logit_softcapping": None}), "final_logit_softcapping", None),
    "embedding scale": (changed({"input_embedding_scale": 0.5}), "input_embedding_scale", 0.5),
    "no head_dim": (changed(without=("head_dim",)), "head_dim", 160),
    "bias null": (changed(attention_bias=None), "attention_bias", False),
    "quantization": (changed(quantization={"bits": 4}), "quantization", Quantization(4, 64)),
    "quantization, group 32": (
        changed(quantization={"bits": 8, "group_size": 32, "mode": "affine"}),
        "quantization",
        Quantization(8, 32),
    ),
    "architectures rewritten": (changed(architectures=["Qwen3ForCausalLM"]), "generation", 2),
    "no architectures": (changed(without=("architectures",)), "generation", 2),
}


@pytest.mark.parametrize("case", MEANINGS)
def test_fields_are_found_where_they_may_be(case: str) -> None:
    raw, field, expected = MEANINGS[case]
    assert getattr(read(raw), field) == expected


TARGET = {"architectures": ["Qwen3_5ForConditionalGeneration"], "hidden_size": 5120, "vocab_size": 248320}

# What the message must name: the key, the value, and the remedy.
REJECTED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a target": (
        TARGET,
        ("architectures", "Qwen3_5ForConditionalGeneration", "not a DFlash drafter", "swapped"),
    ),
    "nothing": ({}, ("architectures", "[]", "not a DFlash drafter")),
    "architectures is text": (changed(architectures="DFlash2DraftModel"), ("architectures", "list")),
    "dflash_config is a list": ({**BASE, "dflash_config": [1]}, ("dflash_config", "[1]", "object")),
    "no hidden size": (changed(without=("hidden_size",)), ("hidden_size", "missing", "required")),
    "hidden size is text": (changed(hidden_size="5120"), ("hidden_size", "'5120'", "positive integer")),
    "hidden size is true": (changed(hidden_size=True), ("hidden_size", "True", "positive integer")),
    "hidden size 0": (changed(hidden_size=0), ("hidden_size", "0", "positive integer")),
    "layers is a fraction": (
        changed(num_hidden_layers=5.0),
        ("num_hidden_layers", "5.0", "positive integer"),
    ),
    "no target layers": (
        changed(without=("num_target_layers",)),
        ("num_target_layers", "missing", "required"),
    ),
    "no vocabulary": (changed(without=("vocab_size",)), ("vocab_size", "missing", "required")),
    "epsilon is text": (changed(rms_norm_eps="1e-6"), ("rms_norm_eps", "'1e-6'", "positive number")),
    "heads": (
        changed(num_key_value_heads=7),
        ("num_key_value_heads", "7", "divide num_attention_heads (32)"),
    ),
    "head_dim unstated": (
        changed(without=("head_dim",), num_attention_heads=24),
        ("head_dim", "missing", "5120", "24", "state it"),
    ),
    "block size 1": (changed({"block_size": 1}), ("block_size", "1", "at least one draft token")),
    "block size 0": (changed({"block_size": 0}), ("block_size", "0", "positive integer")),
    "block size is true": (changed({"block_size": True}), ("block_size", "True", "positive integer")),
    "block size is text": (changed({"block_size": "8"}), ("block_size", "'8'", "positive integer")),
    "no mask": (
        changed(without=("mask_token_id",), pad_token_id=248044, eos_token_id=248046),
        ("dflash_config.mask_token_id", "missing", "cannot be guessed"),
    ),
    "mask is text": (changed({"mask_token_id": "<mask>"}), ("dflash_config.mask_token_id", "'<mask>'")),
    "mask is true": (changed({"mask_token_id": True}), ("dflash_config.mask_token_id", "True")),
    "mask too high": (
        changed({"mask_token_id": 248320}),
        ("dflash_config.mask_token_id", "248320", "[0, vocab_size = 248320)"),
    ),
    "mask negative": (
        changed({"mask_token_id": -1}),
        ("dflash_config.mask_token_id", "-1", "[0, vocab_size"),
    ),
    "no ids": (
        changed(without=("target_layer_ids",)),
        ("dflash_config.target_layer_ids", "missing", "required", "differs between drafters"),
    ),
    "empty ids": (changed({"target_layer_ids": []}), ("dflash_config.target_layer_ids", "[]", "required")),
    "ids is a number": (changed({"target_layer_ids": 5}), ("dflash_config.target_layer_ids", "5", "list")),
    "ids are text": (
        changed({"target_layer_ids": ["5"]}),
        ("dflash_config.target_layer_ids", "['5']", "list"),
    ),
    "ids are booleans": (changed({"target_layer_ids": [True]}), ("target_layer_ids", "[True]", "list")),
    "id too high": (changed({"target_layer_ids": [5, 64]}), ("target_layer_ids", "[5, 64]", "[0, 64)")),
    "id too low": (
        changed({"target_layer_ids": [-65]}),
        ("target_layer_ids", "[-65]", "[0, 64)", "from the end"),
    ),
    "layer type": (
        changed(layer_types=[SLIDING] * 4 + ["chunked_attention"]),
        ("layer_types", "'chunked_attention'", FULL, SLIDING),
    ),
    "layer types of no type": (changed(layer_types=[[SLIDING]] * 5), ("layer_types", FULL)),
    "layer types is text": (changed(layer_types=SLIDING), ("layer_types", SLIDING, "list")),
    "too few layer types": (changed(layer_types=[SLIDING] * 4), ("layer_types", "4", "each of the 5 layers")),
    "no window": (changed(without=("sliding_window",)), ("sliding_window", "missing", "required")),
    "window null": (changed(sliding_window=None), ("sliding_window", "missing", "required")),
    "window 0": (changed(sliding_window=0), ("sliding_window", "0", "positive integer")),
    "causal is text": (changed(is_causal="false"), ("is_causal", "'false'", "true or false")),
    "causal is a number": (changed(is_causal=0), ("is_causal", "0", "true or false")),
    "bias is text": (changed(attention_bias="false"), ("attention_bias", "'false'", "true or false")),
    "rope type": (
        changed(rope_parameters={"rope_type": "longrope", "factor": 4.0}),
        ("rope_type", "'longrope'", "yarn"),
    ),
    "old name of a rope type": (
        changed(rope_scaling={"type": "dynamic"}, without=("rope_parameters",)),
        ("'dynamic'",),
    ),
    "rope without factor": (
        changed(rope_parameters={"rope_type": "yarn"}),
        ("rope_scaling.factor", "missing", "yarn", "positive number"),
    ),
    "rope factor 0": (
        changed(rope_parameters={"rope_type": "linear", "factor": 0}),
        ("rope_scaling.factor", "0", "positive number"),
    ),
    "rope factor is text": (
        changed(rope_parameters={"rope_type": "yarn", "factor": "32"}),
        ("rope_scaling.factor", "'32'"),
    ),
    "theta is text": (changed(rope_theta="1e7"), ("rope_theta", "'1e7'", "positive number")),
    "theta 0": (changed(rope_theta=0), ("rope_theta", "0", "positive number")),
    "theta infinite": (changed(rope_theta=float("inf")), ("rope_theta", "inf", "positive number")),
    "a rope per layer type": (
        changed(rope_parameters={SLIDING: {"rope_theta": 1e4}, FULL: {"rope_theta": 1e6}}),
        ("rope_parameters", "each layer type"),
    ),
    "rope is text": (changed(rope_scaling="yarn"), ("rope_scaling", "'yarn'", "object")),
    "conv group": (
        changed({"conv_group_size": 48}),
        ("dflash_config.conv_group_size", "48", "divide hidden_size (5120)"),
    ),
    "half a second generation": (
        changed(without=("selector_rank",)),
        ("dflash_config.selector_rank", "missing", "required"),
    ),
    "no candidates": (
        changed({"selector_top_k": 0}),
        ("dflash_config.selector_top_k", "0", "positive integer"),
    ),
    "more candidates than tokens": (
        changed({"selector_top_k": 300000}),
        ("dflash_config.selector_top_k", "300000", "vocab_size (248320)"),
    ),
    "an empty draft head": (
        changed({"draft_head_size": 0}),
        ("dflash_config.draft_head_size", "0", "positive integer"),
    ),
    "a draft head smaller than the candidates": (
        changed({"draft_head_size": 15}),
        ("dflash_config.draft_head_size", "15", "selector_top_k (16)"),
    ),
    "a draft head larger than the vocabulary": (
        changed({"draft_head_size": 248321}),
        ("dflash_config.draft_head_size", "248321", "248320"),
    ),
    "softcap negative": (
        changed(final_logit_softcapping=-30),
        ("final_logit_softcapping", "-30", "positive"),
    ),
    "softcap is text": (
        changed(final_logit_softcapping="30"),
        ("final_logit_softcapping", "'30'", "positive"),
    ),
    "multiplier 0": (changed({"output_multiplier": 0}), ("output_multiplier", "0", "positive number")),
    "multiplier is true": (
        changed({"output_multiplier": True}),
        ("output_multiplier", "True", "positive number"),
    ),
    "embedding scale is NaN": (
        changed({"input_embedding_scale": float("nan")}),
        ("input_embedding_scale", "nan"),
    ),
    "3 bits": (changed(quantization={"bits": 3, "group_size": 64}), ("quantization", "'bits': 3", "4 or 8")),
    "bits is text": (changed(quantization={"bits": "4"}), ("quantization", "'bits': '4'", "4 or 8")),
    "bits is a fraction": (changed(quantization={"bits": 4.0}), ("quantization", "4.0", "4 or 8")),
    "no bits": (changed(quantization={"group_size": 64}), ("quantization", "'group_size': 64", "4 or 8")),
    "group of 16": (
        changed(quantization={"bits": 4, "group_size": 16}),
        ("quantization", "16", "32, 64 or 128"),
    ),
    "mxfp4": (changed(quantization={"bits": 4, "mode": "mxfp4"}), ("quantization", "'mxfp4'", "affine")),
    "quantization is a number": (changed(quantization=4), ("quantization", "4", "affine")),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejections_name_key_value_and_remedy(case: str) -> None:
    raw, parts = REJECTED[case]
    with pytest.raises(ConfigError) as caught:
        read(raw)
    message = str(caught.value)
    assert message.startswith("drafter config: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_configs_are_values() -> None:
    assert read(BASE) == read(BASE)
    assert hash(read(BASE)) == hash(read(BASE))
    assert read(BASE) != read(changed({"block_size": 4}))
