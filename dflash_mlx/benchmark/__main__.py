"""The command; `benchmark NAME` runs one of the smaller ones."""

import sys

from dflash_mlx.benchmark import calibrate, command, kernels

COMMANDS = {"calibrate": calibrate.main, "kernels": kernels.main}
"""What can follow `benchmark`."""

if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [""]
    sys.exit(COMMANDS[name](rest) if name in COMMANDS else command.main(sys.argv[1:]))
