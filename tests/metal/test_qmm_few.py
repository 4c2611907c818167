"""The tile's twin without the matrix unit, and the test that decides whether a GPU may use it."""

from __future__ import annotations

import mlx.core as mx
import pytest
from dflash_metal import tile
from dflash_metal.agreement import agreement
from dflash_metal.kernel import BITS, GROUP_SIZES

from metal.conftest import Backend
from metal.emulator import MATRIX_ORDERS, Emulator
from metal.layers import Layer, differing, floats


@pytest.mark.parametrize("dtype", tile.TILE_DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_contract(backend: Backend, bits: int, group_size: int, dtype: mx.Dtype) -> None:
    """One row, and three of one format; `agreement` has the others, and sums that are not rounded."""
    several = (1, 3) if (group_size, dtype) == (64, mx.bfloat16) else (1,)
    layer = Layer.random(37, 640, group_size=group_size, bits=bits, dtype=dtype).wide()

    def blocks() -> list[mx.array]:
        return [layer.few(layer.x[:M], backend.make) for M in several]

    backend.prepare(blocks)
    expected = layer.tile_expected(dtype)
    assert [differing(floats(y), expected[: len(y)]) for y in blocks()] == [0] * len(several)


@pytest.mark.parametrize("K", [64, 192, 1024, 4160])
def test_contract_for_every_number_of_simdgroups(backend: Backend, K: int) -> None:
    layer = Layer.random(24, K, group_size=64, bits=4, dtype=mx.bfloat16).wide()
    y = layer.few(layer.x[:2], backend.make, out=mx.float32)
    assert differing(floats(y), layer.tile_expected(mx.float32)[:2]) == 0


def test_outputs_of_a_lane_change_no_bit(backend: Backend) -> None:
    layer = Layer.random(37, 640, group_size=64, bits=4, dtype=mx.bfloat16)
    first, *others = (layer.few(layer.x[:2], backend.make, R=R) for R in (1, 2, 4))
    assert [differing(first, other) for other in others] == [0, 0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("M", tile.FEW_ROWS)
def test_weights_are_read_once(emulator: Emulator, M: int, bits: int) -> None:
    """And every scale; x twice for every R outputs, for its sum and for its products."""
    N, K = 64, 1024
    layer = Layer.random(N, K, group_size=64, bits=bits, dtype=mx.bfloat16)
    layer.few(layer.x[:M], emulator.metal_kernel)
    read, written = emulator.traffic.read, emulator.traffic.written
    assert read["w"] == layer.w.nbytes
    assert read["scales"] == read["biases"] == layer.scales.nbytes
    assert read["x"] == 2 * layer.x[:M].nbytes * N // tile.OUTPUTS_PER_LANE
    assert written == dict.fromkeys(written, 0) | {"y": M * N * 2}


def test_both_agree_where_products_are_added_in_ascending_order(emulator: Emulator) -> None:
    """More than a million values, every row in every slot."""
    found = agreement(
        mx.bfloat16, group_size=64, bits=4, operands=mx.bfloat16, outputs=1640, make=emulator.metal_kernel
    )
    assert found.values >= 1_000_000
    assert found.holds


@pytest.mark.parametrize(
    ("bits", "dtype", "operands"),
    [
        (4, mx.bfloat16, mx.bfloat16),
        (4, mx.bfloat16, mx.float32),
        (4, mx.float16, mx.float16),
        (8, mx.bfloat16, mx.bfloat16),
    ],
    ids=["bfloat16", "bfloat16 as float32", "float16", "8 bits"],
)
@pytest.mark.parametrize("order", MATRIX_ORDERS)
def test_another_order_of_the_matrix_unit_is_noticed(
    emulator: Emulator, order: str, bits: int, dtype: mx.Dtype, operands: mx.Dtype
) -> None:
    """By a quarter of the values, and of a hundredth of those that are compared on a Mac."""
    other = Emulator(emulator.folder, order)
    found = agreement(dtype, group_size=64, bits=bits, operands=operands, outputs=41, make=other.metal_kernel)
    assert found.holds == (order == "ascending")
    if order != "ascending":
        assert found.differing > found.values // 4


@pytest.mark.skipif(not mx.metal.is_available(), reason="no Metal device here")
@pytest.mark.parametrize("bits", BITS)
def test_what_this_device_does(bits: int) -> None:
    """Says which it is; both are possible, and the engine asks before it uses qmm_few."""
    for operands in (mx.bfloat16, mx.float32):
        print(operands, agreement(mx.bfloat16, group_size=64, bits=bits, operands=operands))


@pytest.mark.parametrize("rows", [0, 4])
def test_rows_are_one_to_three(rows: int) -> None:
    layer = Layer.random(16, 512, group_size=64, bits=4, dtype=mx.bfloat16)
    with pytest.raises(ValueError, match=f"{rows} rows of x: the kernel takes 1 to 3"):
        layer.few(mx.zeros((rows, 512), mx.bfloat16), mx.fast.metal_kernel)
