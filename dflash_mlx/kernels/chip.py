"""Which GPU this is. MLX picks its kernels by it, so what is exact depends on it."""

import platform
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version

import mlx.core as mx

GENERATIONS = range(13, 18)
"""M1 to M5."""
SIZES = "pgsd"
"""MLX's last letter of an architecture: phone; base and Pro; Max; Ultra. The last two are its large ones."""


@dataclass(frozen=True)
class Chip:
    """A GPU whose kernel choices are known: `applegpu_g15s` is generation 15, size "s"."""

    generation: int
    size: str

    @staticmethod
    def of(architecture: str) -> "Chip | None":
        """From MLX's name of it; None for one that is not known, for which nothing may be assumed."""
        found = re.fullmatch(rf"applegpu_g(\d+)([{SIZES}])", architecture)
        if found is None or int(found[1]) not in GENERATIONS:
            return None
        return Chip(int(found[1]), found[2])

    @property
    def is_large(self) -> bool:
        """Whether MLX splits attention over this GPU's cores from 1,024 keys on."""
        return self.size in "sd"


@dataclass(frozen=True)
class Device:
    """All that a kernel's bits depend on.

    Attributes:
        metal: whether MLX runs on a GPU.
        architecture: as MLX names it.
        system: of which the compiler of kernels is a part.
        mlx: version.
    """

    metal: bool
    architecture: str
    system: str
    mlx: str

    @staticmethod
    def here() -> "Device":
        """The device that MLX runs on."""
        gpu = mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu
        architecture = str(mx.device_info().get("architecture", "unknown")) if gpu else platform.machine()
        return Device(gpu, architecture, platform.platform(), version("mlx"))

    @cached_property
    def chip(self) -> Chip | None:
        """The GPU, if it is one that is known."""
        return Chip.of(self.architecture)
