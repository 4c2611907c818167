"""What a drafter sees of the conversation: the same rows at the same positions, however they arrived."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.config import FULL, SLIDING, DrafterConfig
from dflash_mlx.drafter import Drafter
from dflash_mlx.drafter.context import LayerContext
from dflash_mlx.drafter.model import DrafterAttention, block_mask
from drafter.build import LAYERS, MASK, Ends, assert_same, config, network, propose, random_taps

ROWS = 24
SPLITS = {
    "row by row": [1] * 24,
    "chunks": [10, 10, 4],
    "a prompt, then single rows": [16, *[1] * 8],
    "a prompt, then cycles": [8, 2, 1, 6, 1, 1, 4, 1],
    "more than the window at the end": [3, 21],
}


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that grow every few rows, as those of long conversations do."""
    monkeypatch.setattr(LayerContext, "step", 5)
    monkeypatch.setattr(LayerContext, "history", 3)


WINDOWED: dict[str, dict[str, Any]] = {
    "full": {},
    "window not reached": {"layer_types": LAYERS["sliding"], "sliding_window": 100},
    "window": {"layer_types": LAYERS["sliding"], "sliding_window": 9},
    "window, not causal": {"layer_types": LAYERS["sliding"], "sliding_window": 9, "is_causal": False},
    "mixed": {"layer_types": LAYERS["mixed"], "sliding_window": 17},
    "no context in the window": {"layer_types": LAYERS["mixed"], "sliding_window": 1},
}


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("layers", WINDOWED)
@pytest.mark.parametrize("split", SPLITS)
def test_drafts_do_not_depend_on_how_the_context_arrived(split: str, layers: str) -> None:
    """Bit for bit, and whether or not blocks were drafted in between."""
    ours = config(**WINDOWED[layers])
    model, ends, taps = network(ours), Ends(ours), random_taps(ours, ROWS)
    at_once, in_parts, with_drafts, along = (Drafter(model) for _ in range(4))
    at_once.extend(taps)
    start = 0
    for rows in SPLITS[split]:
        part = taps[:, start : start + rows]
        in_parts.extend(part)
        with_drafts.extend(part)
        mx.eval(with_drafts.propose(start, 2 + start % 5, ends.embed, ends.lm_head).tokens)
        mx.eval(along.propose(start, 2 + start % 5, ends.embed, ends.lm_head, taps=part).tokens)
        start += rows
    assert start == ROWS
    expected = propose(at_once, ends, 5, 6)
    for drafter in (in_parts, with_drafts, along):
        seen = propose(drafter, ends, 5, 6)
        assert_same(seen.hidden, expected.hidden)
        assert seen.tokens == expected.tokens


@pytest.mark.parametrize("kind", LAYERS)
def test_the_context_matters(kind: str) -> None:
    """Else nothing above would be proven."""
    ours = config(layer_types=LAYERS[kind], sliding_window=9)
    taps = random_taps(ours, ROWS)
    seen = []
    for rows in (taps, taps[:, 1:], taps[:, :-1]):
        drafter = Drafter(network(ours))
        drafter.extend(rows)
        seen.append(propose(drafter, Ends(ours), 5, 6).hidden)
    assert np.abs(seen[0] - seen[2]).max() > 0.01
    assert (np.abs(seen[0] - seen[1]).max() > 0.01) == (FULL in ours.layer_types)


# --- memory ------------------------------------------------------------------------------------


def context_bytes(drafter: Drafter) -> int:
    return sum(array.nbytes for array in drafter.arrays)


