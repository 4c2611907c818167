"""Load a target with mlx-lm. Owns the imports of its loader."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from dflash_mlx.errors import ModelError, one_line
from dflash_mlx.target.target import Target

Tokenizer: TypeAlias = Any
"""mlx-lm's tokenizer wrapper, which ships no types."""


@dataclass(frozen=True)
class LoadedTarget:
    """A target, its tokenizer, and what the user should know about how it was loaded."""

    target: Target
    tokenizer: Tokenizer
    notes: tuple[str, ...]


def load_target(folder: Path, *, dequantize: bool = False) -> LoadedTarget:
    """Load an mlx-lm model folder.

    On the CPU everything is cast to float32, scales and biases of quantized layers included: MLX computes
    bfloat16 there at half the speed, and 4-bit weights with bfloat16 scales at a fifth.

    Args:
        folder: local folder with `config.json`, safetensors and a tokenizer.
        dequantize: turn quantized layers into float32 ones.

    Raises:
        ModelError: the folder cannot be read, or mlx-lm does not know the architecture.
    """
    try:
        model, config = load_model(folder)
        tokenizer = load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
        target = Target(model, _context_length(config))
    except Exception as error:  # mlx-lm and transformers raise many kinds; each is one line for the user
        raise ModelError(f"cannot load the target from {folder}: {one_line(error)}") from error
    notes = []
    if dequantize and target.quantized:
        model = dequantize_model(model)
        model.set_dtype(mx.float32)
        target = Target(model, target.context_length)
        notes.append("target dequantized to float32")
    elif mx.default_device().type == mx.DeviceType.cpu and (before := _reduced_precision(model)):
        model.set_dtype(mx.float32)
        notes.append(f"running on the CPU: target cast from {before} to float32")
    mx.eval(model.parameters())
    return LoadedTarget(target, tokenizer, tuple(notes))


def _context_length(config: dict[str, Any]) -> int | None:
    length = config.get("max_position_embeddings") or config.get("text_config", {}).get(
        "max_position_embeddings"
    )
    return int(length) if length else None


def _reduced_precision(model: Any) -> str | None:
    """The name of a 16-bit type among the parameters, if there is one."""
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]  # a list here
    for _, parameter in parameters:
        if parameter.dtype in (mx.bfloat16, mx.float16):
            return str(parameter.dtype).removeprefix("mlx.core.")
    return None
