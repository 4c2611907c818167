"""`python -m dflash_mlx.doctor`: right on a healthy machine, and loud where something is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mlx.doctor import Check, differences

OPENBLAS = [*Path("/usr").glob("lib/*/openblas-pthread/libopenblas.so.0")]


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "dflash_mlx.doctor", *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="exact by construction only on MLX's own CPU library")
def test_a_healthy_machine_has_no_problem() -> None:
    done = run("--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["problems"]
    assert report["problems"] == []
    assert report["check"]["exactness"] == "exact"
    assert report["check"]["plain"] == report["check"]["speculative"]
    assert report["check"]["tau"] > 1
    assert len(report["check"]["timings"]) == 5
    assert all(value > 0 for value in report["check"]["timings"].values())
    assert {"python", "dflash-chat", "mlx", "mlx-lm"} <= set(report["versions"])
    assert set(report["check"]["linears"]) == {"float32"}
    assert report["check"]["fallbacks"] == []
    assert set(report["kernels"].values()) == {"there is no GPU"}
    assert {"chip", "system", "memory", "MLX device", "Metal"} <= set(report["machine"])


def test_another_package_of_our_name_is_found(tmp_path: Path) -> None:
    info = tmp_path / "dflash_mlx-0.1.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dflash-mlx\nVersion: 0.1.8\n")
    (info / "top_level.txt").write_text("dflash_mlx\n")
    (info / "RECORD").write_text("dflash_mlx/__init__.py,,\n")
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = run("--report", PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stdout.startswith("```text\nmachine\n")
    assert done.stdout.endswith("```\n")
    assert "problem: the package dflash-mlx is installed too" in done.stdout


@pytest.mark.skipif(not OPENBLAS, reason="no OpenBLAS is installed: apt install libopenblas0-pthread")
def test_a_library_that_is_not_row_exact_is_a_problem() -> None:
    done = run(LD_PRELOAD=str(OPENBLAS[0]))
    assert done.returncode == 1
    assert "problem: a row's numbers depend on how many rows are verified with it: not exact" in done.stdout


def test_changed_tokens_are_a_problem() -> None:
    check = Check(plain="aa", speculative="bb", exactness="exact", tau=2.0, timings={})
    assert differences(check) == ["speculation changed the tokens: aa became bb"]
