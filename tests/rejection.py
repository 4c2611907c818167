"""The textbook way to sample speculatively: accept a draft with probability min(1, p / q), else redraw.

A reference to compare acceptance with. Its text depends on the block size; ours does not.
"""

import mlx.core as mx
import numpy as np

from dflash_mlx import SamplingParams, Session
from dflash_mlx.drafter import Drafter
from dflash_mlx.sampling import Sampler


def rejection_cycles(
    session: Session, prompt: list[int], params: SamplingParams, max_tokens: int
) -> list[int]:
    """Tokens committed by each verify cycle of one reply, the target's own included."""
    assert session.drafter is not None
    assert params.seed is not None
    target, drafter, caches = session.target, Drafter(session.drafter), session.target.make_cache()
    dice = np.random.default_rng(params.seed)
    sampler = Sampler(params, prompt, target.vocab_size)
    rows = session.drafter.config.block_size

    def distribution(logits: mx.array) -> np.ndarray:
        """What the target draws from: filtered, tempered, `[L, V]`."""
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        kept = mx.where(logprobs < sampler._threshold(logprobs), -mx.inf, logprobs)
        return np.array(mx.softmax(kept / params.temperature, axis=-1), dtype=np.float64)

    def draw(mass: np.ndarray) -> int:
        return int(dice.choice(len(mass), p=mass / mass.sum()))

    if len(prompt) > 1:
        _, taps = target.forward(mx.array(prompt[:-1]), caches)
        assert taps is not None
        drafter.extend(taps)
    logits, taps = target.forward(mx.array(prompt[-1:]), caches)
    assert taps is not None
    drafter.extend(taps)
    anchor, count, cycles = draw(distribution(logits[-1:])[0]), 1, []
    while count < max_tokens:
        drafts, q = propose(session, drafter, anchor, rows, params.temperature, dice)
        logits, taps = target.verify(mx.array([anchor, *drafts]), caches)
        assert taps is not None
        p = distribution(logits)
        kept = 0
        while kept < len(drafts) and dice.random() * q[kept, drafts[kept]] < p[kept, drafts[kept]]:
            kept += 1
        residual = p[kept] if kept == len(drafts) else np.maximum(p[kept] - q[kept], 0)
        target.commit(kept + 1, rows)
        drafter.extend(taps[:, : kept + 1])
        anchor, count = draw(residual), count + kept + 1
        cycles.append(kept + 1)
    return cycles


def propose(
    session: Session, drafter: Drafter, anchor: int, rows: int, temperature: float, dice: np.random.Generator
) -> tuple[list[int], np.ndarray]:
    """Draft ids, and the distribution that each was drawn from, `[L, V]`."""
    model, target = drafter.model, session.target
    block = mx.array([[anchor] + [model.config.mask_token_id] * (rows - 1)])
    hidden = model.hidden_states(target.embed(block), drafter.context)[:, 1:]
    logits = model.logits(hidden, target.head)[0]
    selector = model.candidate_selector
    candidates = mx.argpartition(logits, -selector.top_k, axis=-1)[:, -selector.top_k :]
    unary = np.array(mx.take_along_axis(logits, candidates, axis=-1))
    q = np.zeros(logits.shape)
    drafts: list[int] = []
    for slot in range(rows - 1):
        previous = mx.array([[drafts[-1] if drafts else anchor]])
        edges = np.array(selector.edges(hidden[0, slot : slot + 1], previous, candidates[slot : slot + 1]))[
            0, 0
        ]
        scores = (unary[slot] + edges) / temperature
        mass = np.exp(scores.astype(np.float64) - scores.max())
        q[slot, np.array(candidates[slot])] = mass / mass.sum()
        drafts.append(int(dice.choice(q.shape[1], p=q[slot])))
    return drafts, q
