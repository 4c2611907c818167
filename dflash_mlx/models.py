"""`python -m dflash_mlx.models`: the known pairs and what fits here; `inspect`: a model folder, explained.

Never asks the network.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dflash_mlx import hub, memory, pairs, tensors
from dflash_mlx.config import DrafterConfig
from dflash_mlx.drafter import load_drafter
from dflash_mlx.errors import DFlashError, ModelError
from dflash_mlx.pairs import PUBLIC, Pair
from dflash_mlx.progress import readable
from dflash_mlx.target import load_target
from dflash_mlx.terminal import printable

BITS = 4.5
"""Of a weight in a 4-bit model, scales and biases included."""

OVERHEAD = 1.1
"""Caches and work space of a few thousand tokens, as a factor of the weights."""

CONTEXTS = (1024, 8192, 32768)


def parser() -> argparse.ArgumentParser:
    """The command line, from which the documentation's table is made."""
    p = argparse.ArgumentParser(
        prog="python -m dflash_mlx.models", description="Known pairs; a model explained."
    )
    commands = p.add_subparsers(dest="command")
    inspect = commands.add_parser("inspect", help="explain the target or the drafter that a folder holds")
    inspect.add_argument("path", help="a folder, or a hub id that is in the cache")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 3 for a folder that holds no usable model."""
    args = parser().parse_args(argv)
    try:
        lines = inspect(args.path) if args.command == "inspect" else listing(memory.available())
        for line in lines:
            print(printable(line))
    except DFlashError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    return 0


# --- the known pairs ----------------------------------------------------------------------------


def listing(limit: int) -> Iterator[str]:
    """A line per pair, against `limit` bytes of memory."""
    ids = hub.cached_ids()
    yield f"{'target':<35} {'drafter':<46} {'block':>5} {'download':>9} {'memory':>9}  here"
    for pair in PUBLIC:
        size = (pair.target_billions * BITS / 8 + pair.drafter_billions * 2) * 1e9
        fits = "fits" if size * OVERHEAD <= limit else "too large"
        cached = _cached(pair, ids)
        yield (
            f"{pair.target:<35} {pair.drafter_name:<46} {pair.block_size or '':>5} {readable(size):>9} "
            f"{readable(size * OVERHEAD):>9}  {', '.join([fits, *cached])}"
        )
    yield ""
    yield (
        f"Estimates for a target of 4 bits, its drafter and a few thousand tokens; {readable(limit)} are "
        "available. Any target of the same shape finds its drafter by itself."
    )


def _cached(pair: Pair, ids: Sequence[str]) -> list[str]:
    """What of a pair is here already, in words."""
    found = []
    if Path(pair.drafter).is_absolute():
        found.append("drafter in this package")
    elif hub.cached(pair.drafter, pair.revision):
        found.append("drafter cached")
    found += [f"{name} cached" for name in ids if name != pair.drafter and pair.base.lower() in name.lower()]
    return found


# --- one model ----------------------------------------------------------------------------------


def inspect(path: str) -> Iterator[str]:
    """What a folder, or a cached hub id, holds and what it fits.

    Raises:
        DFlashError: nothing usable is there, and why.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        found = hub.cached(path) if path.count("/") == 1 else None
        if found is None:
            raise ModelError(f"{path!r} is neither a folder nor a hub id in the cache ({hub.cache_folder()})")
        folder = found
    config = pairs.read_config(folder)
    drafter = "dflash_config" in config or "DFlash" in str(config.get("architectures"))
    yield f"{path}: a {'drafter' if drafter else 'target'}" + (
        f", commit {hub.commit(folder)}" if hub.commit(folder) else ""
    )
    yield from _drafter(folder, config) if drafter else _target(folder, path, config)


def _drafter(folder: Path, raw: dict[str, Any]) -> Iterator[str]:
    config = DrafterConfig.from_dict(raw)
    yield f"DFlash{' 2' if config.generation == 2 else ''}, as understood:"
    for field in fields(config):
        yield f"  {field.name:<24} {getattr(config, field.name)}"
    yield "tensors:"
    yield tensors.table(tensors.read_tensors(folder))
    load_drafter(folder)
    yield "the tensors are those that the config announces"
    fitting = pairs.fits(config.hidden_size, config.num_target_layers, config.vocab_size)
    bases = ", ".join(pair.target for pair in fitting) or "none that is known"
    yield (
        f"fits targets with hidden size {config.hidden_size}, {config.num_target_layers} layers and a "
        f"vocabulary of {config.vocab_size}: {bases}"
    )


def _target(folder: Path, path: str, config: dict[str, Any]) -> Iterator[str]:
    yield "tensors:"
    yield tensors.table(tensors.read_tensors(folder))
    loaded = load_target(folder)
    target = loaded.target
    yield f"model_type {config.get('model_type')!r}"
    yield f"hidden size {target.hidden_size}, {len(target.layers)} layers"
    yield f"vocabulary {target.vocab_size}, context {target.context_length or 'unknown'} tokens"
    yield from loaded.notes
    try:
        match = pairs.drafter_for(folder, path)
        yield match.note or f"drafter {match.pair.drafter}"
    except ModelError as error:
        yield str(error)
    yield "memory without a drafter:"
    longest = target.context_length or CONTEXTS[-1]
    contexts = sorted({min(context, longest) for context in CONTEXTS})
    yield memory.plan(target, None).table(contexts, memory.available())


if __name__ == "__main__":
    sys.exit(main())
