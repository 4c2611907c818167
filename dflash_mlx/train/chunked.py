"""The gated delta rule in chunks: what makes training a Gated DeltaNet layer affordable.

Decoding runs the recurrence token by token, with a decay g_t in (0, 1], a write strength beta_t, unit keys
k_t and a state S [K, V]:

    S <- g_t S;   S <- S + k_t beta_t (v_t - k_t^T S);   y_t = q_t^T S

Inside a chunk the writes of earlier tokens reach later ones only through k_i . k_j, a lower triangular
system, so C steps become a handful of matrix products (the WY form of Yang et al., "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length", 2024; decay as in "Gated Delta Networks", 2025).
Only T / C steps stay sequential, and everything is differentiable.

This file knows mlx-lm's Qwen3.5 mixer and nothing about losses, data or drafters.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.gated_delta import normalize_qk
from mlx_lm.models.qwen3_5 import GatedDeltaNet

CHUNK = 32


@cache
def _merge_masks(size: int) -> tuple[np.ndarray, ...]:
    """For block widths 1, 2, 4, ...

    below `size`: the lower left block of every diagonal pair of blocks, as [C, C].
    """
    row, column = np.indices((size, size))
    widths = (1 << level for level in range((size - 1).bit_length()))
    return tuple(
        ((row // width == column // width + 1) & (row // width % 2 == 1)).astype(np.float32)
        for width in widths
    )


def unit_lower_inverse(lower: mx.array) -> mx.array:
    """(I + lower)^-1 for strictly lower triangular `lower` [..., C, C], C a power of two.

    Neighbouring diagonal blocks are merged level by level: the inverse of [[P, 0], [M, R]] has
    -R^-1 M P^-1 in its corner. Summing the powers of `lower` costs the same, but those powers exceed
    fp32's precision when keys repeat.
    """
    inverse: mx.array = _unit_lower_inverse(lower)  # type: ignore[assignment]  # declared as object
    return inverse


@mx.custom_function
def _unit_lower_inverse(lower: mx.array) -> mx.array:
    inverse = mx.eye(lower.shape[-1])
    for mask in _merge_masks(lower.shape[-1]):
        inverse = inverse - inverse @ (lower * mx.array(mask)) @ inverse
    return inverse


@_unit_lower_inverse.vjp
def _unit_lower_inverse_vjp(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    """d(X^-1) = -X^-1 dX X^-1, so the gradient is -X^-T G X^-T; the caller's mask drops its upper half."""
    transposed = output.swapaxes(-1, -2)
    return -(transposed @ cotangent @ transposed)


def chunked_delta_rule(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, chunk: int = CHUNK
) -> mx.array:
    """Outputs of the gated delta rule from an empty state.

    Args: q, k [B, T, H, K] (normalised, q scaled), v [B, T, H, V], log_decay and beta [B, T, H]. Returns
    [B, T, H, V].
    """
    batch, length, heads, _ = q.shape
    padding = -length % chunk

    def blocks(x: mx.array) -> mx.array:
        # A padded token has k = 0 and beta = 0: it writes nothing and leaves the decay alone.
        x = mx.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, -1, chunk, *x.shape[2:])  # [B, N, C, H, ...]
        return x.transpose(1, 0, 3, 2, *range(4, x.ndim))  # [N, B, H, C, ...]

    q, k, v, log_decay, beta = blocks(q), blocks(k), blocks(v), blocks(log_decay), blocks(beta)
    total = mx.cumsum(log_decay, axis=-1)  # [N, B, H, C]: log of the decay since the chunk began
    causal = mx.tril(mx.ones((chunk, chunk)))
    strict = mx.tril(mx.ones((chunk, chunk)), -1)
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    decay = mx.exp((total[..., :, None] - total[..., None, :]) * causal)  # [N, B, H, C, C]

    k_beta = k * beta[..., None]
    since_start = mx.exp(total)[..., None]
    solve = unit_lower_inverse((k_beta @ k.swapaxes(-1, -2)) * (decay * strict))
    new_values = solve @ (v * beta[..., None])  # [N, B, H, C, V]: the writes, were the state empty
    old_keys = solve @ (k_beta * since_start)  # [N, B, H, C, K]: what the writes take back from the state
    scores = (q @ k.swapaxes(-1, -2)) * (decay * causal)  # [N, B, H, C, C]
    q_state = q * since_start
    k_state = k * mx.exp(total[..., -1:] - total)[..., None]
    chunk_decay = mx.exp(total[..., -1])[..., None, None]  # [N, B, H, 1, 1]

    # mx.split rather than indexing: its gradient is one concatenation instead of N padded sums.
    count = q.shape[0]
    parts = [mx.split(x, count) for x in (new_values, old_keys, scores, q_state, k_state, chunk_decay)]
    state = mx.zeros((1, batch, heads, k.shape[-1], v.shape[-1]))
    outputs = []
    for new, old, score, q_now, k_now, decay_now in zip(*parts, strict=True):
        written = new - old @ state
        outputs.append(q_now @ state + score @ written)
        state = state * decay_now + k_now.swapaxes(-1, -2) @ written
    y = mx.concatenate(outputs)  # [N, B, H, C, V]
    return y.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, v.shape[-1])[:, :length]


class ChunkedGatedDeltaNet(GatedDeltaNet):
    """mlx-lm's mixer with the chunked rule for whole sequences; with a cache or a mask it is mlx-lm's own."""

    def __call__(self, inputs: mx.array, mask: mx.array | None = None, cache: Any | None = None) -> mx.array:
        if mask is not None or cache is not None:
            return super().__call__(inputs, mask, cache)
        batch, length, _ = inputs.shape
        q, k, v = mx.split(
            nn.silu(self._causal_conv(self.in_proj_qkv(inputs))), [self.key_dim, 2 * self.key_dim], axis=-1
        )
        q = q.reshape(batch, length, self.num_k_heads, self.head_k_dim)  # [B, T, Hk, K]
        k = k.reshape(batch, length, self.num_k_heads, self.head_k_dim)  # [B, T, Hk, K]
        v = v.reshape(batch, length, self.num_v_heads, self.head_v_dim)  # [B, T, Hv, V]
        q, k = normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=1e-6)
        share = self.num_v_heads // self.num_k_heads
        log_decay = -mx.exp(self.A_log) * nn.softplus(self.in_proj_a(inputs) + self.dt_bias)
        y = chunked_delta_rule(
            mx.repeat(q, share, axis=2),
            mx.repeat(k, share, axis=2),
            v,
            log_decay,
            mx.sigmoid(self.in_proj_b(inputs)),
        )
        z = self.in_proj_z(inputs).reshape(batch, length, self.num_v_heads, self.head_v_dim)
        return self.out_proj(self.norm(y, z).reshape(batch, length, -1))

    def _causal_conv(self, x: mx.array) -> mx.array:
        """The depthwise convolution as shifted products:

        MLX's grouped convolution is slow on the CPU. x [B, T, C].
        """
        taps, length = self.conv_kernel_size, x.shape[1]
        kernel = self.conv1d.weight[..., 0].T  # [taps, C]
        padded = mx.pad(x, [(0, 0), (taps - 1, 0), (0, 0)])
        return sum(
            (padded[:, tap : tap + length] * kernel[tap] for tap in range(1, taps)),
            padded[:, :length] * kernel[0],
        )


def use_chunked_delta_rule(model: nn.Module) -> None:
    """Give every Gated DeltaNet mixer of `model` the chunked forward;

    parameters and their names stay as they are.
    """
    for _, module in model.named_modules():
        if type(module) is GatedDeltaNet:
            module.__class__ = ChunkedGatedDeltaNet
