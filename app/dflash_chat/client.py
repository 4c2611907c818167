"""HTTP to the engine: /health, and replies as streams of typed events. No other module knows httpx."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from dflash_chat.state import Engine
from dflash_chat.wire import Event, Failed, error, parse, sse_data

SILENCE = 60.0  # seconds; the server sends something every 8
BUSY = {429: "waiting", 503: "loading"}


class BusyError(Exception):
    """The server takes no request now; it may in `seconds`."""

    def __init__(self, failure: Failed, seconds: float) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.seconds = seconds


class Client:
    """One server.

    Args:
        base_url: its address, without `/v1`.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        timeout = httpx.Timeout(SILENCE, connect=5.0)
        # Proxies of the environment are for the network, not for this machine's own server.
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout, trust_env=False)

    async def health(self) -> Engine:
        """What the server says about itself; unreachable if it does not answer, or is no server of ours."""
        try:
            answer = await self._http.get("/health", timeout=5.0)
            body = answer.json()
        except httpx.HTTPError as failure:
            return Engine("unreachable", _reason(failure), base_url=f"{self.base_url}/v1")
        except ValueError:
            body = None
        if not isinstance(body, Mapping) or "status" not in body:
            message = f"/health answered HTTP {answer.status_code}, not as dflash-chat's own server does"
            if answer.status_code == 401:
                message = "this server wants an API key, which dflash-chat cannot send"
            return Engine("unreachable", message, base_url=f"{self.base_url}/v1")
        return Engine.from_health(body, self.base_url)

    async def reply(self, request: Mapping[str, Any]) -> AsyncIterator[Event]:
        """Stream a reply. It always ends: with `Ended` or with `Failed`.

        Raises:
            BusyError: 429 or 503 before the reply began.
        """
        ended = False
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=request) as answer:
                if answer.status_code != 200:
                    raise_busy(answer, failure := await _failure(answer))
                    yield failure
                    return
                async for line in _lines(answer):
                    for data in sse_data(iter((line,))):
                        for event in parse(data):
                            ended = ended or type(event).__name__ in ("Ended", "Failed")
                            yield event
        except httpx.HTTPError as problem:
            yield Failed(_reason(problem), "unreachable")
            return
        if not ended:
            yield Failed("the server ended the reply without saying why", "cut")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def raise_busy(answer: httpx.Response, failure: Failed) -> None:
    """Raise `BusyError` for a status that says so."""
    if answer.status_code in BUSY:
        after = answer.headers.get("retry-after", "")
        raise BusyError(failure, min(30.0, float(after)) if after.replace(".", "", 1).isdigit() else 1.0)


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    """The lines of a stream. For httpx one also ends at U+2028 and the like, which may stand in JSON."""
    rest = b""
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace")
    yield rest.decode("utf-8", "replace")


async def _failure(answer: httpx.Response) -> Failed:
    body = await answer.aread()
    try:
        return error(json.loads(body), answer.status_code)
    except ValueError:
        return error(body.decode("utf-8", "replace"), answer.status_code)


def _reason(problem: httpx.HTTPError) -> str:
    if isinstance(problem, httpx.ReadTimeout):
        return f"the server said nothing for {SILENCE:.0f} s"
    if isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout):
        return "no server answers at this address"
    return "the connection to the server broke"
