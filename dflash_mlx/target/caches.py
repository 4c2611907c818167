"""What a target's caches allow. Their type decides, not the model's name.

Owns the imports of mlx-lm's cache classes; only the window cache's base class is imported elsewhere.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    _BaseCache,
    make_prompt_cache,
)

from dflash_mlx.errors import UnsupportedTargetError
from dflash_mlx.target.window import WindowCache

Cache: TypeAlias = Any
"""A cache object of mlx-lm, which ships no types."""


def make_cache(model: nn.Module) -> list[Cache]:
    """A model's empty prompt cache: mlx-lm's, with our window caches in place of its rotating ones."""
    return [_exact(cache) for cache in make_prompt_cache(model)]


def _exact(cache: Cache) -> Cache:
    if isinstance(cache, CacheList):
        return CacheList(*(_exact(c) for c in cache.caches))
    # One that keeps its first tokens for ever is more than a window: it stays, and no drafter is attached.
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return WindowCache(cache.max_size)
    return cache


def leaves(caches: Sequence[Cache]) -> Iterator[Cache]:
    """All caches, those inside a `CacheList` included."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def is_cache(value: object) -> bool:
    """Whether a call's argument is a cache."""
    return isinstance(value, _BaseCache)


def is_recurrent(cache: Cache) -> bool:
    """Whether the cache is a state that every token overwrites."""
    return type(cache) is ArraysCache


def block_mask(cache: Cache, rows: int) -> Any:
    """The mask of the next rows: None, "causal", or a window's booleans `[rows, context + rows]`."""
    window = next((c for c in leaves([cache]) if type(c) is WindowCache), None)
    if window is not None:
        return window.make_mask(rows)
    return "causal" if rows > 1 else None


def keys_seen(cache: Cache, start: int, rows: int) -> int:
    """Keys that attention is handed for `rows` rows from position `start` on, their own among them."""
    return int(cache.keys_seen(start, rows)) if type(cache) is WindowCache else start + rows


def check_rollback(caches: Sequence[Cache], replayed: Sequence[Cache]) -> None:
    """Refuse caches that cannot forget rejected tokens exactly.

    Args:
        caches: a target's prompt cache.
        replayed: its recurrent caches that a tape or row snapshots will restore.

    Raises:
        UnsupportedTargetError: naming the layer, the cache and the reason.
    """
    covered = {id(c) for c in replayed}
    for layer, cache in enumerate(caches):
        for leaf in leaves([cache]):
            if type(leaf) in (KVCache, WindowCache) or id(leaf) in covered:
                continue
            raise UnsupportedTargetError(
                f"cache {layer} of this target is a {type(leaf).__name__}, which cannot be rolled back "
                f"({_obstacle(leaf)}); decode it without a drafter (drafter 'none')"
            )


def _obstacle(cache: Cache) -> str:
    """Why a cache cannot be rolled back exactly."""
    if is_recurrent(cache):
        return "no module that updates it was found"
    if type(cache) is RotatingKVCache:
        return f"besides its window it keeps the first {cache.keep} tokens"
    if type(cache) is ChunkedKVCache:
        return "it drops old rows that the rows before a block would still see"
    if type(cache) is QuantizedKVCache:
        return "attention over quantized keys gives a block other numbers than its rows alone"
    return "rejected tokens stay in it"


class Checkpoint:
    """Where every cache stood before a block."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        self._offsets = [(c, c.offset) for c in leaves(caches) if not is_recurrent(c)]
        self._states = [(c, list(c.cache)) for c in leaves(caches) if is_recurrent(c)]

    def restore(self, keep: int) -> None:
        """Trim every KV cache to `keep` rows of the block; put recurrent states back to before the block."""
        for cache, offset in self._offsets:
            extra = cache.offset - offset - keep
            if cache.trim(extra) != extra:
                raise UnsupportedTargetError(
                    f"a {type(cache).__name__} did not drop {extra} rows; its state is unusable"
                )
        for cache, state in self._states:
            cache.cache = list(state)


def arrays(caches: Sequence[Cache]) -> list[mx.array]:
    """What the caches hold, for evaluation and for comparison.

    Committed rows only, oldest first; of a window those that the next row sees.
    """
    held: list[mx.array] = []
    for cache in leaves(caches):
        if is_recurrent(cache):
            held += [a for a in cache.cache if a is not None]
        elif type(cache) is WindowCache:
            held += cache.visible()
        elif cache.keys is not None:
            held += [cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]]
    return held


def fork(cache: Cache) -> Cache:
    """An independent copy of one cache: updates in place must not reach the original."""
    if isinstance(cache, CacheList):
        return CacheList(*(fork(c) for c in cache.caches))
    return type(cache).from_state(copy_state(cache.state))


def copy_state(state: Any) -> Any:
    """The same state in arrays of its own; MLX copies their data only if one of the two is written to."""
    return tree_map(lambda held: mx.array(held) if isinstance(held, mx.array) else held, state)


def is_plain(cache: Cache) -> bool:
    """Whether the cache keeps every row, so that its first rows are at any time a cache of their own."""
    return type(cache) is KVCache


def droppable(cache: Cache) -> int:
    """How many of its last rows `drop` can drop."""
    if type(cache) not in (KVCache, WindowCache):
        return 0
    if cache.empty():  # a layer that uses another's keys and values
        return sys.maxsize
    return int(cache.offset if is_plain(cache) else cache.droppable())


def drop(cache: Cache, rows: int) -> None:
    """Forget the last rows of a cache that allows it."""
    if rows and not cache.empty():
        cache.trim(rows)
        if is_plain(cache):  # Else the next row would make a copy of the dropped ones too.
            kept = slice(cache.offset)
            cache.keys, cache.values = cache.keys[..., kept, :], cache.values[..., kept, :]
