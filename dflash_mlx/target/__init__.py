"""What speculation needs from a target: taps on its layers, block verification, exact rollback."""

from dflash_mlx.target.load import load_target
from dflash_mlx.target.target import Target

__all__ = ["Target", "load_target"]
