"""What a target can do with a drafter, found by doing it: tests assert it and docs/models.md states it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import mlx.core as mx
import numpy as np
from drafter.build import network, random_weights
from mlx import nn
from tiny import VOCAB, WINDOW, Scripted, scripts

from dflash_mlx.config import DrafterConfig
from dflash_mlx.cycles import Proposer
from dflash_mlx.decode import decode
from dflash_mlx.drafter import Drafter, DrafterModel
from dflash_mlx.errors import UnsupportedTargetError
from dflash_mlx.events import Block
from dflash_mlx.params import SamplingParams
from dflash_mlx.sampling import Sampler
from dflash_mlx.schedule import Fixed
from dflash_mlx.target import Target
from dflash_mlx.target.caches import arrays
from dflash_mlx.train.fit import FitRecipe, fit_drafter
from dflash_mlx.train.losses import Goal
from dflash_mlx.train.shards import Sample, narrow

EXACT = "exact"
ROW_WISE = "exact, its {} row by row"
REMEDY = "; decode it without"


def prove_target(model: nn.Module, *, block: int = 8, keeps: Sequence[int] = (1, 8, 3)) -> str:
    """What `docs/models.md` says of a model: exact, or why a drafter is refused.

    Raises:
        AssertionError: a drafter is accepted, but the target is not exact.
    """
    target = Target(model, context_length=4096)
    try:
        target.attach((0, max(0, len(target.layers) - 2)))
    except UnsupportedTargetError as refused:
        logits, _ = target.forward(mx.array(tokens(3)), target.make_cache())
        assert mx.isfinite(logits).all(), "it does not even decode plainly"
        return f"refused: {str(refused).partition(REMEDY)[0]}"
    assert_exact(target, WINDOW - 2, keeps, block)
    names = sorted({type(rows.module).__bases__[1].__name__ for rows in target._row_wise})
    return ROW_WISE.format(" and ".join(f"`{name}`" for name in names)) if names else EXACT


def assert_exact(target: Target, context: int, keeps: Sequence[int], block: int = 8) -> None:
    """A block's logits, taps and caches have the bits of one token at a time, whatever part of it is kept."""
    block_caches, cold_caches = target.make_cache(), target.make_cache()
    for caches in (block_caches, cold_caches):
        target.forward(mx.array(tokens(context)), caches)
    for cycle, keep in enumerate(keeps):
        drafted = tokens(block, seed=cycle + 1)
        logits, taps = target.verify(mx.array(drafted), block_caches)
        target.commit(keep, block)
        assert taps is not None
        for row, token in enumerate(drafted[:keep]):
            cold_logits, cold_taps = target.forward(mx.array([token]), cold_caches)
            assert mx.isfinite(cold_logits).all()
            assert cold_taps is not None
            assert mx.array_equal(logits[row], cold_logits[0]), f"logits of row {row}, cycle {cycle}"
            assert mx.array_equal(taps[:, row], cold_taps[:, 0]), f"taps of row {row}, cycle {cycle}"
        held, expected = arrays(block_caches), arrays(cold_caches)
        assert len(held) == len(expected) > 0
        for index, (ours, theirs) in enumerate(zip(held, expected, strict=True)):
            assert ours.shape == theirs.shape
            assert mx.array_equal(ours, theirs), f"cache array {index} after keeping {keep}"


def tokens(n: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCAB) for _ in range(n)]


# --- pairs -------------------------------------------------------------------------------------


def shrunk(raw: dict[str, Any], layers: int = 4) -> dict[str, Any]:
    """A published drafter config with every key where it was, and sizes that fit a tiny target."""
    small = deepcopy(raw)
    dflash = small["dflash_config"]
    small |= {"hidden_size": 64, "intermediate_size": 96, "vocab_size": VOCAB, "num_target_layers": layers}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    if "sliding_window" in small:
        small["sliding_window"] = WINDOW
    taps = len(dflash["target_layer_ids"])
    dflash["target_layer_ids"] = [i * (layers - 1) // (taps - 1) for i in range(taps)]
    dflash["mask_token_id"] = VOCAB - 1
    if "selector_rank" in dflash:
        dflash |= {"selector_rank": 8}
    return small


def prove_pair(model: nn.Module, raw: dict[str, Any], *, length: int = 16) -> None:
    """Decode plainly, then with drafters that are right, wrong and in between, of this config.

    One is scripted, one a network fitted for a moment to the first prompt's reply and asked for two.

    Raises:
        AssertionError: some reply is not the plain one, or a drafter's tokens were all accepted or all
            rejected.
    """
    target = Target(model, context_length=4096)
    config = DrafterConfig.from_dict(raw)
    target.check_fit(config)
    target.attach(config.target_layer_ids)
    prompts = [tokens(5, seed=3), tokens(WINDOW + 3, seed=4)]
    replies = [decoded(target, prompt, None, 1, length)[0] for prompt in prompts]
    network = fitted(target, config, prompts[0], replies[0])
    script = scripts()["random"]
    for make in (lambda prompt, reply: Scripted(len(prompt), reply, script), lambda *_: Drafter(network)):
        accepted = rejected = 0
        for prompt, reply in zip(prompts, replies, strict=True):
            drafter = make(prompt, reply)
            text, blocks = decoded(target, prompt, drafter, config.block_size, length)
            assert text == reply, f"{type(drafter).__name__}: {text} instead of {reply}"
            accepted += sum(block.accepted for block in blocks)
            rejected += sum(block.drafted - block.accepted for block in blocks)
        assert accepted > 0 < rejected, f"{type(drafter).__name__}: {accepted} accepted, {rejected} rejected"


def decoded(
    target: Target, prompt: list[int], drafter: Proposer | None, block_size: int, length: int
) -> tuple[list[int], list[Block]]:
    """A greedy reply of `length` tokens, and its cycles."""
    events = list(
        decode(
            target,
            target.make_cache(),
            prompt,
            Sampler(SamplingParams(), prompt, target.vocab_size),
            drafter=drafter,
            policy=Fixed(block_size),
            max_tokens=length,
        )
    )
    blocks = [event for event in events if isinstance(event, Block)]
    return [token for event in events for token in event.tokens], blocks


def fitted(target: Target, config: DrafterConfig, prompt: list[int], reply: list[int]) -> DrafterModel:
    """A drafter that half remembers one reply."""
    text = [*prompt, *reply]
    _, taps = target.forward(mx.array(text[:-1]), target.make_cache())
    assert taps is not None
    model = network(config, random_weights(config))
    unused = np.zeros((len(text) - 1, target.hidden_size), dtype=np.uint16)  # with a goal of tokens alone
    sample = Sample(np.array(text), narrow(taps[0]), unused, len(prompt))
    goal = Goal(soft=0.0, states=0.0, prefix=0.0, edge_dropout=0.0)
    recipe = FitRecipe(steps=STEPS, rows=1, anchors=8, peak_rate=1e-2, warmup=2, goal=goal)
    fit_drafter(model, target, [sample], recipe)
    return model


STEPS = 7
"""Enough for a network to be right now and then, too few to be right always."""
