"""How a reply is to be sampled: validated settings, known to everything from the kernels to the chat."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dflash_mlx.errors import UsageError

COLDEST = 1e-6
"""The least temperature that is not greedy: a lower one leaves no choice, and may leave float32's range."""

TokenMask = Callable[[Sequence[int]], Any]
"""(ids of the reply so far) -> a boolean numpy array [V]: which ids may come next."""


@dataclass(frozen=True)
class SamplingParams:
    """How a reply is decoded; the same settings and seed give the same tokens, speculating or not.

    Attributes:
        max_tokens: tokens of the reply at most; None: what the target's context leaves.
        temperature: 0 is greedy, and so is all below `COLDEST`; else logits are divided by it after the
            filters.
        top_p: keep the most probable tokens that together reach this mass.
        top_k: keep this many tokens; 0 keeps all.
        min_p: keep tokens at least this probable relative to the most probable one.
        seed: in [0, 2**32); None draws one, which the reply reports.
        repetition_penalty: divides positive and multiplies negative logits of the last 20 tokens of
            prompt and reply, as in mlx-lm; 1 is off.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens of the reply, once and
            per occurrence.
        logit_bias: added to the logits of single ids.
        stop: strings at which the answer ends; they are not part of it.
        top_logprobs: report log probabilities of every token and of this many most probable ones;
            None reports none.
        token_mask: which tokens may follow a reply, for grammars.

    Raises:
        UsageError: naming the parameter, its value and its range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    top_logprobs: int | None = None
    token_mask: TokenMask | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias is {self.logit_bias!r}: it must map token ids to numbers")
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        rules: dict[str, tuple[bool, str]] = {
            "max_tokens": (
                self.max_tokens is None or _integer(self.max_tokens, 1),
                "a positive integer, or None",
            ),
            "temperature": (_number(self.temperature, 0), "a number from 0 on"),
            "top_p": (_number(self.top_p, 0, 1) and self.top_p > 0, "above 0 and at most 1"),
            "top_k": (_integer(self.top_k, 0), "an integer from 0 on"),
            "min_p": (_number(self.min_p, 0, 1) and self.min_p < 1, "in [0, 1)"),
            "seed": (self.seed is None or _integer(self.seed, 0, 2**32 - 1), "in [0, 2**32), or None"),
            "repetition_penalty": (
                _number(self.repetition_penalty, 0) and self.repetition_penalty > 0,
                "a positive number",
            ),
            "presence_penalty": (_number(self.presence_penalty, -2, 2), "in [-2, 2]"),
            "frequency_penalty": (_number(self.frequency_penalty, -2, 2), "in [-2, 2]"),
            "logit_bias": (
                all(_integer(k, 0) and _number(v, -100, 100) for k, v in self.logit_bias.items()),
                "numbers in [-100, 100] by token id",
            ),
            "stop": (all(isinstance(s, str) and s for s in stop), "strings that are not empty"),
            "top_logprobs": (
                self.top_logprobs is None or _integer(self.top_logprobs, 0, 20),
                "an integer in [0, 20], or None",
            ),
        }
        for name, (valid, expected) in rules.items():
            if not valid:
                value = getattr(self, name)
                shown = dict(value) if isinstance(value, Mapping) else value
                raise UsageError(f"{name} is {shown!r}: it must be {expected}")
        if self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)


def _integer(value: Any, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _number(value: Any, low: float, high: float = math.inf) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and low <= value <= min(high, sys.float_info.max)  # a Python integer may be beyond it
