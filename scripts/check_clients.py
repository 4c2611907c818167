"""Try real clients of OpenAI-compatible servers, each in a throw-away environment, and say what they managed.

    python scripts/check_clients.py [--client NAME ...] [--base-url URL]

A client comes from PyPI or npm and gets a folder of its own for all that it writes. Short prompts are
answered by the embedded pair; loops through tools, which it cannot call, by the same server with
`scripted_model.py`. With a URL, the server there, on this machine, answers all of it.
"""

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import httpx
from client_table import CLIENTS, Client

from dflash_mlx.pairs import EMBEDDED

LIMIT = 600
"""Seconds for one command of a client; the machine may be busy."""

LINES = 20
"""Of what a client said last, shown when it failed."""

CODE = "def main(argv):"
QUESTION = (
    "Read {0}/left.txt and {0}/right.txt. Each has one half of a password. "
    "Write both together in capital letters."
)


class Failed(Exception):  # noqa: N818  it is a result
    """The client did not do what it was asked for; what it said goes with it."""

    def __init__(self, reason: str, said: str) -> None:
        lines = [f"    {line}" for line in said.strip().splitlines()[-LINES:]]
        super().__init__("\n".join([reason, *lines]))


class Skipped(Exception):  # noqa: N818
    """The client could not be tried here."""


