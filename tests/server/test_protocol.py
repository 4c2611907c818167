"""What clients that speak HTTP by the byte see of a real server."""

import json
import time
from typing import Any

import pytest

from dflash_mlx import SamplingParams
from server.live import CODE, Live, chunks, joined, parse, read_all, read_until, request

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": CODE}], "max_tokens": 12}


def error(answer: bytes, status: int) -> dict[str, Any]:
    """The error object of an answer with this status."""
    got, headers, body = parse(answer)
    assert got == status, answer
    assert headers["content-type"].startswith("application/json")
    assert "Traceback" not in body.decode()
    [(key, value)] = json.loads(body).items()
    assert key == "error"
    assert set(value) == {"message", "type", "param", "code"}
    return dict(value)


# --- answers --------------------------------------------------------------------------------------


def test_an_answer_is_the_sessions_own(live: Live) -> None:
    ids = live.session.prepare([{"role": "user", "content": CODE}], SamplingParams(max_tokens=12)).ids
    answer = live.chat(max_tokens=12)
    assert answer["model"] == "demo"
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["total_tokens"] == len(ids) + 12
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["timings"]["draft_n"] > answer["timings"]["draft_n_accepted"] > 0
    assert answer["dflash"]["tau"] > 1


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5, "top_p": 0.95}, {"stop": ["\n\n"]}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streamed_and_whole_with_and_without_speculation_give_the_same_bytes(
    live: Live, path: str, options: dict[str, Any]
) -> None:
    fields = {"max_tokens": 40, **options}
    texts, drafted = set(), []
    for speculative in (True, False):
        extra = {"dflash": {"speculative": speculative}, **fields}
        prompt: dict[str, Any] = {"messages": BODY["messages"]} if "chat" in path else {"prompt": CODE}
        whole = live.post(path, **prompt, **extra).json()
        choice = whole["choices"][0]
        drafted.append(whole["timings"]["draft_n"])
        parts = live.stream(path=path, stream_options={"include_usage": True}, **extra)
        [*told, finish, usage] = parts
        text = "".join(
            c.get("text") or c.get("delta", {}).get("content") or "" for p in told for c in p["choices"]
        )
        texts |= {text, choice["text"] if "text" in choice else choice["message"]["content"]}
        assert finish["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert usage["usage"] == whole["usage"]
        assert usage["choices"] == []
    assert len(texts) == 1
    assert len(texts.pop()) > 3
    assert drafted[0] > 0 == drafted[1]


def test_the_chunks_of_a_stream(live: Live) -> None:
    answer = live.post(**BODY, stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = chunks(answer.content)
    assert {(p["id"], p["object"], p["created"], p["model"]) for p in parts} == {
        (parts[0]["id"], "chat.completion.chunk", parts[0]["created"], "demo")
    }
    assert all([c["index"] for c in p["choices"]] == [0] for p in parts)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in p["choices"][0]["delta"] for p in parts[1:])
    assert [p["choices"][0]["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + ["length"]
    assert all("usage" not in p and "dflash" not in p and "timings" not in p for p in parts)


@pytest.mark.parametrize("limit", range(1, 8))
def test_a_reply_ends_exactly_at_its_limit_even_inside_a_block(live: Live, limit: int) -> None:
    answer = live.chat(max_completion_tokens=limit)
    assert answer["usage"]["completion_tokens"] == limit
    assert answer["choices"][0]["finish_reason"] == "length"


def test_every_sampling_field_changes_the_answer_or_is_repeatable(live: Live) -> None:
    def text(**fields: Any) -> str:
        return str(live.chat(max_tokens=16, **fields)["choices"][0]["message"]["content"])

    greedy = text()
    assert text(temperature=0) == greedy
    hot = {"temperature": 1.5, "seed": 3}
    assert text(**hot) == text(**hot) == text(**hot, dflash={"speculative": False})
    assert text(**hot) == text(**hot, dflash={"block_size": 2})
    assert text(**hot) != greedy
    assert text(**{**hot, "seed": 4}) != text(**hot)
    for limit in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}):
        assert text(**hot, **limit) == greedy
    first = live.chat(max_tokens=1, logprobs=True)["choices"][0]["logprobs"]["content"][0]["token"]
    [token] = live.session.tokenizer.encode(first, add_special_tokens=False)
    assert text(logit_bias={str(token): -100}) != greedy
    assert text(repetition_penalty=2.0) != greedy
    assert text(presence_penalty=2.0, frequency_penalty=2.0) != greedy
    stopped = live.chat(max_tokens=16, stop=[greedy[6:9]])
    assert stopped["choices"][0]["message"]["content"] == greedy[: greedy.index(greedy[6:9])]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] < 16


