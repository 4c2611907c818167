"""The command-line options of every command that loads a pair: which one, and how."""

import argparse
from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "help": "target: folder or hub id of an mlx-lm model "
        "(default: SmolLM2 if here, else the embedded pair)",
    },
    "draft": {"help": "drafter: folder or hub id; none: no drafter (default: the pair's)"},
    "numerics": {
        "choices": ("exact", "fast"),
        "default": "exact",
        "help": "fast: larger blocks for less on a GPU, in other last bits than mlx-lm's (default: exact)",
    },
    "draft_bits": {"type": int, "choices": (4, 8), "help": "quantize the drafter's linear layers"},
    "revision": {"help": "branch, tag or commit of --model on the hub"},
    "draft_revision": {"help": "branch, tag or commit of --draft on the hub"},
    "adapter": {"help": "LoRA adapter for --model: folder or hub id, as mlx-lm trains them"},
    "dequantize": {"action": "store_true", "help": "turn a quantized target into float32"},
}
"""Settings of each option's parser, by the name that the parsed value has."""


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Let a command take these options."""
    for name, settings in OPTIONS.items():
        parser.add_argument(_flag(name), **settings)


def add_block_size(parser: argparse.ArgumentParser) -> None:
    """Let a command take one block size for all that it decodes."""
    parser.add_argument(
        "--block-size",
        type=block_size,
        metavar="auto|N",
        help="rows of a verify pass; auto (default): for each cycle what is fastest here and for this text; "
        "drafts may be copied from it",
    )


def block_size(text: str) -> int | None:
    """A command's `--block-size`: rows, or None for `auto`.

    Raises:
        ValueError: neither.
    """
    return None if text == "auto" else int(text)


def pair_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What `dflash_mlx.load` takes, from parsed arguments."""
    settings = {name: getattr(args, name) for name in OPTIONS}
    return {"target": settings.pop("model"), "drafter": settings.pop("draft"), **settings}


def given(args: argparse.Namespace, but: str = "") -> list[str]:
    """The options but one that do not have their default, as words of a command line."""
    words: list[str] = []
    for name, settings in OPTIONS.items():
        if name == but:
            continue
        value = getattr(args, name)
        if value is True:
            words.append(_flag(name))
        elif value and value != settings.get("default"):
            words += [_flag(name), str(value)]
    return words


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
