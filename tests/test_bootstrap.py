"""scripts/bootstrap.sh on machines made of stubs: the Python it takes, what it says is missing."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
TOOLS = ("cat", "chmod", "cksum", "dirname", "grep", "mkdir", "rm", "tail")


@dataclass
class Machine:
    """A folder with a copy of the script, and a PATH with nothing but stubs and TOOLS."""

    root: Path
    system: str = "Linux"

    def __post_init__(self) -> None:
        self.bin = self.root / "bin of mine"
        self.project = self.root / "project"
        (self.project / "scripts").mkdir(parents=True)
        shutil.copy(REPOSITORY / "scripts/bootstrap.sh", self.project / "scripts")
        (self.project / "pyproject.toml").write_text("[project]\n")
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self.command("uname", f'[ "$1" = -s ] && echo {self.system} || echo {self.system} cpu')

    def command(self, path: str, body: str) -> Path:
        file = self.bin / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
        return file

    def python(self, path: str, version: str, machine: str = "x86_64", state: str = "fit") -> Path:
        """A Python that answers the script's question, makes environments of itself, logs pip."""
        body = f"""
            case "$1$2" in
            -c*) echo "{state} {version} {machine} $0" ;;
            -mvenv) mkdir -p "$3/bin" && cat "$0" >"$3/bin/python" && chmod +x "$3/bin/python" ;;
            -mpip) shift 2; echo "$@" >>pip-calls; [ ! -f pip-error ] || ! cat pip-error ;;
            esac"""
        return self.command(path, body)

    def run(self, *arguments: str, python: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.project / "scripts/bootstrap.sh", *arguments],
            env={"PATH": str(self.bin), "HOME": str(self.root), "PYTHON": python},
            capture_output=True,
            text=True,
            check=False,
        )

    def chosen(self, python: str = "") -> Path:
        done = self.run("--check", python=python)
        assert (done.returncode, done.stderr) == (0, "")
        return Path(done.stdout.removesuffix("\n"))

    def refusal(self, *arguments: str, python: str = "") -> str:
        """The one line it says."""
        done = self.run(*(arguments or ("--check",)), python=python)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        return done.stderr.removeprefix("dflash-chat: ")

    def pip_calls(self) -> list[str]:
        calls = self.project / "pip-calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return [line.removeprefix("install --quiet --disable-pip-version-check ") for line in lines]


@pytest.fixture
def linux(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def mac(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path, system="Darwin")
    mac_model(machine)
    return machine


def mac_model(mac: Machine, silicon: bool = True, rosetta: bool = False, macos: str = "15.6") -> None:
    # An Intel Mac knows neither name.
    keys = {"hw.optional.arm64": silicon, "sysctl.proc_translated": rosetta} if silicon else {}
    cases = "".join(f'"-n {key}") echo {value:d} ;; ' for key, value in keys.items())
    mac.command("sysctl", f'case "$*" in {cases} *) exit 1 ;; esac')
    mac.command("sw_vers", f"echo {macos}")


def test_takes_the_best_name(linux: Machine) -> None:
    linux.python("python3", "3.14")
    linux.python("python3.12", "3.12")
    best = linux.python("python3.13", "3.13")
    assert linux.chosen() == best


def test_passes_over_what_is_old_or_does_not_run(linux: Machine) -> None:
    linux.command("python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    linux.python("python3.12", "3.12", state="bare")
    good = linux.python("python3", "3.11")
    assert linux.chosen() == good


def test_finds_a_python_of_pyenv_that_is_not_selected(linux: Machine) -> None:
    linux.python("python3", "3.9", state="old")
    linux.python("../.pyenv/versions/3.9.1/bin/python3", "3.9", state="old")
    good = linux.python("../.pyenv/versions/3.12.1/bin/python3", "3.12")
    assert linux.chosen().resolve() == good.resolve()


def test_takes_the_python_asked_for(linux: Machine) -> None:
    linux.python("python3.13", "3.13")
    asked = linux.python("elsewhere/python", "3.11")
    assert linux.chosen(python=str(asked)) == asked


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("python9", "PYTHON=python9 is not a command\n"),
        ("broken", "PYTHON: broken does not run\n"),
        ("python3", "PYTHON: python3 is Python 3.9, 3.11 or later is needed\n"),
    ],
)
def test_refuses_the_python_asked_for(linux: Machine, python: str, said: str) -> None:
    linux.python("python3.13", "3.13")
    linux.python("python3", "3.9", state="old")
    linux.command("broken", "exit 1")
    assert linux.refusal(python=python) == said


def test_no_python(linux: Machine) -> None:
    assert linux.refusal() == (
        "no Python 3.11 or later and no uv: install Python 3.12 or uv (https://docs.astral.sh/uv)\n"
    )


