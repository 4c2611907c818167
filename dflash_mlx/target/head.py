"""A target's head: hidden states to logits, of every token id or of chosen ones."""

from copy import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

KINDS = (nn.Linear, nn.Embedding, nn.QuantizedLinear, nn.QuantizedEmbedding)
"""What has a row for each token id, and nothing else."""

PARTS = ("weight", "scales", "biases", "bias")


@dataclass(frozen=True)
class TargetHead:
    """The module that makes logits. It holds no array, whose graph would keep replaced weights alive.

    Attributes:
        module: a linear layer, or an embedding; an adapter around one.
        tied: whether it is the embedding, which is a head too.
    """

    module: nn.Module
    tied: bool

    def __call__(self, hidden: mx.array) -> mx.array:
        """Hidden states `[..., H]` -> logits `[..., V]`, without what the model does to the logits after."""
        module: Any = self.module
        logits: mx.array = module.as_linear(hidden) if self.tied else module(hidden)
        return logits

    def rows(self, ids: mx.array) -> "TargetHead":
        """The head for these ids `[n]` alone, -> logits `[..., n]`: quantized rows stay as they are."""
        if type(self.module) not in KINDS:
            return TargetHead(_Columns(self, ids), tied=False)
        part = copy(self.module)
        for name in PARTS:
            if name in part:
                part[name] = self.module[name][ids]
        return TargetHead(part, self.tied)

    @property
    def arrays(self) -> list[mx.array]:
        """Its weights."""
        leaves: list[tuple[str, mx.array]] = tree_flatten(self.module.parameters())  # type: ignore[assignment]  # a list here
        return [array for _, array in leaves]


class _Columns(nn.Module):
    """Some logits of a head of another kind, which is asked for all."""

    def __init__(self, head: TargetHead, ids: mx.array) -> None:
        super().__init__()
        self.ids = ids
        self._head = head  # a dataclass, whose weights are not counted as ours

    def __call__(self, hidden: mx.array) -> mx.array:
        return self._head(hidden)[..., self.ids]
