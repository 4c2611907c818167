"""A target model as the decode loop sees it: prefill, verify a block, commit a part of it."""

from collections.abc import Sequence

import mlx.core as mx
from mlx import nn

from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import PairError
from dflash_mlx.target.caches import Cache, Checkpoint, check_rollback, is_recurrent, make_cache
from dflash_mlx.target.eager import Eager
from dflash_mlx.target.embedding import embedding_scale
from dflash_mlx.target.mixers import find_mixers
from dflash_mlx.target.replay import Tape
from dflash_mlx.target.rowwise import RowWise, find_branching
from dflash_mlx.target.taps import Taps
from dflash_mlx.target.window import LARGEST_BLOCK


class Target:
    """An mlx-lm model, unchanged but for what `attach` gives to single instances of its modules.

    Attributes:
        model: the mlx-lm model.
        text: the part of it that holds the decoder as `model` and, unless tied, `lm_head`.
        context_length: positions that it was made for, or None where its config does not say.
        quantized: whether any linear layer is quantized.
        hidden_size, vocab_size: width of the residual stream and of the logits.
    """

    def __init__(self, model: nn.Module, context_length: int | None = None) -> None:
        self.model = model
        self.context_length = context_length
        self.quantized = any(isinstance(m, nn.QuantizedLinear) for m in model.modules())
        self.text = _text_model(model)
        # Lazy: nothing but shapes is asked for, which are right for tied, padded and quantized modules alike.
        embedded = self.text.model.embed_tokens(mx.array([[0]]))
        self.hidden_size: int = embedded.shape[-1]
        self.vocab_size: int = self.head(embedded).shape[-1]
        self._embedding_scale = embedding_scale(
            model, self.text.model.embed_tokens, self.layers[0], self.hidden_size
        )
        self._taps: Taps | None = None
        self._eager: Eager | None = None
        self._tapes: list[Tape] = []
        self._row_wise: list[RowWise] = []
        self._checkpoint: Checkpoint | None = None

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers, in order."""
        layers: Sequence[nn.Module] = self.model.layers
        return layers

    def embed(self, tokens: mx.array) -> mx.array:
        """Token ids `[B, L]` -> input embeddings `[B, L, H]`, with the target's own scale."""
        embedded: mx.array = self.text.model.embed_tokens(tokens)
        return embedded if self._embedding_scale == 1 else embedded * self._embedding_scale

    def head(self, hidden: mx.array) -> mx.array:
        """Final hidden states `[B, L, H]` -> logits `[B, L, V]`; the head may be tied or quantized."""
        head = self.text.lm_head if "lm_head" in self.text else self.text.model.embed_tokens.as_linear
        logits: mx.array = head(hidden)
        return logits

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

    def attach(self, layer_ids: Sequence[int]) -> None:
        """Prepare for speculation: taps on these layers, and a rollback for every cache.

        Raises:
            UnsupportedTargetError: some cache cannot be rolled back exactly. The model is left as it was.
        """
        self.detach()
        caches, mixers = find_mixers(self.model, self.layers)
        recurrent = [m for m in mixers if is_recurrent(m.cache)]
        check_rollback(caches, replayed=[m.cache for m in recurrent])
        self._row_wise = [RowWise(module) for module in find_branching(mixers)]
        covered = {id(rows.module) for rows in self._row_wise}
        self._tapes = [Tape(m.module) for m in recurrent if id(m.module) not in covered]
        self._taps = Taps(self.layers, layer_ids)
        # On the CPU a processor that builds the graph faster has nothing to gain, and every hand-over costs.
        if mx.default_device().type == mx.DeviceType.gpu:
            self._eager = Eager(self.layers)

    def detach(self) -> None:
        """Undo `attach`."""
        # A layer that is both is undone in the reverse order.
        layers = [part for part in (self._eager, self._taps) if part is not None]
        parts: list[Eager | Taps | Tape | RowWise] = [*self._tapes, *self._row_wise, *layers]
        for undo in (undo for part in parts for undo in part.undos):
            undo()
        self._taps, self._eager, self._tapes, self._row_wise = None, None, [], []

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


def _text_model(model: nn.Module) -> nn.Module:
    """The part of an mlx-lm model that holds the decoder as `model` and, unless tied, `lm_head`."""
    text = model.language_model if "language_model" in model else model
    if "model" not in text or "embed_tokens" not in text.model:
        raise PairError(f"no embedding found in {type(model).__module__}: this family is not supported")
    return text
