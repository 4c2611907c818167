"""One choice per linear layer: our kernel where it is exact here, else MLX's own op, row by row."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
from dflash_metal import launch

from dflash_mlx.kernels.chip import Device
from dflash_mlx.kernels.selftest import Format, SelfTest, Verdict, quantized_matmul

MOST_ROWS = max(launch.ROWS)
Walker = Callable[..., mx.array]
"""`dflash_metal.launch.selector_walk`, but for `make`."""


class Route(Enum):
    """How a linear layer computes the rows of a verify pass."""

    STOCK = "MLX's own op"
    BLOCK = "qmv_block"
    ROWS = "MLX's own op, row by row"


@dataclass(frozen=True)
class Layer:
    """A linear layer: K inputs, N outputs; `bits` is None where it is not quantized."""

    K: int
    N: int
    dtype: mx.Dtype
    bits: int | None = None
    group_size: int = 0
    mode: str = "affine"

    def __str__(self) -> str:
        kind = str(self.dtype).rpartition(".")[2]
        if self.bits is None:
            return kind
        mode = "" if self.mode == "affine" else f"{self.mode} "
        return f"{mode}{self.bits} bits, groups of {self.group_size}, {kind}"


@dataclass(frozen=True)
class Choice:
    """A route and, where it is not ours, why not."""

    route: Route
    reason: str = ""


@dataclass(frozen=True)
class Kernels:
    """The kernels of one device.

    Args:
        device: where they run.
        make: `mx.fast.metal_kernel` or a stand-in.
        one_row: MLX's own product, whose bits a kernel must have.
        folder: where verdicts are kept; None: the user's cache folder.
    """

    device: Device = field(default_factory=Device.here)
    make: launch.Make = mx.fast.metal_kernel
    one_row: Callable[..., mx.array] = quantized_matmul
    folder: Path | None = None

    @property
    def selftest(self) -> SelfTest:
        """The judge of this device's kernels."""
        return SelfTest(self.device, self.make, self.one_row, self.folder)

    def choose(self, layer: Layer) -> Choice:
        """How a layer should compute a verify pass. May run the self-test of its format."""
        if not self.device.metal:
            return Choice(Route.STOCK, "there is no GPU")
        if layer.bits is None:
            return Choice(Route.ROWS, "not quantized: there is no kernel")
        if layer.mode != "affine":
            return Choice(Route.ROWS, f"{layer.mode}: there is no kernel")
        if self.device.chip is None:
            return Choice(Route.ROWS, f"unknown GPU {self.device.architecture}")
        shape = (layer.K, layer.N, layer.group_size, layer.bits, layer.dtype)
        if refused := launch.qmv_block_refuses(*shape):
            return Choice(Route.ROWS, refused)
        verdict = self.verdict(layer)
        return Choice(Route.BLOCK) if verdict.ok else Choice(Route.ROWS, f"failed its self-test: {verdict}")

    def verdict(self, layer: Layer) -> Verdict:
        """What the self-test said of the layer's format."""
        assert layer.bits is not None
        fast = launch.is_fast(layer.K, layer.N, layer.bits, self._float_sums)
        return self.selftest.qmv_block(Format(layer.bits, layer.group_size, layer.dtype, fast))

    def matmul(
        self, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int
    ) -> mx.array:
        """Rows `[M, K]` times a quantized `[N, K]`: `[M, N]`, each row with the bits it has alone.

        More rows than the kernel takes are shared out evenly.
        """
        rows = x.shape[0]
        parts = -(-rows // MOST_ROWS)
        bounds = [rows * part // parts for part in range(parts + 1)]
        products = [
            launch.qmv_block(
                x[start:end],
                w,
                scales,
                biases,
                group_size=group_size,
                bits=bits,
                float_sums=self._float_sums,
                make=self.make,
            )
            for start, end in pairwise(bounds)
        ]
        return products[0] if parts == 1 else mx.concatenate(products)

    def walker(self, candidates: int, rank: int, dtype: mx.Dtype) -> tuple[Walker | None, str]:
        """What walks a drafter's candidates in one launch, or None and why not. May run its self-test."""
        if not self.device.metal:
            return None, "there is no GPU"
        if not launch.SMALLEST_ARRAY <= candidates <= launch.MOST_CANDIDATES or rank < launch.SMALLEST_ARRAY:
            return (
                None,
                f"{candidates} candidates of rank {rank}: the kernel takes 8 to 32, of rank 8 and more",
            )
        verdict = self.selftest.selector_walk(candidates, rank, dtype)
        if not verdict.ok:
            return None, f"failed its self-test: {verdict}"
        return partial(launch.selector_walk, make=self.make), ""

    @property
    def _float_sums(self) -> bool:
        return launch.sums_in_float(self.device.mlx)
