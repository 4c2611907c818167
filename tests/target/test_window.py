"""The window cache against the plain truth: keys that carry their positions, and mlx-lm's rotating cache."""

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache
from tiny import WINDOW, tiny_model, tiny_target

from dflash_mlx.target import Target
from dflash_mlx.target.caches import Checkpoint, arrays, block_mask, fork, make_cache
from dflash_mlx.target.window import LARGEST_BLOCK, WindowCache


def rows(positions: range, dim: int = 1) -> tuple[mx.array, mx.array]:
    """Keys `[1, 2, n, dim]` that say where they belong, and values that say minus that."""
    keys = mx.broadcast_to(
        mx.array([*positions], mx.float32)[None, None, :, None], (1, 2, len(positions), dim)
    )
    return keys, -keys


def positions(array: mx.array) -> list[int]:
    held: Any = array[0, -1, :, 0].tolist()
    return [int(p) for p in held]


def add(cache: Any, n: int) -> list[list[int]]:
    """Add n rows; for each of them, the positions that it sees."""
    mask: Any = cache.make_mask(n)
    new = range(cache.offset, cache.offset + n)
    keys, values = cache.update_and_fetch(*rows(new))
    held = positions(keys)
    assert positions(-values) == held
    if mask is None:
        assert n == 1
        return [held]
    if isinstance(mask, str):
        return [held[: len(held) - n + 1 + i] for i in range(n)]
    assert mask.shape == (n, len(held))
    return [[p for p, seen in zip(held, row, strict=True) if seen] for row in mask.tolist()]


def truth(position: int, window: int) -> list[int]:
    return list(range(max(0, position - window + 1), position + 1))


@pytest.mark.parametrize("window", [1, 2, 8, 127, 129, 300])
@pytest.mark.parametrize("prompt", [0, 5, 40, 700])
def test_every_row_sees_its_window_whatever_was_rolled_back(window: int, prompt: int) -> None:
    dice = random.Random(window + prompt)
    cache = WindowCache(window)
    if prompt:
        assert add(cache, prompt) == [truth(p, window) for p in range(prompt)]
    for _ in range(60):
        start, n = cache.offset, dice.choice([1, 1, 2, 8, 31, LARGEST_BLOCK])
        assert add(cache, n) == [truth(p, window) for p in range(start, start + n)]
        keep = dice.randint(0, n)
        assert cache.trim(n - keep) == n - keep
        assert cache.offset == start + keep
        keys, values = cache.visible()
        assert positions(keys) == positions(-values) == truth(cache.offset, window)[:-1]


@pytest.mark.parametrize("chunks", [[50], [40, 33, 100], [5, 64, 64, 64], [300, 40, 299]])
def test_prompt_chunks_are_handed_what_mlx_lm_hands_them(chunks: list[int]) -> None:
    ours, theirs = WindowCache(24), RotatingKVCache(max_size=24)
    for n in chunks:
        for return_array in (False, True):
            mask: Any = ours.make_mask(n, window_size=24, return_array=return_array)
            expected: Any = theirs.make_mask(n, window_size=24, return_array=return_array)
            assert type(mask) is type(expected)
            assert mask == expected if isinstance(mask, str) else mx.array_equal(mask, expected)
        new = rows(range(ours.offset, ours.offset + n))
        for a, b in zip(ours.update_and_fetch(*new), theirs.update_and_fetch(*new), strict=True):
            assert mx.array_equal(a, b)
        assert ours.offset == theirs.offset
        assert ours.size() == theirs.size()
        assert all(map(mx.array_equal, ours.keys_and_values(), theirs.keys_and_values()))


def test_a_narrower_window_than_its_own_is_respected() -> None:
    cache = WindowCache(8)
    add(cache, 20)
    for n in (1, 3, 40):
        mask = cache.make_mask(n, window_size=3)
        assert isinstance(mask, mx.array)
        assert mask.sum(axis=-1).tolist() == [3] * n


def test_rejected_rows_are_forgotten_where_mlx_lm_keeps_them() -> None:
    """Window 8: a prompt, a block of four of which one row stays, one more row."""

    def replay(cache: Any, block: list[int], keep: int) -> list[int]:
        for token in range(20):
            cache.update_and_fetch(*rows(range(token, token + 1)))
        cache.update_and_fetch(*rows(range(block[0], block[-1] + 1)))
        assert cache.trim(len(block) - keep) == len(block) - keep
        seen, _ = cache.update_and_fetch(*rows(range(200, 201)))
        return positions(seen)

    rejected = {101, 102, 103}
    assert rejected & {*replay(RotatingKVCache(max_size=8), [100, 101, 102, 103], keep=1)}
    ours = replay(WindowCache(8), [100, 101, 102, 103], keep=1)
    assert ours == replay(WindowCache(8), [100], keep=1)
    assert ours[-8:] == [14, 15, 16, 17, 18, 19, 100, 200]


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_the_reply_after_a_rejected_block_is_that_of_a_cold_run(family: str) -> None:
    target = tiny_target(family)
    prompt, block = list(range(3, 23)), [30, 31, 32, 33]

    caches = target.make_cache()
    target.forward(mx.array(prompt), caches)
    target.verify(mx.array(block), caches)
    target.commit(1, 4)
    cold = target.make_cache()
    target.forward(mx.array(prompt), cold)
    target.forward(mx.array(block[:1]), cold)
    assert mx.array_equal(target.forward(mx.array([40]), caches)[0], target.forward(mx.array([40]), cold)[0])


