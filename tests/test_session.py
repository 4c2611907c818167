"""The public API on the embedded pair."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hub_server import COMMIT, hub_server
from mlx_lm import stream_generate

import dflash_mlx.session
from dflash_mlx import (
    Block,
    Event,
    Finished,
    ModelError,
    NumericsError,
    OutOfMemoryError,
    PairError,
    Prefilled,
    Prefilling,
    SamplingParams,
    Session,
    UsageError,
    WrongThreadError,
    calibrate,
    load,
)
from dflash_mlx.costs import Costs, LiveCosts
from dflash_mlx.cycles import Take
from dflash_mlx.drafter import DrafterModel
from dflash_mlx.pairs import EMBEDDED, Pair, Shape
from dflash_mlx.target.attach import Mixin, attach

PARAMS = SamplingParams(max_tokens=48)


def test_the_embedded_pair_gives_mlx_lms_tokens_at_every_block_size(
    pair: Session, held_out: list[str]
) -> None:
    accepted = rejected = 0
    for prompt in held_out[:3]:
        ids = pair.encode(prompt)
        stock = [r.token for r in stream_generate(pair.target.model, pair.tokenizer, ids, max_tokens=48)]
        results = [pair.generate(prompt, PARAMS, block_size=b) for b in range(1, 6)]
        results.append(pair.generate(prompt, PARAMS, speculative=False))
        for result in results:
            assert list(result.tokens) == stock
            assert result.text == pair.tokenizer.decode(stock)
            assert len(result.tokens) == 1 + sum(c.committed for c in result.cycles)
            accepted += sum(c.accepted for c in result.cycles)
            rejected += sum(c.drafted - c.accepted for c in result.cycles)
        assert all(c.drafted == 0 for c in results[-1].cycles)
    assert accepted > 100
    assert rejected > 50


@pytest.mark.parametrize("bits", [4, 8])
def test_the_quantized_pair_with_a_quantized_drafter_does_too(held_out: list[str], bits: int) -> None:
    session = load(EMBEDDED.target, draft_bits=bits)
    assert session.target.quantized
    assert session.largest_block == 5
    ids = session.encode(held_out[0])
    stock = [r.token for r in stream_generate(session.target.model, session.tokenizer, ids, max_tokens=24)]
    result = session.generate(ids, SamplingParams(max_tokens=24), block_size=5)
    assert list(result.tokens) == stock
    assert any(c.accepted for c in result.cycles)
    assert any(c.accepted < c.drafted for c in result.cycles)


def test_tau_on_held_out_code_is_at_least_2_9_at_block_5(pair: Session, held_out: list[str]) -> None:
    cycles = [
        c
        for p in held_out
        for c in pair.generate(p, SamplingParams(max_tokens=64), block_size=5).cycles
        if c.drafted
    ]
    assert sum(c.accepted + 1 for c in cycles) / len(cycles) >= 2.9


def test_a_result_adds_up(pair: Session, held_out: list[str]) -> None:
    result = pair.generate(held_out[1], PARAMS, block_size=5)
    drafted = [c for c in result.cycles if c.drafted]
    assert result.tau == sum(c.committed for c in drafted) / len(drafted)
    assert all(c.drafted == c.accepted + len(c.rejected) for c in result.cycles)
    judged = [c for c in drafted if c.rejected and c.committed > c.accepted]
    assert judged
    assert all(c.rejected[0] != c.tokens[-1] for c in judged)  # which the target chose instead
    assert result.finish_reason == "length"
    assert result.prompt_tokens == len(pair.encode(held_out[1]))
    assert result.prefill_seconds > 0 < result.decode_seconds
    assert pair.generate(held_out[1], PARAMS, speculative=False).tau is None
    single = pair.generate(held_out[1], SamplingParams(max_tokens=1))
    assert (single.tokens, single.cycles, single.tau) == (result.tokens[:1], (), None)


def test_a_stream_is_one_prefilled_then_blocks_then_finished(pair: Session, held_out: list[str]) -> None:
    events = list(pair.stream(held_out[0], PARAMS, block_size=5))
    assert isinstance(events[0], Prefilled)
    assert all(isinstance(e, Block) for e in events[1:-1])
    assert isinstance(events[-1], Finished)
    assert "".join(e.text for e in events) == pair.generate(held_out[0], PARAMS).text
    assert [Event.from_json(e.to_json()) for e in events] == events


# --- prompts ----------------------------------------------------------------------------------


def test_text_ids_and_messages_are_the_same_prompt(pair: Session) -> None:
    text = "def main(argv):\n"
    ids = pair.encode(text)
    assert pair.encode(ids) == ids
    assert (
        pair.encode([{"role": "system", "content": "def "}, {"role": "user", "content": "main(argv):\n"}])
        == ids
    )
    assert pair.tokenizer.decode(ids) == text


class Touched(Mixin):
    def __call__(self, *args: object, **kwargs: object) -> object:
        raise AssertionError("the model was run")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([{"role": "user", "content": ""}], "empty"),
        ([5, 2048], "token id 2048"),
        ([-1], "token id -1"),
        ([1.5], "list"),
        (None, "NoneType"),
        ([{"role": "user"}, 3], "list"),
    ],
)
def test_a_bad_prompt_is_refused_before_the_model_is_touched(
    pair: Session, prompt: Any, message: str
) -> None:
    undo = attach(pair.target.model, Touched)
    try:
        with pytest.raises(ValueError, match=message) as caught:
            pair.stream(prompt)
    finally:
        undo()
    assert isinstance(caught.value, UsageError)
    assert "\n" not in str(caught.value)


def test_a_template_that_raises_fails_this_request_only(
    pair: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            pair.tokenizer._tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}"
        )
        with pytest.raises(UsageError, match="cannot render these messages: roles must alternate"):
            pair.stream([{"role": "user", "content": "x"}])
    assert pair.generate("x = ", SamplingParams(max_tokens=3)).tokens


# --- limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [0, -1, 6, 16])
def test_a_block_the_drafter_was_not_trained_for_is_refused(pair: Session, block_size: int) -> None:
    with pytest.raises(UsageError, match=f"block_size is {block_size}: .* between 1 and 5"):
        pair.stream("x", block_size=block_size)


def test_where_no_block_can_pay_decoding_is_plain_and_says_so(
    held_out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the drafter's context is kept; a block size that is asked for is still honoured."""
    dear = Costs((8,), ((0.01, 0.03, 0.04, 0.05, 0.06),), 0.01)
    monkeypatch.setattr(calibrate, "costs", lambda *_: dear)
    session = load(EMBEDDED.target)
    with monkeypatch.context() as patch:
        patch.setattr(DrafterModel, "extend", None)
        plain = session.generate(held_out[0], PARAMS)
    assert all(cycle.drafted == 0 for cycle in plain.cycles)
    assert "decoding plainly: a pass of 5 rows costs 6.0 plain steps here" in plain.fallbacks[-1]
    whole = session.generate(held_out[0], PARAMS, block_size=5)
    assert any(cycle.accepted for cycle in whole.cycles)
    assert whole.fallbacks == session.fallbacks
    assert whole.tokens == plain.tokens
    session.close()


