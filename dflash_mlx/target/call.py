"""One call of a mixer, whose families name and order their arguments differently."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dflash_mlx.target.caches import Cache, is_cache, row_mask


@dataclass(frozen=True)
class Call:
    """Its arguments.

    Rows are the arrays `[1, L, *]` of numbers, the first of them of three axes. Arrays `[L, 1]` are factors
    of the rows, integers are the position of the first row; other arrays and strings are masks
    `[*, L, context + L]`.
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

    def with_cache(self, cache: Cache) -> "Call":
        """The same call on another cache."""
        return self._map(lambda v: cache if is_cache(v) else v)

    def first(self, rows: int) -> "Call":
        """The call on the first `rows` rows."""
        total = self.rows

        def cut(value: Any) -> Any:
            if _is_rows(value, total):
                return value[:, :rows]
            if _is_factors(value, total):
                return value[:rows]
            if isinstance(value, mx.array) and value.ndim > 1:
                return value[..., :rows, : value.shape[-1] - total + rows]
            return value

        return self._map(cut)

    def row(self, index: int) -> "Call":
        """The call on one row that is the cache's next, under the mask that the cache has for a lone row."""
        total, alone = self.rows, row_mask(self.cache)

        def pick(value: Any) -> Any:
            if _is_rows(value, total):
                return value[:, index : index + 1]
            if _is_factors(value, total):
                return value[index : index + 1]
            if _is_position(value):
                return value + index
            return alone if isinstance(value, mx.array | str) else value

        return self._map(pick)

    def _map(self, change: Callable[[Any], Any]) -> "Call":
        return Call(tuple(map(change, self.args)), {k: change(v) for k, v in self.kwargs.items()})


def _is_rows(value: object, rows: int) -> bool:
    return (
        isinstance(value, mx.array) and value.ndim > 2 and value.shape[1] == rows and value.dtype != mx.bool_
    )


def _is_factors(value: object, rows: int) -> bool:
    return isinstance(value, mx.array) and value.shape == (rows, 1)


def _is_position(value: object) -> bool:
    if isinstance(value, mx.array):
        return value.ndim == 0
    return isinstance(value, int) and not isinstance(value, bool)


def residual(out: Any) -> mx.array:
    """A module's output rows; some families return a tuple that begins with them."""
    rows: mx.array = out[0] if isinstance(out, tuple) else out
    return rows
