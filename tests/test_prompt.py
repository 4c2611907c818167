"""What may be asked of a session."""

from typing import Any

import numpy as np
import pytest

from dflash_mlx import Session
from dflash_mlx.errors import UsageError


def test_ids_may_be_numpys(pair: Session) -> None:
    ids: Any = [np.int64(5), np.int32(6)]
    assert pair.encode(ids) == [5, 6]
    with pytest.raises(UsageError, match="prompt is a ndarray: pass text, token ids, or messages"):
        pair.encode(np.array([1, 2, 3]))  # type: ignore[arg-type]  # what is refused


def test_nothing_is_refused_as_empty(pair: Session) -> None:
    empty: list[int] = []
    for nothing in ("", empty):
        with pytest.raises(UsageError, match="the prompt is empty"):
            pair.encode(nothing)


def test_half_a_character_is_left_out_of_the_way(pair: Session) -> None:
    """JSON and command lines can hold one, tokenizers cannot read it."""
    assert pair.encode("abc \ud83d!") == pair.encode("abc \ufffd!")
    assert pair.encode("\ud83d\ude00") == pair.encode("\U0001f600"), "two halves are a whole"
