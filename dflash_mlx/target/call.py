"""One call of a mixer, whose families name and order their arguments differently."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dflash_mlx.target.caches import Cache, is_cache, row_mask


@dataclass(frozen=True)
class Call:
    """Its arguments. Rows are the arrays `[1, L, *]`; other arrays and strings are masks."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def _values(self) -> tuple[Any, ...]:
        return (*self.args, *self.kwargs.values())

    @property
    def rows(self) -> int:
        """L."""
        return next(int(v.shape[1]) for v in self._values if _is_rows(v))

    @property
    def cache(self) -> Cache | None:
        """The cache, if there is one."""
        return next((v for v in self._values if is_cache(v)), None)

    def with_cache(self, cache: Cache) -> "Call":
        """The same call on another cache."""
        return self._map(lambda v: cache if is_cache(v) else v)

    def first(self, rows: int) -> "Call":
        """The call on the first `rows` rows; a lone sequence has no explicit mask to cut."""
        assert not any(isinstance(v, mx.array) and not _is_rows(v) for v in self._values)
        return self._map(lambda v: v[:, :rows] if _is_rows(v) else v)

    def row(self, index: int) -> "Call":
        """The call on one row that is the cache's next, under the mask that the cache has for a lone row."""
        alone = row_mask(self.cache)
        return self._map(lambda v: v[:, index : index + 1] if _is_rows(v) else alone if _is_mask(v) else v)

    def _map(self, change: Callable[[Any], Any]) -> "Call":
        return Call(tuple(map(change, self.args)), {k: change(v) for k, v in self.kwargs.items()})


def _is_rows(value: object) -> bool:
    return isinstance(value, mx.array) and value.ndim == 3


def _is_mask(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, mx.array) and value.ndim != 3)


def residual(out: Any) -> mx.array:
    """A module's output rows; some families return a tuple that begins with them."""
    rows: mx.array = out[0] if isinstance(out, tuple) else out
    return rows
