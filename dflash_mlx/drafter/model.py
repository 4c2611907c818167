"""The drafter network: DFlash and DFlash 2 decoder layers with injected context.

Queries come from the block. Keys and values come from the block *and* from the context, which is the
target's tapped hidden states brought to the drafter's width; both go through the same projections.
The network holds no embedding and no head, and no state: those are arguments of `Drafter`.
"""

from collections.abc import Callable

import mlx.core as mx
from mlx import nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from dflash_mlx.config import SLIDING, DrafterConfig, Rope
from dflash_mlx.drafter.context import DrafterContext, LayerContext
from dflash_mlx.drafter.convolution import DynamicConvolution
from dflash_mlx.drafter.selector import CandidateSelector

Embed = Callable[[mx.array], mx.array]
"""The target's embedding: token ids [B, L] -> [B, L, H]."""
Head = Callable[[mx.array], mx.array]
"""The target's head: hidden states [..., H] -> logits [..., V]."""
Attend = Callable[["DrafterAttention", mx.array], mx.array]
"""How a layer's attention meets its context: (attention, block rows [B, L, H]) -> [B, L, H]."""


class DrafterAttention(nn.Module):
    """Grouped-query attention with per-head q/k RMSNorm."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.window = config.sliding_window if config.layer_types[layer] == SLIDING else None
        self.is_causal = config.is_causal[layer]
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rope = _rope(config.rope, config.head_dim, config.max_position_embeddings)

    def queries(self, x: mx.array, position: int | mx.array) -> mx.array:
        """`[B, L, H]` -> `[B, heads, L, D]`; `position` is that of the first row."""
        q = self.q_proj(x).reshape(*x.shape[:2], self.heads, self.head_dim)  # [B, L, heads, D]
        return self._rotate(self.q_norm(q).swapaxes(1, 2), position)

    def keys_values(self, x: mx.array, position: int | mx.array) -> tuple[mx.array, mx.array]:
        """`[B, L, H]` -> keys and values, `[B, kv_heads, L, D]` each, of context or block rows alike."""
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        k = self.k_norm(self.k_proj(x).reshape(shape)).swapaxes(1, 2)  # [B, kv_heads, L, D]
        return self._rotate(k, position), self.v_proj(x).reshape(shape).swapaxes(1, 2)

    def output(self, q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None) -> mx.array:
        """Attention and output projection, `[B, heads, L, D]` -> `[B, L, H]`."""
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.head_dim**-0.5, mask=mask)
        return self.o_proj(out.swapaxes(1, 2).flatten(2))  # [B, L, heads * D] -> [B, L, H]

    def _rotate(self, x: mx.array, position: int | mx.array) -> mx.array:
        rotated: mx.array = self.rope(x, offset=position)
        return rotated


class DrafterMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        down: mx.array = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return down


class DrafterLayer(nn.Module):
    """Pre-norm attention and MLP; the second generation wraps each in a dynamic convolution."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config, layer)
        self.mlp = DrafterMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.conv_kernel_size:
            shape = config.hidden_size, config.conv_kernel_size, config.conv_group_size
            self.attention_conv = DynamicConvolution(*shape)
            self.mlp_conv = DynamicConvolution(*shape)

    def __call__(self, x: mx.array, attend: Attend) -> mx.array:
        """Block rows `[B, L, H]` -> `[B, L, H]`; every batch row is a block of its own."""
        x = x + self._convolved(
            "attention_conv", self.input_layernorm(x), lambda y: attend(self.self_attn, y)
        )
        return x + self._convolved("mlp_conv", self.post_attention_layernorm(x), self.mlp)

    def _convolved(self, name: str, x: mx.array, sublayer: Callable[[mx.array], mx.array]) -> mx.array:
        if name not in self:
            return sublayer(x)
        x, weights = self[name].enter(x)
        convolved: mx.array = self[name].leave(sublayer(x), weights)
        return convolved


