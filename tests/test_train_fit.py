"""The trainer's batched forward against the drafter at work, the loss, and what a fit leaves and takes up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from train_tiny import DRAFTER, make_samples, make_target

from dflash_mlx.config import FULL, SLIDING
from dflash_mlx.drafter.load import load_drafter
from dflash_mlx.drafter.model import DrafterModel
from dflash_mlx.errors import UsageError
from dflash_mlx.train.blocks import Batch, block_states, make_batch
from dflash_mlx.train.evaluate import evaluate_drafter, walkable
from dflash_mlx.train.fit import Fit, FitRecipe, fit_drafter, most_used, save_drafter
from dflash_mlx.train.initial import new_drafter
from dflash_mlx.train.losses import Draws, Goal, LossVocabulary, block_loss, slot_weights
from dflash_mlx.train.shards import Sample

QUICK = FitRecipe(steps=8, rows=4, anchors=8, peak_rate=1e-2, warmup=2)


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


def test_batch_marks_tokens_past_the_end_as_unknown() -> None:
    states = np.arange(9, dtype=np.uint16)[:, None].repeat(64, axis=1)
    sample = Sample(np.arange(2, 12, dtype=np.int32), states, states[:, :32], 6)
    batch = make_batch([sample], 3, 4, np.random.default_rng(0))
    assert sorted(np.array(batch.anchors)[0].tolist()) == [6, 7, 8]
    for anchor, gold, known in zip(
        np.array(batch.anchors)[0], np.array(batch.gold)[0], np.array(batch.known)[0], strict=True
    ):
        assert known.tolist() == [anchor + slot < 10 for slot in range(4)]
        np.testing.assert_array_equal(gold[known], np.arange(4)[known] + anchor + 2)


def test_a_batch_brings_the_state_that_chose_each_slots_token() -> None:
    target = make_target()
    samples = [s for s in make_samples(target) if s.prompt == 5]
    batch = make_batch(samples, 4, DRAFTER.block_size, np.random.default_rng(0))
    chosen = mx.argmax(target.head(batch.final), axis=-1)
    agree = np.array(chosen == batch.gold[:, :, 1:])
    assert agree[np.array(batch.known[:, :, 1:])].mean() > 0.9  # greedy; bfloat16 may turn a near tie


def test_the_losses_vocabulary_holds_the_commonest_ids_the_steps_own_and_others() -> None:
    vocabulary = LossVocabulary(np.array([40, 3, 17, 9]), 64, Goal(common=3, others=5))
    gold = mx.array([[[9, 3], [60, 60]]])
    draws = vocabulary.draw(gold, np.random.default_rng(0))
    ids = np.array(draws.ids)
    assert {40, 3, 17, 9, 60} <= set(ids.tolist())
    assert 8 <= len(ids) <= 10
    assert sorted(set(ids.tolist())) == ids.tolist()
    np.testing.assert_array_equal(ids[np.array(draws.gold)], gold)
    whole = LossVocabulary(np.arange(60), 64, Goal(common=2048, others=512))
    assert len(whole.draw(gold, np.random.default_rng(0)).ids) == 64


def test_the_share_of_slots_without_edges_is_the_goals() -> None:
    vocabulary = LossVocabulary(np.arange(64), 64, Goal(edge_dropout=0.3))
    edges = np.array(vocabulary.draw(mx.zeros((8, 64, 4), dtype=mx.int32), np.random.default_rng(0)).edges)
    assert edges.shape == (8, 64, 4)
    assert 0.65 < edges.mean() < 0.75


@pytest.mark.parametrize("soft", [0.0, 0.3, 1.0])
def test_over_the_whole_vocabulary_the_loss_is_cross_entropy_with_token_and_target(soft: float) -> None:
    target = make_target()
    model = new_drafter(DRAFTER, target, seed=0)
    batch = make_batch(make_samples(target), 6, DRAFTER.block_size, np.random.default_rng(0))
    goal = Goal(edge_dropout=1.0, soft=soft, states=0.0, prefix=0.0)
    loss = block_loss(model, target, batch, _whole_vocabulary(batch, goal), goal)
    hidden = block_states(model, target.embed, batch.taps, batch.anchors, batch.gold[:, :, 0])[:, :, 1:]
    log_ours = np.log(_softmax(target.head(hidden)))
    token = np.eye(64)[np.array(batch.gold)[:, :, 1:]]
    wanted = soft * _softmax(target.head(batch.final)) + (1 - soft) * token
    weight = np.array(batch.known)[:, :, 1:] * np.exp(-np.arange(3) / goal.gamma)
    expected = -((wanted * log_ours).sum(-1) * weight).sum() / weight.sum()
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_without_dropout_the_loss_counts_the_selectors_edges() -> None:
    target = make_target()
    model = new_drafter(DRAFTER, target, seed=0)
    selector = model.candidate_selector
    selector.successor_codebook = mx.random.normal(selector.successor_codebook.shape)
    batch = make_batch(make_samples(target), 6, DRAFTER.block_size, np.random.default_rng(0))
    goal = Goal(edge_dropout=0.0, soft=0.0, states=0.0, prefix=0.0)
    loss = block_loss(model, target, batch, _whole_vocabulary(batch, goal), goal)
    hidden = block_states(model, target.embed, batch.taps, batch.anchors, batch.gold[:, :, 0])[:, :, 1:]
    flat = hidden.reshape(-1, 32)
    before = batch.gold[:, :, :-1].reshape(-1, 1)
    everything = mx.broadcast_to(mx.arange(64), (len(flat), 64))
    edges = selector.edges(flat, before, everything)[:, 0].reshape(*batch.gold[:, :, 1:].shape, 64)
    log_ours = np.log(_softmax(target.head(hidden) + edges))
    right = np.take_along_axis(log_ours, np.array(batch.gold)[:, :, 1:, None], axis=-1)[..., 0]
    weight = np.array(batch.known)[:, :, 1:] * np.exp(-np.arange(3) / goal.gamma)
    assert loss.item() == pytest.approx(-(right * weight).sum() / weight.sum(), rel=1e-4)


def test_the_loss_counts_how_far_the_states_are_from_the_targets() -> None:
    target = make_target()
    model = new_drafter(DRAFTER, target, seed=0)
    batch = make_batch(make_samples(target), 6, DRAFTER.block_size, np.random.default_rng(0))
    near, far = (
        block_loss(model, target, batch, _whole_vocabulary(batch, goal), goal).item()
        for goal in (Goal(states=0.0, prefix=0.0), Goal(states=3.0, prefix=0.0))
    )
    hidden = np.array(block_states(model, target.embed, batch.taps, batch.anchors, batch.gold[:, :, 0]))
    theirs = np.array(batch.final)
    known = np.array(batch.known)[:, :, 1:]
    assert not known.all()
    weight = known * np.exp(-np.arange(3) / Goal.gamma)
    distance = ((hidden[:, :, 1:] - theirs) ** 2).mean(-1) / (theirs[known] ** 2).mean()
    assert far - near == pytest.approx(3.0 * (distance * weight).sum() / weight.sum(), rel=1e-3)


def _whole_vocabulary(batch: Batch, goal: Goal) -> Draws:
    vocabulary = LossVocabulary(np.arange(64), 64, goal)
    return vocabulary.draw(batch.gold[:, :, 1:], np.random.default_rng(0))


def _softmax(logits: mx.array) -> np.ndarray:
    powers = np.exp(np.array(logits).astype(np.float64))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def test_a_slot_counts_as_far_as_the_slots_before_it_are_right() -> None:
    probabilities = mx.log(mx.array([[0.5, 0.1, 1.0]]))
    weights = slot_weights(probabilities, Goal(gamma=1e9, prefix=1.0))
    np.testing.assert_allclose(weights, [[1.0, 0.5, 0.05]], rtol=1e-5)
    np.testing.assert_allclose(slot_weights(probabilities, Goal(gamma=1.0, prefix=0.0))[0, 1], np.exp(-1))


def test_fitting_lets_the_drafter_learn_its_samples() -> None:
    target = make_target()
    samples = make_samples(target)
    model = new_drafter(DRAFTER, target, seed=0)
    before = evaluate_drafter(model, target, samples)
    fit_drafter(model, target, samples, replace(QUICK, steps=60, warmup=5))
    after = evaluate_drafter(model, target, samples)
    assert after.tau > max(before.tau, 2.0)
    assert all(0 <= share <= 1 for share in after.slots + after.recall)


def test_replies_that_are_too_short_are_refused() -> None:
    target = make_target()
    samples = make_samples(target)  # 12 tokens each
    short = [replace(s, tokens=s.tokens[: s.prompt + 3]) for s in samples]
    assert walkable([*short, samples[0]], 4) == [samples[0]]
    assert walkable(short, 3) == short
    with pytest.raises(UsageError, match=r"the longest held-out reply has 3 tokens, .* blocks of 4"):
        walkable(short, 4)
    ended = [replace(s, tokens=s.tokens[: s.prompt + 1]) for s in samples]
    with pytest.raises(UsageError, match="each of the 4 replies to learn from ends with its first token"):
        Fit(new_drafter(DRAFTER, target, seed=0), target, ended, QUICK)


def test_a_fit_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    target = make_target()
    samples = make_samples(target)
    whole = Fit(new_drafter(DRAFTER, target, seed=0), target, samples, QUICK)
    losses = [point.loss for point in whole.run(every=1)]
    first = Fit(new_drafter(DRAFTER, target, seed=0), target, samples, QUICK)
    points = first.run(every=1)
    first.points = [next(points) for _ in range(3)]
    first.save(tmp_path / "checkpoint.safetensors")
    second = Fit(new_drafter(DRAFTER, target, seed=5), target, samples, QUICK)
    second.restore(tmp_path / "checkpoint.safetensors")
    assert second.points == first.points
    assert [point.loss for point in second.run(every=1)] == losses[3:]
    for (name, ours), (_, theirs) in zip(
        tree_flatten(second.model.parameters()), tree_flatten(whole.model.parameters()), strict=True
    ):
        assert mx.array_equal(ours, theirs).item(), name  # type: ignore[arg-type]  # arrays here


def test_every_epoch_goes_through_all_samples() -> None:
    target = make_target()
    samples = make_samples(target)
    fit = Fit(new_drafter(DRAFTER, target, seed=0), target, samples, replace(QUICK, rows=3))
    places = [place for step in range(4) for place in fit._order(step)]
    assert sorted(places[:4]) == sorted(places[4:8]) == sorted(places[8:]) == [0, 1, 2, 3]


def test_a_drafter_with_a_draft_head_survives_its_file_and_proposes_from_it_alone(tmp_path: Path) -> None:
    target = make_target()
    samples = make_samples(target)
    config = replace(DRAFTER, draft_head_size=20)
    model = new_drafter(config, target, seed=0)
    model.draft_head_ids = mx.array(most_used(samples, 20))
    fit_drafter(model, target, samples, replace(QUICK, steps=30))
    raw = {
        "architectures": ["DFlash2DraftModel"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "num_target_layers": 4,
        "is_causal": False,
        "dflash_config": {
            "block_size": 4,
            "mask_token_id": 1,
            "target_layer_ids": [0, 2],
            "conv_kernel_size": 2,
            "conv_group_size": 8,
            "selector_rank": 4,
            "selector_top_k": 4,
            "draft_head_size": 20,
        },
    }
    save_drafter(model, raw, tmp_path)
    loaded = load_drafter(tmp_path)
    assert loaded.config == replace(config, is_causal=loaded.config.is_causal)
    assert loaded.head_ids is not None
    assert mx.array_equal(loaded.head_ids, model.draft_head_ids).item()
    report = evaluate_drafter(loaded, target, samples)
    assert report.tau == pytest.approx(evaluate_drafter(model, target, samples).tau, abs=0.3)


def test_the_draft_head_takes_the_most_used_ids_then_the_lowest() -> None:
    tokens = np.array([9, 9, 50, 50, 50, 50, 7, 30, 30], dtype=np.int32)
    empty = np.zeros((8, 1), dtype=np.uint16)
    sample = Sample(tokens, empty, empty, 2)
    assert most_used([sample], 2).tolist() == [30, 50]
    assert most_used([sample], 5).tolist() == [0, 1, 7, 30, 50]
