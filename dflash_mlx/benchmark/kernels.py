"""`python -m dflash_mlx.benchmark kernels`: time per row count, shape and way, as a table to paste."""

import argparse
import sys
from collections.abc import Sequence

from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.kernels import Kernels
from dflash_mlx.kernels.timing import STOCK, Timings, time_layer

SHAPES = ("5120x17408", "17408x5120", "5120x6144", "2048x5632")
"""Inputs x outputs: the feed-forward layers and a projection of a 27B target, and a small one."""


def parser() -> argparse.ArgumentParser:
    """The command line, from which the documentation's table is made."""
    p = argparse.ArgumentParser(
        prog="python -m dflash_mlx.benchmark kernels",
        description="Time the kernels of verify passes against MLX's own ops. Needs a GPU.",
    )
    p.add_argument("--shape", action="append", metavar="KxN", help="inputs x outputs; may be repeated")
    p.add_argument("--bits", type=int, choices=(4, 8), default=4, help="of the weights (default: 4)")
    p.add_argument("--group-size", type=int, choices=(32, 64, 128), default=64, help="weights per scale (64)")
    p.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 for a bad argument or where there is no GPU."""
    args = parser().parse_args(argv)
    try:
        return _run(args, Kernels())
    except DFlashError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(args: argparse.Namespace, kernels: Kernels) -> int:
    shapes = [_shape(text) for text in args.shape or SHAPES]
    if not kernels.device.metal:
        raise UsageError("there is no GPU here: kernels can be timed on a Mac only")
    device = kernels.device
    form = f"{args.bits} bits, groups of {args.group_size}"
    print(f"{device.architecture}, {device.system}, MLX {device.mlx}, {form}\n")
    for K, N in shapes:
        try:
            timings = time_layer(kernels, K, N, bits=args.bits, group_size=args.group_size)
        except ValueError as error:
            raise UsageError(f"shape {K}x{N}: {error}") from error
        print(table(K, N, timings), flush=True)
    return 0


def _shape(text: str) -> tuple[int, int]:
    K, _, N = text.partition("x")
    if not (K.isdecimal() and N.isdecimal() and int(K) and int(N)):
        raise UsageError(f"--shape is {text!r}: pass inputs x outputs, such as 5120x17408")
    return int(K), int(N)


def table(K: int, N: int, timings: Sequence[Timings]) -> str:
    """Markdown: microseconds by rows and way, the product's own way marked, and its price in single rows."""
    ways = list(timings[0].ways)
    one = timings[0].ways[STOCK]
    lines = [f"| {K}x{N}, µs | {' | '.join(ways)} | chosen / one row |", "| --- " * (len(ways) + 2) + "|"]
    for timing in timings:
        cells = [f"**{t:.0f}**" if way == timing.chosen else f"{t:.0f}" for way, t in timing.ways.items()]
        price = timing.ways[timing.chosen] / one
        lines.append(f"| {timing.rows} rows | {' | '.join(cells)} | {price:.2f} |")
    return "\n".join([*lines, ""])