def test_drafts_are_copied_where_the_size_is_chosen_and_never_at_a_size_that_was_named(
    held_out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cheap = Costs((8,), ((0.01, 0.012, 0.012, 0.012, 0.012),), 0.001)
    monkeypatch.setattr(calibrate, "costs", lambda *_: cheap)
    monkeypatch.setattr(LiveCosts, "observe", lambda *_: None)  # this machine's may say that no block pays
    session = load(EMBEDDED.target)
    chosen, named, plain = (
        [session.generate(text, SamplingParams(max_tokens=96), **options) for text in held_out[:4]]
        for options in ({}, {"block_size": 5}, {"speculative": False})
    )
    assert [r.tokens for r in chosen] == [r.tokens for r in named] == [r.tokens for r in plain]
    copied = [cycle for result in chosen for cycle in result.cycles if cycle.copied]
    assert any(cycle.accepted for cycle in copied)
    assert any(cycle.drafted and not cycle.copied for result in chosen for cycle in result.cycles)
    assert not any(cycle.copied for result in named for cycle in result.cycles)
    session.close()


def test_the_reply_ends_where_the_context_ends(pair: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = pair.encode("import os\n")
    monkeypatch.setattr(pair.target, "context_length", len(ids) + 7)
    assert len(pair.generate(ids).tokens) == 7
    assert pair.generate(ids, SamplingParams(max_tokens=50)).finish_reason == "length"
    monkeypatch.setattr(pair.target, "context_length", len(ids))
    with pytest.raises(UsageError, match=f"{len(ids)} tokens.*maximum context length is {len(ids)}"):
        pair.stream(ids)


def test_tokens_end_with_the_eos_and_text_does_not_contain_it(held_out: list[str]) -> None:
    session = load(EMBEDDED.target, dequantize=True)
    free = session.generate(held_out[0], PARAMS)
    end = 20
    session.tokenizer.add_eos_token(session.tokenizer.convert_ids_to_tokens(free.tokens[end]))
    for block_size in range(1, 6):
        result = session.generate(held_out[0], PARAMS, block_size=block_size)
        expected = free.tokens[: free.tokens.index(free.tokens[end]) + 1]
        assert result.tokens == expected
        assert result.finish_reason == "stop"
        assert result.text == session.tokenizer.decode(list(expected[:-1]))


# --- streams that end early ---------------------------------------------------------------------


def test_cancel_keeps_what_was_said_and_the_session_usable(pair: Session, held_out: list[str]) -> None:
    whole = pair.generate(held_out[0], PARAMS)
    seen: list[int] = []
    for number, event in enumerate(pair.stream(held_out[0], PARAMS)):
        seen += event.tokens
        if number == 3:
            pair.cancel()
    assert event == Finished(text=event.text, finish_reason="cancelled")
    assert seen == list(whole.tokens[: len(seen)])
    assert len(seen) < 48
    assert pair.generate(held_out[0], PARAMS).tokens == whole.tokens


def test_an_abandoned_stream_leaves_the_session_usable(pair: Session, held_out: list[str]) -> None:
    whole = pair.generate(held_out[0], PARAMS)
    stream = pair.stream(held_out[0], PARAMS)
    next(stream)
    next(stream)
    del stream
    assert pair.generate(held_out[0], PARAMS).tokens == whole.tokens


def test_streams_of_two_sessions_can_alternate(pair: Session, held_out: list[str]) -> None:
    other = load(EMBEDDED.target, dequantize=True)
    expected = [pair.generate(p, PARAMS).tokens for p in held_out[:2]]
    streams = [pair.stream(held_out[0], PARAMS), other.stream(held_out[1], PARAMS)]
    out: list[tuple[int, ...]] = [(), ()]
    running = [0, 1]
    while running:
        for i in list(running):
            event = next(streams[i])
            out[i] += event.tokens
            if isinstance(event, Finished):
                running.remove(i)
    assert out == expected


def test_characters_split_over_tokens_and_blocks_come_whole(
    pair: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "s = '你好 🙂 \u200d é'"
    ids = pair.encode(text)
    assert len(ids) > len(text)  # so some characters really are split

    def scripted(*_: object, take: Take, **__: object) -> Iterator[Event]:
        for event in (Prefilled((ids[0],)), *(Block((token,)) for token in ids[1:])):
            take(event.tokens)
            yield event
        yield Finished()

    monkeypatch.setattr(dflash_mlx.session, "decode", scripted)
    pieces = [event.text for event in pair.stream("x")]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


# --- loading ------------------------------------------------------------------------------------


def test_close_leaves_mlx_lms_model_as_it_was_loaded() -> None:
    session = load(EMBEDDED.target)
    model = session.target.model
    assert any(type(m).__name__.startswith("_") for m in model.modules())
    session.close()
    assert not any(type(m).__name__.startswith("_") for m in model.modules())


def test_on_the_cpu_a_cast_is_said(tmp_path: Path) -> None:
    assert load(EMBEDDED.target, dequantize=True).notes == ("target dequantized to float32",)
    assert load(EMBEDDED.target).notes == ("running on the CPU: target cast from bfloat16 to float32",)
    dtypes = {m.scales.dtype for m in load(EMBEDDED.target).target.model.modules() if "scales" in m}
    assert dtypes == {mx.float32}


@pytest.mark.parametrize(
    ("target", "drafter", "error", "message"),
    [
        ("/no/such/folder", None, ModelError, "neither a folder nor a hub id"),
        (EMBEDDED.drafter, "none", ModelError, "cannot load the target"),
        (None, EMBEDDED.target, ModelError, "not a DFlash drafter"),
        (EMBEDDED.drafter, None, PairError, "no drafter is known"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(
    target: str | None, drafter: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        load(target, drafter)
    assert "\n" not in str(caught.value)


def test_a_known_targets_drafter_is_fetched_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the embedded target stands for a public one, with a hub that has its drafter."""
    known = Pair(
        "owner/demo-target",
        "owner/demo-drafter",
        Shape("qwen3_5", 256, 4, 2048),
        revision=COMMIT,
    )
    monkeypatch.setattr("dflash_mlx.pairs.PUBLIC", (known,))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    target = shutil.copytree(EMBEDDED.target, tmp_path / "my-fine-tune")
    drafter = {path.name: path.read_bytes() for path in Path(EMBEDDED.drafter).iterdir()}
    reports: list[tuple[str, int, int]] = []
    with hub_server({"owner/demo-drafter": drafter}) as hub:
        hub.revisions = {COMMIT}
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        session = load(str(target), progress=lambda *report: reports.append(report))
    total = sum(map(len, drafter.values()))
    assert ("downloading owner/demo-drafter", total, total) in reports
    assert reports[-1][0] == "loading weights"
    assert f"owner/demo-drafter at commit {COMMIT}" in session.notes
    assert any("chosen by the target's shape; it was made for demo-target" in note for note in session.notes)
    tau = session.generate("import os\n", PARAMS, block_size=5).tau
    assert tau is not None
    assert tau > 1
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load(str(target)).drafter is not None  # the hub is gone, the cache is not


def test_damaged_weights_are_one_line(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EMBEDDED.target, tmp_path / "model"))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"cannot (read|load) the target") as caught:
        load(str(folder), "none")
    assert "\n" not in str(caught.value)


def test_draft_bits_are_validated() -> None:
    with pytest.raises(UsageError, match="draft_bits is 3"):
        load(EMBEDDED.target, draft_bits=3)


def test_without_a_drafter_only_blocks_of_one_row_are_offered(held_out: list[str]) -> None:
    session = load(EMBEDDED.target, drafter="none", dequantize=True)
    assert session.largest_block == 1
    with pytest.raises(UsageError, match="there is no drafter"):
        session.stream("x", block_size=2)
    assert session.generate("x = ", SamplingParams(max_tokens=4)).tau is None


# --- stop strings, thinking, threads --------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_a_stop_string_ends_text_tokens_and_usage_wherever_it_falls(
    pair: Session, held_out: list[str], block_size: int
) -> None:
    whole = pair.generate(held_out[0], PARAMS)
    for at in range(4, len(whole.text) - 6, 15):
        stop = whole.text[at : at + 3]
        result = pair.generate(held_out[0], SamplingParams(max_tokens=48, stop=[stop]), block_size=block_size)
        assert result.finish_reason == "stop"
        assert result.text == whole.text[: whole.text.index(stop)]
        assert result.tokens == whole.tokens[: len(result.tokens)]
        assert stop in pair.tokenizer.decode(list(result.tokens))
        assert stop not in pair.tokenizer.decode(list(result.tokens[:-1]))
        assert len(result.tokens) == 1 + sum(c.committed for c in result.cycles)


def test_another_thread_is_told_so_and_may_cancel(pair: Session, held_out: list[str]) -> None:
    caught: list[BaseException] = []

    def use() -> None:
        for use_it in (lambda: pair.generate("x"), lambda: next(stream)):
            try:
                use_it()
            except WrongThreadError as error:
                caught.append(error)

    stream = pair.stream(held_out[0], PARAMS)
    thread = threading.Thread(target=use)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert len(caught) == 2
    assert "belongs to the thread that loaded it" in str(caught[0])

    stream = pair.stream(held_out[0], PARAMS)
    next(stream)
    canceller = threading.Thread(target=pair.cancel)
    canceller.start()
    canceller.join()
    rest = list(stream)
    assert len(rest) == 1
    assert isinstance(rest[0], Finished)
    assert rest[0].finish_reason == "cancelled"
    assert len(pair.generate(held_out[0], PARAMS).tokens) == 48


def test_the_prefill_step_is_one_setting_for_every_path(held_out: list[str]) -> None:
    session = load(EMBEDDED.target, dequantize=True, prefill_step=8)
    ids = session.encode(held_out[0])
    stock = [
        r.token
        for r in stream_generate(
            session.target.model, session.tokenizer, ids, max_tokens=16, prefill_step_size=8
        )
    ]
    for speculative in (True, False):
        result = session.generate(ids, SamplingParams(max_tokens=16), speculative=speculative)
        assert list(result.tokens) == stock
    told = [(e.done, e.total) for e in session.stream(ids, PARAMS) if isinstance(e, Prefilling)]
    assert told == [(done, len(ids)) for done in range(8, len(ids) - 1, 8)]
    with pytest.raises(UsageError, match="prefill_step is 0"):
        load(prefill_step=0)


class Exhausted(Mixin):
    def __call__(self, *args: object, **kwargs: object) -> object:
        raise RuntimeError("[metal::malloc] Unable to allocate 99999999999 bytes.")


def test_a_failed_allocation_is_one_line_and_the_session_survives(pair: Session) -> None:
    before = pair.generate("x = ", SamplingParams(max_tokens=4)).tokens
    undo = attach(pair.target.model, Exhausted)
    with pytest.raises(OutOfMemoryError, match=r"out of memory: .*99999999999 bytes"):
        pair.generate("x = ", SamplingParams(max_tokens=4))
    undo()
    assert pair.generate("x = ", SamplingParams(max_tokens=4)).tokens == before


def test_reasoning_needs_messages_and_a_template_that_offers_it(pair: Session) -> None:
    with pytest.raises(UsageError, match="reasoning is 'low': it needs messages"):
        pair.stream("x", reasoning="low")
    with pytest.raises(UsageError, match="low"):
        pair.stream([{"role": "user", "content": "x"}], reasoning="low")


def test_one_request_with_damaged_weights_fails_alone(pair: Session) -> None:
    before = pair.generate("x = ", SamplingParams(max_tokens=6)).tokens
    norm = pair.target.model.model.norm
    weight, norm.weight = norm.weight, norm.weight * float("nan")
    with pytest.raises(NumericsError, match="target's logits are not finite"):
        pair.generate("x = ", SamplingParams(max_tokens=6))
    norm.weight = weight
    assert pair.generate("x = ", SamplingParams(max_tokens=6)).tokens == before
