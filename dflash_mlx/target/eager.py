"""Hand a pass to the device every few layers, not only when the whole graph is built.

A verify pass cannot be built ahead, so without this the GPU idles while Python goes through all the layers.
The numbers are the same: only the moment at which work starts changes.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from dflash_mlx.target.attach import Mixin, Undo, attach
from dflash_mlx.target.call import residual
from dflash_mlx.target.window import LARGEST_BLOCK

EVERY = 8
"""Layers between two hand-overs. Not timed on a Mac."""


class Eager:
    """Starts the residual stream after every few of these layers."""

    def __init__(self, layers: Sequence[nn.Module], every: int = EVERY) -> None:
        self.undos: list[Undo] = [attach(layer, _Started) for layer in layers[every - 1 : -1 : every]]


class _Started(Mixin):
    """Mixin of a decoder layer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        # A prompt chunk keeps the device busy for long anyway, and would hold more of its rows in memory.
        if residual(out).shape[1] <= LARGEST_BLOCK:
            mx.async_eval(residual(out))
        return out
