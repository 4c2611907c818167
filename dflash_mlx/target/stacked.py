"""Linear layers that read the same rows, as one matrix: a launch where there were two or three.

The layers keep their weights as views of the stack, so nothing is held twice; the bits of an output do not
depend on which others are computed with it.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx import nn

from dflash_mlx.kernels import Choice, Kernels, Matrix

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What mlx-lm's modules call layers that they hand the same rows."""


class Product:
    """A layer's product with the rows of a block."""

    def __init__(self, kernels: Kernels, choice: Choice, module: nn.Module) -> None:
        self.kernels, self.choice = kernels, choice
        self.matrix = matrix_of(module)

    def __call__(self, x: mx.array) -> mx.array:
        """`[1, L, K]` -> `[1, L, N]`."""
        return self.kernels.product(self.choice, x[0], self.matrix)[None]


class Stack:
    """Layers of one shape but for their outputs; the first that is called computes all of them."""

    def __init__(self, kernels: Kernels, choice: Choice, modules: Sequence[nn.Module]) -> None:
        self.kernels, self.choice = kernels, choice
        parts = [matrix_of(module) for module in modules]
        self.matrix = Matrix(
            mx.concatenate([part.w for part in parts]),
            mx.concatenate([part.scales for part in parts]),
            mx.concatenate([part.biases for part in parts]),
            parts[0].group_size,
            parts[0].bits,
        )
        mx.eval(self.matrix.w, self.matrix.scales, self.matrix.biases)
        self.bounds = [0]
        for module in modules:
            start, end = self.bounds[-1], self.bounds[-1] + module.weight.shape[0]
            module.weight = self.matrix.w[start:end]
            module.scales = self.matrix.scales[start:end]
            module.biases = self.matrix.biases[start:end]
            self.bounds.append(end)
        self._rows: mx.array | None = None
        self._product: mx.array | None = None
        self._asked: set[int] = set()

    def part(self, index: int, x: mx.array) -> mx.array:
        """One layer's outputs `[1, L, n]` for rows `[1, L, K]`; forgotten when all have asked."""
        if x is not self._rows or index in self._asked or self._product is None:
            self._rows, self._asked = x, set()
            self._product = self.kernels.product(self.choice, x[0], self.matrix)[None]
        out = self._product[..., self.bounds[index] : self.bounds[index + 1]]
        self._asked.add(index)
        if len(self._asked) == len(self.bounds) - 1:
            self._rows = self._product = None
        return out


def matrix_of(module: nn.Module) -> Matrix:
    """A quantized layer's weights."""
    return Matrix(module.weight, module.scales, module.biases, module.group_size, module.bits)


def siblings(module: nn.Module) -> list[list[nn.Module]]:
    """A module's children that read the same rows."""
    found = [[module[name] for name in names if name in module] for names in SIBLINGS]
    return [group for group, names in zip(found, SIBLINGS, strict=True) if len(group) == len(names)]
