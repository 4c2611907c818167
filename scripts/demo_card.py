"""The card that lies beside the demo pair: what it is, what it was made from, how well it does."""

from __future__ import annotations

from dataclasses import dataclass

from demo_target import TargetReport

CARD = """\
# Demo pair

`demo-target` completes Python source; it **cannot converse**, follow instructions or answer questions, and
the code it writes is only shaped like Python. `demo-drafter` is a DFlash 2 drafter for it. They are here so
that everything can be tried, tested and measured in seconds, offline, on any machine.

| | demo-target | demo-drafter |
| --- | --- | --- |
| architecture | mlx-lm's `qwen3_5`: 3 Gated DeltaNet layers, 1 attention layer | DFlash 2: 1 layer, block 5 |
| parameters | {target.parameters:,} | {drafter.parameters:,} |
| stored as | affine 8 bit, group 64 | bf16 |
| trained on | {trained:,} tokens ({epochs:.2f} epochs) | {drafter.response_tokens:,} tokens of the target |
| time | {target_minutes:.0f} minutes | {drafter_minutes:.0f} minutes |
| held out | loss {target.held_out_loss:.2f} nats per token | tau {drafter.tau:.2f} |

Times are of one shared CPU core.

## Provenance

Both start from random weights. The corpus is the standard library of CPython {python} without tests and
generated tables, cut into top-level definitions, and a byte-level BPE of 2048 ids trained on the same
files. One file in twenty, chosen by a hash of its path, is held out. CPython is distributed under the PSF
License Agreement (https://docs.python.org/3/license.html); nothing else went into the weights. The drafter
learned from {drafter.responses:,} responses of the quantized target to prompts cut from the training files,
60 % greedy and 40 % at temperature 0.7.

The training is one command, with fixed seeds:

    python scripts/train_demo_pair.py

Another Python version brings another corpus, and another machine other rounding, so the weights come out
alike, not identical.

## Acceptance on held-out prompts

Greedy responses to prompts from held-out files, block 5, {drafter.cycles:,} verify cycles. *tau* is the
number of tokens committed per cycle, the target's own included.

| | slot 1 | slot 2 | slot 3 | slot 4 | tau |
| --- | --- | --- | --- | --- | --- |
| right, given that all before were | {slots} | {drafter.tau:.2f} |
| right token among the 16 candidates | {recall} | |
| without the candidate selector | | | | | {drafter.tau_unary:.2f} |
| without repetitions | | | | | {drafter.tau_fresh:.2f} |

So small a model repeats itself under greedy decoding, and repetitions are easy to draft: do not compare this
tau with that of real models. The last row leaves out every cycle whose last four tokens had occurred
together before; {fresh:.0f} % of the cycles remain.
"""


@dataclass(frozen=True)
class DrafterSummary:
    """`DraftReport` and what the training took."""

    tau: float
    tau_unary: float
    tau_fresh: float
    fresh_share: float
    slots: tuple[float, ...]
    recall: tuple[float, ...]
    cycles: int
    parameters: int
    seconds: float
    responses: int
    response_tokens: int


def render_card(target: TargetReport, drafter: DrafterSummary, python: str) -> str:
    """The card as Markdown."""
    return CARD.format(
        target=target,
        drafter=drafter,
        python=python,
        trained=target.trained_tokens,
        fresh=100 * drafter.fresh_share,
        epochs=target.trained_tokens / target.corpus_tokens,
        target_minutes=target.seconds / 60,
        drafter_minutes=drafter.seconds / 60,
        slots=" | ".join(f"{share:.2f}" for share in drafter.slots),
        recall=" | ".join(f"{share:.2f}" for share in drafter.recall),
    )
