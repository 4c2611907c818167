"""How a model writes tool calls; and the one format of which we know that mlx-lm has no parser for."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.server.tools import Tool

Parse = Callable[[str, Sequence[Tool]], Any]
"""A call's text without its markers, and the tools -> a mapping with `name` and `arguments`, or several.

It raises what it likes.
"""


@dataclass(frozen=True)
class Syntax:
    """The markers of a call, and the parser of what is between them.

    Attributes:
        starts: what may begin one.
        end: what ends it; empty: the end of the reply does.
    """

    starts: tuple[str, ...]
    end: str
    parse: Parse


def _parse_harmony(text: str, tools: Sequence[Tool]) -> dict[str, Any]:
    found = _HARMONY_MESSAGE.fullmatch(text)
    if found is None:
        raise ValueError("no message to a function")
    return found.groupdict()


_HARMONY_MESSAGE = re.compile(r"(?P<name>[\w.-]+)[^{]*<\|message\|>(?P<arguments>.*)", re.DOTALL)

HARMONY = Syntax(
    # The recipient stands in a message's header, before or after the channel.
    ("<|channel|>commentary to=functions.", "<|channel|>analysis to=functions.", "to=functions."),
    "",  # <|call|> is an end-of-sequence token
    _parse_harmony,
)
"""gpt-oss: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}`."""
