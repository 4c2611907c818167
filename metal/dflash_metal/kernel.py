"""What all launchers share: how a kernel is declared to MLX, and which quantized layers kernels are for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
SMALLEST_ARRAY = 8  # elements: smaller ones are no device memory

Make = Callable[..., Any]  # `mx.fast.metal_kernel`, or a stand-in with its signature


@dataclass(frozen=True)
class Kernel:
    """A .metal file, which stays plain Metal: MLX's header; the body calls the function it is named after."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str

    @property
    def header(self) -> str:
        return Path(__file__).with_name(f"{self.name}.metal").read_text(encoding="utf-8")


@cache
def made(kernel: Kernel, make: Make) -> Any:
    """The kernel as MLX made it; each combination of template arguments compiles once, when first called."""
    return make(
        name=f"dflash_{kernel.name}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.body,
        header=kernel.header,
    )


def layer_refused(
    K: int, N: int, group_size: int, bits: int, dtype: mx.Dtype, dtypes: tuple[mx.Dtype, ...]
) -> str | None:
    """Why no kernel for `dtypes` takes a quantized layer of K inputs and N outputs; None if one may."""
    if bits not in BITS:
        return f"{bits} bits: there is a kernel for 4 and 8"
    if group_size not in GROUP_SIZES:
        return f"groups of {group_size}: there is a kernel for 32, 64 and 128"
    if dtype not in dtypes:
        *others, last = (str(taken).removeprefix("mlx.core.") for taken in dtypes)
        return f"type {dtype}: there is a kernel for {', '.join(others)} and {last}"
    if K % group_size:
        return f"{K} inputs are no multiple of the group of {group_size}"
    if N * (K // group_size) < SMALLEST_ARRAY:
        return f"{N * (K // group_size)} scales: fewer than {SMALLEST_ARRAY} are no device memory"
    if N * K * bits // 8 >= 2**31:
        return f"{N * K * bits // 8:,} bytes of weights: offsets in the kernel have 31 bits"
    return None
