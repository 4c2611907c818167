"""Find the factor by which a target scales its embeddings before the first layer.

Some families keep it in an attribute, some in a formula of the forward pass. So it is measured: known rows
take the place of the embeddings, and what arrives at the first layer is compared with them.
"""

from typing import Any, cast

import mlx.core as mx
from mlx import nn

from dflash_mlx.target.attach import Mixin, attach
from dflash_mlx.target.caches import make_cache


def embedding_scale(model: nn.Module, embedding: nn.Module, first_layer: nn.Module, width: int) -> float:
    """The factor, or 1 where the first layer's input is no multiple of the embedding.

    A norm between the two (Muse Glimmer) is the target's own: drafters were trained on the rows before it.

    Args:
        embedding: the module that turns token ids `[B, L]` into rows `[B, L, width]`.
    """
    rows = mx.broadcast_to(mx.array([1.0, 2.0])[None, :, None], (1, 2, width))
    undos = [attach(embedding, _Known, _rows=rows), attach(first_layer, _Entrance)]
    try:
        model(mx.array([[0, 0]]), cache=make_cache(model))
    except _Entered as entered:
        arrived = entered.rows
    finally:
        for undo in undos:
            undo()
    scale = float(cast(float, arrived.flatten()[0].item()))
    scaled = arrived.shape == rows.shape and mx.array_equal(arrived, rows * scale).item()
    return scale if scaled else 1.0


class _Known(Mixin):
    """Mixin of the embedding."""

    _rows: mx.array

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return mx.array(self._rows)  # A copy: some models scale it in place.


class _Entrance(Mixin):
    """Mixin of the first layer: the pass ends here, so no weight is read."""

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        raise _Entered(x)


class _Entered(Exception):  # noqa: N818  # not an error: it carries a result out of the pass
    """The first layer was reached."""

    def __init__(self, rows: mx.array) -> None:
        self.rows = rows
