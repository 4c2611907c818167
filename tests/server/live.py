"""A real server on a thread of this process, and clients that see every byte."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx

import dflash_mlx
from dflash_mlx import Session
from dflash_mlx.events import Event
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.server.app import make_app
from dflash_mlx.server.engine import Engine
from dflash_mlx.server.service import Service
from dflash_mlx.server.serving import Server, base_url, listen
from dflash_mlx.session import Prepared

JSON = {"content-type": "application/json"}
CODE = "def main(argv):\n"


class Watched(Session):
    """A session that can be slowed down, and that counts what it did.

    Attributes:
        pause: seconds before each event.
        events: handed out since the last `watch`; `late`: those after the first cancellation.
    """

    pause = 0.0
    events = 0
    late = 0
    _counting_late = False

    def watch(self, pause: float) -> None:
        self.pause, self.events, self.late, self._counting_late = pause, 0, 0, False

    def run(self, request: Prepared) -> Iterator[Event]:
        for event in super().run(request):
            if self.pause:
                time.sleep(self.pause)
            self.events += 1
            self.late += self._counting_late and bool(event.tokens)
            yield event

    def cancel(self) -> None:
        self._counting_late = True
        super().cancel()


def open_watched(prefill_step: int = 32) -> Watched:
    """The embedded pair in float32, with short prompt chunks."""
    session = dflash_mlx.load(EMBEDDED.target, dequantize=True, block_size=5, prefill_step=prefill_step)
    session.__class__ = Watched
    assert isinstance(session, Watched)
    return session


class Live:
    """A server that answers, and its engine.

    Attributes:
        session: what the engine loaded; only to be watched.
    """

    def __init__(self, engine: Engine, url: str, session: Watched, client: httpx.Client) -> None:
        self.engine, self.url, self.session, self._client = engine, url, session, client
        self.host, port = url.removeprefix("http://").removesuffix("/v1").rsplit(":", 1)
        self.port = int(port)

    def post(self, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        return self._client.post(path, json=body)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self._client.get(path, headers=headers)

    def chat(self, content: str = CODE, **body: Any) -> dict[str, Any]:
        """The whole answer to one message."""
        answer = self.post(messages=[{"role": "user", "content": content}], **body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def stream(
        self, content: str = CODE, path: str = "/v1/chat/completions", **body: Any
    ) -> list[dict[str, Any]]:
        """All chunks of a streamed answer; it must have ended with `[DONE]`."""
        prompt = (
            {"messages": [{"role": "user", "content": content}]} if "chat" in path else {"prompt": content}
        )
        answer = self.post(path, **prompt, stream=True, **body)
        assert answer.status_code == 200, answer.text
        return chunks(answer.content)

    def connect(self, host: str | None = None) -> socket.socket:
        return socket.create_connection((host or self.host, self.port), timeout=60)

    def ask(self, data: bytes) -> bytes:
        """Everything that the server says to these bytes until it closes the connection."""
        with self.connect() as connection:
            connection.sendall(data)
            return read_all(connection)

    def idle(self, seconds: float = 30) -> None:
        """Wait until nothing runs and nothing waits."""
        wait_for(lambda: self.engine.queue["running"] + self.engine.queue["waiting"] == 0, seconds)

    @contextmanager
    def beside(self, **settings: Any) -> Iterator["Live"]:
        """Another server in front of the same engine."""
        with serving(self.engine, self.session, **settings) as live:
            yield live


@contextmanager
def running(open_session: Callable[[], Watched] = open_watched, **settings: Any) -> Iterator[Live]:
    """A server with an engine of its own, ready to answer."""
    opened: list[Watched] = []

    def load(progress: Callable[[str, int, int], None]) -> Session:
        opened.append(open_session())
        return opened[0]

    engine = Engine(load, max_queue=settings.pop("max_queue", 8))
    engine.start()
    wait_for(lambda: engine.status.state != "loading", 300)
    assert engine.status.state == "ok", engine.status.message
    try:
        with serving(engine, opened[0], **settings) as live:
            yield live
    finally:
        assert engine.stop(30)


@contextmanager
def serving(
    engine: Engine, session: Watched, *, api_key: str | None = None, any_host: bool = False, **settings: Any
) -> Iterator[Live]:
    sockets = listen("localhost", 0)
    url = base_url("localhost", sockets)
    service = replace(Service(engine, "demo", "drafter", url, created=1), **settings)
    server = Server(make_app(service, api_key=api_key, any_host=any_host), on_stop=lambda: None)
    thread = threading.Thread(target=server.run_on, args=(sockets,))
    thread.start()
    wait_for(lambda: server.started, 60)
    try:
        with httpx.Client(base_url=url.removesuffix("/v1"), timeout=120) as client:
            yield Live(engine, url, session, client)
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.005)


def request(body: Mapping[str, Any] | bytes, path: str = "/v1/chat/completions", **headers: str) -> bytes:
    """The bytes of a POST that closes its connection."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"host": "localhost", "connection": "close", **JSON, "content-length": str(len(data)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        part = connection.recv(65536)
        assert part, f"the connection ended before {mark!r}: {data!r}"
        data += part
    return data


def parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers in lower case, and body of a raw answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        whole, rest = b"", body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            whole, rest = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        body = whole
    return int(first.split()[1]), headers, body


def chunks(body: bytes) -> list[dict[str, Any]]:
    """The JSON of every frame of a stream that ended as it must."""
    frames = body.decode("utf-8").split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""], frames[-3:]
    assert all(frame.startswith("data: ") for frame in frames[:-1])
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def joined(parts: list[dict[str, Any]], key: str = "content") -> str:
    """A text of all deltas."""
    return "".join(c["delta"].get(key) or "" for part in parts for c in part["choices"])
