"""Prompts, the target's responses to them, and the files that they become."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import train_demo_pair
from byte_tokenizer import wrapper
from demo_target import TargetRecipe
from mlx_lm.models import qwen3_5
from tiny import tiny_model
from train_demo_pair import Plan, responses_stage
from train_tiny import DRAFTER, TARGET, make_samples, make_target

from dflash_mlx.errors import UsageError
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.target.target import Target
from dflash_mlx.train import generate
from dflash_mlx.train.fit import FitRecipe
from dflash_mlx.train.generate import opening_of
from dflash_mlx.train.job import Job, Workplace
from dflash_mlx.train.prompts import TEXTS, free_form_prompts, own_prompts, read_prompts
from dflash_mlx.train.respond import TURN_TOKENS, Opening, Responder, Sampling, batch_prompts
from dflash_mlx.train.shards import load_samples, save_samples, widen


def test_responses_are_the_targets_own_with_the_states_of_a_plain_pass() -> None:
    target = make_target()
    sample = make_samples(target)[0]
    tokens = mx.array(sample.tokens)[None]
    logits = target.model(tokens)[0]
    choices = np.array(mx.argmax(logits, axis=-1))
    np.testing.assert_array_equal(sample.tokens[sample.prompt :], choices[sample.prompt - 1 : -1])
    first_layer = target.layers[0](target.embed(tokens))[0, :-1]
    np.testing.assert_allclose(widen(sample.taps)[:, :32], first_layer, atol=2e-2, rtol=1e-2)
    np.testing.assert_allclose(target.head(widen(sample.final)), logits[:-1], atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3", "falcon_h1"])
def test_rows_that_are_finished_leave_the_caches_and_change_nothing(family: str) -> None:
    """Long after some rows have stopped, the others still write what they would write alone."""
    target = Target(tiny_model(family))
    prompts = np.random.default_rng(1).integers(2, 128, (6, 5)).tolist()
    greedy = Sampling(max_tokens=24, greedy_share=1.0)
    with Responder(target, [0, 2], frozenset()) as responder:
        alone = [responder.respond([prompt], greedy, 0)[0] for prompt in prompts]
    stops = frozenset(int(sample.tokens[sample.prompt + 3 * row]) for row, sample in enumerate(alone[:4]))
    with Responder(target, [0, 2], stops) as responder:
        together = responder.respond(prompts, greedy, 0)
    lengths = {sample.written for sample in together}
    assert len(lengths) > 2, "the rows must stop at different times"
    for one, sample in zip(alone, together, strict=True):
        np.testing.assert_array_equal(sample.tokens, one.tokens[: len(sample.tokens)])
        np.testing.assert_allclose(
            widen(sample.taps), widen(one.taps[: len(sample.taps)]), atol=0.05, rtol=0.02
        )
        assert len(sample.final) == len(sample.taps) == len(sample.tokens) - 1
        ended = sample.tokens[-1] in stops
        assert ended or sample.written >= max(lengths)
        assert not stops.intersection(sample.tokens[sample.prompt : -1].tolist())


def test_the_taps_come_off_again() -> None:
    target = make_target()
    before = [type(layer) for layer in target.layers]
    make_samples(target)
    assert [type(layer) for layer in target.layers] == before


def test_some_rows_are_drawn_from_the_targets_distribution() -> None:
    """One prompt in 4000 rows: the first token's frequencies are its probabilities."""
    target = make_target()
    prompt = [5, 9, 11]
    sampling = Sampling(max_tokens=1, greedy_share=0.25, temperature=1.5)
    with Responder(target, [0], frozenset()) as responder:
        samples = responder.respond([prompt] * 4000, sampling, seed=3)
        again = responder.respond([prompt] * 4000, sampling, seed=3)
    tokens = np.array([sample.tokens[-1] for sample in samples])
    assert tokens.tolist() == [sample.tokens[-1] for sample in again]
    logits = np.array(target.model(mx.array([prompt]))[0, -1]).astype(np.float64)
    assert (tokens[:1000] == logits.argmax()).all()
    wanted = np.exp(logits / 1.5) / np.exp(logits / 1.5).sum()
    counts = np.bincount(tokens[1000:], minlength=64)
    chi_squared = ((counts - 3000 * wanted) ** 2 / (3000 * wanted)).sum()
    assert chi_squared < 120  # 63 degrees of freedom: one in 10 000 would exceed 110


