"""What the documents state about the code is generated from the code."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_option_tables_are_those_of_the_parsers() -> None:
    script = ROOT / "scripts" / "write_option_tables.py"
    done = subprocess.run([sys.executable, script, "--check"], check=False)
    assert done.returncode == 0, "run scripts/write_option_tables.py"


def test_the_picture_shows_the_chat_as_it_is() -> None:
    script = ROOT / "scripts" / "chat_picture.py"
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, script, "--check"], check=False, env=env)
    assert done.returncode == 0, "run scripts/chat_picture.py"