class DrafterModel(nn.Module):
    """The network of one checkpoint; parameter names are those of the public files."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [DrafterLayer(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.draft_head_size:
            self.draft_head_ids = mx.arange(config.draft_head_size)
            self.freeze(keys=["draft_head_ids"], recurse=False)
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(
                config.hidden_size, config.vocab_size, config.selector_rank, config.selector_top_k
            )

    @property
    def head_ids(self) -> mx.array | None:
        """The token ids that the drafter proposes from, in the order of its logits; None: all."""
        return self.draft_head_ids if self.config.draft_head_size else None

    @property
    def dtype(self) -> mx.Dtype:
        """The activations' type: a norm's, since norms are never quantized."""
        dtype: mx.Dtype = self.norm.weight.dtype
        return dtype

    def make_context(self) -> DrafterContext:
        """An empty context."""
        return DrafterContext([layer.self_attn.window for layer in self.layers])

    def inject(self, taps: mx.array) -> mx.array:
        """Concatenated tapped hidden states `[B, n, taps * H]` -> context rows `[B, n, H]`."""
        rows: mx.array = self.hidden_norm(self.fc(taps.astype(self.dtype)))
        return rows

    def extend(self, taps: mx.array, context: DrafterContext) -> None:
        """Take committed rows' taps `[1, n, taps * H]` into the context, and forget them."""
        rows = self.inject(taps)
        for layer, cache in zip(self.layers, context.layers, strict=True):
            unseen = cache.unseen(rows.shape[1])  # which need no projection
            cache.append(*layer.self_attn.keys_values(rows[:, unseen:], context.position + unseen), unseen)
        context.position += rows.shape[1]

    def hidden_states(self, x: mx.array, context: DrafterContext, taps: mx.array | None = None) -> mx.array:
        """Embedded block rows `[1, L, H]` -> final hidden states `[1, L, H]`.

        Rows committed since the last `extend` may come along as their taps `[1, n, taps * H]`: they go
        through the same projections as the block's, so each layer makes the keys and values of both at once.
        """
        rows = None if taps is None else self.inject(taps)  # [1, n, H]
        new = 0 if rows is None else rows.shape[1]
        caches = iter(context.layers)

        def attend(attention: DrafterAttention, y: mx.array) -> mx.array:
            cache = next(caches)
            both = y if rows is None else mx.concatenate([rows, y], axis=1)  # [1, n + L, H]
            keys, values = cache.with_block(*attention.keys_values(both, context.position), new)
            mask = block_mask(attention, cache, y.shape[1])
            return attention.output(attention.queries(y, context.position + new), keys, values, mask)

        for layer in self.layers:
            x = layer(x, attend)
        context.position += new
        normed: mx.array = self.norm(x)
        return normed

    def logits(self, hidden: mx.array, head: Head) -> mx.array:
        """Final hidden states `[..., H]` -> logits `[..., V]`: the target's head, scaled and soft-capped."""
        return self.cap(head(hidden))

    def cap(self, logits: mx.array) -> mx.array:
        """What the target does to its head's output, as far as the config says."""
        logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else mx.tanh(logits / cap) * cap


def block_mask(attention: DrafterAttention, cache: LayerContext, rows: int) -> mx.array | str | None:
    """What block rows see: of the context, keys nearer than the window; of the block, all or those before.

    Returns:
        None if everything is visible, "causal" (aligned to the last key) where MLX can imply the mask, else
        booleans `[rows, context + rows]`.
    """
    context = cache.length
    if attention.window is None or context + rows <= attention.window:
        return "causal" if attention.is_causal else None
    query = context + mx.arange(rows)[:, None]
    key = mx.arange(context + rows)[None]
    in_block = key >= context
    block = in_block & (key <= query) if attention.is_causal else in_block
    return block | (query - key < attention.window) & ~in_block


def _rope(rope: Rope, head_dim: int, max_position_embeddings: int) -> nn.Module:
    """mlx-lm's rotary embeddings; for YaRN its correction range is rounded to whole dimensions."""
    scaling = {"type": rope.kind, **dict(rope.scaling)}
    module: nn.Module = initialize_rope(head_dim, rope.theta, False, scaling, max_position_embeddings)
    return module
