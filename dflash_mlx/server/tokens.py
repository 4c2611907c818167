"""Single tokens as text, for display."""

from collections.abc import Iterable
from typing import Any


class TokenTexts:
    """Token id -> its text, remembered: a reply has many tokens and few different ones.

    A token is read after another one, since some tokenizers drop the space that begins a text. Bytes that are
    no whole character show as U+FFFD.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._prefix = len(self._decode(self._before))
        self._known: dict[int, str] = {}

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """The text of each id."""
        for token in ids:
            if token not in self._known:
                self._known[token] = self._decode([*self._before, token])[self._prefix :]
        return {token: self._known[token] for token in ids}

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text
