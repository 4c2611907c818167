"""What a cycle costs on this machine: as it was measured, and as later cycles correct it.

Pure arithmetic on numbers that others hand in.
"""

import math
from bisect import bisect
from dataclasses import asdict, dataclass
from typing import Any

HOPE = 1.05
"""Tokens for each plain step of its price that a block must give, at best, to be tried at all."""


@dataclass(frozen=True)
class Costs:
    """What a pair costs on a machine, in seconds.

    Attributes:
        depths: context lengths it was measured at, ascending.
        cycles: for each depth, a whole cycle of 1, 2, ... rows, drafting and Python's share included.
        draft: the draft pass of the largest block alone.
    """

    depths: tuple[int, ...]
    cycles: tuple[tuple[float, ...], ...]
    draft: float

    @property
    def largest(self) -> int:
        """Rows of the largest block that was measured."""
        return len(self.cycles[0])

    def seconds(self, rows: int, keys: int) -> float:
        """A cycle of so many rows after so many keys: linear between depths and beyond the last."""
        if len(self.depths) == 1:
            return self.cycles[0][rows - 1]
        right = min(max(bisect(self.depths, keys), 1), len(self.depths) - 1)
        (a, b), (at_a, at_b) = (
            self.depths[right - 1 : right + 1],
            (c[rows - 1] for c in self.cycles[right - 1 : right + 1]),
        )
        # Noise must not let a cycle become cheaper, in the end negative, with more context.
        return at_a + max(0.0, at_b - at_a) * max(0, keys - a) / (b - a)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` turns back into equal costs."""
        return asdict(self)

    @property
    def can_pay(self) -> bool:
        """Whether a block would be worth its price, at some depth, if all of its drafts were right."""
        return any(
            rows * cycles[0] > HOPE * cycles[rows - 1]
            for cycles in self.cycles
            for rows in range(2, self.largest + 1)
        )

    def quickest(self, other: "Costs") -> "Costs":
        """Of two measurements of one pair, at the same depths, the smaller costs."""
        pairs = zip(self.cycles, other.cycles, strict=True)
        cycles = tuple(tuple(map(min, mine, theirs)) for mine, theirs in pairs)
        return Costs(self.depths, cycles, min(self.draft, other.draft))

    @staticmethod
    def from_json(obj: dict[str, Any]) -> "Costs":
        """The costs that `to_json` described."""
        return Costs(tuple(obj["depths"]), tuple(map(tuple, obj["cycles"])), obj["draft"])


class LiveCosts:
    """Measured costs, corrected by every later cycle: as a whole (heat, load) and for each kind of block.

    What was measured while the machine was busy may look so dear that it is never tried again. So when cycles
    of a block prove far quicker than believed, that is believed at once, and of blocks of all sizes.
    """

    SPEED = 0.05
    """Share of an error that each of the two corrections takes."""
    CLIP = 0.25
    """Logarithm of the largest error that is believed at once: a hiccup is no news."""
    PROOF = 2
    """Cycles of a kind, one after the other, that must all be quicker by more than that to be believed."""

    def __init__(self, measured: Costs) -> None:
        self._measured = measured
        self._overall = 0.0
        sizes = range(1, measured.largest + 1)
        self._errors = {(rows, copied): 0.0 for rows in sizes for copied in (False, True)}
        self._quicker: dict[tuple[int, bool], list[float]] = {kind: [] for kind in self._errors}

    def seconds(self, rows: int, keys: int, copied: bool = False) -> float:
        """A cycle of so many rows after so many keys; copied drafts take no draft pass."""
        measured = self._measured.seconds(rows, keys)
        if not copied:
            return measured * self._correction(rows, copied)
        without = (measured - self._measured.draft) * self._correction(rows, copied)
        return max(without, self.seconds(1, keys))  # No pass is quicker than one over a single row.

    def _correction(self, rows: int, copied: bool) -> float:
        return math.exp(self._overall + self._errors[rows, copied])

    def observe(self, rows: int, seconds: float, keys: int, copied: bool = False) -> None:
        """A cycle took this long, if that is known."""
        if seconds > 0:
            error = math.log(seconds / self.seconds(rows, keys, copied))
            error -= self._prove((rows, copied), error)
            step = self.SPEED * min(self.CLIP, max(-self.CLIP, error))
            self._overall += step
            self._errors[rows, copied] += step

    def _prove(self, kind: tuple[int, bool], error: float) -> float:
        """What of an error is now proven, and corrected."""
        quicker = self._quicker[kind]
        if error >= -self.CLIP:
            quicker.clear()
            return 0.0
        quicker.append(error)
        if len(quicker) < self.PROOF:
            return 0.0
        proven = max(quicker)
        quicker.clear()
        rows, copied = kind
        for other in self._errors:
            if other[1] == copied and (other[0] == 1) == (rows == 1):
                self._errors[other] += proven
        return proven
