"""A real HTTP server on a thread that replays event logs, at the pace and with the faults asked for."""

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from chat.logs import Chunk, compose

HEALTH: dict[str, Any] = {
    "status": "ok",
    "message": None,
    "progress": None,
    "model": "lab/Target-4bit",
    "drafter": "lab/Target-DFlash2",
    "base_url": "http://127.0.0.1:8765/v1",
    "block_size": 5,
    "speculative": True,
    "exactness": "exact",
    "kernels": None,
    "context_window": 32768,
    "notes": [],
    "queue": {"running": 0, "waiting": 0, "limit": 8},
    "memory": {"active": 11.2e9, "peak": 12.5e9, "total": 36e9},
    "plain_tokens_per_second": None,
    "reasoning_levels": ["off", "low", "high"],
    "version": "0.1.0",
}


class FakeEngine:
    """Replays `replies` in turn, the last one again and again.

    Attributes:
        health: what /health says; changed by tests. `locked`: it says only that it wants an API key.
        refuse: (status, headers, body) for the next requests, one each, before it replays again.
        hold: how many chunks of a reply are sent before it waits for `release`; None: it never waits.
        pace: seconds between chunks.
        cut: after how many chunks the connection breaks; None: never.
        requests: the bodies of all requests; `left` counts clients that went before the end.
    """

    def __init__(self, *replies: Sequence[Chunk], port: int = 0) -> None:
        self.replies = list(replies) or [compose("Hello.")]
        self.health: dict[str, Any] = dict(HEALTH)
        self.locked = False
        self.refuse: list[tuple[int, dict[str, str], str]] = []
        self.hold: int | None = None
        self.pace = 0.0
        self.cut: int | None = None
        self.requests: list[dict[str, Any]] = []
        self.left = 0
        self.sent = 0
        self._gate = threading.Event()
        self._closing = False
        self._start(port)

    def _start(self, port: int) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._closing = False

    def release(self) -> None:
        """Let a held reply go on."""
        self._gate.set()

    def close(self) -> None:
        """As if the process had been killed."""
        self._closing = True
        self._gate.set()
        self._server.shutdown()
        self._server.server_close()

    def reopen(self) -> None:
        """Come back at the same address."""
        self._start(self.port)

    def next_reply(self) -> Sequence[Chunk]:
        """The log to replay now."""
        self._gate.clear()
        self.sent = 0
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    def wait(self, number: int) -> bool:
        """Before chunk `number`; False: break the connection."""
        if number == self.hold:
            self._gate.wait(30)
        if self.pace:
            time.sleep(self.pace)
        return number != self.cut and not self._closing


def _handler(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = 200 if engine.health.get("status") == "ok" else 503
            if engine.locked:
                self._answer(401, {}, '{"error": {"message": "the API key is missing or wrong"}}')
                return
            self._answer(status, {}, json.dumps(engine.health))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            engine.requests.append(json.loads(body))
            if engine.refuse:
                self._answer(*engine.refuse.pop(0))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                self._replay()
            except OSError:
                engine.left += 1

        def _replay(self) -> None:
            for number, part in enumerate(engine.next_reply()):
                if not engine.wait(number):
                    return
                self.wfile.write(f"data: {json.dumps(part, ensure_ascii=False)}\n\n".encode())
                engine.sent = number + 1
            self.wfile.write(b"data: [DONE]\n\n")

        def _answer(self, status: int, headers: dict[str, str], body: str) -> None:
            data = body.encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client may be gone
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    return Handler
