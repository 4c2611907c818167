"""Who may ask, from where, and how much: everything that is refused before a request is read.

A server on this machine is within reach of every web page that its user opens. A page is kept out by its
Origin, and one that had its own name resolve to this machine by its Host.
"""

import hmac
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_mlx.server.refusals import Refusal

MAX_BODY = 32 << 20
"""Bytes of a request's body."""

DRAINED = 2 * MAX_BODY
"""Bytes of a body too large that are read to no purpose: a client that still sends may not see an answer."""

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_APP_SCHEMES = frozenset({"vscode-webview", "tauri", "app"})
_APP_HOSTS = LOOPBACK | {"tauri.localhost"}

_ALLOWED_HEADERS = "authorization, content-type, x-api-key"
_READ = Callable[[], Awaitable[Message]]


class Guard:
    """ASGI middleware around the whole application.

    Args:
        app: what is guarded.
        api_key: what a client must show; None: nothing.
        any_host: answer to any Host, which a key must then protect.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None = None, any_host: bool = False) -> None:
        self._app, self._key, self._any_host = app, api_key, any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        sending = send if origin is None or not allowed_origin(origin) else _with_cors(send, origin)
        try:
            self._check(scope["method"], headers)
            if scope["method"] == "OPTIONS":
                await _options(headers)(scope, receive, sending)
                return
            body = await read_body(headers, receive) if scope["method"] == "POST" else b""
        except Refusal as refused:
            await refused.response(_extra(refused))(scope, receive, sending)
            return
        await self._app(scope, _replay(body, receive), sending)

    def _check(self, method: str, headers: Headers) -> None:
        host = host_name(headers.get("host", ""))
        if not self._any_host and host not in LOOPBACK:
            raise Refusal(
                403,
                f"Host is {host!r}: this server answers to {', '.join(sorted(LOOPBACK))}",
                code="foreign_host",
            )
        origin = headers.get("origin")
        if origin is not None and not allowed_origin(origin):
            raise Refusal(
                403, f"Origin is {origin!r}: pages from there may not use this server", code="foreign_origin"
            )
        if method == "OPTIONS":
            return
        if self._key is not None and not self._has_key(headers):
            raise Refusal(
                401, "the API key is missing or wrong: send it as a Bearer token", code="invalid_api_key"
            )
        if (
            method == "POST"
            and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json"
        ):
            raise Refusal(
                415, f"Content-Type is {headers.get('content-type')!r}: it must be application/json"
            )

    def _has_key(self, headers: Headers) -> bool:
        assert self._key is not None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        shown = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return hmac.compare_digest(shown.encode("latin-1"), self._key.encode())


def host_name(host: str) -> str:
    """`localhost:8765` -> `localhost`, `[::1]:8765` -> `::1`; empty where it cannot be read."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def allowed_origin(origin: str) -> bool:
    """Whether a page from there may use this server: one of this machine, or of an editor or app."""
    try:
        parts = urlsplit(origin)
        return parts.scheme in _APP_SCHEMES or (
            parts.scheme in ("http", "https") and (parts.hostname or "") in _APP_HOSTS
        )
    except ValueError:
        return False


async def read_body(headers: Headers, receive: Receive) -> bytes:
    """The whole body of a request, whether its length was announced or not.

    Raises:
        Refusal: with status 413, it is too large.
    """
    announced = headers.get("content-length", "")
    too_large = Refusal(413, f"the body is larger than {MAX_BODY >> 20} MiB: send a shorter conversation")
    if (
        announced.isdigit()
        and int(announced) > MAX_BODY
        and headers.get("expect", "").lower() == "100-continue"
    ):
        raise too_large  # the client waits for a word before it sends
    parts: list[bytes] = []
    size = 0
    more = True
    while more and size <= DRAINED:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        size += len(message.get("body", b""))
        if size <= MAX_BODY:
            parts.append(message.get("body", b""))
        else:
            parts.clear()
        more = message.get("more_body", False)
    if size > MAX_BODY:
        raise too_large
    return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> _READ:
    """A `receive` that gives the body once and then what the connection says."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _options(headers: Headers) -> Response:
    allowed = {
        "allow": "GET, HEAD, POST, OPTIONS",
        "access-control-allow-methods": "GET, HEAD, POST, OPTIONS",
        "access-control-allow-headers": headers.get("access-control-request-headers", _ALLOWED_HEADERS),
        "access-control-max-age": "600",
    }
    if headers.get("access-control-request-private-network") == "true":
        allowed["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=allowed)


def _with_cors(send: Send, origin: str) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message["headers"])
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = "x-request-id, retry-after"
            headers.add_vary_header("origin")
        await send(message)

    return sending


def _extra(refused: Refusal) -> dict[str, str]:
    return {"www-authenticate": "Bearer"} if refused.status == 401 else {}
