"""The options that every command which loads a pair shares."""

import argparse
import inspect

import pytest
from dflash_chat import cli

from dflash_mlx import load
from dflash_mlx.options import add_pair_options, given, pair_settings

NAMED = ["--model", "m", "--draft", "d", "--revision", "r", "--draft-revision", "s", "--adapter", "a"]
ALL = [*NAMED[:4], "--numerics", "fast", "--draft-bits", "4", *NAMED[4:], "--dequantize"]


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_pair_options(parser)
    return parser.parse_args(words)


def test_load_takes_them_all() -> None:
    settings = pair_settings(parsed(ALL))
    assert settings.items() >= {"target": "m", "drafter": "d", "draft_bits": 4, "dequantize": True}.items()
    assert settings.keys() <= inspect.signature(load).parameters.keys()
    defaults = pair_settings(parsed([]))
    assert defaults == {name: inspect.signature(load).parameters[name].default for name in defaults}


def test_what_was_given_can_be_given_again() -> None:
    assert given(parsed(ALL)) == ALL
    assert given(parsed(["--numerics", "exact"])) == []
    assert given(parsed(["--model", "m", "--dequantize"]), but="model") == ["--dequantize"]


@pytest.mark.parametrize("option", ["--adapter a", "--dequantize", "--numerics fast", "--block-size 3"])
def test_a_chat_with_a_running_server_cannot_choose_what_it_loads(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--url", "http://127.0.0.1:9", *option.split()]) == 2
    assert f"leave out {option.split()[0]}" in capsys.readouterr().err
