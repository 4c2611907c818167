"""`benchmark kernels`: its table, on a GPU that is not there, and what it says where there is none."""

import argparse
from pathlib import Path

import mlx.core as mx
import pretend
import pytest

from dflash_mlx.benchmark.kernels import _run, main, table
from dflash_mlx.kernels.timing import Timings, time_layer


def test_every_way_is_timed_for_one_to_eight_rows(tmp_path: Path) -> None:
    maker = pretend.Maker()
    timings = time_layer(
        pretend.kernels(tmp_path, maker), 256, 32, dtype=mx.float32, repeats=1, cached=2 * 256 * 32 // 2
    )
    assert [t.rows for t in timings] == list(range(1, 9))
    assert all(list(t.ways) == ["stock", "row by row", "R=1", "R=2", "R=3", "R=4"] for t in timings)
    assert all(value > 0 for t in timings for value in t.ways.values())
    # Four choices of R, two rounds, two copies of the weights.
    assert maker.calls == {("dflash_qmv_block", rows): 4 * 2 * 2 for rows in range(1, 9)}


def test_the_table_marks_the_chosen_way_and_its_price() -> None:
    text = table(
        512, 64, [Timings(1, {"stock": 10.0, "R=4": 11.0}), Timings(7, {"stock": 30.0, "R=3": 15.0})]
    )
    assert "| 7 rows | 30 | **15** | 1.50 |" in text
    assert "| 1 rows | 10 | **11** | 1.10 |" in text


@pytest.mark.skipif(mx.metal.is_available(), reason="this is a Mac")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == "error: there is no GPU here: kernels can be timed on a Mac only\n"


@pytest.mark.parametrize(
    ("shape", "reason"),
    [("5120", "inputs x outputs"), ("0x64", "inputs x outputs"), ("128x64", "a kernel of its own")],
)
def test_shapes_that_cannot_be_timed(tmp_path: Path, shape: str, reason: str) -> None:
    args = argparse.Namespace(shape=[shape], bits=4, group_size=64)
    with pytest.raises(Exception, match=reason):
        _run(args, pretend.kernels(tmp_path, pretend.Maker()))
