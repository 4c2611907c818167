"""A drafter at work on one conversation: `extend` with what was committed, `propose` what may come next."""

from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.drafter.context import DrafterContext
from dflash_mlx.drafter.model import DrafterModel, Embed, Head
from dflash_mlx.kernels import Walker


@dataclass(frozen=True)
class Draft:
    """A lazy proposal: token ids `[L]`, and whether all of its logits are finite (a boolean scalar)."""

    tokens: mx.array
    finite: mx.array


class Drafter:
    """The network and its context. The target's embedding and head stay the target's: they are arguments.

    Args:
        model: the network.
        walker: a kernel for the selector's walk; None: MLX's own ops.
        context: what it remembers already; None: nothing.
    """

    def __init__(
        self, model: DrafterModel, walker: Walker | None = None, context: DrafterContext | None = None
    ) -> None:
        self.model = model
        self.walker = walker
        self.config = model.config
        self.context = model.make_context() if context is None else context

    def extend(self, taps: mx.array) -> None:
        """Take in the taps of rows that were committed, `[1, n, len(target_layer_ids) * H]`."""
        self.model.extend(taps, self.context)

    @property
    def arrays(self) -> list[mx.array]:
        """What `extend` and `propose` leave to evaluate."""
        return self.context.arrays

    def propose(
        self,
        anchor: int,
        block_size: int,
        embed: Embed,
        head: Head,
        temperature: float = 0.0,
        noise: mx.array | None = None,
        taps: mx.array | None = None,
    ) -> Draft:
        """Draft `block_size - 1` tokens after the anchor, the last committed token.

        Args:
            anchor: token id in the block's first row; the other rows hold the mask token.
            block_size: rows of the block, 2 to the drafter's own.
            embed: token ids `[1, L]` -> `[1, L, H]`, scaled as the target scales them.
            head: hidden states `[1, L, H]` -> logits `[1, L, V]`, or of the model's `head_ids` alone.
            temperature: of the target's own choice; the draft is greedy without noise.
            noise: what the target will add to its scores at these positions, `[block_size - 1, V]`.
            taps: of rows committed since `extend`, which are taken in on the way; None: there are none.
        """
        config = self.config
        block = mx.array([[anchor] + [config.mask_token_id] * (block_size - 1)])
        x = embed(block) * config.input_embedding_scale
        hidden = self.model.hidden_states(x.astype(self.model.dtype), self.context, taps)[:, 1:]  # [1, L, H]
        logits = self.model.logits(hidden, head)[0]  # [L, V]
        ids = self.model.head_ids
        if ids is not None and noise is not None:
            noise = noise[:, ids]
        if config.selector_rank:
            select = self.model.candidate_selector.walk
            tokens = select(hidden[0], logits, anchor, temperature, noise, self.walker, ids)
        else:
            tokens = mx.argmax(logits if noise is None else logits / temperature + noise, axis=-1)
            tokens = tokens if ids is None else ids[tokens]
        return Draft(tokens, mx.isfinite(logits).all())
