"""One choice per linear layer: our kernel where it holds here, else MLX's own op, row by row.

In exact numerics a kernel has the bits of MLX's own op on one row. In fast numerics layers that can take the
tile, in plain steps too: there a row has the bits it has alone by the tile, which are not MLX's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from dflash_metal import launch, tile
from dflash_metal.agreement import OUTPUTS
from dflash_metal.kernel import SMALLEST_ARRAY, Make

from dflash_mlx.kernels.chip import Device
from dflash_mlx.kernels.selftest import Format, SelfTest, TileFormat, Verdict, quantized_matmul

MOST_ROWS = max(launch.ROWS)
Walker = Callable[..., mx.array]
"""`dflash_metal.launch.selector_walk`, but for `make`."""


class Route(Enum):
    """How a linear layer computes the rows of a verify pass."""

    STOCK = "MLX's own op"
    BLOCK = "qmv_block"
    TILE = "qmm_block"
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
class Matrix:
    """A quantized `[N, K]`, as `mx.quantize` makes it."""

    w: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int


@dataclass(frozen=True)
class Tile:
    """How the tile is used: what its matrix unit multiplies, and whether `qmm_few` has its bits here."""

    operands: mx.Dtype
    has_few: bool


@dataclass(frozen=True)
class Choice:
    """A route and, where it is not ours, why not."""

    route: Route
    reason: str = ""
    tile: Tile | None = None


@dataclass(frozen=True)
class Kernels:
    """The kernels of one device.

    Args:
        device: where they run.
        fast: whether layers may take the tile.
        make: `mx.fast.metal_kernel` or a stand-in.
        one_row: MLX's own product, whose bits a kernel must have.
        folder: where verdicts are kept; None: the user's cache folder.
        outputs: of the layer on which `qmm_few` is compared with the tile.
    """

    device: Device = field(default_factory=Device.here)
    fast: bool = False
    make: Make = mx.fast.metal_kernel
    one_row: Callable[..., mx.array] = quantized_matmul
    folder: Path | None = None
    outputs: int = OUTPUTS

    @property
    def selftest(self) -> SelfTest:
        """The judge of this device's kernels."""
        return SelfTest(self.device, self.make, self.one_row, self.folder, self.outputs)

    def choose(self, layer: Layer) -> Choice:
        """How a layer should compute a verify pass. May run the self-tests of its format."""
        problem = ""
        if self.fast and self.device.chip is not None:
            found, problem = self._tile(layer)
            if found is not None:
                return Choice(Route.TILE, tile=found)
        choice = self._exact(layer)
        return replace(choice, reason=f"no tile: {problem}") if problem and not choice.reason else choice

    def _tile(self, layer: Layer) -> tuple[Tile | None, str]:
        """How the tile would compute a layer, or None and why it does not."""
        if layer.bits is None or layer.mode != "affine":
            return None, ""
        shape = (layer.K, layer.N, layer.group_size, layer.bits, layer.dtype)
        if refused := tile.qmm_block_refuses(*shape):
            return None, refused
        assert self.device.chip is not None
        verdict = Verdict(False)
        # Where the GPU or its compiler has no matrices of the layer's type, float holds the same values.
        for operands in {tile.operand_type(layer.dtype, self.device.chip.generation): 0, mx.float32: 0}:
            form = TileFormat(layer.bits, layer.group_size, layer.dtype, operands)
            verdict = self.selftest.tile(form)
            if verdict.ok:
                return Tile(operands, self.selftest.few(form).ok), ""
        return None, f"it failed its self-test: {verdict}"

    def _exact(self, layer: Layer) -> Choice:
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

    def product(self, choice: Choice, x: mx.array, matrix: Matrix) -> mx.array:
        """Rows `[M, K]` times a matrix: `[M, N]`, each row with the bits it has alone.

        More rows than the kernel takes are shared out evenly.
        """
        rows = x.shape[0]
        parts = -(-rows // max(tile.TILE_ROWS if choice.tile else launch.ROWS))
        bounds = [rows * part // parts for part in range(parts + 1)]
        products = [self._part(choice.tile, x[start:end], matrix) for start, end in pairwise(bounds)]
        return products[0] if parts == 1 else mx.concatenate(products)

    def _part(self, way: Tile | None, x: mx.array, matrix: Matrix) -> mx.array:
        arrays = x, matrix.w, matrix.scales, matrix.biases
        known: dict[str, Any] = {
            "group_size": matrix.group_size,
            "bits": matrix.bits,
            "make": self.make,
        }
        if way is None:
            return launch.qmv_block(*arrays, **known, float_sums=self._float_sums)
        if way.has_few and x.shape[0] in tile.FEW_ROWS:
            return tile.qmm_few(*arrays, **known)
        return tile.qmm_block(*arrays, **known, operands=way.operands)

    def walker(self, candidates: int, rank: int, dtype: mx.Dtype) -> tuple[Walker | None, str]:
        """What walks a drafter's candidates in one launch, or None and why not. May run its self-test."""
        if not self.device.metal:
            return None, "there is no GPU"
        if not SMALLEST_ARRAY <= candidates <= launch.MOST_CANDIDATES or rank < SMALLEST_ARRAY:
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
