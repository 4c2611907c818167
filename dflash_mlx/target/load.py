"""Load a target with mlx-lm. Owns the imports of its loader."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_adapters, load_model, load_tokenizer

from dflash_mlx.errors import CheckpointError, ModelError, UsageError, one_line
from dflash_mlx.kernels import Kernels
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


def load_target(
    folder: Path,
    *,
    adapter: Path | None = None,
    dequantize: bool = False,
    kernels: Kernels | None = None,
) -> LoadedTarget:
    """Build the model of an mlx-lm folder. Its weights are not read before they are used, or `read_weights`.

    On the CPU everything is cast to float32, scales and biases of quantized layers included: MLX computes
    bfloat16 there at half the speed, and 4-bit weights with bfloat16 scales at a fifth.

    Args:
        folder: local folder with `config.json`, safetensors and a tokenizer.
        adapter: local folder with `adapter_config.json` and `adapters.safetensors`, as mlx-lm trains them.
        dequantize: turn quantized layers into float32 ones.
        kernels: for its linear layers; None: the exact ones of this device.

    Raises:
        ModelError: the folder cannot be read, mlx-lm does not know the architecture, or the adapter is
            not one for this model.
    """
    try:
        model, config = load_model(folder, lazy=True)
        tokenizer = load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
        if adapter is not None:
            _apply_adapter(model, adapter)
        target = Target(model, _context_length(config), kernels)
    except ModelError:
        raise
    except Exception as error:  # mlx-lm and transformers raise many kinds; each is one line for the user
        raise ModelError(f"cannot load the target from {folder}: {one_line(error)}") from error
    notes = [] if adapter is None else [f"adapter {adapter}"]
    if dequantize and target.quantized:
        model = dequantize_model(model)
        model.set_dtype(mx.float32)
        target = Target(model, target.context_length, kernels)
        notes.append("target dequantized to float32")
    elif mx.default_device().type == mx.DeviceType.cpu and (before := _reduced_precision(model)):
        model.set_dtype(mx.float32)
        notes.append(f"running on the CPU: target cast from {before} to float32")
    defaults, ignored = sampling_defaults(folder)
    return LoadedTarget(target, tokenizer, (*notes, *ignored), defaults)


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


def read_weights(target: Target, progress: Progress | None = None) -> None:
    """Bring the weights into memory, in parts, so that somebody can watch.

    Raises:
        CheckpointError: a file is shorter than it says.
    """
    leaves: Any = tree_flatten(target.model.parameters())
    parameters: list[mx.array] = [array for _, array in leaves]
    report = progress or (lambda done, total: None)
    total, done, waiting = sum(array.nbytes for array in parameters), 0, 0
    part: list[mx.array] = []
    report(0, total)
    for array in parameters:
        part.append(array)
        waiting += array.nbytes
        if waiting >= EVALUATED_AT_ONCE or array is parameters[-1]:
            _evaluate(part)
            done, waiting, part = done + waiting, 0, []
            report(done, total)


def _evaluate(arrays: list[mx.array]) -> None:
    try:
        mx.eval(arrays)
    except RuntimeError as error:
        if "allocate" in str(error):
            raise
        raise CheckpointError(f"cannot read the target's weights: {one_line(error)}") from error


def _apply_adapter(model: nn.Module, folder: Path) -> None:
    """Put low-rank layers around the model's own, in place.

    Raises:
        ModelError: it is not an mlx-lm adapter, or not one for this model.
    """
    if (folder / "adapter_model.safetensors").exists():
        raise ModelError(
            f"{folder} is a PEFT adapter: mlx-lm cannot apply it; fuse it into its base with PEFT's "
            "merge_and_unload() and load the result"
        )
    try:
        load_adapters(model, str(folder))
    except Exception as error:  # mlx-lm raises many kinds, some of several lines: the second names a tensor
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2]) or type(error).__name__
        raise ModelError(f"cannot apply the adapter {folder}: {reason}") from error


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
