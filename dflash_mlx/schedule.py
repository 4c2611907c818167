"""What the next cycle is: how many rows its pass gets, and where its drafts come from.

By what cycles cost here and how drafts fared lately. Pure arithmetic on numbers that the loop hands in;
whatever it answers, the text stays the same.
"""

from dataclasses import dataclass
from typing import Protocol

from dflash_mlx.costs import HOPE, Costs, LiveCosts
from dflash_mlx.lookup import MATCHES


@dataclass(frozen=True)
class Plan:
    """What a cycle is to be.

    Attributes:
        rows: of its verify pass, the anchor included; 1 decodes plainly.
        match: where not 0, the drafts are not the drafter's: they are what followed so many of the context's
            last tokens when these stood there before.
    """

    rows: int
    match: int = 0


class Policy(Protocol):
    """What the loop asks before every cycle, and tells after it."""

    @property
    def copies(self) -> bool:
        """Whether it may plan copies, for which the loop then remembers the context."""

    def plan(self, limit: int, keys: int, match: int = 0) -> Plan:
        """The next cycle, of `limit` rows at most.

        Args:
            keys: the context's length.
            match: how many of the context's last tokens stood there before; 0: there is nothing to copy.
        """

    def observe(self, plan: Plan, accepted: int, seconds: float, keys: int) -> None:
        """A cycle took `seconds`, and `accepted` of its `plan.rows - 1` drafts were right.

        0 seconds: they would say nothing of others, because the device went on while the caller kept the last
        cycle's tokens, or because it was a plain step that did not both start ahead and start the next.
        """


@dataclass(frozen=True)
class Fixed:
    """Always the same block of the drafter's, as far as it is allowed."""

    size: int
    copies = False

    def plan(self, limit: int, keys: int, match: int = 0) -> Plan:
        """The size, or the limit."""
        return Plan(min(self.size, limit))

    def observe(self, plan: Plan, accepted: int, seconds: float, keys: int) -> None:
        """Nothing to learn."""


PLAIN = Fixed(1)


class Acceptance:
    """How often a draft slot was right given that all before it were; recent cycles count more.

    A slot with little evidence leans on the slot before it, the first one on `first`.

    Args:
        first: taken for granted of the first slot.
        lean: cycles of evidence that what a slot leans on is worth.
        memory: cycles with such drafts after which evidence has lost most of its weight.
        idle: the same for cycles without.
    """

    def __init__(
        self, slots: int, first: float = 0.5, *, lean: float = 3.0, memory: int = 20, idle: int = 64
    ) -> None:
        self._first, self._lean = first, lean
        self._keep, self._keep_idle = 1 - 1 / memory, 1 - 1 / idle
        self._right = [0.0] * slots
        self._tried = [0.0] * slots

    def observe(self, drafted: int, accepted: int) -> None:
        """A block with this many drafts, of which the first `accepted` were right."""
        keep = self._keep if drafted else self._keep_idle
        self._right = [keep * n for n in self._right]
        self._tried = [keep * n for n in self._tried]
        for slot in range(min(accepted + 1, drafted)):
            self._tried[slot] += 1
            self._right[slot] += slot < accepted

    def tokens(self) -> list[float]:
        """Expected tokens of a cycle of 1, 2, ... rows, the target's own included."""
        expected, reached, rate = [1.0], 1.0, self._first
        for right, tried in zip(self._right, self._tried, strict=True):
            rate = (right + self._lean * rate) / (tried + self._lean)
            reached *= rate
            expected.append(expected[-1] + reached)
        return expected


class Ledger:
    """What trying saved against not trying, in tokens: nobody may spend what is not there.

    Savings are capped, so that old gains do not pay for a text on which trying stopped to work; income is a
    small share of everything, and pays for trying now and then.
    """

    CAP = 10.0

    def __init__(self, start: float, income: float) -> None:
        self._saved = start
        self._income = income

    def pays(self, loss: float) -> bool:
        """Whether so many tokens can be lost."""
        return loss <= max(self._saved, 0.0)

    def book(self, tokens: float, otherwise: float) -> None:
        """A cycle gave so many tokens, in a time that would have given so many otherwise."""
        self._saved = min(self.CAP, self._saved + tokens - otherwise + self._income * otherwise)


