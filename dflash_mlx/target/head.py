"""A part of a target's head: the rows of chosen token ids."""

import mlx.core as mx
from mlx import nn

from dflash_mlx.drafter.model import Head


def rows_of(head: nn.Module, ids: mx.array) -> Head:
    """The head for these ids `[n]` alone: hidden states `[..., H]` -> logits `[..., n]`.

    The rows are gathered once, quantized ones as they are.

    Args:
        head: a linear layer, or the embedding that serves as one.
    """
    # Anything else (an adapter around a layer, say) is asked for all rows.
    if type(head) not in (nn.Linear, nn.Embedding, nn.QuantizedLinear, nn.QuantizedEmbedding):
        whole: Head = head.as_linear if hasattr(head, "as_linear") else head
        return lambda hidden: whole(hidden)[..., ids]
    rows = {
        name: head[name][ids] for name in ("weight", "scales", "biases", "bias") if head.get(name) is not None
    }
    bias = rows.get("bias")

    def logits(hidden: mx.array) -> mx.array:
        if "scales" in rows:
            out = mx.quantized_matmul(
                hidden,
                rows["weight"],
                scales=rows["scales"],
                biases=rows.get("biases"),
                transpose=True,
                group_size=head.group_size,
                bits=head.bits,
                mode=head.mode,
            )
        else:
            out = hidden @ rows["weight"].T
        return out if bias is None else out + bias

    return logits
