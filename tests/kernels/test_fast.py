"""Fast numerics on a GPU that is not there: speculation changes no token, and what was given up is said."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pretend
import pytest
from tiny import tiny_model

from dflash_mlx import SamplingParams, Session, UsageError, load
from dflash_mlx.generate import statistics
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.target import Target
from dflash_mlx.target.exactness import EXACT, FAST

PARAMS = SamplingParams(max_tokens=16)


def session(folder: Path, maker: pretend.Maker, *, fast: bool = True, drafter: bool = True) -> Session:
    """The embedded pair in bfloat16, as a Mac would load it."""
    here = load(EMBEDDED.target)
    here.target.model.set_dtype(mx.bfloat16)
    target = Target(here.target.model, here.target.context_length, pretend.kernels(folder, maker, fast=fast))
    here.close()
    return Session(target, here.tokenizer, here.drafter if drafter else None, block_size=5 if drafter else 1)


def test_tokens_are_the_same_with_speculation_without_and_without_a_drafter(
    tmp_path: Path, held_out: list[str]
) -> None:
    pair, plain = session(tmp_path, pretend.Maker()), session(tmp_path, pretend.Maker(), drafter=False)
    result = pair.generate(held_out[0], PARAMS)
    assert sum(c.accepted for c in result.cycles) > 0
    assert sum(c.drafted - c.accepted for c in result.cycles) > 0
    assert pair.generate(held_out[0], PARAMS, speculative=False).tokens == result.tokens
    assert plain.generate(held_out[0], PARAMS).tokens == result.tokens
    assert pair.exactness == plain.exactness == FAST
    assert FAST in statistics(result, pair.exactness)


def test_plain_steps_take_the_tile_and_prompts_do_not(tmp_path: Path) -> None:
    maker = pretend.Maker()
    model = tiny_model("qwen3", bits=8, hidden_size=96, head_dim=64)
    model.set_dtype(mx.bfloat16)
    target = Target(model, 4096, pretend.kernels(tmp_path, maker, fast=True))
    target.attach_linears()
    maker.calls.clear()
    caches = target.make_cache()
    target.forward(mx.arange(5), caches)
    assert not maker.calls
    target.forward(mx.arange(1), caches)
    assert maker.calls == {("dflash_qmm_few", 1): 17}


def test_where_no_layer_takes_the_tile_numerics_are_exact(tmp_path: Path) -> None:
    broken = session(tmp_path, pretend.Maker(problem="no matrices"))
    assert broken.exactness == EXACT
    assert any("no matrices" in line for line in broken.fallbacks)


@pytest.mark.skipif(mx.metal.is_available(), reason="this is a Mac")
def test_on_the_cpu_there_is_no_difference_and_that_is_said() -> None:
    pair = load(EMBEDDED.target, numerics="fast")
    assert "there is no GPU: numerics are exact" in pair.notes
    assert pair.exactness == EXACT


@pytest.mark.parametrize("numerics", ["", "EXACT", None, 1])
def test_other_numerics_are_refused(numerics: Any) -> None:
    with pytest.raises(UsageError, match=f"numerics is {numerics!r}: it must be exact or fast"):
        load(numerics=numerics)
