"""What is asked: a small set of our own, or public data sets in the form that the method's authors use."""

import importlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import DFlashError, UsageError, one_line
from dflash_mlx.pairs import DEMO

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A conversation: each turn is sent after the reply to the one before. `raw` text has no template."""

    category: str
    turns: tuple[str, ...]
    raw: bool = False


OWN: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python function that merges overlapping intervals, with a docstring and three tests.",
        "Implement a least-recently-used cache in Rust without external crates.",
        "Rewrite this loop as SQL: for every customer, the three largest orders of the last year.",
        "Write a bash script that finds duplicate files below a folder by their hash.",
        "Write a React component for a table that can be sorted by any column, in TypeScript.",
    ),
    "math": (
        "A tank fills through one pipe in 6 hours and another in 4, and drains in 12. How long to fill it?",
        "Prove that the square root of 3 is irrational.",
        "How many divisors has 2^4 * 3^2 * 7? Show each step.",
        "Find all real x with x^3 - 6x^2 + 11x - 6 = 0, and explain the method.",
        "Two dice are thrown until their sum is 7. What is the expected number of throws, and why?",
    ),
    "chat": (
        "I have two days in Lisbon in November and do not like museums. What should I do?",
        "Explain to a ten-year-old why the sky is blue and sunsets are red.",
        "My sourdough is dense and sour. What could be wrong, most likely causes first?",
        "Help me write a polite mail to a neighbour whose dog barks at night.",
        "What are the trade-offs between renting and buying a flat?",
    ),
    "prose": (
        "Write the first page of a novel that begins in a lighthouse during a storm.",
        "Describe a market in the early morning, in the present tense and without dialogue.",
        "Write a short story in which nobody notices that the clocks have stopped.",
        "Write an essay of four paragraphs on why people keep diaries.",
        "Continue in the same voice: The letter had been lying under the mat for eleven years.",
    ),
}


def own(per_category: int) -> list[Task]:
    """So many prompts of each of our categories."""
    return [Task(category, (text,)) for category, texts in OWN.items() for text in texts[:per_category]]


def completions(count: int) -> list[Task]:
    """Pieces of code to complete, for a model without a chat template such as the embedded one."""
    texts: list[str] = json.loads((DEMO / "held_out.json").read_text(encoding="utf-8"))
    return [Task("code", (text,), raw=True) for text in texts[:count]]


@dataclass(frozen=True)
class _DataSet:
    source: tuple[str, ...]
    split: str
    turns: Callable[[Row], tuple[str, ...]]


_STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
DATA_SETS = {
    "gsm8k": _DataSet(("openai/gsm8k", "main"), "test", lambda row: (f"{row['question']}\n{_STEPS}",)),
    "math500": _DataSet(("HuggingFaceH4/MATH-500",), "test", lambda row: (f"{row['problem']}\n{_STEPS}",)),
    "humaneval": _DataSet(
        ("openai/openai_humaneval",),
        "test",
        lambda row: (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{row['prompt']}\n```",
        ),
    ),
    "mbpp": _DataSet(("google-research-datasets/mbpp", "sanitized"), "test", lambda row: (row["prompt"],)),
    "mt-bench": _DataSet(("HuggingFaceH4/mt_bench_prompts",), "train", lambda row: tuple(row["prompt"])),
}
"""The wording is the authors', so that results can be set beside theirs."""


def data_set(name: str, count: int, seed: int) -> list[Task]:
    """Some rows of a public data set, drawn with this seed.

    Raises:
        DFlashError: it cannot be loaded, for want of a network most often.
        UsageError: the package `datasets` is not installed.
    """
    try:
        loader: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise UsageError(
            f"--dataset {name} needs the package datasets: pip install 'dflash-chat[datasets]'"
        ) from error
    chosen = DATA_SETS[name]
    try:
        rows = list(loader.load_dataset(*chosen.source, split=chosen.split))
    except Exception as error:  # the package raises many kinds, its network libraries' among them
        raise DFlashError(
            f"cannot load the data set {name} ({chosen.source[0]}): {one_line(error)}; "
            "it needs a network the first time"
        ) from error
    random.Random(seed).shuffle(rows)
    return [Task(name, chosen.turns(row)) for row in rows[:count]]
