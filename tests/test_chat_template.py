"""Messages become the prompt that the model's own template makes of them, at the reasoning asked for."""

import json
from dataclasses import replace
from typing import Any

import pytest
from byte_tokenizer import wrapper
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx import UsageError
from dflash_mlx.chat_template import CHANNELS, LEVELS, knows_tools, levels, render
from dflash_mlx.text import Thinking

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi 🙂"}]

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
REPLY = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
SWITCH = (  # closes an empty block when off, leaves opening one to the model
    TURNS
    + REPLY
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
OPENING = (  # the same, but opens the block itself
    TURNS + REPLY + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)
ASKED = (  # reasons only when told to
    TURNS + REPLY + "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
)
PLAIN_SWITCH = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}" + (
    TURNS + "<|assistant|>{{ '<think>' if thinking else '</think>' }}"
)
WRITTEN = (  # any word goes, in a macro with a default
    "{%- macro system() -%}"
    "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
    "Effort: {{ reasoning_effort }}\n{% endmacro -%}{{ system() }}" + TURNS + REPLY
)
STRENGTH = (
    "{%- set s = reasoning_strength if reasoning_strength is defined and reasoning_strength else 'high' -%}"
    "Reason with {{ s | upper }} strength.\n" + TURNS + REPLY
)
GUARDED = (  # refuses what it does not know, says something for two of three, and nothing without the switch
    "{%- if enable_thinking is undefined or enable_thinking is true %}"
    "{%- set effort = reasoning_effort | default('xhigh') %}"
    "{%- if effort not in ('low', 'medium', 'xhigh') %}"
    "{{- raise_exception('what is ' ~ effort ~ '? high, perhaps') }}{%- endif %}"
    "{%- if effort == 'low' %}Be brief.\n{% elif effort == 'xhigh' %}Be thorough.\n{% endif %}{%- endif %}"
    + OPENING
)
REFUSING = "{% if reasoning_effort == 'medium' %}{{ raise_exception('no more') }}{% endif %}" + WRITTEN
FLAG = "{% if reasoning_effort is defined and reasoning_effort == 'low' %}Be brief.\n{% endif %}" + ASKED
FUSSY = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + GUARDED
TAGGED = "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}{% endfor %}" + (
    "{% generation %}{% if enable_thinking %}on{% endif %}{% endgeneration %}" + TURNS
)
PROSE = (
    "Work at a low or high level: enable_thinking, reasoning_effort.{# reasoning_effort 'low' #}\n" + TURNS
)
ITS_OWN = "{% for m in messages %}{% set thinking = m.role %}{{ thinking }}: {{ m.content }}{% endfor %}"


def text(tokenizer: TokenizerWrapper, reasoning: str | None = None, messages: Any = MESSAGES) -> str:
    return str(tokenizer.decode(list(render(tokenizer, messages, reasoning=reasoning).ids)))


# --- prompts ----------------------------------------------------------------------------------


def test_a_prompt_is_what_the_tokenizer_itself_makes_of_it() -> None:
    tokenizer = wrapper("<end>" + SWITCH)
    ids = render(tokenizer, MESSAGES, reasoning="off").ids
    own = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, enable_thinking=False)
    assert list(ids) == own
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(own).endswith("<|user|>Hi 🙂\n<|assistant|>\n<think>\n\n</think>\n\n")


def test_the_messages_are_left_alone() -> None:
    def function(messages: Any, **_: Any) -> str:
        return str(messages[0].pop("content"))

    messages = [{"role": "user", "content": "x"}]
    assert text(wrapper(None, function=function), messages=messages) == "x"
    assert messages == [{"role": "user", "content": "x"}]


def test_of_several_templates_the_default_is_used() -> None:
    tokenizer = wrapper({"default": SWITCH, "tool_use": "tools"})
    assert levels(tokenizer) == ("off", "on")
    assert text(tokenizer, "off").endswith("</think>\n\n")
    assert levels(wrapper({"default": TURNS, "tool_use": SWITCH})) == ()
    with pytest.raises(UsageError, match="multiple chat templates"):
        render(wrapper({"a": SWITCH, "b": SWITCH}), MESSAGES)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "these messages: roles must alternate"),
        ("{{ raise_exception('one\ntwo') }}", "these messages: one$"),
        ("{{ messages[7].content }}", "cannot render these messages"),
        ("{% if %}", "cannot render these messages"),
        (None, "no chat template: pass text"),
    ],
)
def test_what_cannot_be_rendered_is_refused_in_one_line(template: str | None, message: str) -> None:
    tokenizer = wrapper(template)
    with pytest.raises(UsageError, match=message) as caught:
        render(tokenizer, MESSAGES)
    assert "\n" not in str(caught.value)
    assert levels(tokenizer) == ()


