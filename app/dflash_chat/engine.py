"""The engine as a child process: started before the terminal is taken, ended whenever this process ends."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PORT = 8765  # where editors look for it
HOST = "127.0.0.1"
PATIENCE = 5.0  # seconds that it may take to end by itself


class Engine:
    """`python -m dflash_mlx.server` with a pipe as its standard input.

    The child ends when that pipe closes, which the system sees to even if this process is killed. It has a
    session of its own, so that ctrl-c in the terminal reaches only the chat.

    Args:
        arguments: for the server, `--model` and the like.
        log: file for what it writes; of the run before one copy is kept beside it.
        command: what to run instead, for tests.
    """

    def __init__(self, arguments: Sequence[str], log: Path, command: Sequence[str] | None = None) -> None:
        self.log = log
        self._arguments = list(arguments)
        self._command = list(command or (sys.executable, "-m", "dflash_mlx.server"))
        self._child: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Start it, for the first time or again. `url` is known at once; it answers a little later."""
        self.stop()
        port = _free_port()
        self.url = f"http://{HOST}:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(OSError):
            self.log.replace(self.log.with_suffix(".old.log"))
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                [*self._command, "--port", str(port), "--exit-with-parent", *self._arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """The child's process id while it lives."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    def death(self) -> str | None:
        """Why it is gone: exit code or signal, the last line that it wrote, its log. None while it lives."""
        if self._child is None or (code := self._child.poll()) is None:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        last = self.last_line()
        return f"the engine {how}{f': {last}' if last else ''} (log: {self.log})"

    def last_line(self) -> str:
        """The last line in its log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, 2) - 4096))
                lines = log.read().decode("utf-8", "replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def stop(self) -> None:
        """End it: by closing its input, then by asking, then by force."""
        if self._child is None:
            return
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        for end in (self._child.terminate, self._child.kill, None):
            try:
                self._child.wait(PATIENCE)
                break
            except subprocess.TimeoutExpired:
                if end is not None:
                    end()
        self._child = None


def _free_port() -> int:
    """The usual port, so that an editor's settings stay right; if it is taken, one that the system picks."""
    for port in (PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            number: int = probe.getsockname()[1]
            return number
    raise OSError("no free port")


def new_log(folder: Path) -> Path:
    """A log file of this process's own; those of a week ago are removed."""
    with contextlib.suppress(OSError):
        for old in folder.glob("engine-*.log"):
            if time.time() - old.stat().st_mtime > 7 * 86400:
                old.unlink(missing_ok=True)
    return folder / f"engine-{time.strftime('%Y-%m-%d-%H%M%S')}.log"
