"""The ASGI application: routes, and an answer in JSON to whatever goes wrong."""

import logging
import secrets
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_mlx.errors import DFlashError
from dflash_mlx.server import generation, information
from dflash_mlx.server.refusals import Refusal, refusal
from dflash_mlx.server.security import Guard
from dflash_mlx.server.service import Service

log = logging.getLogger(__name__)


def make_app(service: Service, *, api_key: str | None = None, any_host: bool = False) -> Starlette:
    """The application; `api_key` and `any_host` as for `Guard`."""
    app = Starlette(
        routes=[*generation.routes(service), *information.routes(service)],
        middleware=[
            Middleware(_Identified),
            Middleware(Guard, api_key=api_key, any_host=any_host),
            Middleware(_AnyPath),
        ],
        exception_handlers={
            HTTPException: _refuse_http,
            Refusal: _refuse,
            DFlashError: _refuse,
        },
    )
    app.router.redirect_slashes = False
    return app


class _Identified:
    """Gives every request an id, which its answer carries and the log names; answers what nobody caught."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            log.error("request %s: %s", request_id, type(error).__name__)
            log.debug("traceback of %s", request_id, exc_info=error)
            if not started:
                await refusal(error, request_id).response()(scope, receive, sending)


class _AnyPath:
    """Lets every route be reached with and without `/v1`, and with a slash at its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"].rstrip("/")
            scope = {**scope, "path": path.removeprefix("/v1") if path.startswith("/v1/") else path or "/"}
        await self._app(scope, receive, send)


async def _refuse(request: Request, error: Exception) -> Response:
    return refusal(error, request.state.request_id).response()


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages: dict[int, str] = {
        404: f"there is no {request.url.path} here: see /v1/models, /v1/chat/completions, /v1/completions",
        405: f"{request.method} is not allowed here",
    }
    message = messages.get(error.status_code, error.detail)
    headers: Any = error.headers
    return Refusal(error.status_code, message).response(headers)
