"""The app in a real terminal: a pseudo-terminal, with pyte as its screen."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from urllib.request import urlopen

import ptyprocess
import pyte
import pytest

from chat import logs
from chat.fake_engine import FakeEngine
from dflash_mlx.pairs import EMBEDDED

CHAT = [sys.executable, "-m", "dflash_chat"]
PATIENCE = 120.0


def children(parent: int) -> list[int]:
    """The processes that this one started."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    pairs = (map(int, line.split()) for line in listed.splitlines())
    return [pid for pid, ppid in pairs if ppid == parent]


def lives(pid: int) -> bool:
    """Whether this process runs; one that ended and was not waited for does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")


class Terminal:
    """A program on a screen of 100 x 30."""

    def __init__(self, command: list[str], **env: str) -> None:
        base = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI")}
        base |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", **env}
        self.process = ptyprocess.PtyProcess.spawn(command, env=base, dimensions=(30, 100))
        self.screen = pyte.Screen(100, 30)
        self._stream = pyte.ByteStream(self.screen)
        self.output = b""
        self.children: list[int] = []

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def keys(self, keys: str) -> None:
        self.process.write(keys.encode())

    def until(self, true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < end, f"never happened: {what}\n{self.text}"
            self.read(0.1)

    def read(self, seconds: float) -> None:
        ready, _, _ = select.select([self.process.fd], [], [], seconds)
        if ready:
            try:
                data = self.process.read(65536)
            except EOFError:
                return
            self.output += data
            # pyte knows no private modes with several parts, which Textual asks for
            self._stream.feed(re.sub(rb"\x1b\[[<>=?][0-9;]*[a-zA-Z$]+", b"", data))
        if not self.children:
            self.children = children(self.process.pid)

    def ended(self) -> int:
        """Wait for its end."""
        self.until(lambda: not self.process.isalive(), "its end")
        while select.select([self.process.fd], [], [], 0.2)[0]:
            try:
                self.output += self.process.read(65536)
            except EOFError:
                break
        status: int = self.process.exitstatus
        return status


@pytest.fixture
def terminals() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(*options: str, **env: str) -> Terminal:
        opened.append(Terminal([*CHAT, *options], **env))
        return opened[-1]

    yield open_one
    for each in opened:
        for child in each.children:
            if lives(child):
                os.kill(child, signal.SIGKILL)
        each.process.close(force=True)


def test_the_prompt_is_there_first_and_what_is_typed_early_is_kept(
    engine: FakeEngine, terminals: Callable[..., Terminal]
) -> None:
    terminal = terminals("--url", engine.url)
    terminal.until(lambda: "❯" in terminal.text, "the first frame")
    assert "dflash-chat" not in terminal.text
    terminal.keys("early")
    terminal.keys("\r")
    terminal.until(lambda: "Hello." in terminal.text, "the reply to what was typed early")
    assert engine.requests[0]["messages"][0]["content"] == "early"
    terminal.keys("a\x1b[13;2ub\nc")  # ⇧⏎ of a terminal that tells it from ⏎, and ^j
    terminal.until(lambda: " c" in terminal.text, "three lines")
    terminal.keys("\r")
    terminal.until(lambda: len(engine.requests) == 2, "the second message")
    assert engine.requests[1]["messages"][-1]["content"] == "a\nb\nc"
    terminal.keys("\x11")
    assert terminal.ended() == 0
    assert b"chat saved in " in terminal.output


def test_no_colour_means_none(engine: FakeEngine, terminals: Callable[..., Terminal]) -> None:
    engine.replies = [logs.compose(logs.CODE)]
    terminal = terminals("--url", engine.url, NO_COLOR="1")
    terminal.until(lambda: "ready" in terminal.text, "ready")
    terminal.keys("question\r")
    terminal.until(lambda: "steps" in terminal.text, "the reply")
    terminal.keys("\x11")
    assert terminal.ended() == 0
    colours = re.findall(rb"\x1b\[[0-9;]*[34]8;2;(\d+);(\d+);(\d+)", terminal.output)
    assert {len(set(colour)) for colour in colours} <= {1}, "greys only"


def test_a_hostile_reply_sends_no_control_sequence(
    engine: FakeEngine, terminals: Callable[..., Terminal]
) -> None:
    engine.replies = [logs.compose(logs.HOSTILE)]
    terminal = terminals("--url", engine.url)
    terminal.until(lambda: "ready" in terminal.text, "ready")
    terminal.keys("question\r")
    terminal.until(lambda: "to first token" in terminal.text, "the reply")
    terminal.keys("\x11")
    terminal.ended()
    assert b"\x1b]52" not in terminal.output
    assert "\u202e".encode() not in terminal.output


def test_end_to_end_with_the_embedded_pair(terminals: Callable[..., Terminal]) -> None:
    terminal = terminals("--model", EMBEDDED.target, "--block-size", "5")
    terminal.until(lambda: "● ready" in terminal.text, "the engine is ready")
    [child] = terminal.children
    found = re.search(r"http://127\.0\.0\.1:\d+", terminal.text)
    assert found is not None
    terminal.keys("/set max_tokens 48\r")
    terminal.until(lambda: "max_tokens 48" in terminal.text, "a limit, because this model never ends")
    terminal.keys("def fibonacci(n):\r")
    summary = r"([\d.]+) tok/s · ([\d.]+) accepted"
    terminal.until(lambda: re.search(summary, terminal.text), "a whole reply")
    speed = re.search(summary, terminal.text)
    assert speed is not None
    assert float(speed[1]) > 0
    with urlopen(f"{found[0]}/metrics") as answer:
        metrics = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
    assert float(speed[2]) == pytest.approx(float(metrics["dflash_acceptance_length"]), abs=0.051)

    terminal.keys("/set max_tokens default\r")
    terminal.keys("class Stack:\r")
    terminal.until(lambda: "generating" in terminal.text, "the second reply")
    terminal.keys("\x1b")
    terminal.until(lambda: "stopped · " in terminal.text, "esc stops it")
    terminal.keys("\x11")
    assert terminal.ended() == 0
    assert not lives(child)

    again = terminals("-c")
    again.until(lambda: "def fibonacci(n):" in again.text or "class Stack:" in again.text, "the chat is back")
    again.until(lambda: again.children, "its engine")
    [child] = again.children
    os.kill(again.process.pid, signal.SIGKILL)
    again.until(lambda: not lives(child), "the engine ends with its chat")
