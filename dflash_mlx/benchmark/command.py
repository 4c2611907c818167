"""The command line of the benchmark."""

import argparse
import json
import sys
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from dflash_mlx import doctor
from dflash_mlx.benchmark import prompts, served
from dflash_mlx.benchmark.measure import Benchmark
from dflash_mlx.benchmark.plot import svg
from dflash_mlx.benchmark.prompts import DATA_SETS, Task
from dflash_mlx.benchmark.report import Report, report
from dflash_mlx.chat_template import LEVELS
from dflash_mlx.errors import DFlashError, UsageError, one_line
from dflash_mlx.loading import load
from dflash_mlx.options import add_pair_options, given, pair_settings
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.params import SamplingParams
from dflash_mlx.smollm2 import default_pair

INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The command line, from which the documentation's table is made."""
    p = argparse.ArgumentParser(
        prog="python -m dflash_mlx.benchmark",
        description="Compare speculative with plain decoding, in turns. See also calibrate, kernels.",
    )
    add_pair_options(p)
    p.add_argument(
        "--block-size",
        type=sizes,
        default=("auto",),
        metavar="auto|N[,N...]",
        help="block sizes to compare with plain decoding (default: auto)",
    )
    p.add_argument("--dataset", choices=tuple(DATA_SETS), help="a public data set instead of our own prompts")
    p.add_argument(
        "--num-prompts", type=int, default=5, help="of each category, or of the data set (default: 5)"
    )
    p.add_argument("--max-tokens", type=int, default=256, help="of a reply, at most (default: 256)")
    p.add_argument("--reasoning", choices=LEVELS, help="how much to think (default: the model's own)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    p.add_argument("--top-p", type=float, default=1.0, help="keep the most probable tokens of this mass")
    p.add_argument("--top-k", type=int, default=0, help="keep this many tokens; 0 (default) keeps all")
    p.add_argument("--seed", type=int, default=0, help="of sampling and of drawing prompts (default: 0)")
    p.add_argument("--cooldown", type=float, default=0.0, help="seconds to wait before every prompt")
    p.add_argument("--base-url", help="measure an OpenAI-compatible server instead, such as http://host/v1")
    p.add_argument("--concurrency", type=int, default=1, help="requests at a time, with --base-url")
    p.add_argument("--plot", type=Path, help="write an SVG file: speed-up by category and block size")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return p


def sizes(text: str) -> tuple[str, ...]:
    """`auto,4` -> ("auto", "4")."""
    parts = tuple(dict.fromkeys(text.split(",")))
    if not all(part == "auto" or (part.isdecimal() and int(part) > 0) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected auto, a number, or several with commas")
    return parts


def main(argv: list[str]) -> int:
    """Returns 0; 1 if the benchmark proves nothing or disproves a promise; else the error's exit code."""
    args = parser().parse_args(argv)
    try:
        _check(args)
        if args.base_url:
            return served.run(args)
        return _run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _check(args: argparse.Namespace) -> None:
    for name, least in (("num_prompts", 1), ("concurrency", 1), ("cooldown", 0)):
        if getattr(args, name) < least:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is {getattr(args, name)}: it must be at least {least}")
    if args.base_url and (words := given(args, but="model")):
        raise UsageError(f"{words[0]} cannot be used with --base-url: the server has loaded its pair")
    for name in ("block_size", "cooldown"):
        if args.base_url and getattr(args, name) != parser().get_default(name):
            option = name.replace("_", "-")
            raise UsageError(f"--{option} cannot be used with --base-url: the server decodes in its own way")
    if args.base_url and args.plot:
        raise UsageError("--plot shows the speed-up over plain decoding, which --base-url does not measure")
    if args.plot and not args.plot.parent.is_dir():
        raise UsageError(f"--plot is {args.plot}, and there is no folder {args.plot.parent}: make it first")
    if args.concurrency > 1 and not args.base_url:
        raise UsageError("--concurrency needs --base-url: without a server there is one request at a time")


def _run(args: argparse.Namespace) -> int:
    session = load(**pair_settings(args))
    for note in session.notes:
        print(note, file=sys.stderr)
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
    )
    costs = session.costs
    target = args.model or default_pair().target
    tasks = choose(args, converses=target != EMBEDDED.target and session.tokenizer.has_chat_template)
    benchmark = Benchmark(session, params, args.block_size, args.reasoning, args.cooldown)
    benchmark.warm_up(tasks)
    mx.reset_peak_memory()
    total = sum(len(task.turns) for task in tasks)
    measured = list(tqdm(benchmark.run(tasks), total=total, unit="prompt", disable=None))
    found = report(
        measured,
        args.block_size,
        exactness=session.exactness,
        draft_seconds=costs.draft,
        peak_memory=mx.get_peak_memory(),
        versions={**doctor.versions(), "chip": doctor.machine()["chip"]},
    )
    print(json.dumps(found.to_json()) if args.json else found, flush=True)
    if args.plot:
        _draw(found, args.plot)
    return 0


def _draw(found: Report, file: Path) -> None:
    try:
        file.write_text(svg(found), encoding="utf-8")
    except OSError as error:
        raise DFlashError(f"cannot write the plot {file}: {one_line(error)}; name another --plot") from error


def choose(args: argparse.Namespace, *, converses: bool) -> list[Task]:
    """The prompts that were asked for; the embedded model cannot converse."""
    if args.dataset:
        return prompts.data_set(args.dataset, args.num_prompts, args.seed)
    if not converses:
        print("this model cannot converse: it completes code", file=sys.stderr)
        return prompts.completions(args.num_prompts)
    return prompts.own(args.num_prompts)
