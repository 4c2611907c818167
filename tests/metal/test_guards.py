"""Bugs planted in kernels, and what notices each of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from dflash_metal import launch, tile
from dflash_metal.kernel import Kernel, Make

from metal.conftest import Backend
from metal.emulator import Emulator, MetalError
from metal.layers import Layer, differing, floats
from metal.test_selector_walk import Draft


def planted(emulator: Emulator, right: str, wrong: str) -> Make:
    """Makes kernels with one piece of their source replaced."""

    def make(**kernel: Any) -> Any:
        assert kernel["header"].count(right) == 1, right
        return emulator.metal_kernel(**kernel | {"header": kernel["header"].replace(right, wrong)})

    return make


@pytest.mark.parametrize(
    ("right", "wrong", "dtype"),
    [
        (
            "x0 * weight[r * 4] + x1 * weight[r * 4 + 1]",
            "x1 * weight[r * 4 + 1] + x0 * weight[r * 4]",
            mx.float32,
        ),
        (
            "result[r * M + m] += part",
            "result[r * M + m] = result[r * M + m] + scale * acc[r * M + m] + sum[m] * bias",
            mx.float32,
        ),
        ("float(x0) + float(x1) + float(x2) + float(x3)", "float(x0 + x1 + x2 + x3)", mx.bfloat16),
        ("(FAST ? 2 : 1)", "(FAST ? 1 : 2)", mx.float32),
    ],
    ids=["in a group of four", "contraction", "sum of x", "lanes"],
)
def test_another_order_of_additions(emulator: Emulator, right: str, wrong: str, dtype: mx.Dtype) -> None:
    layer = Layer.random(40, 5120, group_size=64, bits=4, dtype=dtype)
    y = layer.block(5, planted(emulator, right, wrong))
    assert differing(floats(y), layer.expected()[:5]) > 0


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        pytest.param("min(first + r, N - 1)", "first + r", "out of range: load .* of w, ", id="read past w"),
        pytest.param(
            "y[m * N + first", "y[m * (N + 1) + first", "out of range: store .* of y, ", id="write past y"
        ),
        pytest.param(
            "lane == 0 && first + r < N", "lane == 0", "race: store .* of y, ", id="into the next row"
        ),
        pytest.param("if (lane == 0 && first", "if (first", "race: store .* of y, ", id="all lanes store"),
        pytest.param(
            "SUMF>(bytes + k / 2, w_row, x + k,",
            "SUMF>(bytes + k / 2, w_row, x + k + 2,",
            "misaligned",
            id="misaligned",
        ),
        pytest.param(
            "    const device T* x,\n    device T* y",
            "    threadgroup T* x,\n    device T* y",
            "no matching function",
            id="device for threadgroup",
        ),
        pytest.param(
            "const device uint8_t* bytes = (",
            "const uint8_t* bytes = (",
            "cannot initialize",
            id="no address space",
        ),
        pytest.param("simd_sum(", "simd_summ(", "does not compile:.*simd_summ", id="misspelt"),
        pytest.param(
            "simd_sum(result[r * M + m])", "double(simd_sum(result[r * M + m]))", "poisoned", id="double"
        ),
    ],
)
def test_qmv_block(emulator: Emulator, right: str, wrong: str, message: str) -> None:
    layer = Layer.random(37, 1024, group_size=64, bits=4, dtype=mx.bfloat16)
    with pytest.raises(MetalError, match=f"(?s){message}"):
        layer.block(5, planted(emulator, right, wrong))


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        pytest.param(
            f"{BARRIER}\n    int best",
            "int best",
            "read before write: load of 4 bytes in threadgroup memory",
            id="no barrier before the scores are read",
        ),
        pytest.param(
            f"{BARRIER}  // the scores", "// the scores", "race: ", id="none before they are replaced"
        ),
        pytest.param(
            f"{BARRIER}\n    int best",
            f"{BARRIER.replace('threadgroup)', 'device)')}\n    int best",
            "race: ",
            id="a barrier for other memory",
        ),
        pytest.param(
            "    int best",
            f"    if (lane < 31) {{ {BARRIER} }}\n    int best",
            "divergent barrier: ",
            id="divergent barrier",
        ),
        pytest.param(
            "edge = simd_sum(edge)",
            "if (lane < 16) { edge = simd_sum(edge); }",
            "divergent simdgroup operation: ",
            id="divergent sum",
        ),
        pytest.param(
            "threadgroup float* scores",
            "device float* scores",
            "no matching function",
            id="threadgroup for device",
        ),
    ],
)
def test_selector_walk(emulator: Emulator, right: str, wrong: str, message: str) -> None:
    backend = Backend(planted(emulator, right, wrong), emulator.prepare)
    with pytest.raises(MetalError, match=message):
        Draft.random(0).walk(backend)


def test_threadgroups_race_too(emulator: Emulator) -> None:
    kernel = emulator.metal_kernel("same_word", ["a"], ["o"], "  o[thread_position_in_threadgroup.x] = a[0];")
    arguments: dict[str, Any] = {
        "inputs": [mx.zeros(8)],
        "output_shapes": [(64,)],
        "output_dtypes": [mx.float32],
        "threadgroup": (32, 1, 1),
    }
    kernel(grid=(32, 1, 1), **arguments)
    with pytest.raises(MetalError, match=r"race: store .* of o, thread 0 of threadgroup 1"):
        kernel(grid=(64, 1, 1), **arguments)


PLACE = "inline uint f() { return thread_index_in_simdgroup; }"
DEVICE = "inline void f(const device float* a, device float* o) { o[0] = a[0]; }"


def test_threadgroups_may_read_what_none_writes(emulator: Emulator) -> None:
    source = "  o[1 + thread_position_in_grid.x] = o[0];"
    o = run(emulator, source, grid=(63, 1, 1), threadgroup=(32, 1, 1), init_value=3)
    assert o.tolist() == [3] * 64


def run(emulator: Emulator, source: str, **changed: Any) -> mx.array:
    arguments: dict[str, Any] = {"inputs": [mx.arange(64.0)], "grid": (64, 1, 1), "threadgroup": (64, 1, 1)}
    kernel = emulator.metal_kernel("small", ["a"], ["o"], source, changed.pop("header", ""))
    (o,) = kernel(output_shapes=[(64,)], output_dtypes=[mx.float32], **arguments | changed)
    return o


def test_what_kernels_may_do(emulator: Emulator) -> None:
    source = (
        "  threadgroup float t[64];\n  const uint i = thread_position_in_grid.x;\n  t[i] = a[i];\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  o[i] = t[63 - i] + simd_shuffle_xor(a[i], 1);"
    )
    i = np.arange(64)
    assert run(emulator, source).tolist() == (63 - i + (i ^ 1)).tolist()
    assert emulator.traffic.read["a"] == 64 * 2 * 4


def test_simd_sum_adds_neighbours_first(emulator: Emulator) -> None:
    a = np.zeros(64, np.float32)
    a[[0, 1, 16]] = 2**24, 1, -(2.0**24)
    o = run(
        emulator,
        "  o[thread_position_in_grid.x] = simd_sum(a[thread_position_in_grid.x]);",
        inputs=[mx.array(a)],
    )
    assert o[0].item() == 0  # 2 ** 24 + 1 rounds the 1 away; the lanes 16 apart meet last


@pytest.mark.parametrize(
    ("source", "changed", "message"),
    [
        pytest.param(
            "  o[thread_position_in_grid.x] = a[64];",
            {},
            "out of range: load .* byte 256 of 256 of a",
            id="read past the end",
        ),
        pytest.param(
            "  o[thread_position_in_grid.x] = o[0];",
            {},
            "read before write: load .* byte 0 of 256 of o",
            id="read an output",
        ),
        pytest.param("  a[0] = 1;", {}, "not assignable|read-only", id="write an input"),
        pytest.param(
            "  ((device float*)a)[thread_position_in_grid.x] = 1;",
            {},
            "out of range: store .* of a",
            id="cast an input and write it",
        ),
        pytest.param(
            "  const float* p = a; o[0] = p[0];", {}, "cannot initialize", id="pointer without address space"
        ),
        pytest.param("  o[f()] = 1;", {"header": PLACE}, "undeclared", id="attribute outside the body"),
        pytest.param(
            "  f(a, o);",
            {"header": DEVICE, "inputs": [mx.zeros(7)]},
            "no matching function",
            id="small input as device memory",
        ),
        pytest.param(
            "  threadgroup float t[8193];\n  t[0] = 1;",
            {},
            "more than 32 KB of threadgroup memory",
            id="threadgroup memory",
        ),
    ],
)
def test_what_kernels_may_not_do(
    emulator: Emulator, source: str, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(MetalError, match=message):
        run(emulator, source, **changed)


def test_threads_of_a_threadgroup(emulator: Emulator) -> None:
    with pytest.raises(ValueError, match="1025 threads"):
        run(emulator, "  o[0] = a[0];", threadgroup=(1025, 1, 1))


KERNELS = (launch.QMV_BLOCK, launch.SELECTOR_WALK, tile.QMM_BLOCK, tile.QMM_FEW)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_source_is_the_one_that_mlx_compiles(
    emulator: Emulator,
    kernel: Kernel,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """MLX shows what it would compile when a graph is exported, which needs no Metal."""
    layer, draft = Layer.random(37, 1024, group_size=64, bits=4, dtype=mx.bfloat16), Draft.random(0)
    launches: dict[str, tuple[Callable[..., mx.array], list[mx.array]]] = {
        "qmv_block": (
            lambda make, x, *w: launch.qmv_block(
                x, *w, group_size=64, bits=4, float_sums=True, make=make, verbose=True
            ),
            [layer.x[:5], layer.w, layer.scales, layer.biases],
        ),
        "qmm_block": (
            lambda make, x, *w: tile.qmm_block(
                x, *w, group_size=64, bits=4, operands=mx.float32, make=make, verbose=True
            ),
            [layer.x[:5], layer.w, layer.scales, layer.biases],
        ),
        "qmm_few": (
            lambda make, x, *w: tile.qmm_few(x, *w, group_size=64, bits=4, make=make, verbose=True),
            [layer.x[:2], layer.w, layer.scales, layer.biases],
        ),
        "selector_walk": (
            lambda make, *draft: partial(launch.selector_walk, anchor=17, make=make, verbose=True)(*draft),
            [draft.candidates, draft.unary, draft.hidden, draft.predecessors, draft.successors],
        ),
    }
    call, arrays = launches[kernel.name]
    call(emulator.metal_kernel, *arrays)
    ours = capfd.readouterr().out.strip()
    mx.export_function(str(tmp_path / "graph"), lambda *a: call(mx.fast.metal_kernel, *a), *arrays)
    mlx = capfd.readouterr().out.partition("```\n")[2].rpartition("```")[0].strip()
    name = f"custom_kernel_dflash_{kernel.name}"
    suffix = mlx.partition(f"void {name}")[2].partition("(")[0]  # MLX adds types and template arguments
    assert suffix
    assert mlx.replace(name + suffix, name) == ours


def test_kernels_are_what_their_files_say() -> None:
    folder = Path(launch.__file__).parent
    assert {f"{kernel.name}.metal" for kernel in KERNELS} == {path.name for path in folder.glob("*.metal")}
    for kernel in KERNELS:
        assert f"METAL_FUNC void {kernel.name}(" in kernel.header
        assert f"{kernel.name}<" in kernel.body
