"""The optimizer that both trainings share: AdamW with a warm-up and a cosine."""

from __future__ import annotations

import mlx.core as mx
import mlx.optimizers as optim


def make_optimizer(
    steps: int, peak: float, warmup: int, weight_decay: float, final_share: float = 0.03
) -> optim.MultiOptimizer:
    """AdamW whose rate rises linearly for `warmup` steps, then falls along a cosine to `final_share` of its
    peak.

    Only matrices decay: pulling norm weights, biases and decay rates towards zero has no purpose.
    """
    rate = optim.join_schedules(
        [
            optim.linear_schedule(peak / warmup, peak, warmup),
            optim.cosine_decay(peak, max(steps - warmup, 1), end=peak * final_share),
        ],
        [warmup],
    )
    betas = [0.9, 0.95]
    matrices = optim.AdamW(rate, betas=betas, weight_decay=weight_decay)
    others = optim.AdamW(rate, betas=betas, weight_decay=0.0)
    return optim.MultiOptimizer([matrices, others], [_is_matrix])


def _is_matrix(_path: str, weight: mx.array) -> bool:
    return weight.ndim == 2
