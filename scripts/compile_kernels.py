"""Write out every kernel as MLX would compile it, and have Apple's compiler build each: `--build FOLDER`.

Without Xcode's `metal` compiler the sources are written all the same, and that is said.
"""

import argparse
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from dflash_metal import launch, tile
from dflash_metal.kernel import BITS, GROUP_SIZES, Kernel
from metal.source import Source, Template

FLAGS = ["-std=metal3.1", "-fno-fast-math", "-Wall", "-Werror", "-Wno-unused"]
PREAMBLE = """#include <metal_stdlib>
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
"""


def main() -> int:
    """Returns 1 if a kernel does not compile."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--build", type=Path, required=True, help="folder for sources and what they compile to")
    folder: Path = p.parse_args().build
    folder.mkdir(parents=True, exist_ok=True)
    sources = {name: PREAMBLE + text for name, text in instances()}
    for name, text in sources.items():
        (folder / f"{name}.metal").write_text(text, encoding="utf-8")
    print(f"{len(sources)} kernels written to {folder}")
    if shutil.which("xcrun") is None:
        print("there is no xcrun here: nothing was compiled")
        return 0
    failed = [name for name in sources if not compiles(folder / f"{name}.metal")]
    print(f"{len(sources) - len(failed)} compiled, {len(failed)} did not: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def compiles(source: Path) -> bool:
    """Whether Apple's compiler takes it; what it says goes to standard error."""
    files = ["-c", str(source), "-o", str(source.with_suffix(".air"))]
    return subprocess.run(["xcrun", "-sdk", "macosx", "metal", *FLAGS, *files], check=False).returncode == 0


def instances() -> list[tuple[str, str]]:
    """Name and source of each combination of template arguments."""
    found = []
    some = mx.zeros((64,), mx.uint32)
    for dtype, size, bits, rows in itertools.product(launch.DTYPES, GROUP_SIZES, BITS, launch.ROWS):
        values = mx.zeros((64,), dtype)
        inputs = [some, values, values, values, mx.array(0), mx.array(0)]
        for fast, sums in itertools.product((True, False), (True, False) if bits == 4 else (True,)):
            R = launch.rows_per_simdgroup(rows)
            template: Template = [
                *(("T", dtype), ("GS", size), ("BITS", bits), ("M", rows), ("R", R)),
                *(("FAST", fast), ("SUMF", sums)),
            ]
            kind = str(dtype).rpartition(".")[2]
            name = f"qmv_block_{kind}_g{size}_b{bits}_m{rows}_fast{fast:d}_sumf{sums:d}"
            found.append((name, text(launch.QMV_BLOCK, inputs, [dtype], template)))
    for dtype, rank in itertools.product(launch.DTYPES, (32, 256)):
        values, noise = mx.zeros((64,), dtype), mx.zeros((64,))
        inputs = [some, values, noise, values, values, values]
        inputs += [mx.array(0), mx.array(0, mx.int32), mx.array(1.0)]
        name = f"selector_walk_{str(dtype).rpartition('.')[2]}_r{rank}"
        found.append(
            (name, text(launch.SELECTOR_WALK, inputs, [mx.uint32], [("T", dtype), ("C", 16), ("R", rank)]))
        )
    return found + list(fast_instances())


def fast_instances() -> Iterator[tuple[str, str]]:
    """Those of the fast mode; the number of simdgroups is that of long rows, it only counts loops."""
    some, scalar = mx.zeros((64,), mx.uint32), mx.array(0)
    kinds = [(mx.bfloat16, mx.bfloat16), (mx.bfloat16, mx.float32), (mx.float16, mx.float16)]
    for (dtype, operands), size, bits in itertools.product(kinds, GROUP_SIZES, BITS):
        values = mx.zeros((64,), dtype)
        layer, kind = [some, values, values, values, scalar, scalar], str(dtype).rpartition(".")[2]
        shared: Template = [("T", dtype), ("Y", dtype), ("GS", size), ("BITS", bits), ("S", 8)]
        for R, C, full in itertools.product((1, 2, 4), (1, 2), (True, False)):
            template = [*shared, ("O", operands), ("R", R), ("C", C), ("FULL", full)]
            name = f"qmm_block_{kind}_g{size}_b{bits}_o{operands.size * 8}_r{R}_c{C}_full{full:d}"
            yield name, text(tile.QMM_BLOCK, [*layer, scalar], [dtype], template)
        if operands == dtype:
            for rows in tile.FEW_ROWS:
                template = [*shared, ("M", rows), ("R", tile.OUTPUTS_PER_LANE)]
                yield f"qmm_few_{kind}_g{size}_b{bits}_m{rows}", text(tile.QMM_FEW, layer, [dtype], template)


def text(kernel: Kernel, inputs: list[mx.array], outputs: list[mx.Dtype], template: Template) -> str:
    """What MLX compiles."""
    source = Source(f"dflash_{kernel.name}", kernel.inputs, kernel.outputs, kernel.body, kernel.header)
    return source.for_mlx(inputs, outputs, template)


if __name__ == "__main__":
    sys.exit(main())
