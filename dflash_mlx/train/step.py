"""One training step, which the drafter's and the demo target's trainings share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx import nn

Step = Callable[..., float]
"""(arguments of the loss) -> the loss before the step."""


def make_step(model: nn.Module, optimizer: Any, loss: Callable[..., mx.array], clip: float = 1.0) -> Step:
    """A function that moves `model` in place down the gradient of `loss(model, ...)`, clipped to a norm."""
    loss_and_gradient = nn.value_and_grad(model, loss)

    def step(*args: Any) -> float:
        value, gradient = loss_and_gradient(model, *args)
        gradient, _ = optim.clip_grad_norm(gradient, clip)
        optimizer.update(model, gradient)
        mx.eval(value, model.parameters(), optimizer.state)
        return float(value.item())

    return step
