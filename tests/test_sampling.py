"""The same settings and seed give the same tokens, speculating or not, from the target's distribution."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    make_logits_processors,
)
from tiny import FAMILIES, VOCAB, Scripted, scripts, tiny_target

from dflash_mlx.decode import decode, until
from dflash_mlx.errors import UsageError
from dflash_mlx.events import Block, Event, Finished, TokenLogprob
from dflash_mlx.params import SamplingParams
from dflash_mlx.sampling import Sampler
from dflash_mlx.schedule import Fixed, Plan
from dflash_mlx.target import Target

LENGTH = 9
PROMPT = [3, 14, 15, 92, 65, 35, 89]


def even_after_odd(reply: Sequence[int]) -> np.ndarray:
    """A grammar of a kind: an even id follows an odd one, and below 100 follows anything else."""
    ids = np.arange(VOCAB)
    return ids % 2 == 0 if reply and reply[-1] % 2 else ids < 100


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy with penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "greedy with mask and bias": {"token_mask": even_after_odd, "logit_bias": {7: 4.0, 8: -100.0}},
    "0.7": {"temperature": 0.7},
    "1.5 top-k": {"temperature": 1.5, "top_k": 12},
    "1.5 top-p min-p": {"temperature": 1.5, "top_p": 0.9, "min_p": 0.02},
    "0.7 all filters": {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.01},
    "0.7 penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "1.5 mask bias penalty": {
        "temperature": 1.5,
        "token_mask": even_after_odd,
        "logit_bias": {7: 2.0},
        "presence_penalty": 1.0,
    },
}


def reply_of(target: Target, params: SamplingParams, **options: Any) -> list[Event]:
    sampler = Sampler(params, PROMPT, target.vocab_size)
    options = {"max_tokens": LENGTH} | options
    return list(decode(target, target.make_cache(), PROMPT, sampler, **options))


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def logprobs_of(events: list[Event]) -> list[TokenLogprob]:
    return [entry for event in events for entry in event.logprobs]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_changes_neither_tokens_nor_logprobs(family: str, settings: dict[str, Any]) -> None:
    target = tiny_target(family)
    accepted = rejected = 0
    replies = set()
    for seed in range(20):
        params = SamplingParams(seed=seed, top_logprobs=3, **settings)
        plain = reply_of(target, params)
        reply = tokens_of(plain)
        drafter = Scripted(len(PROMPT), reply, scripts(seed)["random"])
        speculative = reply_of(target, params, drafter=drafter, policy=Fixed(2 + seed % 7))
        assert tokens_of(speculative) == reply
        assert logprobs_of(speculative) == logprobs_of(plain)
        assert len(logprobs_of(plain)) == LENGTH
        blocks = [event for event in speculative if isinstance(event, Block)]
        accepted += sum(block.accepted for block in blocks)
        rejected += sum(block.drafted - block.accepted for block in blocks)
        replies.add(tuple(reply))
    assert accepted > 20
    assert rejected > 20
    assert (len(replies) == 1) == ("temperature" not in settings)


class Copying:
    """A policy that copies whatever can be copied."""

    copies = True

    def plan(self, limit: int, keys: int, match: int = 0) -> Plan:
        return Plan(5, match) if match else Plan(1)

    def observe(self, plan: Plan, accepted: int, seconds: float, keys: int) -> None:
        pass


FEW = {5: 50.0, 6: 50.0, 7: 50.0}
"""Makes a reply of these ids alone, which soon repeats itself."""


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.5, "logit_bias": FEW},
        {"temperature": 0.7, "logit_bias": FEW, "top_k": 2, "frequency_penalty": 0.5},
        {"temperature": 1.5, "logit_bias": FEW | {8: 50.0}, "token_mask": even_after_odd},
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_looking_up_changes_neither_tokens_nor_logprobs(family: str, settings: dict[str, Any]) -> None:
    target = tiny_target(family)
    copied = []
    for seed in range(8):
        params = SamplingParams(seed=seed, top_logprobs=3, **settings)
        plain = reply_of(target, params, max_tokens=30)
        drafter = Scripted(len(PROMPT), tokens_of(plain), scripts(seed)["random"])
        speculative = reply_of(target, params, drafter=drafter, policy=Copying(), max_tokens=30)
        assert tokens_of(speculative) == tokens_of(plain)
        assert logprobs_of(speculative) == logprobs_of(plain)
        copied += [event for event in speculative if isinstance(event, Block) and event.copied]
    assert any(block.accepted for block in copied)
    assert any(block.rejected for block in copied)


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    target = tiny_target("qwen3")
    params = SamplingParams(temperature=1.5, seed=5, top_logprobs=4, logit_bias={9: 50.0})
    entries = logprobs_of(reply_of(target, params))
    assert [entry.token for entry in entries] == [9] * LENGTH
    logits, _ = target.forward(mx.array(PROMPT), target.make_cache())
    logits = logits[-1:]
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]
    best = np.argsort(-expected)[:4]
    assert entries[0].logprob == pytest.approx(expected[9], abs=1e-5)
    assert [token for token, _ in entries[0].top] == best.tolist()
    assert [value for _, value in entries[0].top] == pytest.approx(expected[best].tolist(), abs=1e-5)


# --- one row, against mlx-lm ----------------------------------------------------------------------


def logits_of(seed: int, rows: int = 1) -> mx.array:
    return mx.random.normal((rows, VOCAB), key=mx.random.key(seed)) * 3


@pytest.mark.parametrize(
    ("settings", "stock"),
    [
        ({"top_p": 0.8}, lambda lp: apply_top_p(lp, 0.8)),
        ({"min_p": 0.05}, lambda lp: apply_min_p(lp, 0.05)),
        ({"top_k": 10}, lambda lp: apply_top_k(lp, 10)),
        (
            {"top_p": 0.9, "min_p": 0.03, "top_k": 15},
            lambda lp: apply_top_k(apply_min_p(apply_top_p(lp, 0.9), 0.03), 15),
        ),
        ({"top_p": 0.5, "top_k": 100}, lambda lp: apply_top_k(apply_top_p(lp, 0.5), 100)),
    ],
)
def test_the_filters_keep_what_mlx_lm_keeps(settings: dict[str, Any], stock: Any) -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=0, **settings), PROMPT, VOCAB)
    for seed in range(20):
        logits = logits_of(seed)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        kept = np.array(logprobs >= sampler._threshold(logprobs))
        assert np.array_equal(kept, np.array(stock(logprobs) > -mx.inf))
        assert 1 <= kept.sum() < VOCAB


def test_bias_and_repetition_penalty_are_mlx_lms() -> None:
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(30)]
    params = SamplingParams(repetition_penalty=1.7, logit_bias={5: 3.0, 6: -7.0})
    sampler = Sampler(params, prompt, VOCAB)
    processors = make_logits_processors({5: 3.0, 6: -7.0}, 1.7, 20)
    history = list(prompt)
    for seed in range(30):
        logits = logits_of(seed)
        expected = logits
        for processor in processors:
            expected = processor(mx.array(history), expected)
        total = mx.logsumexp(logits, axis=-1, keepdims=True)
        ours = sampler._processed(logits, total, None, None)
        stock = expected - mx.logsumexp(expected, axis=-1, keepdims=True)
        assert mx.allclose(ours, stock, atol=1e-5)
        token: Any = mx.argmax(ours).item()
        sampler.commit([token])
        history.append(token)


def test_presence_and_frequency_count_the_reply_and_not_the_prompt() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [1, 1, 2], VOCAB)
    sampler.commit([4, 4, 5])
    logits = mx.zeros((3, VOCAB))
    changed = np.array(sampler._penalized(logits, mx.array([4, 6])))
    expected = np.zeros((3, VOCAB))
    expected[:, 4] -= 0.5 + 0.25 * 2
    expected[:, 5] -= 0.5 + 0.25
    expected[1:, 4] -= 0.25  # the first draft precedes rows 1 and 2
    expected[2:, 6] -= 0.5 + 0.25  # the second precedes row 2
    assert np.allclose(changed, expected)


def test_a_padded_vocabulary_is_never_chosen() -> None:
    logits = mx.zeros((1, VOCAB))
    logits[:, 120:] = 9.0
    for temperature in (0.0, 1.0):
        for seed in range(20):
            sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), [1], VOCAB, known=120)
            choice = sampler.choose(logits, None, sampler.noise(1))
            assert (choice.tokens < 120).all()
            assert choice.finite.item()


def test_ids_outside_the_vocabulary_cannot_be_biased() -> None:
    with pytest.raises(UsageError, match="logit_bias names id 128"):
        Sampler(SamplingParams(logit_bias={128: 1.0}), [1], VOCAB)


def test_a_mask_that_allows_nothing_is_an_error_that_says_where() -> None:
    params = SamplingParams(token_mask=lambda reply: np.full(VOCAB, len(reply) < 3))
    with pytest.raises(UsageError, match="no token at position 3"):
        reply_of(tiny_target("qwen3"), params)


@pytest.mark.parametrize("after", ["nothing", "an error"])
@pytest.mark.parametrize("script", ["right", "wrong", "dead end"])
def test_a_mask_is_asked_after_drafts_but_not_blamed_for_them(after: str, script: str) -> None:
    """A grammar that has no more to say once it is over, and after drafts that lead nowhere."""
    end, dead = 7, 50

    def grammar(reply: Sequence[int]) -> np.ndarray:
        ids = np.arange(VOCAB)
        if end in reply or dead in reply:
            if after == "an error":
                raise IndexError("the grammar is over")
            return ids < 0
        return ids == end if len(reply) == 3 else (ids > 20) & (ids < 60)

    params = SamplingParams(token_mask=grammar, logit_bias={dead: -100.0})
    target = tiny_target("qwen3")
    plain = tokens_of(reply_of(target, params, take=until(frozenset([end]))))
    assert plain[-1] == end
    assert len(plain) == 4
    scripts: dict[str, Callable[[int, int], int]] = {
        "right": lambda _slot, token: token,
        "wrong": lambda _slot, _token: 0,
        "dead end": lambda slot, token: dead if slot else token,
    }
    drafter = Scripted(len(PROMPT), [*plain, end, end, end, end], scripts[script])
    events = reply_of(target, params, take=until(frozenset([end])), drafter=drafter, policy=Fixed(5))
    assert tokens_of(events) == plain
    assert isinstance(events[-1], Finished)
    assert events[-1].finish_reason == "stop"


# --- noise ----------------------------------------------------------------------------------------


def test_noise_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    sampler = Sampler(params, PROMPT, VOCAB)
    block = sampler.noise(4)
    assert block is not None
    for row in range(4):
        single = sampler.noise(1)
        assert single is not None
        assert mx.array_equal(single[0], block[row])
        sampler.commit([row])
    other = Sampler(SamplingParams(temperature=1.0, seed=12), PROMPT, VOCAB).noise(1)
    assert other is not None
    assert not mx.array_equal(other[0], block[0])
    assert not mx.array_equal(block[0], block[1])


def test_a_drawn_seed_is_reported_and_gives_the_reply_again() -> None:
    target = tiny_target("qwen3")
    first = reply_of(target, SamplingParams(temperature=1.0))
    seed = first[0].seed  # type: ignore[attr-defined]
    assert tokens_of(reply_of(target, SamplingParams(temperature=1.0, seed=seed))) == tokens_of(first)
    seeds = {reply_of(target, SamplingParams(temperature=1.0))[0].seed for _ in range(5)}  # type: ignore[attr-defined]
    assert len(seeds) == 5


SMALL = 8
DRAWS = 6000


@pytest.mark.parametrize(
    ("settings", "expected_support"),
    [
        ({"temperature": 1.0}, SMALL),
        ({"temperature": 0.6}, SMALL),
        ({"temperature": 1.4, "top_k": 4}, 4),
        ({"temperature": 0.8, "min_p": 0.1}, None),
    ],
)
def test_draws_follow_the_filtered_softmax(settings: dict[str, Any], expected_support: int | None) -> None:
    """Chi-square over many seeds, of single draws and of pairs at neighbouring positions."""
    logits = mx.array([[1.5, 1.0, 0.4, 0.0, -0.3, -0.9, -1.2, -2.0]])
    logprobs = np.array(logits - mx.logsumexp(logits))[0]
    sampler = Sampler(SamplingParams(seed=0, **settings), [0], SMALL)
    threshold = np.array(sampler._threshold(mx.array(logprobs)[None]))[0, 0]
    kept = logprobs >= threshold
    assert expected_support in (None, kept.sum())
    mass = np.where(kept, np.exp(logprobs / settings["temperature"]), 0)
    mass /= mass.sum()

    pairs = np.zeros((SMALL, SMALL))
    both = mx.concatenate([logits, logits])
    for seed in range(DRAWS):
        sampler = Sampler(SamplingParams(seed=seed, **settings), [0], SMALL)
        drawn: Any = sampler.choose(both, mx.array([0]), sampler.noise(2)).tokens.tolist()
        pairs[tuple(drawn)] += 1
    expected = np.outer(mass, mass) * DRAWS
    assert pairs[expected == 0].sum() == 0
    assert chi_square(pairs.sum(axis=1), mass * DRAWS)
    assert chi_square(pairs.sum(axis=0), mass * DRAWS)
    assert chi_square(pairs, expected)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Within four standard deviations of the statistic's mean, over cells that can occur."""
    seen, due = observed[expected > 0], expected[expected > 0]
    statistic, degrees = ((seen - due) ** 2 / due).sum(), len(due) - 1
    return bool(statistic < degrees + 4 * np.sqrt(2 * degrees))