class Adaptive:
    """The block with the most expected tokens per second, and ledgers that keep it honest.

    The drafter and copying have one each against plain decoding: a block must be able to pay for the most it
    can lose, which is all its drafts. So, as far as the costs are right, decoding falls behind plain by no
    more than what the two begin with and take in, whatever the drafts are. A third is kept in the same way
    for copying against the drafter.
    """

    copies = True
    PROBE_AFTER = 12
    """Cycles without the drafter after which it is tried again where plain decoding looks best."""
    DRAFT_AFTER = 64
    """The same where copying does."""
    CHECK_AFTER = 256
    """Cycles without a plain one after which plain decoding is timed again."""
    KEEP = 1.02
    """The drafter's block size is kept until another is this much better."""

    def __init__(self, costs: Costs) -> None:
        self._costs = LiveCosts(costs)
        self._largest = costs.largest
        slots = costs.largest - 1
        # By the match; 0 are the drafter's drafts.
        self._acceptance = {0: Acceptance(slots)}
        for match, first in MATCHES.items():  # They are rarer, so that evidence must last longer.
            self._acceptance[match] = Acceptance(slots, first, lean=6, memory=40, idle=256)
        # By whether the drafts are copied.
        self._against_plain = {False: Ledger(3.0, 0.01), True: Ledger(2.0, 0.003)}
        self._against_drafter = Ledger(2.0, 0.01)
        self._size = 1
        self._rate = 1.0
        self._next = self._ahead = Plan(1)
        self._since_draft = 0
        self._since_plain = 0
        self._plain_in_a_row = 0

    def plan(self, limit: int, keys: int, match: int = 0) -> Plan:
        """The best block that the ledgers can pay for; now and then another, to learn."""
        self._next = self._choose(min(limit, self._largest), keys, match)
        return self._next

    def _choose(self, limit: int, keys: int, match: int) -> Plan:
        if self._since_plain >= self.CHECK_AFTER:
            return Plan(1)
        rates = self._rates(self._prices(limit, keys, 0), 0)
        best = max(rates, key=rates.__getitem__)
        if rates.get(self._size, 0.0) * self.KEEP >= rates[best]:
            best = self._size
        self._rate = rates[best]
        if best == 1 and self._since_draft >= self.PROBE_AFTER:
            best = self._probe(limit, keys)
        overdue = best > 1 and self._since_draft >= self.DRAFT_AFTER
        if match and not overdue and (rows := self._copied(limit, keys, match)):
            return Plan(rows, match)
        return Plan(best)

    def _copied(self, limit: int, keys: int, match: int) -> int:
        """Rows of the best block to copy; 0 if none promises more than the best of the others."""
        prices = {
            rows: price
            for rows, price in self._prices(limit, keys, match).items()
            if self._against_drafter.pays(price * self._rate - 1)
        }
        rates = self._rates(prices, match)
        rows = max(rates, key=rates.__getitem__, default=0)
        return rows if rows > 1 and rates[rows] > self._rate else 0

    def _prices(self, limit: int, keys: int, match: int) -> dict[int, float]:
        """What the cycles cost that can be paid for, in plain steps, by their rows."""
        ledger = self._against_plain[match > 0]
        prices = {rows: self._price(Plan(rows, match), keys) for rows in range(2, limit + 1)}
        return {1: 1.0} | {rows: price for rows, price in prices.items() if ledger.pays(price - 1)}

    def _price(self, plan: Plan, keys: int) -> float:
        """What a cycle costs, in plain steps."""
        return self._costs.seconds(plan.rows, keys, plan.match > 0) / self._costs.seconds(1, keys)

    def _rates(self, prices: dict[int, float], match: int) -> dict[int, float]:
        """Expected tokens in the time of a plain step, by the rows of a cycle."""
        tokens = self._acceptance[match].tokens()
        return {rows: tokens[rows - 1] / price for rows, price in prices.items()}

    def _probe(self, limit: int, keys: int) -> int:
        """The block to try while plain decoding is best; 1 if none can be paid for."""
        prices = {rows: self._price(Plan(rows), keys) for rows in range(2, self._largest + 1)}
        prices = {rows: price for rows, price in prices.items() if price - 1 <= Ledger.CAP}
        # Blocks for which not even right drafts would pay show one thing alone: that they are not so dear.
        hopeful = {rows: price for rows, price in prices.items() if rows > HOPE * price} or prices
        payable = hopeful.keys() & self._prices(limit, keys, 0).keys()
        if not payable:
            return 1
        cheapest = min(hopeful[rows] for rows in payable)
        # The largest of the cheapest ones: more drafts for the same price show more.
        return max(rows for rows in payable if hopeful[rows] < 1.03 * cheapest)

    def observe(self, plan: Plan, accepted: int, seconds: float, keys: int) -> None:
        """Learn from a cycle."""
        self._costs.observe(plan.rows, seconds, keys, plan.match > 0)
        self._book(plan, accepted, self._price(plan, keys))
        for match, acceptance in self._acceptance.items():
            acceptance.observe(*((plan.rows - 1, accepted) if match == plan.match else (0, 0)))
        if self._ahead.match and not plan.match:
            # It was to be copied, but then the token before did not fit: the first draft was wrong.
            self._acceptance[self._ahead.match].observe(1, 0)
        if plan.rows > 1 and not plan.match:
            # A right draft is a reason to try the next one at once.
            self._since_draft = self.PROBE_AFTER if accepted else 0
        else:
            self._since_draft += 1
        self._plain_in_a_row = self._plain_in_a_row + 1 if plan.rows == 1 else 0
        # The second one in a row is the first to be timed, if the caller is quick enough.
        self._since_plain = 0 if self._plain_in_a_row >= 2 else self._since_plain + 1
        self._size = self._size if plan.match else plan.rows
        # What follows a plain step is asked for before its token is known.
        self._ahead = self._next if plan.rows == 1 else Plan(1)

    def _book(self, plan: Plan, accepted: int, price: float) -> None:
        """Enter what a cycle gave; where it tells nothing of a ledger's matter, only the income comes in."""
        copied = plan.match > 0
        for kind, ledger in self._against_plain.items():
            ledger.book(accepted + 1 if plan.rows > 1 and kind == copied else price, price)
        otherwise = price * self._rate
        self._against_drafter.book(accepted + 1 if copied else otherwise, otherwise)
