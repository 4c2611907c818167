"""From replies to figures. Every mean comes with an interval, every tau with its definition."""

import hashlib
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.benchmark.measure import PLAIN, Measured
from dflash_mlx.errors import DFlashError
from dflash_mlx.events import Block
from dflash_mlx.interval import Interval
from dflash_mlx.result import Result
from dflash_mlx.target.exactness import EXACT

TAU = "tau: tokens per verify cycle with a draft (copied ones too), the target's own (bonus) included"


@dataclass(frozen=True)
class Figures:
    """Of one block size, over some prompts.

    Attributes:
        copied: share of the cycles with a draft whose drafts were copied from the context.
    """

    prompts: int
    speedup: Interval
    tau: float | None
    copied: float
    histogram: dict[int, int]
    plain_tokens_per_second: float
    tokens_per_second: float

    @staticmethod
    def of(measured: Sequence[Measured], mode: str) -> "Figures":
        """Raises DFlashError where no reply was long enough to be timed."""
        ratios = [ratio for m in measured if (ratio := m.speedup(mode)) is not None]
        if not ratios:
            raise DFlashError("every reply ended with its first token: there is nothing to time")
        drafted = [c for c in cycles(measured, mode) if c.drafted]
        return Figures(
            prompts=len(measured),
            speedup=Interval.over(ratios),
            tau=statistics.fmean(c.committed for c in drafted) if drafted else None,
            copied=sum(c.copied for c in drafted) / max(len(drafted), 1),
            histogram=dict(sorted(Counter(c.committed for c in drafted).items())),
            plain_tokens_per_second=_speed(measured, PLAIN),
            tokens_per_second=_speed(measured, mode),
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {**vars(self), "speedup": self.speedup.to_json()}


@dataclass(frozen=True)
class Report:
    """Everything that was found out; the first mode is the headline."""

    modes: tuple[str, ...]
    overall: dict[str, Figures]
    categories: dict[str, dict[str, Figures]]
    hashes: tuple[str, ...]
    differences: tuple[str, ...]
    exactness: str
    prefill_tokens_per_second: float
    phases_ms: dict[str, float]
    peak_memory_bytes: int
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        head = self.overall[self.modes[0]]
        return {
            "block_size": self.modes[0],
            **head.to_json(),
            "tau_definition": TAU,
            "hashes_equal": not self.differences,
            "differences": list(self.differences),
            "hashes": list(self.hashes),
            "exactness": self.exactness,
            "categories": {
                name: {**by_mode[self.modes[0]].to_json(), "by_block_size": _each(by_mode)}
                for name, by_mode in self.categories.items()
            },
            "by_block_size": _each(self.overall),
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "phases_ms": self.phases_ms,
            "peak_memory_bytes": self.peak_memory_bytes,
            "versions": self.versions,
        }

    def __str__(self) -> str:
        lines = [
            f"{'':10}{'block':>6}{'prompts':>9}{'tau':>7}{'plain tok/s':>13}{'tok/s':>9}   speed-up [95 %]"
        ]
        for name, by_mode in (*self.categories.items(), ("all", self.overall)):
            lines += [_row(name, mode, by_mode[mode]) for mode in self.modes]
        lines += ["", TAU]
        for mode in self.modes:
            counts, copied = self.overall[mode].histogram, self.overall[mode].copied
            shares = "  ".join(f"{n}: {counts[n] / sum(counts.values()):.0%}" for n in counts)
            lines.append(
                f"cycles by tokens, block {mode}: {shares or 'none had a draft'}"
                + (f"; copied from the context: {copied:.0%}" if copied else "")
            )
        lines.append("milliseconds: " + ", ".join(f"{k} {v:.2f}" for k, v in self.phases_ms.items()))
        lines.append(
            f"prefill {self.prefill_tokens_per_second:.0f} tokens/s, "
            f"peak memory {self.peak_memory_bytes / 1e9:.2f} GB, {self.exactness}"
        )
        lines += [f"tokens differ: {difference}" for difference in self.differences]
        if not self.differences:
            lines.append(f"token ids are the same in every run ({len(self.hashes)} prompts)")
        lines.append(", ".join(f"{name} {version}" for name, version in self.versions.items()))
        return "\n".join(lines)


def report(
    measured: Sequence[Measured],
    modes: tuple[str, ...],
    *,
    exactness: str,
    draft_seconds: float,
    peak_memory: int,
    versions: dict[str, str],
) -> Report:
    """Sum everything up.

    Raises:
        DFlashError: tokens differ where they must not, or speculation never ran.
    """
    for mode in modes:
        if mode != "1" and not any(cycle.drafted for cycle in cycles(measured, mode)):
            raise DFlashError(
                f"speculation did not run: not one cycle of block {mode} had a draft, so this compares plain "
                "decoding with itself; name a size with --block-size, or look at benchmark calibrate"
            )
    differences = tuple(m.difference or "tokens differ" for m in measured if not m.equal)
    if differences and exactness == EXACT:
        raise DFlashError(
            f"speculation changed the tokens of {len(differences)} of {len(measured)} prompts, although this "
            f"machine is exact: {differences[0]}"
        )
    names = dict.fromkeys(m.category for m in measured)
    return Report(
        modes=modes,
        overall={mode: Figures.of(measured, mode) for mode in modes},
        categories={
            name: {mode: Figures.of([m for m in measured if m.category == name], mode) for mode in modes}
            for name in names
        },
        hashes=tuple(token_hash(m.replies[PLAIN][0].tokens) for m in measured),
        differences=differences,
        exactness=exactness,
        prefill_tokens_per_second=statistics.median(r.prefill_tokens_per_second for r in _replies(measured)),
        phases_ms=_phases(measured, modes, draft_seconds),
        peak_memory_bytes=peak_memory,
        versions=versions,
    )


def token_hash(tokens: Sequence[int]) -> str:
    """Of the ids of a reply."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:16]


def cycles(measured: Sequence[Measured], mode: str) -> list[Block]:
    """All cycles of one mode."""
    return [c for m in measured for reply in m.replies[mode] for c in reply.cycles]


def _phases(measured: Sequence[Measured], modes: Sequence[str], draft_seconds: float) -> dict[str, float]:
    """Medians, of the drafter's cycles in the first mode that has such.

    Drafting overlaps with Python's work, so the draft pass is timed alone.
    """
    plain = {"plain step": 1e3 * statistics.median(c.seconds for c in cycles(measured, PLAIN))}
    by_mode = ([c for c in cycles(measured, mode) if c.drafted and not c.copied] for mode in modes)
    drafted = next(filter(None, by_mode), None)
    if drafted is None:
        return plain
    return {
        **plain,
        "cycle": 1e3 * statistics.median(c.seconds for c in drafted),
        "of it waiting for the device": 1e3 * statistics.median(c.wait_seconds for c in drafted),
        "of it in Python": 1e3 * statistics.median(c.seconds - c.wait_seconds for c in drafted),
        "draft pass alone": 1e3 * draft_seconds,
    }


def _speed(measured: Sequence[Measured], mode: str) -> float:
    replies = [reply for m in measured for reply in m.replies[mode]]
    return sum(len(r.tokens) - 1 for r in replies) / sum(r.decode_seconds for r in replies)


def _replies(measured: Sequence[Measured]) -> list[Result]:
    return [reply for m in measured for replies in m.replies.values() for reply in replies]


def _each(by_mode: dict[str, Figures]) -> dict[str, Any]:
    return {mode: figures.to_json() for mode, figures in by_mode.items()}


def _row(name: str, mode: str, f: Figures) -> str:
    tau = "-" if f.tau is None else f"{f.tau:.2f}"
    speeds = f"{f.plain_tokens_per_second:13.1f}{f.tokens_per_second:9.1f}"
    return f"{name:10}{mode:>6}{f.prompts:9}{tau:>7}{speeds}   {f.speedup}"
