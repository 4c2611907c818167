"""Find the two ends of a target: the module that turns ids into rows, and what turns rows into logits.

Families name and nest them differently, tie them or not, so they are found by what they do: a short forward
pass in which every leaf module reports its calls.
"""

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from dflash_mlx.errors import UnsupportedTargetError
from dflash_mlx.target.attach import Mixin, attach
from dflash_mlx.target.caches import make_cache
from dflash_mlx.target.head import TargetHead

TOKENS = [[0, 0, 0]]
"""Token ids of the probe."""


@dataclass(frozen=True)
class Ends:
    """The two ends of a target, either of which may be unknown.

    Attributes:
        embedding: the module that is given the token ids.
        norm: the module whose output is given to the head.
        head: what makes logits of hidden states.
        vocab_size: V.
    """

    embedding: nn.Module | None
    norm: nn.Module | None
    head: TargetHead | None
    vocab_size: int

    def known(self) -> tuple[nn.Module, TargetHead]:
        """Embedding and head.

        Raises:
            UnsupportedTargetError: one of them is unknown, so no drafter can share it.
        """
        if self.embedding is None or self.head is None:
            missing = "an embedding of token ids" if self.embedding is None else "a head that makes logits"
            raise UnsupportedTargetError(
                f"this target has no module of its own for {missing}, which a drafter shares; "
                "decode it without a drafter (drafter 'none')"
            )
        return self.embedding, self.head


def find_ends(model: nn.Module) -> Ends:
    """Probe a target; nothing is evaluated."""
    seen: list[_Seen] = []
    undos = [attach(module, _Witness, _seen=seen) for module in _single(model).values()]
    try:
        logits = model(mx.array(TOKENS), cache=make_cache(model))
    finally:
        for undo in undos:
            undo()
    embedding = next((s.module for s in seen if _is_ids(s.given) and s.out.ndim == 3), None)
    head = next((s for s in reversed(seen) if s.out.shape == logits.shape), None)
    norm = next((s.module for s in seen if head is not None and s.out is head.given), None)
    found = None if head is None else TargetHead(head.module, head.as_linear)
    return Ends(embedding, norm, found, logits.shape[-1])


def _single(model: nn.Module) -> dict[int, nn.Module]:
    """The modules that are one step of the pass, by identity: without children, or an adapter around one."""
    adapters = [m for m in model.modules() if "lora_a" in m]
    adapted = {id(inner) for adapter in adapters for inner in adapter.modules() if inner is not adapter}
    leaves = [m for m in model.modules() if not tree_flatten(m.children()) and id(m) not in adapted]
    return {id(m): m for m in (*adapters, *leaves)}


@dataclass(frozen=True)
class _Seen:
    """One call of a leaf module."""

    module: nn.Module
    given: mx.array
    out: mx.array
    as_linear: bool


def _is_ids(given: mx.array) -> bool:
    return given.shape == (1, len(TOKENS[0])) and mx.issubdtype(given.dtype, mx.integer)


class _Witness(Mixin):
    """Mixin of a leaf module: reports its calls, and those of an embedding that is the head too."""

    _seen: list[_Seen]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        self._report(out, args, as_linear=False)
        return out

    def as_linear(self, *args: Any) -> Any:
        out = super().as_linear(*args)
        self._report(out, args, as_linear=True)
        return out

    def _report(self, out: Any, args: tuple[Any, ...], *, as_linear: bool) -> None:
        if args and isinstance(args[0], mx.array) and isinstance(out, mx.array):
            self._seen.append(_Seen(cast(nn.Module, self), args[0], out, as_linear))