def test_the_target_asks_and_answers_as_it_would_have_read_it() -> None:
    """What a row is fed is its conversation and nothing else; one whose turn never ends is left out."""
    target = make_target()
    opening = Opening(before=(5, 9, 11), after=(3, 7, 8))
    sampling = Sampling(max_tokens=12, rows=40, greedy_share=1.0)
    with Responder(target, [0, 2], frozenset([0])) as responder:
        samples = responder.converse(opening, sampling, seed=1)
    assert 5 < len(samples) < 40, "some turns must end, and some not"
    assert len({sample.prompt for sample in samples}) > 5
    ended = []
    for sample in samples:
        tokens = sample.tokens.tolist()
        turn = tokens[3 : sample.prompt - 3]
        assert tokens[:3] == [5, 9, 11]
        assert tokens[sample.prompt - 3 : sample.prompt] == [3, 7, 8]
        assert 3 not in turn
        assert len(turn) < TURN_TOKENS
        ended.append(sample.written == 12 or tokens[-1] == 0)
        logits = target.model(mx.array([tokens]))[0]
        choices = np.array(mx.argmax(logits, axis=-1))
        np.testing.assert_array_equal(tokens[sample.prompt :], choices[sample.prompt - 1 : -1])
        np.testing.assert_allclose(target.head(widen(sample.final)), logits[:-1], atol=3e-2, rtol=2e-2)
    assert np.mean(ended) > 0.8  # the last few rows are left


def test_an_opening_is_what_any_two_conversations_share() -> None:
    tokenizer = wrapper("<|user|>{{ messages[0].content }}<|assistant|>:")
    opening = opening_of(tokenizer)
    assert opening is not None
    assert tokenizer.decode(list(opening.before)) == "<|user|>"
    assert tokenizer.decode(list(opening.after)) == "<|assistant|>:"
    assert opening_of(wrapper("{{ messages[0].content }}")) is None
    assert opening_of(wrapper(None)) is None


@pytest.mark.parametrize("able", [True, False])
def test_half_of_the_tokens_are_from_conversations_if_the_target_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, able: bool
) -> None:
    """A random target ends its turn about once in 300 tokens, so in few of its conversations."""
    if able:
        monkeypatch.setattr(generate, "CONVERSANT", 0.01)
    mx.random.seed(0)
    target = Target(qwen3_5.Model(qwen3_5.ModelArgs.from_dict({**TARGET, "vocab_size": 300})))
    tokenizer = wrapper("<|user|>{{ messages[0].content }}<end>")
    job, place, lines = Job("tiny", tokens=2000), Workplace(tmp_path), list[str]()
    place.begin(job)
    generate.generate(job, place, target, tokenizer, DRAFTER, lines.append)
    conversed = load_samples(place.shards(generate.CONVERSED))
    written = sum(sample.written for sample in load_samples(place.shards("train")))
    assert written >= 2000
    assert sum(sample.written for sample in conversed) >= 1000 * able
    if not able:
        assert not conversed
        assert f"generate: {generate.CONVERSED} has 0 of 1,000 tokens: there are no more" in lines


def test_batches_have_one_length_and_lose_no_prompt() -> None:
    prompts = [[1] * length for length in (3, 4, 3, 3, 5, 3, 3)]
    batches = batch_prompts(prompts, rows=2)
    assert sorted(index for batch in batches for index in batch) == list(range(7))
    assert all(len({len(prompts[i]) for i in batch}) == 1 for batch in batches)
    assert [len(batch) for batch in batches] == [2, 2, 1, 1, 1]


