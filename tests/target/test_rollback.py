"""After every cycle the caches are, bit for bit, those of a cold run of one token at a time."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from prove import assert_exact, tokens
from tiny import EXACT, FAMILIES, VOCAB, WINDOW, WINDOWED, tiny_model, tiny_target

from dflash_mlx.errors import UnsupportedTargetError
from dflash_mlx.target import Target
from dflash_mlx.target.attach import Mixin, attach
from dflash_mlx.target.caches import arrays, check_rollback
from dflash_mlx.target.rowwise import RowWise
from dflash_mlx.target.window import WindowCache

KEEPS = [8, 1, 2, 7, 3, 4, 6, 5, 1, 1, 8]


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("family", EXACT)
def test_verify_rows_and_caches_equal_one_token_at_a_time(family: str, bits: int | None) -> None:
    assert_exact(tiny_target(family, bits=bits), context=12, keeps=KEEPS)


@pytest.mark.parametrize("context", [1, WINDOW - 3, WINDOW, WindowCache.align + WINDOW - 6])
@pytest.mark.parametrize("family", WINDOWED)
def test_windows_are_exact_in_contexts_of_any_length(family: str, context: int) -> None:
    """Shorter than the window, as long, and where the keys that a block is handed start at a later row."""
    assert_exact(tiny_target(family), context=context, keeps=[3, 8, 1, 5])


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gpt_oss"])
def test_windows_are_exact_when_their_buffer_is_compacted_in_every_other_block(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WindowCache, "step", 11)
    monkeypatch.setattr(WindowCache, "align", 4)
    assert_exact(tiny_target(family), context=12, keeps=KEEPS)


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
    assert found == {family: set() for family in [*FAMILIES, *WINDOWED]}


@pytest.mark.parametrize("context", [12, WindowCache.align + WINDOW - 6])
def test_windowed_attention_is_exact_row_by_row_too(context: int) -> None:
    target = tiny_target("gemma3")
    target._row_wise = [RowWise(layer.self_attn) for layer in target.layers]
    assert_exact(target, context, keeps=[3, 8, 1])


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (RotatingKVCache(max_size=8, keep=4), "besides its window it keeps the first 4 tokens"),
        (ChunkedKVCache(8), "drops old rows"),
        (QuantizedKVCache(), "attention over quantized keys"),
        (ConcatenateKVCache(), "rejected tokens stay in it"),
    ],
)
def test_a_cache_that_cannot_be_rolled_back_is_refused_in_one_line(cache: Any, reason: str) -> None:
    for caches in ([KVCache(), cache], [KVCache(), CacheList(WindowCache(8), cache)]):
        with pytest.raises(UnsupportedTargetError) as refused:
            check_rollback(caches, replayed=[])
        message = str(refused.value)
        assert message.startswith(f"cache 1 of this target is a {type(cache).__name__}, ")
        assert reason in message
        assert "'none'" in message
        assert "\n" not in message


def test_a_target_whose_windows_keep_their_first_tokens_still_decodes_plainly() -> None:
    model = tiny_model("gemma3")
    model.make_cache = lambda: [RotatingKVCache(max_size=WINDOW, keep=2) for _ in model.layers]
    target = Target(model)
    with pytest.raises(UnsupportedTargetError, match=r"cache 0 .* RotatingKVCache.*first 2 tokens.*'none'"):
        target.attach([0])
    logits, taps = target.forward(mx.array(tokens(3)), target.make_cache())
    assert logits.shape == (3, VOCAB)
    assert taps is None


def test_a_recurrent_cache_that_nobody_was_seen_to_update_is_refused() -> None:
    caches = tiny_target("qwen3_5").make_cache()
    with pytest.raises(UnsupportedTargetError, match=r"cache 0 .* ArraysCache"):
        check_rollback(caches, replayed=[])
