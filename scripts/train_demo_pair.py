"""Make the demo pair from nothing: a target, a drafter for it, and their card.

    python scripts/train_demo_pair.py

Stages: target, its responses, drafter with evaluation, card. Each leaves its result in the work folder and
is skipped when that exists, so an interrupted run goes on where it stopped. Delete the work folder to start
afresh. On one core that is shared with others, all of it took 50 minutes.

On Linux, MLX's wheel brings a slow reference BLAS. OpenBLAS (Debian: `libopenblas0-pthread`) is twenty times
faster; put this before the command:

    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0 OPENBLAS_NUM_THREADS=1
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo_card import DrafterSummary, render_card
from demo_corpus import (
    END_ID,
    MASK_ID,
    choose_examples,
    cut_prompts,
    encode_documents,
    read_corpus,
    split_corpus,
)
from demo_target import ARCHITECTURE, TargetRecipe, TargetReport, build_target, count_parameters
from tokenizers import Tokenizer

from dflash_mlx.config import DrafterConfig
from dflash_mlx.drafter.load import load_drafter
from dflash_mlx.target.load import load_target
from dflash_mlx.target.target import Target
from dflash_mlx.train.evaluate import evaluate_drafter
from dflash_mlx.train.fit import FitRecipe, fit_drafter, save_drafter
from dflash_mlx.train.initial import new_drafter
from dflash_mlx.train.respond import GREEDY, Responder, Sampling, batch_prompts
from dflash_mlx.train.shards import Sample, load_samples, save_samples

MODELS = Path(__file__).parent.parent / "dflash_mlx" / "demo"

DRAFTER: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    **{
        key: ARCHITECTURE[key]
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "rms_norm_eps",
            "max_position_embeddings",
            "attention_bias",
        )
    },
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "num_target_layers": ARCHITECTURE["num_hidden_layers"],
    "layer_types": ["full_attention"],
    "is_causal": False,
    "dflash_config": {
        "block_size": 5,
        "mask_token_id": MASK_ID,
        "target_layer_ids": [0, 1, 2],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 32,
        "selector_top_k": 16,
    },
}


@dataclass(frozen=True)
class Plan:
    """Where things go, and how much of everything."""

    work: Path
    models: Path
    target: TargetRecipe
    fit: FitRecipe
    responses: int = 1600
    held_out: int = 96
    examples: int = 16

    @property
    def target_folder(self) -> Path:
        return self.models / "demo-target"

    @property
    def drafter_folder(self) -> Path:
        return self.models / "demo-drafter"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--work", type=Path, default=Path("build/demo-pair"), help="intermediate results")
    parser.add_argument(
        "--models", type=Path, default=MODELS, help="where the two model folders and the card go"
    )
    options = parser.parse_args()
    plan = Plan(options.work, options.models, TargetRecipe(), FitRecipe(anchors=32))
    plan.work.mkdir(parents=True, exist_ok=True)

    target_report = train_target_stage(plan)
    # Dequantized: the same numbers that the 8-bit weights stand for, and much faster on a CPU.
    target = load_target(plan.target_folder, dequantize=True).target
    train = responses_stage(plan, target, held_out=False)
    held_out = responses_stage(plan, target, held_out=True)
    drafter_summary = train_drafter_stage(plan, target, train, held_out)
    examples = choose_examples(split_corpus(read_corpus())[1], plan.examples, seed=2)
    (plan.models / "held_out.json").write_text(json.dumps(examples, indent=1) + "\n")
    card = render_card(target_report, drafter_summary, platform.python_version())
    (plan.models / "README.md").write_text(card)
    print(f"done: {plan.models}", flush=True)


def train_target_stage(plan: Plan) -> TargetReport:
    """The quantized target's folder, and what its training came to."""
    report = plan.work / "target.json"
    if not report.exists():
        return build_target(plan.target, plan.work, plan.target_folder)
    print(f"target: found {report}", flush=True)
    return TargetReport(**json.loads(report.read_text()))


def responses_stage(plan: Plan, target: Target, *, held_out: bool) -> list[Sample]:
    """The target's responses to prompts from its training files, or greedy ones to held-out prompts.

    Of a file with more than are wanted the first are taken; one with fewer is written anew.
    """
    file = plan.work / ("held_out.safetensors" if held_out else "responses.safetensors")
    count, seed = (plan.held_out, 1) if held_out else (plan.responses, 0)
    if file.exists() and len(found := load_samples([file])) >= count:
        print(f"data: found {file}, took {count} of {len(found)} responses", flush=True)
        return found[:count]
    documents = split_corpus(read_corpus())[held_out]
    tokenizer = Tokenizer.from_file(str(plan.target_folder / "tokenizer.json"))
    prompts = cut_prompts(encode_documents(tokenizer, documents), count, seed)
    sampling = GREEDY if held_out else Sampling()
    samples: list[Sample] = []
    with Responder(target, DRAFTER["dflash_config"]["target_layer_ids"], frozenset([END_ID])) as responder:
        for number, batch in enumerate(batch_prompts(prompts, sampling.rows)):
            samples += responder.respond([prompts[i] for i in batch], sampling, seed + number)
            print(f"data: {len(samples)}/{len(prompts)} responses", flush=True)
    save_samples(samples, file)
    return samples


def train_drafter_stage(
    plan: Plan, target: Target, train: list[Sample], held_out: list[Sample]
) -> DrafterSummary:
    """The drafter's folder, and how it does on held-out prompts, measured on the weights as saved."""
    report = plan.work / "drafter.json"
    if report.exists():
        print(f"drafter: found {report}", flush=True)
        return DrafterSummary(**json.loads(report.read_text()))
    model = new_drafter(DrafterConfig.from_dict(DRAFTER), target, plan.fit.seed)
    started = time.monotonic()
    fit_drafter(model, target, train, plan.fit)
    seconds = time.monotonic() - started
    save_drafter(model, DRAFTER, plan.drafter_folder)
    result = evaluate_drafter(load_drafter(plan.drafter_folder), target, held_out)
    summary = DrafterSummary(
        **asdict(result),
        parameters=count_parameters(model),
        seconds=seconds,
        responses=len(train),
        response_tokens=sum(len(sample.tokens) - sample.prompt for sample in train),
    )
    print(f"drafter: tau {summary.tau:.2f}, unary {summary.tau_unary:.2f}, slots {summary.slots}", flush=True)
    report.write_text(json.dumps(asdict(summary), indent=2) + "\n")
    return summary


if __name__ == "__main__":
    main()
