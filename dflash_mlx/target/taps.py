"""Taps: remember the outputs of chosen target layers during a forward pass."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from dflash_mlx.errors import UnsupportedTargetError
from dflash_mlx.target.attach import Mixin, Undo, attach
from dflash_mlx.target.call import residual


class Taps:
    """The tapped outputs of one pass, in the order of the drafter's layer ids."""

    def __init__(self, layers: Sequence[nn.Module], ids: Sequence[int]) -> None:
        self._outputs: dict[int, mx.array] = {}
        self._ids = tuple(ids)
        # A drafter may name a layer twice; it is tapped once.
        self.undos: list[Undo] = [
            attach(layers[i], _Tapped, _taps=self._outputs, _layer=i) for i in dict.fromkeys(self._ids)
        ]

    def take(self) -> mx.array:
        """Hand over the outputs of the last pass, concatenated: `[B, L, len(ids) * H]`; nothing is kept.

        Raises:
            UnsupportedTargetError: the model ran without calling one of the layers.
        """
        if missing := [i for i in self._ids if i not in self._outputs]:
            raise UnsupportedTargetError(
                f"layer {missing[0]} of this target is never called as a whole, so its output cannot be "
                "tapped; decode it without a drafter (drafter 'none')"
            )
        taken = mx.concatenate([self._outputs[i] for i in self._ids], axis=-1)
        self._outputs.clear()
        return taken


class _Tapped(Mixin):
    """Mixin of a decoder layer."""

    _taps: dict[int, mx.array]
    _layer: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        self._taps[self._layer] = residual(out)
        return out
