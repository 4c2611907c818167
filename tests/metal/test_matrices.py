"""Matrices of a simdgroup in the emulator, by the calls of Metal that do not tell which lane holds what."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal.emulator import MATRIX_ORDERS, Emulator, MetalError

HEADER = "#include <metal_simdgroup_matrix>\n"


def run(emulator: Emulator, source: str, *inputs: mx.array, threads: int = 32, **arguments: Any) -> mx.array:
    names = ["a", "b", "c"][: len(inputs)]
    kernel = emulator.metal_kernel("matrices", names, ["o"], source, HEADER)
    (o,) = kernel(
        inputs=inputs,
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(8, 8)],
        output_dtypes=[mx.float32],
        **arguments,
    )
    return o


MULTIPLY = """
  simdgroup_matrix<T, 8, 8> A, B;
  simdgroup_matrix<float, 8, 8> C;
  simdgroup_load(A, a);
  simdgroup_load(B, b, 8, ulong2(0, 0), true);
  simdgroup_load(C, c);
  simdgroup_multiply_accumulate(C, A, B, C);
  simdgroup_store(C, o);
"""


@pytest.mark.parametrize("order", MATRIX_ORDERS)
@pytest.mark.parametrize(
    "dtype", [mx.float32, mx.float16, mx.bfloat16], ids=["float32", "float16", "bfloat16"]
)
def test_multiply(emulator: Emulator, dtype: mx.Dtype, order: str) -> None:
    """Small integers are exact in any order; the second matrix is read along the other axis."""
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(-9, 9, (3, 8, 8))
    other = Emulator(emulator.folder, order)
    left, right = (mx.array(side).astype(dtype) for side in (a, b))
    o = run(other, MULTIPLY, left, right, mx.array(c, mx.float32), template=[("T", dtype)])
    assert (np.array(o) == a @ b.T + c).all()
    assert other.traffic.read == {"a": left.nbytes, "b": right.nbytes, "c": 256, "o": 0}
    assert other.traffic.written["o"] == 256


@pytest.mark.parametrize(
    ("order", "sum_"), [("ascending", 0), ("descending", 1), ("pairwise", 0), ("halves", 1)]
)
def test_orders_differ(emulator: Emulator, order: str, sum_: float) -> None:
    """2 ** 24 + 1 rounds the 1 away, in the first step, unless the other end comes first."""
    a = np.zeros((8, 8), np.float32)
    a[0, [0, 3, 7]] = 2**24, 1, -(2.0**24)
    a[0, 4] = 0
    if order == "halves":
        a[0, [3, 4]] = 0, 1
    o = run(
        Emulator(emulator.folder, order),
        MULTIPLY,
        *(mx.array(a), mx.ones((8, 8)), mx.zeros((8, 8))),
        template=[("T", mx.float32)],
    )
    assert o[0, 0].item() == sum_


def test_a_part_of_a_larger_array(emulator: Emulator) -> None:
    source = """
  simdgroup_float8x8 A;
  simdgroup_load(A, a, 24, ulong2(8, 2));
  simdgroup_store(A, o, 8, ulong2(0, 0), true);
"""
    a = mx.arange(16.0 * 24).reshape(16, 24)
    assert mx.array_equal(run(emulator, source, a), a[2:10, 8:16].T)


def test_filled_and_by_element(emulator: Emulator) -> None:
    source = """
  simdgroup_float8x8 A = make_filled_simdgroup_matrix<float, 8>(2.0f);
  A.thread_elements()[1] = 3;
  simdgroup_store(A, o);
"""
    assert run(emulator, source, mx.zeros(8)).tolist() == [[2, 3] * 4] * 8


@pytest.mark.parametrize(
    ("source", "threads", "message"),
    [
        (
            "  simdgroup_float8x8 A;\n  simdgroup_load(A, a + 8);\n  simdgroup_store(A, o);",
            32,
            "out of range: load .* of a, ",
        ),
        (
            "  simdgroup_float8x8 A = make_filled_simdgroup_matrix<float, 8>(1.0f);\n"
            "  simdgroup_multiply_accumulate(A, A, A, A);",
            16,
            "divergent simdgroup operation",
        ),
        ("  simdgroup_matrix<int, 8, 8> A;", 32, "floating point"),
        ("  simdgroup_matrix<float, 4, 8> A;", 32, "8 x 8"),
        (
            "  simdgroup_float8x8 A;\n  simdgroup_load(A, o);\n  simdgroup_store(A, o);",
            32,
            "read before write",
        ),
    ],
    ids=["out of range", "half a simdgroup", "integers", "another size", "not written"],
)
def test_what_matrices_may_not_do(emulator: Emulator, source: str, threads: int, message: str) -> None:
    with pytest.raises(MetalError, match=f"(?s){message}"):
        run(emulator, source, mx.zeros((8, 8)), threads=threads)
