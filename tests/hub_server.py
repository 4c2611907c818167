"""A model hub on a local port: the endpoints that huggingface_hub asks, real files, faults to order."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """What the hub holds and how it behaves; tests change it while it runs.

    Attributes:
        files: by repository, then by path.
        gated: repositories whose files need terms to be accepted.
        break_after: bytes after which a file's first transfer breaks off; by path.
        claimed: sizes that the hub states instead of the true ones; by path.
        revisions: what the hub knows, all of them the same commit.
        served: path and first byte of every transfer, in order.
    """

    files: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    break_after: dict[str, int] = field(default_factory=dict)
    claimed: dict[str, int] = field(default_factory=dict)
    revisions: set[str] = field(default_factory=lambda: {"main", COMMIT})
    served: list[tuple[str, int]] = field(default_factory=list)
    url: str = ""


@contextmanager
def hub_server(files: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Serve `files` until the block ends."""
    hub = Hub({repo: dict(content) for repo, content in files.items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, *, body: bool = True) -> None:
        parts = [unquote(part) for part in self.path.partition("?")[0].strip("/").split("/")]
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4], parts[5])
        elif parts[2:3] == ["resolve"]:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)
        else:
            self._error(404, "EntryNotFound", "no such page")

    def _api(self, repo: str, kind: str, revision: str) -> None:
        if self._refused(repo, revision):
            return
        files = self.hub.files[repo]
        if kind == "revision":
            answer: object = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]}
        else:
            answer = [
                {
                    "type": "file",
                    "path": path,
                    "size": self._size(path, data),
                    "oid": _digest(data),
                }
                for path, data in files.items()
            ]
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, path: str, body: bool) -> None:
        if self._refused(repo, revision):
            return
        if repo in self.hub.gated:
            self._error(403, "GatedRepo", f"Access to model {repo} is restricted")
            return
        data = self.hub.files[repo][path]
        headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT}
        if not body:
            self._send(200, b"", {**headers, "Content-Length": str(self._size(path, data))})
            return
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.hub.served.append((path, first))
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self.send_response(206 if first else 200)
        for name, value in {**headers, "Content-Length": str(len(data) - first)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[first : self.hub.break_after.pop(path, len(data))])
        self.close_connection = True

    def _refused(self, repo: str, revision: str) -> bool:
        if repo not in self.hub.files:
            self._error(404, "RepoNotFound", "Repository not found")
        elif revision not in self.hub.revisions:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return False
        return True

    def _size(self, path: str, data: bytes) -> int:
        return self.hub.claimed.get(path, len(data))

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
