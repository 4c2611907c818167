"""Which models can call tools, and how, is read off their tokenizers."""

from typing import Any

import pytest
from byte_tokenizer import wrapper
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import glm47
from test_chat_template import LISTING, SWITCH

from dflash_mlx.server.measure import syntax_of
from dflash_mlx.server.syntax import HARMONY, Syntax

CHANNELS = ("<|channel|>", "<|message|>", "<|call|>")


def parsed(template: str) -> TokenizerWrapper:
    """A tokenizer that mlx-lm has a parser for."""
    parser: Any = {
        "tool_call_start": glm47.tool_call_start,
        "tool_call_end": glm47.tool_call_end,
        "tool_parser": glm47.parse_tool_call,
    }
    return TokenizerWrapper(wrapper(template)._tokenizer, **parser)


def test_mlx_lms_parsers_are_used_if_the_template_knows_tools() -> None:
    parse: Any = glm47.parse_tool_call
    assert syntax_of(parsed(LISTING)) == Syntax(("<tool_call>",), "</tool_call>", parse)
    assert syntax_of(parsed(SWITCH)) is None


def test_a_template_without_a_parser_is_not_enough() -> None:
    assert syntax_of(wrapper(LISTING)) is None


@pytest.mark.parametrize(
    ("template", "markers", "ends", "expected"),
    [
        (LISTING, CHANNELS, True, HARMONY),
        (LISTING, CHANNELS, False, None),  # the model would go on after a call
        (LISTING, CHANNELS[:2], False, None),
        (LISTING, CHANNELS[1:], True, None),
        (SWITCH, CHANNELS, True, None),
    ],
)
def test_gpt_oss_is_known_by_its_tokens(
    template: str, markers: tuple[str, ...], ends: bool, expected: Syntax | None
) -> None:
    tokenizer = wrapper(template, markers=markers)
    if ends:
        tokenizer.add_eos_token("<|call|>")
    assert syntax_of(tokenizer) == expected