# --- where the reply begins -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "reasoning", "opened"),
    [
        (SWITCH, None, False),
        (SWITCH, "on", False),
        (SWITCH, "off", False),
        (OPENING, None, True),
        (OPENING, "on", True),
        (OPENING, "off", False),
        (PLAIN_SWITCH, "on", True),
        (PLAIN_SWITCH, "off", False),
        (GUARDED, "low", True),
    ],
)
def test_an_open_marker_at_the_prompts_end_is_seen(
    template: str, reasoning: str | None, opened: bool
) -> None:
    rendered = render(wrapper(template), MESSAGES, reasoning=reasoning)
    assert rendered.thinking == Thinking("<think>", "</think>", open=opened)


@pytest.mark.parametrize("tokens", CHANNELS)
def test_models_that_write_several_messages_are_known_by_their_tokens(tokens: tuple[str, ...]) -> None:
    assert render(wrapper(SWITCH, markers=tokens), MESSAGES).thinking == CHANNELS[tokens]
    assert render(wrapper(SWITCH, markers=tokens[:1]), MESSAGES).thinking is None


def test_markers_in_messages_open_nothing() -> None:
    messages = [{"role": "user", "content": "What does <think> mean? <think>"}]
    thinking = render(wrapper(SWITCH), messages).thinking
    assert thinking is not None
    assert not thinking.open


def test_a_model_without_markers_has_no_thinking() -> None:
    assert render(wrapper(WRITTEN, markers=()), MESSAGES).thinking is None


# --- tools ------------------------------------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
]
LISTING = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + SWITCH


def with_tools(tokenizer: TokenizerWrapper, **settings: Any) -> str:
    return str(tokenizer.decode(list(render(tokenizer, MESSAGES, tools=TOOLS, **settings).ids)))


def test_tools_reach_the_prompt() -> None:
    tokenizer = wrapper(LISTING)
    assert knows_tools(tokenizer)
    prompt = with_tools(tokenizer, reasoning="off")
    own = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, enable_thinking=False, tools=TOOLS
    )
    assert prompt == tokenizer.decode(own)
    assert prompt.startswith(json.dumps(TOOLS))
    assert text(tokenizer).startswith("<|system|>")
    assert with_tools(wrapper(FIRST_ONLY.replace(TURNS, LISTING))).startswith("[{")


def test_of_several_templates_the_one_for_tools_is_used_with_them() -> None:
    tokenizer = wrapper({"default": SWITCH, "tool_use": LISTING})
    assert knows_tools(tokenizer)
    assert with_tools(tokenizer).startswith("[{")
    assert text(tokenizer).startswith("<|system|>")
    assert knows_tools(wrapper({"default": LISTING}))
    assert not knows_tools(wrapper({"default": LISTING, "tool_use": SWITCH}))


def test_a_python_template_may_know_tools() -> None:
    def knowing(messages: Any, tools: Any = None, **_: Any) -> str:
        return str(tools[0]["function"]["name"]) if tools else "none"

    def ignorant(messages: Any, **_: Any) -> str:
        return "none"

    assert with_tools(wrapper(None, function=knowing)) == "f"
    assert text(wrapper(None, function=knowing)) == "none"
    assert not knows_tools(wrapper(None, function=ignorant))


@pytest.mark.parametrize("template", [SWITCH, "{# tools #}{{ 'tools' }}" + TURNS, None])
def test_a_template_that_does_not_know_tools_refuses_them(template: str | None) -> None:
    tokenizer = wrapper(template)
    assert not knows_tools(tokenizer)
    with pytest.raises(UsageError, match="tools" if template else "no chat template"):
        render(tokenizer, MESSAGES, tools=TOOLS)
    assert template is None or render(tokenizer, MESSAGES, tools=[]).ids


def test_messages_to_tools_have_markers_of_their_own() -> None:
    tokenizer = wrapper(LISTING, markers=("<|eom|>", "<|message|>"))
    known = CHANNELS["<|eom|>", "<|message|>"]
    assert render(tokenizer, MESSAGES).thinking == known
    thinking = render(tokenizer, MESSAGES, tools=TOOLS).thinking
    assert thinking == replace(known, others=(*known.others, "to=f<|message|>"))


def test_the_frames_of_an_answer_are_markers_too() -> None:
    sections = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    thinking = render(wrapper(TURNS, markers=sections), MESSAGES).thinking
    assert thinking is not None
    assert thinking.start == "<|open|>think<|sep|>"
    assert thinking.others == (
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
    )


