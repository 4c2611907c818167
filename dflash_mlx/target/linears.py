"""Linear layers that give every row of a verify pass the bits it has alone.

Which way each layer takes is `Kernels.choose`. In exact numerics every layer is mlx-lm's own outside verify
passes; in fast numerics, layers that take the tile take it for lone rows too.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn

from dflash_mlx.kernels import Choice, Kernels, Layer, Route
from dflash_mlx.target.attach import Mixin, Undo, attach
from dflash_mlx.target.call import by_row
from dflash_mlx.target.stacked import Product, Stack, siblings

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
                choice = Choice(Route.ROWS, "an adapter: there is no kernel")
                self._take(module, "adapter", choice, is_embedding=hasattr(module, "as_linear"))
            elif isinstance(module, nn.Linear | nn.QuantizedLinear):
                self._take(module, *self._choose(module))
            elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
                self._take(module, *self._choose(module), is_embedding=True)
            elif kernels.device.metal and _chooses_experts(module):
                self.undos.append(attach(module, _Experts, _linears=self))
        for module in model.modules():
            for group in siblings(module):
                self._stack(group)

    @property
    def uses_tile(self) -> bool:
        """Whether any layer gives up MLX's bits."""
        return any(choice.route is Route.TILE for _, choice in self.table)

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
        if choice.route in (Route.BLOCK, Route.TILE):
            mixin: type[Mixin] = _BlockHead if is_embedding else _BlockLinear
            product = Product(self.kernels, choice, module)
            self.undos.append(attach(module, mixin, _linears=self, _choice=choice, _compute=product))
        elif choice.route is Route.ROWS:
            self.undos.append(attach(module, _RowHead if is_embedding else _RowLinear, _linears=self))

    def _stack(self, modules: list[nn.Module]) -> None:
        """Compute layers together that take the same way, in the same format."""
        if not all(isinstance(module, _BlockLinear) for module in modules):
            return
        choices = {module._choice for module in modules}
        if len(choices) > 1 or len({str(_layer(module)) for module in modules}) > 1:
            return
        stack = Stack(self.kernels, choices.pop(), modules)
        for index, module in enumerate(modules):
            object.__setattr__(module, "_compute", partial(stack.part, index))


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


class _Attached(Mixin):
    """What the mixins share: nothing happens outside verify passes, or to a lone row."""

    _linears: Linears

    def _is_block(self, x: mx.array) -> bool:
        return self._linears.active and x.ndim > 2 and x.shape[1] > 1


class _Computed(_Attached):
    """What is computed by our kernels: blocks, and by the tile lone rows too."""

    _choice: Choice
    _compute: Callable[[mx.array], mx.array]

    def _product(self, x: mx.array, stock: Callable[..., mx.array]) -> mx.array:
        """`[1, L, K]` -> `[1, L, N]` by our kernel; what it was not chosen for, as ever or row by row."""
        module: Any = self
        takes = x.ndim == 3 and x.shape[0] == 1 and x.dtype == module.scales.dtype
        if not self._is_block(x):
            is_lone = takes and x.shape[1] == 1 and self._choice.route is Route.TILE
            return self._biased(x) if is_lone else stock(x)
        return self._biased(x) if takes else by_row(stock, x)

    def _biased(self, x: mx.array) -> mx.array:
        module: Any = self
        product = self._compute(x)
        return product + module.bias if "bias" in module else product


class _BlockLinear(_Computed):
    """Mixin of a linear layer."""

    def __call__(self, x: mx.array) -> mx.array:
        return self._product(x, super().__call__)


class _RowLinear(_Attached):
    """Mixin of a linear layer whose own op takes the rows one at a time."""

    def __call__(self, x: mx.array) -> mx.array:
        stock = super().__call__
        return by_row(stock, x) if self._is_block(x) else stock(x)


class _BlockHead(_Computed):
    """Mixin of an embedding that is the head as well."""

    def as_linear(self, x: mx.array) -> mx.array:
        return self._product(x, super().as_linear)


class _RowHead(_Attached):
    """Mixin of such an embedding whose own op takes the rows one at a time."""

    def as_linear(self, x: mx.array) -> mx.array:
        stock = super().as_linear
        return by_row(stock, x) if self._is_block(x) else stock(x)


class _Experts(_Attached):
    """Mixin of a layer of experts: so few rows at a time that mlx-lm does not sort them."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        stock = super().__call__
        if not self._is_block(x) or indices.size < SORTED_FROM:
            return stock(x, indices)
        return by_row(stock, x, indices, size=max(1, (SORTED_FROM - 1) // indices.shape[-1]))
