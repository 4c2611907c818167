"""What the screen costs while a 10k-token code reply streams at 200 tokens a second.

    python scripts/measure_chat.py [--tokens 10000] [--rate 200] [--speculate]

The app runs in a pseudo-terminal of 100 x 30 against a server process that replays a composed log and notes
when each chunk could be written. Reports the app's processor time, how far its screen lags behind the server
for the first and the last 500 tokens, and how much longer the server took than with a client that draws
nothing.
"""

import argparse
import json
import os
import pty
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from chat import logs

ROOT = Path(__file__).parents[1]
SERVE = "from measure_chat import serve; serve()"


def code_reply(tokens: int) -> list[logs.Chunk]:
    """Chunks of a reply that is one long Python file, with a running number to tell how far the screen is."""
    lines, count = ["```python"], 2
    while count < tokens:
        line = (
            f"def step_{len(lines)}(x: int) -> int:  # at {count}"
            if len(lines) % 3
            else "    return x * 2 + 1"
        )
        count += len(logs.pieces(line + "\n"))
        lines.append(line)
    return logs.compose("\n".join([*lines, "```\n"]))


def serve() -> None:
    """In a process of its own: replay at the rate asked for, print when the reply began and ended."""
    from chat.fake_engine import FakeEngine

    tokens, rate = int(sys.argv[1]), float(sys.argv[2])
    chunks = code_reply(tokens)
    engine = Paced(FakeEngine(chunks), chunks, rate)
    print(engine.engine.url, flush=True)
    sys.stdin.read()


class Paced:
    """Sends each chunk when the tokens before it have had their time; notes how late that was."""

    def __init__(self, engine, chunks: Sequence[logs.Chunk], rate: float) -> None:  # type: ignore[no-untyped-def]
        self.engine = engine
        self._due, total = [], 0
        for chunk in chunks:
            total += len(chunk.get("dflash", {}).get("tokens", ())) if chunk.get("choices") else 0
            self._due.append(total / rate)
        self._start = 0.0
        engine.wait = self.wait

    def wait(self, number: int) -> bool:
        """Before chunk `number`."""
        now = time.monotonic()
        if number == 0:
            self._start = now
        time.sleep(max(0.0, self._start + self._due[number] - now))
        if number == len(self._due) - 1:
            print(json.dumps({"start": self._start, "end": time.monotonic()}), flush=True)
        return True


def main() -> int:
    p = argparse.ArgumentParser(description="Measure what the chat's screen costs.")
    p.add_argument("--tokens", type=int, default=10_000)
    p.add_argument("--rate", type=float, default=200.0)
    args = p.parse_args()
    command = [sys.executable, "-c", SERVE, str(args.tokens), str(args.rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        alone = without_screen(url)
        span = json.loads(server.stdout.readline())
        alone = span["end"] - span["start"]
        cpu, seen = with_screen(url, args.tokens)
        span = json.loads(server.stdout.readline())
        server.stdin.close()
    start, end = span["start"], span["end"]
    lags = [(at, when - start - at / args.rate) for at, when in seen]
    first = statistics.median(lag for at, lag in lags if at <= 500)
    last = statistics.median(lag for at, lag in lags if at > args.tokens - 500)
    print(f"processor time of the app: {100 * cpu / (end - start):.1f} % of a core")
    print(
        f"lag of the screen: first 500 tokens {1e3 * first:.0f} ms, last 500 {1e3 * last:.0f} ms, {last / first:.2f}x"
    )
    print(
        f"the server took {100 * ((end - start) / alone - 1):+.2f} % longer than without a screen ({alone:.1f} s)"
    )
    return 0


def without_screen(url: str) -> float:
    """Read the whole reply and draw nothing."""
    body = json.dumps({"messages": [{"role": "user", "content": "go"}], "stream": True})
    command = ["curl", "-sN", f"{url}/v1/chat/completions", "-d", body]
    start = time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - start


def with_screen(url: str, tokens: int) -> tuple[float, list[tuple[int, float]]]:
    """Run the app, ask, and watch its output for the running numbers.

    Returns:
        The app's processor seconds while the reply streamed, and (token, time seen) for each number.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {
            "TERM": "xterm-256color",
            "XDG_DATA_HOME": tempfile.mkdtemp(),
            "COLUMNS": "100",
            "LINES": "30",
        }
        os.execv(sys.executable, [sys.executable, "-m", "dflash_chat", "--temp", "--url", url])
    import fcntl
    import re
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    output, seen, highest = b"", [], 0
    wait_for(terminal, b"ready")
    before = cpu_seconds(pid)
    os.write(terminal, b"go\r")
    while b"to first token" not in output:
        select.select([terminal], [], [], 5)
        output = output[-2000:] + os.read(terminal, 65536)
        now = time.monotonic()
        plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", output)
        for number in map(int, re.findall(rb"at (\d+) ", plain)):
            if highest < number <= tokens:
                highest = number
                seen.append((number, now))
    used = cpu_seconds(pid) - before
    os.write(terminal, b"\x11")
    os.waitpid(pid, 0)
    return used, seen


def wait_for(terminal: int, what: bytes) -> None:
    """Read until it appears."""
    output = b""
    while what not in output:
        output = output[-1000:] + os.read(terminal, 65536)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, as ps counts it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
