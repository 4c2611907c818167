"""The exact fallback for modules that take another path for a single row.

Some attention (MLA) and state-space (Mamba 2) modules compute one row by other operations than several,
so a block's rows would not carry the numbers of plain decoding. In a verify pass such a module runs row
by row. Which modules these are is found by running each both ways and comparing the bits.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from dflash_mlx.target.attach import Mixin, Undo, attach
from dflash_mlx.target.caches import Cache, arrays, fork, is_recurrent
from dflash_mlx.target.call import Call, residual
from dflash_mlx.target.mixers import Mixer


class RowWise:
    """One module that runs row by row while `active`, and the recurrent state after each row."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
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
        rows.cache = call.cache if is_recurrent(call.cache) else None
        rows.states = []
        outputs = []
        for index in range(call.rows):
            row = call.row(index)
            outputs.append(run(*row.args, **row.kwargs))
            if rows.cache is not None:
                rows.states.append(list(rows.cache.cache))
        return _joined(outputs)


def _joined(outputs: Sequence[Any]) -> Any:
    """Rows side by side; what is no row, such as an offset, as the last row left it."""
    if isinstance(outputs[0], tuple | list):
        return tuple(_joined(parts) for parts in zip(*outputs, strict=True))
    is_rows = isinstance(outputs[0], mx.array) and outputs[0].ndim == 3
    return mx.concatenate(list(outputs), axis=1) if is_rows else outputs[-1]


def find_branching(mixers: list[Mixer]) -> list[nn.Module]:
    """The mixers that need `RowWise`: all instances of a class whose first instance branches."""
    if not _device_is_row_exact():
        return []  # No module can be exact here, and running row by row would not make it so.
    first = {type(m.module): m for m in reversed(mixers)}
    branching = {cls for cls, mixer in first.items() if branches_on_single_row(mixer)}
    return [m.module for m in mixers if type(m.module) in branching]


def branches_on_single_row(mixer: Mixer) -> bool:
    """Whether a mixer gives several rows other bits than the same rows one at a time.

    Its linear layers run row by row in both cases: whether *they* depend on the number of rows is a
    property of the device, not of this module.
    """
    linears = [m for _, m in mixer.module.named_modules() if isinstance(m, nn.Linear | nn.QuantizedLinear)]
    together, alone = fork(mixer.call.cache), fork(mixer.call.cache)
    undos = [attach(linear, _RowByRow) for linear in linears]
    try:
        block = _output(mixer.module, mixer.call.with_cache(together))
    finally:
        for undo in undos:
            undo()
    call = mixer.call.with_cache(alone)
    rows = mx.concatenate([_output(mixer.module, call.row(i)) for i in range(call.rows)], axis=1)
    pairs = zip([block, *arrays([together])], [rows, *arrays([alone])], strict=True)
    return not all(mx.array_equal(a, b).item() for a, b in pairs)


def _output(module: nn.Module, call: Call) -> mx.array:
    return residual(module(*call.args, **call.kwargs))


class _RowByRow(Mixin):
    """Mixin of a linear layer: one matrix-vector product per row."""

    def __call__(self, x: mx.array) -> Any:
        one = super().__call__
        return _joined([one(x[:, i : i + 1]) for i in range(x.shape[1])]) if x.ndim == 3 else one(x)


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
