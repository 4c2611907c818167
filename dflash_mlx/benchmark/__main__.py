"""Which measurement."""

import argparse
import sys
from collections.abc import Sequence

from dflash_mlx.benchmark import kernels


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the measurement's exit code."""
    p = argparse.ArgumentParser(prog="python -m dflash_mlx.benchmark", description="Measure this machine.")
    p.add_argument("what", choices=["kernels"], help="kernels: of verify passes, against MLX's own ops")
    _, rest = p.parse_known_args(argv)
    return kernels.main(rest)


if __name__ == "__main__":
    sys.exit(main())
