"""Chat messages as clients write them -> as chat templates read them. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_mlx.server.refusals import Refusal
from dflash_mlx.text import whole

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def read_messages(messages: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Messages with one of four roles and a text.

    Raises:
        Refusal: with status 400, naming the place.
    """
    if not messages:
        raise Refusal(400, "messages is missing or empty: send at least one message", param="messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def value_of(value: Any) -> Any:
    """The JSON value, with `whole` each text in it, names included."""
    return json.loads(whole(json.dumps(value, ensure_ascii=False)))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise Refusal(400, f"{where} must be an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise Refusal(
            400, f"{where}.role is {role!r}: it must be one of {', '.join(_ROLES)}", param=f"{where}.role"
        )
    read: dict[str, Any] = {
        "role": _ROLES[role],
        "content": _content(message.get("content"), f"{where}.content"),
    }
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            read[name] = whole(message[name])
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        read["reasoning_content"] = whole(reasoning)
    calls = message.get("tool_calls")
    if message.get("function_call"):
        calls = [{"type": "function", "function": message["function_call"]}]
    if calls:
        read["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return read


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return whole(content)
    if not isinstance(content, list):
        raise Refusal(400, f"{where} must be a string or a list of text parts", param=where)
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return whole(part["text"])
    raise Refusal(400, f"{where} is of type {kind!r}: this model reads text only", param=where)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls whose arguments are objects, as templates want them, where they can be read as such."""
    read = []
    for i, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refusal(400, f"{where}[{i}] must have a function with a name", param=f"{where}[{i}]")
        entry = {
            "type": "function",
            "function": {"name": whole(function["name"]), "arguments": _arguments(function)},
        }
        read.append({"id": whole(call["id"]), **entry} if isinstance(call.get("id"), str) else entry)
    return read


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        return value_of(arguments)
    try:
        parsed = value_of(json.loads(arguments))
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else whole(arguments)
