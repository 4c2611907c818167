"""The last stage: the drafter as it was saved, through the engine, against plain decoding.

tau is counted over real verify cycles, every reply is decoded both ways in turns, and the tokens must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.interval import Interval
from dflash_mlx.params import SamplingParams
from dflash_mlx.session import Session

MAX_TOKENS = 96


@dataclass(frozen=True)
class EndToEnd:
    """Greedy replies to some prompts, decoded plainly and speculatively.

    Attributes:
        prompts: how many.
        tau: tokens committed per verify cycle, bonus included.
        identical: replies whose tokens are the same both ways.
        speedup: of speculative over plain decoding, on the machine that checked; None: no reply had a second
            token, so that there was nothing to time.
    """

    prompts: int
    tau: float
    identical: int
    speedup: Interval | None

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {**vars(self), "speedup": None if self.speedup is None else self.speedup.to_json()}


def end_to_end(session: Session, prompts: Sequence[Sequence[int]], say: Callable[[str], None]) -> EndToEnd:
    """Decode every prompt both ways, in whole blocks and plainly; which goes first takes turns."""
    params = SamplingParams(max_tokens=MAX_TOKENS)
    ratios = []
    cycles = committed = identical = 0
    for number, prompt in enumerate(prompts):
        results = {}
        for speculative in (False, True) if number % 2 else (True, False):
            results[speculative] = session.generate(
                list(prompt), params, block_size=session.largest_block, speculative=speculative
            )
        drafted = [cycle for cycle in results[True].cycles if cycle.drafted]
        cycles += len(drafted)
        committed += sum(cycle.committed for cycle in drafted)
        identical += results[True].tokens == results[False].tokens
        if all(len(result.tokens) > 1 for result in results.values()):
            ratios.append(results[False].decode_seconds / results[True].decode_seconds)
        say(f"check: {number + 1} of {len(prompts)} prompts, tau {committed / max(cycles, 1):.2f}")
    return EndToEnd(
        prompts=len(prompts),
        tau=committed / max(cycles, 1),
        identical=identical,
        speedup=Interval.over(ratios) if ratios else None,
    )
