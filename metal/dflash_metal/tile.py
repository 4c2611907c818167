"""Launches the kernels of the fast mode: the tile for up to 16 rows, and its twin for a few."""

from __future__ import annotations

import mlx.core as mx

from dflash_metal.kernel import Kernel, Make, layer_refused, made

TILE_ROWS = range(1, 17)  # that qmm_block takes
FEW_ROWS = range(1, 4)  # that qmm_few takes; for four the tile costs no more
OUTPUTS_PER_LANE = 4  # of qmm_few: the sums of three rows fit in registers
TILE_DTYPES = (mx.bfloat16, mx.float16)
FIRST_WITH_BFLOAT = 15  # GPU generation: M3; before it bfloat is emulated
ENOUGH_THREADGROUPS = 128  # to keep the largest GPU busy, of up to 8 simdgroups each

QMM_BLOCK = Kernel(
    name="qmm_block",
    inputs=("w", "scales", "biases", "x", "K", "N", "M"),
    outputs=("y",),
    body="  threadgroup float parts[S * C * R * 64];\n"
    "  qmm_block<T, O, Y, GS, BITS, R, C, S, FULL>(w, scales, biases, x, y, K, N, M, parts,\n"
    "      threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);",
)
QMM_FEW = Kernel(
    name="qmm_few",
    inputs=("w", "scales", "biases", "x", "K", "N"),
    outputs=("y",),
    body="  qmm_few<T, Y, GS, BITS, M, R, S>(w, scales, biases, x, y, K, N,\n"
    "      threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);",
)


def operand_type(dtype: mx.Dtype, generation: int) -> mx.Dtype:
    """What the matrix unit of a GPU generation (13 is M1) multiplies: `dtype`, or float32 with its values."""
    return mx.float32 if dtype == mx.bfloat16 and generation < FIRST_WITH_BFLOAT else dtype


def simdgroups(K: int, group_size: int) -> int:
    """That share out the groups of K: part of the order of additions, so never a matter of the rows."""
    groups = K // group_size
    return 8 if groups >= 64 else 4 if groups >= 16 else 2 if groups >= 4 else 1


def tiles_per_simdgroup(N: int) -> int:
    """Of 8 outputs each: as many as leave enough threadgroups, up to four."""
    return max(tiles for tiles in (4, 2, 1) if tiles == 1 or ENOUGH_THREADGROUPS * 8 * tiles <= N)


def qmm_block_refuses(K: int, N: int, group_size: int, bits: int, dtype: mx.Dtype) -> str | None:
    """Why neither `qmm_block` nor `qmm_few` takes such a layer; None if they do."""
    return layer_refused(K, N, group_size, bits, dtype, TILE_DTYPES)


def qmm_block(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    bits: int,
    operands: mx.Dtype,
    out: mx.Dtype | None = None,
    R: int | None = None,
    make: Make = mx.fast.metal_kernel,
    verbose: bool = False,
) -> mx.array:
    """`x [M, K]`, 1 to 16 rows, times a quantized `w` of N outputs: `[M, N]`, each row as in any company.

    Args:
        x, w, scales, biases, group_size, bits: as in `mx.quantized_matmul(..., transpose=True)`.
        operands: `operand_type` of this GPU.
        out: the type of x, or float32 for sums that are not rounded.
        R: tiles of a simdgroup; changes the speed and nothing else.
    """
    M, K = x.shape
    N = w.shape[0]
    _check(x, N, M in TILE_ROWS, "1 to 16", group_size, bits)
    R, S = R or tiles_per_simdgroup(N), simdgroups(K, group_size)
    template = [
        ("T", x.dtype),
        ("O", operands),
        ("Y", out or x.dtype),
        ("GS", group_size),
        ("BITS", bits),
        ("R", R),
        ("C", 1 if M <= 8 else 2),
        ("S", S),
        ("FULL", N % (8 * R) == 0),
    ]
    (y,) = made(QMM_BLOCK, make)(
        inputs=[w, scales, biases, x, mx.array(K), mx.array(N), mx.array(M)],
        template=template,
        grid=(32, S * -(-N // (8 * R)), 1),
        threadgroup=(32, S, 1),
        output_shapes=[(M, N)],
        output_dtypes=[out or x.dtype],
        verbose=verbose,
    )
    return y


def qmm_few(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    bits: int,
    out: mx.Dtype | None = None,
    R: int = OUTPUTS_PER_LANE,
    make: Make = mx.fast.metal_kernel,
    verbose: bool = False,
) -> mx.array:
    """What `qmm_block` computes, for 1 to 3 rows, where the matrix unit adds as `agreement` finds it.

    Args:
        x, w, scales, biases, group_size, bits, out: as in `qmm_block`.
        R: outputs of a lane; changes the speed and nothing else.
    """
    M, K = x.shape
    N = w.shape[0]
    _check(x, N, M in FEW_ROWS, "1 to 3", group_size, bits)
    S = simdgroups(K, group_size)
    template = [
        ("T", x.dtype),
        ("Y", out or x.dtype),
        ("GS", group_size),
        ("BITS", bits),
        ("M", M),
        ("R", R),
        ("S", S),
    ]
    (y,) = made(QMM_FEW, make)(
        inputs=[w, scales, biases, x, mx.array(K), mx.array(N)],
        template=template,
        grid=(32, 2 * -(-N // (2 * R * 32 // S)), 1),
        threadgroup=(32, 2, 1),
        output_shapes=[(M, N)],
        output_dtypes=[out or x.dtype],
        verbose=verbose,
    )
    return y


def _check(x: mx.array, N: int, rows: bool, possible: str, group_size: int, bits: int) -> None:
    M, K = x.shape
    if not rows:
        raise ValueError(f"{M} rows of x: the kernel takes {possible}")
    if reason := qmm_block_refuses(K, N, group_size, bits, x.dtype):
        raise ValueError(reason)
