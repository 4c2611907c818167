"""Bytes for people."""

import io

from dflash_mlx.progress import progress_line, readable


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_sizes_are_in_the_unit_that_suits_them() -> None:
    assert [readable(n) for n in (0, 1234, 5_600_000, 15_120_000_000)] == [
        "0.0 kB",
        "1.2 kB",
        "5.6 MB",
        "15.1 GB",
    ]


def test_a_line_renews_itself_and_ends_with_the_last_byte() -> None:
    now = 100.0
    terminal = Terminal()
    show = progress_line(terminal, clock=lambda: now)
    assert show is not None
    show("downloading a/b", 1_000_000, 4_000_000)
    show("downloading a/b", 2_000_000, 4_000_000)  # too soon to be worth a write
    now += 1
    show("downloading a/b", 3_000_000, 4_000_000)
    show("downloading a/b", 4_000_000, 4_000_000)
    states = terminal.getvalue().split("\r\x1b[K")
    assert states == [
        "",
        "downloading a/b: 1.0 MB of 4.0 MB, 25 %",
        "downloading a/b: 3.0 MB of 4.0 MB, 75 %",
        "downloading a/b: 4.0 MB of 4.0 MB, 100 %\n",
    ]


def test_a_file_gets_no_progress() -> None:
    assert progress_line(io.StringIO()) is None
