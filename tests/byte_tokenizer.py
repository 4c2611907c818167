"""A tokenizer of bytes, with any chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def byte_tokenizer() -> Tokenizer:
    """Of bytes and an end, the last id."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def wrapper(
    template: str | dict[str, str] | None,
    *,
    markers: Sequence[str] = ("<think>", "</think>"),
    function: Callable[..., str] | None = None,
) -> TokenizerWrapper:
    """mlx-lm's wrapper around a tokenizer of bytes and, as one token each, an end and thinking markers.

    The end is also what it puts before any text that is no chat.
    """
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(markers))
    end = tokenizer.token_to_id("<end>")
    tokenizer.post_processor = processors.TemplateProcessing("<end> $A", None, [("<end>", end)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = template
    return TokenizerWrapper(fast, chat_template=function)
