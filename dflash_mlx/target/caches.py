"""What a target's caches allow. Their type decides, not the model's name.

Owns the imports of mlx-lm's cache classes.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, _BaseCache

from dflash_mlx.errors import UnsupportedTargetError

Cache: TypeAlias = Any
"""A cache object of mlx-lm, which ships no types."""


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
            if type(leaf) is KVCache or id(leaf) in covered:
                continue
            reason = (
                "no module that updates it was found" if is_recurrent(leaf) else "rejected tokens stay in it"
            )
            raise UnsupportedTargetError(
                f"cache {layer} of this target is a {type(leaf).__name__}, which cannot be rolled back "
                f"({reason}); decode it without a drafter (drafter 'none')"
            )


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
    """What the caches hold, committed rows only; for evaluation and for comparison."""
    held: list[mx.array] = []
    for cache in leaves(caches):
        if is_recurrent(cache):
            held += [a for a in cache.cache if a is not None]
        elif cache.keys is not None:
            held += [cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]]
    return held


def fork(cache: Cache) -> Cache:
    """An independent copy of one cache: updates in place must not reach the original."""
    if isinstance(cache, CacheList):
        return CacheList(*(fork(c) for c in cache.caches))
    copy: Cache
    if is_recurrent(cache):
        copy = ArraysCache(len(cache.cache))
        copy.cache = list(cache.cache)
        return copy
    copy = KVCache()
    if cache.keys is not None:
        copy.state = (mx.array(cache.keys), mx.array(cache.values), cache.offset)
    return copy
