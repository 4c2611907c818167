"""A reply gathered from its stream."""

import pytest

from dflash_mlx.events import Block, Event, Finished, Prefilled, Prefilling
from dflash_mlx.result import collect


def test_a_reply_that_was_cancelled_before_its_first_token_took_no_time_to_decode() -> None:
    events: list[Event] = [Prefilling(done=1, total=9), Finished(finish_reason="cancelled")]
    result = collect(iter(events))
    assert result.decode_seconds == 0
    assert result.decode_tokens_per_second == 0
    assert result.tokens == ()


def test_tau_counts_the_tokens_that_belong_to_the_reply() -> None:
    """An end of sequence that was drafted ends the reply: the token after it is none of it."""
    events: list[Event] = [
        Prefilled((1,), prompt_tokens=3),
        Block((2, 3, 4), drafted=4, accepted=2),
        Block((5,), drafted=0),
        Block((6, 0), drafted=4, accepted=2),
        Finished(),
    ]
    assert collect(iter(events)).tau == pytest.approx(2.5)
