"""Counters of everything that was decoded, and their Prometheus text."""

from collections.abc import Mapping
from dataclasses import dataclass

from dflash_mlx.events import Block, Event, Prefilled


@dataclass
class Counts:
    """Since the start; written by the engine's thread alone.

    Attributes:
        drafted_cycles, drafted_tokens: of the reply that is running or was the last.
    """

    requests: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_cycles: int = 0
    drafted_tokens: int = 0

    def count(self, event: Event) -> None:
        """Take in one event."""
        self.generated_tokens += len(event.tokens)
        match event:
            case Prefilled():
                self.prompt_tokens += event.prompt_tokens
                self.cached_tokens += event.cached_tokens
                self.drafted_cycles = self.drafted_tokens = 0
            case Block():
                self.cycles += 1
                self.drafted += event.drafted
                self.accepted += event.accepted
                if event.drafted:
                    self.drafted_cycles += 1
                    self.drafted_tokens += event.committed


def prometheus(counts: Counts, gauges: Mapping[str, float]) -> str:
    """All of it in Prometheus' text format."""
    totals = {
        "requests": counts.requests,
        "failed_requests": counts.failures,
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "generated_tokens": counts.generated_tokens,
        "cycles": counts.cycles,
        "drafted_tokens": counts.drafted,
        "accepted_tokens": counts.accepted,
    }
    if counts.drafted_cycles:
        gauges = {"acceptance_length": counts.drafted_tokens / counts.drafted_cycles, **gauges}
    lines = []
    for kind, values in (("counter", {f"{n}_total": v for n, v in totals.items()}), ("gauge", gauges)):
        for name, value in values.items():
            lines += [f"# TYPE dflash_{name} {kind}", f"dflash_{name} {value}"]
    return "\n".join(lines) + "\n"
