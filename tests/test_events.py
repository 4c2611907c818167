"""Events survive JSON, so that a log of them can be replayed."""

import json

import pytest

from dflash_mlx.events import Block, Event, Finished, Prefilled, Prefilling

EVENTS: list[Event] = [
    Prefilling(done=3, total=7),
    Prefilled((5,), "a", prompt_tokens=7, seconds=0.25),
    Block((1, 2), "b\n🙂", drafted=4, accepted=1, rejected=(8, 9, 7), seconds=0.5, wait_seconds=0.25),
    Finished((), "", "cancelled"),
]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_survives_json(event: Event) -> None:
    assert Event.from_json(json.loads(json.dumps(event.to_json()))) == event


def test_committed_counts_tokens() -> None:
    assert Block((1, 2, 3), drafted=4, accepted=2).committed == 3


def test_an_unknown_event_is_named() -> None:
    with pytest.raises(ValueError, match="'Nothing', expected one of"):
        Event.from_json({"event": "Nothing", "tokens": []})
