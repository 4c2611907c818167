"""A client of any OpenAI-compatible server: a conversation in, a streamed answer out. Needs no MLX."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from dflash_mlx.errors import DFlashError, one_line

Message = dict[str, str]
TIMEOUT = httpx.Timeout(10.0, read=600.0)
"""A long prompt is read for minutes before the first token."""


@dataclass(frozen=True)
class Answer:
    """A whole answer, and what the client saw of its speed.

    Attributes:
        tokens: as the server counts them; 0 if it does not say.
        first_seconds, seconds: until the first piece of text, and until the end.
        tau, cycles: tokens per verify cycle, and how many of these there were, if the server reports it.
    """

    text: str
    reasoning: str
    tokens: int
    first_seconds: float
    seconds: float
    tau: float | None
    cycles: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first per second after the first."""
        rest = self.seconds - self.first_seconds
        return (self.tokens - 1) / rest if self.tokens > 1 and rest > 0 else 0.0


class Server:
    """A server at `base_url`, which ends in /v1; without a name it is asked for its first model.

    Raises:
        DFlashError: it cannot be reached, or refuses; with its own words.
    """

    def __init__(self, base_url: str, model: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._client = httpx.Client(timeout=TIMEOUT)
        self.model = model or self._first_model()

    def ask(
        self,
        messages: Sequence[Message],
        settings: dict[str, Any],
        show: Callable[[str, str], None] = lambda text, reasoning: None,
    ) -> Answer:
        """Stream one answer; `show` gets every piece of text and of reasoning."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings,
        }
        start = time.perf_counter()
        first: float | None = None
        text, reasoning, tokens = "", "", 0
        tau: float | None = None
        cycles: int | None = None
        for chunk in self._chunks(body):
            for choice in chunk.get("choices") or []:
                delta = choice.get("delta") or {}
                piece = delta.get("content") or ""
                thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                if piece or thought:
                    first = first or time.perf_counter()
                    text, reasoning = text + piece, reasoning + thought
                    show(piece, thought)
            tokens = (chunk.get("usage") or {}).get("completion_tokens") or tokens
            speculation = chunk.get("dflash") or {}
            tau, cycles = speculation.get("tau") or tau, speculation.get("cycles") or cycles
        end = time.perf_counter()
        return Answer(text, reasoning, tokens, (first or end) - start, end - start, tau, cycles)

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._client.stream("POST", f"{self.base_url}/chat/completions", json=body) as response:
                if response.is_error:
                    raise self._refused(response.status_code, response.read().decode(errors="replace"))
                for line in _lines(response):
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    chunk = json.loads(data)
                    if not isinstance(chunk, dict):
                        raise ValueError(f"it sent {data[:80]}")
                    if chunk.get("error"):
                        raise self._refused(response.status_code, data)
                    yield chunk
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise DFlashError(
                f"{self.base_url} does not answer as an OpenAI server: {one_line(error)}"
            ) from error

    def _first_model(self) -> str:
        try:
            response = self._client.get(f"{self.base_url}/models")
            if response.is_error:
                raise self._refused(response.status_code, response.text)
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise DFlashError(f"{self.base_url}/models does not list a model: {one_line(error)}") from error

    def _refused(self, status: int, body: str) -> DFlashError:
        try:
            message = str(json.loads(body)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            message = body
        return DFlashError(f"{self.base_url} refused the request ({status}): {message[:300]}")


def _lines(response: httpx.Response) -> Iterator[str]:
    """The lines of a stream. For httpx one also ends at U+2028 and the like, which may stand in JSON."""
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace")
    yield rest.decode("utf-8", "replace")
