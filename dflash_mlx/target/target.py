"""A target model as the decode loop sees it: prefill, verify a block, commit a part of it."""

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
from mlx import nn

from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import DFlashError, PairError, UnsupportedTargetError, memory_errors, one_line
from dflash_mlx.kernels import Kernels
from dflash_mlx.target.caches import Cache, Checkpoint, check_rollback, is_recurrent, make_cache
from dflash_mlx.target.eager import Eager
from dflash_mlx.target.embedding import embedding_scale
from dflash_mlx.target.ends import find_ends
from dflash_mlx.target.head import TargetHead
from dflash_mlx.target.linears import Linears
from dflash_mlx.target.mixers import find_mixers
from dflash_mlx.target.replay import Tape
from dflash_mlx.target.rowwise import RowWise, find_row_wise
from dflash_mlx.target.taps import Taps
from dflash_mlx.target.window import LARGEST_BLOCK


class Target:
    """An mlx-lm model, unchanged but for what `attach` gives to single instances of its modules.

    Attributes:
        model: the mlx-lm model.
        context_length: positions that it was made for, or None where its config does not say.
        quantized: whether any layer's weights are quantized, experts included.
        vocab_size: width of the logits.
        kernels: what the linear layers of a verify pass are computed with.
    """

    def __init__(
        self, model: nn.Module, context_length: int | None = None, kernels: Kernels | None = None
    ) -> None:
        self.model = model
        self.context_length = context_length
        self.quantized = any("scales" in m for m in model.modules())
        self._ends = find_ends(model)
        self.vocab_size = self._ends.vocab_size
        self.kernels = kernels or Kernels()
        self._linears: Linears | None = None
        self._taps: Taps | None = None
        self._eager: Eager | None = None
        self._tapes: list[Tape] = []
        self._row_wise: list[RowWise] = []
        self._draft_head: TargetHead | None = None
        self._checkpoint: Checkpoint | None = None

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers, in order."""
        layers: Sequence[nn.Module] = self.model.layers
        return layers

    @property
    def norm(self) -> nn.Module | None:
        """The final norm, if it is a module."""
        return self._ends.norm

    @cached_property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        embedding, _ = self._ends.known()
        # Lazy: nothing but the shape is asked for, which is right for quantized modules too.
        return int(embedding(mx.array([[0]])).shape[-1])

    def embed(self, tokens: mx.array) -> mx.array:
        """Token ids `[B, L]` -> input embeddings `[B, L, H]`, with the target's own scale."""
        embedded: mx.array = self._ends.known()[0](tokens)
        return embedded if self._embedding_scale == 1 else embedded * self._embedding_scale

    def head(self, hidden: mx.array) -> mx.array:
        """Final hidden states `[B, L, H]` -> logits `[B, L, V]`; the head may be tied or quantized."""
        return self._ends.known()[1](hidden)

    def head_rows(self, ids: mx.array) -> TargetHead:
        """The head for these token ids `[n]` alone: hidden states `[..., H]` -> logits `[..., n]`."""
        return self._ends.known()[1].rows(ids)

    def draft_head(self, hidden: mx.array) -> mx.array:
        """As `head`, for the token ids alone that the attached drafter proposes from, if it lists any."""
        return self.head(hidden) if self._draft_head is None else self._draft_head(hidden)

    @cached_property
    def _embedding_scale(self) -> float:
        return embedding_scale(self.model, self._ends.known()[0], self.layers[0], self.hidden_size)

    # --- attaching a drafter ------------------------------------------------------------------

    def check_fit(self, drafter: DrafterConfig) -> None:
        """Refuse a drafter that was made for another target.

        Raises:
            PairError: with the drafter's number and the target's.
        """
        facts = {
            "hidden size": (drafter.hidden_size, self.hidden_size),
            "layer count": (drafter.num_target_layers, len(self.layers)),
            "vocabulary": (drafter.vocab_size, self.vocab_size),
        }
        for name, (theirs, ours) in facts.items():
            if theirs != ours:
                raise PairError(
                    f"this drafter was trained for a target with {name} {theirs}, this target has {ours}; "
                    "pass the drafter made for this target, or drafter 'none'"
                )
        if drafter.block_size > LARGEST_BLOCK:
            raise PairError(
                f"this drafter drafts blocks of {drafter.block_size} rows, at most {LARGEST_BLOCK} can be "
                "rolled back; pass another drafter, or drafter 'none'"
            )

    def attach(self, layer_ids: Sequence[int], head_ids: mx.array | None = None) -> None:
        """Prepare for speculation: taps on these layers, and a rollback for every cache.

        Args:
            layer_ids: as the drafter's config lists them.
            head_ids: the token ids that the drafter proposes from; None: all.

        Raises:
            UnsupportedTargetError: some cache cannot be rolled back exactly, or this family's layers or ends
                are out of reach. The model is left as it was.
        """
        self.detach()
        try:
            with memory_errors():
                self._attach(layer_ids, head_ids)
        except DFlashError:
            self.detach()
            raise
        except Exception as error:  # a family that is not as the probes expect may raise anything
            self.detach()
            raise UnsupportedTargetError(
                f"this target cannot be prepared for a drafter: {one_line(error)}; decode it without one "
                "(drafter 'none')"
            ) from error

    def _attach(self, layer_ids: Sequence[int], head_ids: mx.array | None) -> None:
        self._ends.known()
        if head_ids is not None:  # first: its rows are those of the head as mlx-lm loaded it
            self._draft_head = self.head_rows(head_ids)
            mx.eval(self._draft_head.arrays)
        self._taps = Taps(self.layers, layer_ids)
        caches, mixers = find_mixers(self.model, self.layers)
        if (width := self._taps.take().shape[2:]) != (len(layer_ids) * self.hidden_size,):
            raise UnsupportedTargetError(
                f"this target's layers hand on rows of shape {list(width)}, not of the embedding's "
                f"{self.hidden_size} channels; decode it without a drafter (drafter 'none')"
            )
        recurrent = [m for m in mixers if is_recurrent(m.cache)]
        check_rollback(caches, replayed=[m.cache for m in recurrent])
        self._row_wise = find_row_wise(mixers, self.kernels.device)
        self.attach_linears()
        covered = {id(rows.module) for rows in self._row_wise}
        self._tapes = [Tape(m.module) for m in recurrent if id(m.module) not in covered]
        # On the CPU a processor that builds the graph faster has nothing to gain, and every hand-over costs.
        if self.kernels.device.metal:
            self._eager = Eager(self.layers)

    def attach_linears(self) -> None:
        """Give every linear layer its way of computing rows; part of `attach`, and of plain fast numerics."""
        if self._linears is None:
            self._linears = Linears(self.model, self.kernels)

    def detach(self) -> None:
        """Undo `attach`, what came last first."""
        parts: list[Eager | Taps | Tape | RowWise | Linears | None]
        parts = [self._taps, *self._row_wise, self._linears, *self._tapes, self._eager]
        for undo in (undo for part in reversed(parts) if part for undo in reversed(part.undos)):
            undo()
        self._taps, self._eager, self._linears, self._draft_head = None, None, None, None
        self._tapes, self._row_wise = [], []

    @property
    def linears(self) -> Linears:
        """Which way each linear layer takes in a verify pass, once attached."""
        assert self._linears is not None
        return self._linears

    # --- decoding -----------------------------------------------------------------------------

    def make_cache(self) -> list[Cache]:
        """An empty prompt cache: mlx-lm's own kinds, but for sliding windows, which are ours."""
        return make_cache(self.model)

    def forward(self, tokens: mx.array, caches: list[Cache]) -> tuple[mx.array, mx.array | None]:
        """Run over token ids `[L]` that are sure to stay: prompt chunks and plain steps.

        Returns:
            Logits `[L, V]`, and the taps `[1, L, len(ids) * H]` if a drafter is attached.
        """
        logits = self.model(tokens[None], cache=caches)[0]
        return logits, self._taps.take() if self._taps else None

    def verify(self, block: mx.array, caches: list[Cache]) -> tuple[mx.array, mx.array | None]:
        """Run over a block `[L]` of which only a part may stay; `commit` must follow before any other pass.

        Returns:
            As `forward`. Row i's logits are the target's word on the position after row i.
        """
        self._checkpoint = Checkpoint(caches)
        self._record(True)
        try:
            return self.forward(block, caches)
        finally:
            self._record(False)

    def commit(self, keep: int, rows: int) -> None:
        """Leave the caches of the last `verify` as if its block of `rows` rows had held only `keep`."""
        assert self._checkpoint is not None
        parts: list[Tape | RowWise] = [*self._tapes, *self._row_wise]
        if keep < rows:
            self._checkpoint.restore(keep)
        for part in parts:
            if 0 < keep < rows:
                part.replay(keep)
            part.clear()
        self._checkpoint = None

    def _record(self, on: bool) -> None:
        for tape in self._tapes:
            tape.recording = on
        for module in self._row_wise:
            module.active = on
        if self._linears is not None:
            self._linears.active = on
