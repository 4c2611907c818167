"""What the first load measures of a pair on this machine."""

from dflash_mlx.calibrate import CYCLES, _Sweep


def test_every_size_is_timed_and_slow_ones_less_often() -> None:
    sweep = _Sweep(3)
    seconds = {1: 0.01, 2: 0.15, 3: 2.0}
    asked = []
    while not sweep.done:
        rows = sweep.rows(3, 8)
        asked.append(rows)
        sweep.observe(rows, 0, seconds[rows], 8)
    assert [asked.count(rows) for rows in (1, 2, 3)] == [CYCLES, 3, 2]
    assert asked[-1] == 1, "a plain step before a block would look cheap"
