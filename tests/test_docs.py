"""What the documents state about the code is generated from the code."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_option_tables_are_those_of_the_parsers() -> None:
    script = ROOT / "scripts" / "write_option_tables.py"
    done = subprocess.run([sys.executable, script, "--check"], check=False)
    assert done.returncode == 0, "run scripts/write_option_tables.py"
