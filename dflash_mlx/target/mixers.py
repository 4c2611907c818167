"""Find the modules of a target that mix rows: attention, delta rules, state-space mixers.

Families name and nest them differently, so they are found by what they are given: a short forward pass in
which every child of a layer reports whether a cache, or another layer's keys, was among its arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from dflash_mlx.kernels import Attention
from dflash_mlx.target.attach import Mixin, attach
from dflash_mlx.target.caches import Cache, fork, make_cache
from dflash_mlx.target.call import Call

CONTEXT, ROWS = [0, 1, 2], [3, 4, 5, 6]
"""Token ids of the probe: some context, then a block."""
HEADS = ("n_heads", "num_attention_heads", "num_heads", "n_head")
"""What mlx-lm's attention modules call the number of their query heads."""


@dataclass(frozen=True)
class Mixer:
    """A module that mixes rows.

    Attributes:
        cache: the cache that it was given; None if it was given another layer's keys and values.
        call: one call on `len(ROWS)` rows, with a copy of the cache as it was before.
    """

    module: nn.Module
    cache: Cache | None
    call: Call

    @property
    def attention(self) -> Attention | None:
        """The shape of its attention, if it is one and says how many heads it has."""
        keys, values = self.call.shared or (getattr(self.cache, name, None) for name in ("keys", "values"))
        heads = next((getattr(self.module, name) for name in HEADS if hasattr(self.module, name)), None)
        if keys is None or values is None or heads is None:
            return None
        return Attention(heads // keys.shape[1], keys.shape[3], values.shape[3])


def find_mixers(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[Cache], list[Mixer]]:
    """Probe a target.

    Returns:
        Its prompt cache after the probe, and its mixers in the order of their calls. Nothing is evaluated.
    """
    found: list[Mixer] = []
    caches = make_cache(model)
    model(mx.array([CONTEXT]), cache=caches)
    children = [child for layer in layers for child in _children(layer)]
    undos = [attach(child, _Witness, _found=found) for child in children]
    try:
        model(mx.array([ROWS]), cache=caches)
    finally:
        for undo in undos:
            undo()
    return caches, found


class _Witness(Mixin):
    """Mixin of a layer's child: reports calls that carry a cache or keys."""

    _found: list[Mixer]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(args, kwargs)
        if call.cache is not None:
            self._found.append(Mixer(cast(nn.Module, self), call.cache, call.with_cache(fork(call.cache))))
        elif call.shared is not None:
            self._found.append(Mixer(cast(nn.Module, self), None, call))
        return super().__call__(*args, **kwargs)


def _children(layer: nn.Module) -> list[nn.Module]:
    """The modules directly in a layer, those in lists included."""
    named: Any = tree_flatten(layer.children(), is_leaf=lambda child: isinstance(child, nn.Module))
    return [child for _, child in named]
