"""MLX's own one-row kernels, run on the CPU: the strongest thing that can be said about bits without a Mac.

The macOS wheel of MLX carries its kernels compiled by Apple to LLVM bitcode. `Library` reads them out of the
wheel's mlx.metallib and keeps the few that are wanted; `Oracle` lets PyPI's `llvmlite` compile one for this
processor and runs it on the emulator's lanes. So the order of operations, what is contracted and where values
are rounded are Apple's and MLX's own; denormals, the tree of simd_sum and the fused multiply-add of the GPU
are emulated.
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metal.emulator import Emulator, to_numpy
from metal.layers import Layer
from metal.source import TYPES

# Of all kernels in the wheel, those of one affine quantized row.
WANTED = re.compile(r"affine_qmv_(fast_)?(float|float16_t|bfloat16_t)_gs_(32|64|128)_b_[48]_batch_0\w*")
PLATFORM = "macosx_15_0_arm64"
MOST_BUFFERS = 32


class NotAvailableError(Exception):
    """The wheel cannot be had here."""


@dataclass(frozen=True)
class Library:
    """The wanted kernels of one MLX release, one file of bitcode each."""

    folder: Path

    @property
    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.bc"))

    def bitcode(self, name: str) -> bytes:
        return (self.folder / f"{name}.bc").read_bytes()


def fetch(version: str, cache: Path) -> Library:
    """The kernels of mlx-metal `version`, from `cache` or out of the wheel (45 MB), which is not kept."""
    library = Library(cache / f"mlx-metal-{version}")
    if library.folder.exists():
        return library
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--only-binary=:all:", "--platform", PLATFORM, "--dest", folder]
        done = subprocess.run(
            [*command, f"mlx-metal=={version}"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            error = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise NotAvailableError(f"pip cannot fetch mlx-metal {version} for {PLATFORM}: {error}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            metallib = archive.read("mlx/lib/mlx.metallib")
        (kept := Path(folder, "kernels")).mkdir()
        for name, bitcode in kernels(metallib):
            if WANTED.fullmatch(name):
                (kept / f"{name}.bc").write_bytes(bitcode)
        try:
            kept.rename(library.folder)
        except OSError:
            if not library.folder.exists():  # else another run was faster
                raise
    return library


def kernels(metallib: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and bitcode in a Metal library: a header of offsets, a table of tagged entries, the bitcode."""
    if metallib[:4] != b"MTLB":
        raise ValueError(f"no Metal library: it starts with {metallib[:4]!r}")
    table, _, _, _, _, _, bitcode, _ = struct.unpack_from("<8Q", metallib, 24)
    (count,) = struct.unpack_from("<I", metallib, table)
    at = table + 4
    for _ in range(count):
        (size,) = struct.unpack_from("<I", metallib, at)
        tags, tag = {}, at + 4
        while metallib[tag : tag + 4] != b"ENDT":
            (length,) = struct.unpack_from("<H", metallib, tag + 4)
            tags[metallib[tag : tag + 4]] = metallib[tag + 6 : tag + 6 + length]
            tag += 6 + length
        at += size
        start = bitcode + struct.unpack("<3Q", tags[b"OFFT"])[2]
        (length,) = struct.unpack("<Q", tags[b"MDSZ"])
        yield tags[b"NAME"].rstrip(b"\0").decode(), metallib[start : start + length]


# Where the emulator's Position holds what a kernel's parameter asks for, in bytes.
POSITION = {
    "air.thread_position_in_grid": 0,
    "air.thread_position_in_threadgroup": 16,
    "air.threadgroup_position_in_grid": 32,
    "air.threadgroups_per_grid": 48,
    "air.threads_per_grid": 64,
    "air.threads_per_threadgroup": 80,
    "air.simdgroup_index_in_threadgroup": 96,
    "air.thread_index_in_simdgroup": 100,
    "air.thread_index_in_threadgroup": 104,
}
# What the compiled kernels call, in terms of LLVM and of the runtime.
CALLS = {
    "air.simd_sum.f32": """float @air.simd_sum.f32(float %x) {
  %sum = call float @emulator_exchange(float %x, i32 1, i32 0, i32 0)
  ret float %sum
}""",
    "air.convert.f.f32.s.i32": """float @air.convert.f.f32.s.i32(i32 %x) {
  %value = sitofp i32 %x to float
  ret float %value
}""",
    "air.min.s.i32": """i32 @air.min.s.i32(i32 %x, i32 %y) {
  %less = icmp slt i32 %x, %y
  %least = select i1 %less, i32 %x, i32 %y
  ret i32 %least
}""",
    "air.clamp.s.i32": """i32 @air.clamp.s.i32(i32 %x, i32 %low, i32 %high) {
  %below = icmp slt i32 %x, %low
  %raised = select i1 %below, i32 %low, i32 %x
  %above = icmp sgt i32 %raised, %high
  %clamped = select i1 %above, i32 %high, i32 %raised
  ret i32 %clamped
}""",
}


