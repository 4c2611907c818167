"""Count what a lane of each matrix kernel does for a weight, from compiled code, and what a pass then costs.

Needs the extra `metal-tests`, and `tests` on PYTHONPATH. Given the file mlx/lib/mlx.metallib out of the macOS
wheel of mlx-metal, it counts MLX's own kernels too. Prints the tables of docs/fast-tile.md. Nothing is timed;
what a pass costs is a model.
"""

import argparse
import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from dflash_metal import launch, tile
from metal.emulator import KERNEL_FLAGS, TARGET
from metal.source import Source

from metal import oracle

K, N, GROUP_SIZE = 5120, 17408, 64
# The loop over K becomes one block without loops in it and without vectors: a line is what a lane does.
UNROLL = (
    *("-unroll-runtime=false", "-unroll-allow-partial=false", "-unroll-threshold=100000000"),
    *("-unroll-full-max-count=4096", "-unroll-max-iteration-count-to-analyze=0"),
)
FLAGS = ("-O2", "-fno-vectorize", "-fno-slp-vectorize", *(f for flag in UNROLL for f in ("-mllvm", flag)))
MATRIX_STEP = 16  # instructions of a lane: 512 multiply-adds, 32 lanes
SLOW = 4  # instructions' time of a shift or a conversion of an integer, on a pipe of their own

# By kind. What is not here moves values and computes addresses: much of that a GPU does in other ways.
OPERATIONS = {
    **dict.fromkeys(("fadd", "fsub", "fmul", "fdiv", "fneg"), "arithmetic"),
    **dict.fromkeys(("fpext", "fptrunc", "select", "icmp", "fcmp"), "arithmetic"),
    **dict.fromkeys(("and", "or", "xor"), "bits"),
    **dict.fromkeys(("shl", "lshr", "ashr", "uitofp", "sitofp"), "slow"),
    **dict.fromkeys(("load", "store"), "memory"),
}
CALLS = {
    "multiply": "matrix",  # of the emulator, and of MLX's
    "emulator_exchange": "arithmetic",
    "llvm.fma": "arithmetic",
    "llvm.fmuladd": "arithmetic",
    "llvm.umin": "arithmetic",
    "llvm.smin": "arithmetic",
    "air.min": "arithmetic",
    "llvm.memcpy": "memory",
    "llvm.fshl": "slow",
    "air.convert": "slow",
    "barrier": "arithmetic",
}


@dataclass(frozen=True)
class Count:
    """What a lane does for each weight that it passes, for all rows together."""

    name: str
    rows: int
    arithmetic: float
    bits: float
    memory: float
    matrix: float
    slow: float

    @property
    def slots(self) -> float:
        """Instructions' time; the slow ones run beside the others."""
        return max(self.arithmetic + self.bits + self.memory + self.matrix, SLOW * self.slow)

    def __str__(self) -> str:
        cells = (self.arithmetic, self.bits, self.memory, self.matrix, self.slow, self.slots)
        return f"| {self.name} | {self.rows} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |"


@dataclass(frozen=True)
class Chip:
    """What the model takes for a chip: memory in GB/s, cores, their clock in GHz, other work in ms a pass."""

    name: str
    memory: float
    cores: int
    clock: float
    other: float

    def pass_ms(self, slots: float) -> float:
        """A forward pass of Qwen3.8-27B at 4 bits: its bytes or its instructions, whichever takes longer.

        88 % of the memory's speed and 80 % of 128 lanes a core are taken for possible.
        """
        weights, states = 25.62e9, 2 * 151e6
        read = (weights * 0.5625 + states) / (self.memory * 1e9 * 0.88)
        work = weights * slots / (self.cores * 128 * self.clock * 1e9 * 0.8)
        return 1e3 * max(read, work) + self.other


CHIPS = (
    Chip("M1 Max", 400, 32, 1.30, 5.5),
    Chip("M3 Max", 400, 40, 1.40, 4.5),
    Chip("M4 Max", 546, 40, 1.58, 4.0),
    Chip("M5 Max", 614, 40, 1.60, 3.5),
)


def count(name: str, rows: int, code: str, weights: int) -> Count:
    """Of the largest loop in compiled code, in which a lane passes so many weights."""
    blocks = re.split(r"\n(?=[\w.]+:)", code)
    loops = [b for b in blocks if re.search(rf"br i1 .*label %{re.escape(b.partition(':')[0])}\b", b)]
    if not loops:
        raise ValueError(f"{name}: its loop over K is not one block")
    kinds: Counter[str] = Counter()
    for line in max(loops, key=len).splitlines():
        found = re.match(r"\s+(?:%[\w.]+ = )?(?:tail |musttail )?(\w+)(.*)", line)
        if found is None:
            continue
        operation, rest = found[1], found[2]
        vector = re.match(r"[^@]*?<(\d+) x (?:float|bfloat|half)>", rest)
        lanes = int(vector[1]) if vector else 1
        if operation == "call":
            kind = next((kind for part, kind in CALLS.items() if part in rest), None)
            if kind is None:
                raise ValueError(f"{name} calls what is not known: {line.strip()}")
            kinds[kind] += lanes if kind == "arithmetic" else 1
        elif operation in ("load", "store"):
            kinds["memory"] += 1
        elif operation in OPERATIONS and "i64" not in rest.partition(",")[0]:
            kinds[OPERATIONS[operation]] += lanes
    each = {kind: kinds[kind] / weights for kind in ("arithmetic", "bits", "memory", "slow")}
    return Count(name, rows, matrix=MATRIX_STEP * kinds["matrix"] / weights, **each)


