"""`python -m dflash_mlx.doctor`: right on a healthy machine, and loud where something is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_mlx import doctor
from dflash_mlx.doctor import Check, differences
from dflash_mlx.errors import OutOfMemoryError
from dflash_mlx.events import Block
from dflash_mlx.result import Result

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
    """Also those of a later run."""

    def found(plain: str, speculative: str) -> list[str]:
        return differences(Check(tuple(plain), tuple(speculative), exactness="exact", tau=2.0, timings={}))

    assert found("aaa", "aaa") == []
    assert found("aaa", "bbb") == ["speculation changed the tokens: a became b"]
    assert found("aaa", "aab") == ["speculation changed the tokens: a became a, b"]
    assert found("aba", "aba") == ["plain decoding has other tokens from run to run: a, b"]


def test_every_run_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter([(1,), (1,), (1,), (1,), (1,), (2,)])
    block = Block((1,), drafted=1, seconds=0.1)

    def decode(session: object, *, speculative: bool) -> Result:
        return Result(next(tokens), "", "", "length", 1, (block,), 0.1, 0.1, 0, ())

    monkeypatch.setattr(doctor, "_decode", decode)
    monkeypatch.setattr(doctor, "load", lambda *_, **__: SimpleNamespace(exactness="exact", fallbacks=()))
    monkeypatch.setattr(doctor, "_linears", lambda _: {})
    [problem] = differences(doctor.check_pair())
    assert problem.startswith("speculation changed the tokens")


def test_what_cannot_be_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object, **__: object) -> None:
        raise OutOfMemoryError("not enough memory")

    monkeypatch.setattr(doctor, "load", load)
    assert doctor.main([]) == OutOfMemoryError.exit_code
    assert capsys.readouterr() == ("", "error: not enough memory\n")
