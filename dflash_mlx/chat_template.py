"""Messages -> token ids: all that depends on the chat template, which is a program of the model's own."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension
from jinja2.parser import Parser

from dflash_mlx.errors import UsageError, one_line
from dflash_mlx.text import Thinking

LEVELS = ("off", "on", "low", "medium", "high", "xhigh")
"""How much a model may reason, from none to most; each model offers some of these."""

SWITCHES = ("enable_thinking", "thinking")
"""Variables that turn reasoning on and off; a template reads one of them at most."""

EFFORTS = {
    "reasoning_effort": ("low", "medium", "high"),
    "reasoning_strength": ("low", "medium", "high", "xhigh"),
}
"""Variables that say how much, and what the models that read them know where the template does not say."""

CHANNELS: dict[tuple[str, ...], Thinking] = {
    ("<|channel|>", "<|message|>"): Thinking(  # gpt-oss
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        open=False,
        others=("<|channel|>commentary<|message|>", "<|end|>", "<|start|>assistant"),
    ),
    ("<|eom|>", "<|message|>"): Thinking(  # Muse
        "to=self<|message|>",
        "to=user<|message|>",
        open=False,
        others=("to=commentary<|message|>", "<|eom|>", "<|start|>assistant "),
    ),
}
"""Markers of replies in several messages, each of which says whom it is for, by tokens of such models."""

Settings = dict[str, Any]
"""Template variables."""

_PROBE: list[Mapping[str, Any]] = [{"role": "user", "content": "x"}]
_NO_LEVEL = "\ue000"  # private use: in no template, and the same in any case


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model wants to see it.

    Attributes:
        ids: up to where the reply begins.
        turns: how many of them other prompts may begin with too: what comes before the last message, which is
            all that an agent says each time, and before the reply, which templates rewrite in the next turn.
        thinking: the markers of the reply's reasoning; None: none are known for this model.
    """

    ids: tuple[int, ...]
    turns: tuple[int, ...]
    thinking: Thinking | None


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    reasoning: str | None = None,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Rendered:
    """The prompt after which the model replies to these messages.

    Where the template refuses or drops a system message that is not the first, all of them are merged in
    front. Where it refuses two messages of the user in a row, as one that insists on turns does after a reply
    that failed, they are merged too.

    Args:
        tokenizer: mlx-lm's wrapper.
        messages: as the template wants them: `role`, `content` and what else it reads.
        reasoning: one of `levels`; None: what the template does on its own.
        variables: what to set of the variables that the template reads, over what `reasoning` sets.
        tools: functions that the model may call, as OpenAI's clients describe them.

    Raises:
        UsageError: there is no template, it does not offer this level, does not read a variable, does not
            know tools, or cannot render these messages.
    """
    if not tokenizer.has_chat_template:
        raise UsageError("this model has no chat template: pass text or token ids instead of messages")
    settings = {} if reasoning is None else _chosen(tokenizer, reasoning)
    settings |= _readable(tokenizer, variables or {})
    if tools and not knows_tools(tokenizer):
        raise UsageError("this model's chat template does not know tools: leave them out")
    if tools:
        settings["tools"] = list(tools)
    try:
        text, messages = _accepted(tokenizer, messages, settings)
        # The template writes special tokens itself: as in the tokenizer's own apply_chat_template.
        ids = tokenizer.encode(text, add_special_tokens=False)
        parts = (messages[:-1], messages)
        turns = tuple(len(ids) - _tokens_after(tokenizer, part, settings, text) for part in parts)
    except Exception as error:  # a template is the model's own program and raises what it likes
        raise UsageError(f"the chat template cannot render these messages: {one_line(error)}") from error
    return Rendered(tuple(int(t) for t in ids), turns, _thinking(tokenizer, text, tools))


def knows_tools(tokenizer: Any) -> bool:
    """Whether this model's template tells it of tools."""
    if not tokenizer.has_chat_template:
        return False
    source = _source(tokenizer, "tool_use")
    if source is not None:
        return "tools" in _undeclared(source)
    function = tokenizer._chat_template or tokenizer._tokenizer.apply_chat_template
    return "tools" in inspect.signature(function).parameters


def levels(tokenizer: Any) -> tuple[str, ...]:
    """The reasoning levels that this model's template offers, in the order of `LEVELS`."""
    offered = _offered(tokenizer)
    return tuple(level for level in LEVELS if level in offered)


def _accepted(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], settings: Settings
) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """The prompt's text, and the messages that it is made of: these, or the nearest to them that it takes."""
    system = [m for m in messages if m.get("role") == "system"]
    others = [m for m in messages if m.get("role") != "system"]
    contents = [str(m.get("content", "")).strip() for m in system]
    late = bool(system) and (messages[0] is not system[0] or len(system) > 1)
    merged = [{"role": "system", "content": "\n\n".join(contents)}, *others] if late else messages
    refusal = None
    for form in (messages, merged, _taking_turns(merged)):
        try:
            text = _text(tokenizer, form, settings)
        except Exception as error:  # see render
            refusal = refusal or error
            continue
        if not late or form is not messages or all(content in text for content in contents):
            return text, form
    assert refusal is not None
    raise refusal


def _taking_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same, with one message where several of the user's follow each other."""
    joined: list[Mapping[str, Any]] = []
    for message in messages:
        if joined and message.get("role") == joined[-1].get("role") == "user":
            message = {**message, "content": f"{joined.pop()['content']}\n\n{message['content']}"}
        joined.append(message)
    return joined


