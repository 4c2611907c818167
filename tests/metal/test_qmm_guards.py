"""Bugs planted in the kernels of the fast mode, and what notices each of them."""

from __future__ import annotations

import mlx.core as mx
import pytest

from metal.emulator import Emulator, MetalError
from metal.layers import Layer, differing, floats
from metal.test_guards import planted


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("int(lane / 2 % 4);", "int(3 - lane / 2 % 4);", id="another lane's row"),
        pytest.param("own += simd_shuffle_xor(own, ushort(16));", "", id="a sum of half the lanes"),
        pytest.param(
            "simd_shuffle_xor(own, ushort(2))", "simd_shuffle_xor(own, ushort(1))", id="columns mixed"
        ),
        pytest.param("+ (row % 2) * P;", "+ (1 - row % 2) * P;", id="x of another k than the weights"),
        pytest.param(
            "for (int s = 1; s < S; s++)", "for (int s = S - 1; s > 0; s--)", id="simdgroups backwards"
        ),
        pytest.param("metal::fma(bias, sum[i], scaled)", "scaled + bias * (sum[i] + 1) - bias", id="bias"),
    ],
)
def test_other_sums_of_the_tile(emulator: Emulator, right: str, wrong: str) -> None:
    layer = Layer.random(24, 5120, group_size=64, bits=4, dtype=mx.bfloat16).wide()
    y = layer.tile(layer.x, planted(emulator, right, wrong), out=mx.float32)
    assert differing(floats(y), layer.tile_expected(mx.float32)) > 0


def test_a_row_that_sees_how_many_there_are(emulator: Emulator) -> None:
    """One more sum where there are nine rows or more: what a tile that is chosen by rows would do."""
    layer = Layer.random(24, 640, group_size=64, bits=4, dtype=mx.bfloat16, rows=16)
    make = planted(emulator, "own = 0;", "own = C == 2 ? 0.001f : 0;")
    few, many = (layer.tile(layer.x[:rows], make, out=mx.float32) for rows in (8, 9))
    assert differing(few, many[:8]) > 0


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        pytest.param(
            "threadgroup_barrier(mem_flags::mem_threadgroup);", "", "read before write: ", id="no barrier"
        ),
        pytest.param(
            "+ i % 2, M - 1) * K", "+ i % 2, 16) * K", "out of range: load .* of x, ", id="rows that are not"
        ),
        pytest.param("FULL ? n : min(n, N - 1)", "n", "out of range: load .* of w, ", id="read past w"),
        pytest.param(
            "m < M && (FULL || n < N)", "FULL || n < N", "out of range: store .* of y, ", id="write past y"
        ),
        pytest.param("m < M && (FULL || n < N)", "m < M", "race: store .* of y, ", id="into the next row"),
        pytest.param(
            "int(simd_index) * PART", "0", "race: store .* in threadgroup memory", id="each other's parts"
        ),
        pytest.param("s * PART + i", "s * PART + i + 64", "(read before|out of range)", id="past the parts"),
        pytest.param(
            "group * GS + a * (2 * P)", "group * GS + a * (2 * P) + 1", "misaligned", id="misaligned"
        ),
        pytest.param(
            "            simdgroup_multiply_accumulate(",
            "            if (lane < 16) simdgroup_multiply_accumulate(",
            "divergent simdgroup operation: ",
            id="half a simdgroup",
        ),
        pytest.param("threadgroup float* parts", "device float* parts", "no matching function", id="device"),
        pytest.param(
            "simdgroup_matrix<O, 8, 8> A", "simdgroup_matrix<uint, 8, 8> A", "floating point", id="integers"
        ),
    ],
)
def test_what_the_tile_may_not_do(emulator: Emulator, right: str, wrong: str, message: str) -> None:
    layer = Layer.random(37, 1024, group_size=64, bits=4, dtype=mx.bfloat16)
    with pytest.raises(MetalError, match=f"(?s){message}"):
        layer.tile(layer.x[:5], planted(emulator, right, wrong))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param(
            "for (int place = 0; place < 8; place++) {\n#pragma unroll\n            for (int r",
            "for (int place = 7; place >= 0; place--) {\n#pragma unroll\n            for (int r",
            id="places backwards",
        ),
        pytest.param(
            "(sum[0] + sum[1]) + (sum[2] + sum[3])", "sum[0] + sum[1] + sum[2] + sum[3]", id="no tree"
        ),
        pytest.param("ushort(s))", "ushort(S - s))", id="simdgroups backwards"),
        pytest.param("int(lane) % S; group", "(int(lane) + 1) % S; group", id="groups of another"),
    ],
)
def test_other_sums_of_the_twin(emulator: Emulator, right: str, wrong: str) -> None:
    layer = Layer.random(24, 5120, group_size=64, bits=4, dtype=mx.bfloat16).wide()
    y = layer.few(layer.x[:2], planted(emulator, right, wrong), out=mx.float32)
    assert differing(floats(y), layer.tile_expected(mx.float32)[:2]) > 0


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        pytest.param(
            "min(first + r * SIDE, N - 1)",
            "first + r * SIDE",
            "out of range: load .* of w, ",
            id="read past w",
        ),
        pytest.param(
            "int(lane) % S == 0 && n < N",
            "int(lane) % S == 0",
            "race: store .* of y, ",
            id="into the next row",
        ),
        pytest.param("int(lane) % S == 0 && n < N", "n < N", "race: store .* of y, ", id="all lanes store"),
    ],
)
def test_what_the_twin_may_not_do(emulator: Emulator, right: str, wrong: str, message: str) -> None:
    layer = Layer.random(37, 1024, group_size=64, bits=4, dtype=mx.bfloat16)
    with pytest.raises(MetalError, match=f"(?s){message}"):
        layer.few(layer.x[:2], planted(emulator, right, wrong))
