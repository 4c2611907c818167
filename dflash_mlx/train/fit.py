"""Fit a drafter to recorded responses.

A training block is an anchor token followed by masks; slot k learns the token k places after the anchor. A
block sees the context strictly before its anchor and itself, which is all that it will see at work. Many
blocks share one sequence, so the context's keys and values are computed once for all of them.

The unary logits and the selector's edges are trained by one softmax over their sum, with the gold
predecessor; in a share of the slots the edges are left out, so that the unary logits stay good enough to
rank candidates by themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from dflash_mlx.config import DrafterConfig
from dflash_mlx.drafter.model import DrafterAttention, DrafterModel, Embed, Head
from dflash_mlx.target.target import Target
from dflash_mlx.train.data import Sample
from dflash_mlx.train.optimizer import make_optimizer


@dataclass(frozen=True)
class FitRecipe:
    """How a drafter is trained.

    `gamma`: slot k weighs exp(-(k - 1) / gamma), since it counts only if all before do.
    """

    steps: int = 1200
    rows: int = 8
    anchors: int = 32
    peak_rate: float = 2e-3
    warmup: int = 60
    weight_decay: float = 0.01
    gamma: float = 4.0
    edge_dropout: float = 0.3
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """Sequences [B, S] padded at their ends, their taps [B, S, taps * H], and anchors [B, N].

    `gold` [B, N, L] holds each block's true tokens, the anchor first; `known` [B, N, L] where they exist.
    """

    taps: mx.array
    anchors: mx.array
    gold: mx.array
    known: mx.array


def block_states(
    model: DrafterModel, embed: Embed, taps: mx.array, anchors: mx.array, first: mx.array
) -> mx.array:
    """The drafter's final hidden states for many blocks of each sequence, [B, N, L, H].

    Args:
        embed: the target's embedding, ids [...] -> [..., H].
        taps: tapped hidden states of whole sequences, [B, S, taps * H].
        anchors: position of each block's first row, [B, N].
        first: token at each anchor, [B, N].
    """
    config = model.config
    batch, count = anchors.shape
    positions = anchors.flatten()  # [B * N]
    masks = mx.full((batch * count, config.block_size - 1), config.mask_token_id, dtype=first.dtype)
    blocks = mx.concatenate([first.reshape(-1, 1), masks], axis=1)  # [B * N, L]
    x = embed(blocks) * config.input_embedding_scale
    context = model.inject(taps)  # [B, S, H]

    def attend(attention: DrafterAttention, rows: mx.array) -> mx.array:
        return attend_blocks(attention, rows, context, positions)

    for layer in model.layers:
        x = layer(x, attend)
    return model.norm(x).reshape(batch, count, config.block_size, -1)


def attend_blocks(
    attention: DrafterAttention, rows: mx.array, context: mx.array, positions: mx.array
) -> mx.array:
    """One softmax over [context before the anchor | own block], for all blocks at once.

    Blocks cannot see each other, so their keys never meet: scoring them apart saves the N x N of a joint
    mask.

    Args:
        rows: block rows, [B * N, L, H].
        context: injected rows, [B, S, H].
        positions: the anchors, [B * N].
    """
    batch, length, _ = context.shape
    blocks, size, _ = rows.shape
    count, kv, dim = blocks // batch, attention.kv_heads, attention.head_dim
    group = attention.heads // kv
    q = attention.queries(rows, positions) * dim**-0.5
    q = q.reshape(batch, count, kv, group * size, dim)  # [B, N, kv, G * L, D]
    context_k, context_v = attention.keys_values(context, 0)  # [B, kv, S, D]
    block_k, block_v = attention.keys_values(rows, positions)
    block_k = block_k.reshape(batch, count, kv, size, dim)  # [B, N, kv, L, D]
    block_v = block_v.reshape(batch, count, kv, size, dim)

    # Context first as [B, kv, N * G * L, ...]: one large product per head instead of N small ones.
    far = q.swapaxes(1, 2).reshape(batch, kv, -1, dim) @ context_k.swapaxes(-1, -2)
    far = far.reshape(batch, kv, count, group, size, length)
    near = (q @ block_k.swapaxes(-1, -2)).swapaxes(1, 2)
    near = near.reshape(batch, kv, count, group, size, size)
    far, near = _hide(attention, far, near, positions.reshape(batch, 1, count, 1, 1, 1))

    weights = mx.softmax(mx.concatenate([far, near], axis=-1), axis=-1, precise=True)
    far, near = mx.split(weights, [length], axis=-1)
    out = (far.reshape(batch, kv, -1, length) @ context_v).reshape(batch, kv, count, group * size, dim)
    out = out + near.reshape(batch, kv, count, group * size, size) @ block_v.swapaxes(1, 2)
    out = out.reshape(batch, kv, count, group, size, dim).transpose(0, 2, 4, 1, 3, 5)  # [B, N, L, kv, G, D]
    projected: mx.array = attention.o_proj(out.reshape(blocks, size, -1))
    return projected


def _hide(
    attention: DrafterAttention, far: mx.array, near: mx.array, anchor: mx.array
) -> tuple[mx.array, mx.array]:
    """Mask the scores [B, kv, N, G, L, keys]; `anchor` [B, 1, N, 1, 1, 1]."""
    size, length = near.shape[-1], far.shape[-1]
    slot, key = mx.arange(size)[:, None], mx.arange(length)
    visible = key < anchor
    if attention.window is not None:
        visible = visible & (anchor + slot - key < attention.window)
    far = mx.where(visible, far, -mx.inf)
    if attention.is_causal:
        near = mx.where(slot >= mx.arange(size), near, -mx.inf)
    return far, near


def slot_losses(
    model: DrafterModel, head: Head, hidden: mx.array, gold: mx.array, keep_edge: mx.array
) -> mx.array:
    """Cross-entropy of every draft slot, [B, N, L - 1].

    Args:
        head: the target's head, [..., H] -> [..., V].
        hidden: final states, [B, N, L, H].
        gold: true tokens, anchor first, [B, N, L].
        keep_edge: whether the selector's edges count in a slot, [B, N, L - 1].
    """
    hidden = hidden[:, :, 1:]
    logits = model.logits(hidden, head)  # [B, N, L - 1, V]
    if model.config.selector_rank:
        selector = model.candidate_selector
        bridge = selector.predecessor_codebook[gold[:, :, :-1]] * selector.hidden_projection(
            hidden
        )  # [B, N, L - 1, R]
        logits = logits + (bridge * keep_edge[..., None]) @ selector.successor_codebook.T
    return nn.losses.cross_entropy(logits, gold[:, :, 1:])


def make_batch(samples: Sequence[Sample], anchors: int, block: int, rng: np.random.Generator) -> Batch:
    """Random anchors within the responses; a response shorter than `anchors` repeats some."""
    longest = max(len(sample.tokens) for sample in samples)
    tokens = np.zeros((len(samples), longest + block), dtype=np.int32)
    chosen = np.zeros((len(samples), anchors), dtype=np.int32)
    lengths = np.array([len(sample.tokens) for sample in samples])
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = sample.tokens
        # From the first token of the response to the last but one: a block needs one true successor.
        places = np.arange(sample.prompt, max(len(sample.tokens) - 1, sample.prompt + 1))
        chosen[row] = rng.choice(places, anchors, replace=len(places) < anchors)
    taps = mx.stack([mx.pad(s.taps, [(0, longest - s.taps.shape[0]), (0, 0)]) for s in samples])
    places = chosen[..., None] + np.arange(block)  # [B, N, L]
    gold = tokens[np.arange(len(samples))[:, None, None], places]
    known = places < lengths[:, None, None]
    return Batch(taps.astype(mx.float32), mx.array(chosen), mx.array(gold), mx.array(known))


def fit_drafter(model: DrafterModel, target: Target, samples: Sequence[Sample], recipe: FitRecipe) -> float:
    """Train `model` in place; returns the mean loss of the last fifty steps.

    The target's embedding and head are used and never changed.
    """
    usable = [sample for sample in samples if len(sample.tokens) - sample.prompt >= 2]
    rng = np.random.default_rng(recipe.seed)
    mx.random.seed(recipe.seed)
    block = model.config.block_size
    slot_weight = mx.exp(-mx.arange(block - 1) / recipe.gamma)

    def loss_of(drafter: DrafterModel, batch: Batch) -> mx.array:
        hidden = block_states(drafter, target.embed, batch.taps, batch.anchors, batch.gold[:, :, 0])
        keep = mx.random.uniform(shape=batch.gold[:, :, 1:].shape) >= recipe.edge_dropout
        losses = slot_losses(drafter, target.head, hidden, batch.gold, keep)
        weight = batch.known[:, :, 1:] * slot_weight
        return (losses * weight).sum() / weight.sum()

    model.train()
    loss_and_gradient = nn.value_and_grad(model, loss_of)
    optimizer = make_optimizer(recipe.steps, recipe.peak_rate, recipe.warmup, recipe.weight_decay)
    losses: list[float] = []
    order: list[int] = []
    started = time.monotonic()
    for step in range(recipe.steps):
        if len(order) < recipe.rows:
            order = [int(i) for i in rng.permutation(len(usable))]
        rows, order = [usable[i] for i in order[: recipe.rows]], order[recipe.rows :]
        loss, gradient = loss_and_gradient(model, make_batch(rows, recipe.anchors, block, rng))
        gradient, _ = optim.clip_grad_norm(gradient, 1.0)
        optimizer.update(model, gradient)
        mx.eval(loss, model.parameters(), optimizer.state)
        losses.append(loss.item())
        if step % 20 == 19:
            pace = (time.monotonic() - started) / (step + 1)
            print(
                f"drafter: step {step + 1}/{recipe.steps} loss {np.mean(losses[-20:]):.3f} {pace:.2f} s/step",
                flush=True,
            )
    model.eval()
    return float(np.mean(losses[-50:]))


def new_drafter(config: DrafterConfig, target: Target, seed: int) -> DrafterModel:
    """A drafter that starts from what the target already knows.

    Layers take what fits in shape from the target's last layers, the final norm is the target's, and fc
    passes on the last tap. Convolutions start as the identity and edges near zero.
    """
    mx.random.seed(seed)
    model = DrafterModel(config)
    for layer, source in zip(model.layers, target.layers[-config.num_hidden_layers :], strict=True):
        _copy_fitting(layer, source)
        for name in ("attention_conv", "mlp_conv"):
            if name in layer:
                projection = layer[name].kernel_projection
                projection.weight = mx.zeros_like(projection.weight)
    if target.norm is not None:
        _copy_fitting(model.norm, target.norm)
    hidden = config.hidden_size
    mixed = mx.random.normal(model.fc.weight.shape) * (0.1 * hidden**-0.5)
    mixed[:, -hidden:] += mx.eye(hidden)
    model.fc.weight = mixed
    if config.selector_rank:
        selector = model.candidate_selector
        selector.predecessor_codebook = mx.random.normal(selector.predecessor_codebook.shape) * 0.5
        selector.successor_codebook = mx.random.normal(selector.successor_codebook.shape) * 0.02
    mx.eval(model.parameters())
    return model


def _copy_fitting(module: nn.Module, source: nn.Module) -> None:
    """Copy parameters of `source` whose name and shape `module` has."""
    theirs: dict[str, mx.array] = dict(tree_flatten(source.parameters()))
    ours: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    fitting = [(k, v.astype(mx.float32)) for k, v in theirs.items() if k in ours and ours[k].shape == v.shape]
    module.load_weights(fitting, strict=False)


def save_drafter(model: DrafterModel, raw_config: Mapping[str, Any], folder: Path) -> None:
    """Write the public layout in bf16: config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    weights = {name: value.astype(mx.bfloat16) for name, value in parameters.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
