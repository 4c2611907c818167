"""The command; `benchmark NAME` runs one of the smaller ones."""

import sys

from dflash_mlx.benchmark import calibrate, command

COMMANDS = {"calibrate": calibrate.main}
"""What can follow `benchmark`."""

if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [""]
    sys.exit(COMMANDS[name](rest) if name in COMMANDS else command.main(sys.argv[1:]))
