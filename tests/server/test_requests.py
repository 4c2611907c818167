"""JSON body -> request, or the refusal that a client reads: one table each."""

import json
from typing import Any

import pytest

from dflash_mlx.params import SamplingParams
from dflash_mlx.server.refusals import Refusal
from dflash_mlx.server.requests import EFFORTS, Request, nearest_level, parse, read_chat, read_completion

USER = {"role": "user", "content": "x"}
DEFAULTS = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)


def chat(**fields: Any) -> Request:
    return read_chat({"messages": [USER], **fields}, DEFAULTS)


def test_what_is_not_sent_comes_from_the_model_and_is_not_limited() -> None:
    assert chat() == Request(prompt=(USER,), params=DEFAULTS)
    assert chat().params.max_tokens is None


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": None}, {"temperature": 0.6}),
        ({"top_p": 0.5, "min_p": 0.1}, {"top_p": 0.5, "min_p": 0.1}),
        ({"top_k": 7}, {"top_k": 7}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": -1}, {"max_tokens": None}),
        ({"max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": None}, {"stop": ()}),
        ({"seed": 3}, {"seed": 3}),
        ({"seed": -1}, {"seed": 2**32 - 1}),
        ({"seed": 2**40 + 9}, {"seed": 9}),
        ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1, "frequency_penalty": -1}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"logit_bias": {"5": -100, "6": 1.5}}, {"logit_bias": {5: -100, 6: 1.5}}),
        ({"logprobs": True}, {"top_logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"top_logprobs": 3}),
        ({"logprobs": False}, {"top_logprobs": None}),
    ],
)
def test_sampling(sent: dict[str, Any], read: dict[str, Any]) -> None:
    params = chat(**sent).params
    assert {name: getattr(params, name) for name in read} == read


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"model": "any"}, {"model": "any"}),
        ({"stream": True}, {"stream": True}),
        ({"stream_options": {"include_usage": True}}, {"include_usage": True}),
        ({"stream_options": {"include_dflash": True}}, {"include_dflash": True}),
        ({"stream_options": {"new": 1}}, {"include_usage": False, "unknown": ()}),
        ({"dflash": {"speculative": False, "block_size": 3}}, {"speculative": False, "block_size": 3}),
        ({"reasoning_effort": "high"}, {"effort": "high"}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"variables": {"enable_thinking": False}}),
        ({"tools": [], "tool_choice": "none", "functions": []}, {"unknown": ()}),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, {"parallel": True, "unknown": ()}),
        ({"parallel_tool_calls": False}, {"parallel": False}),
        ({"n": 1, "response_format": {"type": "text"}, "modalities": ["text"]}, {"unknown": ()}),
        ({"store": True, "metadata": {}, "user": "u", "service_tier": "auto"}, {"unknown": ()}),
        ({"prompt_cache_key": "k", "safety_identifier": "s", "prediction": {}}, {"unknown": ()}),
        ({"zzz": 1, "a": 2, "b": None}, {"unknown": ("a", "zzz")}),
    ],
)
def test_other_fields(sent: dict[str, Any], read: dict[str, Any]) -> None:
    request = chat(**sent)
    assert {name: getattr(request, name) for name in read} == read


