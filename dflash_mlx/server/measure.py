"""`Facts` and `Memory` as they are, measured on the engine's thread."""

import os
from typing import Any

import mlx.core as mx

from dflash_mlx.chat_template import knows_tools
from dflash_mlx.server.facts import Facts, Memory
from dflash_mlx.server.syntax import HARMONY, Syntax
from dflash_mlx.session import Session


def facts(session: Session) -> Facts:
    """About this session; takes some seconds the first time on a machine."""
    costs = None if session.drafter is None else session.costs  # now, so that no request waits for it
    return Facts(
        block_size=session.block_size or session.largest_block,
        speculative=session.drafter is not None,
        exactness=session.exactness,
        fallbacks=session.fallbacks_at(session.block_size),
        context_window=session.context_window,
        notes=session.notes,
        reasoning_levels=session.reasoning_levels,
        syntax=syntax_of(session.tokenizer),
        defaults=session.defaults,
        plain_tokens_per_second=None if costs is None else 1 / costs.seconds(1, 0),
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
