"""A GPU that is not there: MLX's CPU ops, row by row, stand in for its kernels and count their calls."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.kernels import Device, Kernels


class Maker:
    """Stands for `mx.fast.metal_kernel`.

    Args:
        problem: raise this where MLX would compile.
        error: added to every product: a kernel with other bits.

    Attributes:
        calls: how often each kernel ran, by its name and rows.
    """

    def __init__(self, *, problem: str | None = None, error: float = 0.0) -> None:
        self.problem = problem
        self.error = error
        self.calls: Counter[tuple[str, int]] = Counter()

    def __call__(self, *, name: str, **_: Any) -> Any:
        def run(*, inputs: Sequence[Any], template: Sequence[tuple[str, Any]], **_: Any) -> list[mx.array]:
            if self.problem is not None:
                raise RuntimeError(self.problem)
            if name == "dflash_selector_walk":
                self.calls[name, inputs[0].shape[0]] += 1
                return [walked(*inputs[:6], anchor=inputs[7], temperature=inputs[8])]
            known = dict(template)
            w, scales, biases, x = inputs[:4]
            self.calls[name, x.shape[0]] += 1
            if name.startswith("dflash_qmm"):
                scales, biases = (array.astype(mx.float32) for array in (scales, biases))
                weight = mx.dequantize(w, scales, biases, known["GS"], known["BITS"])
                return [(x.astype(mx.float32) @ weight.T + self.error).astype(known["Y"])]
            rows = [
                mx.quantized_matmul(row[None], w, scales, biases, group_size=known["GS"], bits=known["BITS"])
                for row in x
            ]
            return [mx.concatenate(rows) + self.error]

        return run


def walked(
    candidates: mx.array,
    unary: mx.array,
    noise: mx.array,
    hidden: mx.array,
    before: mx.array,
    after: mx.array,
    *,
    anchor: mx.array,
    temperature: mx.array,
) -> mx.array:
    """The best path, slot by slot."""
    token, path = anchor, []
    for slot in range(candidates.shape[0]):
        edges = (after[candidates[slot]] * (before[token] * hidden[slot])).sum(axis=-1)
        scores = (unary[slot] + edges) / temperature + noise[slot]
        token = candidates[slot, mx.argmax(scores)]
        path.append(token)
    return mx.stack(path)


def kernels(
    folder: Path,
    maker: Maker,
    *,
    architecture: str = "applegpu_g15s",
    mlx: str = "0.32.4",
    fast: bool = False,
) -> Kernels:
    """Of a Mac that is not there."""
    device = Device(True, architecture, "macOS-26.5", mlx)
    return Kernels(device, fast=fast, make=maker, folder=folder, outputs=40)