def lifted(text: str, name: str) -> str:
    """The kernel as LLVM text for this processor, with `emulator_entry(ptr values)` that calls it."""
    places = {}
    for index, kind, rest in re.findall(r'= !\{i32 (\d+), !"(air\.[a-z_]+)"(.*)\}$', text, re.M):
        if "air.arg_name" in rest:
            buffer = re.search(r'"air.location_index", i32 (\d+)', rest)
            places[int(index)] = int(buffer[1]) if buffer else str(kind)
    signature = re.search(rf'define [^@]*@"?{re.escape(name)}"?\((.*?)\) local_unnamed_addr', text, re.S)
    if signature is None:
        raise ValueError(f"{name}: its definition is not where it is expected")
    entry, arguments = "", []
    for index, parameter in enumerate(re.split(r",(?![^<(]*[>)])", signature[1])):
        match = re.match(r"\s*(ptr addrspace\(\d+\)|<3 x i32>|i32)", parameter)
        if match is None:
            raise ValueError(f"{name}: a parameter of unknown type {parameter.strip()!r}")
        kind, place = match[1], places[index]
        if isinstance(place, int):
            entry += f"  %p{index} = getelementptr i64, ptr %values, i64 {place}\n"
            entry += f"  %v{index} = load i64, ptr %p{index}\n"
            entry += f"  %x{index} = inttoptr i64 %v{index} to {kind}\n"
        else:
            entry += f"  %p{index} = getelementptr i8, ptr %at, i64 {POSITION[place]}\n"
            entry += f"  %x{index} = load {kind}, ptr %p{index}, align 4\n"
        arguments.append(f"{kind} %x{index}")
    text = re.sub(r"^target (datalayout|triple) = .*$", "", text, flags=re.M)
    text = re.sub(r"^!air\..*$", "", text, flags=re.M)
    text = re.sub(r"^@llvm.global_ctors = .*$", "", text, flags=re.M)
    for called in set(re.findall(r"^declare [^\n]*@(air\.[\w.]+)\(", text, re.M)):
        if called not in CALLS:
            raise ValueError(f"{name} calls {called}, which the oracle does not know")
        text = re.sub(
            rf"^declare [^\n]*@{re.escape(called)}\(.*$", f"define internal {CALLS[called]}", text, flags=re.M
        )
    return (
        f"{text}\ndeclare ptr @emulator_position()\n"
        "declare float @emulator_exchange(float, i32, i32, i32)\n"
        f"define void @emulator_entry(ptr %values) {{\n  %at = call ptr @emulator_position()\n{entry}"
        f"  call void @{name}({', '.join(arguments)})\n  ret void\n}}\n"
    )


@dataclass(frozen=True)
class Compiled:
    """A lifted kernel; the engine owns its code."""

    engine: Any
    entry: ctypes.c_void_p


class Oracle:
    """Runs the kernels of one MLX release."""

    def __init__(self, version: str, library: Library, emulator: Emulator) -> None:
        import llvmlite.binding as llvm

        self.version, self.library, self.emulator = version, library, emulator
        self._compiled: dict[str, Compiled] = {}
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        for symbol in ("emulator_position", "emulator_exchange", "__truncsfbf2"):
            address = ctypes.cast(getattr(emulator.runtime, symbol), ctypes.c_void_p).value
            llvm.add_symbol(symbol, address)

    def compiled(self, name: str) -> Compiled:
        if name not in self._compiled:
            import llvmlite.binding as llvm

            module = llvm.parse_assembly(lifted(str(llvm.parse_bitcode(self.library.bitcode(name))), name))
            module.triple = llvm.get_process_triple()
            # What the emulator compiles for: with fused multiply-add, without bfloat16 of its own.
            machine = llvm.Target.from_triple(module.triple).create_target_machine(cpu="x86-64-v3", opt=2)
            engine = llvm.create_mcjit_compiler(module, machine)
            engine.finalize_object()
            self._compiled[name] = Compiled(
                engine, ctypes.c_void_p(engine.get_function_address("emulator_entry"))
            )
        return self._compiled[name]

    def qmv(self, layer: Layer, *, fast: bool) -> NDArray[Any]:
        """The bits of the layer's y `[M, N]`, each row by MLX's kernel for one row."""
        x, w = layer.x, layer.w
        M, K = x.shape
        N = w.shape[0]
        kind = f"affine_qmv_{'fast_' if fast else ''}{TYPES[x.dtype][0]}"
        kind += f"_gs_{layer.group_size}_b_{layer.bits}_batch_0"
        name = self.one_of(kind, partial_rows=fast and N % 8 != 0)
        y = np.zeros((M, N), TYPES[x.dtype][1])
        sizes = [np.array([size], np.int32) for size in (K, N)]
        values = [*(to_numpy(array) for array in (w, layer.scales, layer.biases, x)), y, *sizes]
        values += [np.zeros(64, np.int64)] * (MOST_BUFFERS - len(values))  # for the batched variants
        entry = self.compiled(name).entry
        self.emulator.dispatch(entry, values, (32 * M, 2 * -(-N // 8), 1), (32, 2, 1), watched={})
        return y

    def one_of(self, kind: str, *, partial_rows: bool) -> str:
        """The name as this release spells it; older ones have no variant for partial rows."""
        spelt = re.compile(f"{kind}_pr_{int(partial_rows)}_hgs_0_r_4" + ("" if partial_rows else f"|{kind}"))
        for name in self.library.names:
            if spelt.fullmatch(name):
                return name
        raise LookupError(f"MLX {self.version} has no {spelt.pattern}")
