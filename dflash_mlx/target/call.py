"""One call of a mixer, whose families name and order their arguments differently."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from dflash_mlx.target.caches import Cache, block_mask, is_cache, keys_seen


@dataclass(frozen=True)
class Call:
    """Its arguments.

    Rows are the arrays `[1, L, *]` of numbers, the first of them of three axes. Arrays `[L, 1]` are factors
    of the rows, integers are the position of the first; other arrays and strings are masks
    `[*, L, context + L]`; a pair of arrays `[1, heads, n, head_dim]` is the keys and values of another layer.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def _values(self) -> tuple[Any, ...]:
        return (*self.args, *self.kwargs.values())

    @property
    def rows(self) -> int:
        """L."""
        return next(int(v.shape[1]) for v in self._values if isinstance(v, mx.array) and v.ndim == 3)

    @property
    def cache(self) -> Cache | None:
        """The cache, if there is one."""
        return next((v for v in self._values if is_cache(v)), None)

    @property
    def shared(self) -> tuple[mx.array, mx.array] | None:
        """Another layer's keys and values, if the call has such in place of a cache."""
        return next((v for v in self._values if is_keys_values(v)), None)

    def keys_seen(self, start: int, rows: int) -> int:
        """Keys that the rows from `start` on are handed, their own among them."""
        if self.shared is not None:
            return int(self.shared[0].shape[2]) - self.rows + start + rows
        cache: Any = self.cache
        return keys_seen(cache, cache.offset + start, rows)

    def with_cache(self, cache: Cache) -> "Call":
        """The same call on another cache."""
        return self._map(lambda v: cache if is_cache(v) else v)

    def first(self, rows: int) -> "Call":
        """The call on the first `rows` rows."""
        return self._map(lambda v: _part(v, 0, rows, self.rows))

    def part(self, start: int, end: int) -> "Call":
        """The call on some rows, which are the cache's next, under the mask that the cache has for them."""
        total = self.rows
        if self.shared is not None:
            return self._map(lambda v: _part(v, start, end, total))
        mask = block_mask(self.cache, end - start)
        return self._map(lambda v: mask if _is_mask(v, total) else _part(v, start, end, total))

    def _map(self, change: Callable[[Any], Any]) -> "Call":
        return Call(tuple(map(change, self.args)), {k: change(v) for k, v in self.kwargs.items()})


def _is_rows(value: object, rows: int) -> bool:
    of_rows = isinstance(value, mx.array) and value.ndim > 2 and value.shape[1] == rows
    return of_rows and cast(mx.array, value).dtype != mx.bool_


def _is_factors(value: object, rows: int) -> bool:
    return isinstance(value, mx.array) and value.shape == (rows, 1)


def _is_position(value: object) -> bool:
    if isinstance(value, mx.array):
        return value.ndim == 0
    return isinstance(value, int) and not isinstance(value, bool)


def _is_mask(value: object, rows: int) -> bool:
    if isinstance(value, mx.array):
        return value.ndim > 1 and not _is_rows(value, rows) and not _is_factors(value, rows)
    return isinstance(value, str)


def is_keys_values(value: object) -> bool:
    """Whether a value is the keys and values of a layer, `[1, heads, n, head_dim]` each."""
    return isinstance(value, tuple) and len(value) == 2 and all(getattr(v, "ndim", 0) == 4 for v in value)


def _part(value: Any, start: int, end: int, rows: int) -> Any:
    """An argument for some of the call's rows, all keys before those given: what comes later is cut off."""
    later = rows - end
    if is_keys_values(value):
        return tuple(held[:, :, : held.shape[2] - later] for held in value)
    if _is_rows(value, rows):
        return value[:, start:end]
    if _is_factors(value, rows):
        return value[start:end]
    if _is_position(value):
        return value + start
    if isinstance(value, str):
        return value if end - start > 1 else None
    if _is_mask(value, rows):
        return value[..., start:end, : value.shape[-1] - later]
    return value


def residual(out: Any) -> mx.array:
    """A module's output rows; some families return a tuple that begins with them."""
    rows: mx.array = out[0] if isinstance(out, tuple) else out
    return rows


def by_row(run: Callable[..., Any], *rows: mx.array, size: int = 1) -> Any:
    """`run` on `size` rows `[1, L, ...]` at a time; what is several arrays, as of fused layers, stays so."""
    starts = range(0, rows[0].shape[1], size)
    parts = [run(*(array[:, start : start + size] for array in rows)) for start in starts]
    if isinstance(parts[0], mx.array):
        return mx.concatenate(parts, axis=1)
    return [mx.concatenate(list(part), axis=1) for part in zip(*parts, strict=True)]
