"""The same numbers as the authors' implementation, and as the method written out densely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from dflash.model_mlx import DFlash2DraftModel, DFlashConfig, DFlashDraftModel

from dflash_mlx.config import DrafterConfig
from dflash_mlx.drafter import Drafter
from drafter import dense
from drafter.build import (
    LAYERS,
    Ends,
    Weights,
    config,
    network,
    propose,
    random_taps,
    random_weights,
    raw_config,
)

TOLERANCE = 5e-5

# Rows committed before each proposal, the prompt first. The authors' rotating cache loses its order
# when a single row arrives beyond the window, so `BEYOND` and `LONG_PROMPT` have none there.
ANY = (9, 1, 3, 1, 6)
BEYOND = (9, 1, 3, 2, 6)
LONG_PROMPT = (40, 2, 6)

CONTEXTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "full": ({"layer_types": LAYERS["full"]}, ANY),
    "within the window": ({"layer_types": LAYERS["sliding"], "sliding_window": 64}, ANY),
    "beyond the window": ({"layer_types": LAYERS["sliding"], "sliding_window": 12}, BEYOND),
    "prompt beyond the window": ({"layer_types": LAYERS["sliding"], "sliding_window": 12}, LONG_PROMPT),
    "mixed": ({"layer_types": LAYERS["mixed"], "sliding_window": 12}, BEYOND),
}
CAUSAL: dict[str, dict[str, Any]] = {
    "unstated": {},
    "causal": {"is_causal": True},
    "not causal": {"is_causal": False},
}


class Theirs:
    """The authors' drafter with our weights, fed the way their loop feeds it."""

    def __init__(
        self,
        ours: DrafterConfig,
        weights: Weights,
        ends: Ends,
        is_causal: bool | None = None,
        rope_scaling: dict[str, Any] | None = None,
    ) -> None:
        same = {name: getattr(ours, name) for name in SHARED_FIELDS}
        theirs = DFlashConfig(
            **same, rope_theta=ours.rope.theta, rope_scaling=rope_scaling, is_causal=is_causal
        )
        self.model = (DFlash2DraftModel if ours.selector_rank else DFlashDraftModel)(theirs)
        renamed = {
            f"{name}.weight" if name.endswith("codebook") else name: tensor
            for name, tensor in weights.items()
        }
        self.model.load_weights(list(renamed.items()))
        self.model.bind(ends)
        self.cache = self.model.make_cache()

    def propose(
        self, taps: mx.array, anchor: int, block_size: int
    ) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Hidden states, logits and tokens; `taps` are of the rows committed since the last call."""
        block = mx.array([[anchor] + [self.model.config.mask_token_id] * (block_size - 1)])
        hidden = self.model.hidden_states(block, taps, self.cache, 1)
        logits = self.model.compute_logits(hidden)
        if isinstance(self.model, DFlash2DraftModel):
            tokens, _, _ = self.model.candidate_selector.select(hidden, logits, block[:, 0], 0.0)
        else:
            tokens = mx.argmax(logits, axis=-1)
        return np.array(hidden[0]), np.array(logits[0]), tokens[0].tolist()


SHARED_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "block_size",
    "target_layer_ids",
    "num_target_layers",
    "mask_token_id",
    "layer_types",
    "sliding_window",
    "final_logit_softcapping",
    "input_embedding_scale",
    "output_multiplier",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)


def check_cycles(raw: Mapping[str, Any], commits: tuple[int, ...], embed_scale: float = 1.0) -> None:
    ours = DrafterConfig.from_dict(raw)
    weights, ends = random_weights(ours), Ends(ours, embed_scale)
    drafter = Drafter(network(ours, weights))
    theirs = Theirs(ours, weights, ends, raw.get("is_causal"), raw.get("rope_scaling"))
    for cycle, rows in enumerate(commits):
        taps, anchor, block_size = random_taps(ours, rows, seed=cycle), 11 * cycle, 2 + (cycle + 4) % 5
        drafter.extend(taps)
        seen = propose(drafter, ends, anchor, block_size)
        hidden, logits, tokens = theirs.propose(taps, anchor, block_size)
        np.testing.assert_allclose(seen.hidden, hidden, rtol=0, atol=TOLERANCE)
        if seen.logits is not None:
            np.testing.assert_allclose(seen.logits, logits, rtol=0, atol=TOLERANCE)
        assert seen.tokens == tokens
        assert len(tokens) == block_size - 1


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("context", CONTEXTS)
def test_equals_the_authors(context: str, causal: str, generation: int) -> None:
    layers, commits = CONTEXTS[context]
    check_cycles(raw_config(generation, **layers, **CAUSAL[causal]), commits)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
VARIANTS: dict[str, dict[str, Any]] = {
    "softcap": {"dflash": {"final_logit_softcapping": 1.5}},
    "softcap at top level": {"final_logit_softcapping": 1.5},
    "output multiplier": {"dflash": {"output_multiplier": 0.196}},
    "multiplier and softcap": {"dflash": {"output_multiplier": 3.0, "final_logit_softcapping": 2.0}},
    "input embedding scale": {"dflash": {"input_embedding_scale": 0.25}},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads as heads": {"num_key_value_heads": 4},
    "three taps, wide groups": {"dflash": {"conv_kernel_size": 3, "conv_group_size": 32}},
    "every token a candidate": {"dflash": {"selector_top_k": 160}},
    "one candidate": {"dflash": {"selector_top_k": 1}},
    "yarn": {"rope_scaling": YARN},
    "yarn with betas": {"rope_scaling": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_authors_with(variant: str) -> None:
    check_cycles(raw_config(**VARIANTS[variant]), ANY)


@pytest.mark.parametrize("generation", [1, 2])
def test_equals_the_authors_with_a_scaled_embedding(generation: int) -> None:
    raw = raw_config(generation, {"input_embedding_scale": 0.5})
    check_cycles(raw, ANY, embed_scale=64**0.5)


@pytest.mark.parametrize(
    "variant", ["softcap", "output multiplier", "input embedding scale", "yarn", "linear rope", "llama3 rope"]
)
def test_variant_changes_the_result(variant: str) -> None:
    """What the comparisons above would not notice if both sides ignored it."""
    plain, other = config(), config(**VARIANTS[variant])
    seen = []
    for each in (plain, other):
        drafter = Drafter(network(each, random_weights(plain)))
        drafter.extend(random_taps(plain, 20))
        seen.append(propose(drafter, Ends(plain), 3, 6))
    before, after = (s.logits for s in seen)
    assert before is not None
    assert after is not None
    assert np.abs(before - after).max() > 0.01


# --- against the method written out densely ----------------------------------------------------

DENSE: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"layer_types": LAYERS["sliding"], "sliding_window": 12},
    "sliding, not causal": {"layer_types": LAYERS["sliding"], "sliding_window": 12, "is_causal": False},
    "mixed": {"layer_types": LAYERS["mixed"], "sliding_window": 12},
    "attention bias": {"attention_bias": True},
    "attention bias, mixed": {"attention_bias": True, "layer_types": LAYERS["mixed"], "sliding_window": 12},
}


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("case", DENSE)
def test_equals_a_dense_recomputation(case: str, generation: int) -> None:
    """Also where a single row arrives beyond the window, and with biases."""
    ours = config(generation, **DENSE[case])
    weights, ends = random_weights(ours), Ends(ours)
    drafter = Drafter(network(ours, weights))
    taps = random_taps(ours, 0)
    for cycle, rows in enumerate((13, 1, 4, 1, 20, 1)):
        committed = random_taps(ours, rows, seed=cycle)
        taps = mx.concatenate([taps, committed], axis=1)
        drafter.extend(committed)
        seen = propose(drafter, ends, cycle, 6)
        expected = dense.propose(ours, weights, ends, taps, cycle, 6)
        np.testing.assert_allclose(seen.hidden, expected.hidden, rtol=0, atol=TOLERANCE)
        if seen.logits is not None:
            np.testing.assert_allclose(seen.logits, expected.logits, rtol=0, atol=TOLERANCE)
        assert seen.tokens == expected.tokens


def test_the_authors_lose_the_order_of_a_full_window() -> None:
    """Why no comparison with them commits a single row beyond the window: there, the dense result is ours."""
    ours = config(layer_types=LAYERS["sliding"], sliding_window=12, is_causal=False)
    weights, ends = random_weights(ours), Ends(ours)
    drafter = Drafter(network(ours, weights))
    theirs = Theirs(ours, weights, ends, is_causal=False)
    errors = []
    for upto in (13, 14):
        taps = random_taps(ours, 14)[:, :upto]
        expected = dense.propose(ours, weights, ends, taps, 5, 6).hidden
        new = taps if upto == 13 else taps[:, 13:]
        drafter.extend(new)
        np.testing.assert_allclose(propose(drafter, ends, 5, 6).hidden, expected, rtol=0, atol=TOLERANCE)
        errors.append(np.abs(theirs.propose(new, 5, 6)[0] - expected).max())
    assert errors[0] < TOLERANCE
    assert errors[1] > 100 * TOLERANCE


def test_the_walk_differs_from_the_best_token_of_each_slot() -> None:
    ours = config()
    drafter = Drafter(network(ours))
    drafter.extend(random_taps(ours, 5))
    seen = propose(drafter, Ends(ours), 1, 6)
    assert seen.logits is not None
    assert seen.tokens != seen.logits.argmax(-1).tolist()
