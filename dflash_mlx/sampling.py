"""The target's choice at a position: a pure function of its logits, the settings, the history and the seed.

`argmax(filtered logits / T + Gumbel noise)` draws exactly from the softmax (the Gumbel-max trick). The noise
of a position depends on (seed, position) alone, so a position's token does not depend on the block it was
verified in. The drafter proposes with the same noise; a draft is accepted where it equals the choice.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.errors import UsageError
from dflash_mlx.params import SamplingParams

REPETITION_CONTEXT = 20
"""Tokens that the repetition penalty looks back on, as in mlx-lm."""


@dataclass(frozen=True)
class Choice:
    """Lazy: chosen ids `[L]`, whether all raw logits are finite, and the log probabilities asked for.

    Attributes:
        usable: rows, from the first, whose choice is the target's; others hang on drafts that a token mask
            says nothing about, though they may be right.
        logprobs: of the chosen ids, `[L]`, from the raw logits; None if not asked for.
        top_ids, top_logprobs: of the most probable ids, `[L, n]`, best first.
    """

    tokens: mx.array
    finite: mx.array
    usable: int
    logprobs: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """What there is to evaluate."""
        return [a for a in vars(self).values() if isinstance(a, mx.array)]


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raise UsageError if a biased id is not in the vocabulary."""
    if bad := [token for token in params.logit_bias if token >= vocab_size]:
        raise UsageError(f"logit_bias names id {bad[0]}: ids must lie in [0, {vocab_size})")