@pytest.mark.parametrize(
    ("sent", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", "a JSON string: it must be an integer or a number"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"temperature": True}, "temperature", "a JSON boolean"),
        ({"temperature": float("nan")}, "temperature", "temperature is nan"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_k": -2}, "top_k", "top_k is -2"),
        ({"max_tokens": 0}, "max_tokens", "positive"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "positive"),
        ({"max_tokens": "9"}, "max_tokens", "string"),
        ({"max_tokens": True}, "max_tokens", "boolean"),
        ({"stop": ""}, "stop", "not empty"),
        ({"stop": [1]}, "stop", "strings"),
        ({"stop": 1}, "stop", "number"),
        ({"seed": 0.5}, "seed", "integer"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": "x"}}, "logit_bias", "numbers in"),
        ({"logit_bias": [1]}, "logit_bias", "array"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "[0, 20]"),
        ({"logprobs": 1}, "logprobs", "true or false"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": []}, "stream_options", "array"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"model": 3}, "model", "string"),
        ({"reasoning_effort": "ultra"}, "reasoning_effort", "minimal"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs", "object"),
        ({"dflash": {"speculative": 1}}, "dflash.speculative", "true or false"),
        ({"dflash": {"block": 1}}, "dflash.block", "not known"),
        ({"messages": None}, "messages", "at least one"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "x"}, "messages", "array"),
        ({"messages": [3]}, "messages[0]", "an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "None"),
        ({"messages": [USER, {"role": "cat"}]}, "messages[1].role", "'cat'"),
        ({"messages": [{"role": []}]}, "messages[0].role", "one of"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "list of text parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
            "'image_url'",
        ),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]", "'int'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", "text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]", "function"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages[0].tool_calls[0]", "function"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(sent: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(Refusal) as caught:
        chat(**sent)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "sent",
    [
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"n": 2},
        {"suffix": "}"},
        {"echo": True},
        {"best_of": 3},
        {"audio": {}},
        {"modalities": ["audio"]},
        {"guided_regex": "a"},
        {"stop_token_ids": [1]},
        {"min_tokens": 3},
        {"web_search_options": {}},
        {"verbosity": "low"},
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(sent: dict[str, Any]) -> None:
    [name] = sent
    for read, body in ((read_chat, {"messages": [USER]}), (read_completion, {"prompt": "x"})):
        with pytest.raises(Refusal, match=f"^{name} is not supported yet") as caught:
            read({**body, **sent}, DEFAULTS)
        assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
        assert caught.value.param == name


FULL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}}
BARE = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("function", "read"),
    [
        (FULL, FULL),
        ({"name": "f"}, BARE),
        ({"name": "f", "description": None, "parameters": None, "strict": None}, BARE | {"strict": None}),
        ({"name": "f", "description": "a\ud83db", "parameters": {}}, BARE | {"description": "a\ufffdb"}),
        ({**FULL, "strict": True}, FULL | {"strict": True}),
        (
            {**FULL, "parameters": {"enum": ["\ud83d"], "\ud83d": 1}},
            FULL | {"parameters": {"enum": ["\ufffd"], "\ufffd": 1}},
        ),
        ({**BARE, "name": "mcp__a.b-C_9" * 10}, BARE | {"name": "mcp__a.b-C_9" * 10}),
    ],
)
def test_tools(function: dict[str, Any], read: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": function, "else": 1}]
    for choice in ({}, {"tool_choice": "auto"}):
        assert chat(tools=tools, **choice).tools == ({"type": "function", "function": read},)
    assert chat(tools=tools, tool_choice="none").tools == ()


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("tools", "where", "message"),
    [
        ({}, "tools", "a JSON object: it must be an array"),
        (["f"], "tools[0].type", "None"),
        ([{"function": FULL}], "tools[0].type", "None: it must be 'function'"),
        ([{"type": "web_search"}], "tools[0].type", "'web_search'"),
        ([tool(name="f"), {"type": "function", "name": "g"}], "tools[1].function", "an object"),
        ([tool()], "tools[0].function.name", "None"),
        ([tool(name="")], "tools[0].function.name", "1 to 128"),
        ([tool(name="a b")], "tools[0].function.name", "'a b'"),
        ([tool(name="a\n")], "tools[0].function.name", "1 to 128"),
        ([tool(name="f" * 129)], "tools[0].function.name", "1 to 128"),
        ([tool(name=7)], "tools[0].function.name", "7"),
        ([tool(name="f"), tool(name="f")], "tools[1].function.name", "'f': another tool has that name"),
        ([tool(name="f", description=["d"])], "tools[0].function.description", "a string"),
        ([tool(name="f", parameters="{}")], "tools[0].function.parameters", "an object"),
    ],
)
def test_tools_that_cannot_be_read_are_refused_by_their_place(tools: Any, where: str, message: str) -> None:
    for choice in ("auto", "none"):
        with pytest.raises(Refusal) as caught:
            chat(tools=tools, tool_choice=choice)
        assert (caught.value.status, caught.value.param) == (400, where)
        assert message in caught.value.message


@pytest.mark.parametrize("choice", ["required", "any", {"type": "function", "function": {"name": "f"}}, {}])
def test_a_call_cannot_be_demanded(choice: Any) -> None:
    for tools in ([tool(name="f")], []):
        with pytest.raises(Refusal, match="guaranteed; send 'auto' or 'none'") as caught:
            chat(tools=tools, tool_choice=choice)
        assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
        assert caught.value.param == "tool_choice"


def test_completions_know_no_tools() -> None:
    with pytest.raises(Refusal, match="tools is not supported yet"):
        read_completion({"prompt": "x", "tools": [tool(name="f")]}, DEFAULTS)
    assert read_completion({"prompt": "x", "tools": [], "parallel_tool_calls": False}, DEFAULTS).unknown == ()


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
HALVES = {
    "id": "c\ud83d",
    "function": {"name": "f\ud83d", "arguments": '{"\\ud83d": "\\ud83d\\ude42 \ud83d"}'},
}
MENDED = {
    "id": "c\ufffd",
    "type": "function",
    "function": {"name": "f\ufffd", "arguments": {"\ufffd": "\U0001f642 \ufffd"}},
}


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        ({"role": "user"}, {"role": "user", "content": ""}),
        ({"role": "developer", "content": "d"}, {"role": "system", "content": "d"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "ab"},
        ),
        ({"role": "user", "content": "x", "name": "n"}, {"role": "user", "content": "x", "name": "n"}),
        ({"role": "user", "content": "a\ud83db"}, {"role": "user", "content": "a\ufffdb"}),
        ({"role": "user", "content": "\U0001f642"}, {"role": "user", "content": "\U0001f642"}),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "r"},
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}],
            },
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
            },
        ),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{broken"}},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{broken"}}],
            },
        ),
        (
            {"role": "assistant", "tool_calls": [HALVES]},
            {"role": "assistant", "content": "", "tool_calls": [MENDED]},
        ),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": {"a": ["\ud83d"]}}},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "function": {"name": "f", "arguments": {"a": ["\ufffd"]}}}
                ],
            },
        ),
        ({"role": "assistant", "tool_calls": []}, {"role": "assistant", "content": ""}),
        (
            {"role": "tool", "content": "7", "tool_call_id": "c1"},
            {"role": "tool", "content": "7", "tool_call_id": "c1"},
        ),
        ({"role": "function", "name": "f", "content": "7"}, {"role": "tool", "name": "f", "content": "7"}),
    ],
)
def test_messages(sent: dict[str, Any], read: dict[str, Any]) -> None:
    assert chat(messages=[sent]).prompt == (read,)


