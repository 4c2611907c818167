"""Whether our kernels have the very bits of MLX's own one-row op on this machine: tried, then remembered.

A kernel's bits depend on the GPU, the compiler that comes with the system, MLX, and the kernel's own text.
When one of them changes, it is tried again.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from dflash_metal import launch, reference, tile
from dflash_metal.agreement import OUTPUTS, agreement, differing_values
from dflash_metal.kernel import Kernel, Make

from dflash_mlx import memo
from dflash_mlx.kernels.chip import Device

ROWS = range(2, max(launch.ROWS) + 1)


@dataclass(frozen=True)
class Verdict:
    """Whether every bit was right, and in `detail` what was not, or the compiler's log."""

    ok: bool
    detail: str = ""

    def __str__(self) -> str:
        """One line."""
        return "passed" if self.ok else self.detail.strip().partition("\n")[0]


@dataclass(frozen=True)
class Format:
    """What a variant of qmv_block is compiled for, but for the rows."""

    bits: int
    group_size: int
    dtype: mx.Dtype
    fast: bool

    def __str__(self) -> str:
        kind = str(self.dtype).rpartition(".")[2]
        path = "aligned" if self.fast else "general"
        return f"qmv_block, {self.bits} bits, groups of {self.group_size}, {kind}, {path}"

    @property
    def shape(self) -> tuple[int, int]:
        """K and N of a small layer that takes this path in every MLX, with a last step that is not full."""
        return (1024, 72) if self.fast else ({32: 672, 64: 704, 128: 640}[self.group_size], 74)


def quantized_matmul(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int
) -> mx.array:
    """MLX's own product with the rows of a quantized matrix."""
    return mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=group_size, bits=bits)


@dataclass(frozen=True)
class TileFormat:
    """What a variant of qmm_block is compiled for, but for the rows."""

    bits: int
    group_size: int
    dtype: mx.Dtype
    operands: mx.Dtype

    def __str__(self) -> str:
        kinds = [str(dtype).rpartition(".")[2] for dtype in (self.dtype, self.operands)]
        return f"{self.bits} bits, groups of {self.group_size}, {kinds[0]} by {kinds[1]}"


