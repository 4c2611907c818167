"""What the parts of a drafter and of its training are worth, measured on the embedded pair.

    python scripts/study_trainer.py ablations    a drafter without its selector, its convolutions, ...
    python scripts/study_trainer.py regain       what --from wins back on a changed target

Every figure is tau on held-out greedy responses, by the same walk that the trainer reports. On Linux put an
OpenBLAS before the command, as in scripts/train_demo_pair.py.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from demo_target import TargetRecipe
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from train_demo_pair import DRAFTER, Plan, responses_stage

from dflash_mlx.config import DrafterConfig
from dflash_mlx.drafter.load import load_drafter
from dflash_mlx.drafter.model import DrafterModel
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.target.load import load_target
from dflash_mlx.target.target import Target
from dflash_mlx.train.evaluate import evaluate_drafter
from dflash_mlx.train.fit import FitRecipe, fit_drafter
from dflash_mlx.train.initial import new_drafter
from dflash_mlx.train.losses import Goal

FULL_STEPS = 1200  # of the shipped drafter
NOISE = 0.05  # relative change of every matrix of the target


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("study", choices=("ablations", "regain"))
    parser.add_argument("--work", type=Path, default=Path("build/demo-pair"), help="recorded responses")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each ablation")
    parser.add_argument("--responses", type=int, default=800, help="to train on")
    parser.add_argument("--anchors", type=int, default=32, help="blocks of each response in a step")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    target = load_target(Path(EMBEDDED.target), dequantize=True).target
    if options.study == "ablations":
        ablations(
            target, options.work, options.responses, FitRecipe(steps=options.steps, anchors=options.anchors)
        )
    else:
        regain(target, options.work, options.responses, options.anchors)


def ablations(target: Target, work: Path, responses: int, recipe: FitRecipe) -> None:
    """Train the same drafter several times, each time without one thing."""
    plan = _plan(work, responses)
    train, held_out = (responses_stage(plan, target, held_out=which) for which in (False, True))
    config = DrafterConfig.from_dict(DRAFTER)
    variants = {
        "all": (config, Goal()),
        "no selector": (replace(config, selector_rank=0), Goal()),
        "no convolution": (replace(config, conv_kernel_size=0), Goal()),
        "token only, no target distribution": (config, Goal(soft=0.0)),
        "without the target's states": (config, Goal(states=0.0)),
        "fixed slot weights": (config, Goal(prefix=0.0)),
    }
    for name, (changed, goal) in variants.items():
        model = new_drafter(changed, target, seed=0)
        started = time.monotonic()
        fit_drafter(model, target, train, replace(recipe, goal=goal))
        report = evaluate_drafter(model, target, held_out)
        slots = " ".join(f"{share:.2f}" for share in report.slots)
        print(
            f"{name}: tau {report.tau:.3f}, unary {report.tau_unary:.3f}, slots {slots}, "
            f"{report.cycles} cycles, {time.monotonic() - started:.0f} s",
            flush=True,
        )


def regain(target: Target, work: Path, responses: int, anchors: int) -> None:
    """Change the target; fit the shipped drafter to it for a tenth of its steps, on a tenth of its data."""
    drafter = load_drafter(Path(EMBEDDED.drafter))
    before = _tau(drafter, target, work)
    _perturb(target.model)
    changed = work / "changed"
    changed.mkdir(exist_ok=True)
    lost = _tau(drafter, target, changed)
    train = responses_stage(_plan(changed, responses // 5), target, held_out=False)
    recipe = FitRecipe(steps=FULL_STEPS // 10, anchors=anchors, peak_rate=FitRecipe.peak_rate / 4, warmup=20)
    fit_drafter(drafter, target, train, recipe)
    after = _tau(drafter, target, changed)
    print(
        f"tau {before:.3f} on its own target, {lost:.3f} on the changed one, {after:.3f} after "
        f"{recipe.steps} of {FULL_STEPS} steps: {(after - lost) / (before - lost):.0%} of the loss regained",
        flush=True,
    )


def _perturb(model: nn.Module) -> None:
    mx.random.seed(1)
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    noisy = [
        (name, value + NOISE * mx.std(value) * mx.random.normal(value.shape) if value.ndim == 2 else value)
        for name, value in weights
    ]
    model.update(tree_unflatten(noisy))
    mx.eval(model.parameters())


def _tau(drafter: DrafterModel, target: Target, work: Path) -> float:
    return evaluate_drafter(drafter, target, responses_stage(_plan(work, 0), target, held_out=True)).tau


def _plan(work: Path, responses: int) -> Plan:
    return Plan(work, Path(EMBEDDED.target).parent, TargetRecipe(), FitRecipe(), responses=responses)


if __name__ == "__main__":
    main()
