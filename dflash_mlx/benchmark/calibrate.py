"""`python -m dflash_mlx.benchmark calibrate`: what a cycle of each block size costs on this machine."""

import argparse
import json
import sys

from dflash_mlx.calibrate import depths_within, measure_costs
from dflash_mlx.costs import Costs
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.loading import load
from dflash_mlx.options import add_pair_options, pair_settings


def parser() -> argparse.ArgumentParser:
    """The command line, from which the documentation's table is made."""
    p = argparse.ArgumentParser(
        prog="python -m dflash_mlx.benchmark calibrate",
        description="Measure what a cycle of each block size costs, without remembering it.",
    )
    add_pair_options(p)
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def main(argv: list[str]) -> int:
    """Returns 0, or the error's exit code."""
    args = parser().parse_args(argv)
    try:
        session = load(**pair_settings(args))
        if session.drafter is None:
            raise UsageError("there is no drafter: name one with --draft")
        depths = depths_within(session.context_window, session.largest_block)
        costs = measure_costs(session.target, session.drafter, depths, session.walker)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(costs.to_json()) if args.json else table(costs))
    return 0


def table(costs: Costs) -> str:
    """Milliseconds by block size and depth, and what a block must commit to pay."""
    lines = ["milliseconds of a whole cycle: draft, verify, roll back, choose; 1 row is a plain step", ""]
    lines.append(
        "rows   " + "".join(f"{f'{depth} keys':>13}" for depth in costs.depths) + "   break-even tau"
    )
    for rows in range(1, costs.largest + 1):
        cells = "".join(f"{1e3 * cycles[rows - 1]:13.2f}" for cycles in costs.cycles)
        lines.append(f"{rows:<7}{cells}{costs.cycles[0][rows - 1] / costs.cycles[0][0]:17.2f}")
    lines += ["", f"draft pass of the largest block alone: {1e3 * costs.draft:.2f} ms"]
    return "\n".join(lines)
