"""The chat without a terminal: lines in, lines out, one summary per turn; real processes, a real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chat import logs
from chat.fake_engine import FakeEngine

CHAT = [sys.executable, "-m", "dflash_chat"]


def chat(engine: FakeEngine, said: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*CHAT, "--url", engine.url, *options]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=60, check=False)


def test_a_conversation_through_a_pipe_and_its_continuation(engine: FakeEngine, tmp_path: Path) -> None:
    engine.replies = [logs.compose(logs.CODE), logs.compose("Second."), logs.compose("Third.\n", "hm")]
    done = chat(engine, "/set temp 0\nfirst question\n\nsecond\n/quit\nnever sent\n")
    assert (done.returncode, done.stdout) == (0, logs.CODE + "Second.\n")
    summaries = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(summaries) == 2
    assert "122 tokens · 147 tok/s · 3.67 accepted per block" in summaries[0]
    assert engine.requests[1]["temperature"] == 0
    assert "chat saved in " in done.stderr

    again = chat(engine, "third", "-c")
    assert again.stdout == "Third.\n"
    assert "hm" in again.stderr
    assert [message["content"] for message in engine.requests[2]["messages"]] == [
        "first question",
        logs.CODE,
        "second",
        "Second.",
        "third",
    ]


def test_plain_commands(engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "x.md"
    said = f"/retry\n/system rhyme\n/think low\nask\n/retry\n/save {file}\n/save {file}\n"
    said += "/set seed x\n/tokens\n/help\n"
    done = chat(engine, said, "--temp")
    assert done.stdout == "Hello.\nHello.\n"
    assert [message["role"] for message in engine.requests[1]["messages"]] == ["system", "user"]
    assert engine.requests[1]["reasoning_effort"] == "low"
    for line in (
        "/retry does not work",
        "is there already",
        "whole number",
        "/tokens does not work",
        "/quit",
    ):
        assert line in done.stderr
    assert "chat saved" not in done.stderr
    assert "Hello." in file.read_text()


def test_a_failure_is_the_exit_code(engine: FakeEngine) -> None:
    engine.refuse = [(400, {}, "no")]
    done = chat(engine, "question\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "[failed: HTTP 400: no]" in done.stderr


def test_bytes_that_are_no_text_end_nothing(engine: FakeEngine) -> None:
    done = subprocess.run(
        [*CHAT, "--url", engine.url, "--plain"],
        input=b"caf\xe9\n",
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"Hello.\n")
    assert engine.requests[0]["messages"][0]["content"] == "caf\ufffd"


def test_an_address_that_cannot_be_used_is_a_failure_in_one_line() -> None:
    command = [*CHAT, "--url", "http://a_☃", "--plain"]
    done = subprocess.run(command, input="hi\n", capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    [failed] = [line for line in done.stderr.splitlines() if "chat saved" not in line]
    assert failed.startswith("[failed: the engine cannot be asked: InvalidURL: ")


def test_a_chat_that_cannot_be_saved_goes_on(engine: FakeEngine, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "dflash-chat"
    folder.mkdir(parents=True)
    (folder / "sessions").write_text("")
    done = chat(engine, "one\ntwo\n")
    assert (done.returncode, done.stdout) == (0, "Hello.\nHello.\n")
    assert done.stderr.count("error: this chat cannot be saved: ") == 1
    assert len(engine.requests[1]["messages"]) == 3


def test_a_log_that_cannot_be_written_is_an_error_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "dflash-chat"
    folder.mkdir(parents=True)
    (folder / "logs").write_text("")
    done = subprocess.run(
        [*CHAT, "--plain"], input="", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: cannot start the engine with its log ")
    assert line.endswith((": Not a directory", ": File exists"))


def test_control_characters_are_left_out(engine: FakeEngine) -> None:
    engine.replies = [logs.compose(logs.HOSTILE, logs.HOSTILE)]
    done = chat(engine, "question\n")
    assert "\x1b" not in done.stdout + done.stderr
    assert "\u202e" not in done.stdout + done.stderr


def test_ctrl_c_stops_the_reply_then_the_chat(engine: FakeEngine, tmp_path: Path) -> None:
    engine.replies = [logs.compose(logs.PROSE)]
    engine.hold = 12
    command = [*CHAT, "--url", engine.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdin.write(b"question\n")
        running.stdin.flush()
        assert running.stdout.read(10) == logs.PROSE.encode()[:10]
        os.kill(running.pid, signal.SIGINT)
        while not (line := running.stderr.readline().decode()).startswith("["):
            assert line
        assert line.startswith("[stopped · ")
        os.kill(running.pid, signal.SIGINT)
        assert running.wait(20) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "x"], "--url uses a server that runs already"),
        (["--temp", "-c"], "--temp keeps nothing"),
        (["--session", "nope"], "there is no chat 'nope'"),
    ],
)
def test_options_that_contradict_are_refused(options: list[str], said: str, engine: FakeEngine) -> None:
    done = chat(engine, "", *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
