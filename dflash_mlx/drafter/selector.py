"""Candidate selector (DFlash 2): one coherent path through the best candidates of every draft slot.

The score of candidate c at slot i after predecessor p is
`logit_i(c) + sum_r pred[p, r] * (W h_i)[r] * succ[c, r]`, and the walk takes the best candidate at each slot.
"""

import mlx.core as mx
from mlx import nn

from dflash_mlx.kernels import Walker


class CandidateSelector(nn.Module):
    """Codebooks `[V, R]` for predecessors and successors, and the projection W: H -> R between them."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = mx.zeros((vocab_size, rank))
        self.successor_codebook = mx.zeros((vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def walk(
        self,
        hidden: mx.array,
        logits: mx.array,
        anchor: int,
        temperature: float = 0.0,
        noise: mx.array | None = None,
        walker: Walker | None = None,
        ids: mx.array | None = None,
    ) -> mx.array:
        """The best path, or with noise a draw: candidates and choices by score / temperature + noise.

        Args:
            hidden: final hidden states of the draft slots, `[L, H]`.
            logits: their unary logits, `[L, V]`.
            anchor: the token before the first slot.
            temperature, noise: of the target's own choice at these positions, `[L, V]`; greedy without.
            walker: a kernel that goes the whole way at once; it may choose otherwise between near equals.
            ids: the tokens that the columns of logits and noise stand for; None: every token, in order.

        Returns:
            Token ids, `[L]`.
        """
        promise = logits if noise is None else logits / temperature + noise
        candidates = mx.argpartition(promise, -self.top_k, axis=-1)[:, -self.top_k :]  # [L, C]
        unary = mx.take_along_axis(logits, candidates, axis=-1)  # [L, C]
        if noise is not None:
            noise = mx.take_along_axis(noise, candidates, axis=-1)
        if ids is not None:
            candidates = ids[candidates]
        if walker is None:
            return self._follow(hidden, candidates, unary, anchor, temperature, noise)
        codebooks = self.predecessor_codebook, self.successor_codebook
        projected = self.hidden_projection(hidden)
        candidates = candidates.astype(mx.uint32)
        return walker(candidates, unary, projected, *codebooks, anchor, temperature=temperature, noise=noise)

    def _follow(
        self,
        hidden: mx.array,
        candidates: mx.array,
        unary: mx.array,
        anchor: int,
        temperature: float,
        noise: mx.array | None,
    ) -> mx.array:
        """The walk in MLX's own ops; `candidates`, `unary` and `noise` are `[L, C]`.

        The best successor of *every* candidate is found at once, so that the walk itself only follows
        pointers: one small gather a slot where scoring slot by slot would launch eight ops.
        """
        first = mx.full((1, self.top_k), anchor, dtype=candidates.dtype)
        predecessors = mx.concatenate([first, candidates[:-1]])  # [L, C]
        scores = unary[:, None].astype(mx.float32) + self.edges(hidden, predecessors, candidates)
        if noise is not None:
            scores = scores / temperature + noise[:, None]
        best = mx.argmax(scores, axis=-1)  # [L, C]: the best successor of each predecessor
        slots = mx.arange(0, candidates.size, self.top_k, dtype=best.dtype)[:, None]  # where each begins
        pointers = (best + slots).flatten()  # [L * C]: places in the flattened candidates
        path = [pointers[:1]]  # every predecessor of the first slot is the anchor
        later = pointers[self.top_k :]
        for _ in range(1, candidates.shape[0]):
            path.append(mx.take(later, path[-1]))
        return mx.take(candidates.flatten(), mx.concatenate(path))

    def edges(self, hidden: mx.array, predecessors: mx.array, successors: mx.array) -> mx.array:
        """Edge scores `[L, P, S]` in float32 of every successor `[L, S]` after every predecessor `[L, P]`."""
        pred = self.predecessor_codebook[predecessors] * self.hidden_projection(hidden)[:, None]  # [L, P, R]
        succ = self.successor_codebook[successors]  # [L, S, R]
        return (pred @ succ.swapaxes(-1, -2)).astype(mx.float32)
