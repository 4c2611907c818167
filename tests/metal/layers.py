"""Quantized layers to try kernels on, and the contract's answer for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from dflash_metal import launch, reference, tile
from dflash_metal.kernel import Make
from numpy.typing import NDArray

from metal.emulator import to_numpy

NAMES: dict[mx.Dtype, reference.Dtype] = {
    mx.bfloat16: "bfloat16",
    mx.float16: "float16",
    mx.float32: "float32",
}


def floats(array: mx.array) -> NDArray[np.float32]:
    return np.array(array.astype(mx.float32))


@dataclass(frozen=True)
class Layer:
    """Rows of very different size, eight or as many as asked for, and the weights they meet."""

    x: mx.array
    w: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int

    @classmethod
    def random(
        cls,
        N: int,
        K: int,
        *,
        group_size: int,
        bits: int,
        dtype: mx.Dtype,
        size: float = 1,
        rows: int = 8,
    ) -> Layer:
        mx.random.seed(N * K + bits)
        weight = (mx.random.normal((N, K)) * 0.05).astype(dtype)
        sizes = mx.array(2 * [1, 3, 0.1, 30, 1, 0.01, 2, 100])[:rows, None] * size
        x = (mx.random.normal((rows, K)) * sizes).astype(dtype)
        return cls(x, *mx.quantize(weight, group_size, bits), group_size, bits)

    def block(self, M: int, make: Make, *, float_sums: bool = True, R: int | None = None) -> mx.array:
        """The first M rows by our kernel."""
        return launch.qmv_block(
            self.x[:M],
            *(self.w, self.scales, self.biases),
            group_size=self.group_size,
            bits=self.bits,
            float_sums=float_sums,
            R=R,
            make=make,
        )

    def wide(self) -> Layer:
        """With x of very different size inside a row too, so that the order of additions shows.

        The products of x and quantized weights have so few bits that most sums are exact.
        """
        sizes = mx.exp(mx.random.uniform(-8, 4, self.x.shape, key=mx.random.key(0)))
        return replace(self, x=(self.x.astype(mx.float32) * sizes).astype(self.x.dtype))

    def tile(self, x: mx.array, make: Make, **choices: Any) -> mx.array:
        """Any rows by the tile; `choices` are those of its launcher."""
        choices = {"operands": x.dtype} | choices
        weights = (self.w, self.scales, self.biases)
        return tile.qmm_block(x, *weights, group_size=self.group_size, bits=self.bits, make=make, **choices)

    def few(self, x: mx.array, make: Make, **choices: Any) -> mx.array:
        """One to three rows by the tile's twin."""
        weights = (self.w, self.scales, self.biases)
        return tile.qmm_few(x, *weights, group_size=self.group_size, bits=self.bits, make=make, **choices)

    def tile_expected(self, out: mx.Dtype) -> NDArray[np.float32]:
        return reference.qmm_block(
            floats(self.x),
            np.array(self.w),
            floats(self.scales),
            floats(self.biases),
            group_size=self.group_size,
            bits=self.bits,
            simdgroups=tile.simdgroups(self.x.shape[1], self.group_size),
            dtype=NAMES[self.x.dtype],
            out=NAMES[out],
        )

    def fast(self, float_sums: bool) -> bool:
        return launch.is_fast(self.x.shape[1], self.w.shape[0], self.bits, float_sums)

    def expected(self, *, float_sums: bool = True) -> NDArray[np.float32]:
        return reference.qmv_block(
            floats(self.x),
            np.array(self.w),
            floats(self.scales),
            floats(self.biases),
            group_size=self.group_size,
            bits=self.bits,
            fast=self.fast(float_sums),
            float_sums=float_sums,
            dtype=NAMES[self.x.dtype],
        )


def differing(a: mx.array | NDArray[Any], b: mx.array | NDArray[Any]) -> int:
    """How many values differ in any bit."""
    left, right = (to_numpy(side) if isinstance(side, mx.array) else side for side in (a, b))
    assert left.shape == right.shape
    bits = np.dtype(f"u{left.itemsize}")
    return int((left.view(bits) != right.view(bits)).sum())