def test_logprobs_cover_exactly_the_reply(live: Live) -> None:
    answer = live.chat(max_tokens=9, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer["choices"][0]["message"]["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)  # greedy
    streamed = live.stream(max_tokens=9, logprobs=True, top_logprobs=2)
    said = [e for p in streamed for c in p["choices"] if c.get("logprobs") for e in c["logprobs"]["content"]]
    # A row's low bits do not depend on the block, so the numbers are the same too.
    assert said == content


def test_a_client_that_asks_sees_every_cycle(live: Live) -> None:
    prompt = CODE * 12  # several prompt chunks
    parts = live.stream(prompt, max_tokens=20, stream_options={"include_dflash": True, "include_usage": True})
    events = [part["dflash"] for part in parts if "phase" in part.get("dflash", ())]
    phases = [event["phase"] for event in events]
    prefill = [event for event in events if event["phase"] == "prefill"]
    blocks = [event for event in events if event["phase"] == "block"]
    assert phases == ["prefill"] * len(prefill) + ["prefilled"] + ["block"] * len(blocks) + ["finished"]
    total = parts[-1]["usage"]["prompt_tokens"]
    assert [(p["done"], p["total"]) for p in prefill] == [(n, total) for n in range(0, total - 1, 32)]
    assert len(prefill) > 2
    tokens = [t for e in events for t in e.get("tokens", ())]
    assert "".join(t["text"] for t in tokens) == joined(parts)
    assert len(tokens) == parts[-1]["usage"]["completion_tokens"] == 20
    for block in blocks:
        assert [t["origin"] for t in block["tokens"]].count("draft") == block["accepted"]
        assert block["accepted"] + len(block["rejected"]) == block["drafted"]
    assert parts[-1]["dflash"]["cycles"] == len(blocks)
    assert parts[-1]["timings"]["draft_n"] == sum(block["drafted"] for block in blocks)


def test_a_raw_prompt_may_be_ids(live: Live) -> None:
    ids = live.session.encode(CODE)
    texts = [live.post("/v1/completions", prompt=p, max_tokens=8).json() for p in (CODE, ids, [ids], [CODE])]
    assert len({t["choices"][0]["text"] for t in texts}) == 1
    assert {t["usage"]["prompt_tokens"] for t in texts} == {len(ids)}


def test_tool_messages_of_a_conversation_are_rendered(live: Live) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a = "},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1\n"},
    ]
    answer = live.post(messages=messages, max_tokens=3, tools=[], tool_choice="auto").json()
    assert answer["usage"]["prompt_tokens"] == len(live.session.encode("a = 1\n"))


# --- routes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/v1/models", "/models", "/v1/models/", "/models?x=1", "/health", "/v1/health/", "/metrics"]
)
def test_routes_are_reached_with_and_without_v1_and_a_slash(live: Live, path: str) -> None:
    assert live.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions/", "/v1/chat/completions?a=b"])
def test_so_are_those_that_generate(live: Live, path: str) -> None:
    assert live.post(path, **BODY).status_code == 200


def test_models(live: Live) -> None:
    listed = live.get("/v1/models").json()
    [model] = listed["data"]
    assert listed["object"] == "list"
    assert model == {
        "id": "demo",
        "object": "model",
        "created": 1,
        "owned_by": "dflash-chat",
        "context_window": 4096,
        "max_model_len": 4096,
    }
    assert live.get("/v1/models/demo").json() == live.get("/v1/models/some/other").json() == model


def test_another_model_is_answered_with_the_real_name_unless_strict(live: Live) -> None:
    assert live.chat(model="gpt-9", max_tokens=1)["model"] == "demo"
    with live.beside(strict_model=True, model="own/demo") as strict:
        assert strict.get("/v1/models/own/demo").json()["id"] == "own/demo"
        assert strict.chat(model="own/demo", max_tokens=1)["model"] == "own/demo"
        assert strict.chat(max_tokens=1)["model"] == "own/demo"
        for answer in (strict.post(**BODY, model="x"), strict.get("/v1/models/x")):
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"


