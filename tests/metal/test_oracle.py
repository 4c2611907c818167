"""How MLX's kernels get out of a wheel."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from metal import oracle


def metallib(kernels: dict[str, bytes]) -> bytes:
    """A library as Apple's tools lay it out, with the tags that are read here and one that is not."""
    table, bitcode = struct.pack("<I", len(kernels)), b""
    for name, code in kernels.items():
        tags = {
            b"NAME": name.encode() + b"\0",
            b"TYPE": b"\2",
            b"OFFT": struct.pack("<3Q", 0, 0, len(bitcode)),
            b"MDSZ": struct.pack("<Q", len(code)),
        }
        entry = b"".join(tag + struct.pack("<H", len(value)) + value for tag, value in tags.items()) + b"ENDT"
        table += struct.pack("<I", len(entry) + 4) + entry
        bitcode += code
    start = 88 + len(table)
    header = b"MTLB" + bytes(12)
    header += struct.pack("<9Q", start + len(bitcode), 88, len(table), 0, 0, 0, 0, start, len(bitcode))
    return header + table + bitcode


def test_kernels_of_a_library() -> None:
    kernels = {"affine_qmv_float": b"one", "copy": b"second", "last": b""}
    assert dict(oracle.kernels(metallib(kernels))) == kernels


def test_what_is_no_library() -> None:
    with pytest.raises(ValueError, match="b'PK"):
        list(oracle.kernels(b"PK\3\4 a wheel"))


def test_without_the_wheel_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        oracle.NotAvailableError, match=r"cannot fetch mlx-metal 0\.32\.4 .*: ERROR: No matching"
    ):
        oracle.fetch("0.32.4", tmp_path)
    assert not list(tmp_path.iterdir())