@dataclass(frozen=True)
class SelfTest:
    """Tries kernels on random data; fields as those of `Kernels`."""

    device: Device
    make: Make
    one_row: Callable[..., mx.array]
    folder: Path | None = None
    outputs: int = OUTPUTS

    def qmv_block(self, form: Format, *, again: bool = False) -> Verdict:
        """2 to 8 rows against `one_row`, bit for bit."""
        return self._judge((launch.QMV_BLOCK,), str(form), lambda: self._block_differs(form), again)

    def tile(self, form: TileFormat, *, again: bool = False) -> Verdict:
        """Up to 16 rows against each alone, bit for bit, and against the true product."""
        return self._judge((tile.QMM_BLOCK,), f"qmm_block, {form}", lambda: self._tile_differs(form), again)

    def few(self, form: TileFormat, *, again: bool = False) -> Verdict:
        """Whether `qmm_few` has the bits of a tile that passed: the order inside a matrix step decides."""
        kernels = tile.QMM_BLOCK, tile.QMM_FEW
        return self._judge(kernels, f"qmm_few, {form}", lambda: self._few_differs(form), again)

    def selector_walk(self, candidates: int, rank: int, dtype: mx.Dtype, *, again: bool = False) -> Verdict:
        """Paths through random candidates against the same in numpy."""
        kind = str(dtype).rpartition(".")[2]
        name = f"selector_walk, {candidates} candidates, rank {rank}, {kind}"
        return self._judge(
            (launch.SELECTOR_WALK,), name, lambda: self._walk_differs(candidates, rank, dtype), again
        )

    def common(self) -> dict[str, Verdict]:
        """Tries the formats that most models come in, and the public drafters' walk; {} without a GPU."""
        if not self.device.metal:
            return {}
        sizes = ((4, 32), (4, 64), (4, 128), (8, 32), (8, 64))
        forms = [Format(bits, size, mx.bfloat16, fast) for bits, size in sizes for fast in (True, False)]
        verdicts = {str(form): self.qmv_block(form, again=True) for form in forms}
        walk = self.selector_walk(16, 256, mx.bfloat16, again=True)
        return {**verdicts, "selector_walk, 16 candidates": walk}

    def _judge(
        self, kernels: tuple[Kernel, ...], name: str, differs: Callable[[], str | None], again: bool
    ) -> Verdict:
        key = {
            "kernel": name,
            "source": hashlib.sha256("".join(k.header + k.body for k in kernels).encode()).hexdigest(),
            "architecture": self.device.architecture,
            "system": self.device.system,
            "mlx": self.device.mlx,
        }
        known = None if again else memo.recall("selftest", key, self.folder)
        if known is not None:
            return Verdict(**known)
        try:
            found = differs()
            verdict = Verdict(found is None, found or "")
        except Exception as error:  # the compiler's log comes as an exception of MLX's
            verdict = Verdict(False, f"{name} does not run: {error}")
        memo.remember("selftest", key, asdict(verdict), self.folder)
        return verdict

    def _block_differs(self, form: Format) -> str | None:
        """What differs, or None."""
        K, N = form.shape
        keys = mx.random.split(mx.random.key(K + form.bits), 2)
        weight = (mx.random.normal((N, K), key=keys[0]) * 0.05).astype(form.dtype)
        sizes = mx.array([1, 3, 0.1, 30, 1, 0.01, 2, 100])[:, None]
        x = (mx.random.normal((8, K), key=keys[1]) * sizes).astype(form.dtype)
        w, scales, biases = mx.quantize(weight, form.group_size, form.bits)
        alone = mx.concatenate(
            [self.one_row(x[i : i + 1], w, scales, biases, form.group_size, form.bits) for i in range(8)]
        )
        for rows in ROWS:
            block = launch.qmv_block(
                x[:rows],
                w,
                scales,
                biases,
                group_size=form.group_size,
                bits=form.bits,
                float_sums=launch.sums_in_float(self.device.mlx),
                make=self.make,
            )
            if wrong := differing_values(block, alone[:rows]):
                return f"{form}: with {rows} rows, {wrong} of {block.size} values differ from MLX's"
        return None

    def _tile_differs(self, form: TileFormat) -> str | None:
        """What differs, or None."""
        K, N = 8 * form.group_size, 74
        keys = mx.random.split(mx.random.key(K + form.bits), 2)
        x = mx.random.normal((16, K), key=keys[0]).astype(form.dtype)
        weight = (mx.random.normal((N, K), key=keys[1]) * 0.05).astype(form.dtype)
        w, scales, biases = mx.quantize(weight, form.group_size, form.bits)

        def product(rows: mx.array) -> mx.array:
            known: dict[str, Any] = {"group_size": form.group_size, "bits": form.bits, "make": self.make}
            return tile.qmm_block(rows, w, scales, biases, **known, operands=form.operands)

        alone = mx.concatenate([product(x[i : i + 1]) for i in range(16)])
        for rows in (2, 7, 8, 9, 16):
            if wrong := differing_values(product(x[:rows]), alone[:rows]):
                return f"with {rows} rows, {wrong} values differ from those of rows alone"
        x, scales, biases = (array.astype(mx.float32) for array in (x, scales, biases))
        weight = mx.dequantize(w, scales, biases, form.group_size, form.bits)
        # Rounding to bfloat16 moves a value by 2^-9 of it at most.
        far = mx.abs(alone.astype(mx.float32) - x @ weight.T) > mx.abs(x) @ mx.abs(weight).T / 256
        count: Any = far.sum().item()
        return f"{count} values are far from the true product" if count else None

    def _few_differs(self, form: TileFormat) -> str | None:
        """What differs, or None."""
        found = agreement(
            form.dtype,
            group_size=form.group_size,
            bits=form.bits,
            operands=form.operands,
            outputs=self.outputs,
            make=self.make,
        )
        return (
            None if found.holds else f"{found.differing:,} of {found.values:,} values differ from the tile's"
        )

    def _walk_differs(self, candidates: int, rank: int, dtype: mx.Dtype) -> str | None:
        """What differs, or None. Small integers: sums of them are exact in any order."""
        dice = np.random.default_rng(candidates + rank)
        slots, vocabulary = 7, 4 * candidates
        picks = [dice.choice(vocabulary, candidates, replace=False) for _ in range(slots)]
        ids = np.stack(picks).astype(np.uint32)
        unary = dice.integers(-8, 9, (slots, candidates)).astype(np.float32)
        hidden = dice.integers(-1, 2, (slots, rank)).astype(np.float32)
        before, after = (dice.integers(-1, 2, (vocabulary, rank)).astype(np.float32) for _ in range(2))
        order = dice.permutation(slots * candidates).reshape(slots, candidates)  # so that no two are equal
        noise = (order / 1024).astype(np.float32)
        path = launch.selector_walk(
            mx.array(ids),
            mx.array(unary).astype(dtype),
            mx.array(hidden).astype(dtype),
            mx.array(before).astype(dtype),
            mx.array(after).astype(dtype),
            1,
            noise=mx.array(noise),
            make=self.make,
        )
        expected = reference.selector_walk(ids, unary, hidden, before, after, 1, noise=noise)
        if np.array_equal(np.array(path), expected):
            return None
        return f"selector_walk goes {path.tolist()}, not {expected.tolist()}"
