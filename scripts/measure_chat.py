"""What the screen costs while a 10k-token code reply streams at 200 tokens a second.

    PYTHONPATH=tests python scripts/measure_chat.py [--tokens 10000] [--rate 200]

The app runs in a pseudo-terminal of 100 x 30 against a server process that replays a composed log and notes
when each chunk could be written. Reports the app's processor time, how far its screen lags behind the server
for the first and the last 500 tokens, and how much longer the server took than with a client that draws
nothing.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import httpx
import ptyprocess
from chat import logs
from chat.fake_engine import FakeEngine

SERVE = "serve"  # how the script starts itself as the server


def code_reply(tokens: int) -> list[logs.Chunk]:
    """Chunks of a reply that is one long Python file; every third line carries its number."""
    lines, count = ["```python"], 2
    while count < tokens:
        number = len(lines)
        lines.append(
            "    return x * 2 + 1" if number % 3 else f"def step(x: int) -> int:  # line {number} of it"
        )
        count += len(logs.pieces("\n" + lines[-1]))
    return logs.compose("\n".join([*lines, "```\n"]))


def due(chunks: Sequence[logs.Chunk], rate: float) -> list[float]:
    """Seconds after the beginning at which each chunk is sent: when the tokens before it had their time."""
    counts = (len(chunk.get("dflash", {}).get("tokens", ())) for chunk in chunks)
    return [total / rate for total in accumulate(counts)]


def numbers_due(chunks: Sequence[logs.Chunk], rate: float) -> dict[int, float]:
    """When each numbered line is complete."""
    text, found = "", {}
    for chunk, moment in zip(chunks, due(chunks, rate), strict=True):
        text += "".join(logs.texts([chunk]))
        for number in re.findall(r"line (\d+) of it\n", text):
            found[int(number)] = moment
        text = text[text.rfind("\n") :]
    return found


def serve() -> None:
    """In a process of its own: replay at the rate asked for, print when each reply began and ended."""
    chunks = code_reply(int(sys.argv[2]))
    engine = FakeEngine(chunks)
    moments = due(chunks, float(sys.argv[3]))
    start = 0.0

    def wait(number: int) -> bool:
        nonlocal start
        now = time.monotonic()
        start = start if number else now
        time.sleep(max(0.0, start + moments[number] - now))
        if number == len(moments) - 1:
            print(json.dumps([start, time.monotonic()]), flush=True)
        return True

    engine.wait = wait  # type: ignore[method-assign]
    print(engine.url, flush=True)
    sys.stdin.read()


def main() -> int:
    p = argparse.ArgumentParser(description="Measure what the chat's screen costs.")
    p.add_argument("--tokens", type=int, default=10_000)
    p.add_argument("--rate", type=float, default=200.0)
    args = p.parse_args()
    command = [sys.executable, __file__, SERVE, str(args.tokens), str(args.rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        without_screen(url)
        start, end = json.loads(server.stdout.readline())
        alone = end - start
        cpu, seen = with_screen(url)
        start, end = json.loads(server.stdout.readline())
        server.stdin.close()
    moments = numbers_due(code_reply(args.tokens), args.rate)
    lags = [(moments[number], when - start - moments[number]) for number, when in seen]
    span = 500 / args.rate
    first = statistics.mean(lag for moment, lag in lags if moment <= span)
    last = statistics.mean(lag for moment, lag in lags if moment >= end - start - span)
    print(f"processor time of the app: {100 * cpu / (end - start):.1f} % of a core")
    print(f"lag of the screen, first 500 tokens: {1e3 * first:.0f} ms")
    print(f"lag of the screen, last 500 tokens: {1e3 * last:.0f} ms, {last / first:.2f}x")
    longer = 100 * ((end - start) / alone - 1)
    print(f"the server took {longer:+.2f} % longer than the {alone:.1f} s without a screen")
    return 0


def without_screen(url: str) -> None:
    """Read the whole reply and draw nothing."""
    body = {"messages": [{"role": "user", "content": "go"}], "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False) as answer:
        for _ in answer.iter_raw():
            pass


def with_screen(url: str) -> tuple[float, list[tuple[int, float]]]:
    """Run the app, ask, and watch its output for the numbered lines.

    Returns:
        The app's processor seconds while the reply streamed, and (number, when it was drawn).
    """
    env = os.environ | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "dflash_chat", "--temp", "--url", url]
    app = ptyprocess.PtyProcess.spawn(command, env=env, dimensions=(30, 100))
    wait_for(app, b"ready")
    before = cpu_seconds(app.pid)
    app.write(b"go\r")
    output, seen = b"", []
    known = {0}
    while not re.search(rb"\d accepted", output):  # as the summary of a whole reply says
        output = output[-3000:] + app.read(65536)
        now = time.monotonic()
        plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", output)
        for number in set(map(int, re.findall(rb"line (\d+) of it", plain))) - known:
            known.add(number)
            seen.append((number, now))
    used = cpu_seconds(app.pid) - before
    app.write(b"\x11")
    app.wait()
    return used, seen


def wait_for(app: Any, what: bytes) -> None:
    """Read until it appears."""
    output = b""
    while what not in output:
        output = output[-1000:] + app.read(65536)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    shown = subprocess.run(
        ["ps", "-o", "cputimes=", "-p", str(pid)], capture_output=True, text=True, check=True
    )
    return float(shown.stdout)


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve()
    else:
        sys.exit(main())
