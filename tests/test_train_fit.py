"""The trainer's batched forward against the drafter at work, and the data that feeds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3_5

from dflash_mlx.config import FULL, SLIDING, DrafterConfig, Rope
from dflash_mlx.drafter.model import DrafterModel
from dflash_mlx.target.target import Target
from dflash_mlx.train.data import Sample, Sampling, load_samples, respond, save_samples
from dflash_mlx.train.evaluate import evaluate_drafter
from dflash_mlx.train.fit import FitRecipe, block_states, fit_drafter, make_batch, new_drafter

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


def make_samples(target: Target) -> list[Sample]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 64, length).tolist() for length in (5, 7, 5, 7)]
    return respond(
        target.model, DRAFTER.target_layer_ids, prompts, frozenset([0]), Sampling(max_tokens=12), 0
    )


@pytest.mark.parametrize(("kind", "causal"), [(FULL, False), (SLIDING, False), (SLIDING, True)])
def test_training_blocks_equal_drafting_one_by_one(kind: str, causal: bool) -> None:
    target = make_target()
    config = replace(
        DRAFTER, num_hidden_layers=2, layer_types=(FULL, kind), is_causal=(causal,) * 2, sliding_window=6
    )
    model = DrafterModel(config)
    taps = mx.random.normal((2, 16, 64))
    anchors = mx.array([[3, 11], [8, 15]])
    first = mx.array([[5, 6], [7, 8]])
    states = block_states(model, target.embed, taps, anchors, first)
    for row in range(2):
        for block in range(2):
            context = model.make_context()
            model.extend(taps[row : row + 1, : anchors[row, block].item()], context)
            x = target.embed(mx.array([[first[row, block].item(), 1, 1, 1]]))
            expected = model.hidden_states(x, context)[0]
            np.testing.assert_allclose(states[row, block], expected, atol=2e-5, rtol=1e-4)


def test_responses_are_the_targets_own_with_the_taps_of_a_plain_pass() -> None:
    target = make_target()
    sample = next(s for s in make_samples(target) if s.prompt == 5)
    tokens = mx.array(sample.tokens)[None]
    logits = target.model(tokens)[0]
    choices = np.array(mx.argmax(logits, axis=-1))
    np.testing.assert_array_equal(sample.tokens[sample.prompt :], choices[sample.prompt - 1 : -1])
    first_layer = target.layers[0](target.embed(tokens))[0, :-1]
    np.testing.assert_allclose(sample.taps[:, :32].astype(mx.float32), first_layer, atol=2e-2, rtol=1e-2)


def test_samples_survive_a_file(tmp_path: Path) -> None:
    samples = make_samples(make_target())
    save_samples(samples, tmp_path / "samples.safetensors")
    for before, after in zip(samples, load_samples(tmp_path / "samples.safetensors"), strict=True):
        np.testing.assert_array_equal(before.tokens, after.tokens)
        assert before.prompt == after.prompt
        assert mx.array_equal(before.taps, after.taps).item()


def test_batch_marks_tokens_past_the_end_as_unknown() -> None:
    sample = Sample(np.arange(2, 12, dtype=np.int32), mx.zeros((9, 64)), 6)
    batch = make_batch([sample], 3, 4, np.random.default_rng(0))
    assert sorted(np.array(batch.anchors)[0].tolist()) == [6, 7, 8]
    for anchor, gold, known in zip(
        np.array(batch.anchors)[0], np.array(batch.gold)[0], np.array(batch.known)[0], strict=True
    ):
        assert known.tolist() == [anchor + slot < 10 for slot in range(4)]
        np.testing.assert_array_equal(gold[known], np.arange(4)[known] + anchor + 2)


def test_fitting_lets_the_drafter_learn_its_samples() -> None:
    target = make_target()
    samples = make_samples(target)
    model = new_drafter(DRAFTER, target, seed=0)
    before = evaluate_drafter(model, target, samples)
    fit_drafter(model, target, samples, FitRecipe(steps=60, rows=4, anchors=8, peak_rate=1e-2, warmup=5))
    after = evaluate_drafter(model, target, samples)
    assert after.tau > max(before.tau, 2.0)
    assert all(0 <= share <= 1 for share in after.slots + after.recall)
