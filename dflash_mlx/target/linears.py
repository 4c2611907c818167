"""Linear layers that give every row of a verify pass the bits it has alone.

Which way each layer takes is `Kernels.choose`; outside verify passes every layer is mlx-lm's own.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

from dflash_mlx.kernels import Choice, Kernels, Layer, Route
from dflash_mlx.target.attach import Mixin, Undo, attach

SORTED_FROM = 64
"""Chosen experts from which mlx-lm sorts them, which takes another kernel (models/switch_layers.py)."""


class Linears:
    """All linear layers of a target.

    Attributes:
        active: whether a verify pass is on.
        table: (layer, choice) -> how many such layers.
    """

    def __init__(self, model: nn.Module, kernels: Kernels) -> None:
        self.kernels = kernels
        self.active = False
        self.undos: list[Undo] = []
        self.table: Counter[tuple[str, Choice]] = Counter()
        for module in model.modules():
            if "lora_a" in module:
                self._take(module, "adapter", Choice(Route.ROWS, "an adapter: there is no kernel"))
            elif isinstance(module, nn.Linear | nn.QuantizedLinear):
                self._take(module, *self._choose(module))
            elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
                self._take(module, *self._choose(module), is_embedding=True)
            elif kernels.device.metal and _chooses_experts(module):
                self.undos.append(attach(module, _Experts, _linears=self))

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The layers that read their weights once per row, and why."""
        return tuple(
            f"{count} linear layers ({layer}) run row by row: {choice.reason}"
            for (layer, choice), count in sorted(self.table.items(), key=str)
            if choice.route is Route.ROWS
        )

    def _choose(self, module: nn.Module) -> tuple[str, Choice]:
        layer = _layer(module)
        return str(layer), self.kernels.choose(layer)

    def _take(self, module: nn.Module, layer: str, choice: Choice, *, is_embedding: bool = False) -> None:
        self.table[layer, choice] += 1
        if choice.route is Route.BLOCK:
            mixin: type[Mixin] = _BlockHead if is_embedding else _BlockLinear
        elif choice.route is Route.ROWS:
            mixin = _RowHead if is_embedding else _RowLinear
        else:
            return
        self.undos.append(attach(module, mixin, _linears=self))


def _layer(module: nn.Module) -> Layer:
    N, packed = module.weight.shape
    if isinstance(module, nn.Linear | nn.Embedding):
        return Layer(packed, N, module.weight.dtype)
    return Layer(
        K=packed * 32 // module.bits,
        N=N,
        dtype=module.scales.dtype,
        bits=module.bits,
        group_size=module.group_size,
        mode=getattr(module, "mode", "affine"),
    )


def _chooses_experts(module: nn.Module) -> bool:
    """mlx-lm's switch layers, by what they are made of: matrices of many experts."""
    children = (child for child in module.children().values() if isinstance(child, nn.Module))
    return any(type(child).__name__ in ("SwitchLinear", "QuantizedSwitchLinear") for child in children)


def _by_row(run: Callable[..., mx.array], *rows: mx.array, size: int = 1) -> mx.array:
    """`run` on `size` rows `[1, L, ...]` at a time."""
    parts = [
        run(*(array[:, start : start + size] for array in rows)) for start in range(0, rows[0].shape[1], size)
    ]
    return mx.concatenate(parts, axis=1)


class _Attached(Mixin):
    """What the mixins share: nothing happens outside verify passes, or to a lone row."""

    _linears: Linears

    def _is_block(self, x: mx.array) -> bool:
        return self._linears.active and x.ndim > 2 and x.shape[1] > 1

    def _product(self, x: mx.array, stock: Callable[..., mx.array]) -> mx.array:
        """`[1, L, K]` -> `[1, L, N]` by our kernel; anything else it was not chosen for, row by row."""
        module: Any = self
        if x.ndim != 3 or x.shape[0] != 1 or x.dtype != module.scales.dtype:
            return _by_row(stock, x)
        weights = module.weight, module.scales, module.biases
        product = self._linears.kernels.matmul(x[0], *weights, module.group_size, module.bits)
        return product[None] + module.bias if "bias" in module else product[None]


class _BlockLinear(_Attached):
    """Mixin of a linear layer that qmv_block computes."""

    def __call__(self, x: mx.array) -> mx.array:
        stock = super().__call__
        return self._product(x, stock) if self._is_block(x) else stock(x)


class _RowLinear(_Attached):
    """Mixin of a linear layer whose own op takes the rows one at a time."""

    def __call__(self, x: mx.array) -> mx.array:
        stock = super().__call__
        return _by_row(stock, x) if self._is_block(x) else stock(x)


class _BlockHead(_Attached):
    """Mixin of an embedding that is the head as well."""

    def as_linear(self, x: mx.array) -> mx.array:
        stock = super().as_linear
        return self._product(x, stock) if self._is_block(x) else stock(x)


class _RowHead(_Attached):
    """The same, row by row."""

    def as_linear(self, x: mx.array) -> mx.array:
        stock = super().as_linear
        return _by_row(stock, x) if self._is_block(x) else stock(x)


class _Experts(_Attached):
    """Mixin of a layer of experts: so few rows at a time that mlx-lm does not sort them."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        stock = super().__call__
        if not self._is_block(x) or indices.size < SORTED_FROM:
            return stock(x, indices)
        return _by_row(stock, x, indices, size=max(1, (SORTED_FROM - 1) // indices.shape[-1]))
