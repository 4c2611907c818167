"""The model card of a trained drafter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_mlx import __version__
from dflash_mlx.config import DrafterConfig
from dflash_mlx.train.check import EndToEnd
from dflash_mlx.train.evaluate import DraftReport
from dflash_mlx.train.job import Job

CARD = """\
# {kind} drafter for {model}

Made by `python -m dflash_mlx.train` (dflash-chat {version}). Block of {block} rows, {layers} layers,
taps on target layers {taps}{selector}{head}.

## Data

{responses:,} responses of {tokens:,} tokens, written by the target itself ({greedy}) to {source}.
No other text was used. The weights began as {origin}. They are derived from the target: what its licence says
about derivatives and about its output holds for them. The trainer and its own prompts are Apache-2.0.

## Training

{steps:,} steps over {seen:,} response tokens, repetitions counted. Curves: `curves.svg`.

## Measured

On {cycles:,} verify cycles of greedy held-out responses: **tau {tau:.2f}** tokens per cycle, bonus
included{unary}. Each slot's draft, given that all before it were right, is
right in {slots}{recall}.

Decoded to the end, speculative against plain, on the machine that trained it:

| prompts | tau | identical replies | speed over plain [95 %] |
| --- | --- | --- | --- |
{rows}
"""

ORIGIN = "copies of the target's last layers where shapes fit, and as random numbers elsewhere"


def render_card(
    job: Job,
    config: DrafterConfig,
    facts: Mapping[str, Any],
    walked: DraftReport,
    ended: Mapping[str, EndToEnd],
) -> str:
    """Markdown. `facts` is what the fit stage left: counts, and its points."""
    last, recall = facts["points"][-1], _shares(walked.recall)
    rows = [
        f"| {e.prompts} {name} | {e.tau:.2f} | {e.identical} | {e.speedup or '-'} |"
        for name, e in ended.items()
    ]
    # The first generation has no candidate selector, so there is nothing to say of it.
    selector = config.selector_rank
    return CARD.format(
        kind="DFlash 2" if config.generation == 2 else "DFlash",
        model=Path(job.model).name if Path(job.model).is_dir() else job.model,
        version=__version__,
        block=config.block_size,
        layers=config.num_hidden_layers,
        taps=", ".join(map(str, config.target_layer_ids)),
        selector=f", candidate selector of rank {selector}" if selector else "",
        head=f", proposing from {config.draft_head_size:,} token ids" if config.draft_head_size else "",
        responses=facts["train_responses"],
        tokens=facts["train_tokens"],
        greedy="60 % greedy, the others at temperature 0.7",
        source=_source(job, facts),
        steps=last["step"],
        seen=last["tokens"],
        origin=ORIGIN if job.start is None else f"those of {job.start}",
        cycles=walked.cycles,
        tau=walked.tau,
        unary=f"; {walked.tau_unary:.2f} without the candidate selector" if selector else "",
        slots=_shares(walked.slots),
        recall=f"; the right token is among the selector's candidates in {recall}" if selector else "",
        rows="\n".join(rows),
    )


def _source(job: Job, facts: Mapping[str, Any]) -> str:
    if job.prompts is not None:
        return f"prompts from {job.prompts}"
    conversed = facts.get("conversed_tokens")
    questions = f", {conversed:,} of these tokens to questions that it wrote too" if conversed else ""
    return f"the trainer's own prompts{questions}"


def _shares(values: tuple[float, ...]) -> str:
    return ", ".join(f"{100 * value:.0f} %" for value in values)
