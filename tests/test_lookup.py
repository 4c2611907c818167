"""What followed the context's last tokens before, against a search through all of it."""

import random
import time

import pytest

from dflash_mlx.lookup import MATCHES, Lookup


def naive(tokens: list[int], count: int) -> tuple[int, list[int]]:
    """The longest match, and the tokens after the last place of it, going round in them."""
    for length in sorted(MATCHES, reverse=True):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                after = tokens[end:]
                return length, [after[i % len(after)] for i in range(count)]
    return 0, []


@pytest.mark.parametrize("alphabet", [1, 2, 3, 20])
def test_finds_what_a_search_through_everything_finds(alphabet: int) -> None:
    dice = random.Random(alphabet)
    tokens = [dice.randrange(alphabet) for _ in range(3)]
    lookup = Lookup(tokens)
    found = set()
    for _ in range(200):
        match, drafts = naive(tokens, 7)
        assert lookup.match == match
        if match:
            assert lookup.draft(7) == drafts
        found.add(match)
        new = [dice.randrange(alphabet) for _ in range(dice.randint(1, 4))]
        lookup.extend(new)
        tokens += new
    assert found == {1: {8}, 2: {2, 8}, 3: {0, 2, 8}, 20: {0, 2}}[alphabet] | (found & {0, 2})


@pytest.mark.parametrize("tokens", [[], [5], [5, 6], [5, 6, 5]])
def test_nothing_matches_in_what_is_too_short(tokens: list[int]) -> None:
    assert Lookup(tokens).match == 0


def test_the_last_place_counts() -> None:
    lookup = Lookup([1, 2, 3, 1, 2, 4, 1, 2])
    assert lookup.match == 2
    assert lookup.draft(1) == [4]


def test_asking_does_not_take_longer_in_a_long_context() -> None:
    def seconds(size: int) -> float:
        lookup = Lookup([i % 500 for i in range(size)])
        start = time.perf_counter()
        for _ in range(300):
            assert lookup.match == 8
            lookup.draft(15)
        return time.perf_counter() - start

    seconds(1000)
    assert min(seconds(200_000) for _ in range(3)) < 10 * min(seconds(2_000) for _ in range(3))