def test_health_tells_what_is_loaded(live: Live) -> None:
    health = live.get("/health").json()
    assert set(health) == {
        "status",
        "message",
        "progress",
        "model",
        "drafter",
        "base_url",
        "block_size",
        "speculative",
        "exactness",
        "kernels",
        "context_window",
        "notes",
        "queue",
        "memory",
        "plain_tokens_per_second",
        "reasoning_levels",
        "tools",
        "version",
    }
    assert health["status"] == "ok"
    assert health["block_size"] == 5
    assert health["base_url"] == live.url
    assert health["queue"] == {"running": 0, "waiting": 0, "limit": 8}
    assert health["memory"]["total"] > health["memory"]["peak"] >= health["memory"]["active"] > 0
    assert health["plain_tokens_per_second"] > 1


def test_metrics_count(live: Live) -> None:
    def read() -> dict[str, float]:
        answer = live.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line.split() for line in answer.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    before = read()
    answer = live.chat(max_tokens=16)
    live.idle()
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["dflash_requests_total"] == 1
    assert grown["dflash_generated_tokens_total"] == 16
    assert grown["dflash_prompt_tokens_total"] == answer["usage"]["prompt_tokens"]
    assert grown["dflash_drafted_tokens_total"] == answer["timings"]["draft_n"]
    assert grown["dflash_accepted_tokens_total"] == answer["timings"]["draft_n_accepted"]
    assert grown["dflash_cycles_total"] == answer["dflash"]["cycles"]
    assert after["dflash_acceptance_length"] == pytest.approx(answer["dflash"]["tau"])
    assert after["dflash_memory_active_bytes"] > 0
    assert after["dflash_queue_waiting"] == 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("DELETE", "/health", 405),
    ],
)
def test_wrong_paths_and_methods_are_told_so_in_json(live: Live, method: str, path: str, status: int) -> None:
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert error(live.ask(head.encode()), status)["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/chat/completions"])
def test_head_has_no_body(live: Live, path: str) -> None:
    answer = live.ask(f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    status, _, body = parse(answer)
    assert status == (405 if "chat" in path else 200)
    assert body == b""


def test_options(live: Live) -> None:
    answer = live.ask(b"OPTIONS /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    status, headers, _ = parse(answer)
    assert status == 204
    assert "POST" in headers["allow"]
    assert "access-control-allow-origin" not in headers


# --- bodies ---------------------------------------------------------------------------------------


def test_a_body_may_come_slowly_and_in_chunks(live: Live) -> None:
    expected = live.chat(max_tokens=12)["choices"]
    data = json.dumps(BODY).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\n"
    with live.connect() as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(data))
        for byte in range(0, len(data), 20):
            connection.sendall(data[byte : byte + 20])
            time.sleep(0.01)
        assert json.loads(parse(read_all(connection))[2])["choices"] == expected
    with live.connect() as connection:
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        for byte in range(0, len(data), 20):
            part = data[byte : byte + 20]
            connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        connection.sendall(b"0\r\n\r\n")
        assert json.loads(parse(read_all(connection))[2])["choices"] == expected


@pytest.mark.parametrize("chunked", [False, True])
def test_33_mib_are_too_much_whether_announced_or_not(live: Live, chunked: bool) -> None:
    size = 33 << 20
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\n"
    with live.connect() as connection:
        if chunked:
            connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
            part = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
            for _ in range(33):
                connection.sendall(part)
            connection.sendall(b"0\r\n\r\n")
        else:
            connection.sendall(head + b"content-length: %d\r\n\r\n" % size + b" " * size)
        assert "32 MiB" in error(read_all(connection), 413)["message"]


def test_a_client_that_asks_first_need_not_send_too_much(live: Live) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: 99999999\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
    error(live.ask(head), 413)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 9999, b'{"messages": 1}', b"[]", b"null"])
