"""Write the tables of docs/models.md from the proofs of the tests; takes a few minutes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from model_table import PAGE, page

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
