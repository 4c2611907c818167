"""Known target -> drafter pairs, as data. Knows nothing of MLX."""

from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Pair:
    """A target and the drafter trained for it: folders, or ids on the Hugging Face hub."""

    target: str
    drafter: str


EMBEDDED = Pair(str(MODELS / "demo-target"), str(MODELS / "demo-drafter"))
"""The small trained pair that ships with the package: it completes Python and cannot converse."""
