"""Tools over a real socket: what is offered is rendered, what is called comes as clients expect it."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import openai
import pytest
from mlx_lm.tool_parsers import json_tools

from dflash_mlx.server.syntax import Syntax
from server.formats import TOOLS
from server.live import Live, chunks, joined, parse, read_all, request, wait_for
from server.scripted import Scripted, speaking

USER: dict[str, Any] = {"role": "user", "content": "How is the weather?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TWO = f'I look.\n\n{CALL}\n<tool_call>\n{{"name": "now"}}\n</tool_call>'


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with speaking(tmp_path_factory.mktemp("scripted") / "model") as live:
        yield live


@pytest.fixture
def live(speaker: Live) -> Iterator[Live]:
    session = scripted(speaker)
    session.script.clear()
    session.prompts.clear()
    yield speaker
    session.watch(pause=0)
    speaker.idle()


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url, api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def scripted(live: Live) -> Scripted:
    assert isinstance(live.session, Scripted)
    return live.session


def say(live: Live, *replies: str) -> None:
    scripted(live).script.extend(replies)


def whole(client: Any, messages: list[Any], **fields: Any) -> Any:
    answer = client.chat.completions.create(model="any", messages=messages, tools=TOOLS, **fields)
    return answer.choices[0]


def streamed(client: Any, messages: list[Any], **fields: Any) -> Any:
    with client.chat.completions.stream(model="any", messages=messages, tools=TOOLS, **fields) as stream:
        return stream.get_final_completion().choices[0]


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_loop_of_calls_and_results(live: Live, client: openai.OpenAI, ask: Any) -> None:
    say(live, TWO, "It is sunny.")
    first = ask(client, [USER])
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "I look."
    [weather, now] = first.message.tool_calls
    assert (weather.type, weather.function.name) == ("function", "get_weather")
    assert json.loads(weather.function.arguments) == {"city": "Zürich"}
    assert (now.function.name, now.function.arguments) == ("now", "{}")
    assert weather.id != now.id
    results = [{"role": "tool", "tool_call_id": c.id, "content": "sun"} for c in (weather, now)]
    history = [USER, first.message.model_dump(exclude_none=True), *results]
    second = ask(client, history)
    assert (second.finish_reason, second.message.content) == ("stop", "It is sunny.")
    assert second.message.tool_calls is None
    offered, conversation = scripted(live).prompts[-1].split("\n", 1)
    assert json.loads(offered.removeprefix("# ")) == list(TOOLS)
    assert conversation == (
        "# user: How is the weather?\n# assistant: I look.\n"
        '# <tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>\n'
        '# <tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
        "# tool: sun\n# tool: sun\n"
    )


def test_usage_is_the_same_streamed_and_whole(live: Live) -> None:
    say(live, TWO, TWO)
    fields: dict[str, Any] = {"messages": [USER], "tools": TOOLS}
    answer = live.post(**fields).json()
    parts = chunks(live.post(**fields, stream=True, stream_options={"include_usage": True}).content)
    assert parts[-1]["usage"] == answer["usage"]
    ids = scripted(live).tokenizer.encode(TWO, add_special_tokens=False)
    assert answer["usage"]["completion_tokens"] == len(ids) + 1


def test_tools_that_must_not_be_called_are_hidden(live: Live) -> None:
    say(live, CALL, CALL, CALL)
    hidden: list[dict[str, Any]] = [{"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {}]
    for fields in hidden:
        answer = live.chat("x", **fields)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALL}
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert scripted(live).prompts[-1] == "# user: x\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_call_cannot_be_demanded(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="'auto'") as refused:
        whole(client, [USER], tool_choice=choice, stream=stream)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tool_choice")


def test_one_call_at_a_time_ends_the_reply(live: Live, client: openai.OpenAI) -> None:
    for ask in (whole, streamed):
        live.session.watch(pause=0.01)
        say(live, TWO + " and then " * 300)
        choice = ask(client, [USER], parallel_tool_calls=False)
        assert choice.finish_reason == "tool_calls"
        assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
        wait_for(lambda: live.engine.queue["running"] == 0, 5)
        assert live.session.late <= 2


def test_a_stream_says_that_it_is_alive_while_a_call_is_held(live: Live) -> None:
    live.session.watch(pause=0.02)
    say(live, "Now" + CALL.replace("Zürich", "Zürich " * 40))
    with live.beside(heartbeat=0.1) as quick, quick.connect() as connection:
        connection.sendall(request({"messages": [USER], "tools": TOOLS, "stream": True}))
        _, _, body = parse(read_all(connection))
    deltas = [part["choices"][0]["delta"] for part in chunks(body)]
    [call] = [i for i, delta in enumerate(deltas) if "tool_calls" in delta]
    said = [delta for delta in deltas[1:call] if delta]
    assert "".join(delta["content"] for delta in said) == "Now"
    assert deltas[call - 3 : call] == [{}] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_others_are_answered_while_a_call_is_parsed(
    live: Live, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    parsing, parsed = threading.Event(), threading.Event()

    def parse(text: str, tools: Any) -> Any:
        parsing.set()
        assert parsed.wait(10)
        return json_tools.parse_tool_call(text, tools)

    # A long call amid the reply, and one that only the reply's end ends.
    long = CALL.replace("Zürich", "Zürich " * 400) + " That is it."
    for end, text in (("</tool_call>", long), ("", CALL.removesuffix("</tool_call>"))):
        use(monkeypatch, live, Syntax(("<tool_call>",), end, parse))
        say(live, text)
        parsing.clear()
        parsed.clear()
        with ThreadPoolExecutor(1) as clients:
            answer = clients.submit(live.post, messages=[USER], tools=TOOLS, stream=stream)
            assert parsing.wait(60)
            assert live.get("/health").status_code == 200
            parsed.set()
            assert '"name":"get_weather"' in answer.result().text


def test_a_stream_says_that_it_is_alive_while_a_call_is_parsed(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsing, parsed = threading.Event(), threading.Event()

    def parse(text: str, tools: Any) -> Any:
        parsing.set()
        assert parsed.wait(30)
        return json_tools.parse_tool_call(text, tools)

    use(monkeypatch, live, Syntax(("<tool_call>",), "</tool_call>", parse))
    say(live, CALL.replace("Zürich", "Zürich " * 400))
    with live.beside(heartbeat=0.2) as quick, quick.connect() as connection:
        connection.settimeout(5)
        connection.sendall(request({"messages": [USER], "tools": TOOLS, "stream": True}))
        assert parsing.wait(60)
        try:
            said = b""
            while said.count(b'"delta":{},"finish_reason":null') < 3:
                part = connection.recv(65536)
                said += part if not said or b'"delta":{}' in part else b""
        finally:
            parsed.set()
        assert b'"name":"get_weather"' in read_all(connection)


def use(monkeypatch: pytest.MonkeyPatch, live: Live, syntax: Syntax) -> None:
    """Have calls read so."""
    status = live.engine.status
    assert status.facts is not None
    changed = replace(status, facts=replace(status.facts, syntax=syntax))
    monkeypatch.setattr(live.engine, "status", changed)


def test_a_reply_that_is_cut_off_in_a_call_is_content(live: Live) -> None:
    say(live, TWO, TWO)
    for answer in (
        live.chat("x", tools=TOOLS, max_tokens=20)["choices"][0],
        live.chat("x", tools=TOOLS, stop="Zür")["choices"][0],
    ):
        content = answer["message"]["content"]
        assert "tool_calls" not in answer["message"]
        assert TWO.startswith(content)
        assert content.startswith("I look.\n\n<tool_call>")
        assert answer["finish_reason"] in ("length", "stop")


def test_cycles_are_told_of_beside_calls(live: Live) -> None:
    say(live, TWO)
    parts = live.stream("x", tools=TOOLS, stream_options={"include_dflash": True, "include_usage": True})
    tokens = [token for part in parts for token in part.get("dflash", {}).get("tokens", [])]
    assert [token["id"] for token in tokens][:-1] == scripted(live).tokenizer.encode(TWO)
    assert joined(parts) == "I look."
    assert len(tokens) == parts[-1]["usage"]["completion_tokens"]
    assert sum("tool_calls" in c["delta"] for part in parts for c in part["choices"]) == 2


def test_who_can_call_tools_is_told(live: Live, shared: Live) -> None:
    assert live.get("/health").json()["tools"] is True
    assert shared.get("/health").json()["tools"] is False


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_cannot_call_tools_refuses_them(shared: Live, stream: bool) -> None:
    answer = shared.post(messages=[USER], tools=TOOLS, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert "tool_choice 'none'" in error["message"]
    assert shared.post(messages=[USER], tools=TOOLS, tool_choice="none", max_tokens=2).status_code == 200
