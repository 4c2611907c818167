"""Greedy token ids: mlx-lm's, our plain and our speculative ones are the same, whatever the drafter does."""

import gc
import io
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tiny import FAMILIES, VOCAB, WINDOW, WINDOWED, Scripted, scripts, tiny_target

from dflash_mlx import Session
from dflash_mlx.decode import decode as decode_with
from dflash_mlx.decode import until
from dflash_mlx.drafter import Draft, Drafter
from dflash_mlx.errors import NumericsError
from dflash_mlx.events import Block, Event, Finished, Prefilled
from dflash_mlx.params import SamplingParams
from dflash_mlx.sampling import Sampler
from dflash_mlx.schedule import Fixed, Plan, Policy
from dflash_mlx.target import Target
from dflash_mlx.target.attach import Mixin, attach
from dflash_mlx.target.caches import Cache, arrays
from dflash_mlx.target.eager import Eager

CHUNK = 16
LENGTH = 14
PROMPTS = {"one token": 1, "a few": 5, "more than a chunk": 2 * CHUNK + 3}


def decode(
    target: Target,
    caches: list[Cache],
    prompt: list[int],
    *,
    eos: frozenset[int] = frozenset(),
    block_size: int = 1,
    policy: Policy | None = None,
    **options: Any,
) -> Iterator[Event]:
    """Greedy decoding until an eos token."""
    sampler = Sampler(SamplingParams(), prompt, target.vocab_size)
    policy = policy or Fixed(block_size)
    return decode_with(target, caches, prompt, sampler, take=until(eos), policy=policy, **options)


def prompt_of(n: int) -> list[int]:
    dice = random.Random(n)
    return [dice.randrange(VOCAB) for _ in range(n)]


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def blocks_of(events: list[Event]) -> list[Block]:
    return [event for event in events if isinstance(event, Block)]