@pytest.mark.parametrize("step", [1, 7, 500, 3000])
def test_a_windowed_context_stays_bounded(step: int) -> None:
    ours = config(1, layer_types=[SLIDING], num_hidden_layers=1, sliding_window=64)
    drafter, ends = Drafter(network(ours)), Ends(ours)
    taps = random_taps(ours, step)
    largest = 0
    for count in range(-(-3000 // step)):
        drafter.extend(taps)
        if count % 20 == 0:
            mx.eval(drafter.propose(1, 6, ends.embed, ends.lm_head).tokens, drafter.arrays)
        largest = max(largest, context_bytes(drafter))
    assert drafter.context.position >= 3000
    assert drafter.context.layers[0].length == 63
    row_bytes = 2 * ours.num_key_value_heads * ours.head_dim * 4
    kept = 63 + LayerContext.history
    assert largest <= row_bytes * (kept + max(6, min(step, kept)) + LayerContext.step)


@pytest.mark.parametrize("arrival", [[40], [7] * 20, [300, 5], [90, 1, 1, 1], [30, 200, 1]])
def test_rows_that_left_the_window_come_back(arrival: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerContext, "history", 64)
    ours = config(1, layer_types=[SLIDING], num_hidden_layers=1, sliding_window=16)
    ends, total = Ends(ours), sum(arrival)
    taps = random_taps(ours, total)

    def after(parts: list[int]) -> Drafter:
        drafter, start = Drafter(network(ours)), 0
        for part in parts:
            drafter.extend(taps[:, start : start + part])
            start += part
        return drafter

    def visible(drafter: Drafter) -> list[np.ndarray]:
        [layer] = drafter.context.layers
        keys, values = layer.keys, layer.values
        assert keys is not None
        assert values is not None
        return [np.array(a[:, :, layer.start : layer.end]) for a in (keys, values)]

    most = after(arrival).context.layers[0].droppable
    assert most >= min(total - 15, 1)
    for rows in {1, most // 2, most} - {0}:
        drafter = after(arrival)
        drafter.context.layers[0].drop(rows)
        drafter.context.position -= rows
        expected = after([total - rows])
        for found, right in zip(visible(drafter), visible(expected), strict=True):
            assert_same(found, right)
        seen = propose(drafter, ends, 3, 6), propose(expected, ends, 3, 6)
        assert seen[0].tokens == seen[1].tokens


def test_a_full_context_has_little_room_to_spare() -> None:
    ours = config(1, num_hidden_layers=1, layer_types=[FULL])
    drafter, taps = Drafter(network(ours)), random_taps(ours, 50)
    for _ in range(80):
        drafter.extend(taps)
        mx.eval(drafter.arrays)
    row_bytes = 2 * ours.num_key_value_heads * ours.head_dim * 4
    assert drafter.context.layers[0].length == 4000
    assert 4000 * row_bytes <= context_bytes(drafter) <= 1.2 * 4000 * row_bytes


def test_contexts_of_one_network_are_separate() -> None:
    ours = config()
    model, ends = network(ours), Ends(ours)
    one, other, alone = Drafter(model), Drafter(model), Drafter(model)
    one.extend(random_taps(ours, 5, seed=1))
    other.extend(random_taps(ours, 8, seed=2))
    alone.extend(random_taps(ours, 5, seed=1))
    assert_same(propose(one, ends, 3, 6).hidden, propose(alone, ends, 3, 6).hidden)


# --- positions ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("window", [None, 9])
def test_context_rows_sit_at_their_absolute_positions(window: int | None, split: str) -> None:
    """Relative positions alone would let the whole context drift unnoticed."""
    kinds = [SLIDING if window else FULL] * 3
    ours = config(layer_types=kinds, sliding_window=window)
    model, taps = network(ours), random_taps(ours, ROWS)
    drafter, start = Drafter(model), 0
    for rows in SPLITS[split]:
        drafter.extend(taps[:, start : start + rows])
        start += rows
    assert drafter.context.position == ROWS
    kept = ROWS if window is None else window - 1
    for layer, cache in zip(model.layers, drafter.context.layers, strict=True):
        injected = model.inject(taps)
        expected = [layer.self_attn.keys_values(injected[:, j : j + 1], j) for j in range(ROWS - kept, ROWS)]
        for found, each in zip((cache.keys, cache.values), zip(*expected, strict=True), strict=True):
            assert found is not None
            visible = np.array(found[:, :, cache.start : cache.end])
            assert_same(visible, np.concatenate([np.array(e) for e in each], axis=2))


def test_block_size_follow_the_context() -> None:
    ours = config()
    attention = network(ours).layers[0].self_attn
    rows = random_taps(ours, 4)[..., : ours.hidden_size]
    together = attention.queries(rows, 10)
    assert_same(np.array(together[:, :, 3:]), np.array(attention.queries(rows[:, 3:], 13)))
    assert np.abs(np.array(together) - np.array(attention.queries(rows, 11))).max() > 0.01


# --- the block ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", WINDOWED)
def test_block_size_never_enter_the_context(layers: str) -> None:
    ours = config(**WINDOWED[layers])
    drafter, ends = Drafter(network(ours)), Ends(ours)
    drafter.extend(random_taps(ours, 20))

    def visible() -> list[np.ndarray]:
        return [
            np.array(array[:, :, cache.start : cache.end])
            for cache in drafter.context.layers
            for array in (cache.keys, cache.values)
            if array is not None
        ]

    before = visible()
    for anchor in (3, 9):
        propose(drafter, ends, anchor, 6)
    assert drafter.context.position == 20
    for old, new in zip(before, visible(), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("block_size", [2, 4, 6])
def test_the_block_is_the_anchor_and_masks(block_size: int) -> None:
    ours = config()
    drafter = Drafter(network(ours))
    drafter.extend(random_taps(ours, 4))
    seen = propose(drafter, Ends(ours), 42, block_size)
    assert seen.blocks == [[42] + [MASK] * (block_size - 1)]
    assert len(seen.tokens) == len(seen.hidden) == block_size - 1
    assert all(0 <= token < ours.vocab_size for token in seen.tokens)


@pytest.mark.parametrize("generation", [1, 2])
def test_drafts_without_any_context(generation: int) -> None:
    ours = config(generation)
    seen = propose(Drafter(network(ours)), Ends(ours), 42, 6)
    assert seen.finite
    assert len(seen.tokens) == 5


# --- masks -------------------------------------------------------------------------------------


def attended(queries: int, keys: int, mask: mx.array | str | None) -> np.ndarray:
    """Which keys `[queries, keys]` the attention of MLX looks at: equal scores, and one value per key."""
    q, k = mx.zeros((1, 1, queries, keys)), mx.zeros((1, 1, keys, keys))
    out = mx.fast.scaled_dot_product_attention(q, k, mx.eye(keys)[None, None], scale=1.0, mask=mask)
    return np.array(out[0, 0]) > 0


def test_mlx_aligns_a_causal_mask_to_the_last_key() -> None:
    expected = np.tril(np.ones((3, 6), dtype=bool), k=3)
    np.testing.assert_array_equal(attended(3, 6, "causal"), expected)


MASKS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "full": ({}, 1000, False),
    "full, causal": ({"is_causal": True}, 1000, True),
    "sliding": ({"layer_types": LAYERS["sliding"]}, 9, True),
    "sliding, causal": ({"layer_types": LAYERS["sliding"], "is_causal": True}, 9, True),
    "sliding, not causal": ({"layer_types": LAYERS["sliding"], "is_causal": False}, 9, False),
    "sliding, not causal by the nested flag": (
        {"layer_types": LAYERS["sliding"], "dflash": {"causal": False}},
        9,
        False,
    ),
}


@pytest.mark.parametrize("context", [0, 1, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("case", MASKS)
def test_block_size_see_what_the_config_says(case: str, context: int) -> None:
    changes, window, causal = MASKS[case]
    seen = visible_positions(config(**changes, sliding_window=9), context, rows=5)
    for row in range(5):
        keys = {key for key in range(context) if context + row - key < window}
        keys |= {context + key for key in range(5) if not causal or key <= row}
        assert seen[row] == keys


def visible_positions(ours: DrafterConfig, context: int, rows: int) -> list[set[int]]:
    """For each block row the absolute positions that the first layer lets it see."""
    attention = DrafterAttention(ours, 0)
    cache = LayerContext(attention.window)
    nothing = mx.zeros((1, 1, context, 1))
    cache.append(nothing, nothing)
    mask = block_mask(attention, cache, rows)
    seen = attended(rows, cache.length + rows, mask)
    return [{int(key) + context - cache.length for key in np.flatnonzero(row)} for row in seen]


def test_an_unstated_flag_follows_each_layer() -> None:
    ours = config(layer_types=LAYERS["mixed"], sliding_window=9)
    assert ours.is_causal == (True, False, True)
