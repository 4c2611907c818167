"""selector_walk: against its contract, and against the walk of the drafter."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from dflash_metal import launch, reference

from dflash_mlx.drafter.selector import CandidateSelector
from metal.conftest import Backend
from metal.layers import floats

VOCABULARY = 300
ANCHOR = 17


@dataclass(frozen=True)
class Draft:
    """What a walk starts from."""

    candidates: mx.array  # [L, C]
    unary: mx.array  # [L, C]
    noise: mx.array  # [L, C]
    hidden: mx.array  # [L, R]
    predecessors: mx.array  # [V, R]
    successors: mx.array  # [V, R]

    @classmethod
    def random(
        cls, seed: int, *, L: int = 7, C: int = 16, R: int = 80, dtype: mx.Dtype = mx.float32
    ) -> Draft:
        rng = np.random.default_rng(seed)
        candidates = np.stack([rng.permutation(VOCABULARY)[:C] for _ in range(L)]).astype(np.uint32)
        shapes = ((L, C), (L, C), (L, R), (VOCABULARY, R), (VOCABULARY, R))
        unary, noise, hidden, pred, succ = (mx.array(rng.normal(size=s).astype(np.float32)) for s in shapes)
        parts = (part.astype(dtype) for part in (hidden * 0.3, pred, succ))
        return cls(mx.array(candidates), unary.astype(dtype), noise, *parts)

    def walk(self, backend: Backend, noise: mx.array | None = None, temperature: float = 1.0) -> list[int]:
        path = launch.selector_walk(
            *(self.candidates, self.unary, self.hidden, self.predecessors, self.successors, ANCHOR),
            noise=noise,
            temperature=temperature,
            make=backend.make,
        )
        return [int(token) for token in np.array(path)]

    def expected(self, noise: mx.array | None = None, temperature: float = 1.0) -> list[int]:
        path = reference.selector_walk(
            np.array(self.candidates),
            floats(self.unary),
            floats(self.hidden),
            floats(self.predecessors),
            floats(self.successors),
            ANCHOR,
            noise=None if noise is None else floats(noise),
            temperature=temperature,
        )
        return path.tolist()


@pytest.mark.parametrize("dtype", launch.DTYPES, ids=lambda dtype: str(dtype).rpartition(".")[2])
def test_contract(backend: Backend, dtype: mx.Dtype) -> None:
    for seed in range(10):
        draft = Draft.random(seed, dtype=dtype)
        assert draft.walk(backend) == draft.expected()
        assert draft.walk(backend, draft.noise, 0.7) == draft.expected(draft.noise, 0.7)


@pytest.mark.parametrize(("L", "C", "R"), [(1, 8, 32), (15, 32, 256), (4, 2, 16), (3, 5, 33)])
def test_other_shapes(backend: Backend, L: int, C: int, R: int) -> None:
    draft = Draft.random(L, L=L, C=C, R=R)
    assert draft.walk(backend, draft.noise, 1.3) == draft.expected(draft.noise, 1.3)


def test_first_among_equals(backend: Backend) -> None:
    draft = Draft.random(0)
    nothing = mx.zeros_like(draft.successors)
    draft = Draft(draft.candidates, mx.zeros((7, 16)), draft.noise, draft.hidden, nothing, nothing)
    assert draft.walk(backend) == draft.expected() == draft.candidates[:, 0].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_path_of_the_drafter(backend: Backend, temperature: float) -> None:
    """The engine's walk scores all pairs at once and picks its candidates itself; the path is the same."""
    for seed in range(10):
        draft = Draft.random(seed)
        rng = np.random.default_rng(seed)
        logits, noise = (mx.array(rng.normal(size=(7, VOCABULARY)).astype(np.float32)) for _ in range(2))
        selector = CandidateSelector(hidden_size=80, vocab_size=VOCABULARY, rank=80, top_k=16)
        selector.predecessor_codebook, selector.successor_codebook = draft.predecessors, draft.successors
        selector.hidden_projection.weight = mx.eye(80)
        sampled = noise if temperature else None
        path = selector.walk(draft.hidden, logits, ANCHOR, temperature, sampled)
        promise = logits / temperature + noise if temperature else logits
        candidates = mx.argpartition(promise, -16, axis=-1)[:, -16:]
        unary, own_noise = (mx.take_along_axis(array, candidates, axis=-1) for array in (logits, noise))
        draft = Draft(candidates, unary, own_noise, draft.hidden, draft.predecessors, draft.successors)
        walk = draft.walk(backend, own_noise, temperature) if temperature else draft.walk(backend)
        assert walk == path.tolist()


def test_limits() -> None:
    backend = Backend(mx.fast.metal_kernel, lambda calls: None)
    with pytest.raises(ValueError, match="33 candidates"):
        Draft.random(0, C=33).walk(backend)
    with pytest.raises(ValueError, match="1 slots of 4"):
        Draft.random(0, L=1, C=4).walk(backend)
