"""A drafter checkpoint on disk -> `DrafterModel`.

Tensors must match the config name by name and shape by shape: a drafter that half loads still drafts,
only badly, and nobody would notice.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from dflash_mlx.config import DrafterConfig, Quantization
from dflash_mlx.drafter.model import DrafterModel
from dflash_mlx.errors import CheckpointError, ConfigError
from dflash_mlx.tensors import tensor_files

CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
FOREIGN_FILES = {
    "mask_embedding.pt": "it carries a mask embedding of its own (a MiMo drafter)",
    "*.gguf": "it is packed as GGUF",
}


def load_drafter(folder: Path, *, bits: int | None = None) -> DrafterModel:
    """Load a drafter from a folder with `config.json` and safetensors.

    Args:
        folder: local folder.
        bits: quantize the linear layers to 4 or 8 bits, group 64; None keeps what the checkpoint has.

    Raises:
        ConfigError: the config is not a DFlash config, or contradicts itself.
        CheckpointError: tensors are missing, left over, of another shape, or unreadable.
    """
    config = read_config(folder)
    if bits is not None and config.quantization is not None:
        raise ConfigError(
            f"draft_bits is {bits}, but {folder.name} is already quantized to {config.quantization.bits} bits"
        )
    weights = _read_tensors(folder)
    model = DrafterModel(config)
    if config.quantization is not None:
        _quantize(model, config.quantization, only=weights)
    _check_tensors(folder, weights, model)
    if config.draft_head_size:
        _check_head_ids(folder, weights["draft_head_ids"], config.vocab_size)
    model.load_weights(list(weights.items()))
    model.set_dtype(activation_dtype(weights))
    if bits is not None:
        _quantize(model, Quantization(bits))
    model.eval()
    mx.eval(model.parameters())
    return model


def read_config(folder: Path) -> DrafterConfig:
    """Read and validate `config.json`.

    Raises:
        ConfigError: it is missing, is no JSON object, or does not describe a drafter that we run.
    """
    for pattern, reason in FOREIGN_FILES.items():
        if any(folder.glob(pattern)):
            raise ConfigError(
                f"{folder.name} cannot be used as a drafter: {reason}; use a DFlash safetensors folder"
            )
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}, expected a JSON object")
    return DrafterConfig.from_dict(raw)


def activation_dtype(weights: dict[str, mx.array]) -> mx.Dtype:
    """float32 on the CPU, which computes bfloat16 at half its speed; else what the norms have, never float16.

    The drafter's residual stream exceeds float16's range: every logit would be NaN.
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        return mx.float32
    return mx.float32 if weights["norm.weight"].dtype == mx.float32 else mx.bfloat16


def _read_tensors(folder: Path) -> dict[str, mx.array]:
    files = tensor_files(folder)
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file")
    weights: dict[str, mx.array] = {}
    for file in files:
        try:
            loaded = mx.load(str(file))
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"cannot read {file}: {error}; is the download complete?") from error
        assert isinstance(loaded, dict)
        weights.update(loaded)
    # Public files spell the codebooks as bare parameters, others as embedding modules.
    return {_bare(name): tensor for name, tensor in weights.items()}


def _bare(name: str) -> str:
    stem = name.removesuffix(".weight")
    return stem if stem in CODEBOOKS else name


def _check_tensors(folder: Path, weights: dict[str, mx.array], model: DrafterModel) -> None:
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    expected = {name: tensor.shape for name, tensor in parameters.items()}
    # Quantized weights are integers, in the file as in the network.
    kinds = {name: mx.issubdtype(tensor.dtype, mx.floating) for name, tensor in parameters.items()}
    found = {name: tensor.shape for name, tensor in weights.items()}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is not part of the network" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(found[name])}, expected {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    problems += [
        f"{name} holds {str(weights[name].dtype).removeprefix('mlx.core.')} numbers"
        for name in sorted(expected.keys() & found.keys())
        if mx.issubdtype(weights[name].dtype, mx.floating) != kinds[name]
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{folder.name} does not match its config.json: {'; '.join(problems[:3])}{more}"
        )


def _check_head_ids(folder: Path, ids: mx.array, vocabulary: int) -> None:
    """Ids outside the vocabulary would be read from outside the target's head."""
    values = np.array(ids).astype(np.int64)
    if values.min() < 0 or values.max() >= vocabulary or (np.diff(values) <= 0).any():
        raise CheckpointError(
            f"{folder.name} proposes from token ids between {values.min()} and {values.max()}: expected "
            f"ascending ones in [0, {vocabulary})"
        )


def _quantize(model: DrafterModel, how: Quantization, only: dict[str, mx.array] | None = None) -> None:
    """Quantize linear layers; codebooks, norms and base kernels are bare parameters and stay as they are."""

    def chosen(path: str, module: nn.Module) -> bool:
        if not isinstance(module, nn.Linear) or module.weight.shape[-1] % how.group_size:
            return False
        return only is None or f"{path}.scales" in only

    nn.quantize(model, how.group_size, how.bits, class_predicate=chosen)
