"""The tables of docs/fast-tile.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from metal.emulator import Emulator

ROOT = Path(__file__).parents[2]


def test_the_page_says_what_is_counted(emulator: Emulator) -> None:
    """All but MLX's own kernels, which would need the whole wheel."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "count_operations.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    counted = done.stdout.splitlines()
    page = (ROOT / "docs" / "fast-tile.md").read_text(encoding="utf-8").splitlines()
    assert len(counted) > 40
    assert [line for line in counted if line not in page] == [], "run scripts/count_operations.py"
