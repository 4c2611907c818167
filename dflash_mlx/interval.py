"""A mean of ratios over prompts, and how far it could be from that of other prompts."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t, two-sided 95 %, for 1 to 30 degrees of freedom."""

NORMAL = 1.959964  # the same for infinitely many


@dataclass(frozen=True)
class Interval:
    """A geometric mean over prompts and its 95 % interval: Student's t on the logarithms."""

    mean: float
    low: float
    high: float

    @staticmethod
    def over(ratios: Sequence[float]) -> "Interval":
        """Of one ratio per prompt; a single prompt says nothing about others, so its interval has no end."""
        logs = [math.log(ratio) for ratio in ratios]
        mean = statistics.fmean(logs)
        if len(logs) < 2:
            return Interval(math.exp(mean), 0.0, math.inf)
        half = quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))

    def __str__(self) -> str:
        return f"{self.mean:.2f}x [{self.low:.2f}, {self.high:.2f}]"

    def to_json(self) -> dict[str, float | None]:
        """JSON has no infinity: an interval without an end has None there."""
        return {"mean": self.mean, "low": self.low, "high": self.high if math.isfinite(self.high) else None}


def quantile(freedom: int) -> float:
    """Student's t, two-sided 95 %; beyond the table by its expansion around the normal distribution."""
    if freedom <= len(QUANTILES):
        return QUANTILES[freedom - 1]
    z = NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