def plain(target: Target, prompt: list[int], n: int = LENGTH, **options: object) -> list[int]:
    return tokens_of(
        list(decode(target, target.make_cache(), prompt, max_tokens=n, prefill_step=CHUNK, **options))  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_plain_and_speculative_choose_the_same_tokens(family: str, bits: int | None) -> None:
    target = tiny_target(family, bits=bits)
    replies = []
    for length in PROMPTS.values():
        prompt = prompt_of(length)
        replies.append(mlx_lm_reply(target, prompt))
        assert plain(target, prompt) == replies[-1]
    every = range(1, 9) if bits is None else (3, 8)
    assert_speculation_is_invisible(target, replies, (3, 8), every)


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_are_mlx_lms_up_to_summation_order_and_speculation_is_invisible(family: str) -> None:
    """Beyond the window mlx-lm's ring adds up the same rows in another order."""
    target = tiny_target(family)
    replies = []
    for length in PROMPTS.values():
        prompt = prompt_of(length)
        replies.append(plain(target, prompt))
        within = max(0, WINDOW - length + 1)  # tokens chosen before a row fell out of the window
        assert replies[-1][:within] == mlx_lm_reply(target, prompt)[:within]
        ours, theirs = (
            logits_of(target, caches, prompt, replies[-1])
            for caches in (target.make_cache(), make_prompt_cache(target.model))
        )
        assert mx.array_equal(ours[:within], theirs[:within])
        assert mx.allclose(ours, theirs, rtol=0, atol=1e-4)
    assert_speculation_is_invisible(target, replies, (4,), (2, 5, 8))


def mlx_lm_reply(target: Target, prompt: list[int]) -> list[int]:
    steps = generate_step(mx.array(prompt), target.model, max_tokens=LENGTH, prefill_step_size=CHUNK)
    return [int(token) for token, _ in steps]


def logits_of(target: Target, caches: list[Cache], prompt: list[int], reply: list[int]) -> mx.array:
    """What each of the reply's tokens was chosen from, `[n, V]`."""
    for start in range(0, len(prompt) - 1, CHUNK):
        target.forward(mx.array(prompt[start : min(start + CHUNK, len(prompt) - 1)]), caches)
    rows = [target.forward(mx.array([token]), caches)[0] for token in [prompt[-1], *reply[:-1]]]
    return mx.concatenate(rows)


def assert_speculation_is_invisible(
    target: Target, replies: list[list[int]], sizes: Sequence[int], every: Sequence[int]
) -> None:
    """The plain replies to `PROMPTS`, whatever the drafts; the second prompt in blocks of `every` size."""
    accepted = dict.fromkeys(scripts(), 0)
    rejected = dict.fromkeys(scripts(), 0)
    for (title, length), reply in zip(PROMPTS.items(), replies, strict=True):
        for block_size in every if title == "a few" else sizes:
            for name, script in scripts().items():
                events = list(
                    decode(
                        target,
                        target.make_cache(),
                        prompt_of(length),
                        drafter=Scripted(length, reply, script),
                        block_size=block_size,
                        max_tokens=LENGTH,
                        prefill_step=CHUNK,
                    )
                )
                assert tokens_of(events) == reply, (name, block_size)
                accepted[name] += sum(b.accepted for b in blocks_of(events))
                rejected[name] += sum(b.drafted - b.accepted for b in blocks_of(events))
    assert accepted["right"] > 0 == rejected["right"]
    assert rejected["wrong"] > 0 == accepted["wrong"]
    for name in ("random", "right until slot 2"):
        assert accepted[name] > 0 < rejected[name]


def test_right_drafts_commit_whole_blocks_and_the_last_one_is_shortened_to_max_tokens() -> None:
    target = tiny_target("qwen3_5")
    reply = plain(target, prompt_of(4), 12)
    drafter = Scripted(4, reply, scripts()["right"])
    events = list(
        decode(target, target.make_cache(), prompt_of(4), drafter=drafter, block_size=4, max_tokens=12)
    )
    assert isinstance(events[0], Prefilled)
    assert [(b.drafted, b.accepted, b.committed) for b in blocks_of(events)] == [
        (3, 3, 4),
        (3, 3, 4),
        (2, 2, 3),
    ]
    assert events[-1] == Finished(finish_reason="length")
    assert len(tokens_of(events)) == 12


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("end", range(12))
def test_the_reply_ends_with_the_eos_wherever_in_a_block_it_falls(family: str, end: int) -> None:
    target = tiny_target(family)
    prompt = prompt_of(6)
    reply = plain(target, prompt, 30)
    eos = frozenset({reply[end]})
    expected = reply[: reply.index(reply[end]) + 1]
    caches = target.make_cache()
    drafter = Scripted(6, reply, scripts()["right"])
    events = list(decode(target, caches, prompt, drafter=drafter, block_size=5, max_tokens=30, eos=eos))
    assert tokens_of(events) == expected
    assert events[-1] == Finished(finish_reason="stop")
    for block in blocks_of(events):
        assert block.committed in (block.accepted + 1, block.accepted)
    assert_holds(target, caches, [*prompt, *expected[:-1]])
    assert drafter.rows == len(expected) - 1


def assert_holds(target: Target, caches: list[Cache], committed: list[int]) -> None:
    """The caches are those of a cold run: six prompt tokens, then everything else one at a time."""
    cold = target.make_cache()
    events = decode(target, cold, committed[:6], max_tokens=1)
    list(events)
    for token in committed[6:]:
        target.forward(mx.array([token]), cold)
    held, expected = arrays(caches), arrays(cold)
    assert len(held) == len(expected) > 0
    for a, b in zip(held, expected, strict=True):
        assert a.shape == b.shape
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_next", "gemma4"])
@pytest.mark.parametrize("script", ["right", "wrong", "random", "right until slot 2"])
def test_caches_hold_exactly_what_was_committed_when_the_caller_stops(family: str, script: str) -> None:
    target = tiny_target(family)
    prompt = prompt_of(6)
    reply = plain(target, prompt, 40)
    for stop_after in range(1, 6):
        caches = target.make_cache()
        drafter = Scripted(6, reply, scripts()[script])
        events = decode(target, caches, prompt, drafter=drafter, block_size=4, max_tokens=40)
        seen: list[int] = []
        for _ in range(stop_after):
            seen += next(events).tokens
        events.close()  # type: ignore[attr-defined]  # it is a generator
        assert seen == reply[: len(seen)]
        assert_holds(target, caches, [*prompt, *seen[:-1]])
        assert drafter.rows == len(seen) - 1


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss"])
def test_an_interrupt_in_the_verify_pass_leaves_the_caches_as_they_were(family: str) -> None:
    target = tiny_target(family)
    prompt = prompt_of(6)
    reply = plain(target, prompt, 40)
    caches = target.make_cache()
    drafter = Scripted(6, reply, scripts()["right"])
    events = decode(target, caches, prompt, drafter=drafter, block_size=4, max_tokens=40)
    seen = [*next(events).tokens, *next(events).tokens]
    undo = attach(target.layers[-1], Interrupting)
    with pytest.raises(KeyboardInterrupt):
        next(events)
    undo()
    assert_holds(target, caches, [*prompt, *seen[:-1]])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3"])
def test_plain_decoding_undoes_the_pass_that_went_ahead(family: str) -> None:
    """However the reply ends: by length, by an eos, by the caller, by a cancel, by an interrupt."""
    target = tiny_target(family)
    prompt = prompt_of(6)
    reply = plain(target, prompt, 20)

    def holds(caches: list[Cache], tokens: list[int]) -> None:
        assert tokens == reply[: len(tokens)]
        assert_holds(target, caches, [*prompt, *tokens[:-1]])

    for options in ({"max_tokens": 9}, {"max_tokens": 20, "eos": frozenset({reply[7]})}):
        caches = target.make_cache()
        holds(caches, tokens_of(list(decode(target, caches, prompt, **options))))
    for events in range(1, 5):
        caches = target.make_cache()
        stream = decode(target, caches, prompt, max_tokens=20)
        seen = [token for _ in range(events) for token in next(stream).tokens]
        stream.close()  # type: ignore[attr-defined]  # it is a generator
        holds(caches, seen)
        caches = target.make_cache()
        cancelled = iter([False] * (events + 2) + [True]).__next__
        holds(caches, tokens_of(list(decode(target, caches, prompt, max_tokens=20, cancelled=cancelled))))
    caches = target.make_cache()
    stream = decode(target, caches, prompt, max_tokens=20)
    seen = [token for _ in range(3) for token in next(stream).tokens]
    undo = attach(target.layers[-1], Interrupting)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    undo()
    holds(caches, seen)


class Interrupting(Mixin):
    def __call__(self, *args: object, **kwargs: object) -> object:
        raise KeyboardInterrupt


def test_cancelling_ends_the_stream_between_prompt_chunks_and_between_blocks() -> None:
    target = tiny_target("qwen3_5")
    for after in range(6):
        cancelled = iter([False] * after + [True] * 100).__next__
        caches = target.make_cache()
        events = list(
            decode(
                target,
                caches,
                prompt_of(40),
                max_tokens=50,
                prefill_step=CHUNK,
                cancelled=cancelled,
            )
        )
        assert events[-1] == Finished(finish_reason="cancelled")
        assert len(tokens_of(events)) == max(0, after - 3)  # 40 tokens are three chunks and the last token


def test_two_streams_on_one_target_do_not_disturb_each_other() -> None:
    target = tiny_target("qwen3_5")
    prompts = [prompt_of(5), prompt_of(9)]
    replies = [plain(target, p, 24) for p in prompts]
    streams: list[Iterator[Event]] = [
        decode(
            target,
            target.make_cache(),
            p,
            drafter=Scripted(len(p), r, scripts()["random"]),
            block_size=size,
            max_tokens=24,
        )
        for p, r, size in zip(prompts, replies, (4, 7), strict=True)
    ]
    out: list[list[int]] = [[], []]
    while streams_left := [i for i in (0, 1) if len(out[i]) < 24]:
        for i in streams_left:
            out[i] += next(streams[i]).tokens
    assert out == replies


def test_one_host_synchronisation_per_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tolist` of one array is the only thing in a cycle that waits for the device."""
    target = tiny_target("qwen3_5")
    reply = plain(target, prompt_of(5), 40)
    drafter = Scripted(5, reply, scripts()["random"])
    events = decode(target, target.make_cache(), prompt_of(5), drafter=drafter, block_size=4, max_tokens=40)
    next(events)
    waits: list[str] = []
    monkeypatch.setattr(mx, "eval", lambda *_: waits.append("eval"))
    counted = CountedSyncs(waits)
    monkeypatch.setattr(mx, "concatenate", counted.concatenate(mx.concatenate))
    drafted = [block for block in blocks_of(list(events)) if block.drafted]
    assert len(drafted) > 5
    assert waits == ["tolist"] * len(drafted)


def test_nothing_in_python_grows_with_the_reply(pair: Session) -> None:
    """The 10th and the 150th cycle make the same calls."""
    prompt = pair.encode("def main(argv):\n")
    caches = pair.target.make_cache()
    assert pair.drafter is not None
    events = decode(pair.target, caches, prompt, drafter=Drafter(pair.drafter), block_size=2, max_tokens=400)
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    made: list[int] = []
    sys.setprofile(count)
    try:
        for _ in events:
            made.append(calls)
            calls = 0
    finally:
        sys.setprofile(None)
    early, late = sorted(made[10:40]), sorted(made[-40:-10])
    assert late[len(late) // 2] <= 1.02 * early[len(early) // 2]
    assert max(late) <= 1.1 * max(early)


def primitives(*outputs: mx.array) -> int:
    """Operations in the graph of these arrays."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    return text.getvalue().count("shape=rectangle")


def test_primitives_of_a_draft_do_not_grow_with_the_context(pair: Session) -> None:
    assert pair.drafter is not None
    counts = []
    for rows in (3, 700):
        drafter = Drafter(pair.drafter)
        width = len(pair.drafter.config.target_layer_ids) * pair.target.hidden_size
        drafter.extend(mx.zeros((1, rows, width)))
        mx.eval(drafter.arrays)
        counts.append(primitives(drafter.propose(5, 5, pair.target.embed, pair.target.head).tokens))
    assert counts[0] == counts[1]
    assert 50 < counts[0] < 275  # 291 before the walk over the candidates was one gather a slot


def test_rows_that_come_along_with_a_draft_cost_it_little(pair: Session) -> None:
    """Keys and values of both are made in one go."""
    assert pair.drafter is not None
    width = len(pair.drafter.config.target_layer_ids) * pair.target.hidden_size
    taps, ends = mx.zeros((1, 3, width)), (pair.target.embed, pair.target.head)
    apart, together = Drafter(pair.drafter), Drafter(pair.drafter)
    apart.extend(taps)
    seen = apart.propose(5, 5, *ends).tokens, together.propose(5, 5, *ends, taps=taps).tokens
    assert seen[0].tolist() == seen[1].tolist()
    both, alone = Drafter(pair.drafter), Drafter(pair.drafter)
    mx.eval(taps)
    extra = primitives(both.propose(5, 5, *ends, taps=taps).tokens) - primitives(
        alone.propose(5, 5, *ends).tokens
    )
    assert 0 < extra < 25  # 69 in a pass of their own


class CountedSyncs:
    """Stands in for the one-dimensional int32 array that carries a cycle's result to the host."""

    def __init__(self, waits: list[str]) -> None:
        self.waits = waits

    def concatenate(self, real: Callable[..., mx.array]) -> Callable[..., object]:
        def concatenated(parts: list[mx.array], *args: object, **kwargs: object) -> object:
            out = real(parts, *args, **kwargs)
            return self.counting(out) if out.ndim == 1 and len(parts) in (3, 4) else out

        return concatenated

    def counting(self, array: mx.array) -> object:
        waits = self.waits

        class Counting:
            def tolist(self) -> object:
                waits.append("tolist")
                return array.tolist()

        return Counting()


class Broken(Scripted):
    """Right, but its logits are not finite."""

    def propose(self, *args: object) -> Draft:
        return Draft(super().propose(*args).tokens, mx.array(False))  # type: ignore[arg-type]


def test_non_finite_draft_logits_are_reported_on_the_first_block() -> None:
    target = tiny_target("qwen3_5")
    prompt = prompt_of(6)
    reply = plain(target, prompt, 20)
    caches = target.make_cache()
    drafter = Broken(6, reply, scripts()["right"])
    events = decode(target, caches, prompt, drafter=drafter, block_size=4, max_tokens=20)
    next(events)
    with pytest.raises(NumericsError, match="drafter's logits are not finite"):
        next(events)
    assert_holds(target, caches, prompt)


def test_non_finite_target_logits_fail_the_request_and_not_the_next_one() -> None:
    target = tiny_target("qwen3")
    reply = plain(target, prompt_of(6))
    norm = target.model.model.norm
    weight = norm.weight
    norm.weight = weight * float("nan")
    with pytest.raises(NumericsError, match="target's logits are not finite"):
        plain(target, prompt_of(6))
    norm.weight = weight
    assert plain(target, prompt_of(6)) == reply


def test_memory_returns_to_the_baseline_after_200_requests() -> None:
    target = tiny_target("qwen3_5")
    prompt = prompt_of(8)
    reply = plain(target, prompt, 5)

    def request() -> None:
        drafter = Scripted(8, reply, scripts()["right until slot 2"])
        list(decode(target, target.make_cache(), prompt, drafter=drafter, block_size=4, max_tokens=5))

    request()
    gc.collect()
    baseline = mx.get_active_memory()
    for _ in range(200):
        request()
    gc.collect()
    assert mx.get_active_memory() == baseline


@pytest.mark.parametrize("block_size", [1, 4])
def test_memory_of_a_long_reply_is_that_of_its_caches(block_size: int) -> None:
    """No graph and no tap outlives its cycle, also in cycles without a draft."""
    target = tiny_target("qwen3_5")
    drafter = Growing()
    events = decode(
        target, target.make_cache(), prompt_of(5), drafter=drafter, block_size=block_size, max_tokens=240
    )
    sizes = []
    for _ in events:
        mx.synchronize()
        sizes.append(mx.get_active_memory())
    # What waits for the drafter and what is under way comes and goes; the taps of all cycles would be 120 kB.
    # The last blocks are shorter.
    assert max(sizes[-30:-10]) <= max(sizes[4:30]) + 2**14


class Growing:
    """Keeps a running sum of all taps, as a real drafter's context depends on all of them."""

    def __init__(self) -> None:
        self.total = mx.zeros((1, 1, 128))

    @property
    def arrays(self) -> list[mx.array]:
        return [self.total]

    def extend(self, taps: mx.array) -> None:
        self.total = self.total + taps.sum(axis=1, keepdims=True)

    def propose(self, anchor: int, block_size: int, *others: Any) -> Draft:
        if others[-1] is not None:
            self.extend(others[-1])
        return Draft(mx.zeros((block_size - 1,), dtype=mx.int32), mx.array(True))


WILD: dict[str, Callable[[random.Random, int], int]] = {
    "random": lambda dice, limit: dice.randint(-3, 2 * limit),
    "all": lambda dice, limit: limit,
    "plain or all": lambda dice, limit: dice.choice((1, limit)),
    "mostly plain": lambda dice, limit: 6 if dice.random() < 0.2 else 1,
}


class Wild:
    """A policy without reason."""

    copies = True

    def __init__(self, choose: Callable[[random.Random, int], int]) -> None:
        self.choose, self.dice = choose, random.Random(5)
        self.seen: list[int] = []

    def plan(self, limit: int, keys: int, match: int = 0) -> Plan:
        return Plan(self.choose(self.dice, min(limit, 7)), self.dice.choice((0, match)))

    def observe(self, plan: Plan, accepted: int, seconds: float, keys: int) -> None:
        assert 0 <= accepted < plan.rows
        assert seconds >= 0
        self.seen.append(plan.rows)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3"])
@pytest.mark.parametrize("name", WILD)
def test_no_policy_can_change_the_tokens(family: str, name: str) -> None:
    target = tiny_target(family)
    prompt = prompt_of(6)
    reply = plain(target, prompt, 60)
    sizes = set()
    for script in scripts().values():
        for stop in (2, 9, 60):
            caches, policy = target.make_cache(), Wild(WILD[name])
            drafter = Scripted(6, reply, script)
            stream = decode(target, caches, prompt, drafter=drafter, policy=policy, max_tokens=60)
            seen: list[int] = []
            while len(seen) < stop:
                seen += next(stream).tokens
            stream.close()  # type: ignore[attr-defined]  # it is a generator
            assert seen == reply[: len(seen)]
            assert_holds(target, caches, [*prompt, *seen[:-1]])
            assert drafter.rows == len(seen) - 1
            sizes |= set(policy.seen)
    assert len(sizes) > 1


class Copying:
    """A policy that copies whatever can be copied, and else asks the drafter or decodes plainly."""

    def __init__(self, otherwise: int, copies: bool = True) -> None:
        self.otherwise, self.copies = otherwise, copies

    def plan(self, limit: int, keys: int, match: int = 0) -> Plan:
        return Plan(6, match) if match else Plan(self.otherwise)

    def observe(self, plan: Plan, accepted: int, seconds: float, keys: int) -> None:
        pass


@pytest.mark.parametrize("otherwise", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_that_are_copied_change_no_token(family: str, otherwise: int) -> None:
    target = tiny_target(family)
    prompt = prompt_of(CHUNK + 5)
    copied = []
    for seed in range(4):
        # Few tokens to choose from, so that the reply repeats itself, but not always.
        params = SamplingParams(temperature=1.5, seed=seed, logit_bias={5: 50.0, 6: 50.0, 7: 50.0})
        reply = tokens_of(
            list(
                decode_with(
                    target,
                    target.make_cache(),
                    prompt,
                    Sampler(params, prompt, target.vocab_size),
                    max_tokens=40,
                )
            )
        )
        caches, drafter = target.make_cache(), Scripted(len(prompt), reply, scripts()["random"])
        events = list(
            decode_with(
                target,
                caches,
                prompt,
                Sampler(params, prompt, target.vocab_size),
                drafter=drafter,
                policy=Copying(otherwise),
                max_tokens=40,
            )
        )
        assert tokens_of(events) == reply
        assert_holds(target, caches, [*prompt, *reply[:-1]])
        assert drafter.rows == len(reply) - 1
        copied += [block for block in blocks_of(events) if block.copied]
    assert any(block.accepted for block in copied)
    assert any(block.rejected for block in copied)


def test_nothing_can_be_copied_by_a_policy_that_never_does() -> None:
    target = tiny_target("qwen3")
    prompt = prompt_of(6) * 4
    drafter = Scripted(len(prompt), plain(target, prompt, 20), scripts()["random"])
    policy = Copying(3, copies=False)
    events = list(decode(target, target.make_cache(), prompt, drafter=drafter, policy=policy, max_tokens=20))
    assert not any(block.copied for block in blocks_of(events))
    assert any(block.drafted for block in blocks_of(events))


class Timed:
    """Blocks of some sizes in turns, and what the policy is told of their seconds."""

    copies = False

    def __init__(self, *sizes: int) -> None:
        self.sizes = itertools.cycle(sizes)
        self.seconds: list[float] = []

    def plan(self, limit: int, keys: int, match: int = 0) -> Plan:
        return Plan(min(next(self.sizes), limit))

    def observe(self, plan: Plan, accepted: int, seconds: float, keys: int) -> None:
        self.seconds.append(seconds)


@pytest.mark.parametrize("size", [1, 4])
def test_a_cycle_in_which_the_device_got_ahead_of_a_slow_caller_is_not_timed(size: int) -> None:
    target = tiny_target("qwen3")
    prompt = prompt_of(6)
    reply = plain(target, prompt, 12)
    told = []
    for pause in (0.0, 0.05):
        policy = Timed(size)
        drafter = Scripted(6, reply, scripts()["wrong"])
        for _ in decode(target, target.make_cache(), prompt, drafter=drafter, policy=policy, max_tokens=12):
            time.sleep(pause)
        told.append(policy.seconds)
    assert len(told[0]) == len(told[1]) >= 8
    assert sum(seconds > 0 for seconds in told[0]) > len(told[0]) / 2
    assert (told[1][0] > 0) == (size > 1), "a plain step that did not start ahead"
    assert not any(told[1][1:])


def test_of_plain_steps_those_are_timed_that_start_ahead_and_start_the_next() -> None:
    target = tiny_target("qwen3")
    prompt = prompt_of(6)
    drafter = Scripted(6, plain(target, prompt, 13), scripts()["wrong"])
    policy = Timed(1, 1, 1, 1, 3, 1, 3)
    for _ in decode(target, target.make_cache(), prompt, drafter=drafter, policy=policy, max_tokens=13):
        pass
    told = [seconds > 0 for seconds in policy.seconds]
    # Cycles of 1 1 1 1 3 1 3 1 1 1 1 rows, and instead of 3 one more of 1, the last that there is room for.
    assert told == [False, True, True, False, True, False, True, False, True, True, True, False]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma4"])
def test_handing_over_every_layer_changes_no_bit_and_can_be_undone(family: str) -> None:
    target = tiny_target(family)
    tokens = mx.array(prompt_of(6))
    expected, taps = target.forward(tokens, target.make_cache())
    classes = [type(layer) for layer in target.layers]
    eager = Eager(target.layers, every=1)
    assert [type(layer) for layer in target.layers] != classes
    started, started_taps = target.forward(tokens, target.make_cache())
    assert mx.array_equal(started, expected)
    assert taps is not None
    assert started_taps is not None
    assert mx.array_equal(started_taps, taps)
    for undo in eager.undos:
        undo()
    assert [type(layer) for layer in target.layers] == classes