def test_only_an_old_python(mac: Machine) -> None:
    apple = mac.python("python3", "3.9", "arm64", state="old")
    assert mac.refusal().startswith(f"no Python 3.11 or later and no uv ({apple} is Python 3.9): install")


def test_a_debian_python_without_venv(linux: Machine) -> None:
    python = linux.python("python3", "3.11", state="bare")
    assert linux.refusal().startswith(
        f"{python} cannot make virtual environments: apt install python3.11-venv, or install"
    )


def test_uv_provides_a_python(linux: Machine) -> None:
    linux.python("python3", "3.9", state="old")
    managed = linux.python("uv's/python3.12", "3.12")
    linux.command("uv", f'[ "$2" = install ] || echo "{managed}"')
    assert linux.run("--check").stdout == "uv's Python 3.12\n"
    assert linux.run().returncode == 0
    assert (linux.project / ".venv/made-from").read_text() == f"{managed}\n"


def test_uv_has_no_network(linux: Machine) -> None:
    linux.command("uv", "exit 1")
    assert linux.refusal("--dev") == (
        "uv could not provide Python 3.12: see what uv python install 3.12 says\n"
    )


def test_apple_silicon(mac: Machine) -> None:
    mac.python("python3.13", "3.13", "x86_64")
    good = mac.python("python3.12", "3.12", "arm64")
    assert mac.chosen() == good


def test_an_intel_mac(mac: Machine) -> None:
    mac_model(mac, silicon=False)
    mac.python("python3", "3.12")
    assert mac.refusal() == "MLX needs Apple Silicon, this Mac has an Intel processor\n"


def test_a_mac_with_an_intel_python(mac: Machine) -> None:
    python = mac.python("python3", "3.12", "x86_64")
    assert mac.refusal().startswith(f"{python} is an x86_64 Python and MLX needs an arm64 one: install")


def test_a_terminal_under_rosetta(mac: Machine) -> None:
    mac_model(mac, rosetta=True)
    universal = mac.python("python3", "3.12", "x86_64")
    assert mac.refusal() == (
        f"this terminal runs under Rosetta and so does {universal}: "
        "switch off 'Open using Rosetta' in the terminal app's Get Info\n"
    )


@pytest.mark.parametrize(("macos", "enough"), [("13.7.4", False), ("14.0", True), ("26.1", True)])
def test_the_oldest_macos(mac: Machine, macos: str, enough: bool) -> None:
    mac_model(mac, macos=macos)
    python = mac.python("python3", "3.12", "arm64")
    if enough:
        assert mac.chosen() == python
    else:
        assert mac.refusal() == f"MLX needs macOS 14 or later, this is {macos}: update macOS\n"


def test_installs_once(linux: Machine) -> None:
    linux.python("python3", "3.12")
    assert linux.run().returncode == 0
    assert linux.pip_calls() == ["--editable ."]
    assert linux.run("--dev").returncode == 0
    assert linux.pip_calls() == ["--editable .[dev,metal-tests]", "--no-deps dflash==0.1.0"]
    for arguments in ([], ["--dev"]):  # what the tests need includes what the demo needs
        done = linux.run(*arguments)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert linux.pip_calls() == []

    (linux.project / "pyproject.toml").write_text("[project]\ndependencies = []\n")
    assert linux.run().returncode == 0
    assert linux.pip_calls() == ["--editable ."]


def test_another_python_makes_another_environment(linux: Machine) -> None:
    linux.python("python3.12", "3.12")
    other = linux.python("python3.11", "3.11")
    made_from = linux.project / ".venv/made-from"
    for python, version in [("", 12), ("python3.11", 11), (str(other), 11), ("", 11)]:
        assert linux.run(python=python).returncode == 0
        assert made_from.read_text() == f"{linux.bin}/python3.{version}\n"
    assert len(linux.pip_calls()) == 2


def test_an_environment_that_broke_is_made_again(linux: Machine) -> None:
    linux.python("python3", "3.12")
    assert linux.run().returncode == 0
    (linux.project / ".venv/bin/python").unlink()
    assert linux.run().returncode == 0
    assert linux.pip_calls() == ["--editable ."] * 2


def test_mlx_has_no_wheel_here(linux: Machine) -> None:
    linux.python("python3", "3.12")
    error = linux.project / "pip-error"
    error.write_text("ERROR: No matching distribution found for mlx[cpu]<0.33,>=0.32.4\n")
    done = linux.run()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "dflash-chat: MLX has no build for Python 3.12 on Linux cpu: "
        "on Linux it needs glibc 2.35 (no musl), x86_64 or aarch64"
    )
    error.write_text("WARNING: retrying\nERROR: no route to host\n")
    assert linux.run().stderr.splitlines()[-1] == (
        "dflash-chat: pip: ERROR: no route to host (all of it: .venv/pip.log)"
    )
    error.unlink()
    assert linux.run().returncode == 0
