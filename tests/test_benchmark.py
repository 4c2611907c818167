"""The benchmark: what it refuses to report, what it reports, and the same prompts against a server."""

import json
import math
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from dflash_mlx import Session, UsageError
from dflash_mlx.benchmark import command, measure
from dflash_mlx.benchmark.measure import PLAIN, Benchmark, Measured
from dflash_mlx.benchmark.plot import svg
from dflash_mlx.benchmark.prompts import DATA_SETS, OWN, Task, completions, own
from dflash_mlx.benchmark.report import Report, report
from dflash_mlx.benchmark.served import summary
from dflash_mlx.errors import DFlashError
from dflash_mlx.events import Block
from dflash_mlx.generate import main as generate
from dflash_mlx.interval import Interval, quantile
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.params import SamplingParams
from dflash_mlx.remote import Answer, Server
from dflash_mlx.result import Result

KEYS = {"prompts", "tau", "speedup", "hashes_equal", "categories", "phases_ms", "versions"}
EXACT = "exact"


def reply(tokens: tuple[int, ...] = tuple(range(9)), *, seconds: float = 1.0, accepted: int = 0) -> Result:
    """With a draft in every cycle if any was accepted."""
    width = accepted + 1
    cycles = tuple(
        Block(
            tokens[i : i + width], drafted=accepted and 3, accepted=accepted, seconds=0.1, wait_seconds=0.05
        )
        for i in range(1, len(tokens), width)
    )
    return Result(tokens, "text", "", "length", 5, cycles, 0.5, seconds, 0, ())


def measured(
    category: str = "code", seconds: float = 0.5, accepted: int = 3, length: int = 9, **changes: Any
) -> Measured:
    fast = reply(tuple(range(length)), seconds=seconds, accepted=accepted)
    plain = reply(tuple(range(length)))
    return Measured(category, {PLAIN: (plain, plain), "4": (fast, replace(fast, **changes))})


def reported(*found: Measured, exactness: str = EXACT, modes: tuple[str, ...] = ("4",)) -> Report:
    return report(
        found, modes, exactness=exactness, draft_seconds=0.01, peak_memory=10**9, versions={"mlx": "0"}
    )


def test_figures() -> None:
    found = reported(measured(), measured("math", seconds=0.25))
    obj = json.loads(json.dumps(found.to_json()))
    assert set(obj) >= KEYS
    assert obj["prompts"] == 2
    assert obj["tau"] == 4
    assert obj["histogram"] == {"4": 8}
    assert obj["speedup"]["mean"] == pytest.approx(math.sqrt(2 * 4))
    half = 12.706 * statistics.stdev([math.log(2), math.log(4)]) / math.sqrt(2)
    assert obj["speedup"]["low"] == pytest.approx(math.sqrt(8) / math.exp(half))
    assert obj["speedup"]["high"] == pytest.approx(math.sqrt(8) * math.exp(half))
    assert obj["categories"]["code"]["speedup"] == {"mean": pytest.approx(2), "low": 0, "high": None}
    assert obj["hashes_equal"] is True
    assert obj["phases_ms"]["of it in Python"] == pytest.approx(50)
    assert "tau: tokens per verify cycle" in str(found)
    assert "2.83x [0.03, 231.20]" in str(found)


def test_tau_counts_the_tokens_that_a_cycle_committed() -> None:
    """The last cycle accepted three drafts, and the reply ended at the second of them."""
    found = reported(measured(length=7))
    assert found.overall["4"].tau == 3
    assert found.overall["4"].histogram == {2: 2, 4: 2}


def test_phases_are_those_of_the_first_block_size_that_drafts() -> None:
    one = measured()
    one.replies["1"] = one.replies[PLAIN]
    drafting = reported(one, modes=("1", "4"))
    assert drafting.phases_ms["draft pass alone"] == 10
    assert set(drafting.phases_ms) == set(reported(one).phases_ms)
    plain = reported(one, modes=("1",))
    assert plain.phases_ms == {"plain step": pytest.approx(100)}
    assert json.loads(json.dumps(plain.to_json()))["tau"] is None
    assert "block 1: none had a draft" in str(plain)


def test_tokens_that_differ_fail_where_the_machine_is_exact() -> None:
    planted = measured(tokens=(*range(8), 99))
    with pytest.raises(DFlashError, match="speculation changed the tokens of 1 of 2 prompts"):
        reported(measured(), planted)
    found = reported(measured(), replace(planted, difference="token 9"), exactness="not exact: a")
    assert found.to_json()["hashes_equal"] is False
    assert "tokens differ: token 9" in str(found)


def test_speculation_that_did_not_run_fails() -> None:
    with pytest.raises(DFlashError, match="speculation did not run: not one cycle of block 4"):
        reported(measured(accepted=0))