def test_memory_stays_bounded_over_thousands_of_rows() -> None:
    window, block = 100, 16
    cache = WindowCache(window, block)
    limit = window - 1 + block + cache.align - 1 + cache.step
    dice = random.Random(1)
    add(cache, 3000)
    add(cache, 1)
    for _ in range(600):
        n = dice.randint(1, block)
        add(cache, n)
        cache.trim(dice.randint(0, n - 1))
        mx.eval(cache.keys, cache.values)
        assert cache.keys is not None
        assert cache.keys.shape[2] <= limit
        assert cache.nbytes <= 2 * 2 * 4 * limit
    assert cache.offset > 5000


def test_compactions_are_rare() -> None:
    cache = WindowCache(100, 16)
    starts = set()
    for position in range(2000):
        cache.update_and_fetch(*rows(range(position, position + 1)))
        starts.add(cache.first)
    assert 1 < len(starts) <= 2000 / cache.step + 1


def test_a_long_reply_holds_no_more_memory_than_its_windows() -> None:
    """The buffers of a long prompt chunk are gone after the first token."""
    target = tiny_target("gemma3")
    caches = target.make_cache()
    target.forward(mx.array([5] * 2000), caches)
    target.forward(mx.array([5]), caches)
    held = [cache for cache in caches if isinstance(cache, WindowCache)]
    assert len(held) == 2
    for cache in held:
        assert cache.keys is not None
        assert cache.keys.shape[2] <= WINDOW - 1 + cache.block + cache.align - 1 + cache.step


def test_dropping_more_rows_than_are_held_is_an_error_that_drops_nothing() -> None:
    cache = WindowCache(8, block=4)
    add(cache, 6)
    with pytest.raises(ValueError, match="cannot drop 7 rows of 6"):
        cache.trim(7)
    add(cache, 2000)
    add(cache, 1)
    before = [mx.array(a) for a in cache.visible()]
    with pytest.raises(
        ValueError, match=r"cannot drop 1000 rows of 2007: .* window of 8 rows .* blocks of 4"
    ):
        cache.trim(1000)
    with pytest.raises(ValueError, match="cannot drop"):
        Checkpoint([cache]).restore(-1000)
    assert cache.offset == 2007
    assert all(map(mx.array_equal, cache.visible(), before))


@pytest.mark.parametrize("context", [0, 3, 500])
def test_a_block_can_be_dropped_in_any_state(context: int) -> None:
    for extra in range(0, 300, 13):
        cache = WindowCache(8, block=16)
        for n in (context, extra, 16):
            if n:
                add(cache, n)
        cache.trim(16)
        assert add(cache, 16) == [truth(p, 8) for p in range(context + extra, context + extra + 16)]


def test_rows_that_came_one_at_a_time_can_be_dropped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer may have been compacted between them."""
    monkeypatch.setattr(WindowCache, "step", 5)
    monkeypatch.setattr(WindowCache, "align", 1)
    cache = WindowCache(8, block=4)
    for _ in range(60):
        add(cache, 1)
        shorter = fork(cache)
        dropped = min(4, shorter.offset)
        shorter.trim(dropped)
        assert add(shorter, 1) == [truth(cache.offset - dropped, 8)]


def test_copies_are_independent_and_states_come_back() -> None:
    cache = WindowCache(8, block=4)
    assert cache.empty()
    assert cache.nbytes == 0
    assert cache.visible() == []
    for n in (200, 1, 3):
        add(cache, n)
    copies = [fork(cache), WindowCache.from_state(cache.state), fork(CacheList(cache))[0]]
    add(cache, 4)
    for copy in copies:
        assert type(copy) is WindowCache
        assert (copy.offset, copy.window, copy.block) == (204, 8, 4)
        assert positions(copy.visible()[0]) == truth(204, 8)[:-1]
    add(copies[0], 2)
    assert positions(cache.visible()[0]) == truth(208, 8)[:-1]


def test_windows_inside_a_cache_list_are_found() -> None:
    model = tiny_model("gemma3")
    model.make_cache = lambda: [
        CacheList(KVCache(), RotatingKVCache(max_size=8)),
        RotatingKVCache(max_size=4),
    ]
    listed, alone = make_cache(model)
    assert type(alone) is WindowCache
    assert alone.window == 4
    assert type(listed[0]) is KVCache
    window = listed[1]
    assert type(window) is WindowCache
    assert window.window == 8
    add(window, 20)
    before = [mx.array(a) for a in arrays([listed])]
    assert [a.shape[2] for a in before] == [7, 7]
    checkpoint = Checkpoint([listed])
    listed[0].update_and_fetch(*rows(range(4)))
    add(window, 4)
    checkpoint.restore(0)
    after = arrays([listed])
    assert [a.shape[2] for a in after] == [0, 0, 7, 7]
    assert all(map(mx.array_equal, after[2:], before))
    assert mx.array_equal(block_mask(listed, 1), block_mask(window, 1))


def test_targets_use_it_in_plain_decoding_too() -> None:
    target = Target(tiny_model("muse_glimmer"))
    assert [type(c) for c in target.make_cache()] == [WindowCache] * 3 + [KVCache]
