"""What earlier requests computed: the next ones get the same tokens and the same drafts from it, sooner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from drafter.build import network, raw_config
from tiny import EXACT, VOCAB, tiny_model

from dflash_mlx import NumericsError, Result, SamplingParams, Session
from dflash_mlx.config import FULL, SLIDING, DrafterConfig
from dflash_mlx.prefix_cache import MARKS, SLOTS, Context, PrefixCache
from dflash_mlx.result import collect
from dflash_mlx.target import Target
from dflash_mlx.target.attach import Mixin, attach
from dflash_mlx.target.caches import arrays, is_recurrent, leaves, make_cache

STEP = 16
PLENTY = 1 << 30


class Tokens:
    """A tokenizer for token ids."""

    eos_token_ids = (VOCAB - 1,)

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(VOCAB)}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(0x100 + token) for token in ids)


def drafter_config(layers: int = 2, windows: bool = True) -> DrafterConfig:
    """Layers of both kinds, the window short enough to move on within these conversations."""
    kinds = [SLIDING, FULL][:layers] if windows else [FULL] * layers
    return DrafterConfig.from_dict(
        raw_config(
            2,
            {"block_size": 4, "mask_token_id": VOCAB - 2, "target_layer_ids": [0, 2]},
            vocab_size=VOCAB,
            num_target_layers=4,
            num_hidden_layers=layers,
            layer_types=kinds,
            sliding_window=12,
            use_sliding_window=windows,
        )
    )


@contextmanager
def session_on(
    model: Any, *, prefixes: int = PLENTY, drafter: bool = True, **settings: Any
) -> Iterator[Session]:
    session = Session(
        Target(model, context_length=4096),
        Tokens(),
        network(drafter_config()) if drafter else None,
        prefill_step=STEP,
        block_size=4 if drafter else 1,
        prefixes=prefixes,
        **settings,
    )
    yield session
    session.close()


def tokens(seed: int, count: int) -> list[int]:
    mx.random.seed(seed)
    drawn: Any = mx.random.randint(0, VOCAB - 2, (count,)).tolist()
    return [int(token) for token in drawn]


def has_states(model: Any) -> bool:
    return any(is_recurrent(cache) for cache in leaves(make_cache(model)))


def reply(session: Session, prompt: Sequence[int], *, count: int = 10, **settings: Any) -> Result:
    return session.generate(prompt, SamplingParams(max_tokens=count, seed=5, **settings))


def drafts(result: Result) -> list[tuple[Any, ...]]:
    """Everything that a drafter with another context would have done in another way."""
    return [(c.tokens, c.drafted, c.accepted, c.rejected) for c in result.cycles]


def cold(model: Any, prompt: Sequence[int], **settings: Any) -> Result:
    with session_on(model, prefixes=0) as session:
        result = reply(session, prompt, **settings)
    assert result.cached_tokens == 0
    return result


def check(warm: Result, model: Any, prompt: Sequence[int], **settings: Any) -> None:
    """The same as without anything from before."""
    expected = cold(model, prompt, **settings)
    assert warm.tokens == expected.tokens
    assert drafts(warm) == drafts(expected)


# --- warm is cold -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("family", EXACT)
def test_a_conversation_goes_on_where_it_ended(family: str, temperature: float) -> None:
    model = tiny_model(family)
    prompt = tokens(1, 37)
    with session_on(model) as session:
        results = []
        for turn in range(3):
            result = reply(session, prompt, temperature=temperature)
            results.append((list(prompt), result))
            prompt += [*result.tokens, *tokens(10 + turn, 9)]
    for i, (asked, result) in enumerate(results):
        # All but the last token of the reply before, whose row nobody needed yet.
        assert result.cached_tokens == (0 if i == 0 else len(asked) - 10)
        check(result, model, asked, temperature=temperature)
    assert any(cycle.rejected for _, result in results for cycle in result.cycles)


@pytest.mark.parametrize("family", EXACT)
def test_an_edited_turn_starts_where_it_parts_from_the_old_one(family: str) -> None:
    model = tiny_model(family)
    prompt = tokens(1, 61)
    edited = [*prompt[:50], *tokens(2, 9)]
    with session_on(model) as session:
        reply(session, prompt)
        results = [(asked, reply(session, asked)) for asked in (edited, prompt)]
    for asked, result in results:
        check(result, model, asked)
    # Where not all can be cut, the last place that was noted before both part.
    assert results[0][1].cached_tokens == (48 if has_states(model) else 50)
    assert results[1][1].cached_tokens == 60


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_the_third_prompt_starts_where_the_first_two_parted(family: str) -> None:
    model = tiny_model(family)
    prompts = [[*tokens(1, 155), *tokens(seed, 20)] for seed in (2, 3, 4)]
    with session_on(model) as session:
        session.prefill_step = 80
        results = [reply(session, prompt) for prompt in prompts]
    assert [result.cached_tokens for result in results] == [0, 80, 155]
    for prompt, result in zip(prompts, results, strict=True):
        check(result, model, prompt)


def test_rows_can_be_cut_anywhere_where_nothing_else_is_kept() -> None:
    model = tiny_model("qwen3")
    prompt = tokens(1, 61)
    edited = [*prompt[:50], *tokens(2, 9)]
    with session_on(model, drafter=False) as session:
        reply(session, prompt)
        result = reply(session, edited)
        assert result.cached_tokens == 50
    assert result.tokens == cold(model, edited).tokens


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss"])
def test_an_exact_repeat_reads_one_token(family: str) -> None:
    model = tiny_model(family)
    with session_on(model) as session:
        results = [reply(session, tokens(1, 40)) for _ in range(3)]
    assert [result.cached_tokens for result in results] == [0, 39, 39]
    for result in results:
        check(result, model, tokens(1, 40))


def test_a_template_that_rewrites_the_reply_costs_its_beginning_only() -> None:
    """As where reasoning is left out of the next prompt: `turns` says where that begins."""
    model = tiny_model("qwen3_5")
    first, second = tokens(1, 40), [*tokens(1, 40)[:36], *tokens(2, 30)]
    with session_on(model) as session:
        prepared = session.prepare(first, SamplingParams(max_tokens=10))
        collect(session.run(replace(prepared, turns=(36,))))
        result = reply(session, second)
        assert result.cached_tokens == 36
    check(result, model, second)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "muse_glimmer"])
def test_two_conversations_take_turns(family: str) -> None:
    model = tiny_model(family)
    prompts = {seed: tokens(seed, 30) for seed in (1, 2)}
    with session_on(model) as session:
        asked = []
        for turn in range(3):
            for seed, prompt in prompts.items():
                result = reply(session, prompt)
                asked.append((list(prompt), result))
                assert (result.cached_tokens > 0) == (turn > 0)
                prompt += [*result.tokens, *tokens(20 + turn + seed, 5)]
    for prompt, result in asked:
        check(result, model, prompt)


def test_tau_is_the_same_on_the_embedded_pair(pair: Session, held_out: list[str]) -> None:
    ids = pair.encode(held_out[0])
    half = len(ids) // 2
    params = SamplingParams(max_tokens=64)
    expected = pair.generate(ids, params, block_size=5)
    pair._prefixes = PrefixCache(pair._new_context, PLENTY)
    try:
        pair.generate(ids[:half], SamplingParams(max_tokens=1), block_size=5)
        result = pair.generate(ids, params, block_size=5)
    finally:
        pair._prefixes = None
    assert result.cached_tokens == half - 1 or result.cached_tokens == half
    assert (result.tokens, drafts(result), result.tau) == (expected.tokens, drafts(expected), expected.tau)
    assert any(c.accepted for c in result.cycles)
    assert any(c.rejected for c in result.cycles)


def test_a_drafter_with_another_context_drafts_something_else() -> None:
    """So that equal drafts say something."""
    model = tiny_model("qwen3")
    prompt = tokens(1, 37)
    with session_on(model) as session:
        reply(session, prompt[:30])
        [context] = kept(session)
        assert context.drafter is not None
        for layer in context.drafter.layers:
            assert layer.keys is not None
            layer.keys = -layer.keys
        context._marks.clear()
        asked = [*context.tokens, *prompt[30:]]
        result = reply(session, asked)
    expected = cold(model, asked)
    assert result.cached_tokens == len(context.tokens)
    assert result.tokens == expected.tokens
    assert drafts(result) != drafts(expected)


# --- plain and drafted --------------------------------------------------------------------------


def test_plain_decoding_uses_drafted_contexts_and_leaves_them_whole() -> None:
    model = tiny_model("qwen3_5")
    prompt = tokens(1, 40)
    with session_on(model) as session:
        reply(session, prompt)
        plain = session.generate(prompt, SamplingParams(max_tokens=10), speculative=False)
        drafted = reply(session, prompt)
        assert (plain.cached_tokens, drafted.cached_tokens) == (39, 39)
    check(drafted, model, prompt)
    assert plain.tokens == drafted.tokens


def test_a_plain_context_is_nothing_for_a_drafter() -> None:
    model = tiny_model("qwen3")
    prompt = tokens(1, 40)
    with session_on(model) as session:
        session.generate(prompt, SamplingParams(max_tokens=10), speculative=False)
        result = reply(session, prompt)
        assert result.cached_tokens == 0
    check(result, model, prompt)


# --- cancelled and failed -----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss"])
def test_a_prompt_that_was_cancelled_goes_on_where_it_was(family: str) -> None:
    model = tiny_model(family)
    prompt = tokens(1, 70)
    with session_on(model) as session:
        for event in session.stream(prompt, SamplingParams(max_tokens=10)):
            if getattr(event, "done", 0) == 2 * STEP:
                session.cancel()
        result = reply(session, prompt)
        assert result.cached_tokens == 2 * STEP
    check(result, model, prompt)


@pytest.mark.parametrize("how", ["cancelled", "abandoned"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss"])
def test_a_reply_that_was_broken_off_goes_on_where_it_was(family: str, how: str) -> None:
    model = tiny_model(family)
    prompt = tokens(1, 40)
    with session_on(model) as session:
        written: list[int] = []
        for event in session.stream(prompt, SamplingParams(max_tokens=30)):
            written += event.tokens
            if len(written) > 8:
                if how == "abandoned":
                    break
                session.cancel()
        del event
        longer = [*prompt, *written, *tokens(3, 5)]
        result = reply(session, longer)
        assert result.cached_tokens == len(prompt) + len(written) - 1
    check(result, model, longer)


class Failing(Mixin):
    """A layer that fails, or whose numbers are not finite, when told so."""

    _how: dict[str, bool]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        if self._how.get("raise"):
            raise ValueError("the layer failed")
        return out * float("nan") if self._how.get("nan") else out


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_request_that_fails_leaves_the_others_as_they_were(family: str) -> None:
    model = tiny_model(family)
    how: dict[str, bool] = {}
    attach(model.layers[1], Failing, _how=how)
    prompt = tokens(1, 40)
    with session_on(model) as session:
        first = reply(session, prompt)
        longer = [*prompt, *first.tokens, *tokens(3, 20)]
        how["raise"] = True
        with pytest.raises(ValueError, match="the layer failed"):
            reply(session, longer)
        how.clear()
        result = reply(session, longer)
        assert result.cached_tokens == 49
    check(result, model, longer)


def test_numbers_that_are_not_finite_are_not_kept() -> None:
    """A prompt that was cancelled was never checked: what fails on it must not fail for ever."""
    model = tiny_model("qwen3")
    how = {"nan": True}
    with session_on(model) as session:
        attach(model.layers[1], Failing, _how=how)
        prompt = tokens(1, 70)
        for event in session.stream(prompt):
            if getattr(event, "done", 0):
                session.cancel()
        how.clear()
        with pytest.raises(NumericsError):
            reply(session, prompt)
        result = reply(session, prompt)
        assert result.cached_tokens == 0
    check(result, model, prompt)


# --- memory -------------------------------------------------------------------------------------


def kept(session: Session) -> list[Context]:
    assert session._prefixes is not None
    return session._prefixes._kept


def test_the_longest_unused_goes_first_and_small_ones_never_push_out_a_large_one() -> None:
    model = tiny_model("qwen3")
    with session_on(model, drafter=False) as session:
        session.prefill_step = 512
        reply(session, tokens(1, 1500))
        [large] = kept(session)
        budget = large.nbytes * 3 // 2
        session._prefixes = PrefixCache(session._new_context, budget)
        reply(session, tokens(1, 1500), count=2)
        for seed in range(2, 9):
            reply(session, tokens(seed, 20), count=2)
            assert session._prefixes.nbytes <= budget
        assert reply(session, tokens(1, 1500), count=2).cached_tokens == 1499
        assert reply(session, tokens(8, 20), count=2).cached_tokens > 0
        assert reply(session, tokens(2, 20), count=2).cached_tokens == 0
        # One of its own size does.
        reply(session, tokens(9, 1500), count=2)
        assert reply(session, tokens(1, 1500), count=2).cached_tokens == 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss"])
def test_what_is_kept_of_one_conversation_is_bounded(family: str) -> None:
    model = tiny_model(family)
    prompt = tokens(1, 40)
    with session_on(model) as session:
        for turn in range(12):
            prompt += [*reply(session, prompt).tokens, *tokens(turn, 7)]
            [context] = kept(session)
            assert len(context._marks) <= MARKS
            assert max(context._marks) == len(context.tokens)
        for turn in range(3):  # other replies to the same prompt
            reply(session, prompt, temperature=1.0, count=12 + turn)
            assert len(kept(session)) == 1


def test_many_small_requests_leave_few_contexts() -> None:
    model = tiny_model("qwen3")
    with session_on(model, drafter=False) as session:
        for seed in range(SLOTS + 3):
            reply(session, tokens(seed, 8), count=1)
        assert len(kept(session)) == SLOTS
        assert reply(session, tokens(SLOTS + 2, 8), count=1).cached_tokens == 7
        assert reply(session, tokens(0, 8), count=1).cached_tokens == 0


def test_a_context_that_grows_is_given_the_memory_of_the_others() -> None:
    model = tiny_model("qwen3")
    asked: list[int] = []

    def spare(rows: int) -> int:
        asked.append(rows)
        return PLENTY if rows < 700 else 0

    with session_on(model, spare=spare) as session:
        reply(session, tokens(1, 40))
        reply(session, tokens(2, 40))
        assert len(kept(session)) == 2
        reply(session, tokens(3, 600), count=2)
        assert [len(context.tokens) for context in kept(session)] == [601]
    assert max(asked) > 700


def test_nothing_is_kept_without_a_budget() -> None:
    model = tiny_model("qwen3")
    with session_on(model, prefixes=0) as session:
        reply(session, tokens(1, 40))
        assert reply(session, tokens(1, 40)).cached_tokens == 0
        assert session._prefixes is None


# --- what is restored is what was stored --------------------------------------------------------


class Rough(Mixin):
    """A layer whose numbers depend on how many rows it is given, as they do on a GPU."""

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(x, *args, **kwargs) * (1 + 1e-4 * x.shape[1])


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "qwen3_5", "gpt_oss", "muse_glimmer"])
def test_a_restored_state_has_the_bits_that_were_stored(family: str) -> None:
    model = tiny_model(family)
    with session_on(model, drafter=False) as session:
        undo = attach(model.layers[1], Rough)
        context = session._new_context(False)
        marks = {}
        ids = tokens(1, 60)
        for start, end in ((0, 16), (16, 32), (32, 33), (33, 60)):
            session.target.forward(mx.array(ids[start:end]), context.caches)
            context.note(ids[:end])
            marks[end] = [mx.array(a) for a in arrays(context.caches)]
            mx.eval(marks[end])
        for end, expected in marks.items():
            assert context.reach(end) == end
            restored = context.cut(end, drafted=False)
            assert restored.tokens == tuple(ids[:end])
            found = arrays(restored.caches)
            assert [a.shape for a in found] == [a.shape for a in expected]
            assert all(mx.array_equal(a, b) for a, b in zip(found, expected, strict=True))
            # Going on from it changes neither the original nor a second copy.
            session.target.forward(mx.array(tokens(2, 20)), restored.caches)
            mx.eval(arrays(restored.caches))
            again = arrays(context.cut(end, drafted=False).caches)
            assert all(mx.array_equal(a, b) for a, b in zip(again, expected, strict=True))
        undo()
