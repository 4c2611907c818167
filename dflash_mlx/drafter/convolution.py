"""Dynamic convolution along the block (DFlash 2): a few causal taps whose weights are predicted per row.

Each sub-layer of the drafter is wrapped in two such convolutions, one on its input and one on its
output. Both sets of tap weights come from the sub-layer's normed input.
"""

import mlx.core as mx
from mlx import nn


class DynamicConvolution(nn.Module):
    """The pair of convolutions around one sub-layer.

    Row t of a convolution is `sum over taps s of (base[s] + dynamic[t, s, group]) * x[t - s]`, with rows
    before the block counting as zero. `base_kernel` is `[2, K, H]`: input stage, output stage.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        identity = [1.0] + [0.0] * (kernel_size - 1)
        self.base_kernel = mx.broadcast_to(mx.array(identity)[None, :, None], (2, kernel_size, hidden_size))
        groups = hidden_size // group_size
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * groups, bias=False)

    def enter(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Convolve the sub-layer's input `[B, L, H]`; also returns the dynamic weights for `leave`."""
        weights = self.kernel_projection(x)
        first, second = mx.split(weights, 2, axis=-1)  # [B, L, K * H/G] each
        return _convolve(x, self.base_kernel[:1], first), second

    def leave(self, y: mx.array, weights: mx.array) -> mx.array:
        """Convolve the sub-layer's output `[B, L, H]` with the weights that `enter` predicted."""
        return _convolve(y, self.base_kernel[1:], weights)


@mx.compile
def _convolve(x: mx.array, base: mx.array, dynamic: mx.array) -> mx.array:
    """Rows x `[B, L, H]`, base `[1, K, H]`, dynamic `[B, L, K * H/G]` -> `[B, L, H]`.

    Compiled, a convolution's sums and products are fused. Slices and splits are views; an index would copy.
    """
    taps = base.shape[1]
    groups = dynamic.shape[-1] // taps
    rows = x.reshape(*x.shape[:2], 1, groups, -1)  # [B, L, 1, H/G, G]
    base = base.reshape(taps, groups, -1).astype(x.dtype)  # [K, H/G, G]
    dynamic = dynamic.reshape(*x.shape[:2], taps, groups, 1)
    weights = mx.split(base + dynamic, taps, axis=2)  # K times [B, L, 1, H/G, G]
    out = weights[0] * rows
    for tap in range(1, taps):
        shifted = mx.pad(rows, [(0, 0), (tap, 0), (0, 0), (0, 0), (0, 0)])[:, : x.shape[1]]
        out = out + weights[tap] * shifted
    return out.reshape(x.shape)