# --- levels -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "offered"),
    [
        (TURNS, []),
        (SWITCH, ["off", "on"]),
        (OPENING, ["off", "on"]),
        (PLAIN_SWITCH, ["off", "on"]),
        (WRITTEN, ["low", "medium", "high"]),
        (STRENGTH, ["low", "medium", "high", "xhigh"]),
        (REFUSING, ["low", "high"]),
        (GUARDED, ["off", "on", "low", "medium", "xhigh"]),
        (FUSSY, ["off", "on", "low", "medium", "xhigh"]),
        (FLAG, ["off", "on", "low"]),
        (TAGGED, ["off", "on"]),
        (PROSE, []),
        (ITS_OWN, []),
    ],
)
def test_the_levels_are_those_that_the_template_offers(template: str, offered: list[str]) -> None:
    tokenizer = wrapper(template)
    assert list(levels(tokenizer)) == offered
    for level in LEVELS:
        if level in offered:
            assert render(tokenizer, MESSAGES, reasoning=level).ids
        else:
            names = ", ".join(offered) or "no levels"
            with pytest.raises(UsageError, match=f"reasoning is '{level}': .* offers {names}") as caught:
                render(tokenizer, MESSAGES, reasoning=level)
            assert "\n" not in str(caught.value)


def test_a_word_that_is_no_level_is_refused() -> None:
    for word in ("max", "", "ON", "none"):
        with pytest.raises(UsageError, match=f"reasoning is {word!r}: .* offers off, on"):
            render(wrapper(SWITCH), MESSAGES, reasoning=word)


@pytest.mark.parametrize(
    ("template", "level", "expected"),
    [
        (WRITTEN, None, "Effort: medium\n"),
        (WRITTEN, "high", "Effort: high\n"),
        (STRENGTH, None, "Reason with HIGH strength.\n"),
        (STRENGTH, "xhigh", "Reason with XHIGH strength.\n"),
        (GUARDED, None, "Be thorough.\n"),
        (GUARDED, "on", "Be thorough.\n"),
        (GUARDED, "low", "Be brief.\n"),
        (GUARDED, "medium", "<|system|>"),
        (GUARDED, "off", "<|system|>"),
    ],
)
def test_a_level_reaches_the_prompt(template: str, level: str | None, expected: str) -> None:
    assert text(wrapper(template), level).startswith(expected)


def test_a_level_turns_reasoning_on_where_there_is_a_switch() -> None:
    assert text(wrapper(FLAG), "low").startswith("Be brief.\n")
    assert text(wrapper(FLAG), "low").endswith("<think>\n")


@pytest.mark.parametrize("template", [SWITCH, OPENING, ASKED, PLAIN_SWITCH, WRITTEN, STRENGTH, GUARDED, FLAG])
def test_without_a_level_the_template_decides(template: str) -> None:
    tokenizer = wrapper(template)
    own = tokenizer._tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text(tokenizer) == own


def test_a_model_that_mlx_lm_renders_in_python_has_its_switch() -> None:
    def function(messages: Any, enable_thinking: bool, **_: Any) -> str:
        return messages[0]["content"] + ("<think>" if enable_thinking else "</think>")

    tokenizer = wrapper(WRITTEN, function=function)
    assert levels(tokenizer) == ("off", "on")
    assert text(tokenizer, "off") == "Be kind.</think>"
    assert text(tokenizer, "on") == text(tokenizer) == "Be kind.<think>"
    assert render(tokenizer, MESSAGES).thinking == Thinking("<think>", "</think>", open=True)
    assert levels(wrapper(None, markers=(), function=function)) == ()


# --- system messages and variables ----------------------------------------------------------------

LATE = [
    {"role": "user", "content": "a"},
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "b"},
    {"role": "system", "content": "Be brief."},
]
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system later') }}{% endif %}{% endfor %}" + TURNS
)
DROPPING = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<|{{ m.role }}|>{{ m.content }}\n"
    "{% endif %}{% endfor %}"
)
IN_FRONT = "<|system|>Be kind.\n\nBe brief.\n<|user|>a\n<|user|>b\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TURNS, "<|user|>a\n<|system|>Be kind.\n<|user|>b\n<|system|>Be brief.\n"),
        (FIRST_ONLY, IN_FRONT),
        (DROPPING, IN_FRONT),
    ],
)
def test_a_system_message_that_is_refused_or_dropped_is_merged_in_front(template: str, expected: str) -> None:
    assert text(wrapper(template), messages=LATE) == expected


def test_two_system_messages_at_the_beginning_become_one_where_they_must() -> None:
    both = [LATE[1], LATE[3], LATE[0], LATE[2]]
    assert text(wrapper(FIRST_ONLY), messages=both) == IN_FRONT
    with pytest.raises(UsageError, match="no system"):
        render(wrapper("{{ raise_exception('no system') }}"), both)


