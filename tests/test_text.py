"""Streamed text is the decoded reply, cut between characters."""

import random

import pytest

from dflash_mlx import Session
from dflash_mlx.text import Detokenizer

TEXTS = [
    " leading space, trailing space ",
    "def f(x):\n    return x  # ok .\n\n",
    "s = '你好 🙂 👩\u200d💻 \u200d é ẹ̄'",
    "\t\x1b[0m \u202e rtl שלום",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(5))
def test_pieces_join_to_the_text_however_the_tokens_are_grouped(pair: Session, text: str, seed: int) -> None:
    ids = pair.encode(text)
    dice = random.Random(seed)
    detokenizer = Detokenizer(pair.tokenizer)
    pieces, at = [], 0
    while at < len(ids):
        step = dice.randint(1, 3)
        pieces.append(detokenizer.add(ids[at : at + step]))
        at += step
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == text


def test_an_incomplete_character_waits_and_is_flushed_at_the_end(pair: Session) -> None:
    ids = pair.encode("ab🙂")
    detokenizer = Detokenizer(pair.tokenizer)
    assert detokenizer.add(ids[:-1]) == "ab"
    assert set(detokenizer.finish()) == {"\ufffd"}


def test_nothing_gives_nothing(pair: Session) -> None:
    detokenizer = Detokenizer(pair.tokenizer)
    assert detokenizer.add([]) == ""
    assert detokenizer.finish() == ""
