"""The wheel, as a user gets it: built from this repository, installed where nothing else is."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("dflash_mlx", "metal/dflash_metal", "app/dflash_chat")

IMPORTS = """
import sys
import dflash_mlx
assert "mlx" not in sys.modules, "importing dflash_mlx imports mlx"
import dflash_chat, dflash_metal
import pathlib
for package in (dflash_mlx, dflash_chat, dflash_metal):
    assert pathlib.Path(package.__file__).is_relative_to(sys.prefix), package.__file__
for name in dflash_mlx.__all__:
    getattr(dflash_mlx, name)
"""


def run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def pip(python: str | Path, *arguments: str | Path, cwd: Path) -> None:
    run(python, "-m", "pip", "--quiet", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", folder, REPOSITORY, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    files = {
        path.relative_to(root.parent).as_posix()
        for root in (REPOSITORY / package for package in PACKAGES)
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".DS_Store"
    }
    assert any(file.startswith("dflash_mlx/demo/") for file in files)
    packed = zipfile.ZipFile(wheel).namelist()
    assert files == {file for file in packed if ".dist-info/" not in file}


def test_wheel_installs_and_imports_alone(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    pip(python, "install", "--no-compile", wheel, cwd=tmp_path)
    run(python, "-W", "error", "-c", IMPORTS, cwd=tmp_path)