def main(argv: list[str] | None = None) -> int:
    """Print a line for every client; 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--client", action="append", choices=CLIENTS, help="only this one; may be repeated")
    parser.add_argument("--base-url", help="of a running server, such as http://127.0.0.1:8765/v1")
    args = parser.parse_args(argv)
    clients = {name: CLIENTS[name] for name in args.client or CLIENTS}
    failed = False
    with ExitStack() as stack:
        servers = Servers(args.base_url, stack)
        for name, client in clients.items():
            start, version, verdict = time.monotonic(), "", "PASS"
            done: list[str] = []
            with throw_away() as here:
                try:
                    version = install(client, here)
                    if client.turn:
                        done.append(take_turn(client, here, servers.for_turns))
                    if client.loop:
                        done.append(go_through_tools(client, here, servers.for_loops))
                except Skipped as reason:
                    verdict = f"SKIPPED: {reason}"
                except Failed as reason:
                    verdict, failed = f"FAIL: {reason}", True
            what = ", ".join(done) or "nothing"
            print(f"{name} {version}: {what}, {time.monotonic() - start:.0f} s, {verdict}", flush=True)
    return int(failed)


# --- one client ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A throw-away folder, with a project in it that a client may work on."""

    folder: Path

    @property
    def project(self) -> Path:
        return self.folder / "project"

    def environment(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        """With nothing of the user's, and no way out of this machine."""
        home, nowhere = str(self.folder / "home"), "http://127.0.0.1:9"
        folders = {"CONFIG": ".config", "DATA": ".local/share", "CACHE": ".cache", "STATE": ".local/state"}
        proxies = {f"{scheme}_proxy": nowhere for scheme in ("http", "https", "all")}
        proxies["no_proxy"] = "127.0.0.1,localhost"
        return {
            "PATH": f"{self.folder}/venv/bin:{self.folder}/node_modules/.bin:{os.environ['PATH']}",
            "HOME": home,
            "TMPDIR": str(self.folder / "tmp"),
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",
            "DO_NOT_TRACK": "1",
            **{f"XDG_{name}_HOME": f"{home}/{path}" for name, path in folders.items()},
            **proxies,
            **{name.upper(): value for name, value in proxies.items()},
            **more,
        }


@contextmanager
def throw_away() -> Iterator[Place]:
    """A place for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="clients-") as name:
        place = Place(Path(name).resolve())
        for folder in ("project", "home", "tmp"):
            (place.folder / folder).mkdir()
        try:
            yield place
        finally:
            end_strays(place.folder)  # whoever still writes there would keep it from being removed


def install(client: Client, place: Place) -> str:
    """The version that is there now, the newest one that this Python or Node can run."""
    if client.kind == "pip":
        _install(sys.executable, "-m", "venv", str(place.folder / "venv"))
        python = str(place.folder / "venv/bin/python")
        _install(python, "-m", "pip", "install", "--quiet", *client.packages)
        show = f"from importlib.metadata import version; print(version('{client.packages[0]}'))"
        return _install(python, "-c", show)
    if shutil.which("npm") is None:
        raise Skipped("npm is not on PATH")
    quiet = ("--no-audit", "--no-fund", "--loglevel=error")
    _install("npm", "install", "--prefix", str(place.folder), *quiet, *client.packages)
    package = place.folder / "node_modules" / client.packages[0] / "package.json"
    return str(json.loads(package.read_text(encoding="utf-8"))["version"])


def _install(*command: str) -> str:
    """What it prints; in the user's own environment, for the sake of package caches and registries."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise Skipped(f"{command[0]}: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")
    return done.stdout.strip()


def take_turn(client: Client, place: Place, server: "Running") -> str:
    """Have it complete a piece of code; what it did. Raises Failed."""
    before = server.counts()
    said = _ask(client, client.turn, place, server, CODE)
    done = server.counts() - before
    if not done["generated_tokens"] or not said.strip():
        raise Failed("no answer", said)
    return f"turn ({done['generated_tokens']} tokens)"


def go_through_tools(client: Client, place: Place, server: "Running") -> str:
    """Ask it for what only its tools can tell; what it did. Raises Failed."""
    halves = [secrets.token_hex(3), secrets.token_hex(3)]
    for side, half in zip(("left", "right"), halves, strict=True):
        (place.project / f"{side}.txt").write_text(f"{side} half: {half}\n", encoding="utf-8")
    before = server.counts()
    said = _ask(client, client.loop, place, server, QUESTION.format(place.project))
    done = server.counts() - before
    if "".join(halves).upper() not in re.sub(r"\W", "", said):
        raise Failed("no password", said)
    cached = f"{done['cached_tokens']} of {done['prompt_tokens']} prompt tokens from the cache"
    return f"tool loop ({done['requests']} requests, {cached})"


def _ask(
    client: Client, commands: Sequence[Sequence[str]], place: Place, server: "Running", prompt: str
) -> str:
    """What the last of these commands of a client says."""
    words = {"FOLDER": str(place.folder), "URL": server.url, "MODEL": server.model, "PROMPT": prompt}

    def filled(text: str) -> str:
        return re.sub(r"<(FOLDER|URL|MODEL|PROMPT)>", lambda found: words[found[1]], text)

    for name, text in client.files.items():
        file = place.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(filled(text), encoding="utf-8")
    said = ""
    for command in commands:
        more = {name: filled(value) for name, value in client.environment.items()}
        said = run([filled(word) for word in command], place, more)
    return said


def run(command: Sequence[str], place: Place, more: Mapping[str, str] = {}, limit: float = LIMIT) -> str:
    """What a command says. Nothing that it started is left.

    Raises:
        Failed: its exit code, or that it did not end in time.
    """
    said = place.folder / "said"  # no pipe: whatever is left in the background would hold it open
    with said.open("w") as output:
        try:
            process = subprocess.Popen(
                command,
                cwd=place.project,
                env=place.environment(more),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise Failed(f"{command[0]} cannot be run: {error}", "") from error
        try:
            how = f"ended with {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            how = f"did not end within {limit} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end_strays(place.folder)
    text = said.read_text(encoding="utf-8", errors="replace")
    if how != "ended with 0":
        raise Failed(f"{command[0]} {how}", text)
    return text


def end_strays(folder: Path) -> None:
    """End what left its process group but not this folder: its name is in the command line."""
    for _ in range(50):
        listed = subprocess.run(
            ["ps", "-axww", "-o", "pid=,command="], capture_output=True, text=True, check=True
        )
        lines = [line.split(None, 1) for line in listed.stdout.splitlines()]
        strays = [int(pid) for pid, *command in lines if str(folder) in "".join(command)]
        if not strays:
            return
        for pid in strays:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


# --- servers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    model: str

    def counts(self) -> Counter[str]:
        """What it has counted so far."""
        metrics = httpx.get(f"{self.url}/metrics").raise_for_status().text
        return Counter(
            {name: int(count) for name, count in re.findall(r"^dflash_(\w+)_total (\d+)", metrics, re.M)}
        )


class Servers:
    """Started when they are first asked for, and ended with the stack; with a URL, the one that is there."""

    def __init__(self, url: str | None, stack: ExitStack) -> None:
        self._there, self._stack = _found(url) if url else None, stack

    @cached_property
    def for_turns(self) -> Running:
        pair = ("--model", EMBEDDED.target, "--draft", EMBEDDED.drafter)
        return self._get("-m", "dflash_mlx.server", "--exit-with-parent", *pair)

    @cached_property
    def for_loops(self) -> Running:
        return self._get(str(Path(__file__).with_name("scripted_model.py")))

    def _get(self, *command: str) -> Running:
        return self._there or self._stack.enter_context(_child(*command))


@contextmanager
def _child(*command: str) -> Iterator[Running]:
    """A server, in a throw-away environment too."""
    with throw_away() as here:
        environment = here.environment({"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
        process = subprocess.Popen(
            [sys.executable, *command, "--port", "0"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        try:
            yield _found(process.stdout.readline().removeprefix("base URL: ").strip())
        finally:
            process.communicate()


def _found(url: str) -> Running:
    try:
        models = httpx.get(f"{url}/models").raise_for_status().json()["data"]
    except httpx.HTTPError as error:
        sys.exit(f"error: no server at {url!r}: {error}")
    return Running(url, models[0]["id"])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))  # cleaning up, as after Ctrl+C
    sys.exit(main())
