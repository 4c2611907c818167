"""What gives every row of a verify pass the bits it has alone: which kernels, where, and if they hold."""

from dflash_mlx.kernels.attention import Attention, row_groups, sdpa_plan
from dflash_mlx.kernels.chip import Chip, Device
from dflash_mlx.kernels.choice import MOST_ROWS, Choice, Kernels, Layer, Matrix, Route, Walker

__all__ = [
    "MOST_ROWS",
    "Attention",
    "Chip",
    "Choice",
    "Device",
    "Kernels",
    "Layer",
    "Matrix",
    "Route",
    "Walker",
    "row_groups",
    "sdpa_plan",
]
