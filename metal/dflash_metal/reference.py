"""What each kernel computes, in numpy and to the bit: the contract that its tests hold it to.

Values of all element types are passed and returned as float32; `dtype` names the type whose values they are.
The order of additions is that of the .metal files, whose headers explain it. Denormals are flushed, as on
the GPU.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Dtype = Literal["bfloat16", "float16", "float32"]
LANES = 32
SMALLEST = np.finfo(np.float32).smallest_normal


def flush(values: Float) -> Float:
    """Denormals are zeros of the same sign."""
    return np.where(np.abs(values) < SMALLEST, np.copysign(np.float32(0), values), values)


def fma(a: Float, b: Float, c: Float) -> Float:
    """a * b + c, rounded once: in float64 the product is exact, and the sum is rounded to odd first."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = np.broadcast_to(c.astype(np.float64), product.shape)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    odd = np.where((error > 0) == (total > 0), bits | 1, (bits - 1) | 1)
    return flush(np.where((error != 0) & (bits & 1 == 0), odd, bits).view(np.float64).astype(np.float32))


def cast(values: Float, dtype: Dtype) -> Float:
    """The nearest values of `dtype`, ties to even."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def simd_sum(lanes: Float) -> Float:
    """The sum over the last axis, 32 lanes, as a butterfly: neighbours first."""
    for distance in (1, 2, 4, 8, 16):
        lanes = flush(lanes + lanes[..., np.arange(LANES) ^ distance])
    return lanes[..., 0]


def unpacked(w: NDArray[np.uint32], bits: int) -> Float:
    """The values in packed words `[N, words]`, lowest bits first: `[N, words * 32 / bits]`."""
    shift = bits * np.arange(32 // bits, dtype=np.uint32)
    return (w[:, :, None] >> shift & np.uint32(2**bits - 1)).reshape(len(w), -1).astype(np.float32)


def qmv_block(
    x: Float,
    w: NDArray[np.uint32],
    scales: Float,
    biases: Float,
    *,
    group_size: int,
    bits: int,
    fast: bool,
    float_sums: bool,
    dtype: Dtype,
) -> Float:
    """`x [M, K]` times the packed `w [N, K * bits / 32]`: `[M, N]`, rows and outputs each on their own."""
    M, K = x.shape
    N = w.shape[0]
    own = (2 if fast else 1) * 32 // bits  # consecutive k of a lane
    steps = -(-K // (LANES * own))

    def laid_out(values: Float) -> Float:  # [?, K] -> [?, steps, lanes, own], lanes beyond K are zero
        padded = np.pad(values, ((0, 0), (0, steps * LANES * own - K)))
        return padded.reshape(len(values), steps, LANES, own)

    x, q = laid_out(flush(x)), laid_out(unpacked(w, bits))
    scales = laid_out(np.repeat(flush(scales), group_size, axis=1))[..., 0]  # [N, steps, lanes]
    biases = laid_out(np.repeat(flush(biases), group_size, axis=1))[..., 0]
    result = np.zeros((M, N, LANES), np.float32)
    for step in range(steps):
        values = x[:, None, step]  # [M, 1, lanes, own]
        weights = q[None, :, step]  # [1, N, lanes, own]
        acc = np.zeros((M, N, LANES), np.float32)
        total = np.zeros((M, 1, LANES), np.float32)
        for k in range(0, own, 4):
            x0, x1, x2, x3 = (values[..., k + i] for i in range(4))
            w0, w1, w2, w3 = (weights[..., k + i] for i in range(4))
            if bits == 8:
                for value, weight in ((x0, w0), (x1, w1), (x2, w2), (x3, w3)):
                    total = flush(total + value)
                    acc = fma(value, weight, acc)
                continue
            total = flush(total + sum4(x0, x1, x2, x3, "float32" if float_sums else dtype))
            # The kernel scales x down and the weights up, by powers of two.
            four = flush(flush(x1 / np.float32(16)) * (w1 * np.float32(16)))
            four = fma(x0, w0, four)
            four = fma(flush(x2 / np.float32(256)), w2 * np.float32(256), four)
            four = fma(flush(x3 / np.float32(4096)), w3 * np.float32(4096), four)
            acc = flush(acc + four)
        ended = fma(scales[None, :, step], acc, flush(total * biases[None, :, step]))
        result = flush(result + ended)
    return cast(simd_sum(result), dtype)


def sum4(a: Float, b: Float, c: Float, d: Float, dtype: Dtype) -> Float:
    """From left to right, in `dtype`."""
    first = cast(flush(a + b), dtype)
    second = cast(flush(first + c), dtype)
    return cast(flush(second + d), dtype)


def qmm_block(
    x: Float,
    w: NDArray[np.uint32],
    scales: Float,
    biases: Float,
    *,
    group_size: int,
    bits: int,
    simdgroups: int,
    dtype: Dtype,
    out: Dtype,
) -> Float:
    """`x [M, K]` times the packed `w [N, K * bits / 32]`: `[M, N]`, rows and outputs each on their own.

    Takes it that a step of the matrix unit adds its eight products in ascending order, each with one
    rounding; so does qmm_few. `dtype` is the type of x, `out` that of the result.
    """
    groups, fields = x.shape[1] // group_size, 32 // bits
    offset = np.float32(0 if (bits, dtype) == (8, "bfloat16") else 2**bits)

    def steps(values: Float) -> Float:  # [?, K] -> [?, groups, steps, places]
        halves = values.reshape(len(values), groups, 4, group_size // 4 // fields, 2, fields // 2)
        return halves.transpose(0, 1, 3, 5, 2, 4).reshape(len(values), groups, group_size // 8, 8)

    x, q = steps(flush(x)), steps(unpacked(w, bits)) + offset
    places = np.zeros_like(x[:, :, 0])
    for step in range(group_size // 8):
        places = flush(places + x[:, :, step])
    while places.shape[-1] > 1:  # neighbours first
        places = flush(places[..., ::2] + places[..., 1::2])
    total = places[:, None, :, 0]  # [M, 1, groups]
    acc = np.broadcast_to(-offset * total, (len(x), len(q), groups))
    for step in range(group_size // 8):
        for place in range(8):
            acc = fma(x[:, None, :, step, place], q[None, :, :, step, place], acc)
    result = np.zeros((simdgroups, len(x), len(q)), np.float32)
    for group in range(groups):
        part = result[group % simdgroups]
        part[...] = fma(flush(scales[:, group]), acc[..., group], part)
        part[...] = fma(flush(biases[:, group]), total[..., group], part)
    for part in result[1:]:
        result[0] = flush(result[0] + part)
    return cast(result[0], out)


def selector_walk(
    candidates: NDArray[np.uint32],
    unary: Float,
    hidden: Float,
    predecessors: Float,
    successors: Float,
    anchor: int,
    *,
    temperature: float = 1.0,
    noise: Float | None = None,
) -> NDArray[np.uint32]:
    """Token ids `[L]`: slot by slot the best candidate after the one before, the first among equals."""
    width = hidden.shape[1]
    steps = -(-width // LANES)
    before = anchor
    path = []
    for slot, tokens in enumerate(candidates):
        left = flush(flush(predecessors[before]) * flush(hidden[slot]))
        right = flush(successors[tokens])  # [C, R]
        padding = steps * LANES - width
        left = np.pad(left, (0, padding)).reshape(steps, LANES)
        right = np.pad(right, ((0, 0), (0, padding))).reshape(len(tokens), steps, LANES)
        edge = np.zeros((len(tokens), LANES), np.float32)
        for step in range(steps):
            edge = fma(left[step], right[:, step], edge)
        score = flush(unary[slot] + simd_sum(edge))
        if noise is not None:
            score = flush(flush(score / np.float32(temperature)) + noise[slot])
        before = int(tokens[int(np.argmax(score))])
        path.append(before)
    return np.array(path, np.uint32)
