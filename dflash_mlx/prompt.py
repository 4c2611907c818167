"""What may be asked of a session, and its token ids."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from dflash_mlx.chat_template import Rendered, render
from dflash_mlx.errors import UsageError
from dflash_mlx.target.load import Tokenizer
from dflash_mlx.text import whole

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text (taken raw), token ids, or chat messages."""


def encode(
    prompt: Prompt,
    tokenizer: Tokenizer,
    vocab_size: int,
    reasoning: str | None = None,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Rendered:
    """Token ids of a prompt; of messages by the model's chat template, as the other arguments set it.

    Raises:
        UsageError: the prompt is empty, is none of text, token ids and messages, holds an id that is not in
            [0, vocab_size), or cannot be written as these arguments say.
    """
    if _all(prompt, Mapping) and len(prompt):
        messages = [_whole_values(cast(Mapping[str, Any], message)) for message in prompt]
        rendered = render(tokenizer, messages, reasoning=reasoning, variables=variables, tools=tools)
    elif reasoning is not None or variables:
        name, value = ("reasoning", reasoning) if reasoning is not None else ("variables", variables)
        raise UsageError(f"{name} is {value!r}: it needs messages, a raw prompt has no template")
    elif isinstance(prompt, str) or _all(prompt, Integral):
        ids = tokenizer.encode(whole(prompt)) if isinstance(prompt, str) else prompt
        rendered = Rendered(tuple(int(cast(int, token)) for token in ids), (), None)
    else:
        raise UsageError(f"prompt is a {type(prompt).__name__}: pass text, token ids, or messages")
    if not rendered.ids:
        raise UsageError("the prompt is empty: it must hold at least one token")
    if bad := [token for token in rendered.ids if not 0 <= token < vocab_size]:
        raise UsageError(f"token id {bad[0]} is not in the vocabulary: [0, {vocab_size})")
    return rendered


def _whole_values(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: whole(value) if isinstance(value, str) else value for key, value in message.items()}


def _all(prompt: object, kind: type) -> bool:
    return isinstance(prompt, Sequence) and all(isinstance(item, kind) for item in prompt)
