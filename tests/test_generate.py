"""`python -m dflash_mlx.generate` as a person or a script runs it."""

import json
import signal
import subprocess
import sys

import pytest

from dflash_mlx.pairs import EMBEDDED

COMMAND = [sys.executable, "-W", "error", "-m", "dflash_mlx.generate", "--model", EMBEDDED.target]


def run(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], input=stdin, capture_output=True, text=True, check=False)


def test_text_goes_to_stdout_and_statistics_to_stderr() -> None:
    done = run("def main(argv):\n", "--raw", "--dequantize", "--max-tokens", "40", "--block-size", "5")
    assert done.returncode == 0
    assert "target dequantized to float32" in done.stderr
    assert "tau " in done.stderr
    assert "tokens per verify cycle, the target's own included" in done.stderr
    assert "peak memory" in done.stderr
    assert "tau" not in done.stdout
    assert len(done.stdout) > 40


def test_json_is_one_object_and_plain_gives_the_same_tokens() -> None:
    args = ("-", "--raw", "--dequantize", "--max-tokens", "30", "--json", "--block-size", "5")
    replies = [json.loads(run(*args, *extra, stdin="import os\n").stdout) for extra in ((), ("--plain",))]
    speculative, plain = replies
    assert set(speculative) == {
        "text",
        "reasoning",
        "seed",
        "tokens",
        "finish_reason",
        "exactness",
        "notes",
        "fallbacks",
        "prompt_tokens",
        "tau",
        "cycles",
        "timings",
    }
    assert speculative["tokens"] == plain["tokens"]
    assert speculative["text"] == plain["text"]
    assert speculative["tau"] > 1
    assert speculative["exactness"] == "exact"
    assert "target dequantized to float32" in speculative["notes"]
    assert plain["tau"] is None
    assert all(set(c) == {"drafted", "accepted", "committed", "copied"} for c in speculative["cycles"])
    assert 1 + sum(c["committed"] for c in speculative["cycles"]) == len(speculative["tokens"]) == 30
    assert len(plain["cycles"]) == 29


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    """As `| head` does."""
    command = [*COMMAND, "import os\n", "--raw", "--dequantize", "--max-tokens", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 1
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


def test_standard_input_that_is_no_text_is_one_line() -> None:
    done = subprocess.run([*COMMAND, "-"], input=b"def caf\xe9(", capture_output=True, check=False)
    assert done.returncode == 2
    assert b"error: the prompt on standard input is not text: 'utf-8' codec" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([""], 2, "error: the prompt is empty"),
        (["x", "--block-size", "9"], 2, "error: block_size is 9"),
        (["x", "--block-size", "some"], 2, "invalid block_size value: 'some'"),
        (["x", "--max-tokens", "0"], 2, "error: max_tokens is 0"),
        (["x", "--draft-bits", "3"], 2, "invalid choice: 3"),
        (["x", "--model", "/no/such"], 3, "error: '/no/such' is neither a folder nor a hub id"),
        (["x", "--draft", "/no/such"], 3, "error: '/no/such' is neither a folder nor a hub id"),
        (["x", "--revision", "main"], 3, "revision is 'main'"),
        (["x", "--adapter", "/no/such"], 3, "error: '/no/such' is neither a folder nor a hub id"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(args: list[str], code: int, message: str) -> None:
    done = run(*args, stdin="")
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in run("x", "--model", "/no/such", "--debug").stderr


def test_ctrl_c_keeps_the_partial_text_and_exits_130() -> None:
    process = subprocess.Popen(
        [*COMMAND, "def main(argv):\n", "--raw"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    start = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert len(start) == 20
    assert process.returncode == 130
    assert "cancelled" in stderr
    assert "Traceback" not in stderr


def test_sampling_options_reach_the_sampler_and_the_seed_gives_the_reply_again() -> None:
    options = ("class Queue:\n", "--temperature", "0.9", "--top-k", "30", "--max-tokens", "12", "--json")
    first = json.loads(run(*options).stdout)
    again = json.loads(run(*options, "--seed", str(first["seed"]), "--plain").stdout)
    other = json.loads(run(*options, "--seed", str((first["seed"] + 1) % 2**32)).stdout)
    assert again["tokens"] == first["tokens"]
    assert other["tokens"] != first["tokens"]


def test_stop_system_and_stats() -> None:
    done = run("items = []\n", "--system", "class Stack:\n", "--stop", "\n", "--max-tokens", "40", "--stats")
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1  # the one that ends the output
    assert "(stop)" in done.stderr
    assert "cycle 1: drafted" in done.stderr or "reply 1 tokens" in done.stderr
    refused = run("x", "--raw", "--system", "y")
    assert refused.returncode == 2
    assert "leave out --system and --reasoning" in refused.stderr
    assert "offers no levels" in run("x", "--reasoning", "low").stderr
