"""Load a target with mlx-lm. Owns the imports of its loader."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from dflash_mlx.errors import ModelError, UsageError, one_line
from dflash_mlx.params import SamplingParams
from dflash_mlx.target.target import Target

Tokenizer: TypeAlias = Any
"""mlx-lm's tokenizer wrapper, which ships no types."""


Progress: TypeAlias = Callable[[int, int], None]
"""Told the bytes that are done, and of how many."""

EVALUATED_AT_ONCE = 256 << 20
"""Bytes of weights between two reports of progress."""

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's `generation_config.json` may say about sampling, in our names and its own."""


@dataclass(frozen=True)
class LoadedTarget:
    """A target, its tokenizer, what to know about how it was loaded, and how its makers sample from it."""

    target: Target
    tokenizer: Tokenizer
    notes: tuple[str, ...]
    defaults: SamplingParams


def load_target(folder: Path, *, dequantize: bool = False, progress: Progress | None = None) -> LoadedTarget:
    """Load an mlx-lm model folder.

    On the CPU everything is cast to float32, scales and biases of quantized layers included: MLX computes
    bfloat16 there at half the speed, and 4-bit weights with bfloat16 scales at a fifth.

    Args:
        folder: local folder with `config.json`, safetensors and a tokenizer.
        dequantize: turn quantized layers into float32 ones.
        progress: called while the weights are read.

    Raises:
        ModelError: the folder cannot be read, or mlx-lm does not know the architecture.
    """
    try:
        model, config = load_model(folder, lazy=True)
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
    _evaluate(model, progress or (lambda done, total: None))
    defaults, ignored = sampling_defaults(folder)
    return LoadedTarget(target, tokenizer, (*notes, *ignored), defaults)


def _evaluate(model: Any, progress: Progress) -> None:
    """Read the weights, in parts, so that somebody can watch."""
    leaves: Any = tree_flatten(model.parameters())
    parameters: list[mx.array] = [array for _, array in leaves]
    total, done, waiting = sum(array.nbytes for array in parameters), 0, 0
    part: list[mx.array] = []
    progress(0, total)
    for array in parameters:
        part.append(array)
        waiting += array.nbytes
        if waiting >= EVALUATED_AT_ONCE or array is parameters[-1]:
            mx.eval(part)
            done, waiting, part = done + waiting, 0, []
            progress(done, total)


def sampling_defaults(folder: Path) -> tuple[SamplingParams, tuple[str, ...]]:
    """What `generation_config.json` says about sampling, greedy if nothing; and what of it makes no sense."""
    try:
        config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    if not isinstance(config, dict) or config.get("do_sample") is False:
        return SamplingParams(), ()
    if config.get("do_sample"):
        config = {"temperature": 1.0, **config}
    kept, notes = {}, []
    for name in SAMPLED:
        if config.get(name) is None:
            continue
        try:
            SamplingParams(**{name: config[name]})
            kept[name] = config[name]
        except UsageError as error:
            notes.append(f"ignored in generation_config.json: {error}")
    return SamplingParams(**kept), tuple(notes)


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
