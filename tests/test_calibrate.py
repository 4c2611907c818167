"""What the first loads measure of a pair on this machine."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx import nn
from train_tiny import DRAFTER, make_target

from dflash_mlx import calibrate
from dflash_mlx.calibrate import DEPTHS, LOADS, ROUNDS, _Sweep, deep_drafter, depths_within
from dflash_mlx.config import FULL, SLIDING
from dflash_mlx.costs import Costs
from dflash_mlx.drafter import DrafterModel
from dflash_mlx.schedule import Plan


def swept(sweep: _Sweep, seconds: dict[int, float]) -> list[int]:
    """Go through the sweep as the loop does; the sizes of all cycles."""
    sizes = [sweep.plan(9, 8).rows]
    while not sweep.done:
        rows = sizes[-1]
        if rows == 1:  # asked ahead
            sizes.append(sweep.plan(9, 8).rows)
        # Of the plain steps the loop times those among others.
        inner = rows > 1 or sizes[-3:-1] == [1, 1] == sizes[-2:]
        sweep.observe(Plan(rows), 0, seconds[rows] if inner else 0.0, 8)
        if rows > 1:
            sizes.append(sweep.plan(9, 8).rows)
    return sizes


def test_all_sizes_are_timed_in_turns() -> None:
    sweep = _Sweep(3)
    sizes = swept(sweep, {1: 0.01, 2: 0.02, 3: 0.03})
    assert sizes[:12] == [3, 2, 1, 1, 1, 1] * 2
    assert {rows: len(times) for rows, times in sweep.seconds.items()} == {
        1: 2 * ROUNDS,
        2: ROUNDS,
        3: ROUNDS,
    }


def test_slow_sizes_are_timed_less_often() -> None:
    sweep = _Sweep(3)
    swept(sweep, {1: 0.2, 2: 0.5, 3: 0.9})
    assert {rows: len(times) for rows, times in sweep.seconds.items()} == {1: 4, 2: 2, 3: 2}


def test_a_cycle_of_unknown_length_does_not_count() -> None:
    sweep = _Sweep(2)
    for seconds in (0.0, 0.0, 1.0, 1.5, 0.0, 2.0, 0.0, 1.1, 1.6, 0.0, 2.1):
        plan = sweep.plan(2, 8)
        sweep.observe(plan, 0, seconds, 8)
    assert sweep.seconds == {1: [1.0, 1.5, 1.1, 1.6], 2: [2.0, 2.1]}


class Loads:
    """Loads of one pair, whose measurements are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.setattr(calibrate, "measure_costs", lambda *_: self.found.pop())
        self.found: list[Costs] = []

    def load(self, *found: Costs, window: int | None = None) -> Costs:
        """The costs of a session, which measures these at most."""
        self.found = list(found)
        target: Any = SimpleNamespace(model=nn.Linear(2, 2))
        drafter: Any = nn.Linear(2, 2)
        drafter.config = SimpleNamespace(block_size=3)
        return calibrate.costs(target, drafter, "exact", window)


def curve(*seconds: float, depth: int = 8) -> Costs:
    return Costs((depth,), (seconds,), seconds[-1] / 10)


def test_the_first_loads_measure_and_the_quickest_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loads = Loads(monkeypatch, tmp_path)
    busy = curve(1.1, 9.0, 9.0)
    assert loads.load(busy) == busy
    assert not busy.can_pay
    assert loads.load(curve(1.0, 1.4, 9.0)) == Costs((8,), ((1.0, 1.4, 9.0),), 0.9)
    for _ in range(2, LOADS):
        assert loads.load(curve(1.2, 1.5, 1.8)) == Costs((8,), ((1.0, 1.4, 1.8),), 0.18)
    assert loads.load() == Costs((8,), ((1.0, 1.4, 1.8),), 0.18), "remembered"


def test_a_context_that_is_limited_has_costs_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loads = Loads(monkeypatch, tmp_path)
    whole = Costs((8, 1024), ((1.0, 1.5), (2.0, 2.5)), 0.1)
    for _ in range(LOADS):
        assert loads.load(whole) == whole
    assert loads.load(curve(2.0, 3.0), window=512) == curve(2.0, 3.0)
    assert loads.load() == whole


@pytest.mark.parametrize(("window", "depths"), [(None, 3), (8192, 2), (1024, 1), (4, 1)])
def test_nothing_is_measured_beyond_the_context_that_there_is_room_for(
    window: int | None, depths: int
) -> None:
    assert depths_within(window, 5) == DEPTHS[:depths]


@pytest.mark.parametrize(("kind", "window", "seen"), [(FULL, None, 3000), (SLIDING, 64, 63)])
def test_the_drafter_that_is_timed_has_a_context_as_deep_as_the_targets(
    kind: str, window: int | None, seen: int
) -> None:
    config = replace(DRAFTER, layer_types=(kind,), sliding_window=window)
    drafter = deep_drafter(make_target(), DrafterModel(config), 3000, None)
    assert drafter.context.position == 3000
    assert [layer.length for layer in drafter.context.layers] == [seen]
