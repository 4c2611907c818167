"""What a cycle decides, on its way from the device to the host."""

import time
from typing import Any

import mlx.core as mx

from dflash_mlx.drafter import Draft
from dflash_mlx.errors import NumericsError
from dflash_mlx.events import TokenLogprob
from dflash_mlx.sampling import Choice


class Decision:
    """The target's choice and the drafts it was given, for which the host waits once.

    Args:
        choice: of every row, lazy.
        draft: what the rows after the first hold; None in plain decoding.
        check: whether the drafter's logits are to be finite too.
    """

    def __init__(self, choice: Choice, draft: Draft | None = None, *, check: bool = False) -> None:
        self.choice = choice
        flags = [choice.finite] if draft is None or not check else [choice.finite, draft.finite]
        self._flags = len(flags)
        ids = [choice.tokens] if draft is None else [choice.tokens, draft.tokens]
        parts = [*ids, *(flag[None] for flag in flags)]
        self._synced = mx.concatenate([part.astype(mx.int32) for part in parts])
        # Started by itself: waiting for an array waits for all that was started with it.
        mx.async_eval(self._synced, *choice.arrays)

    def timed(self) -> tuple[list[int], tuple[TokenLogprob, ...], list[int], float]:
        """The same as `wait`, and the seconds that it took."""
        start = time.perf_counter()
        return *self.wait(), time.perf_counter() - start

    def wait(self) -> tuple[list[int], tuple[TokenLogprob, ...], list[int]]:
        """Chosen ids, their log probabilities if asked for, and draft ids.

        Raises:
            NumericsError: some logits are not finite.
        """
        values: Any = self._synced.tolist()
        ids, (target_ok, *draft_ok) = values[: -self._flags], values[-self._flags :]
        if not target_ok:
            raise NumericsError("the target's logits are not finite; are its weights damaged?")
        if not all(draft_ok):
            raise NumericsError(
                "the drafter's logits are not finite; are its weights damaged, or its activations float16?"
            )
        rows = self.choice.tokens.shape[0]
        return ids[:rows], _logprobs(ids[:rows], self.choice), ids[rows:]


def _logprobs(tokens: list[int], choice: Choice) -> tuple[TokenLogprob, ...]:
    if choice.logprobs is None:
        return ()
    chosen: Any = choice.logprobs.tolist()
    tops: Any = [()] * len(tokens)
    if choice.top_ids is not None and choice.top_logprobs is not None:
        pairs: Any = zip(choice.top_ids.tolist(), choice.top_logprobs.tolist(), strict=True)  # type: ignore[arg-type]  # two axes
        tops = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    return tuple(TokenLogprob(t, p, top) for t, p, top in zip(tokens, chosen, tops, strict=True))
