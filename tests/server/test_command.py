"""`python -m dflash_mlx.server` as a process: how it starts, and everything that ends it."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from dflash_mlx.pairs import EMBEDDED
from server.live import CODE

COMMAND = [sys.executable, "-W", "error", "-m", "dflash_mlx.server", "--model", EMBEDDED.target]


@contextmanager
def child(*args: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def url(process: subprocess.Popen[str]) -> str:
    """The base URL, once it is ready."""
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    assert lines[0].startswith("base URL: http://127.0.0.1:"), lines
    assert lines[0].endswith("/v1\n")
    assert lines[1] == "model: demo-target\n"
    return lines[0].removeprefix("base URL: ").strip()


def refused(*args: str) -> tuple[int, str]:
    done = subprocess.run(
        [*COMMAND, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def endless(base: str) -> Iterator[str]:
    """Lines of a reply that goes on for a while."""
    body = {
        "messages": [{"role": "user", "content": CODE}],
        "stream": True,
        "temperature": 1,
        "max_tokens": 3000,
    }
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{base}/chat/completions", json=body) as answer,
    ):
        yield from answer.iter_lines()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, "end of input"])
def test_it_ends_cleanly_also_while_a_request_runs(how: signal.Signals | str) -> None:
    with child("--exit-with-parent") as process:
        lines = endless(url(process))
        said = [next(lines) for _ in range(8)]
        start = time.monotonic()
        if isinstance(how, signal.Signals):
            process.send_signal(how)
        else:
            assert process.stdin is not None
            process.stdin.close()
        said += lines
        assert process.wait(10) == 0
        assert time.monotonic() - start < 5  # a fraction of a second where nothing else runs
        assert '"the server is stopping"' in "".join(said)
        assert said[-2:] == ["data: [DONE]", ""]
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read() == ""
        assert "Traceback" not in process.stderr.read()


def test_it_answers_while_it_loads_and_can_be_ended_then() -> None:
    with child() as process:
        assert process.stderr is not None
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        code = process.wait(15)
        assert code in (0, -signal.SIGTERM)  # the latter before Python got to our handler
        assert "Traceback" not in process.stderr.read()


def test_kill_9_ends_a_clients_stream_and_the_port_is_free_again() -> None:
    with child() as process:
        base = url(process)
        lines = endless(base)
        next(lines)
        process.kill()
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            list(lines)
        port = base.split(":")[2].removesuffix("/v1")
    with child("--port", port) as again:
        assert url(again) == base


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--model", "/no/such"], 3, "error: '/no/such' is neither a folder nor a hub id"),
        (["--draft", "/no/such"], 3, "error: '/no/such' is neither a folder nor a hub id"),
        (["--adapter", "/no/such"], 3, "error: '/no/such' is neither a folder nor a hub id"),
        (
            ["--host", "0.0.0.0"],
            2,
            "error: --host is 0.0.0.0: others can reach it there, so it needs an --api-key",
        ),
        (["--max-queue", "-1"], 2, "error: --max-queue is -1"),
        (["--max-context", "1"], 2, "error: --max-context is 1"),
        (["--port", "99999"], 2, "error: --port is 99999"),
        (
            ["--host", "no.such.host.invalid", "--api-key", "k"],
            2,
            "error: cannot listen on no.such.host.invalid",
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_its_code(args: list[str], code: int, message: str) -> None:
    port = [] if "--port" in args else ["--port", "0"]
    got, said = refused(*port, *args)
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    assert (got, len(lines)) == (code, 1)
    assert lines[0].startswith(message)
    assert "Traceback" not in said


def test_a_port_in_use_is_said() -> None:
    with child() as process:
        port = url(process).split(":")[2].removesuffix("/v1")
        code, said = refused("--port", port)
        assert (code, said) == (
            2,
            f"error: cannot listen on 127.0.0.1 port {port}: it is in use: pass another --port\n",
        )


def test_options_reach_the_server() -> None:
    args = "--max-context 64 --max-queue 3 --api-key k --strict-model --draft none --host 127.0.0.1"
    with child(*args.split()) as process, httpx.Client(timeout=60) as client:
        base = url(process)
        assert client.get(f"{base}/health").status_code == 401
        client.headers["x-api-key"] = "k"
        health = client.get(f"{base}/health").json()
        assert health["context_window"] == 64
        assert health["queue"]["limit"] == 3
        assert health["drafter"] is None
        assert health["speculative"] is False
        answer = client.post(f"{base}/chat/completions", json={"model": "x", "messages": []})
        assert answer.status_code in (400, 404)
        assert client.get(f"{base}/models/x").status_code == 404


def test_plain_speed_is_remembered() -> None:
    speeds = []
    for _ in range(2):
        with child() as process, httpx.Client() as client:
            base = url(process)
            speeds.append(client.get(f"{base}/health").json()["plain_tokens_per_second"])
    assert speeds[0] == speeds[1] > 0


def test_it_listens_before_mlx_is_imported() -> None:
    code = "import sys, dflash_mlx.server.__main__; sys.exit('mlx' in sys.modules or 'mlx_lm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
