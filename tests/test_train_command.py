"""`python -m dflash_mlx.train` from end to end on a tiny target, killed and refused in every way."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5
from train_tiny import DRAFTER, TARGET
from zoo import zoo_config, zoo_model

from dflash_mlx.drafter.load import load_drafter
from dflash_mlx.errors import UsageError
from dflash_mlx.events import Block
from dflash_mlx.interval import Interval
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.result import Result
from dflash_mlx.target import Target
from dflash_mlx.train import __main__ as train_main
from dflash_mlx.train import check, stages
from dflash_mlx.train.__main__ import main
from dflash_mlx.train.card import render_card
from dflash_mlx.train.check import EndToEnd
from dflash_mlx.train.evaluate import DraftReport
from dflash_mlx.train.job import Job

VOCAB = 2048  # of the embedded target, whose tokenizer this one borrows


@pytest.fixture(scope="module", autouse=True)
def short_checks() -> Iterator[None]:
    """A random drafter is right once in two thousand times: two prompts show that as well as eighty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "CHECKED", 2)
        patch.setattr(stages, "MEASURED", 2)
        patch.setattr(check, "MAX_TOKENS", 12)
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**TARGET, "vocab_size": VOCAB, "eos_token_id": 0}
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    return saved(model, config, tmp_path_factory.mktemp("target"))


