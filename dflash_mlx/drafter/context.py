"""The drafter's own KV cache: keys and values of the committed context, one pair per layer.

Only committed rows ever enter, so nothing is rolled back. A block's rows are written behind the
context for one pass and overwritten by the next append; the context is never copied for a draft.
"""

import mlx.core as mx
from mlx.utils import tree_map


class LayerContext:
    """Context of one layer, oldest row first; with a window, the last `window - 1` rows.

    Rows stay in the order of their positions at all times: masks speak of positions, so a ring whose
    order depends on how the context arrived would silently hide the wrong rows.

    Attributes:
        limit: rows that a block can see at most.
        first: position of the buffer's first row; the visible ones are those from `start` to `end`.
    """

    step = 256

    history = 2048
    """Rows that stay when they leave the window, so that as many can be dropped."""

    def __init__(self, window: int | None = None) -> None:
        self.limit = None if window is None else window - 1
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.first = self.start = self.end = 0

    @property
    def length(self) -> int:
        """Rows that a block can see."""
        return self.end - self.start

    def unseen(self, rows: int) -> int:
        """How many of the next so many rows, from the first, would not stay."""
        return 0 if self.limit is None else max(0, rows - self.limit - self.history)

    def append(self, keys: mx.array, values: mx.array, unseen: int = 0) -> None:
        """Add committed rows, `[1, heads, n, head_dim]` each; `unseen` more before them would not stay."""
        if unseen:
            self.first += self.end + unseen
            self.start = self.end = 0
        self._write(keys, values)
        self.end += keys.shape[2]
        self._see()

    @property
    def droppable(self) -> int:
        """How many of the last rows `drop` can drop."""
        hidden = 0 if self.limit is None or self.first == 0 else self.limit
        return max(0, self.end - hidden)

    def drop(self, rows: int) -> None:
        """Forget the last rows; those that they pushed out of the window come back."""
        self.end -= rows
        self._see()

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, int, int, int]:
        """Everything that rows change."""
        return self.keys, self.values, self.first, self.start, self.end

    @state.setter
    def state(self, state: tuple[mx.array | None, mx.array | None, int, int, int]) -> None:
        self.keys, self.values, self.first, self.start, self.end = state

    def copy(self) -> "LayerContext":
        """The same in arrays of its own; MLX copies their data only if one of the two is written to."""
        copy = LayerContext()
        copy.limit = self.limit
        copy.state = tree_map(lambda held: mx.array(held) if isinstance(held, mx.array) else held, self.state)
        return copy

    def with_block(self, keys: mx.array, values: mx.array, committed: int) -> tuple[mx.array, mx.array]:
        """Context followed by these rows, of which it keeps the first `committed`; the others are a block."""
        self._write(keys, values)
        assert self.keys is not None
        assert self.values is not None
        end = self.end + keys.shape[2]
        self.end += committed
        self._see()
        return self.keys[:, :, self.start : end], self.values[:, :, self.start : end]

    def _see(self) -> None:
        self.start = 0 if self.limit is None else max(0, self.end - self.limit)

    def _write(self, keys: mx.array, values: mx.array) -> None:
        n = keys.shape[2]
        if self.keys is None or self.values is None or self.end + n > self.keys.shape[2]:
            kept = slice(max(0, self.start - self.history), self.end)
            self.keys, self.values = self._grow(self.keys, keys, kept), self._grow(self.values, values, kept)
            self.first, self.end = self.first + kept.start, self.end - kept.start
            self._see()
        self.keys[:, :, self.end : self.end + n] = keys
        self.values[:, :, self.end : self.end + n] = values

    def _grow(self, old: mx.array | None, new: mx.array, kept: slice) -> mx.array:
        """These rows in a buffer with room for `new` and an eighth more, so that copies stay rare."""
        batch, heads, n, dim = new.shape
        room = n + max(self.step, self.length // 8)
        empty = mx.zeros((batch, heads, room, dim), dtype=new.dtype)
        return empty if old is None else mx.concatenate([old[:, :, kept], empty], axis=2)


class DrafterContext:
    """Everything that a drafter remembers of one conversation.

    Attributes:
        position: committed rows taken in so far, which is the absolute position of the next one.
        layers: one `LayerContext` per drafter layer.
    """

    def __init__(self, windows: list[int | None]) -> None:
        self.position = 0
        self.layers = [LayerContext(window) for window in windows]

    def copy(self) -> "DrafterContext":
        """The same in arrays of its own."""
        copy = DrafterContext([])
        copy.position = self.position
        copy.layers = [layer.copy() for layer in self.layers]
        return copy

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate after an append, so that no graph outlives a cycle."""
        return [a for layer in self.layers for a in (layer.keys, layer.values) if a is not None]
