"""The drafter's forward in training: many blocks of each sequence at once.

A training block is an anchor token followed by masks; slot k learns the token k places after the anchor. A
block sees the context strictly before its anchor and itself, which is all that it will see at work. Many
blocks share one sequence, so the context's keys and values are computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.drafter.model import DrafterAttention, DrafterModel, Embed
from dflash_mlx.train.shards import Sample, widen


@dataclass(frozen=True)
class Batch:
    """Sequences [B, S] padded at their ends, with N blocks of L rows in each.

    Attributes:
        taps: [B, S, taps * H].
        anchors: positions of the blocks' first rows, [B, N].
        gold: true tokens, the anchor first, [B, N, L].
        known: whether they exist, [B, N, L].
        final: the states from which the target's head makes the logits of the slots, [B, N, L - 1, H].
    """

    taps: mx.array
    anchors: mx.array
    gold: mx.array
    known: mx.array
    final: mx.array


def make_batch(samples: Sequence[Sample], anchors: int, block: int, rng: np.random.Generator) -> Batch:
    """Random anchors within the responses; a response shorter than `anchors` repeats some."""
    rows = np.arange(len(samples))[:, None, None]
    longest = max(len(sample.tokens) for sample in samples)
    tokens = np.zeros((len(samples), longest + block), dtype=np.int32)
    taps = np.zeros((len(samples), longest, samples[0].taps.shape[1]), dtype=np.uint16)
    final = np.zeros((len(samples), longest + block, samples[0].final.shape[1]), dtype=np.uint16)
    chosen = np.zeros((len(samples), anchors), dtype=np.int32)
    lengths = np.array([len(sample.tokens) for sample in samples])
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = sample.tokens
        taps[row, : len(sample.taps)] = sample.taps
        final[row, : len(sample.final)] = sample.final
        # From the first token of the response to the last but one: a block needs one true successor.
        places = np.arange(sample.prompt, max(len(sample.tokens) - 1, sample.prompt + 1))
        chosen[row] = rng.choice(places, anchors, replace=len(places) < anchors)
    places = chosen[..., None] + np.arange(block)  # [B, N, L]
    return Batch(
        taps=widen(taps),
        anchors=mx.array(chosen),
        gold=mx.array(tokens[rows, places]),
        known=mx.array(places < lengths[:, None, None]),
        final=widen(final[rows, places[..., :-1]]),
    )


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
