"""Sockets, signals and the event loop: an application and an engine as a process that can be ended."""

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

import uvicorn
from h11 import Data, EndOfMessage, Response
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_mlx.errors import UsageError
from dflash_mlx.server.refusals import CONTENT_TYPE, Refusal, encode
from dflash_mlx.server.security import LOOPBACK

KEEP_ALIVE = 60
"""Seconds that an idle connection stays open: a client that uses it again just then would see an error."""

GRACE = 1
"""Seconds that answers get to say that the server ends."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen there; `localhost` means both of its addresses, as far as this machine has them.

    Args:
        host: a name or an address.
        port: 0 lets the system choose.

    Raises:
        UsageError: the address cannot be had.
    """
    addresses = ["127.0.0.1", "::1"] if host == "localhost" else [host]
    sockets: list[socket.socket] = []
    for address in addresses:
        chosen = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_bind(address, chosen))
        except OSError as error:
            if sockets and not _taken(error):
                continue  # no IPv6 here
            for bound in sockets:
                bound.close()
            reason = "it is in use: pass another --port" if _taken(error) else error.strerror or str(error)
            raise UsageError(f"cannot listen on {address} port {chosen}: {reason}") from error
    return sockets


def _bind(address: str, port: int) -> socket.socket:
    [family, kind, protocol, _, where] = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(where)
        bound.listen(128)
    except OSError:
        bound.close()
        raise
    return bound


def _taken(error: OSError) -> bool:
    return error.errno == errno.EADDRINUSE


def base_url(host: str, sockets: list[socket.socket]) -> str:
    """What clients are to be configured with."""
    address, port = sockets[0].getsockname()[:2]
    shown = address if host in LOOPBACK else host
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/v1"


class Server(uvicorn.Server):
    """uvicorn, which tells of an end at once, and leaves signals to whoever runs it."""

    def __init__(self, app: ASGIApp, on_stop: Callable[[], object]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=GRACE,
            )
        )
        self._on_stop = on_stop

    def run_on(self, sockets: list[socket.socket], *, signals: bool = False) -> None:
        """Serve until `stop`; with `signals`, also until SIGINT or SIGTERM."""
        asyncio.run(self._run_on(sockets, signals))

    def stop(self) -> None:
        """End; from any thread."""
        self._on_stop()
        self.should_exit = True

    async def _run_on(self, sockets: list[socket.socket], signals: bool) -> None:
        if signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self.stop)
        await self._serve(sockets)


class _Protocol(H11Protocol):
    """Answers what is no HTTP in JSON too."""

    def send_400_response(self, msg: str) -> None:
        body = encode(Refusal(400, f"this is not valid HTTP: {msg}").body)
        headers = [
            ("content-type", CONTENT_TYPE),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (Response(status_code=400, headers=headers), Data(data=body), EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def on_end_of_input(action: Callable[[], object]) -> None:
    """Do this when standard input ends, as it does when the parent process does."""

    def wait() -> None:
        # Not by way of sys.stdin: a thread that waits in there aborts Python when it ends.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        action()

    threading.Thread(target=wait, name="parent", daemon=True).start()
