"""Errors as clients read them: a status and `{"error": {"message", "type", "param", "code"}}`."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from dflash_mlx.errors import ContextLengthError, DFlashError

RETRY_AFTER = 5
"""Seconds after which a client that was told to come back may try again."""

CONTENT_TYPE = "application/json; charset=utf-8"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_TEMPORARY = (429, 503)

_ESCAPED = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "\x85\u2028\u2029"})
"""What JSON may hold as it is, and what clients that read a stream by lines take for the end of one."""


class Refusal(Exception):  # noqa: N818  it is an answer
    """An answer other than the one that was asked for."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The whole answer."""
        retry = {"retry-after": str(RETRY_AFTER)} if self.status in _TEMPORARY else {}
        return Response(encode(self.body), self.status, {**retry, **(headers or {})}, media_type=CONTENT_TYPE)


def encode(value: Any) -> bytes:
    """JSON on one line, in UTF-8; a lone surrogate, which a client's text may hold, stays escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_ESCAPED).encode(errors="backslashreplace")


def refusal(error: BaseException, request_id: str) -> Refusal:
    """What a client is told of an error: our own in full, of any other only where to look for it."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ContextLengthError):
        return Refusal(error.http_status, str(error), code="context_length_exceeded")
    if isinstance(error, DFlashError):
        message = str(error) if error.http_status < 500 else f"{error} (request {request_id})"
        return Refusal(error.http_status, message)
    return Refusal(
        500, f"internal error in request {request_id}: the server's log says more", code="internal_error"
    )
