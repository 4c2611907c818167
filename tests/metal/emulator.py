"""Runs Metal kernels on the CPU: a stand-in for `mx.fast.metal_kernel` that watches every access.

`Emulator.metal_kernel` takes the arguments of `mx.fast.metal_kernel` and returns what is called like its
result. The very source that MLX would compile is compiled by the clang inside PyPI's `ziglang` against
metal_shim.h, and every lane runs as a fiber of runtime.cpp. A kernel that reads out of range, races, meets
barriers or simdgroup operations with only some of its lanes, or mixes up address spaces raises; how many
bytes of each array it read and wrote is in `Emulator.traffic`.

Not seen here: what only Apple's compiler refuses, registers, timing.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metal.source import Source, Template

HERE = Path(__file__).parent
TARGET = ["-target", "x86_64-linux-gnu", "-march=x86-64-v3", "-std=c++17", "-fPIC", f"-I{HERE}"]
RUNTIME_FLAGS = ["-O2", "-Wall", "-Wextra", "-Werror"]
KERNEL_FLAGS = [
    # Loops stay as they are written, so that the width of every access is the kernel's.
    *("-O1", "-fno-vectorize", "-fno-slp-vectorize", "-mllvm", "-disable-loop-idiom-all"),
    "-fsanitize-coverage=func,trace-loads,trace-stores",
    # As Apple's compiler: contracted inside an expression, literals are float, half and bfloat always round.
    *("-ffp-contract=on", "-Xclang", "-cl-single-precision-constant"),
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    # Metal's attributes and pragmas mean nothing to clang; a kernel need not use all of its arguments.
    *("-Wall", "-Werror", "-Wno-unknown-attributes", "-Wno-unknown-pragmas", "-Wno-unused"),
    "-Wno-pass-failed",
]
# In the order of runtime.cpp.
FAULTS = (
    "",
    "out of range",
    "misaligned",
    "race",
    "read before write",
    "divergent simdgroup operation",
    "divergent barrier",
    "more than 32 KB of threadgroup memory",
)
# In which a step of 8 x 8 matrices adds its products; Metal does not say. In the order of runtime.cpp.
MATRIX_ORDERS = ("ascending", "descending", "pairwise", "halves")
RED_ZONE = 1 << 16  # bytes that belong to nobody before and after each array


class MetalError(Exception):
    """A kernel that does not compile, or did what no kernel may do."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that all lanes together loaded and stored, by the name of the array."""

    read: dict[str, int]
    written: dict[str, int]


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_void_p),
        ("size", ctypes.c_long),
        ("is_output", ctypes.c_int),
        ("initialised", ctypes.c_int),
        ("read", ctypes.c_long),
        ("written", ctypes.c_long),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("fault", ctypes.c_int),
        ("line", ctypes.c_int),
        ("lane", ctypes.c_int),
        ("group", ctypes.c_int),
        ("address", ctypes.c_void_p),
        ("size", ctypes.c_long),
        ("is_store", ctypes.c_int),
    )


def to_numpy(array: mx.array) -> NDArray[Any]:
    """The array's bits; numpy has no bfloat16."""
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.ascontiguousarray(np.array(bits)).reshape(array.shape)


def from_numpy(bits: NDArray[Any], dtype: mx.Dtype) -> mx.array:
    array = mx.array(bits)
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array


