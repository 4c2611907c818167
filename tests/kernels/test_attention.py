"""Attention plans against a table, and blocks that are cut so that no row leaves its own plan."""

import itertools

import pytest

from dflash_mlx.kernels import Attention, Chip, row_groups, sdpa_plan
from dflash_mlx.kernels.attention import Plan

SMALL, PHONE, LARGE, ULTRA = (Chip(15, size) for size in "gpsd")
TWO = "two passes"


def attention(gqa: int, head_dim: int = 128) -> Attention:
    return Attention(gqa, head_dim, head_dim)


@pytest.mark.parametrize(
    ("chip", "gqa", "q_len", "kL", "plan"),
    [
        # One pass, until the keys are many.
        (LARGE, 4, 1, 1023, Plan("one pass")),
        (LARGE, 4, 1, 1024, Plan(TWO, 64)),
        (SMALL, 4, 1, 4095, Plan("one pass")),
        (SMALL, 4, 1, 4096, Plan(TWO, 64)),
        (SMALL, 1, 1, 100_000, Plan("one pass")),
        (PHONE, 2, 1, 4096, Plan(TWO, 32)),
        (PHONE, 2, 2, 4096, Plan(TWO, 64)),
        # Parts by keys, for many queries.
        (LARGE, 6, 1, 1024, Plan(TWO, 64)),
        (LARGE, 6, 1, 1025, Plan(TWO, 128)),
        (LARGE, 6, 5, 8192, Plan(TWO, 128)),
        (LARGE, 6, 5, 8193, Plan(TWO, 256)),
        (LARGE, 6, 5, 32769, Plan(TWO, 512)),
        (LARGE, 6, 5, 65537, Plan(TWO, 1024)),
        (LARGE, 4, 1, 50_000, Plan(TWO, 64)),
        (LARGE, 4, 2, 50_000, Plan(TWO, 512)),
        (ULTRA, 6, 1, 16383, Plan(TWO, 128)),
        (ULTRA, 6, 1, 16384, Plan(TWO, 512)),
        (ULTRA, 6, 1, 65536, Plan(TWO, 1024)),
        (ULTRA, 2, 1, 8193, Plan(TWO, 256)),
        (ULTRA, 4, 1, 20_000, Plan(TWO, 128)),
        # A lone row has a kernel of its own.
        (LARGE, 8, 1, 8192, Plan("two passes for one row", 128)),
        (LARGE, 8, 2, 8192, Plan(TWO, 128)),
        (LARGE, 8, 1, 8191, Plan(TWO, 128)),
        (LARGE, 16, 1, 8192, Plan("two passes for one row", 128)),
        # No fused kernel at all.
        (LARGE, 6, 6, 100, None),
        (LARGE, 1, 9, 100, None),
        (LARGE, 40, 1, 100, None),
        (None, 6, 1, 100, None),
    ],
)
def test_plans(chip: Chip | None, gqa: int, q_len: int, kL: int, plan: Plan | None) -> None:
    assert sdpa_plan(chip, attention(gqa), q_len, kL) == plan


@pytest.mark.parametrize(("head_dim", "value_dim"), [(80, 80), (192, 192), (192, 128), (512, 512)])
def test_other_head_dimensions_have_no_plan(head_dim: int, value_dim: int) -> None:
    assert sdpa_plan(LARGE, Attention(4, head_dim, value_dim), 1, 100) is None


def test_a_lone_row_with_large_heads_has_no_kernel_of_its_own() -> None:
    assert sdpa_plan(LARGE, attention(8, 256), 1, 8192) == Plan(TWO, 128)


def growing(context: int):  # type: ignore[no-untyped-def]  # a key count for `row_groups`
    return lambda first, rows: context + first + rows


@pytest.mark.parametrize(
    ("chip", "gqa", "context", "rows", "sizes"),
    [
        (LARGE, 6, 100, 8, [5, 3]),  # 32 queries at most
        (LARGE, 16, 100, 5, [2, 2, 1]),
        (LARGE, 1, 100, 16, [8, 8]),
        (LARGE, 6, 1020, 5, [3, 1, 1]),  # 1,024 and 1,025 keys part the rows
        (SMALL, 6, 4093, 5, [2, 3]),
        (LARGE, 6, 8190, 5, [2, 3]),
        (LARGE, 4, 2000, 4, [1, 1, 1, 1]),  # alone 64 parts, together 128
        (LARGE, 4, 500, 4, [4]),
        (LARGE, 8, 9000, 3, [1, 1, 1]),  # the lone row's own kernel
        (ULTRA, 4, 2000, 5, [5]),
        (SMALL, 2, 5000, 3, [1, 1, 1]),
        (LARGE, 40, 10, 2, [1, 1]),
        (None, 6, 100, 3, [1, 1, 1]),
    ],
)
def test_blocks_are_cut_where_rows_part(
    chip: Chip | None, gqa: int, context: int, rows: int, sizes: list[int]
) -> None:
    assert row_groups(chip, attention(gqa), growing(context), rows) == sizes


def test_every_row_keeps_its_plan_on_every_gpu_at_every_threshold() -> None:
    thresholds = (0, 1024, 4096, 8192, 16384, 32768, 65536)
    contexts = [t + step for t in thresholds for step in range(-9, 4) if t + step >= 0]
    for chip, gqa, context in itertools.product((SMALL, PHONE, LARGE, ULTRA), (1, 2, 4, 6, 8, 12), contexts):
        first = 0
        for size in row_groups(chip, attention(gqa), growing(context), 8):
            together = sdpa_plan(chip, attention(gqa), size, context + first + size)
            for row in range(first, first + size):
                assert sdpa_plan(chip, attention(gqa), 1, context + row + 1) == together
            first += size
        assert first == 8


def test_without_the_heads_every_row_is_alone() -> None:
    assert row_groups(LARGE, None, growing(10), 3) == [1, 1, 1]
