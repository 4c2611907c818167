"""Bytes for people: how many, and how far a download is, as one line that renews itself."""

import time
from collections.abc import Callable
from typing import TextIO

BETWEEN = 0.1
"""Seconds between two states of the line."""


def readable(nbytes: float) -> str:
    """A number of bytes in the unit that suits it, in powers of 1000 as the hub counts."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"


def progress_line(
    stream: TextIO, clock: Callable[[], float] = time.monotonic
) -> Callable[[str, int, int], None] | None:
    """Something to tell what is under way and how many bytes are done, of how many; `clock` gives seconds.

    None where `stream` is no terminal: a log file gains nothing from a line that is written a thousand times.
    """
    if not stream.isatty():
        return None
    shown = 0.0

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown
        now = clock()
        if now - shown < BETWEEN and done < total:
            return
        shown = now
        percent = 100 * done // max(total, 1)
        end = "\n" if done >= total else ""
        stream.write(f"\r\x1b[K{what}: {readable(done)} of {readable(total)}, {percent} %{end}")
        stream.flush()

    return show
