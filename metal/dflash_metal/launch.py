"""Launches the exact kernels: their template arguments and grids are known here and nowhere else."""

from __future__ import annotations

import re

import mlx.core as mx

from dflash_metal.kernel import SMALLEST_ARRAY, Kernel, Make, layer_refused, made

ROWS = range(1, 9)  # that qmv_block takes
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
MOST_CANDIDATES = 32

QMV_BLOCK = Kernel(
    name="qmv_block",
    inputs=("w", "scales", "biases", "x", "K", "N"),
    outputs=("y",),
    body="  qmv_block<T, GS, BITS, M, R, FAST, SUMF>(w, scales, biases, x, y, K, N,\n"
    "      threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);",
)
SELECTOR_WALK = Kernel(
    name="selector_walk",
    inputs=("candidates", "unary", "noise", "hidden", "pred", "succ", "L", "anchor", "temperature"),
    outputs=("path",),
    body="  threadgroup float scores[C];\n"
    "  selector_walk<T, C, R>(candidates, unary, noise, hidden, pred, succ, L, anchor, temperature, path,\n"
    "      scores, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);",
)


def sums_in_float(mlx_version: str) -> bool:
    """Whether this MLX adds up x in float where it quantizes to 4 bits: from 0.32.4 on."""
    return tuple(map(int, re.findall(r"\d+", mlx_version)[:3])) >= (0, 32, 4)


def is_fast(K: int, N: int, bits: int, float_sums: bool) -> bool:
    """Whether MLX takes affine_qmv_fast for one row; older ones also asked for a multiple of 8 outputs."""
    return K % (64 * 32 // bits) == 0 and (float_sums or N % 8 == 0)


def rows_per_simdgroup(M: int) -> int:
    """Outputs of one simdgroup: four, as long as the sums of all rows fit in registers."""
    return 4 if M <= 6 else 3


def qmv_block_refuses(K: int, N: int, group_size: int, bits: int, dtype: mx.Dtype) -> str | None:
    """Why `qmv_block` cannot stand for MLX's one-row kernel of such a layer; None if it can."""
    if K in (64, 128):
        return f"for {K} inputs MLX has a kernel of its own, which adds in another order"
    return layer_refused(K, N, group_size, bits, dtype, DTYPES)


def qmv_block(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    bits: int,
    float_sums: bool,
    R: int | None = None,
    make: Make = mx.fast.metal_kernel,
    verbose: bool = False,
) -> mx.array:
    """`x [M, K]`, 1 to 8 rows, times a quantized `w` of N outputs: `[M, N]`, each row as MLX does it alone.

    Args:
        x, w, scales, biases, group_size, bits: as in `mx.quantized_matmul(..., transpose=True)`.
        float_sums: `sums_in_float` of the MLX whose bits are wanted.
        R: outputs of one simdgroup; changes the speed and nothing else.
    """
    M, K = x.shape
    N = w.shape[0]
    if M not in ROWS:
        raise ValueError(f"{M} rows of x: the kernel takes 1 to 8")
    if reason := qmv_block_refuses(K, N, group_size, bits, x.dtype):
        raise ValueError(reason)
    R = R or rows_per_simdgroup(M)
    template = [
        ("T", x.dtype),
        ("GS", group_size),
        ("BITS", bits),
        ("M", M),
        ("R", R),
        ("FAST", is_fast(K, N, bits, float_sums)),
        ("SUMF", float_sums or bits == 8),  # the same there, and one kernel less to compile
    ]
    (y,) = made(QMV_BLOCK, make)(
        inputs=[w, scales, biases, x, mx.array(K), mx.array(N)],
        template=template,
        grid=(32, 2 * -(-N // (2 * R)), 1),
        threadgroup=(32, 2, 1),
        output_shapes=[(M, N)],
        output_dtypes=[x.dtype],
        verbose=verbose,
    )
    return y


def selector_walk(
    candidates: mx.array,
    unary: mx.array,
    hidden: mx.array,
    predecessors: mx.array,
    successors: mx.array,
    anchor: int,
    *,
    temperature: float = 1.0,
    noise: mx.array | None = None,
    make: Make = mx.fast.metal_kernel,
    verbose: bool = False,
) -> mx.array:
    """The best path through the candidates, greedy or by score / temperature + noise: token ids `[L]`.

    Args:
        candidates: token ids `[L, C]`, uint32.
        unary: their logits `[L, C]`.
        hidden: projected hidden states `[L, R]`.
        predecessors, successors: codebooks `[V, R]` of the type of `hidden`.
        anchor: the token before the first slot.
        noise: of the candidates, `[L, C]` in float32; greedy without, whatever the temperature.
    """
    L, C = candidates.shape
    if C > MOST_CANDIDATES:
        raise ValueError(f"{C} candidates a slot: the kernel takes up to {MOST_CANDIDATES}")
    if min(candidates.size, hidden.size) < SMALLEST_ARRAY:
        raise ValueError(f"{L} slots of {C} candidates: fewer than {SMALLEST_ARRAY} are no device memory")
    if noise is None:
        noise, temperature = mx.zeros((L, C)), 1.0
    (path,) = made(SELECTOR_WALK, make)(
        inputs=[
            candidates,
            unary.astype(hidden.dtype),
            noise,
            hidden,
            predecessors,
            successors,
            mx.array(L),
            mx.array(anchor, mx.int32),
            mx.array(temperature, mx.float32),
        ],
        template=[("T", hidden.dtype), ("C", C), ("R", hidden.shape[1])],
        grid=(32, C, 1),
        threadgroup=(32, C, 1),
        output_shapes=[(L,)],
        output_dtypes=[mx.uint32],
        verbose=verbose,
    )
    return path
