"""How long a verify pass's linear layer takes by each way there is, for 1 to 8 rows."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
from dflash_metal import launch

from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.selftest import quantized_matmul

STOCK, BY_ROW = "stock", "row by row"
CACHED = 1 << 28
"""Bytes of weights that a pass goes through, so that none is still in a cache when it comes round again."""


@dataclass(frozen=True)
class Timings:
    """Microseconds per call.

    Attributes:
        rows: of x.
        ways: "stock" (MLX's own op on all rows, not exact on every GPU), "row by row", and "R=n": qmv_block
            with n outputs per simdgroup, which changes no bit.
    """

    rows: int
    ways: dict[str, float]

    @property
    def chosen(self) -> str:
        """The way that the product takes."""
        return f"R={launch.rows_per_simdgroup(self.rows)}"


def time_layer(
    kernels: Kernels,
    K: int,
    N: int,
    *,
    bits: int = 4,
    group_size: int = 64,
    dtype: mx.Dtype = mx.bfloat16,
    repeats: int = 9,
    cached: int = CACHED,
) -> list[Timings]:
    """Time a layer of K inputs and N outputs; all ways in turns, the median of `repeats` rounds.

    Raises:
        ValueError: the kernel does not take such a layer.
    """
    if refused := launch.qmv_block_refuses(K, N, group_size, bits, dtype):
        raise ValueError(refused)
    weight = (mx.random.normal((N, K)) * 0.05).astype(dtype)
    copies = max(1, -(-cached * 8 // (N * K * bits)))
    layers = [mx.quantize(weight + i, group_size, bits) for i in range(copies)]
    mx.eval(layers)
    found = []
    for rows in launch.ROWS:
        x = mx.random.normal((rows, K)).astype(dtype)
        mx.eval(x)
        ways = _ways(kernels, x, bits, group_size)
        rounds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(repeats + 1):
            for name, run in ways.items():
                start = time.perf_counter()
                mx.eval([run(*layer) for layer in layers])
                if turn:  # the first round compiles
                    rounds[name].append(1e6 * (time.perf_counter() - start) / copies)
        found.append(Timings(rows, {name: statistics.median(times) for name, times in rounds.items()}))
    return found


def _ways(
    kernels: Kernels, x: mx.array, bits: int, group_size: int
) -> dict[str, Callable[[mx.array, mx.array, mx.array], mx.array]]:
    def stock(w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return quantized_matmul(x, w, scales, biases, group_size, bits)

    def by_row(w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        rows = [quantized_matmul(x[i : i + 1], w, scales, biases, group_size, bits) for i in range(len(x))]
        return mx.concatenate(rows)

    def block(R: int) -> Callable[[mx.array, mx.array, mx.array], mx.array]:
        return lambda w, scales, biases: launch.qmv_block(
            x,
            w,
            scales,
            biases,
            group_size=group_size,
            bits=bits,
            float_sums=launch.sums_in_float(kernels.device.mlx),
            R=R,
            make=kernels.make,
        )

    return {STOCK: stock, BY_ROW: by_row, **{f"R={R}": block(R) for R in (1, 2, 3, 4)}}