def saved(model: nn.Module, config: dict[str, Any], folder: Path) -> Path:
    """As a folder that mlx-lm loads, with the embedded target's tokenizer."""
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((Path(EMBEDDED.target) / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few, and of one length: a handful is held out, the others are one batch."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"def f{i:03d}(x):"}) for i in range(100, 160)]
    file.write_text("\n".join(lines))
    return file


def small(target: Path, out: Path, prompts: Path) -> list[str]:
    settings = ["--tokens", "3000", "--layers", "1", "--block-size", "4", "--rank", "4", "--epochs", "1"]
    return ["--model", str(target), "--out", str(out), "--prompts", str(prompts), *settings]


@pytest.fixture(scope="module")
def trained(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that nothing disturbed."""
    out = tmp_path_factory.mktemp("trained") / "drafter"
    assert main(small(target, out, prompts)) == 0
    return out


def test_the_result_is_a_drafter_in_the_public_layout_with_a_card_and_curves(trained: Path) -> None:
    assert load_drafter(trained).config.block_size == 4
    assert {file.name for file in trained.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
        "curves.svg",
        "work",
    }
    card = (trained / "README.md").read_text()
    results = json.loads((trained / "work" / "check.json").read_text())
    assert f"tau {results['walked']['tau']:.2f}" in card
    assert "speed over plain [95 %]" in card
    for name, result in results["end_to_end"].items():
        assert set(result["speedup"]) == {"mean", "low", "high"}
        assert result["identical"] == result["prompts"], name
        assert result["tau"] >= 1  # whole blocks, whatever is fastest here
    assert (trained / "curves.svg").read_text().count("<polyline") == 1 + 1 + 3


def shards(out: Path) -> list[Path]:
    return list((out / "work" / "responses").glob("train-*.safetensors"))


def held_out(out: Path) -> bool:
    return bool(list((out / "work" / "responses").glob("held_out-*.safetensors")))


def checkpoint(out: Path) -> bool:
    return (out / "work" / "checkpoint.safetensors").exists()


def fitted(out: Path) -> bool:
    return (out / "work" / "fitted.json").exists()


@pytest.mark.parametrize("reached", [held_out, checkpoint, fitted])
def test_a_killed_training_goes_on_to_the_same_drafter(
    target: Path, prompts: Path, trained: Path, tmp_path: Path, reached: Callable[[Path], bool]
) -> None:
    out = tmp_path / "drafter"
    command = [sys.executable, "-m", "dflash_mlx.train", *small(target, out, prompts)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 600
        while not reached(out):
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert main(["--out", str(out), "--resume"]) == 0
    assert (out / "config.json").read_bytes() == (trained / "config.json").read_bytes()
    assert (out / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


def test_stages_run_alone_and_in_order_only(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drafter"
    assert main([*small(target, out, prompts), "--stage", "fit"]) == 2
    assert "run the generate stage first" in capsys.readouterr().err
    assert main(["--out", str(out), "--resume", "--stage", "check"]) == 2
    assert "run the fit stage first" in capsys.readouterr().err
    assert main(["--out", str(out), "--resume", "--stage", "generate"]) == 0
    assert capsys.readouterr().out.endswith(f"the responses are in {out / 'work' / 'responses'}\n")
    assert shards(out)
    assert not checkpoint(out)


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that a refused command prints."""
    assert main([str(word) for word in argv]) != 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]


def test_an_existing_training_is_neither_overwritten_nor_changed(
    target: Path, prompts: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained / "model.safetensors").read_bytes()
    assert "--resume" in refused(capsys, *small(target, trained, prompts))
    changed = refused(capsys, "--out", trained, "--resume", "--layers", 3)
    assert "layers is 3, but this training began with 1" in changed
    assert (trained / "model.safetensors").read_bytes() == before
    assert "holds no training to resume" in refused(capsys, "--out", tmp_path / "none", "--resume")
    assert "leave it out with --resume" in refused(capsys, "--out", trained, "--resume", "--hours", 1)


def test_a_model_is_not_overwritten(
    target: Path, prompts: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target itself, a finished drafter whose work folder is gone, and weights of any name."""
    before = (target / "model.safetensors").read_bytes()
    assert f"{target} holds a model already" in refused(capsys, *small(target, target, prompts))
    assert (target / "model.safetensors").read_bytes() == before
    for name, as_name in (("config.json", "config.json"), ("model.safetensors", "weights-1.safetensors")):
        folder = tmp_path / name
        copy(trained / name, folder / as_name)
        assert "pass another --out" in refused(capsys, *small(target, folder, prompts))


def test_replies_that_are_too_short_are_refused_before_the_long_part(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every second token ends a reply, so none is 32 tokens long."""
    folder, out = tmp_path / "target", tmp_path / "drafter"
    shutil.copytree(target, folder)
    config = {**TARGET, "vocab_size": VOCAB, "eos_token_id": list(range(0, VOCAB, 2))}
    (folder / "config.json").write_text(json.dumps(config))
    begin = [*small(folder, out, prompts), "--block-size", "32"]
    assert "too few to measure blocks of 32" in refused(capsys, *begin)
    assert held_out(out)
    assert not shards(out)
    copy(next((out / "work" / "responses").glob("held_out-*")), out / "work/responses/train-0000.safetensors")
    line = refused(capsys, "--out", out, "--resume", "--stage", "fit")
    assert "too few to measure blocks of 32" in line


def test_a_prompt_that_leaves_no_room_for_a_reply_is_refused(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "target", tmp_path / "drafter"
    shutil.copytree(target, folder)
    config = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 170}))
    file = tmp_path / "long.jsonl"
    file.write_text(prompts.read_text() + "\n" + json.dumps({"prompt": "x = 1\n" * 10}))
    line = refused(capsys, *small(folder, out, file))
    assert "the prompt that begins 'x = 1" in line
    assert "context is 170" in line
    assert not out.exists()


def test_the_plan_is_made_with_the_prompts_of_the_file(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def planned(job: object, target: object, config: object, prompts: list[int], out: object) -> None:
        lengths.extend(prompts)
        raise UsageError("planned")

    monkeypatch.setattr(train_main, "plan", planned)
    file = tmp_path / "prompts.jsonl"
    texts = ["x" * (1 + 10 * (n == 59)) for n in range(60)]
    groups = [json.dumps({"prompt": text, "group": str(n)}) for n, text in enumerate(texts)]
    file.write_text("\n".join(groups))
    assert "planned" in refused(capsys, *small(target, tmp_path / "drafter", file))
    assert len(lengths) == 60
    assert max(lengths) == lengths[59] > lengths[0]
    lengths.clear()
    assert "planned" in refused(capsys, "--model", target, "--out", tmp_path / "drafter")
    assert len(lengths) == stages.SAMPLED


def test_the_check_counts_what_was_committed_and_leaves_json() -> None:
    """Also where one prompt gives no interval, and where there was nothing to time."""

    def result(tokens: int, seconds: float, *cycles: Block) -> Result:
        return Result(tuple(range(tokens)), "", "", "stop", 1, cycles, 0.1, seconds, 0, ())

    class Session:
        largest_block = 4

        def generate(self, prompt: list[int], *_: object, speculative: bool, **__: object) -> Result:
            # The last cycle accepted all three drafts, and the reply ended at the first.
            cycles = (Block((1, 2, 3, 4), drafted=3, accepted=3), Block((5,), drafted=3, accepted=3))
            return result(prompt[0], 0.5 if speculative else 1.0, *(cycles if speculative else ()))

    def checked(*tokens: int) -> EndToEnd:
        return check.end_to_end(Session(), [[count] for count in tokens], lambda line: None)  # type: ignore[arg-type]

    assert checked(6).tau == 2.5
    assert checked(6, 6, 1).to_json() == {
        "prompts": 3,
        "tau": 2.5,
        "identical": 3,
        "speedup": {"mean": 2.0, "low": 2.0, "high": 2.0},
    }
    assert checked(6).to_json()["speedup"] == {"mean": 2.0, "low": 0.0, "high": None}
    assert checked(1).to_json()["speedup"] is None


def test_the_card_of_the_first_generation_says_nothing_of_a_selector() -> None:
    walked = DraftReport(2.0, 1.5, 1.8, 0.5, (0.5, 0.3), (0.8, 0.7), 100)
    ended = {
        "prompts": EndToEnd(3, 2.0, 3, Interval(1.5, 1.25, 1.75)),
        "others": EndToEnd(1, 1.0, 1, None),
    }
    facts = {"train_responses": 9, "train_tokens": 99, "points": [{"step": 1, "tokens": 1}]}
    first, second = (
        render_card(Job("owner/target", start="owner/drafter"), config, facts, walked, ended)
        for config in (replace(DRAFTER, selector_rank=0, conv_kernel_size=0, selector_top_k=0), DRAFTER)
    )
    assert first.startswith("# DFlash drafter for owner/target\n")
    assert "selector" not in first
    assert second.startswith("# DFlash 2 drafter for owner/target\n")
    assert "candidate selector of rank 4" in second
    assert "1.50 without the candidate selector" in second
    assert "speed over plain [95 %] |" in second
    assert "| 3 prompts | 2.00 | 3 | 1.50x [1.25, 1.75] |" in second
    assert "| 1 others | 1.00 | 1 | - |" in second


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tokens", 10, "tokens is 10"),
        ("--layers", 0, "layers is 0"),
        ("--block-size", 1, "block_size is 1"),
        ("--block-size", 33, "block_size is 33: it must be at most 32"),
        ("--epochs", -1, "epochs is -1.0"),
        ("--epochs", "nan", "epochs is nan"),
        ("--epochs", "inf", "epochs is inf"),
        ("--hours", -1, "hours is -1.0"),
        ("--hours", "nan", "hours is nan"),
        ("--hours", "inf", "hours is inf"),
        ("--prompts", "/nowhere.jsonl", "cannot read prompts from /nowhere.jsonl"),
        ("--prompts", "bad.jsonl", 'bad.jsonl, line 2 must be an object with either "prompt" or "messages"'),
        ("--prompts", "few.jsonl", "1 prompts are too few to train on some and measure on others"),
        ("--model", "/nowhere", "'/nowhere' is neither a folder nor a hub id"),
    ],
)
def test_bad_settings_are_named_before_anything_starts(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    value: object,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"prompt": "fine"}\n{"text": "x"}\n')
    Path("few.jsonl").write_text('{"prompt": "fine"}\n')
    out = tmp_path / "drafter"
    assert message in refused(capsys, "--model", target, "--out", out, option, value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3n", "this target's layers hand on rows of shape"),
        ("llama4", "cache 0 of this target is a ChunkedKVCache, which cannot be rolled back"),
    ],
)
def test_a_target_that_cannot_be_speculated_on_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, reason: str
) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    saved(zoo_model(family), {**zoo_config(family), "model_type": family}, folder)
    out = tmp_path / "drafter"
    assert reason in refused(capsys, "--model", folder, "--out", out)
    assert not out.exists()


