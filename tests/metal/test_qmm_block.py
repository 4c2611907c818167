"""The tile: rows that do not see each other, how near to the truth they are, and what is read."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from dflash_metal import tile
from dflash_metal.kernel import BITS, GROUP_SIZES
from numpy.typing import NDArray

from metal.conftest import Backend
from metal.emulator import MATRIX_ORDERS, Emulator
from metal.layers import Layer, differing, floats
from metal.oracle import Oracle

# The type of x and what the matrix unit multiplies.
TYPES = [
    pytest.param(mx.bfloat16, mx.bfloat16, id="bfloat16"),
    pytest.param(mx.bfloat16, mx.float32, id="bfloat16 as float32"),
    pytest.param(mx.float16, mx.float16, id="float16"),
]


def small(dtype: mx.Dtype, *, bits: int = 4, group_size: int = 64) -> Layer:
    """Sixteen rows; three tiles of outputs, the last of them not full, and groups that differ in number."""
    return Layer.random(21, 640, group_size=group_size, bits=bits, dtype=dtype, rows=16).wide()


def strangers(layer: Layer, backend: Backend, **choices: Any) -> int:
    """How many values change with the company: 1 to 16 rows, every row in every slot of both tiles."""

    def of(rows: list[int]) -> mx.array:
        return layer.tile(layer.x[mx.array(rows)], backend.make, **choices)

    def alone() -> mx.array:
        return mx.concatenate([of([row]) for row in range(16)])

    def company() -> list[tuple[list[int], mx.array]]:
        first = [list(range(rows)) for rows in range(2, 17)]
        turned = [
            [(slot + turn) % slots for slot in range(slots)] for slots in (8, 16) for turn in range(1, slots)
        ]
        return [(rows, of(rows)) for rows in first + turned]

    backend.prepare(lambda: (of([0]), of(list(range(16)))))
    expected = alone()
    return sum(differing(y, expected[mx.array(rows)]) for rows, y in company())


@pytest.mark.parametrize(("dtype", "operands"), TYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_a_row_is_the_same_in_any_company(
    backend: Backend, bits: int, group_size: int, dtype: mx.Dtype, operands: mx.Dtype
) -> None:
    layer = small(dtype, bits=bits, group_size=group_size)
    assert strangers(layer, backend, operands=operands, out=mx.float32) == 0


@pytest.mark.parametrize("order", MATRIX_ORDERS[1:])
def test_in_any_company_however_the_matrix_unit_adds(emulator: Emulator, order: str) -> None:
    other = Emulator(emulator.folder, order)
    layer = small(mx.bfloat16)
    assert strangers(layer, Backend(other.metal_kernel, other.prepare), out=mx.float32) == 0


def test_infinite_companions_stay_with_themselves(backend: Backend) -> None:
    layer = small(mx.bfloat16)
    x = floats(layer.x)
    x[1:] = np.inf
    x[3] = np.nan
    y = layer.tile(mx.array(x).astype(mx.bfloat16), backend.make)
    assert differing(y[:1], layer.tile(layer.x[:1], backend.make)) == 0
    assert not np.isfinite(floats(y[1:])).any()


@pytest.mark.parametrize(("dtype", "operands"), TYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_contract(
    emulator: Emulator, bits: int, group_size: int, dtype: mx.Dtype, operands: mx.Dtype
) -> None:
    """To the bit, where the matrix unit adds in ascending order; rounding does not depend on the group."""
    layer = small(dtype, bits=bits, group_size=group_size)
    for out in (dtype, mx.float32) if group_size == 64 else (mx.float32,):
        y = layer.tile(layer.x, emulator.metal_kernel, operands=operands, out=out)
        assert differing(floats(y), layer.tile_expected(out)) == 0


@pytest.mark.parametrize("K", [64, 192, 1024, 4160])
def test_contract_for_every_number_of_simdgroups(emulator: Emulator, K: int) -> None:
    """1, 1, 4 and 8 of them, the last with one group more than the others."""
    layer = Layer.random(24, K, group_size=64, bits=4, dtype=mx.bfloat16).wide()
    y = layer.tile(layer.x, emulator.metal_kernel, out=mx.float32)
    assert differing(floats(y), layer.tile_expected(mx.float32)) == 0


@pytest.mark.parametrize("bits", BITS)
def test_denormals_are_zeros(emulator: Emulator, bits: int) -> None:
    layer = Layer.random(24, 640, group_size=64, bits=bits, dtype=mx.bfloat16, size=1e-38)
    y = layer.tile(layer.x, emulator.metal_kernel, out=mx.float32)
    assert differing(floats(y), layer.tile_expected(mx.float32)) == 0


def test_tiles_per_simdgroup_change_no_bit(backend: Backend) -> None:
    """Full tiles and others, for up to 8 rows and for up to 16."""
    layer = Layer.random(40, 640, group_size=64, bits=4, dtype=mx.bfloat16, rows=16).wide()
    for rows in (5, 16):
        first, *others = (layer.tile(layer.x[:rows], backend.make, R=R) for R in (1, 2, 4))
        assert [differing(first, other) for other in others] == [0, 0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("R", [1, 4])
def test_weights_are_read_once(emulator: Emulator, bits: int, R: int) -> None:
    """For any number of rows. Four lanes share a scale; x is read once for every R tiles, of 8 or 16 rows."""
    N, K = 64, 1024
    layer = Layer.random(N, K, group_size=64, bits=bits, dtype=mx.bfloat16, rows=16)
    for rows in (1, 8, 13, 16):
        layer.tile(layer.x[:rows], emulator.metal_kernel, R=R)
        read, written = emulator.traffic.read, emulator.traffic.written
        assert read["w"] == layer.w.nbytes
        assert read["scales"] == read["biases"] == 4 * layer.scales.nbytes
        assert read["x"] == (8 if rows <= 8 else 16) * K * 2 * N // (8 * R)
        assert written == dict.fromkeys(written, 0) | {"y": rows * N * 2}


def exact(layer: Layer) -> NDArray[np.float64]:
    scales, biases = (
        np.repeat(floats(values).astype(np.float64), layer.group_size, axis=1)
        for values in (layer.scales, layer.biases)
    )
    ones, zeros = mx.ones(layer.scales.shape), mx.zeros(layer.scales.shape)
    q = floats(mx.dequantize(layer.w, ones, zeros, layer.group_size, layer.bits)).astype(np.float64)
    return floats(layer.x).astype(np.float64) @ (scales * q + biases).T


def spread(kind: str, bits: int, dtype: mx.Dtype) -> Layer:
    """Rows as real ones may be: around zero, around one, or with a few columns fifty times as large."""
    layer = Layer.random(64, 2048, group_size=64, bits=bits, dtype=dtype)
    x = mx.random.normal(layer.x.shape)
    if kind == "around one":
        x = 1 + 0.3 * x
    elif kind == "outliers":
        x = x * mx.where(mx.random.uniform(shape=(1, x.shape[1])) < 0.01, 50.0, 1.0)
    return Layer(x.astype(dtype), layer.w, layer.scales, layer.biases, layer.group_size, layer.bits)


def error(y: NDArray[np.float32], truth: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean((y - truth) ** 2)))


@pytest.mark.parametrize("dtype", tile.TILE_DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["around zero", "around one", "outliers"])
def test_no_result_could_be_much_nearer(backend: Backend, kind: str, bits: int, dtype: mx.Dtype) -> None:
    """The error is that of rounding the float64 result once, to a part in two hundred."""
    layer = spread(kind, bits, dtype)
    truth = exact(layer)
    rounded = floats(mx.array(truth.astype(np.float32)).astype(dtype))
    y = floats(layer.tile(layer.x, backend.make))
    print(f"{kind}, {bits} bits: {error(y, truth) / error(rounded, truth):.5f} times the error of rounding")
    assert error(y, truth) < 1.005 * error(rounded, truth)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["around zero", "around one", "outliers"])
def test_as_near_as_mlx(mlx_kernels: Oracle, emulator: Emulator, kind: str, bits: int) -> None:
    layer = spread(kind, bits, mx.bfloat16)
    truth = exact(layer)
    mlx = mx.array(mlx_kernels.qmv(layer, fast=True)).view(mx.bfloat16)
    y = layer.tile(layer.x, emulator.metal_kernel)
    print(f"{kind}, {bits} bits: {error(floats(y), truth) / error(floats(mlx), truth):.5f} times MLX's error")
    assert error(floats(y), truth) < 1.001 * error(floats(mlx), truth)


def test_what_is_chosen_by_shape() -> None:
    assert [tile.simdgroups(K, 64) for K in (64, 192, 256, 960, 1024, 4032, 4096, 5120)] == [
        *(1, 1, 2, 2, 4, 4, 8, 8)
    ]
    assert [tile.tiles_per_simdgroup(N) for N in (1, 1024, 2047, 2048, 4095, 4096, 248320)] == [
        *(1, 1, 1, 2, 2, 4, 4)
    ]


@pytest.mark.parametrize(
    ("dtype", "generation", "operands"),
    [
        (mx.bfloat16, 13, mx.float32),
        (mx.bfloat16, 14, mx.float32),
        (mx.bfloat16, 15, mx.bfloat16),
        (mx.bfloat16, 17, mx.bfloat16),
        (mx.float16, 13, mx.float16),
    ],
)
def test_operands_by_generation(dtype: mx.Dtype, generation: int, operands: mx.Dtype) -> None:
    assert tile.operand_type(dtype, generation) == operands


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"bits": 6}, "6 bits"),
        ({"group_size": 16}, "groups of 16"),
        ({"dtype": mx.float32}, "float32: there is a kernel for bfloat16 and float16"),
        ({"K": 1056}, "1056 inputs"),
        ({"K": 64, "N": 7}, "7 scales"),
        ({"K": 1 << 20, "N": 1 << 12}, "31 bits"),
    ],
)
def test_refusals_name_the_reason(shape: dict[str, int], reason: str) -> None:
    layer = {"K": 64, "N": 64, "group_size": 64, "bits": 4, "dtype": mx.bfloat16}
    assert tile.qmm_block_refuses(**layer) is None  # type: ignore[arg-type]
    assert reason in str(tile.qmm_block_refuses(**(layer | shape)))  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, 17])
def test_rows_are_one_to_sixteen(rows: int) -> None:
    layer = small(mx.bfloat16)
    with pytest.raises(ValueError, match=f"{rows} rows of x: the kernel takes 1 to 16"):
        layer.tile(mx.zeros((rows, 640), mx.bfloat16), mx.fast.metal_kernel)