def compiled(text: str, suffix: str, *options: str) -> str:
    """LLVM's own text of a program, optimised."""
    package = importlib.util.find_spec("ziglang")
    if package is None or package.origin is None:
        raise ImportError("the compiler is missing: pip install 'dflash-chat[metal-tests]'")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, f"kernel{suffix}"), Path(folder, "optimised.ll")
        source.write_text(text, encoding="utf-8")
        command = [str(Path(package.origin).with_name("zig")), "clang", *options, *FLAGS]
        subprocess.run([*command, "-S", "-emit-llvm", source, "-o", target], check=True)
        return target.read_text(encoding="utf-8")


def ours(call: Callable[..., object], rows: int, dtype: mx.Dtype, bits: int) -> str:
    """Compiled code of the kernel that `call` launches for a layer."""
    texts = []

    def make(name: str, input_names: list[str], output_names: list[str], source: str, header: str) -> Any:
        kernel = Source(name, tuple(input_names), tuple(output_names), source, header)

        def record(*, inputs: list[mx.array], template: Any, output_dtypes: list[mx.Dtype], **_: Any) -> Any:
            texts.append(kernel.for_clang(inputs, output_dtypes, template))
            return [mx.zeros(1)]

        return record

    scales = mx.zeros((N, K // GROUP_SIZE), dtype)
    w = mx.zeros((N, K * bits // 32), mx.uint32)
    call(mx.zeros((rows, K), dtype), w, scales, scales, group_size=GROUP_SIZE, bits=bits, make=make)
    (text,) = texts
    kept = [flag for flag in KERNEL_FLAGS if not flag.startswith(("-O", "-fsanitize"))]
    return compiled(text, ".cpp", *TARGET, *kept)


def exact(rows: int, bits: int = 4) -> Count:
    """qmv_block: a lane passes 16 packed values of each output, 8 at 8 bits."""

    def call(*layer: mx.array, **options: Any) -> object:
        return launch.qmv_block(*layer, float_sums=True, **options)

    weights = launch.rows_per_simdgroup(rows) * 64 // bits
    return count(_name("qmv_block", bits), rows, ours(call, rows, mx.bfloat16, bits), weights)


def tiled(rows: int, operands: mx.Dtype = mx.bfloat16, bits: int = 4, R: int | None = None) -> Count:
    """qmm_block: the 32 lanes share the groups of 8 outputs in each tile."""

    def call(*layer: mx.array, **options: Any) -> object:
        return tile.qmm_block(*layer, operands=operands, R=R, **options)

    R = R or tile.tiles_per_simdgroup(N)
    name = _name("qmm_block", bits) + (", float operands" if operands == mx.float32 else "")
    name += f", {R} tile{'s' * (R > 1)}"
    return count(name, rows, ours(call, rows, mx.bfloat16, bits), R * 8 * GROUP_SIZE // 32)


def few(rows: int, bits: int = 4) -> Count:
    """qmm_few: a lane has a group of each output to itself."""
    weights = tile.OUTPUTS_PER_LANE * GROUP_SIZE
    return count(_name("qmm_few", bits), rows, ours(tile.qmm_few, rows, mx.bfloat16, bits), weights)


def mlx(library: Path) -> Iterator[Count]:
    """MLX's one-row kernel, its kernel for more, and its matrix kernel for any number."""
    import llvmlite.binding as llvm

    kernels = dict(oracle.kernels(library.read_bytes()))
    form = f"bfloat16_t_gs_{GROUP_SIZE}_b_4"
    wanted = [
        ("MLX affine_qmv_fast", 1, f"affine_qmv_fast_{form}_batch_0_pr_0_hgs_0_r_4", 64),
        *(("MLX affine_qmv_wide", r, f"affine_qmv_wide_{form}_nv_{r}_kl_8_batch_0", 64) for r in range(2, 6)),
        ("MLX affine_qmm_t", 32, f"affine_qmm_t_{form}_alN_true_batch_0", 8),
    ]
    for name, rows, kernel, weights in wanted:
        text = str(llvm.parse_bitcode(kernels[kernel]))
        text = re.sub(r"^(target (datalayout|triple) = |!air\.|@llvm.global_ctors).*$", "", text, flags=re.M)
        text = re.sub(r", !llvm.loop !\d+", "", text)
        code = compiled(text, ".ll", "-target", "x86_64-linux-gnu", "-Wno-override-module")
        yield count(name, rows, code, weights)


def _name(kernel: str, bits: int) -> str:
    return kernel if bits == 4 else f"{kernel}, {bits} bits"


def table(counts: list[Count]) -> str:
    """Instructions for each weight."""
    head = "| kernel | rows | arithmetic | bits | memory | matrix | slow | slots |\n" + "| --- " * 8 + "|"
    return "\n".join([head, *map(str, counts)])


def costs(counts: list[Count]) -> str:
    """Milliseconds of a pass by chip, a model."""
    head = (
        f"| kernel | rows | {' | '.join(chip.name for chip in CHIPS)} |\n" + "| --- " * (2 + len(CHIPS)) + "|"
    )
    rows = [
        f"| {c.name} | {c.rows} | {' | '.join(f'{chip.pass_ms(c.slots):.0f}' for chip in CHIPS)} |"
        for c in counts
    ]
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metallib", nargs="?", type=Path, help="MLX's own kernels")
    library = parser.parse_args().metallib
    four = [exact(rows) for rows in launch.ROWS] + [few(rows) for rows in tile.FEW_ROWS]
    four += [tiled(rows) for rows in (8, 16)] + [tiled(rows, mx.float32) for rows in (8, 16)]
    others = [tiled(8, R=R) for R in (1, 2)]
    eight = [exact(1, 8), exact(8, 8), few(1, 8), tiled(8, bits=8), tiled(16, bits=8)]
    print(table(four + others + (list(mlx(library)) if library else []) + eight))
    print()
    print(costs(four))


if __name__ == "__main__":
    main()
