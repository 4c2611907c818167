"""The engine as a child process: started before the terminal is taken, ended whenever this process ends."""

import contextlib
import errno
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dflash_mlx.errors import UsageError

PORT = 8765  # where editors look for it
HOST = "127.0.0.1"
LISTENS = ((socket.AF_INET, HOST), (socket.AF_INET6, "::1"))  # the child does, on both where there are both
IN_USE = "it is in use"  # says the child of its port
PATIENCE = 5.0  # seconds that it may take to end by itself
HASTE = 0.5  # the same for one that is started again: it has failed, and the reader waits


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
        self._moved = False
        self.url = ""

    def start(self) -> None:
        """Start it, for the first time or again. `url` is known at once; it answers a little later.

        Raises:
            UsageError: it cannot be started, or its log cannot be written.
        """
        self._moved = False
        self._start(PORT)

    def move(self) -> bool:
        """Start it on another port, once, if it ended because its own was taken before it listened.

        Returns:
            Whether that was so.
        """
        if self._moved or self.death() is None or IN_USE not in self.last_line():
            return False
        self._moved = True
        self._start(0)
        return True

    def _start(self, port: int) -> None:
        self.stop(HASTE)
        try:
            port = _free_port(port)
            self.url = f"http://{HOST}:{port}"
            self._spawn(port)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"cannot start the engine with its log {self.log}: {reason}") from None

    def _spawn(self, port: int) -> None:
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

    def stop(self, patience: float = PATIENCE) -> None:
        """End it: by closing its input, then by asking, then by force."""
        if self._child is None:
            return
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        for end in (self._child.terminate, self._child.kill, None):
            try:
                self._child.wait(patience)
                break
            except subprocess.TimeoutExpired:
                if end is not None:
                    end()
        self._child = None


def _free_port(wanted: int) -> int:
    """This port, so that an editor's settings stay right; if it is taken, one that the system picks."""
    for port in (wanted, 0, 0, 0):
        with contextlib.suppress(OSError):
            return _free(port)
    raise OSError("no free port")


def _free(port: int) -> int:
    """The port, or for 0 one that the system picks, if it is free wherever the child will listen.

    Raises:
        OSError: it is taken.
    """
    with contextlib.ExitStack() as probes:
        for family, address in LISTENS:
            try:
                probe = probes.enter_context(socket.socket(family))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
            except OSError as error:
                if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                    raise
                continue  # no IPv6 here
            port = probe.getsockname()[1]
    return port


def new_log(folder: Path) -> Path:
    """A log file of this process's own; those of a week ago are removed."""
    with contextlib.suppress(OSError):
        for old in folder.glob("engine-*.log"):
            if time.time() - old.stat().st_mtime > 7 * 86400:
                old.unlink(missing_ok=True)
    return folder / f"engine-{time.strftime('%Y-%m-%d-%H%M%S')}.log"
