"""Earlier requests, as clients see them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflash_mlx.prefix_cache import PrefixCache
from server.live import CODE, Live, wait_for

LONG = CODE * 12


@pytest.fixture(autouse=True)
def prefixes(live: Live) -> Iterator[None]:
    live.session._prefixes = PrefixCache(live.session._new_context, 1 << 28)
    yield
    live.idle()
    live.session._prefixes = None


def test_usage_and_timings_say_what_was_cached(live: Live) -> None:
    first, second = (live.chat(LONG, max_tokens=8) for _ in range(2))
    tokens = first["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert (first["timings"]["cache_n"], first["timings"]["prompt_n"]) == (0, tokens)
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": tokens - 1}
    assert (second["timings"]["cache_n"], second["timings"]["prompt_n"]) == (tokens - 1, 1)
    assert second["usage"]["prompt_tokens"] == tokens
    assert second["choices"] == first["choices"]


def test_a_stream_says_the_same(live: Live) -> None:
    live.chat(LONG, max_tokens=8)
    options = {"include_usage": True, "include_dflash": True}
    chunks = live.stream(LONG, max_tokens=8, stream_options=options)
    [prefilled] = [c["dflash"] for c in chunks if c.get("dflash", {}).get("phase") == "prefilled"]
    assert prefilled["cached_tokens"] == prefilled["prompt_tokens"] - 1
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == prefilled["cached_tokens"]
    assert "dflash_cached_tokens_total" in live.get("/metrics").text


def test_a_small_request_between_two_of_a_large_one(live: Live) -> None:
    large = live.chat(LONG, max_tokens=8)
    live.chat("x = 1\n", max_tokens=4)
    again = live.chat(LONG, max_tokens=8)
    assert again["timings"]["cache_n"] == large["usage"]["prompt_tokens"] - 1


def test_a_client_that_leaves_while_its_prompt_is_read_keeps_what_was_read(live: Live) -> None:
    live.session.watch(pause=0.05)
    body = b'{"stream":true,"messages":[{"role":"user","content":"' + LONG.replace("\n", "\\n").encode()
    body += b'"}],"max_tokens":8}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {live.host}\r\ncontent-type: application/json\r\n"
    with live.connect() as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: live.session.events >= 2, 30)
    live.idle()
    live.session.watch(pause=0)
    answer = live.chat(LONG, max_tokens=8)
    assert answer["timings"]["cache_n"] > 0
