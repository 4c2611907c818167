"""After every cycle the caches are, bit for bit, those of a cold run of one token at a time."""

import random
from typing import Any

import mlx.core as mx
import pytest
from tiny import FAMILIES, ROW_WISE, VOCAB, WINDOWED, tiny_model, tiny_target

from dflash_mlx.errors import UnsupportedTargetError
from dflash_mlx.target import Target
from dflash_mlx.target.attach import Mixin, attach
from dflash_mlx.target.caches import arrays, check_rollback

BLOCK = 8
EXACT = [*FAMILIES, *ROW_WISE]


def tokens(n: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCAB) for _ in range(n)]


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("family", EXACT)
def test_verify_rows_and_caches_equal_one_token_at_a_time(family: str, bits: int | None) -> None:
    target = tiny_target(family, bits=bits)
    block_caches, cold_caches = target.make_cache(), target.make_cache()
    context = mx.array(tokens(12))
    target.forward(context, block_caches)
    target.forward(context, cold_caches)
    for cycle, keep in enumerate([8, 1, 2, 7, 3, 4, 6, 5, 1, 1, 8]):
        block = tokens(BLOCK, seed=cycle + 1)
        logits, taps = target.verify(mx.array(block), block_caches)
        target.commit(keep, BLOCK)
        cold = [target.forward(mx.array([token]), cold_caches) for token in block[:keep]]
        assert taps is not None
        for row, (cold_logits, cold_taps) in enumerate(cold):
            assert cold_taps is not None
            assert mx.array_equal(logits[row], cold_logits[0]), f"logits of row {row}, cycle {cycle}"
            assert mx.array_equal(taps[:, row], cold_taps[:, 0]), f"taps of row {row}, cycle {cycle}"
        held, expected = arrays(block_caches), arrays(cold_caches)
        assert len(held) == len(expected) > 0
        for index, (a, b) in enumerate(zip(held, expected, strict=True)):
            assert a.shape == b.shape
            assert mx.array_equal(a, b), f"cache array {index} after keeping {keep}"


@pytest.mark.parametrize("family", EXACT)
def test_keeping_nothing_undoes_the_block(family: str) -> None:
    target = tiny_target(family)
    caches = target.make_cache()
    target.forward(mx.array(tokens(5)), caches)
    before = [mx.array(a) for a in arrays(caches)]
    for rows in (1, 4):
        target.verify(mx.array(tokens(rows)), caches)
        target.commit(0, rows)
        for a, b in zip(arrays(caches), before, strict=True):
            assert mx.array_equal(a, b)


@pytest.mark.parametrize("family", EXACT)
def test_an_error_in_the_middle_of_the_verify_pass_undoes_the_block(family: str) -> None:
    """Some layers have written their caches when a later one fails."""
    target = tiny_target(family)
    caches = target.make_cache()
    target.forward(mx.array(tokens(5)), caches)
    before = [mx.array(a) for a in arrays(caches)]
    undo = attach(target.layers[-1], Failing)
    with pytest.raises(KeyboardInterrupt):
        target.verify(mx.array(tokens(4)), caches)
    undo()
    target.commit(0, 4)
    for a, b in zip(arrays(caches), before, strict=True):
        assert mx.array_equal(a, b)


class Failing(Mixin):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt


def test_row_wise_runs_exactly_where_a_module_branches_on_a_single_row() -> None:
    found = {
        family: {type(rows.module).__bases__[1].__name__ for rows in tiny_target(family)._row_wise}
        for family in EXACT
    }
    assert found.pop("deepseek_v3") == {"DeepseekV3Attention"}
    assert found.pop("falcon_h1") == {"FalconH1Mixer"}
    assert found == {family: set() for family in FAMILIES}


@pytest.mark.parametrize("family", WINDOWED)
def test_a_cache_that_keeps_rejected_tokens_is_refused(family: str) -> None:
    target = Target(tiny_model(family))
    with pytest.raises(UnsupportedTargetError, match=r"cache 0 .* RotatingKVCache.*'none'"):
        target.attach([0])
    logits, taps = target.forward(mx.array(tokens(3)), target.make_cache())
    assert logits.shape == (3, VOCAB)
    assert taps is None


def test_a_recurrent_cache_that_nobody_was_seen_to_update_is_refused() -> None:
    caches = tiny_target("qwen3_5").make_cache()
    with pytest.raises(UnsupportedTargetError, match=r"cache 0 .* ArraysCache"):
        check_rollback(caches, replayed=[])