def test_replies_of_one_token_cannot_be_timed() -> None:
    one = reply((1,), seconds=0.0)
    fast = Measured("code", {PLAIN: (one,), "1": (one,)})
    with pytest.raises(DFlashError, match="nothing to time"):
        reported(fast, modes=("1",))


@pytest.mark.parametrize("prompts", [2, 5, 40])
def test_an_interval_covers_the_mean_of_its_population(prompts: int) -> None:
    """A thousand experiments: 95 % of the intervals hold the true mean, also those over few prompts."""
    dice = random.Random(3)
    held = 0
    for _ in range(1000):
        interval = Interval.over([math.exp(dice.gauss(0.5, 0.3)) for _ in range(prompts)])
        held += interval.low <= math.exp(0.5) <= interval.high
    assert 920 <= held <= 980


def test_quantiles_beyond_the_table_go_on_from_it() -> None:
    assert [quantile(freedom) for freedom in (1, 4, 30)] == [12.706, 2.776, 2.042]
    known = {31: 2.0395, 60: 2.0003, 120: 1.9799}
    assert {freedom: round(quantile(freedom), 4) for freedom in known} == pytest.approx(known, abs=2e-4)


def test_the_plot_is_svg_with_a_bar_for_every_category_and_size() -> None:
    root = ElementTree.fromstring(svg(reported(measured("a<b"), measured("c"))))
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 3
    assert titles[0] is not None
    assert titles[0].startswith("a<b, block 4: 2.00x")


def test_the_wide_interval_of_two_prompts_does_not_flatten_the_bars() -> None:
    root = ElementTree.fromstring(svg(reported(measured(), measured(seconds=0.25))))
    ticks = [t for t in root.iter("{http://www.w3.org/2000/svg}text") if (t.text or "").endswith("x")]
    assert 3 < len(ticks) < 10


def test_prompts() -> None:
    assert [len(own(n)) for n in (1, 2)] == [4, 8]
    assert all(text.strip() for texts in OWN.values() for text in texts)
    assert len(completions(3)) == 3
    row = {"question": "q", "problem": "p", "prompt": ["a", "b"]}
    assert DATA_SETS["gsm8k"].turns(row)[0].startswith("q\nPlease reason step by step")
    assert DATA_SETS["mt-bench"].turns(row) == ("a", "b")


def test_a_data_set_that_cannot_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: str, split: str) -> None:
        raise ConnectionError("Couldn't reach the Hub\nand so on")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    args = command.parser().parse_args(["--dataset", "gsm8k"])
    with pytest.raises(
        DFlashError, match=r"^cannot load the data set gsm8k \(openai/gsm8k\): .* the Hub; it"
    ):
        command.choose(args, converses=True)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_sizes_of_the_embedded_pair_have_the_tokens_of_plain_decoding(
    pair: Session, temperature: float
) -> None:
    params = SamplingParams(max_tokens=10, temperature=temperature, seed=1)
    found = list(Benchmark(pair, params, ("5", "auto")).run(completions(1)))
    assert [list(m.replies) for m in found] == [[PLAIN, "5", "auto"]]
    assert all(m.equal and m.difference is None for m in found)
    assert all(len(replies) == 2 for replies in found[0].replies.values())


def test_a_difference_is_located_and_its_margin_named(pair: Session) -> None:
    benchmark = Benchmark(pair, SamplingParams(max_tokens=6), ("5",))
    [task] = completions(1)
    plain = pair.generate(task.turns[0], benchmark.params, speculative=False)
    second = pair.generate(
        [*pair.encode(task.turns[0]), *plain.tokens[:3]],
        SamplingParams(max_tokens=1, top_logprobs=2),
        speculative=False,
    )
    other = second.logprobs[0].top[1]
    text = benchmark._difference(
        task.turns[0], plain, replace(plain, tokens=(*plain.tokens[:3], other[0], 0))
    )
    assert text.startswith(f"token 4 is {other[0]} instead of {plain.tokens[3]}; margin in plain decoding ")
    assert float(text.split()[-2]) == pytest.approx(second.logprobs[0].logprob - other[1], rel=1e-2)


def test_an_empty_prompt_is_refused_before_anything_runs(pair: Session) -> None:
    tasks = [Task("code", ("x",), raw=True), Task("code", (" \n",), raw=True)]
    with pytest.raises(UsageError, match="a prompt of the category code is empty"):
        next(Benchmark(pair, SamplingParams(max_tokens=2), ("5",)).run(tasks))


