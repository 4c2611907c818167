"""The small pure parts: history, commands, figures, clipboard, addresses."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from dflash_chat import clipboard, commands, figures
from dflash_chat.cli import address
from dflash_chat.history import History

from dflash_mlx.errors import UsageError


def test_history_keeps_the_draft() -> None:
    history = History(lambda: ["old"])
    history.add("new")
    assert history.back("draft") == "new"
    assert history.back("new") == "old"
    assert history.back("old") is None
    assert history.forward() == "new"
    assert history.forward() == "draft"
    assert history.forward() is None
    history.add("newer")
    assert history.back("") == "newer"


def test_history_shows_a_prompt_once() -> None:
    history = History(lambda: ["a", "b"])
    history.add("a")
    assert [history.back(""), history.back(""), history.back("")] == ["a", "b", None]


def test_changing_an_entry_makes_it_the_draft() -> None:
    history = History(lambda: ["a", "b"])
    assert history.back("") == "b"
    history.leave()
    assert history.back("b changed") == "b"
    assert history.forward() == "b changed"


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("/save x y.md", ("save", "x y.md")),
        ("/new", ("new", "")),
        ("  /new ", ("new", "")),
        ("/etc/hosts is a file", None),
        ("hello /new", None),
        ("/new\nline", None),
        ("/", ("", "")),
    ],
)
def test_what_is_a_command(text: str, typed: tuple[str, str] | None) -> None:
    assert commands.typed(text) == typed


def test_suggestions_begin_like_what_is_typed() -> None:
    assert [each.name for each in commands.suggestions("/s")] == ["save", "system", "set", "stats"]
    assert commands.suggestions("/s x") == commands.suggestions("s") == []
    assert len(commands.suggestions("/")) == len(commands.SLASH)


@pytest.mark.parametrize(
    ("argument", "meaning"),
    [("temp 0.7", ("temperature", 0.7)), ("seed 3", ("seed", 3)), ("temp default", ("temperature", None))],
)
def test_options(argument: str, meaning: tuple[str, float | None]) -> None:
    assert commands.option(argument) == meaning


@pytest.mark.parametrize(
    "argument",
    ["temp", "temp x", "seed 1.5", "tempo 1", "", "temp nan", "top_p inf", "temp 1e999", f"seed {10**400}"],
)
def test_options_that_make_no_sense_say_so(argument: str) -> None:
    with pytest.raises(ValueError, match=r"/set"):
        commands.option(argument)


def test_keys_and_names_are_unique() -> None:
    keys = [each.key for each in commands.COMMANDS if each.key]
    names = [each.name for each in commands.COMMANDS if each.name]
    assert len(set(keys)) == len(keys)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.31, "0.31 s"),
        (4.14, "4.1 s"),
        (38.2, "38 s"),
        (125, "2 min 05 s"),
        (0.997, "1.0 s"),
        (59.7, "1 min 00 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert figures.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(612, "612"), (1800, "1.8k"), (32768, "32.8k"), (131072, "131k"), (2e6, "2M"), (0, "0")],
)
def test_counts(value: float, text: str) -> None:
    assert figures.count(value) == text


def test_bars_and_sparklines() -> None:
    assert figures.bar(1, 3) == "███"
    assert figures.bar(0.5, 3) == "█▌"
    assert figures.bar(0.001, 3) == "▏"
    assert figures.bar(0, 3) == ""
    assert figures.sparkline([1, 0, 4, 8], 3) == " ▅█"
    assert figures.sparkline([0, 0], 3) == figures.sparkline([], 3) == ""


def test_speeds_sizes_and_ages() -> None:
    assert [figures.speed(v) for v in (99.94, 99.96, 7.123)] == ["99.9", "100", "7.1"]
    assert [figures.size(v) for v in (11.2e9, 36e9, 63e6)] == ["11.2 GB", "36.0 GB", "63 MB"]
    assert [figures.ago(v) for v in (5, 300, 7200, 9e5)] == ["now", "5 min", "2 h", "10 d"]
    assert figures.plural(1, "turn") == "1 turn"
    assert figures.plural(1204, "turn") == "1 204 turns"
    assert figures.shorten("a  b\nc", 4) == "a b…"


def program(folder: Path, name: str, code: int) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\ncat > {folder}/{name}.in\nexit {code}\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("platform", "env", "programs", "how"),
    [
        ("darwin", {}, {"pbcopy": 0}, "pbcopy"),
        ("darwin", {"SSH_TTY": "1"}, {"pbcopy": 0}, "OSC 52"),
        ("linux", {"WAYLAND_DISPLAY": "w"}, {"wl-copy": 0}, "wl-copy"),
        ("linux", {"DISPLAY": ":0"}, {"xclip": 0}, "xclip"),
        ("linux", {"DISPLAY": ":0", "TMUX": "t"}, {"xclip": 1, "tmux": 0}, "tmux"),
        ("linux", {"SSH_TTY": "1", "TMUX": "t"}, {"tmux": 0}, "tmux"),
        ("linux", {"DISPLAY": ":0"}, {}, "OSC 52"),
        ("linux", {}, {}, "OSC 52"),
    ],
)
def test_copying_says_which_way_worked(
    platform: str,
    env: dict[str, str],
    programs: dict[str, int],
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, code in programs.items():
        program(tmp_path, name, code)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    written: list[str] = []
    said = clipboard.copy("tëxt", written.append, tmp_path, {**env, "PATH": str(tmp_path)})
    assert how in said
    if how == "OSC 52":
        assert written == [f"\x1b]52;c;{base64.b64encode('tëxt'.encode()).decode()}\a"]
    else:
        assert not written
        assert (tmp_path / f"{how}.in").read_text() == "tëxt"


@pytest.mark.parametrize("terminal", [True, False])
def test_what_no_clipboard_takes_goes_to_a_file(terminal: bool, tmp_path: Path) -> None:
    text = "x" * 100_000 if terminal else "short"
    said = clipboard.copy(text, (lambda _: None) if terminal else None, tmp_path, {})
    assert str(tmp_path / "copied.txt") in said
    assert (tmp_path / "copied.txt").read_text() == text


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8765", "127.0.0.1:8765", "http://127.0.0.1:8765/v1", "http://127.0.0.1:8765/v1/"],
)
def test_addresses(url: str) -> None:
    assert address(url) == "http://127.0.0.1:8765"


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "http://x/y", "http://x:port", "http://", "http://x?y=1", "http://[::1"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--url"):
        address(url)
