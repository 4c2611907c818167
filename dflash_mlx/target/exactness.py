"""Whether a row's numbers depend on how many rows are verified with it, found by trying.

Speculation is invisible only where they do not. The CPU's own library and row-exact kernels keep them apart;
another BLAS, or kernels chosen by the number of rows, may not.
"""

from collections.abc import Iterable

import mlx.core as mx

from dflash_mlx.target.target import Target

EXACT = "exact"
FAST = "fast numerics: speculation changes no token, but plain decoding has other last bits than mlx-lm's"
CONTEXT = 8


def measure_exactness(target: Target, row_counts: Iterable[int], layer_ids: tuple[int, ...]) -> str:
    """Compare blocks with the same tokens one at a time.

    Args:
        target: with these layers tapped.
        row_counts: sizes of the blocks to try.

    Returns:
        "exact", or "not exact: " and what differs first.
    """
    counts = sorted(set(row_counts))
    tokens = mx.array([(7 * i + 3) % target.vocab_size for i in range(CONTEXT + max(counts, default=0))])
    caches = target.make_cache()
    target.forward(tokens[:CONTEXT], caches)
    alone = [target.forward(tokens[i : i + 1], caches) for i in range(CONTEXT, len(tokens))]
    for count in counts:
        caches = target.make_cache()
        target.forward(tokens[:CONTEXT], caches)
        logits, taps = target.verify(tokens[CONTEXT : CONTEXT + count], caches)
        target.commit(count, count)
        expected = mx.concatenate([row for row, _ in alone[:count]])
        if mx.array_equal(logits, expected):
            continue
        worst = mx.abs(logits - expected).max().item()
        single = mx.concatenate([tap for _, tap in alone[:count] if tap is not None], axis=1)
        where = _first_layer(taps, single, layer_ids)
        return f"not exact: with {count} rows in a pass, {where}; logits move by up to {worst:.1e}"
    return EXACT


def _first_layer(taps: mx.array | None, expected: mx.array, layer_ids: tuple[int, ...]) -> str:
    """Where the tapped hidden states `[1, L, ids * H]` begin to differ."""
    assert taps is not None
    ours, theirs = (mx.split(t, len(layer_ids), axis=-1) for t in (taps, expected))
    layers = zip(layer_ids, ours, theirs, strict=True)
    differing = [layer for layer, a, b in layers if not mx.array_equal(a, b)]
    return f"layer {min(differing)} or one before differs" if differing else "what follows the taps differs"
