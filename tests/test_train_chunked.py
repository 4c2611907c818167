"""The chunked delta rule against mlx-lm's own per-token recurrence."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops, normalize_qk
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

from dflash_mlx.train.chunked import (
    ChunkedGatedDeltaNet,
    chunked_delta_rule,
    unit_lower_inverse,
    use_chunked_delta_rule,
)

SMALL = TextModelArgs(
    model_type="qwen3_5",
    hidden_size=64,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_agrees_with_the_recurrence(length: int) -> None:
    mx.random.seed(length)
    q, k = normalize_qk(*mx.random.normal((2, 2, length, 3, 16)), inv_scale=16**-0.5, eps=1e-6)
    v = mx.random.normal((2, length, 3, 24))
    log_decay = -mx.random.uniform(0, 3, (2, length, 3))
    beta = mx.random.uniform(0, 1, (2, length, 3))
    expected, _ = gated_delta_ops(q, k, v, mx.exp(log_decay), beta)
    np.testing.assert_allclose(chunked_delta_rule(q, k, v, log_decay, beta), expected, atol=2e-6, rtol=1e-4)


def test_stays_exact_when_one_key_repeats() -> None:
    """Full writes of one key without decay: the powers of this matrix reach 10^8, its inverse does not."""
    inverse = unit_lower_inverse(mx.tril(mx.ones((32, 32)), -1))
    np.testing.assert_array_equal(inverse, np.eye(32) - np.eye(32, k=-1))


def test_inverse_gradient_agrees_with_finite_differences() -> None:
    mx.random.seed(0)
    lower = mx.tril(mx.random.normal((8, 8)) * 0.3, -1)
    direction = mx.tril(mx.random.normal((8, 8)), -1)
    weight = mx.random.normal((8, 8))
    gradient = mx.grad(lambda x: (unit_lower_inverse(x) * weight).sum())(lower)
    step = 1e-3
    ahead, behind = (unit_lower_inverse(lower + sign * step * direction) for sign in (1, -1))
    numeric = ((ahead - behind) * weight).sum() / (2 * step)
    assert (gradient * direction).sum().item() == pytest.approx(numeric.item(), rel=1e-2)


def test_swapped_mixer_gives_the_same_output_and_gradient() -> None:
    mx.random.seed(1)
    mixer = GatedDeltaNet(SMALL)
    mixer.A_log = mx.log(mx.array([0.5, 1.0, 4.0, 16.0]))
    x = mx.random.normal((2, 45, 64))

    def loss(module: nn.Module, inputs: mx.array) -> mx.array:
        return mx.square(module(inputs)).sum()

    mixer.train()
    expected, expected_gradient = mixer(x), nn.value_and_grad(mixer, loss)(mixer, x)[1]
    use_chunked_delta_rule(mixer)
    assert type(mixer) is ChunkedGatedDeltaNet
    np.testing.assert_allclose(mixer(x), expected, atol=1e-5, rtol=1e-4)
    gradient = nn.value_and_grad(mixer, loss)(mixer, x)[1]
    for name in ("A_log", "dt_bias"):
        np.testing.assert_allclose(gradient[name], expected_gradient[name], atol=1e-4, rtol=1e-3)
    for name in ("in_proj_qkv", "in_proj_b", "conv1d"):
        np.testing.assert_allclose(
            gradient[name]["weight"], expected_gradient[name]["weight"], atol=1e-4, rtol=1e-3
        )
