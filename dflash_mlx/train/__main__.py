"""`python -m dflash_mlx.train`: a drafter for any target, from nothing but the target."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from dflash_mlx import hub
from dflash_mlx.errors import DFlashError, UsageError, memory_errors
from dflash_mlx.target.load import load_target
from dflash_mlx.train.job import Job, Workplace
from dflash_mlx.train.plan import plan, tokens_for
from dflash_mlx.train.stages import STAGES, Training, prepare

INTERRUPTED = 130
SETTINGS = ("model", "tokens", "prompts", "start", "layers", "block_size", "rank", "draft_head", "epochs")


def parser() -> argparse.ArgumentParser:
    """The command line, from which the documentation's table is made."""
    p = argparse.ArgumentParser(
        prog="python -m dflash_mlx.train", description="Train a drafter for a target."
    )
    p.add_argument("--model", help="target: folder or hub id of an mlx-lm model")
    p.add_argument(
        "--out", type=Path, required=True, help="folder of the drafter; work/ in it can go at the end"
    )
    p.add_argument("--stage", choices=STAGES, help="run this stage alone (default: all three)")
    p.add_argument("--resume", action="store_true", help="go on with the training in --out")
    amount = p.add_mutually_exclusive_group()
    amount.add_argument("--tokens", type=int, help=f"the target writes so many (default: {Job.tokens:,})")
    amount.add_argument("--hours", type=float, help="as many as this much time allows, by an estimate")
    p.add_argument("--prompts", help="JSON lines with prompts (default: a set of our own)")
    p.add_argument("--from", dest="start", help="drafter to go on from: folder or hub id")
    p.add_argument("--layers", type=int, help=f"layers of the drafter (default: {Job.layers})")
    p.add_argument(
        "--block-size", type=int, help=f"rows of a block, anchor included (default: {Job.block_size})"
    )
    p.add_argument("--rank", type=int, help=f"rank of the candidate selector (default: {Job.rank})")
    p.add_argument(
        "--draft-head", type=int, help="propose from the target's so many most used tokens (default: all)"
    )
    p.add_argument(
        "--epochs", type=float, help=f"how often to learn from each response (default: {Job.epochs:g})"
    )
    p.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 if something cannot be written; 2 for a bad argument or prompt; 3 for a model that cannot be
        used; 4 without enough memory; 130 if interrupted.
    """
    args = parser().parse_args(argv)
    try:
        with memory_errors():
            _run(args)
    except KeyboardInterrupt:
        print("interrupted; --resume goes on", file=sys.stderr)
        return INTERRUPTED
    except DFlashError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(args: argparse.Namespace) -> None:
    place = Workplace(args.out)
    wanted = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    fixed = {"layers", "block_size", "rank", "draft_head"}.intersection(wanted)
    if args.start is not None and fixed:
        raise UsageError(f"--from goes on with a drafter as it is: leave out {', '.join(sorted(fixed))}")
    if args.hours is not None and not 0 < args.hours < math.inf:
        raise UsageError(f"hours is {args.hours}: it must be positive and finite")
    if args.hours is not None and args.resume:
        raise UsageError("--hours says how much a new training is to be: leave it out with --resume")
    if args.resume:
        training = _prepare(place.resume(wanted), place)
    else:
        place.check_free()
        if args.model is None:
            raise UsageError("name the target: --model with a folder or hub id")
        training = _begin(_prepare(Job(**wanted), place), args.hours)
    for stage in STAGES if args.stage is None else (args.stage,):
        {"generate": training.generate, "fit": training.fit, "check": training.check}[stage]()
    if args.stage == "generate":
        _say(f"the responses are in {place.responses}")
    else:
        _say(f"the drafter is in {place.folder}")


def _prepare(job: Job, place: Workplace) -> Training:
    """Load the target, and settle the drafter's config."""
    folder = hub.resolve(job.model)
    # On a CPU, matrix products with quantized weights cost the same for every row.
    loaded = load_target(folder, dequantize=mx.default_device().type == mx.DeviceType.cpu)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    start = None if job.start is None else hub.resolve(job.start)
    return prepare(job, place, loaded.target, loaded.tokenizer, config, start, _say)


def _begin(training: Training, hours: float | None) -> Training:
    """Plan a new training, refuse what cannot fit, and write down what it is."""
    job, place = training.job, training.place
    estimate = plan(job, training.target, training.config, training.prompt_lengths, place.folder)
    if hours is not None:
        job = replace(job, tokens=tokens_for(hours, job, estimate))
        training = replace(training, job=job)
        estimate = plan(job, training.target, training.config, training.prompt_lengths, place.folder)
    _say(str(estimate))
    estimate.check()
    place.begin(job)
    return training


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
