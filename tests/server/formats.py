"""Tool calls as models of every format write them, and what they mean."""

import importlib
import json
from collections.abc import Mapping
from typing import Any

from dflash_mlx.server.calls import Offer
from dflash_mlx.server.syntax import HARMONY, Syntax


def tool(name: str, **properties: str) -> dict[str, Any]:
    """A function whose parameters have these JSON types."""
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


TOOLS = (
    tool("get_weather", city="string", days="integer"),
    tool("write_file", path="string", content="string"),
    tool("now"),
)
WEATHER = ("get_weather", {"city": "Zürich 🙂", "days": 3})
FILE = ("write_file", {"path": "a.py", "content": 'if a < b:\n    print("`x`")'})
NOW: tuple[str, Any] = ("now", {})

_JSON = {name: json.dumps(arguments, ensure_ascii=False) for name, arguments in (WEATHER, FILE, NOW)}
_GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich 🙂</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
    "<tool_call>write_file\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n"
    '<arg_key>content</arg_key>\n<arg_value>if a < b:\n    print("`x`")</arg_value>\n</tool_call>'
)

SAMPLES: Mapping[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "json_tools": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {_JSON["get_weather"]}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "write_file", "arguments": {_JSON["write_file"]}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now"}\n</tool_call>',
        (WEATHER, FILE, NOW),
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich 🙂\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n"
        '<parameter=content>\nif a < b:\n    print("`x`")\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (WEATHER, FILE, NOW),
    ),
    "glm47": (_GLM + "<tool_call>now</tool_call>", (WEATHER, FILE, NOW)),
    "laguna": (_GLM, (WEATHER, FILE)),
    "longcat": (
        _GLM.replace("tool_call>", "longcat_tool_call>")
        .replace("arg_key>", "longcat_arg_key>")
        .replace("arg_value>", "longcat_arg_value>"),
        (WEATHER, FILE),
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{_JSON['get_weather']}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{_JSON['now']}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        (WEATHER, NOW),
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Zürich 🙂<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
        f'<|open|>call tool="write_file" index="2"<|sep|><|open|>json type="object"<|sep|>'
        f"{_JSON['write_file']}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        (WEATHER, FILE),
    ),
    "minicpm5": (
        '<function name="get_weather"><param name="city">Zürich 🙂</param><param name="days">3</param>'
        '</function>\n<function name="write_file"><param name="path">a.py</param><param name="content">'
        '<![CDATA[if a < b:\n    print("`x`")]]></param></function>\n<function name="now"></function>',
        (WEATHER, FILE, NOW),
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich 🙂</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="write_file">\n'
        '<parameter name="path">a.py</parameter>\n<parameter name="content">if a < b:\n    print("`x`")'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
        (WEATHER, FILE),
    ),
    "mistral": (
        f"[TOOL_CALLS]get_weather[ARGS]{_JSON['get_weather']}"
        f"[TOOL_CALLS]write_file[ARGS]{_JSON['write_file']}[TOOL_CALLS]now[ARGS]{{}}",
        (WEATHER, FILE, NOW),
    ),
    "muse_spark": (
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Zürich 🙂</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n<atem:invoke name="write_file">\n'
        '<atem:parameter name="path">a.py</atem:parameter>\n<atem:parameter name="content">'
        'if a < b:\n    print("`x`")</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        (WEATHER, FILE),
    ),
    "pythonic": (
        '<|tool_call_start|>[get_weather(city="Zürich 🙂", days=3), '
        'write_file(path="a.py", content="if a < b:\\n    print(\\"`x`\\")"), now()]<|tool_call_end|>',
        (WEATHER, FILE, NOW),
    ),
    "function_gemma": (
        "<start_function_call>call:get_weather{city:<escape>Zürich 🙂<escape>,days:3}<end_function_call>"
        "<start_function_call>call:write_file{path:<escape>a.py<escape>,content:<escape>"
        'if a < b:\n    print("`x`")<escape>}<end_function_call>'
        "<start_function_call>call:now{}<end_function_call>",
        (WEATHER, FILE, NOW),
    ),
    "gemma4": (
        '<|tool_call>call:get_weather{city:<|"|>Zürich 🙂<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:write_file{path:<|"|>a.py<|"|>,content:<|"|>if a < b:\n    print("`x`")<|"|>}'
        "<tool_call|><|tool_call>call:now{}<tool_call|>",
        (WEATHER, FILE, NOW),
    ),
    "harmony": (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + _JSON["get_weather"],
        (WEATHER,),
    ),
}
"""By mlx-lm's module, a text that is nothing but calls, and their names and arguments."""


def syntax(name: str) -> Syntax:
    """Of a module of mlx-lm's, or our own."""
    if name == "harmony":
        return HARMONY
    module: Any = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return Syntax((module.tool_call_start,), module.tool_call_end, module.parse_tool_call)


def offer(name: str, *, parallel: bool = True) -> Offer:
    """All of `TOOLS`, for models of this format."""
    return Offer(syntax(name), TOOLS, parallel)