@dataclass(frozen=True)
class Memory:
    """An array of a kernel, alone in its memory: what lies around it is nobody's."""

    bits: NDArray[Any]
    around: NDArray[np.uint8]
    is_output: bool = False
    initialised: bool = True

    @classmethod
    def of(cls, values: NDArray[Any], **known: bool) -> Memory:
        around = np.full(values.nbytes + 2 * RED_ZONE + 64, 0xA5, np.uint8)
        start = RED_ZONE + -(around.ctypes.data + RED_ZONE) % 64
        bits = around[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        memory = cls(bits, around, **known)
        if memory.initialised:  # a Mac does not clear what is not
            bits[...] = values
        return memory


class Emulator:
    """Keeps what it compiled in `folder`; `traffic` is of the last kernel that ran."""

    def __init__(self, folder: Path, matrix_order: str = "ascending") -> None:
        package = importlib.util.find_spec("ziglang")
        if package is None or package.origin is None:
            raise ImportError("the emulator needs ziglang: pip install 'dflash-chat[metal-tests]'")
        self.compiler = Path(package.origin).with_name("zig")
        self.folder, self.matrix_order = folder, MATRIX_ORDERS.index(matrix_order)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.traffic = Traffic({}, {})
        self.gathered: set[str] | None = None
        runtime = self.library((HERE / "runtime.cpp").read_text(), RUNTIME_FLAGS)
        self.runtime = ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)

    def metal_kernel(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
    ) -> EmulatedKernel:
        if atomic_outputs or not ensure_row_contiguous:
            raise NotImplementedError("the emulator knows contiguous inputs and plain outputs")
        return EmulatedKernel(self, Source(name, tuple(input_names), tuple(output_names), source, header))

    def prepare(self, calls: Callable[[], object]) -> None:
        """Compiles, on all cores, the kernels that `calls` calls; there they return zeros without running."""
        self.gathered = set()
        try:
            calls()
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(self.library, self.gathered))
        finally:
            self.gathered = None

    def library(self, source: str, flags: Sequence[str] = KERNEL_FLAGS) -> Path:
        """The compiled source, once compiled never again."""
        shim = (HERE / "metal_shim.h").read_text()
        key = hashlib.sha256("\0".join([source, shim, *TARGET, *flags]).encode()).hexdigest()[:24]
        library = self.folder / f"{key}.so"
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                cpp, linked = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
                cpp.write_text(source)
                self._compile("clang", *TARGET, *flags, "-c", str(cpp), "-o", f"{linked}.o")
                self._compile("ld.lld", "-shared", f"{linked}.o", "-o", str(linked))
                linked.rename(library)
        return library

    def _compile(self, *command: str) -> None:
        done = subprocess.run([self.compiler, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise MetalError(f"does not compile:\n{done.stderr}")

    def dispatch(
        self,
        entry: Any,
        values: Sequence[NDArray[Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        watched: dict[str, Memory],
    ) -> None:
        """Runs the compiled `entry` on `values` for every thread of the grid, all they touch in `watched`."""
        table = (_Buffer * len(watched))(
            *(
                _Buffer(memory.bits.ctypes.data, memory.bits.nbytes, memory.is_output, memory.initialised)
                for memory in watched.values()
            )
        )
        report = _Report()
        self.runtime.emulator_dispatch(
            ctypes.cast(entry, ctypes.c_void_p),
            (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values)),
            ctypes.c_long(len(values)),
            table,
            len(table),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*threadgroup),
            self.matrix_order,
            ctypes.byref(report),
        )
        self.traffic = Traffic(
            {name: buffer.read for name, buffer in zip(watched, table, strict=True)},
            {name: buffer.written for name, buffer in zip(watched, table, strict=True)},
        )
        if report.fault:
            raise MetalError(f"{FAULTS[report.fault]}: {_where(report, watched)}")


def _where(report: _Report, watched: dict[str, Memory]) -> str:
    thread = f"thread {report.lane} of threadgroup {report.group}"
    if report.address is None:
        return f"line {report.line}, {thread}"
    access = f"{'store' if report.is_store else 'load'} of {report.size} bytes"
    for name, memory in watched.items():
        size, offset = memory.bits.nbytes, report.address - memory.bits.ctypes.data
        if -RED_ZONE <= offset < size + RED_ZONE:
            return f"{access} at byte {offset} of {size} of {name}, {thread}"
    return f"{access} in threadgroup memory or nowhere, {thread}"


@dataclass(frozen=True)
class EmulatedKernel:
    emulator: Emulator
    source: Source

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Template = (),
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
    ) -> list[mx.array]:
        threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
        if not 0 < threads <= 1024:
            raise ValueError(f"a threadgroup of {threads} threads: 1 to 1024 are possible")
        arrays = [value if isinstance(value, mx.array) else mx.array(value) for value in inputs]
        if verbose:
            print(self.source.for_mlx(arrays, output_dtypes, template))
        text = self.source.for_clang(arrays, output_dtypes, template)
        watched = {
            name: Memory.of(to_numpy(array))
            for name, array in zip(self.source.input_names, arrays, strict=True)
        }
        outputs = []
        for name, shape, dtype in zip(self.source.output_names, output_shapes, output_dtypes, strict=True):
            start = to_numpy(mx.full(tuple(shape), init_value or 0, dtype))
            watched[name] = Memory.of(start, is_output=True, initialised=init_value is not None)
            outputs.append(watched[name].bits)
        if self.emulator.gathered is not None:
            self.emulator.gathered.add(text)
            for bits in outputs:
                bits[...] = 0
        else:
            library = ctypes.CDLL(str(self.emulator.library(text)))
            values = [memory.bits for memory in watched.values()]
            self.emulator.dispatch(library.emulator_entry, values, grid, threadgroup, watched)
        return [from_numpy(bits, dtype) for bits, dtype in zip(outputs, output_dtypes, strict=True)]
