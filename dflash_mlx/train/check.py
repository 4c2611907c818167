"""The last stage: the drafter as it was saved, through the engine, against plain decoding.

tau is counted over real verify cycles, every reply is decoded both ways in turns, and the tokens must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_mlx.params import SamplingParams
from dflash_mlx.session import Session

MAX_TOKENS = 96
RESAMPLES = 2000


@dataclass(frozen=True)
class EndToEnd:
    """Greedy replies to some prompts, decoded plainly and speculatively.

    Attributes:
        prompts: how many.
        tau: tokens committed per verify cycle, bonus included.
        identical: replies whose tokens are the same both ways.
        ratio: speed of speculative over plain decoding, on the machine that checked.
        interval: of the ratio, 90 % by resampling prompts.
    """

    prompts: int
    tau: float
    identical: int
    ratio: float
    interval: tuple[float, float]


def end_to_end(session: Session, prompts: Sequence[Sequence[int]], say: Callable[[str], None]) -> EndToEnd:
    """Decode every prompt both ways, in whole blocks and plainly; which goes first takes turns."""
    params = SamplingParams(max_tokens=MAX_TOKENS)
    seconds = np.zeros((len(prompts), 2))  # plain, speculative
    cycles = committed = identical = 0
    for number, prompt in enumerate(prompts):
        tokens = {}
        for speculative in (False, True) if number % 2 else (True, False):
            result = session.generate(
                list(prompt), params, block_size=session.largest_block, speculative=speculative
            )
            tokens[speculative] = result.tokens
            seconds[number, int(speculative)] = result.decode_seconds
            cycles += sum(cycle.drafted > 0 for cycle in result.cycles)
            committed += sum(cycle.accepted + 1 for cycle in result.cycles if cycle.drafted)
        identical += tokens[True] == tokens[False]
        say(f"check: {number + 1} of {len(prompts)} prompts, tau {committed / max(cycles, 1):.2f}")
    plain, speculative_seconds = seconds.sum(axis=0)
    return EndToEnd(
        prompts=len(prompts),
        tau=committed / max(cycles, 1),
        identical=identical,
        ratio=float(plain / speculative_seconds),
        interval=_interval(seconds),
    )


def _interval(seconds: np.ndarray) -> tuple[float, float]:
    drawn = np.random.default_rng(0).integers(len(seconds), size=(RESAMPLES, len(seconds)))
    plain, speculative = seconds[drawn].sum(axis=1).T
    low, high = np.quantile(plain / speculative, [0.05, 0.95])
    return float(low), float(high)
