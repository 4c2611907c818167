"""Keys and values of a sliding-window layer, with exact rollback, behind mlx-lm's cache interface.

mlx-lm's rotating cache is a ring: what a rejected row wrote over is lost, and the row itself stays visible.
Here rows keep the order of their positions in one buffer, a little longer than the window, and to forget
the last rows a cursor goes back.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache

LARGEST_BLOCK = 32
"""Rows of the largest block that can be rolled back."""


class WindowCache(_BaseCache):
    """Cache of a layer in which every row sees itself and the `window - 1` rows before it.

    The buffer holds positions from `first` on. It is compacted when it is full, so a row is copied once in
    about `step` updates.

    Args:
        window: rows that a row can see, itself included.
        block: rows that `trim` can drop at any time.

    Attributes:
        offset: position of the next row.
    """

    step = 256
    """Free rows after a compaction."""

    align = 128
    """A block is handed keys from a multiple of this position on, and masks what lies before its windows.

    GPU kernels split the keys among threads by index, so a row has the same bits alone and in a block only
    if its keys have the same index modulo that split: at most 128 for windows below 8192. Masked keys add
    nothing to any thread's sum.
    """

    def __init__(self, window: int, block: int = LARGEST_BLOCK) -> None:
        self.window = window
        self.block = block
        self.keys: mx.array | None = None  # [B, heads, capacity, head_dim]
        self.values: mx.array | None = None
        self.offset = 0
        self.first = 0
        self._seen = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add rows `[B, heads, n, head_dim]`.

        Returns:
            Keys and values of the rows that `make_mask(n)` counted as context, then the new ones.
        """
        rows = keys.shape[2]
        self._seen = self._start(rows)
        if self.keys is None or self.offset - self.first + rows > self.keys.shape[2]:
            self._make_room(keys, values)
        assert self.keys is not None
        assert self.values is not None
        new = slice(self.offset - self.first, self.offset - self.first + rows)
        self.keys[..., new, :] = keys
        self.values[..., new, :] = values
        self.offset += rows
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last `update_and_fetch` returned."""
        assert self.keys is not None
        assert self.values is not None
        seen = slice(self._seen - self.first, self.offset - self.first)
        return self.keys[..., seen, :], self.values[..., seen, :]

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask of the next N rows: None, "causal", or booleans `[N, context + N]`."""
        window = min(window_size or self.window, self.window)
        context = self.offset - self._start(N)
        if context + N > window or (return_array and N > 1):
            mask: mx.array = create_causal_mask(N, context, window_size=window)
            return mask
        return None if N == 1 else "causal"

    def keys_seen(self, start: int, rows: int) -> int:
        """Keys that `update_and_fetch` returns for `rows` rows, a block at most, from position `start` on."""
        return start + rows - self._aligned(start)

    def trim(self, n: int) -> int:
        """Drop the last `n` rows.

        Raises:
            ValueError: rows that the next one would see are gone; nothing was dropped.
        """
        if n > self.offset or self._aligned(self.offset - n) < self.first:
            raise ValueError(
                f"cannot drop {n} rows of {self.offset}: this cache of a window of {self.window} rows "
                f"starts at row {self.first} and is made for blocks of {self.block}"
            )
        self.offset -= n
        return n

    def droppable(self) -> int:
        """How many rows `trim` can drop now; a block at least."""
        return self.offset if self.first == 0 else self.offset - self.first - self.window + 1

    def is_trimmable(self) -> bool:
        """Whether a block can be dropped: always."""
        return True

    def visible(self) -> list[mx.array]:
        """Keys and values `[B, heads, n, head_dim]` of the rows that the next one sees, oldest first."""
        if self.keys is None or self.values is None:
            return []
        end = self.offset - self.first
        rows = slice(end - min(self.offset, self.window - 1), end)
        return [self.keys[..., rows, :], self.values[..., rows, :]]

    def size(self) -> int:
        """Rows in the window."""
        return min(self.offset, self.window)

    def empty(self) -> bool:
        """Whether no row was ever added."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        if self.keys is None or self.values is None:
            return 0
        return self.keys.nbytes + self.values.nbytes

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that `from_state` needs to make an equal cache."""
        return self.keys, self.values, self.offset, self.first, self.window, self.block

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.first, self.window, self.block = state
        self._seen = self.first

    def _start(self, rows: int) -> int:
        """Position of the first row that the next `rows` rows are handed.

        More rows than a block are a prompt chunk, which no row-by-row run has to equal: it gets exactly
        what mlx-lm's cache would give it.
        """
        return self._aligned(self.offset) if rows <= self.block else max(0, self.offset - self.window + 1)

    def _aligned(self, offset: int) -> int:
        """Position of the first row that a block at `offset` is handed."""
        return max(0, offset - self.window + 1) // self.align * self.align

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        """Compact: keep what the next row, or one up to a block before it, is handed."""
        first = max(self.first, self._aligned(self.offset - self.block))
        kept = slice(first - self.first, self.offset - self.first)
        self.keys = self._with_room(self.keys, kept, keys)
        self.values = self._with_room(self.values, kept, values)
        self.first = first

    def _with_room(self, old: mx.array | None, kept: slice, new: mx.array) -> mx.array:
        """The kept rows and free ones; a long chunk gets no more than it fills, for most is soon unseen."""
        batch, heads, rows, dim = new.shape
        free = mx.zeros((batch, heads, max(self.step, rows), dim), dtype=new.dtype)
        return free if old is None else mx.concatenate([old[..., kept, :], free], axis=2)
