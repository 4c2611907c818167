"""The method in plain numpy and double precision: no cache, every row at its position, an explicit mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.config import SLIDING, DrafterConfig
from drafter.build import Ends

Array = np.ndarray


@dataclass
class Dense:
    """Hidden states and logits of the draft slots, and the greedy path through them."""

    hidden: Array
    logits: Array
    tokens: list[int]


def propose(
    config: DrafterConfig,
    weights: dict[str, mx.array],
    ends: Ends,
    taps: mx.array,
    anchor: int,
    block_size: int,
) -> Dense:
    """Draft after a context given as the taps of all of its rows, `[1, T, taps * H]`."""
    w = {name: np.array(tensor, dtype=np.float64) for name, tensor in weights.items()}
    eps = config.rms_norm_eps
    context = norm(np.array(taps[0], dtype=np.float64) @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    block = [anchor] + [config.mask_token_id] * (block_size - 1)
    x = np.array(ends.embed_tokens.weight, dtype=np.float64)[block]
    x = x * ends.embed_scale * config.input_embedding_scale
    for i in range(config.num_hidden_layers):
        layer = {k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        n = norm(x, layer["input_layernorm.weight"], eps)
        n, after = convolve(config, layer, "attention_conv", n)
        x = x + after(attention(config, i, layer, n, context))
        n = norm(x, layer["post_attention_layernorm.weight"], eps)
        n, after = convolve(config, layer, "mlp_conv", n)
        x = x + after(mlp(layer, n))
    hidden = norm(x, w["norm.weight"], eps)[1:]
    logits = hidden @ np.array(ends.lm_head.weight, dtype=np.float64).T * config.output_multiplier
    if config.final_logit_softcapping:
        logits = np.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return Dense(hidden, logits, walk(config, w, hidden, logits, anchor))


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def mlp(w: dict[str, Array], x: Array) -> Array:
    gate = x @ w["mlp.gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def attention(config: DrafterConfig, i: int, w: dict[str, Array], x: Array, context: Array) -> Array:
    T, B, D = len(context), len(x), config.head_dim

    def project(name: str, rows: Array, heads: int) -> Array:
        bias = w.get(f"self_attn.{name}_proj.bias", 0)
        return (rows @ w[f"self_attn.{name}_proj.weight"].T + bias).reshape(len(rows), heads, -1)

    def positioned(name: str, rows: Array, heads: int, positions: Array) -> Array:
        normed = norm(project(name, rows, heads), w[f"self_attn.{name}_norm.weight"], config.rms_norm_eps)
        return rotate(normed, positions, config.rope.theta)

    rows, positions = np.concatenate([context, x]), np.arange(T + B)
    q = positioned("q", x, config.num_attention_heads, positions[T:])
    k = positioned("k", rows, config.num_key_value_heads, positions)
    v = project("v", rows, config.num_key_value_heads)
    k, v = (a.repeat(config.num_attention_heads // config.num_key_value_heads, axis=1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * D**-0.5
    scores = np.where(visible(config, i, T, B), scores, -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hqk,khd->qhd", probs / probs.sum(-1, keepdims=True), v).reshape(B, -1)
    return out @ w["self_attn.o_proj.weight"].T + w.get("self_attn.o_proj.bias", 0)


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """`[n, heads, D]`; channel d turns together with channel d + D/2."""
    half = x.shape[-1] // 2
    angle = (positions[:, None] * theta ** (-np.arange(half) / half))[:, None]  # [n, 1, D/2]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1
    )


def visible(config: DrafterConfig, i: int, T: int, B: int) -> Array:
    """Booleans `[B, T + B]`, entry by entry."""
    seen = np.zeros((B, T + B), dtype=bool)
    for row in range(B):
        for key in range(T + B):
            if key >= T:
                seen[row, key] = not config.is_causal[i] or key <= T + row
            elif config.layer_types[i] == SLIDING:
                assert config.sliding_window is not None
                seen[row, key] = T + row - key < config.sliding_window
            else:
                seen[row, key] = True
    return seen


def convolve(
    config: DrafterConfig, w: dict[str, Array], name: str, x: Array
) -> tuple[Array, Callable[[Array], Array]]:
    """The convolved input of a sub-layer, and what convolves its output; nothing without taps."""
    K, G = config.conv_kernel_size, config.conv_group_size
    if not K:
        return x, lambda y: y
    dynamic = (x @ w[f"{name}.kernel_projection.weight"].T).reshape(len(x), 2, K, -1).repeat(G, axis=-1)
    base = w[f"{name}.base_kernel"]

    def stage(number: int, rows: Array) -> Array:
        out = np.zeros_like(rows)
        for t in range(len(rows)):
            for s in range(min(K, t + 1)):
                out[t] += (base[number, s] + dynamic[t, number, s]) * rows[t - s]
        return out

    return stage(0, x), lambda y: stage(1, y)


def walk(config: DrafterConfig, w: dict[str, Array], hidden: Array, logits: Array, anchor: int) -> list[int]:
    if not config.selector_rank:
        return [int(token) for token in logits.argmax(-1)]
    pred = w["candidate_selector.predecessor_codebook"]
    succ = w["candidate_selector.successor_codebook"]
    path = [anchor]
    for h, row in zip(hidden @ w["candidate_selector.hidden_projection.weight"].T, logits, strict=True):
        candidates = np.argsort(row)[-config.selector_top_k :]
        scores = row[candidates] + (pred[path[-1]] * h * succ[candidates]).sum(-1)
        path.append(int(candidates[scores.argmax()]))
    return path[1:]
