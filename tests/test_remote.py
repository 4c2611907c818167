"""Answers of other servers, which are not always what OpenAI's are."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from dflash_mlx.errors import DFlashError
from dflash_mlx.remote import Answer, Server


@contextmanager
def serving(*chunks: Any) -> Iterator[Server]:
    """A server that streams these."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for chunk in chunks:
                data = json.dumps(chunk, ensure_ascii=False).encode()
                self.wfile.write(b"data: " + data + b"\n\n")

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Server(f"http://127.0.0.1:{server.server_port}/v1", "m")
        finally:
            server.shutdown()
            thread.join()


def ask(*chunks: Any) -> Answer:
    with serving(*chunks) as server:
        return server.ask([{"role": "user", "content": "x"}], {})


def text(content: str, **others: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content}}], **others}


def test_null_is_as_good_as_nothing() -> None:
    answer = ask(
        text("a", error=None, usage=None, dflash=None),
        {"choices": None, "usage": {"completion_tokens": 3}, "dflash": {"tau": 2.5, "cycles": 4}},
        text("b", usage={"completion_tokens": None}),
    )
    assert (answer.text, answer.tokens, answer.tau, answer.cycles) == ("ab", 3, 2.5, 4)
    assert answer.tokens_per_second >= 0


def test_what_ends_a_line_elsewhere_ends_none_here() -> None:
    assert ask(text("one\u2028two\u2029three\x85four")).text == "one\u2028two\u2029three\x85four"


@pytest.mark.parametrize("chunk", [None, 3, [1], "text"])
def test_a_chunk_that_is_no_object_is_refused(chunk: Any) -> None:
    with pytest.raises(DFlashError, match="does not answer as an OpenAI server: it sent"):
        ask(text("a"), chunk)


def test_an_error_in_the_stream_is_the_servers_own_words() -> None:
    with pytest.raises(DFlashError, match="too hot"):
        ask(text("a"), {"error": {"message": "too hot"}})