ALTERNATING = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('take turns') }}{% endif %}{% endfor %}" + TURNS
)


def test_messages_of_the_user_in_a_row_become_one_where_they_must() -> None:
    said = [*MESSAGES, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked = [*said, {"role": "user", "content": "c"}, {"role": "user", "content": "d"}]
    for template, between in ((TURNS, "\n<|user|>"), (ALTERNATING, "\n\n")):
        expected = f"<|system|>Be kind.\n<|user|>Hi 🙂{between}a\n<|assistant|>b\n<|user|>c{between}d\n"
        assert text(wrapper(template), messages=asked) == expected
    in_front = IN_FRONT.replace("a\n<|user|>b", "a\n\nb")
    assert text(wrapper(FIRST_ONLY + ALTERNATING.removesuffix(TURNS)), messages=LATE) == in_front
    with pytest.raises(UsageError, match="not these 6"):  # as the client knows them
        render(wrapper("{{ raise_exception('not these ' ~ messages | length) }}"), asked)


def test_variables_that_the_template_reads_may_be_set() -> None:
    tokenizer = wrapper("{{ greeting }}" + SWITCH)
    ids = render(
        tokenizer, MESSAGES, reasoning="on", variables={"greeting": "Hi.", "enable_thinking": False}
    ).ids
    prompt = str(tokenizer.decode(list(ids)))
    assert prompt.startswith("Hi.<|system|>")
    assert prompt.endswith("</think>\n\n")


@pytest.mark.parametrize(
    "name",
    [
        "unread",
        "messages",
        "tools",
        "chat_template",
        "tokenize",
        "conversation",
        "continue_final_message",
        "add_generation_prompt",
        "eos_token",
        "raise_exception",
        "range",
        "__class__",
    ],
)
def test_no_other_variable_can_be_set(name: str) -> None:
    template = "{{ tools }}{{ eos_token }}{{ range(1) }}" + TURNS + REPLY
    with pytest.raises(UsageError, match=f"{name!r} is no variable of .*: it reads none"):
        render(wrapper(template), MESSAGES, variables={name: "x"})


def test_a_python_template_has_its_switch_and_no_other_variable() -> None:
    def function(messages: Any, enable_thinking: bool, **_: Any) -> str:
        return f"{enable_thinking}"

    tokenizer = wrapper(None, function=function)
    assert (
        tokenizer.decode(list(render(tokenizer, MESSAGES, variables={"enable_thinking": False}).ids))
        == "False"
    )
    with pytest.raises(UsageError, match="it reads enable_thinking"):
        render(tokenizer, MESSAGES, variables={"tools": []})


# --- where other prompts part from this one ------------------------------------------------------


@pytest.mark.parametrize(
    "template", [TURNS + REPLY, SWITCH, TURNS + REPLY.replace("\n{", "\n<think>\n{")], ids=range(3)
)
def test_turns_are_where_the_next_prompt_and_other_questions_part_from_this_one(template: str) -> None:
    tokenizer = wrapper(template)
    prompt = render(tokenizer, MESSAGES)
    before, turn = prompt.turns
    question = render(tokenizer, [MESSAGES[0], {"role": "user", "content": "So?"}])
    following = render(tokenizer, [*MESSAGES, {"role": "assistant", "content": "Yes."}, MESSAGES[1]])
    assert question.ids[:before] == prompt.ids[:before]
    assert tokenizer.decode(prompt.ids[before:]).startswith("<|user|>Hi")
    assert following.ids[:turn] == prompt.ids[:turn]
    assert tokenizer.decode(prompt.ids[turn:]).startswith("<|assistant|>")


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (FUSSY, [MESSAGES[0]]),  # nothing comes before the only message
        ("{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}" + TURNS, MESSAGES),
        ("{{ messages | length }}" + TURNS, MESSAGES),  # which begins otherwise with every message
    ],
    ids=range(3),
)
def test_a_prompt_that_shows_no_turns_is_one(template: str, messages: list[dict[str, str]]) -> None:
    prompt = render(wrapper(template), messages)
    assert prompt.turns[0] == len(prompt.ids)


def test_merged_system_messages_are_in_front_of_the_turns() -> None:
    messages = [*MESSAGES, {"role": "system", "content": "Be brief."}, MESSAGES[1]]
    refusing = (
        "{% for m in messages[1:] %}{% if m.role == 'system' %}{{ raise_exception('once') }}{% endif %}"
    )
    tokenizer = wrapper(refusing + "{% endfor %}" + TURNS + REPLY)
    prompt = render(tokenizer, messages)
    assert (
        tokenizer.decode(prompt.ids[: prompt.turns[0]]) == "<|system|>Be kind.\n\nBe brief.\n<|user|>Hi 🙂\n"
    )
