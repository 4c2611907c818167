"""How many rows the next verify pass gets: from what a cycle costs here and how drafts fared lately.

Pure arithmetic on numbers that the loop hands in. Whatever it answers, the text stays the same.
"""

from dataclasses import dataclass
from typing import Protocol

from dflash_mlx.costs import HOPE, Costs, LiveCosts


class Policy(Protocol):
    """What the loop asks before every cycle, and tells after it."""

    def rows(self, limit: int, keys: int) -> int:
        """Rows of the next pass, 1 to `limit`; 1 decodes plainly. `keys` is the context's length."""

    def observe(self, rows: int, accepted: int, seconds: float, keys: int) -> None:
        """A cycle of `rows` rows took `seconds`, and `accepted` of its `rows - 1` drafts were right.

        0 seconds: not known, because the device went on while the caller kept the last cycle's tokens.
        """


@dataclass(frozen=True)
class Fixed:
    """Always the same block, as far as it is allowed."""

    size: int

    def rows(self, limit: int, keys: int) -> int:
        """The size, or the limit."""
        return min(self.size, limit)

    def observe(self, rows: int, accepted: int, seconds: float, keys: int) -> None:
        """Nothing to learn."""


PLAIN = Fixed(1)


class Acceptance:
    """How often a draft slot was right given that all before it were; recent cycles count more.

    A slot with little evidence leans on the slot before it, the first one on `FIRST`.
    """

    MEMORY = 20
    """Cycles with a draft after which evidence has lost most of its weight."""
    IDLE = 64
    """The same for cycles without one."""
    FIRST = 0.5
    LEAN = 3.0
    """Cycles of evidence that the slot before is worth."""

    def __init__(self, slots: int) -> None:
        self._right = [0.0] * slots
        self._tried = [0.0] * slots

    def observe(self, drafted: int, accepted: int) -> None:
        """A block with this many drafts, of which the first `accepted` were right."""
        keep = 1 - 1 / (self.MEMORY if drafted else self.IDLE)
        self._right = [keep * n for n in self._right]
        self._tried = [keep * n for n in self._tried]
        for slot in range(min(accepted + 1, drafted)):
            self._tried[slot] += 1
            self._right[slot] += slot < accepted

    def tokens(self) -> list[float]:
        """Expected tokens of a cycle of 1, 2, ... rows, the target's own included."""
        expected, reached, rate = [1.0], 1.0, self.FIRST
        for right, tried in zip(self._right, self._tried, strict=True):
            rate = (right + self.LEAN * rate) / (tried + self.LEAN)
            reached *= rate
            expected.append(expected[-1] + reached)
        return expected


class Adaptive:
    """The block with the most expected tokens per second, and a ledger that keeps it honest.

    The ledger holds the time saved against plain decoding, in plain steps. A cycle that drafts must be able
    to pay for the most it can lose, which is all its drafts. Savings are capped, so that old gains do not
    pay for a text on which drafting stopped to work; income is a small share of every cycle, and pays for
    drafting now and then while plain decoding is best. So, as far as the costs are right, decoding falls
    behind plain by no more than `INCOME` and `START` steps, whatever the drafter does.
    """

    START = 2.0
    CAP = 10.0
    INCOME = 0.01
    PROBE_AFTER = 12
    """Plain cycles before a draft is tried again."""
    CHECK_AFTER = 256
    """Cycles without a plain one after which plain decoding is timed again."""
    KEEP = 1.02
    """A block size is kept until another is this much better."""

    def __init__(self, costs: Costs) -> None:
        self._costs = LiveCosts(costs)
        self._largest = costs.largest
        self._acceptance = Acceptance(costs.largest - 1)
        self._saved = self.START
        self._size = 1
        self._next = 1
        self._since_draft = 0
        self._since_plain = 0

    def rows(self, limit: int, keys: int) -> int:
        """The best block that the ledger can pay for; now and then another, to learn."""
        self._next = self._choose(limit, keys)
        return self._next

    def _choose(self, limit: int, keys: int) -> int:
        limit = min(limit, self._largest)
        plain = self._costs.seconds(1, keys)
        prices = [self._costs.seconds(rows, keys) / plain for rows in range(1, limit + 1)]
        payable = [rows for rows in range(1, limit + 1) if prices[rows - 1] - 1 <= self._saved or rows == 1]
        if self._since_plain >= self.CHECK_AFTER:
            return 1
        tokens = self._acceptance.tokens()
        rates = {rows: tokens[rows - 1] / prices[rows - 1] for rows in payable}
        best = max(rates, key=lambda rows: rates[rows])
        if self._size in rates and rates[self._size] * self.KEEP >= rates[best]:
            best = self._size
        if best == 1 and self._since_draft >= self.PROBE_AFTER:
            return self._probe(prices, payable)
        return best

    def _probe(self, prices: list[float], payable: list[int]) -> int:
        """The block to try while plain decoding is best; 1 if there is none."""
        # Blocks for which not even right drafts would pay show one thing alone: that they are not so dear.
        hopeful = [rows for rows in payable if rows > HOPE * prices[rows - 1]] or payable[1:]
        if not hopeful:
            return 1
        cheapest = min(prices[rows - 1] for rows in hopeful)
        # The largest of the cheapest ones: more drafts for the same price show more.
        return max(rows for rows in hopeful if prices[rows - 1] < 1.03 * cheapest)

    def observe(self, rows: int, accepted: int, seconds: float, keys: int) -> None:
        """Learn from a cycle."""
        # A plain step after a block was not started ahead, and one before a block starts no other: these two
        # say little about the others. What follows a plain step was asked before its result was known.
        timed = rows > 1 or self._size == self._next == 1
        if timed:
            self._costs.observe(rows, seconds, keys)
        price = self._costs.seconds(rows, keys) / self._costs.seconds(1, keys)
        self._saved = min(self.CAP, self._saved + accepted + 1 - price + self.INCOME * price)
        self._acceptance.observe(rows - 1, accepted)
        if rows > 1:
            # A right draft is a reason to try the next one at once.
            self._since_draft = self.PROBE_AFTER if accepted else 0
        else:
            self._since_draft += 1
        self._since_plain = 0 if rows == 1 and timed else self._since_plain + 1
        self._size = rows