class Sampler:
    """Chooses the tokens of one reply and remembers what it chose.

    Args:
        params: the settings.
        prompt: ids of the prompt, at least one.
        vocab_size: V, the width of the logits.
        known: ids below it have a meaning; the rest pads the vocabulary and is never chosen.

    Raises:
        UsageError: a biased id is not in the vocabulary.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, known: int | None = None
    ) -> None:
        self.params = params
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self.vocab_size = vocab_size
        self._position = len(prompt)
        self._reply: list[int] = []
        # Padding with a token that is there anyway changes nothing: the penalty counts tokens once.
        self._recent = [prompt[0]] * REPETITION_CONTEXT + list(prompt[-REPETITION_CONTEXT:])
        penalised = params.presence_penalty or params.frequency_penalty
        self._counts = np.zeros(vocab_size, dtype=np.float32) if penalised else None
        self._allowed = None if known is None or known >= vocab_size else mx.arange(vocab_size) < known
        check_bias(params, vocab_size)
        self._bias = self._bias_row()

    @property
    def temperature(self) -> float:
        """Of the target's choice and of the drafter's proposals alike."""
        return self.params.temperature

    def noise(self, rows: int) -> mx.array | None:
        """Gumbel noise `[rows, V]` of the next positions; None for greedy decoding."""
        if not self.params.temperature:
            return None
        keys = mx.array([[self.seed, (self._position + i) % 2**32] for i in range(rows)], dtype=mx.uint32)
        return mx.vmap(lambda key: mx.random.gumbel((self.vocab_size,), key=key))(keys)

    def choose(self, logits: mx.array, drafts: mx.array | None, noise: mx.array | None) -> Choice:
        """Choose the token after each row of a pass.

        Args:
            logits: of the target, `[L, V]`; row i follows the reply so far and the first i drafts.
            drafts: draft ids `[L - 1]`, or None for a single row.
            noise: of these L positions, from `noise`.
        """
        if noise is not None:
            logits = logits.astype(mx.float32)
        total = mx.logsumexp(logits, axis=-1, keepdims=True)  # [L, 1]; not finite if a logit is NaN or +inf
        mask, usable = self._masks(logits, drafts)
        scores = self._processed(logits, total, drafts, mask)  # [L, V]
        if noise is not None:
            scores = mx.where(scores < self._threshold(scores), -mx.inf, scores)
            scores = scores / self.params.temperature + noise
        tokens = mx.argmax(scores, axis=-1)
        return Choice(tokens, mx.isfinite(total).all(), usable, *self._logprobs(logits, total, tokens))

    def commit(self, tokens: Sequence[int]) -> None:
        """Note tokens that became part of the reply."""
        self._position += len(tokens)
        self._reply += tokens
        self._recent = (self._recent + list(tokens))[-REPETITION_CONTEXT:]
        if self._counts is not None:
            np.add.at(self._counts, list(tokens), 1)

    # --- logits ---------------------------------------------------------------------------------

    def _processed(
        self, logits: mx.array, total: mx.array, drafts: mx.array | None, mask: mx.array | None
    ) -> mx.array:
        """Log probabilities `[L, V]` after bias, penalties and masks.

        `logits - logsumexp(logits)` in the logits' own type is what mlx-lm takes the argmax of: rounding
        makes ties there.
        """
        changed = logits
        if self._bias is not None:
            changed = changed + self._bias.astype(logits.dtype)
        changed = self._penalized(changed, drafts)
        if mask is not None:
            changed = mx.where(mask, changed, -mx.inf)
        if changed is not logits:
            total = mx.logsumexp(changed, axis=-1, keepdims=True)
        scores = changed - total
        return scores if self._allowed is None else mx.where(self._allowed, scores, -mx.inf)

    def _bias_row(self) -> mx.array | None:
        if not self.params.logit_bias:
            return None
        row = np.zeros(self.vocab_size, dtype=np.float32)
        for token, bias in self.params.logit_bias.items():
            row[token] = bias
        return mx.array(row)

    def _penalized(self, logits: mx.array, drafts: mx.array | None) -> mx.array:
        """Penalties `[L, V]`, every row with the history that it would have had in plain decoding."""
        params, rows = self.params, logits.shape[0]
        if params.repetition_penalty != 1:
            recent = mx.array(self._recent[-REPETITION_CONTEXT:], dtype=mx.int32)
            if drafts is not None:
                recent = mx.concatenate([recent, drafts.astype(mx.int32)])
            window = recent[mx.arange(rows)[:, None] + mx.arange(REPETITION_CONTEXT)]  # [L, 20]
            seen = mx.take_along_axis(logits, window, axis=-1)
            penalty = params.repetition_penalty
            seen = mx.where(seen < 0, seen * penalty, seen / penalty)
            logits = mx.put_along_axis(logits, window, seen.astype(logits.dtype), axis=-1)
        if self._counts is not None:
            counts = mx.broadcast_to(mx.array(self._counts), logits.shape)
            if drafts is not None:
                drafted = (drafts[:, None] == mx.arange(self.vocab_size)).astype(mx.float32)  # [L - 1, V]
                before = mx.pad(mx.cumsum(drafted, axis=0), [(1, 0), (0, 0)])  # row i counts i drafts
                counts = counts + before
            penalty_row = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
            logits = logits - penalty_row.astype(logits.dtype)
        return logits

    def _masks(self, logits: mx.array, drafts: mx.array | None) -> tuple[mx.array | None, int]:
        """The token mask of every row `[L, V]`, None without one, and how many rows are usable.

        It needs the drafts: the pass is started, then waited for. Of a draft that it does not allow it is not
        asked further, nor is it blamed for what it says after drafts, which the reply may never come to.
        """
        token_mask = self.params.token_mask
        if token_mask is None:
            return None, logits.shape[0]
        mx.async_eval(logits)
        ids: list[int] = [] if drafts is None else drafts.tolist()  # type: ignore[assignment]  # one axis
        masks = np.ones(logits.shape, dtype=bool)
        masks[0] = token_mask([*self._reply])
        if not masks[0].any():
            raise UsageError(f"token_mask allows no token at position {len(self._reply)} of the reply")
        for row in range(1, len(ids) + 1):
            if not masks[row - 1, ids[row - 1]]:
                break
            try:
                masks[row] = token_mask([*self._reply, *ids[:row]])
            except Exception:  # if the reply comes to these drafts, the next cycle asks again
                return mx.array(masks), row
            if not masks[row].any():
                masks[row] = True  # a choice among nothing would not be finite
                return mx.array(masks), row
        return mx.array(masks), logits.shape[0]

    # --- filters and reports ----------------------------------------------------------------------

    def _threshold(self, logprobs: mx.array) -> mx.array:
        """The least log probability `[L, 1]` that top-p, min-p and top-k all keep.

        Each keeps the tokens above some value, so the order in which they are applied does not matter.
        """
        params = self.params
        least = mx.full((logprobs.shape[0], 1), -mx.inf)
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else None
        if params.min_p:
            least = mx.maximum(least, logprobs.max(axis=-1, keepdims=True) + float(np.log(params.min_p)))
        if top_k is None and params.top_p == 1:
            return least
        # Beyond the k best there is nothing to keep, so the whole vocabulary is sorted only without top-k.
        best = logprobs if top_k is None else mx.topk(logprobs, top_k, axis=-1)
        best = mx.sort(best, axis=-1)[:, ::-1]  # [L, k], descending
        if params.top_p < 1:
            above = mx.cumsum(mx.exp(best), axis=-1, inclusive=False)  # mass of the tokens before each
            kept = mx.maximum((above < params.top_p).sum(axis=-1, keepdims=True), 1)
            return mx.maximum(least, mx.take_along_axis(best, kept - 1, axis=-1))
        return mx.maximum(least, best[:, -1:])

    def _logprobs(
        self, logits: mx.array, total: mx.array, tokens: mx.array
    ) -> tuple[mx.array | None, mx.array | None, mx.array | None]:
        """Log softmax of the raw logits at the chosen ids, and of the most probable ones."""
        count = self.params.top_logprobs
        if count is None:
            return None, None, None
        logprobs = logits.astype(mx.float32) - total.astype(mx.float32)
        chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
        if not count:
            return chosen, None, None
        best = mx.argpartition(-logprobs, count - 1, axis=-1)[:, :count]
        order = mx.argsort(-mx.take_along_axis(logprobs, best, axis=-1), axis=-1)
        best = mx.take_along_axis(best, order, axis=-1)
        return chosen, best, mx.take_along_axis(logprobs, best, axis=-1)
