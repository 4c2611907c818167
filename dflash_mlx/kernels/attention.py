"""Which kernel MLX's attention takes for how many rows and keys, and how a block is cut to stay with one.

MLX splits the keys of a row among threads, and adds up what they found, in a way that depends on the GPU, the
number of keys and the number of rows. Rows have the bits they have alone where all of that is equal. Facts:
mlx/backend/metal/scaled_dot_product_attention.cpp, 0.32.4.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dflash_mlx.kernels.chip import Chip

MOST_ROWS = 8
"""Rows beyond which MLX takes the kernels of a prompt."""
MOST_QUERIES = 32
"""Query heads times rows, for one key head, that one threadgroup can hold."""
HEAD_DIMS = (64, 96, 128, 256)
"""Of keys and values alike; others are computed by ordinary matrix products."""
LONE_GQA, LONE_HEAD_DIMS, LONE_KEYS = (8, 12, 16), (64, 128), 8192
"""A row alone has a kernel of its own for these, from so many keys on."""


@dataclass(frozen=True)
class Attention:
    """What MLX's choice depends on: query heads per key head, and the dimensions of keys and values."""

    gqa: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class Plan:
    """How keys are split: a kernel, and into how many parts."""

    kernel: str
    parts: int = 1


def sdpa_plan(chip: Chip | None, attention: Attention, q_len: int, kL: int) -> Plan | None:
    """The plan for `q_len` rows over `kL` keys, the rows' own among them.

    Returns:
        None where a row's numbers may depend on the rows beside it: no fused kernel, or an unknown GPU.
    """
    fits = q_len <= MOST_ROWS and q_len * attention.gqa <= MOST_QUERIES
    if chip is None or not fits or attention.head_dim not in HEAD_DIMS:
        return None
    if attention.value_dim != attention.head_dim:
        return None
    if not ((chip.is_large and kL >= 1024) or (attention.gqa > 1 and kL >= 4096)):
        return Plan("one pass")
    has_own = q_len == 1 and attention.gqa in LONE_GQA and attention.head_dim in LONE_HEAD_DIMS
    kernel = "two passes for one row" if has_own and kL >= LONE_KEYS else "two passes"
    return Plan(kernel, _parts(chip, attention.gqa * q_len, kL))


def _parts(chip: Chip, queries: int, kL: int) -> int:
    """Parts of the keys in MLX's two-pass attention."""
    if chip.size == "s":
        if kL <= 1024 or queries <= 4:
            return 64
        return next((parts for most, parts in ((8192, 128), (32768, 256), (65536, 512)) if kL <= most), 1024)
    if chip.size == "d":
        if queries <= 2 and kL > 8192:
            return 256
        if queries >= 6 and kL >= 16384:
            return 512 if kL < 65536 else 1024
        return 128
    return 64 if queries >= 4 else 32


def row_groups(
    chip: Chip | None, attention: Attention | None, keys: Callable[[int, int], int], rows: int
) -> list[int]:
    """Cut a block so that in every part each row has the plan it has alone.

    Args:
        attention: None where it is not known: every row is a part.
        keys: (first row of a part, its rows) -> keys that the part is handed, its own among them.
        rows: of the block.

    Returns:
        Sizes of the parts, in order.
    """

    def alike(first: int, size: int) -> bool:
        if attention is None:
            return False
        together = sdpa_plan(chip, attention, size, keys(first, size))
        alone = {sdpa_plan(chip, attention, 1, keys(row, 1)) for row in range(first, first + size)}
        return together is not None and alone == {together}

    sizes: list[int] = []
    while (first := sum(sizes)) < rows:
        fitting = (size for size in range(min(MOST_ROWS, rows - first), 1, -1) if alike(first, size))
        sizes.append(next(fitting, 1))
    return sizes
