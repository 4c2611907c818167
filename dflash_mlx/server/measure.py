"""`Facts` and `Memory` as they are, measured on the engine's thread."""

import os
import time
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_mlx import __version__, memo
from dflash_mlx.chat_template import knows_tools
from dflash_mlx.events import Block
from dflash_mlx.params import SamplingParams
from dflash_mlx.server.facts import Facts, Memory
from dflash_mlx.server.syntax import HARMONY, Syntax
from dflash_mlx.session import Session

PLAIN_TOKENS = 32
PLAIN_SECONDS = 1.0
"""A plain decode is measured over this many tokens, or for this long."""


def facts(session: Session, model: str) -> Facts:
    """About this session; takes some seconds the first time on a machine."""
    if session.drafter is not None and session.block_size is None:
        _ = session.costs  # now, so that no request waits for it
    return Facts(
        block_size=session.block_size or session.largest_block,
        speculative=session.drafter is not None,
        exactness=session.exactness,
        fallbacks=session.fallbacks,
        context_window=session.context_window,
        notes=session.notes,
        reasoning_levels=session.reasoning_levels,
        syntax=syntax_of(session.tokenizer),
        defaults=session.defaults,
        plain_tokens_per_second=_plain_speed(session, model),
    )


def syntax_of(tokenizer: Any) -> Syntax | None:
    """How the model of this tokenizer, in mlx-lm's wrapper, writes calls; None: it does not, or not known."""
    if not knows_tools(tokenizer):
        return None
    if tokenizer.has_tool_calling:
        return Syntax((tokenizer.tool_call_start,), tokenizer.tool_call_end, tokenizer.tool_parser)
    vocabulary = tokenizer.get_vocab()
    harmony = "<|channel|>" in vocabulary and vocabulary.get("<|call|>") in tokenizer.eos_token_ids
    return HARMONY if harmony else None


def memory() -> Memory:
    """As it is now."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Memory(mx.get_active_memory(), mx.get_peak_memory(), total)


def _plain_speed(session: Session, model: str) -> float | None:
    """Tokens per second without speculation, remembered for this model on this machine."""
    parameters: Any = tree_flatten(session.target.model.parameters())
    key: memo.Key = {
        "model": model,
        "weight bytes": sum(array.nbytes for _, array in parameters),
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "mlx": version("mlx"),
        "dflash": __version__,
    }
    speed: float | None = memo.recall("plain-speed", key)
    if speed is None and (speed := _measure_plain_speed(session)) is not None:
        memo.remember("plain-speed", key, speed)
    return speed


def _measure_plain_speed(session: Session) -> float | None:
    start, seconds = time.perf_counter(), []
    prompt = session.encode("def main(argv):\n")
    for event in session.stream(prompt, SamplingParams(max_tokens=PLAIN_TOKENS), speculative=False):
        if isinstance(event, Block):
            seconds.append(event.seconds)
        if time.perf_counter() - start > PLAIN_SECONDS:
            session.cancel()
    # The first passes still allocate.
    timed = seconds[len(seconds) // 4 :]
    return len(timed) / sum(timed) if timed else None
