"""Where the kernels run: emulated, on a Mac's GPU, and MLX's own kernels through the oracle."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal import oracle
from metal.emulator import Emulator
from metal.oracle import Oracle

# The release we pin, and the last one that summed x in its own type.
VERSIONS = ("0.32.4", "0.32.3")


@dataclass(frozen=True)
class Backend:
    """Something that makes kernels, and a way to have all that a function calls made at once."""

    make: Callable[..., Any]
    prepare: Callable[[Callable[[], object]], None]


@pytest.fixture(scope="session")
def cache(request: pytest.FixtureRequest) -> Path:
    """Keeps what was compiled and fetched for the next run."""
    assert request.config.cache is not None
    return request.config.cache.mkdir("metal")


@pytest.fixture(scope="session")
def emulator(cache: Path) -> Emulator:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("the emulator runs on x86-64 Linux")
    if " fma " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the emulator needs a processor with AVX2 and fused multiply-add")
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("the emulator's compiler is missing: pip install 'dflash-chat[metal-tests]'")
    return Emulator(cache / "emulated")


@pytest.fixture(scope="session", params=["emulator", "device"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "emulator":
        emulator: Emulator = request.getfixturevalue("emulator")
        return Backend(emulator.metal_kernel, emulator.prepare)
    if not mx.metal.is_available():
        pytest.skip("no Metal device here")
    return Backend(mx.fast.metal_kernel, lambda calls: None)


@pytest.fixture(scope="session", params=VERSIONS)
def mlx_kernels(request: pytest.FixtureRequest, emulator: Emulator, cache: Path) -> Oracle:
    """The kernels of one MLX release; its wheel is fetched once."""
    if importlib.util.find_spec("llvmlite") is None:
        pytest.skip("what runs MLX's own kernels is missing: pip install 'dflash-chat[metal-tests]'")
    try:
        library = oracle.fetch(request.param, cache)
    except oracle.NotAvailableError as error:
        pytest.skip(str(error))
    return Oracle(request.param, library, emulator)
