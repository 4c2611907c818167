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
    """

    step = 256

    def __init__(self, window: int | None = None) -> None:
        self.limit = None if window is None else window - 1
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.start = 0
        self.end = 0

    @property
    def length(self) -> int:
        """Rows that a block can see."""
        return self.end - self.start

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add committed rows, `[1, heads, n, head_dim]` each."""
        self._write(keys, values)
        self.end += keys.shape[2]
        if self.limit is not None:
            self.start = max(self.start, self.end - self.limit)

    @property
    def droppable(self) -> int:
        """How many of the last rows `drop` can drop: all, unless some have left the window."""
        return self.end if self.limit is None or self.end < self.limit else 0

    def drop(self, rows: int) -> None:
        """Forget the last rows."""
        self.end -= rows

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, int, int]:
        """Everything that rows change."""
        return self.keys, self.values, self.start, self.end

    @state.setter
    def state(self, state: tuple[mx.array | None, mx.array | None, int, int]) -> None:
        self.keys, self.values, self.start, self.end = state

    def copy(self) -> "LayerContext":
        """The same in arrays of its own; MLX copies their data only if one of the two is written to."""
        copy = LayerContext()
        copy.limit = self.limit
        copy.state = tree_map(lambda held: mx.array(held) if isinstance(held, mx.array) else held, self.state)
        return copy

    def with_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Context followed by these block rows, which the context does not keep."""
        self._write(keys, values)
        assert self.keys is not None
        assert self.values is not None
        end = self.end + keys.shape[2]
        return self.keys[:, :, self.start : end], self.values[:, :, self.start : end]

    def _write(self, keys: mx.array, values: mx.array) -> None:
        n = keys.shape[2]
        if self.keys is None or self.values is None or self.end + n > self.keys.shape[2]:
            self.keys, self.values = self._grow(self.keys, keys), self._grow(self.values, values)
            self.start, self.end = 0, self.length
        self.keys[:, :, self.end : self.end + n] = keys
        self.values[:, :, self.end : self.end + n] = values

    def _grow(self, old: mx.array | None, new: mx.array) -> mx.array:
        """The visible rows in a buffer with room for `new` and an eighth more, so that copies stay rare."""
        batch, heads, n, dim = new.shape
        room = n + max(self.step, self.length // 8)
        empty = mx.zeros((batch, heads, room, dim), dtype=new.dtype)
        return empty if old is None else mx.concatenate([old[:, :, self.start : self.end], empty], axis=2)


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
