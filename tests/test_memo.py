"""What is remembered about a machine comes back for exactly its key, and never breaks a run."""

import json
from pathlib import Path

import pytest

from dflash_mlx.memo import cache_folder, recall, remember

KEY = {"chip": "applegpu_g15s", "mlx": "0.32.4"}


def test_comes_back_for_its_key_only(tmp_path: Path) -> None:
    remember("curve", KEY, [1.0, 2.5], tmp_path)
    assert recall("curve", KEY, tmp_path) == [1.0, 2.5]
    assert recall("curve", {**KEY, "mlx": "0.32.5"}, tmp_path) is None
    assert recall("selftest", KEY, tmp_path) is None


def test_the_last_word_counts(tmp_path: Path) -> None:
    remember("curve", KEY, 1, tmp_path)
    remember("curve", KEY, 2, tmp_path)
    assert recall("curve", KEY, tmp_path) == 2
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", json.dumps({"key": {"chip": "other"}, "value": 1}), "\x00"]
)
def test_a_damaged_file_counts_as_unknown(tmp_path: Path, damage: str) -> None:
    remember("curve", KEY, 1, tmp_path)
    [file] = tmp_path.iterdir()
    file.write_text(damage)
    assert recall("curve", KEY, tmp_path) is None


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    remember("curve", KEY, 1, blocked / "cache")
    assert recall("curve", KEY, blocked / "cache") is None


def test_tests_have_a_folder_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert cache_folder().is_relative_to(tmp_path_factory.getbasetemp().parent)
