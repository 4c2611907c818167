"""Modules that run in parts in a verify pass, because all rows at once would get other numbers than alone.

Some attention (MLA) and state-space (Mamba 2) modules compute one row by other operations than several: they
run row by row. Which these are is found by running each both ways and comparing the bits. And on a GPU, MLX's
attention splits keys by their number and that of the rows: there a block is cut where rows would part ways.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from dflash_mlx.kernels import Device, row_groups
from dflash_mlx.target.attach import Mixin, Undo, attach
from dflash_mlx.target.caches import Cache, arrays, fork, is_recurrent
from dflash_mlx.target.call import Call, by_row, is_keys_values, residual
from dflash_mlx.target.mixers import Mixer

Parts = Callable[[Call], list[int]]
"""A call -> the sizes of the parts that its rows are run in."""


def one_by_one(call: Call) -> list[int]:
    """Every row alone."""
    return [1] * call.rows


class RowWise:
    """One module that runs in parts while `active`, and the recurrent state after each row."""

    def __init__(self, module: nn.Module, parts: Parts = one_by_one) -> None:
        self.module = module
        self.parts = parts
        self.active = False
        self.clear()
        self.undos: list[Undo] = [attach(module, _RowWiseModule, _rows=self)]

    def clear(self) -> None:
        """Forget the last pass."""
        self.cache: Cache | None = None
        self.states: list[list[mx.array | None]] = []

    def replay(self, keep: int) -> None:
        """Put the recurrent state, if there is one, to where it stood after the block's first `keep` rows."""
        if self.cache is not None:
            self.cache.cache = list(self.states[keep - 1])


class _RowWiseModule(Mixin):
    """Mixin of the module."""

    _rows: RowWise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows, run = self._rows, super().__call__
        if not rows.active:
            return run(*args, **kwargs)
        call = Call(args, kwargs)
        sizes = rows.parts(call)
        rows.cache = call.cache if is_recurrent(call.cache) else None
        if len(sizes) == 1 and rows.cache is None:
            return run(*args, **kwargs)
        rows.states = []
        outputs = []
        for part in split(call, sizes):
            outputs.append(run(*part.args, **part.kwargs))
            if rows.cache is not None:
                rows.states.append(list(rows.cache.cache))
        if isinstance(outputs[0], tuple):
            return tuple(_joined(parts, sum(sizes[1:])) for parts in zip(*outputs, strict=True))
        return _joined(outputs, sum(sizes[1:]))


def split(call: Call, sizes: Sequence[int]) -> Iterator[Call]:
    """The call part by part; each must have run before the next is asked for."""
    start = 0
    for size in sizes:
        yield call.part(start, start + size)
        start += size


def _joined(outputs: Sequence[Any], later: int) -> Any:
    """Rows side by side, the position of the first, and keys and values of all.

    Args:
        outputs: one of the things that a module returned, from each part.
        later: rows after the first part.
    """
    first, last = outputs[0], outputs[-1]
    if is_keys_values(first):
        return tuple(_grown(held, grown, later) for held, grown in zip(first, last, strict=True))
    if isinstance(first, mx.array):
        return mx.concatenate(list(outputs), axis=1) if first.ndim > 2 else first
    return last


def _grown(first: mx.array, last: mx.array, later: int) -> mx.array:
    """Keys that start where the first part's do and end where the last's do, `[1, heads, n, head_dim]`."""
    if last.shape[2] == first.shape[2] + later:
        return last
    return mx.concatenate([first, last[:, :, last.shape[2] - later :]], axis=2)


def find_row_wise(mixers: list[Mixer], device: Device) -> list[RowWise]:
    """Attach `RowWise` where it is needed.

    A class of modules whose first instance gives its rows other bits in company runs row by row; on a GPU
    all other attention runs in parts.
    """
    first = {type(m.module): m for m in reversed(mixers) if m.cache is not None}
    if not _device_is_row_exact():
        first = {}  # No module can be exact here, and running row by row would not make it so.
    branching = {c for c, mixer in first.items() if branches_on_single_row(mixer, _parts(mixer, device))}
    row_wise = []
    for mixer in mixers:
        if type(mixer.module) in branching:
            row_wise.append(RowWise(mixer.module))
        elif device.metal and not is_recurrent(mixer.cache):
            row_wise.append(RowWise(mixer.module, _parts(mixer, device)))
    return row_wise


def _parts(mixer: Mixer, device: Device) -> Parts:
    """In which parts a block has the numbers of its rows, unless the module itself branches."""
    if not device.metal or is_recurrent(mixer.cache):
        return lambda call: [call.rows]
    attention = mixer.attention
    return lambda call: row_groups(device.chip, attention, call.keys_seen, call.rows)


def branches_on_single_row(mixer: Mixer, parts: Parts) -> bool:
    """Whether a mixer that runs in `parts` gives its rows other bits than one at a time.

    Its linear layers run row by row in both cases: whether *they* depend on the number of rows is a
    property of the device, not of this module.
    """
    linears = [m for _, m in mixer.module.named_modules() if isinstance(m, nn.Linear | nn.QuantizedLinear)]
    together, alone = fork(mixer.call.cache), fork(mixer.call.cache)
    undos = [attach(linear, _RowByRow) for linear in linears]
    try:
        block = _in_parts(mixer.module, mixer.call.with_cache(together), parts)
    finally:
        for undo in undos:
            undo()
    rows = _in_parts(mixer.module, mixer.call.with_cache(alone), one_by_one)
    pairs = zip([block, *arrays([together])], [rows, *arrays([alone])], strict=True)
    return not all(mx.array_equal(a, b).item() for a, b in pairs)


def _in_parts(module: nn.Module, call: Call, parts: Parts) -> mx.array:
    """The module's output rows `[1, L, H]`."""
    sizes = parts(call)
    if len(sizes) == 1:
        return residual(module(*call.args, **call.kwargs))
    outputs = [residual(module(*part.args, **part.kwargs)) for part in split(call, sizes)]
    return mx.concatenate(outputs, axis=1)


class _RowByRow(Mixin):
    """Mixin of a linear layer: one matrix-vector product per row; some layers are several in one."""

    def __call__(self, x: mx.array) -> Any:
        one = super().__call__
        return by_row(one, x) if x.ndim == 3 else one(x)


def _device_is_row_exact() -> bool:
    """Whether a linear layer's product has the same bits for a row alone and in company.

    On the CPU that depends on the BLAS: MLX's own is exact, a preloaded OpenBLAS is not. On a GPU it is
    answered with yes, because there the comparison leaves linear layers out.
    """
    if mx.default_device().type == mx.DeviceType.gpu:
        return True
    for width in (64, 256):
        x, w = (
            mx.random.normal((8, width), key=mx.random.key(0)),
            mx.random.normal((256, width), key=mx.random.key(1)),
        )
        alone = mx.concatenate([x[i : i + 1] @ w.T for i in range(8)])
        if not mx.array_equal(x[:4] @ w.T, alone[:4]) or not mx.array_equal(x @ w.T, alone):
            return False
    return True