def test_bad_json_is_400(live: Live, body: bytes) -> None:
    assert error(live.ask(request(body)), 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(live: Live, kind: str) -> None:
    assert "application/json" in error(live.ask(request(BODY, **{"content-type": kind})), 415)["message"]
    assert parse(live.ask(request(BODY, **{"content-type": "Application/JSON; charset=utf-8"})))[0] == 200


@pytest.mark.parametrize(
    "data", [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /\x00 HTTP/1.1\r\nhost: a\r\n\r\n"]
)
def test_what_is_no_http_is_400_in_json(live: Live, data: bytes) -> None:
    assert "not valid HTTP" in error(live.ask(data), 400)["message"]


def test_one_connection_serves_many_requests(live: Live) -> None:
    with live.connect() as connection:
        for number in range(3):
            data = json.dumps({**BODY, "max_tokens": number + 1}).encode()
            head = (
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            )
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
            answer = read_until(connection, b"}}")
            assert b'"completion_tokens":%d' % (number + 1) in answer
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert parse(read_all(connection))[0] == 200


# --- who may ask ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:8765", "[::1]:8765", "LOCALHOST."])
def test_loopback_hosts_are_served(live: Live, host: str) -> None:
    assert parse(live.ask(request(BODY, host=host)))[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "192.168.1.2", "[::2]", "[", "a@b"]
)
def test_a_foreign_host_is_refused(live: Live, host: str) -> None:
    assert error(live.ask(request(BODY, host=host)), 403)["code"] == "foreign_host"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://localhost.evil.example", "null", "file://", "http://[", "x"]
)
def test_a_foreign_origin_is_refused(live: Live, origin: str) -> None:
    answer = live.ask(request(BODY, origin=origin))
    assert error(answer, 403)["code"] == "foreign_origin"
    assert "access-control-allow-origin" not in parse(answer)[1]
    preflight = request(b"", origin=origin).replace(b"POST", b"OPTIONS", 1)
    assert parse(live.ask(preflight))[0] == 403


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "https://127.0.0.1",
        "http://[::1]:5",
        "vscode-webview://ab",
        "tauri://localhost",
        "app://x",
    ],
)
def test_pages_of_this_machine_and_of_apps_may_ask(live: Live, origin: str) -> None:
    status, headers, _ = parse(live.ask(request(BODY, origin=origin)))
    assert status == 200
    assert headers["access-control-allow-origin"] == origin
    assert headers["vary"].lower() == "origin"
    preflight = request(b"", origin=origin, **{"access-control-request-headers": "x-stainless-os"})
    status, headers, _ = parse(live.ask(preflight.replace(b"POST", b"OPTIONS", 1)))
    assert status == 204
    assert headers["access-control-allow-origin"] == origin
    assert headers["access-control-allow-headers"] == "x-stainless-os"
    assert "access-control-allow-credentials" not in headers
    assert parse(live.ask(request(b"{", origin=origin)))[1]["access-control-allow-origin"] == origin


def test_an_api_key_is_asked_of_every_route(live: Live) -> None:
    with live.beside(api_key="sécret", any_host=True) as guarded:
        wrong: list[dict[str, str]] = [
            {},
            {"authorization": "Bearer x"},
            {"authorization": "x"},
            {"x-api-key": "s"},
        ]
        for given in wrong:
            answer = guarded.get("/health", **given)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert parse(guarded.ask(request(BODY, host="my.server", authorization="Bearer sécret")))[0] == 200
        assert parse(guarded.ask(request(BODY, host="my.server", **{"x-api-key": "sécret"})))[0] == 200
        preflight = request(b"", origin="http://localhost").replace(b"POST", b"OPTIONS", 1)
        assert parse(guarded.ask(preflight))[0] == 204


def test_both_loopback_addresses_are_served(live: Live) -> None:
    for address in ("127.0.0.1", "::1"):
        with live.connect(address) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert parse(read_all(connection))[0] == 200


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        (
            {"messages": [{"role": "user", "content": CODE * 900}]},
            "context_length_exceeded",
            "context length is 4096 tokens",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, None, "the prompt is empty"),
        ({"logit_bias": {"999999": 1}}, None, "[0, 2048)"),
        ({"dflash": {"block_size": 6}}, None, "block_size is 6"),
        ({"n": 2}, "unsupported_parameter", "n is not supported"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, None, "no variable"),
        ({"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, None, "no variable"),
        ({"chat_template_kwargs": {"messages": []}}, None, "no variable"),
        ({"chat_template_kwargs": {"tokenize": True}}, None, "no variable"),
    ],
)
def test_what_is_wrong_is_400_before_a_stream_begins(
    live: Live, stream: bool, fields: dict[str, Any], code: str | None, message: str
) -> None:
    answer = live.post(**{**BODY, **fields, "stream": stream})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == code
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    assert len(answer.headers["x-request-id"]) == 16


def test_a_level_that_the_model_does_not_offer_is_said(live: Live) -> None:
    answer = live.chat(max_tokens=1, reasoning_effort="high")
    assert answer["dflash"]["reasoning_effort"] == {"asked": "high", "given": None}
    assert "reasoning_effort" not in live.chat(max_tokens=1)["dflash"]


def test_halves_of_characters_are_read_and_said(live: Live) -> None:
    data = b'{"messages":[{"role":"user","content":"x = \\"\\ud83d"}],"max_tokens":2,"model":"\\ud83d"}'
    assert parse(live.ask(request(data)))[0] == 200
    data = data.replace(b'"user"', b'"\\ud83d"')
    assert "\\ud83d" in error(live.ask(request(data)), 400)["message"]
