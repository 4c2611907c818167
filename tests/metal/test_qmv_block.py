"""qmv_block: against its contract, against MLX's own kernels, and what it reads."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest
from dflash_metal import launch
from dflash_metal.kernel import BITS, GROUP_SIZES

from metal.conftest import Backend
from metal.emulator import Emulator, to_numpy
from metal.layers import Layer, differing, floats
from metal.oracle import Oracle

DTYPES = [pytest.param(dtype, id=str(dtype).rpartition(".")[2]) for dtype in launch.DTYPES]
ROWS = tuple(launch.ROWS)
FLOAT_SUMS = launch.sums_in_float(version("mlx"))


def inputs(path: str, group_size: int) -> int:
    """How many, so that MLX takes its fast kernel, or the other with a step that is not full."""
    return 1024 if path == "fast" else {32: 672, 64: 704, 128: 640}[group_size]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("path", ["fast", "general"])
def test_every_row_has_the_bits_of_mlx(
    mlx_kernels: Oracle, emulator: Emulator, path: str, bits: int, group_size: int, dtype: mx.Dtype
) -> None:
    """1 to 8 rows, outputs that fill no simdgroup: the kernel that MLX compiled for one row says the same."""
    float_sums = launch.sums_in_float(mlx_kernels.version)
    N = 37 if float_sums or path == "general" else 40
    layer = Layer.random(N, inputs(path, group_size), group_size=group_size, bits=bits, dtype=dtype)
    assert layer.fast(float_sums) == (path == "fast")

    def blocks() -> list[mx.array]:
        return [layer.block(M, emulator.metal_kernel, float_sums=float_sums) for M in ROWS]

    emulator.prepare(blocks)
    expected = mlx_kernels.qmv(layer, fast=layer.fast(float_sums))
    assert [differing(y, expected[: len(y)]) for y in blocks()] == [0] * len(ROWS)


@pytest.mark.parametrize(
    ("N", "K", "bits"), [(5, 704, 4), (7, 704, 8), (16, 5120, 4), (16, 5120, 8), (21, 768, 8), (12, 256, 4)]
)
def test_shapes_where_mlx_branches(
    mlx_kernels: Oracle, emulator: Emulator, N: int, K: int, bits: int
) -> None:
    """Fewer than 8 outputs, a last tile that MLX moves back, and real lengths."""
    float_sums = launch.sums_in_float(mlx_kernels.version)
    layer = Layer.random(N, K, group_size=64, bits=bits, dtype=mx.bfloat16)
    expected = mlx_kernels.qmv(layer, fast=layer.fast(float_sums))
    y = layer.block(5, emulator.metal_kernel, float_sums=float_sums)
    assert differing(y, expected[:5]) == 0


def test_both_summations_differ_and_are_told_apart(mlx_kernels: Oracle) -> None:
    """The switch matters: with the other one, some values are not those of this MLX."""
    float_sums = launch.sums_in_float(mlx_kernels.version)
    layer = Layer.random(40, 5120, group_size=64, bits=4, dtype=mx.bfloat16)
    mlx = mlx_kernels.qmv(layer, fast=True)
    wrong = mx.array(layer.expected(float_sums=not float_sums)).astype(mx.bfloat16)
    right = mx.array(layer.expected(float_sums=float_sums)).astype(mx.bfloat16)
    assert differing(right, mlx) == 0
    assert differing(wrong, mlx) > 0


@pytest.mark.skipif(not mx.metal.is_available(), reason="no Metal device here")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("path", ["fast", "general"])
def test_every_row_is_that_of_mlx_on_this_device(path: str, bits: int, dtype: mx.Dtype) -> None:
    layer = Layer.random(1024, inputs(path, 64), group_size=64, bits=bits, dtype=dtype)
    rows = [
        mx.quantized_matmul(row[None], layer.w, layer.scales, layer.biases, group_size=64, bits=bits)
        for row in layer.x
    ]
    expected = to_numpy(mx.concatenate(rows))
    blocks = [layer.block(M, mx.fast.metal_kernel, float_sums=FLOAT_SUMS) for M in ROWS]
    assert [differing(y, expected[: len(y)]) for y in blocks] == [0] * len(ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("path", ["fast", "general"])
def test_contract(backend: Backend, path: str, bits: int, group_size: int, dtype: mx.Dtype) -> None:
    layer = Layer.random(37, inputs(path, group_size), group_size=group_size, bits=bits, dtype=dtype)

    def blocks() -> list[mx.array]:
        return [layer.block(M, backend.make) for M in ROWS]

    backend.prepare(blocks)
    expected = layer.expected()
    assert [differing(floats(y), expected[: len(y)]) for y in blocks()] == [0] * len(ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_with_the_older_summation(backend: Backend, dtype: mx.Dtype) -> None:
    layer = Layer.random(40, 1024, group_size=64, bits=4, dtype=dtype)
    y = layer.block(5, backend.make, float_sums=False)
    assert differing(floats(y), layer.expected(float_sums=False)[:5]) == 0


@pytest.mark.parametrize("bits", BITS)
def test_denormals_are_zeros(backend: Backend, bits: int) -> None:
    layer = Layer.random(37, 1024, group_size=64, bits=bits, dtype=mx.float32, size=1e-37)
    y = layer.block(8, backend.make)
    assert differing(floats(y), layer.expected()) == 0


@pytest.mark.parametrize("bits", BITS)
def test_outputs_per_simdgroup_change_no_bit(backend: Backend, bits: int) -> None:
    layer = Layer.random(37, 1024, group_size=64, bits=bits, dtype=mx.bfloat16)

    def blocks() -> list[mx.array]:
        return [layer.block(5, backend.make, R=R) for R in (1, 2, 3, 4)]

    backend.prepare(blocks)
    first, *others = blocks()
    assert [differing(first, other) for other in others] == [0, 0, 0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("M", ROWS)
def test_weights_are_read_once(emulator: Emulator, M: int, bits: int) -> None:
    """For any number of rows. Lanes that share a scale each load it; x is read once for every R outputs."""
    N, K = 48, 1024
    layer = Layer.random(N, K, group_size=64, bits=bits, dtype=mx.bfloat16)
    layer.block(M, emulator.metal_kernel)
    read, written = emulator.traffic.read, emulator.traffic.written
    assert read["w"] == layer.w.nbytes
    lanes = 64 // (64 // bits)  # of a group, each with two packed words
    assert read["scales"] == read["biases"] == layer.scales.nbytes * lanes
    assert read["x"] == layer.x[:M].nbytes * N // launch.rows_per_simdgroup(M)
    assert written["y"] == M * N * layer.x.itemsize
    assert sum(written.values()) == written["y"]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"bits": 3}, "3 bits"),
        ({"group_size": 16}, "groups of 16"),
        ({"dtype": mx.float64}, "float64"),
        ({"K": 1000}, "1000 inputs"),
        ({"K": 128}, "a kernel of its own"),
        ({"K": 256, "N": 1}, "4 scales"),
        ({"K": 1 << 20, "N": 1 << 12}, "31 bits"),
    ],
)
def test_refusals_name_the_reason(shape: dict[str, int], reason: str) -> None:
    layer = {"K": 1024, "N": 64, "group_size": 64, "bits": 4, "dtype": mx.bfloat16}
    assert launch.qmv_block_refuses(**layer) is None  # type: ignore[arg-type]
    assert reason in str(launch.qmv_block_refuses(**(layer | shape)))  # type: ignore[arg-type]


def test_rows_are_one_to_eight() -> None:
    layer = Layer.random(16, 512, group_size=64, bits=4, dtype=mx.bfloat16)
    with pytest.raises(ValueError, match="0 rows"):
        layer.block(0, mx.fast.metal_kernel)


@pytest.mark.parametrize(
    ("release", "in_float"), [("0.32.3", False), ("0.32.4", True), ("0.33.0.dev1", True), ("0.33rc1", True)]
)
def test_summation_by_version(release: str, in_float: bool) -> None:
    assert launch.sums_in_float(release) == in_float


def test_the_documented_bytes_are_those_read(emulator: Emulator) -> None:
    """Else: what this test says belongs between the marks of the page."""
    lines = ["| bits | rows | packed weights | of their size | scales and biases | x |", "| --- " * 6 + "|"]
    for bits in BITS:
        layer = Layer.random(48, 1024, group_size=64, bits=bits, dtype=mx.bfloat16)
        for M in ROWS:
            layer.block(M, emulator.metal_kernel)
            read = emulator.traffic.read
            size, scales = read["w"] / layer.w.nbytes, read["scales"] + read["biases"]
            lines.append(f"| {bits} | {M} | {read['w']:,} | {size:.2f} | {scales:,} | {read['x']:,} |")
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    written = page.partition("<!-- bytes -->\n")[2].partition("<!-- end -->")[0]
    assert written == "\n".join([*lines, ""])
