"""Which GPUs are known."""

import mlx.core as mx
import pytest

from dflash_mlx.kernels import Chip, Device


@pytest.mark.parametrize(
    ("architecture", "chip"),
    [
        ("applegpu_g13g", Chip(13, "g")),
        ("applegpu_g14d", Chip(14, "d")),
        ("applegpu_g15s", Chip(15, "s")),
        ("applegpu_g17p", Chip(17, "p")),
        ("applegpu_g12g", None),  # before M1
        ("applegpu_g18s", None),  # not there yet: its choices are not known
        ("applegpu_g15x", None),
        ("applegpu_g15", None),
        ("x86_64", None),
        ("", None),
    ],
)
def test_chips(architecture: str, chip: Chip | None) -> None:
    assert Chip.of(architecture) == chip


def test_only_pro_max_and_ultra_are_large() -> None:
    assert [size for size in "pgsd" if Chip(15, size).is_large] == ["s", "d"]


@pytest.mark.skipif(mx.metal.is_available(), reason="this is a Mac")
def test_here_is_no_gpu() -> None:
    assert not Device.here().metal
    assert Device.here().chip is None