def _tokens_after(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], settings: Settings, prompt: str
) -> int:
    """How many tokens of a prompt come after these messages; 0 if it does not begin with them."""
    try:
        text = _text(tokenizer, messages, settings, reply=False)
    except Exception:  # see render
        return 0
    rest = prompt.removeprefix(text)
    return len(tokenizer.encode(rest, add_special_tokens=False)) if text and rest != prompt else 0


def _readable(tokenizer: Any, variables: Mapping[str, Any]) -> Settings:
    """The variables, all of which the template reads and none of which is the renderer's own.

    What is no variable of the template would reach the renderer as an argument: another template, for one.
    """
    source = _source(tokenizer)
    read = set(SWITCHES[:1]) if source is None else _undeclared(source) - _renderers_own(tokenizer)
    if unread := sorted(set(variables) - read):
        names = ", ".join(sorted(read)) or "none"
        raise UsageError(f"{unread[0]!r} is no variable of this model's chat template: it reads {names}")
    return dict(variables)


def _renderers_own(tokenizer: Any) -> set[str]:
    arguments = inspect.signature(tokenizer._tokenizer.apply_chat_template).parameters
    functions = {*DEFAULT_NAMESPACE, "raise_exception", "strftime_now"}
    return {"messages", *arguments, *functions, *tokenizer._tokenizer.special_tokens_map}


def _undeclared(source: str) -> set[str]:
    try:
        return meta.find_undeclared_variables(_parse(source))
    except TemplateSyntaxError:
        return set()  # rendering will say what is wrong with it


def _parse(source: str) -> nodes.Template:
    return Environment(extensions=["jinja2.ext.loopcontrols", _Generation]).parse(source)


def _chosen(tokenizer: Any, level: str) -> Settings:
    offered = _offered(tokenizer)
    if level not in offered:
        names = ", ".join(levels(tokenizer))
        raise UsageError(
            f"reasoning is {level!r}: this model's chat template offers {names}"
            if names
            else f"reasoning is {level!r}: this model's chat template offers no levels; leave it unset"
        )
    return offered[level]


def _thinking(tokenizer: Any, prompt: str, tools: Sequence[Mapping[str, Any]]) -> Thinking | None:
    """The markers, which are open if they are the last thing in the prompt: messages may hold markers too."""
    if tokenizer.has_thinking:
        start, end = tokenizer.think_start, tokenizer.think_end
        return Thinking(start, end, prompt.rstrip().endswith(start), tokenizer.structural_markers)
    for tokens, thinking in CHANNELS.items():
        if all(_is_token(tokenizer, token) for token in tokens):
            to_tools = [f"to={tool['function']['name']}<|message|>" for tool in tools]
            return replace(thinking, others=(*thinking.others, *to_tools))
    return None


def _is_token(tokenizer: Any, text: str) -> bool:
    """Whether `text` is one token. The whole vocabulary, as a dictionary, takes 10 ms and more a prompt."""
    found = tokenizer.convert_tokens_to_ids(text)
    return found is not None and tokenizer.convert_ids_to_tokens(found) == text


def _offered(tokenizer: Any) -> dict[str, Settings]:
    """Each level that the template offers, with the variables that ask for it."""
    source = _source(tokenizer)
    if source is None:  # such functions take this switch, by mlx-lm's agreement with them
        known = tokenizer.has_chat_template and tokenizer.has_thinking
        return {"off": {"enable_thinking": False}, "on": {"enable_thinking": True}} if known else {}
    try:
        tree = _parse(source)
        # In this order: looking for variables folds constants together.
        named = {node.value for node in tree.find_all(nodes.Const) if node.value in LEVELS[2:]}
        read = meta.find_undeclared_variables(tree)
    except TemplateSyntaxError:
        return {}  # rendering will say what is wrong with it
    offered: dict[str, Settings] = {}
    on: Settings = {}
    for switch in SWITCHES:
        if switch in read and not offered:
            on = {switch: True}
            offered = {"off": {switch: False}, "on": on}
    for effort in EFFORTS:
        if effort in read:
            offered |= {word: {**on, effort: word} for word in _words(tokenizer, named, effort, on)}
    return offered


def _words(tokenizer: Any, named: set[str], effort: str, on: Settings) -> list[str]:
    """The levels that this variable may be set to.

    They are the ones that the template names, to compare with or to fall back to; where it writes any word
    into the prompt, also the ones that models with this variable know; less those that it refuses.
    """
    anything = _try(tokenizer, {**on, effort: _NO_LEVEL})
    words = named.union(EFFORTS[effort] if anything and _NO_LEVEL in anything else ())
    accepted = [word for word in words if _try(tokenizer, {**on, effort: word}) is not None]
    return accepted or list(words)  # if all are refused, it is the probe that the template does not like


def _try(tokenizer: Any, settings: Settings) -> str | None:
    try:
        return _text(tokenizer, _PROBE, settings)
    except Exception:  # see render
        return None


def _text(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], settings: Settings, *, reply: bool = True
) -> str:
    copies = [dict(message) for message in messages]
    # mlx-lm's wrapper turns reasoning on where nothing is said, whatever the template's own default.
    renderer = tokenizer if _source(tokenizer) is None else tokenizer._tokenizer
    text: str = renderer.apply_chat_template(copies, tokenize=False, add_generation_prompt=reply, **settings)
    return text


def _source(tokenizer: Any, name: str = "default") -> str | None:
    """The template's text; None where mlx-lm or the tokenizer itself renders with a Python function.

    Args:
        name: of the template, where there are several and one is called so.
    """
    if getattr(tokenizer, "_chat_template", None) is not None or not tokenizer.chat_template:
        return None
    source = tokenizer.chat_template
    if isinstance(source, dict):
        source = source.get(name, source.get("default", ""))
    return str(source)


class _Generation(Extension):
    """The `generation` tag of chat templates, which marks the model's own turns in training."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
