"""The memory plan against what MLX really takes, and what is refused because of it."""

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3
from tiny import tiny_model

from dflash_mlx import ContextLengthError, OutOfMemoryError, SamplingParams, Session, load
from dflash_mlx import memory as memory_module
from dflash_mlx.config import DrafterConfig
from dflash_mlx.decode import decode
from dflash_mlx.drafter import Drafter, DrafterModel
from dflash_mlx.memory import Held, Plan, available, check_room, plan
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.sampling import Sampler
from dflash_mlx.schedule import Fixed
from dflash_mlx.target import Target

VOCAB = 2048
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,  # Gemma's second embedding
}
STEP = 64
CONTEXTS = (96, 192, 384)


def drafter_for(target: Target, *, window: int = 128, **dflash: int) -> DrafterModel:
    """A random drafter with a sliding and a full layer; `dflash` adds to its `dflash_config`."""
    config = DrafterConfig.from_dict(
        {
            "architectures": ["DFlash2DraftModel"],
            "hidden_size": target.hidden_size,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": target.vocab_size,
            "num_target_layers": len(target.layers),
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": window,
            "is_causal": False,
            "dflash_config": {
                "block_size": 8,
                "mask_token_id": 1,
                "target_layer_ids": [0, 2, 3],
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": 32,
                "selector_top_k": 16,
                **dflash,
            },
        }
    )
    drafter = DrafterModel(config)
    mx.eval(drafter.parameters())
    return drafter


def peak(target: Target, drafter: DrafterModel | None, context: int) -> int:
    """MLX's peak over a reply that ends with this context, above what was held before, in bytes."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    ids = [7 * i % VOCAB for i in range(context - 8)]
    events = decode(
        target,
        target.make_cache(),
        ids,
        Sampler(SamplingParams(), ids, VOCAB, VOCAB),
        drafter=None if drafter is None else Drafter(drafter),
        policy=Fixed(8),
        max_tokens=8,
        prefill_step=STEP,
    )
    for _ in events:
        pass
    return mx.get_peak_memory() - before


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"num_attention_heads": 16}),  # whose scores are a tenth of all
        ("qwen3", {"bits": 8}),
        ("qwen3_moe", {}),
        ("qwen3_5", {}),
        ("gemma4", {}),
        ("gpt_oss", {}),
    ],
)
def test_the_plan_is_within_5_percent_of_what_mlx_takes(family: str, changes: dict[str, int]) -> None:
    target = Target(tiny_model(family, **SIZES | changes), context_length=4096)
    drafter = drafter_for(target)
    for network in (None, drafter):
        if network is not None:
            target.attach(network.config.target_layer_ids)
        planned = plan(target, network, STEP)
        weights = planned.weights + planned.drafter_weights
        for context in CONTEXTS:
            measured = weights + peak(target, network, context)
            assert planned.total(context) == pytest.approx(measured, rel=0.05), (network is not None, context)
    target.detach()


def test_planning_evaluates_nothing() -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6}
    rest = {"max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": False}
    arguments = qwen3.ModelArgs.from_dict({"model_type": "qwen3", **sizes, **heads, **rest})
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    planned = plan(Target(qwen3.Model(arguments)), None)
    assert planned.weights == pytest.approx(8.19e9 * 4, rel=0.01)  # a fresh model is float32
    assert sum(cache.per_row for cache in planned.caches) == 36 * 2 * 8 * 128 * 4
    assert mx.get_peak_memory() - before < 1_000_000


def test_a_drafters_window_bounds_its_cache() -> None:
    target = Target(tiny_model("qwen3", **SIZES))
    sliding, full = plan(target, drafter_for(target, window=8), STEP).drafter_caches
    assert sliding.at(100_000) == sliding.at(10_000)
    assert full.at(100_000) > 50 * full.at(1000)


@pytest.mark.parametrize("bits", [None, 4])
def test_the_rows_of_a_draft_head_are_counted(bits: int | None) -> None:
    target = Target(tiny_model("qwen3", bits=bits, **SIZES))
    whole, part = drafter_for(target), drafter_for(target, draft_head_size=512)
    planned = plan(target, part).drafter_weights - plan(target, whole).drafter_weights
    assert part.head_ids is not None
    target.attach([0])
    gc.collect()
    before = mx.get_active_memory()
    target.attach([0], part.head_ids)
    gc.collect()
    taken = mx.get_active_memory() - before
    assert planned == pytest.approx(taken + part.head_ids.nbytes, rel=0.05)
    target.detach()


# --- what is refused ----------------------------------------------------------------------------


def small(**changes: Any) -> Plan:
    """10 MB of weights, 1 kB of cache a token."""
    facts: dict[str, Any] = {
        "weights": 8_000_000,
        "drafter_weights": 2_000_000,
        "caches": (Held(per_row=1000),),
        "drafter_caches": (),
        "prefill_step": 512,
        "row": 0,
        "score": 0,
        "sight": None,
        "block": 0,
        "longest": 100_000,
    }
    return Plan(**{**facts, **changes})


def test_room_is_the_longest_context_that_fits() -> None:
    planned = small()
    room = planned.room(20_000_000)
    assert planned.total(room) <= 20_000_000 < planned.total(room + 1)
    assert planned.room(10**12) == 100_000
    assert planned.room(0) == 0


def test_a_pair_that_does_not_fit_is_refused_with_what_would() -> None:
    assert check_room(small(), 20_000_000) > 1024
    with pytest.raises(OutOfMemoryError, match="use a variant with fewer bits or drafter 'none'") as caught:
        check_room(small(), 10_100_000)
    assert "not enough memory: 11.5 MB for 1024 tokens of context, of which the weights take 10.0 MB" in str(
        caught.value
    )
    with pytest.raises(OutOfMemoryError, match="use a variant with fewer bits, or close"):
        check_room(small(), 5_000_000)


def test_the_table_says_what_fits() -> None:
    table = small().table((1000, 20_000), 20_000_000)
    assert [line.split()[-2:] for line in table.splitlines()][-1] == ["too", "large"]
    assert "fits" in table
    assert "target weights          8.0 MB      8.0 MB" in table


def test_loading_stops_before_the_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "available", lambda: 6_000_000)
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with pytest.raises(OutOfMemoryError, match="not enough memory"):
        load(EMBEDDED.target, "none")
    assert mx.get_peak_memory() - before < 1_000_000


@pytest.fixture
def cramped(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Session]:
    """The embedded target where there is memory for some 1500 of its 4096 tokens."""

    def load_it() -> Session:
        full = plan(load(EMBEDDED.target, "none", dequantize=True).target, None)
        monkeypatch.setattr(memory_module, "available", lambda: full.total(1500))
        return load(EMBEDDED.target, "none", dequantize=True)

    return load_it


def test_a_request_that_would_not_fit_is_refused_and_the_next_one_served(
    cramped: Callable[[], Session],
) -> None:
    session = cramped()
    assert session.room is not None
    assert 1024 <= session.room < 4096
    assert session.context_window == session.room
    assert f"there is memory for {session.room:,} tokens of context" in session.notes
    limit = f"maximum context length is {session.room} tokens here, for want of memory; shorten"
    with pytest.raises(ContextLengthError, match=limit) as caught:
        session.generate([5] * 2000)
    assert caught.value.http_status == 400
    assert len(session.generate([5] * 20, SamplingParams(max_tokens=4)).tokens) == 4
    nearly = session.room - 3
    assert len(session.generate([5] * nearly, SamplingParams(max_tokens=50)).tokens) <= 3


def test_available_memory_is_plausible() -> None:
    assert 100_000_000 < available() < 10**13