def test_samples_survive_their_files(tmp_path: Path) -> None:
    samples = make_samples(make_target())
    save_samples(samples[:3], tmp_path / "a.safetensors")
    save_samples(samples[3:], tmp_path / "b.safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
    loaded = load_samples([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    for before, after in zip(samples, loaded, strict=True):
        np.testing.assert_array_equal(before.tokens, after.tokens)
        np.testing.assert_array_equal(before.taps, after.taps)
        np.testing.assert_array_equal(before.final, after.final)
        assert before.prompt == after.prompt


def test_states_are_read_from_disk_only_when_they_are_used(tmp_path: Path) -> None:
    save_samples(make_samples(make_target()), tmp_path / "a.safetensors")
    [first, *_] = load_samples([tmp_path / "a.safetensors"])
    assert isinstance(first.taps, np.memmap)


def test_widening_gives_the_numbers_of_bfloat16() -> None:
    numbers = mx.array([1.0, -3.1415927, 24931.0, 1e-30])
    bits = np.array(numbers.astype(mx.bfloat16).view(mx.uint16))
    assert mx.array_equal(widen(bits), numbers.astype(mx.bfloat16).astype(mx.float32)).item()


def test_of_the_demo_pairs_responses_as_many_are_taken_as_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded ones where there are enough; else all are recorded anew."""
    target = make_target()
    plan = Plan(tmp_path, Path(EMBEDDED.target).parent, TargetRecipe(), FitRecipe(), responses=3)
    recorded = make_samples(make_target())
    save_samples(recorded, tmp_path / "responses.safetensors")
    assert [s.tokens.tolist() for s in responses_stage(plan, target, held_out=False)] == [
        s.tokens.tolist() for s in recorded[:3]
    ]
    monkeypatch.setattr(train_demo_pair, "read_corpus", tuple)
    monkeypatch.setattr(train_demo_pair, "cut_prompts", lambda documents, count, seed: [[5, 9, 11]] * count)
    anew = responses_stage(replace(plan, responses=5), target, held_out=False)
    assert len(anew) == len(load_samples([tmp_path / "responses.safetensors"])) == 5


# --- prompts --------------------------------------------------------------------------------------


def test_own_prompts_are_many_different_and_filled_in() -> None:
    prompts = own_prompts(6000)
    assert len({prompt.turns for prompt in prompts}) == 6000
    # Braces of a template's own are code; fields are lower-case words.
    assert not [p for p in prompts if re.search(r"\{[a-zA-Z_]+\}", " ".join(p.turns))]
    assert own_prompts(50, seed=1) == own_prompts(50, seed=1) != own_prompts(50, seed=2)
    assert any(len(prompt.turns) == 3 for prompt in prompts)


def test_own_prompts_cover_every_template_evenly() -> None:
    groups = [prompt.group for prompt in own_prompts(6000)]
    counts = np.unique(groups, return_counts=True)[1]
    lines = (TEXTS / "templates.txt").read_text(encoding="utf-8").splitlines()
    assert len(counts) == sum(bool(line.strip()) and line[0] not in "#[" for line in lines)
    assert np.median(counts) > 10


def test_whole_templates_are_held_out() -> None:
    prompts = own_prompts(4000)
    held_out = {prompt.group for prompt in prompts if prompt.held_out}
    trained = {prompt.group for prompt in prompts if not prompt.held_out}
    assert not held_out & trained
    assert 0.05 < len(held_out) / len(held_out | trained) < 0.2


def test_free_form_prompts_come_from_no_template() -> None:
    free = {prompt.turns for prompt in free_form_prompts()}
    assert len(free) == 40
    assert not free & {prompt.turns for prompt in own_prompts(10_000)}


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    records = [{"prompt": "Straße?"}, {"messages": talk, "group": "talk"}]
    file.write_text("\n".join(json.dumps(record) for record in records) + "\n\n", encoding="utf-8")
    first, second = read_prompts(file)
    assert (first.turns, first.group) == (("Straße?",), "Straße?")
    assert (second.messages, second.group) == (talk, "talk")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_a_line_feed_ends_a_line_of_prompts(tmp_path: Path, end: str) -> None:
    """JSON may hold other characters that Python takes for the end of a line."""
    file = tmp_path / "prompts.jsonl"
    texts = ["one\u2028two", "one\u0085two", "three"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    file.write_bytes(end.join(lines).encode())
    assert [prompt.turns[0] for prompt in read_prompts(file)] == texts


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '"text"',
        "{}",
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"prompt": "x", "messages": []}',
        '{"messages": []}',
        '{"messages": "hello"}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "system", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
        '{"prompt": "x", "group": 3}',
        '{"prompt": "x \\ud83d"}',
        '{"prompt": "x", "group": "\\ude00"}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"prompts.jsonl, line 2") as caught:
        read_prompts(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\x00"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"prompts.jsonl"):
        read_prompts(file)
