"""Whether qmm_few has the bits of the tile on this GPU: no document says how its matrix unit adds.

Sums are compared before they are rounded to the type of x, too: there the smallest difference shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dflash_metal.kernel import Make
from dflash_metal.tile import qmm_block, qmm_few

OUTPUTS = 4100  # four tiles a simdgroup, and not all of them full
GROUPS = 8  # of K
SIZES = (-6, 5)  # of x, powers of e
CALLS = (1, 2, 3, 3, 3, 3, 1)  # rows that qmm_few takes at once, 16 together


@dataclass(frozen=True)
class Agreement:
    """How many values were compared, and how many of them differ in any bit."""

    values: int
    differing: int

    @property
    def holds(self) -> bool:
        return self.differing == 0


def agreement(
    dtype: mx.Dtype,
    *,
    group_size: int,
    bits: int,
    operands: mx.Dtype,
    outputs: int = OUTPUTS,
    make: Make = mx.fast.metal_kernel,
) -> Agreement:
    """Random rows by `qmm_few`, and by `qmm_block` in every slot of a tile of 8 and of one of 16.

    Args:
        dtype, group_size, bits: of the layers that fast mode would take.
        operands: `operand_type` of this GPU.
        outputs: of the layer; 640 values are compared of each, half of them before they are rounded.
    """
    K = GROUPS * group_size
    keys = mx.random.split(mx.random.key(0), 5)
    # Of very different size: products of so few bits add up exactly, in any order, if they are alike.
    sizes = mx.exp(mx.random.uniform(*SIZES, (16, K), key=keys[0]))
    x = (mx.random.normal((16, K), key=keys[1]) * sizes).astype(dtype)
    w = mx.random.randint(0, 256, (outputs, K * bits // 8), mx.uint8, keys[2]).view(mx.uint32)
    scales, biases = (
        mx.random.normal((outputs, GROUPS), scale=0.01, key=key).astype(dtype) for key in keys[3:]
    )
    values = differing = 0
    for out in (mx.float32, dtype):
        few, row = [], 0
        for rows in CALLS:
            part = x[row : row + rows]
            few.append(qmm_few(part, w, scales, biases, group_size=group_size, bits=bits, out=out, make=make))
            row += rows
        expected = mx.concatenate(few)
        for slots in (8, 16):
            for shift in range(slots):
                y = qmm_block(
                    mx.roll(x[:slots], shift, 0),
                    *(w, scales, biases),
                    group_size=group_size,
                    bits=bits,
                    operands=operands,
                    out=out,
                    make=make,
                )
                found = mx.roll(y, -shift, 0)
                differing += differing_values(found, expected[:slots])
                values += found.size
    return Agreement(values, differing)


def differing_values(a: mx.array, b: mx.array) -> int:
    """How many values differ in any bit."""
    kind = mx.uint32 if a.dtype == mx.float32 else mx.uint16
    count: Any = mx.sum(a.view(kind) != b.view(kind)).item()
    return int(count)
