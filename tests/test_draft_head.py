"""A drafter that proposes from a list of token ids: the same text, from fewer rows of the target's head."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_map
from tiny import VOCAB, tiny_model
from train_tiny import DRAFTER

from dflash_mlx.decode import decode
from dflash_mlx.drafter import Drafter, DrafterModel
from dflash_mlx.events import Block
from dflash_mlx.params import SamplingParams
from dflash_mlx.sampling import Sampler
from dflash_mlx.schedule import Fixed
from dflash_mlx.target import Target
from dflash_mlx.target.head import TargetHead

IDS = mx.array([3, 4, 17, 40, 41, 42, 99, 120])
PROMPT = [7, 40, 3, 99, 4]


def random_drafter(rank: int, size: int = len(IDS)) -> DrafterModel:
    """Large enough weights for drafts that differ from slot to slot."""
    config = replace(DRAFTER, hidden_size=64, vocab_size=VOCAB, selector_rank=rank, draft_head_size=size)
    mx.random.seed(3)
    model = DrafterModel(config)
    model.update(
        tree_map(
            lambda a: mx.random.normal(a.shape) * 0.3 if mx.issubdtype(a.dtype, mx.floating) else a,
            model.parameters(),
        )
    )
    if size:
        model.draft_head_ids = IDS
    return model


@pytest.mark.parametrize(("bits", "mode"), [(None, "affine"), (4, "affine"), (8, "affine"), (4, "mxfp4")])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])  # tied, a head of its own, scaled embeddings
def test_the_rows_of_a_head_are_its_logits_for_these_ids(family: str, bits: int | None, mode: str) -> None:
    target = Target(tiny_model(family, bits=bits, mode=mode))
    hidden = mx.random.normal((1, 5, 64))
    rows = target.head_rows(IDS)
    np.testing.assert_allclose(rows(hidden), target.head(hidden)[..., IDS], atol=1e-5, rtol=1e-5)
    assert {array.shape[0] for array in rows.arrays} == {len(IDS)}
    assert target.head(hidden).shape[-1] == VOCAB


def test_a_head_with_a_bias_and_a_head_of_another_kind() -> None:
    hidden = mx.random.normal((2, 16))
    linear = nn.Linear(16, VOCAB)
    rows = TargetHead(linear, tied=False).rows(IDS)
    np.testing.assert_allclose(rows(hidden), linear(hidden)[:, IDS], atol=1e-6)

    class Adapted(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) * 2

    adapted = Adapted(16, VOCAB)
    rows = TargetHead(adapted, tied=False).rows(IDS)
    np.testing.assert_allclose(rows(hidden), adapted(hidden)[:, IDS], atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rank", [0, 4])
def test_proposals_are_those_of_the_whole_head_with_all_other_tokens_ruled_out(
    rank: int, temperature: float
) -> None:
    target = Target(tiny_model("qwen3"))
    others = mx.array(np.setdiff1d(np.arange(VOCAB), np.array(IDS)))

    def masked(hidden: mx.array) -> mx.array:
        logits = target.head(hidden)
        logits[..., others] = -1e9
        return logits

    noise = mx.random.gumbel((3, VOCAB)) if temperature else None
    drafts = []
    for model, head in ((random_drafter(rank), target.head_rows(IDS)), (random_drafter(rank, 0), masked)):
        drafter = Drafter(model)
        mx.random.seed(4)
        drafter.extend(mx.random.normal((1, 6, 128)))
        draft = drafter.propose(7, 4, target.embed, head, temperature, noise)
        drafts.append(draft.tokens.tolist())
        assert draft.finite.item()
    assert drafts[0] == drafts[1]
    assert set(drafts[0]) <= set(IDS.tolist())  # type: ignore[arg-type]  # one axis


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bits", [None, 4])
def test_the_text_is_the_targets_own(bits: int | None, temperature: float) -> None:
    target = Target(tiny_model("qwen3_5", bits=bits), context_length=4096)
    params = SamplingParams(temperature=temperature, seed=5)
    proposed: set[int] = set()

    def reply(model: DrafterModel | None) -> list[int]:
        sampler = Sampler(params, PROMPT, target.vocab_size)
        drafter = None if model is None else Drafter(model)
        events = list(
            decode(
                target,
                target.make_cache(),
                PROMPT,
                sampler,
                drafter=drafter,
                policy=Fixed(4),
                max_tokens=40,
            )
        )
        proposed.update(token for event in events if isinstance(event, Block) for token in event.rejected)
        return [token for event in events for token in event.tokens]

    plain = reply(None)
    model = random_drafter(4)
    target.attach(model.config.target_layer_ids, model.head_ids)
    assert reply(model) == plain
    assert proposed
    assert proposed <= set(IDS.tolist())  # type: ignore[arg-type]  # one axis
    target.detach()
    assert target.draft_head(mx.zeros((1, 1, 64))).shape[-1] == VOCAB
