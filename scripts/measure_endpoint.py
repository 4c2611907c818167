"""Measure the endpoint on this machine: latency of /health, cost of a streaming client, memory over time.

    python scripts/measure_endpoint.py [--requests 1000]

Starts a server with the embedded pair. What a streaming client costs is the ratio of the times that the same
reply takes whole and streamed, in turns, so that it means the same on a busy machine.
"""

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from dflash_mlx.pairs import EMBEDDED

CODE = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
LONG_PROMPT = CODE * 120


def main() -> int:
    """Print all figures; 1 if one of them is beyond its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000, help="for the memory (default: 1000)")
    parser.add_argument("--rounds", type=int, default=7, help="of whole and streamed replies (default: 7)")
    args = parser.parse_args()
    with (
        served("--prefix-cache", "0.02") as (process, url),
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        ask(client, CODE, 64)
        good = True
        works = {
            "idle": lambda: time.sleep(10),  # what is slow here already is the machine
            "decoding": lambda: ask(client, CODE, 600),
            "prefilling": lambda: ask(client, LONG_PROMPT, 1),
        }
        for name, work in works.items():
            times = sorted(1e3 * seconds for seconds in health_latency(client, work))
            good &= name == "idle" or times[-1] < 200
            shares = ", ".join(f"{p} % {times[len(times) * p // 100]:.0f}" for p in (50, 99))
            print(f"/health while {name}, ms: {shares}, slowest of {len(times)} {times[-1]:.0f}", flush=True)
        loss = streaming_loss(client, args.rounds)
        print(
            f"speed lost to one streaming client: {100 * loss:.1f} % (median of {args.rounds} pairs)",
            flush=True,
        )
        grown, active = memory_growth(process, client, args.requests)
        print(f"memory after {args.requests} requests: {grown:+.1f} MB resident, {active:+.3f} MB of MLX's")
    return int(not good or loss > 0.05 or grown > 20 or active > 1)


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server as a child process."""
    pair = ["--model", EMBEDDED.target, "--port", "0", "--exit-with-parent"]
    command = [sys.executable, "-m", "dflash_mlx.server", *pair, *options]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().removeprefix("base URL: ").strip()
    finally:
        process.communicate()


def ask(client: httpx.Client, prompt: str, tokens: int, **fields: Any) -> None:
    """Wait for one reply."""
    body = {"prompt": prompt, "max_tokens": tokens, **fields}
    with client.stream("POST", "/completions", json=body) as answer:
        answer.raise_for_status()
        for _ in answer.iter_raw():
            pass


def health_latency(client: httpx.Client, work: Callable[[], Any]) -> list[float]:
    """Seconds of every look at /health while this work is done."""
    thread = threading.Thread(target=work)
    thread.start()
    seconds = []
    while thread.is_alive():
        start = time.perf_counter()
        client.get("/health").raise_for_status()
        seconds.append(time.perf_counter() - start)
        time.sleep(0.02)
    return seconds


def streaming_loss(client: httpx.Client, rounds: int) -> float:
    """Share of the decoding speed that one streaming client costs."""
    ratios = []
    for _ in range(rounds):
        start = time.perf_counter()
        ask(client, CODE, 300)
        middle = time.perf_counter()
        ask(client, CODE, 300, stream=True)
        ratios.append((middle - start) / (time.perf_counter() - middle))
    return 1 - statistics.median(ratios)


def memory_growth(process: subprocess.Popen[str], client: httpx.Client, requests: int) -> tuple[float, float]:
    """MB, resident and of MLX, by which these requests made the server grow."""

    def both() -> tuple[float, float]:
        return resident(process.pid), client.get("/health").json()["memory"]["active"] / 1e6

    def some(count: int) -> None:
        for number in range(count):
            ask(
                client,
                f"{CODE}# {number}\n",
                4,
                stream=number % 2 == 0,
                logprobs=2 if number % 3 == 0 else None,
            )

    some(100)  # until caches have their size
    before = both()
    some(requests)
    after = both()
    return after[0] - before[0], after[1] - before[1]


def resident(pid: int) -> float:
    """Resident MB of a process."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        [line] = [line for line in status.read_text().splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) / 1e3
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(done.stdout) / 1e3


if __name__ == "__main__":
    sys.exit(main())