def test_every_way_is_measured_in_both_orders(pair: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def note(self: Benchmark, prompt: object, mode: str, params: object) -> Result:
        order.append(mode)
        return reply()

    monkeypatch.setattr(measure.Benchmark, "_reply", note)
    list(Benchmark(pair, SamplingParams(), ("4", "auto")).run([Task("code", ("x",))]))
    assert order == [PLAIN, "4", "auto", "auto", "4", PLAIN]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--concurrency", "2"], "--concurrency needs --base-url"),
        (["--base-url", "http://x", "--plot", "x.svg"], "--plot shows the speed-up"),
        (["--plot", "nowhere/x.svg"], "--plot is nowhere/x.svg, and there is no folder nowhere"),
        (["--base-url", "http://x", "--adapter", "a"], "--adapter cannot be used with --base-url"),
        (["--base-url", "http://x", "--block-size", "4"], "--block-size cannot be used with --base-url"),
        (["--base-url", "http://x", "--cooldown", "1"], "--cooldown cannot be used with --base-url"),
        (["--base-url", "http://127.0.0.1:9/v1"], "does not list a model"),
    ],
)
def test_what_cannot_be_done_is_said(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(args) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "x", "0", "4,,5", "-1"])
def test_block_sizes_that_are_none(text: str) -> None:
    with pytest.raises(SystemExit):
        command.parser().parse_args(["--block-size", text])


def test_the_command_prints_json_and_draws(tmp_path: Path) -> None:
    plot = tmp_path / "out.svg"
    options = [
        "--model",
        EMBEDDED.target,
        "--dequantize",
        "--num-prompts",
        "1",
        "--max-tokens",
        "8",
        "--block-size",
        "3",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "dflash_mlx.benchmark", *options, "--plot", str(plot)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    obj = json.loads(done.stdout)
    assert set(obj) >= KEYS
    assert obj["hashes_equal"]
    assert obj["tau"] >= 1
    assert "it completes code" in done.stderr
    ElementTree.parse(plot)


def test_a_plot_that_cannot_be_written_leaves_the_table(
    pair: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load", lambda **_: pair)
    options = ["--num-prompts", "1", "--max-tokens", "6", "--block-size", "3", "--json"]
    assert command.main(["--model", EMBEDDED.target, *options, "--plot", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert set(json.loads(out)) >= KEYS
    assert err.splitlines()[-1].startswith(f"error: cannot write the plot {tmp_path}: ")


# --- servers -----------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """Streams three tokens; refuses what asks for it."""

    bodies: list[dict[str, Any]]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "served"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if body["messages"][-1]["content"] == "refuse":
            self._send(400, json.dumps({"error": {"message": "no such thing"}}))
            return
        deltas = [{"reasoning_content": "hm"}, {"content": "4"}, {"content": "2"}]
        chunks: list[dict[str, Any]] = [{"choices": [{"delta": delta}]} for delta in deltas]
        chunks.append({"choices": [], "usage": {"completion_tokens": 3}, "dflash": {"tau": 2.5}})
        self._send(200, "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n")

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def served() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    bodies: list[dict[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"bodies": bodies}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_gets_the_same_prompts(
    served: tuple[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, bodies = served
    args = ["--base-url", url, "--num-prompts", "2", "--concurrency", "3", "--json", "--top-k", "20"]
    assert command.main(args) == 0
    obj = json.loads(capsys.readouterr().out)
    assert set(obj) >= KEYS
    assert obj["prompts"] == 8
    assert obj["tau"] == 2.5
    assert set(obj["categories"]) == set(OWN)
    assert obj["versions"] == {"server": url, "model": "served"}
    assert {b["messages"][0]["content"] for b in bodies} == {t for texts in OWN.values() for t in texts[:2]}
    assert all(b["top_k"] == 20 and b["max_tokens"] == 256 for b in bodies)


def test_a_servers_tau_is_over_cycles_where_it_says_how_many() -> None:
    def tau(*counts: tuple[float | None, int | None]) -> float | None:
        answers = [Answer("", "", 9, 1.0, 2.0, tau, cycles=cycles) for tau, cycles in counts]
        found = summary([(Task("code", ("x",)), answers)], 1.0, 1, Server("http://x", "m"))["tau"]
        return None if found is None else float(found)

    assert tau((4.0, 30), (2.0, 10)) == pytest.approx(3.5)
    assert tau((4.0, None), (2.0, None), (None, None)) == pytest.approx(3.0)
    assert tau((None, None)) is None


def test_generate_asks_a_server(
    served: tuple[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, bodies = served
    assert generate(["six times seven?", "--base-url", url, "--system", "short", "--max-tokens", "9"]) == 0
    out, err = capsys.readouterr()
    assert out == "42"
    assert err.startswith("hm\n3 tokens at")
    assert [m["role"] for m in bodies[0]["messages"]] == ["system", "user"]
    assert bodies[0]["max_tokens"] == 9
    assert generate(["refuse", "--base-url", url]) == 1
    assert "refused the request (400): no such thing" in capsys.readouterr().err
    assert generate(["x", "--base-url", url, "--plain"]) == 2
    assert "--plain cannot be used with --base-url" in capsys.readouterr().err
    assert generate(["x", "--base-url", url, "--numerics", "fast"]) == 2
    assert "--numerics cannot be used with --base-url" in capsys.readouterr().err
