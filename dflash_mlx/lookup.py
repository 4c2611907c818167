"""Drafts without a drafter: what followed the context's last tokens when they stood there before.

Prompt lookup (Saxena, 2023). Replies repeat their prompt and themselves, and what is copied need not be
thought up again. Whether it is right the target says, as of any draft.
"""

from collections.abc import Sequence

MATCHES = {8: 0.9, 2: 0.6}
"""Lengths of the matches that are looked for, the longest first, and how often one more token of what
followed such a match is taken to be right until it was tried."""


class Lookup:
    """A context's tokens, and where in it every short run of them stood last.

    Some hundred bytes for each token; asking takes the same time whatever the context's length.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        # By their hashes: runs that share one make a bad draft, which the target rejects.
        self._ends: dict[int, dict[int, int]] = {length: {} for length in MATCHES}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what the context goes on with."""
        for token in tokens:
            # The last run of all is noted with the token after it, so that it never finds itself.
            for length, ends in self._ends.items():
                if len(self._tokens) >= length:
                    ends[self._last(length)] = len(self._tokens)
            self._tokens.append(token)

    @property
    def match(self) -> int:
        """The length of the longest match, one of `MATCHES`; 0 without any."""
        return next((length for length, ends in self._ends.items() if self._last(length) in ends), 0)

    def draft(self, count: int) -> list[int]:
        """`count` tokens that followed the longest match, which there must be.

        Where it ends close to the context's end, they begin anew: what is repeated is repeated again.
        """
        match = self.match
        start = self._ends[match][self._last(match)]
        drafts = self._tokens[start : start + count]
        period = len(drafts)
        return [drafts[i % period] for i in range(count)]

    def _last(self, length: int) -> int:
        """The hash of the last tokens."""
        return hash(tuple(self._tokens[-length:]))
