"""The tools that a client offers, as chat templates and parsers of calls read them. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_mlx.server.messages import value_of
from dflash_mlx.server.refusals import Refusal

Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters", ...}}`."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def read_tools(tools: Sequence[Any], choice: str | Mapping[str, Any]) -> tuple[Tool, ...]:
    """What the model is to be told of: all of the tools, or none if none may be called.

    Args:
        tools: the client's `tools`.
        choice: its `tool_choice`.

    Raises:
        Refusal: with status 400, naming the place.
    """
    read: dict[str, Tool] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = _function(tool, where)
        name = function["name"]
        if name in read:
            where = f"{where}.function.name"
            raise Refusal(400, f"{where} is {name!r}: another tool has that name", param=where)
        read[name] = {"type": "function", "function": function}
    if choice not in ("none", "auto"):
        asked = repr(choice) if isinstance(choice, str) else "an object"
        raise Refusal(
            400,
            f"tool_choice is {asked}: that a tool is called cannot be guaranteed; send 'auto' or 'none'",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return () if choice == "none" else tuple(read.values())


def _function(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise Refusal(400, f"{where}.type is {kind!r}: it must be 'function'", param=f"{where}.type")
    function, where = tool.get("function"), f"{where}.function"
    if not isinstance(function, Mapping):
        raise Refusal(400, f"{where} must be an object", param=where)
    # Templates and parsers count on all three, as not all clients do.
    name, description = function.get("name"), function.get("description") or ""
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        where = f"{where}.name"
        raise Refusal(
            400, f"{where} is {name!r}: it must be 1 to 128 of A-Z, a-z, 0-9, _, . and -", param=where
        )
    if not isinstance(description, str):
        raise Refusal(400, f"{where}.description must be a string", param=f"{where}.description")
    if not isinstance(parameters, Mapping):
        raise Refusal(400, f"{where}.parameters must be an object", param=f"{where}.parameters")
    return value_of({**function, "name": name, "description": description, "parameters": parameters})
