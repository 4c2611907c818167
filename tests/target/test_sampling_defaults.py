"""How a model's makers sample from it, as its folder says."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.params import SamplingParams
from dflash_mlx.target.load import sampling_defaults


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingParams()),
        ({"eos_token_id": 3, "top_p": None}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams()),
        ({"do_sample": True}, SamplingParams(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0},
            SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
        ),
        (
            {"temperature": 0.7, "repetition_penalty": 1.05},
            SamplingParams(temperature=0.7, repetition_penalty=1.05),
        ),
    ],
)
def test_what_it_says_is_the_default(
    tmp_path: Path, config: dict[str, Any], expected: SamplingParams
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_defaults(tmp_path) == (expected, ())


def test_what_makes_no_sense_is_said_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_p": 7, "top_k": "many"}')
    params, notes = sampling_defaults(tmp_path)
    assert params == SamplingParams(temperature=0.5)
    assert [note.partition(": ")[2].split()[0] for note in notes] == ["top_p", "top_k"]


@pytest.mark.parametrize("text", [None, "", "[1]", "{", "\x00"])
def test_without_a_file_that_can_be_read_it_is_greedy(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert sampling_defaults(tmp_path) == (SamplingParams(), ())
