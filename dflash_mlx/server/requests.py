"""JSON body of a request -> `Request`: pure, and the only place that knows clients' field names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_mlx.errors import UsageError
from dflash_mlx.params import SamplingParams
from dflash_mlx.server.messages import read_messages
from dflash_mlx.server.refusals import Refusal
from dflash_mlx.server.tools import Tool, read_tools
from dflash_mlx.text import whole

EFFORTS = ("off", "none", "minimal", "on", "low", "medium", "high", "xhigh", "max")
"""Words for how much to reason, from none to most: clients', and those that templates offer."""

_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_WITHOUT_EFFECT = {
    "function_call",
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""What would change the answer and is not there, with the values that ask for nothing."""


@dataclass(frozen=True)
class Request:
    """What a client asks for.

    Attributes:
        prompt: chat messages, text, or token ids.
        model: the name that it gave, whatever it may be.
        effort: a word of `EFFORTS`; None: the model's default.
        variables: for the chat template.
        tools: what the model may call, more than one in a reply only if `parallel`.
        include_dflash: it wants to see the verify cycles.
        unknown: fields that mean nothing to us.
    """

    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    params: SamplingParams = field(default_factory=SamplingParams)
    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    include_dflash: bool = False
    speculative: bool = True
    block_size: int | None = None
    effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    parallel: bool = True
    unknown: tuple[str, ...] = ()


def read_chat(body: Any, defaults: SamplingParams) -> Request:
    """A body of `/chat/completions`; a field that is null counts as left out.

    Args:
        body: the parsed JSON.
        defaults: settings that the client does not send.

    Raises:
        Refusal: with status 400, naming the field.
    """
    fields = _Fields(body)
    messages = read_messages(fields.take("messages", list, []))
    wanted, top = fields.take("logprobs", bool, False), fields.take("top_logprobs", int, None)
    if top is not None and not wanted:
        raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    effort = fields.take("reasoning_effort", str, None)
    if effort is not None and effort not in EFFORTS:
        raise Refusal(
            400,
            f"reasoning_effort is {effort!r}: it must be one of {', '.join(EFFORTS)}",
            param="reasoning_effort",
        )
    return _read(
        fields,
        defaults,
        prompt=messages,
        top_logprobs=(top or 0) if wanted else None,
        effort=effort,
        variables=fields.take("chat_template_kwargs", dict, {}),
        tools=read_tools(fields.take("tools", list, []), fields.take("tool_choice", (str, dict), "auto")),
        parallel=fields.take("parallel_tool_calls", bool, True),
    )


def read_completion(body: Any, defaults: SamplingParams) -> Request:
    """A body of `/completions`; otherwise as `read_chat`."""
    fields = _Fields(body)
    prompt = fields.take("prompt", (str, list), "")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
        raise Refusal(
            400,
            "prompt is a list of several prompts: send one a request",
            param="prompt",
            code="unsupported_parameter",
        )
    if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
        raise Refusal(400, "prompt is a list: its items must be token ids", param="prompt")
    prompt = whole(prompt) if isinstance(prompt, str) else tuple(prompt)
    return _read(fields, defaults, prompt=prompt, top_logprobs=fields.take("logprobs", int, None))


def nearest_level(effort: str | None, offered: Sequence[str]) -> str | None:
    """The level, of those that a template offers, that a client's word means.

    The nearest one that is not more; of a template whose least is more, that one; None where there is none.
    """
    if effort is None or not offered:
        return None
    below = [level for level in offered if EFFORTS.index(level) <= EFFORTS.index(effort)]
    return below[-1] if below else offered[0]


def _read(fields: "_Fields", defaults: SamplingParams, *, top_logprobs: int | None, **parts: Any) -> Request:
    options = _Fields(fields.take("stream_options", dict, {}), "stream_options.")
    ours = _Fields(fields.take("dflash", dict, {}), "dflash.")
    request = Request(
        params=_params(fields, defaults, top_logprobs),
        model=fields.take("model", str, None),
        stream=fields.take("stream", bool, False),
        include_usage=options.take("include_usage", bool, False),
        include_dflash=options.take("include_dflash", bool, False),
        speculative=ours.take("speculative", bool, True),
        block_size=ours.take("block_size", int, None),
        **parts,
    )
    if unknown := ours.rest():
        raise Refusal(400, f"dflash.{unknown[0]} is not known", param=f"dflash.{unknown[0]}")
    fields.refuse_unsupported()
    return replace(request, unknown=tuple(fields.rest()))


def _params(fields: "_Fields", defaults: SamplingParams, top_logprobs: int | None) -> SamplingParams:
    old, new = fields.take("max_tokens", int, None), fields.take("max_completion_tokens", int, None)
    limit = old if new is None else new
    seed = fields.take("seed", int, None)
    top_k = fields.take("top_k", int, None)
    stop = fields.take("stop", (str, list), [])
    sent = {
        "max_tokens": None if limit == -1 else limit,  # -1: no limit, as several servers have it
        "top_k": 0 if top_k == -1 else top_k,  # likewise
        "seed": None if seed is None else seed % 2**32,
        "stop": [
            whole(part) if isinstance(part, str) else part
            for part in ([stop] if isinstance(stop, str) else stop)
        ],
        "logit_bias": _bias(fields.take("logit_bias", dict, {})),
        "top_logprobs": top_logprobs,
        **{name: fields.take(name, (int, float), None) for name in _SAME_NAME},
    }
    try:
        return replace(defaults, **{name: value for name, value in sent.items() if value is not None})
    except UsageError as error:
        name = str(error).partition(" ")[0]
        if name == "max_tokens" and new is not None:
            name = "max_completion_tokens"
        if name == "top_logprobs" and "top_logprobs" not in fields.body:
            name = "logprobs"
        raise Refusal(400, str(error), param=name) from error


def _bias(bias: Mapping[str, Any]) -> dict[int, Any]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise Refusal(400, "logit_bias must map token ids to numbers", param="logit_bias") from None


class _Fields:
    """The fields of a JSON object that are not null, each taken once."""

    def __init__(self, body: Any, prefix: str = "") -> None:
        if not isinstance(body, dict):
            raise Refusal(400, f"the body is a JSON {_json_name(body)}: it must be an object")
        self.body = {name: value for name, value in body.items() if value is not None}
        self._left = dict(self.body)
        self._prefix = prefix

    def take(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """The field's value, checked for its type."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            name, expected = self._prefix + name, " or ".join(_JSON_NAMES[k] for k in kinds)
            raise Refusal(400, f"{name} is a JSON {_json_name(value)}: it must be {expected}", param=name)
        return value

    def refuse_unsupported(self) -> None:
        """Refuse by name what would change the answer."""
        for name, neutral in _NEUTRAL.items():
            value = self._left.pop(name, None)
            if value is not None and value not in neutral:
                raise Refusal(
                    400,
                    f"{name} is not supported yet: leave it out",
                    param=name,
                    code="unsupported_parameter",
                )

    def rest(self) -> list[str]:
        """Names of the fields that nobody took and that are not known to have no effect."""
        return sorted(self._left.keys() - _WITHOUT_EFFECT)


_JSON_NAMES: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
}


def _json_name(value: Any) -> str:
    names: dict[type, str] = {str: "string", bool: "boolean", int: "number", float: "number", list: "array"}
    return names.get(type(value), "object" if isinstance(value, dict) else "null")


def parse(body: bytes) -> Any:
    """The JSON value in a body.

    Raises:
        Refusal: there is none.
    """
    try:
        return json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refusal(400, f"the body is not valid JSON: {reason}", code="invalid_json") from None
