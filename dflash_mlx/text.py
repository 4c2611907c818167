"""Token ids -> text, whole characters only. Knows nothing of models."""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of a growing reply, exactly as decoding all of its ids at once would give it.

    A character may be split over tokens, and what a token reads as may depend on the token before it (a
    leading space, for one). So each new piece is the difference between decoding a short tail of the reply
    with and without its new ids, and a tail that ends inside a character waits.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tail: list[int] = []  # ids from some character's beginning on
        self._said = 0  # how many of them have been handed out

    def add(self, ids: Sequence[int]) -> str:
        """The whole characters that these ids complete."""
        return "".join(map(self._add, ids))

    def _add(self, token: int) -> str:
        self._tail.append(token)
        before, after = self._decode(self._tail[: self._said]), self._decode(self._tail)
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        self._tail, self._said = self._tail[self._said :], len(self._tail) - self._said
        return after[len(before) :]

    def finish(self) -> str:
        """What is still held back: an incomplete character, as replacement characters."""
        before, after = self._decode(self._tail[: self._said]), self._decode(self._tail)
        self._tail, self._said = [], 0
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text