@pytest.mark.parametrize(
    ("sent", "prompt"),
    [
        ({"prompt": "a"}, "a"),
        ({"prompt": ["a"]}, "a"),
        ({"prompt": [5, 6]}, (5, 6)),
        ({"prompt": [[5, 6]]}, (5, 6)),
        ({}, ""),
        ({"prompt": []}, ()),
    ],
)
def test_prompts_of_completions(sent: dict[str, Any], prompt: Any) -> None:
    assert read_completion(sent, DEFAULTS).prompt == prompt


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1], [2]]}, "several prompts"),
        ({"prompt": [1.5]}, "token ids"),
        ({"prompt": [True]}, "token ids"),
        ({"prompt": 5}, "a JSON number"),
        ({"prompt": "a", "logprobs": 21}, "[0, 20]"),
        ({"prompt": "a", "logprobs": True}, "boolean"),
    ],
)
def test_completions_that_cannot_be_read(sent: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_completion(sent, DEFAULTS)
    assert caught.value.status == 400
    assert message in caught.value.message


def test_logprobs_of_completions_are_a_number() -> None:
    assert read_completion({"prompt": "a", "logprobs": 2}, DEFAULTS).params.top_logprobs == 2
    assert read_completion({"prompt": "a", "logprobs": 0}, DEFAULTS).params.top_logprobs == 0
    assert read_completion({"prompt": "a"}, DEFAULTS).params.top_logprobs is None


@pytest.mark.parametrize(
    ("offered", "given"),
    [
        ((), dict.fromkeys(EFFORTS)),
        (("off", "on"), {"off": "off", "none": "off", "minimal": "off", "low": "on", "max": "on"}),
        (
            ("low", "medium", "high"),
            {
                "none": "low",
                "minimal": "low",
                "low": "low",
                "medium": "medium",
                "xhigh": "high",
                "max": "high",
            },
        ),
        (("off", "on", "low", "xhigh"), {"none": "off", "medium": "low", "high": "low", "max": "xhigh"}),
    ],
)
def test_a_level_becomes_the_nearest_one_that_is_not_more(
    offered: tuple[str, ...], given: dict[str, str | None]
) -> None:
    assert {word: nearest_level(word, offered) for word in given} == given
    assert nearest_level(None, offered) is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"a":', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "not valid JSON"),
    ],
)
def test_bad_json_is_refused_in_one_line(body: bytes, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        parse(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert len(json.dumps(caught.value.body)) < 400


@pytest.mark.parametrize("body", [[], "x", 3, None, True])
def test_a_body_must_be_an_object(body: Any) -> None:
    for read in (read_chat, read_completion):
        with pytest.raises(Refusal, match="it must be an object"):
            read(body, DEFAULTS)