def test_a_target_whose_head_is_given_more_than_a_norms_output_is_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "norm", None)
    out = tmp_path / "drafter"
    assert "no drafter can be trained for this family" in refused(capsys, "--model", target, "--out", out)
    assert not out.exists()


def test_a_plan_that_cannot_fit_is_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drafter"
    line = refused(capsys, "--model", target, "--out", out, "--tokens", 10**12)
    assert "are free: ask for fewer --tokens" in line
    assert not out.exists()


def test_a_folder_that_cannot_be_made(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write under" in refused(capsys, *small(target, tmp_path / "file" / "drafter", prompts))


@contextmanager
def full_disk(left: int) -> Iterator[None]:
    """A limit on the size of files stands for the disk: writing beyond it fails in the same way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("stage", "left"), [("generate", 60_000), ("fit", 60_000), ("check", 60)])
def test_a_full_disk_is_one_clear_error_and_nothing_is_lost(
    target: Path,
    prompts: Path,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    left: int,
) -> None:
    out = tmp_path / "drafter"
    done = {"generate": (), "fit": ("responses",), "check": ("responses", "fitted.json")}[stage]
    if done:
        for name in ("job.json", *done):
            copy(trained / "work" / name, out / "work" / name)
    if stage == "check":
        for name in ("config.json", "model.safetensors"):
            copy(trained / name, out / name)
    begin = ["--out", str(out), "--resume"] if done else small(target, out, prompts)
    with full_disk(left):
        line = refused(capsys, *begin)
    assert "cannot write under" in line
    assert "--resume" in line
    assert main(["--out", str(out), "--resume"]) == 0
    assert (out / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert (out / "README.md").exists()


def copy(source: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, to)
    else:
        shutil.copy(source, to)


def test_a_job_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "work").mkdir()
    for text in ("{", "[]", '{"model": "x", "size": 3}'):
        (tmp_path / "work" / "job.json").write_text(text)
        assert "job.json: " in refused(capsys, "--out", tmp_path, "--resume")


def test_going_on_from_a_drafter(
    target: Path, prompts: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", target, "--from", trained, "--prompts", prompts, "--tokens", 1000]
    assert "leave out layers" in refused(capsys, *arguments, "--out", tmp_path / "a", "--layers", 1)
    assert main([str(word) for word in [*arguments, "--out", tmp_path / "b", "--epochs", 0.1]]) == 0
    ours, theirs = load_drafter(tmp_path / "b"), load_drafter(trained)
    assert ours.config == theirs.config
    change = np.abs(np.array(ours.fc.weight) - np.array(theirs.fc.weight)).max()
    assert 0 < change < 0.01


def test_a_drafter_of_another_target_is_no_start(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "--model", target, "--from", EMBEDDED.drafter, "--out", tmp_path / "drafter")
    assert "hidden size" in line
