"""`python -m dflash_mlx.doctor`: what this machine is, and whether speculation is right on it."""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import mlx.core as mx

from dflash_mlx import __version__
from dflash_mlx.errors import DFlashError
from dflash_mlx.kernels import Kernels
from dflash_mlx.loading import load
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.params import SamplingParams
from dflash_mlx.result import Result
from dflash_mlx.session import Session
from dflash_mlx.target.exactness import EXACT

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
TOKENS = 64
PACKAGES = ("mlx", "mlx-lm", "transformers", "huggingface_hub", "numpy")


@dataclass(frozen=True)
class Check:
    """The embedded pair, decoded both ways.

    Attributes:
        plain, speculative: hashes of the token ids, one for each run.
        exactness: as the session measured it.
        tau: tokens per verify cycle, bonus included.
        timings: load seconds; tokens per second of prefill, plain and speculative decoding; milliseconds
            per verify cycle.
        linears: kind of linear layer -> the way it takes in a verify pass, and how many there are.
        fallbacks: what runs slower than it could, and why.
    """

    plain: tuple[str, ...]
    speculative: tuple[str, ...]
    exactness: str
    tau: float
    timings: dict[str, float]
    linears: dict[str, str] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """Everything that an issue report needs; `problems` is empty where all is well.

    Attributes:
        kernels: what each kernel's self-test said: "passed", or what differed, or the compiler's log.
    """

    machine: dict[str, str]
    versions: dict[str, str]
    check: Check
    kernels: dict[str, str]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        check = asdict(self.check)
        check |= {"plain": _once(self.check.plain), "speculative": _once(self.check.speculative)}
        timings = {name: f"{value:.2f}" for name, value in check.pop("timings").items()}
        check["tau"] = f"{self.check.tau:.2f} tokens per verify cycle, bonus included"
        linears = check.pop("linears")
        fallbacks = check.pop("fallbacks")
        sections = {
            "machine": self.machine,
            "versions": self.versions,
            "embedded pair": check,
            "timings": timings,
            "linear layers of its verify pass": linears,
            "self-tests of kernels": self.kernels,
        }
        lines = []
        for title, facts in sections.items():
            lines.append(title)
            lines += [f"  {name:<28} {_indented(value)}" for name, value in facts.items()]
        lines += [f"fallback: {fallback}" for fallback in fallbacks]
        lines += [f"problem: {problem}" for problem in self.problems] or ["no problem found"]
        return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line, from which the documentation's table is made."""
    p = argparse.ArgumentParser(prog="python -m dflash_mlx.doctor", description="Examine this machine.")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--report", action="store_true", help="print a block to paste into an issue report")
    p.add_argument(
        "--selftest", action="store_true", help="try every kernel again, for the common formats; some seconds"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if a problem was found; else the error's exit code, such as 4 without enough memory."""
    args = parser().parse_args(argv)
    try:
        report = examine(selftest=args.selftest)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps(asdict(report)))
    elif args.report:
        print(f"```text\n{report}\n```")
    else:
        print(report)
    return 1 if report.problems else 0


def examine(*, selftest: bool = False) -> Report:
    """Run all checks; takes some seconds, with the self-tests some more."""
    check = check_pair()
    verdicts = Kernels().selftest.common() if selftest else {}
    kernels = {name: verdict.detail or "passed" for name, verdict in verdicts.items()}
    if not kernels:
        kernels = {"not run": "pass --selftest" if Kernels().device.metal else "there is no GPU"}
    failed = [f"{name} failed its self-test" for name, verdict in verdicts.items() if not verdict.ok]
    return Report(machine(), versions(), check, kernels, (*name_clash(), *differences(check), *failed))


def machine() -> dict[str, str]:
    """The hardware and what MLX runs on."""
    info = mx.device_info()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "chip": str(info.get("device_name", platform.processor() or "unknown")),
        "architecture": str(info.get("architecture", platform.machine())),
        "system": platform.platform(),
        "memory": f"{memory / 2**30:.0f} GiB",
        "MLX device": str(mx.default_device()),
        "Metal": "available" if mx.metal.is_available() else "not available: running on the CPU",
    }


def versions() -> dict[str, str]:
    """Of Python, this package and what it stands on."""
    found = {"python": platform.python_version(), "dflash-chat": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def name_clash() -> list[str]:
    """Another distribution that installs our import name."""
    owners = set(importlib.metadata.packages_distributions().get("dflash_mlx", ()))
    return [
        f"the package {owner} is installed too and has the same import name: pip uninstall {owner}, "
        "then install dflash-chat again"
        for owner in sorted(owners - {"dflash-chat"})
    ]


def check_pair() -> Check:
    """Decode with the embedded pair, plain and speculative in turns."""
    start = time.perf_counter()
    session = load(EMBEDDED.target, dequantize=mx.default_device().type == mx.DeviceType.cpu)
    loaded = time.perf_counter() - start
    plain, speculative = [], []
    for _ in range(3):
        plain.append(_decode(session, speculative=False))
        speculative.append(_decode(session, speculative=True))
    cycles = [cycle.seconds for result in speculative for cycle in result.cycles]
    return Check(
        plain=tuple(map(_digest, plain)),
        speculative=tuple(map(_digest, speculative)),
        exactness=session.exactness,
        tau=speculative[0].tau or 0.0,
        timings={
            "load seconds": loaded,
            "prefill tokens/s": statistics.median(r.prefill_tokens_per_second for r in plain + speculative),
            "plain tokens/s": statistics.median(r.decode_tokens_per_second for r in plain),
            "speculative tokens/s": statistics.median(r.decode_tokens_per_second for r in speculative),
            "ms per verify cycle": 1e3 * statistics.median(cycles),
        },
        linears=_linears(session),
        fallbacks=session.fallbacks,
    )


def _linears(session: Session) -> dict[str, str]:
    """Kind of layer -> way, reason and number."""
    ways: dict[str, list[str]] = {}
    for (layer, choice), count in session.target.linears.table.items():
        reason = f" ({choice.reason})" if choice.reason else ""
        ways.setdefault(layer, []).append(f"{count} by {choice.route.value}{reason}")
    return {layer: "; ".join(way) for layer, way in ways.items()}


def _indented(value: object) -> str:
    return str(value).replace("\n", "\n" + " " * 31)


def differences(check: Check) -> list[str]:
    """What contradicts the promise that speculation is invisible."""
    problems = []
    if check.exactness != EXACT:
        problems.append(f"a row's numbers depend on how many rows are verified with it: {check.exactness}")
    if len(set(check.plain)) > 1:
        problems.append(f"plain decoding has other tokens from run to run: {_once(check.plain)}")
    elif {*check.speculative} != {*check.plain}:
        problems.append(
            f"speculation changed the tokens: {_once(check.plain)} became {_once(check.speculative)}"
        )
    return problems


def _once(digests: Sequence[str]) -> str:
    """The different ones of some runs: a single one where all is well."""
    return ", ".join(dict.fromkeys(digests))


def _decode(session: Session, *, speculative: bool) -> Result:
    # The largest block, whatever is fastest here: what is checked is that speculation changes no token.
    params, size = SamplingParams(max_tokens=TOKENS), session.largest_block
    return session.generate(PROMPT, params, block_size=size, speculative=speculative)


def _digest(result: Result) -> str:
    return hashlib.sha256(" ".join(map(str, result.tokens)).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
