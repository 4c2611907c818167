"""Coupled sampling accepts at least as much as rejection sampling, on the embedded pair."""

import numpy as np
import pytest
from rejection import rejection_cycles

from dflash_mlx import SamplingParams, Session

TOKENS = 48


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tau_is_not_below_that_of_rejection_sampling(
    pair: Session, held_out: list[str], temperature: float
) -> None:
    ours: list[int] = []
    theirs: list[int] = []
    for seed, prompt in enumerate(held_out[:10]):
        params = SamplingParams(max_tokens=TOKENS, temperature=temperature, top_p=0.95, seed=seed)
        cycles = pair.generate(prompt, params, block_size=5).cycles
        ours += [c.accepted + 1 for c in cycles if c.drafted == 4]
        theirs += rejection_cycles(pair, pair.encode(prompt), params, TOKENS)
    print(f"T {temperature}: tau {np.mean(ours):.2f}, rejection sampling {np.mean(theirs):.2f}")
    # Three hundred cycles leave an error of about 0.07 in each mean.
    assert np.mean(ours) > np.mean(theirs) - 0.15


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_text_is_the_same_at_every_block_size(
    pair: Session, held_out: list[str], temperature: float
) -> None:
    accepted = rejected = 0
    for seed, prompt in enumerate(held_out[:2]):
        params = SamplingParams(
            max_tokens=24, temperature=temperature, top_p=0.95, top_k=40, repetition_penalty=1.1, seed=seed
        )
        plain = pair.generate(prompt, params, speculative=False)
        for block_size in (2, 3, 5):
            result = pair.generate(prompt, params, block_size=block_size)
            assert (result.tokens, result.text, result.seed) == (plain.tokens, plain.text, seed)
            accepted += sum(c.accepted for c in result.cycles)
            rejected += sum(c.drafted - c.accepted for c in result.cycles)
    assert accepted > 20
    assert rejected > 20
