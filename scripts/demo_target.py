"""Train the demo target: a small hybrid model (three Gated DeltaNet layers, one of attention) that
completes Python.

The architecture is mlx-lm's own `qwen3_5`, so the result is an ordinary mlx-lm folder. It is small enough
to train on two CPU cores in half an hour, and it has every part that makes speculation hard: recurrent
states, a rolling convolution window, and a key/value cache.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from demo_corpus import END_ID, encode_documents, read_corpus, split_corpus, train_tokenizer
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5
from mlx_lm.utils import quantize_model, save_config

from dflash_mlx.train.chunked import use_chunked_delta_rule
from dflash_mlx.train.optimizer import make_optimizer
from dflash_mlx.train.step import make_step

ARCHITECTURE: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5",
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 4096,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": END_ID,
}

HELD_OUT_WINDOWS = 256  # enough for two decimals of the loss


@dataclass(frozen=True)
class TargetRecipe:
    """How the target is trained. `length` is a multiple of the delta rule's chunk."""

    steps: int = 700
    rows: int = 8
    length: int = 256
    peak_rate: float = 3e-3
    warmup: int = 60
    weight_decay: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class TargetReport:
    """What the model card says about the target. Losses are nats per token."""

    parameters: int
    corpus_tokens: int
    trained_tokens: int
    seconds: float
    loss: float
    held_out_loss: float


def build_target(recipe: TargetRecipe, work: Path, folder: Path) -> TargetReport:
    """Tokenizer, training, quantization. Writes an mlx-lm folder and `work`/target.json, the report."""
    train, held_out = split_corpus(read_corpus())
    tokenizer = train_tokenizer(train, ARCHITECTURE["vocab_size"], folder)
    windows = pack(encode_documents(tokenizer, train), recipe.length, recipe.seed)
    held_out_windows = pack(encode_documents(tokenizer, held_out), recipe.length, recipe.seed)
    print(
        f"target: {windows[:, 1:].size:,} tokens to train on, {held_out_windows[:, 1:].size:,} held out",
        flush=True,
    )

    mx.random.seed(recipe.seed)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(ARCHITECTURE))
    use_chunked_delta_rule(model)
    started = time.monotonic()
    loss = train_target(model, windows, recipe)
    seconds = time.monotonic() - started
    report = TargetReport(
        parameters=count_parameters(model),
        corpus_tokens=windows[:, 1:].size,
        trained_tokens=recipe.steps * recipe.rows * recipe.length,
        seconds=seconds,
        loss=loss,
        held_out_loss=evaluate_target(model, held_out_windows[:HELD_OUT_WINDOWS]),
    )
    print(f"target: held-out loss {report.held_out_loss:.3f} after {seconds / 60:.1f} minutes", flush=True)
    save_target(model, folder)
    (work / "target.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def count_parameters(model: nn.Module) -> int:
    """Every weight, bare arrays included."""
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return sum(weight.size for weight in parameters.values())


def pack(documents: list[list[int]], length: int, seed: int) -> np.ndarray:
    """Documents in a random order, end to end, cut into windows [N, length + 1] that overlap by one token."""
    order = np.random.default_rng(seed).permutation(len(documents))
    stream = np.concatenate([np.array(documents[i], dtype=np.int32) for i in order])
    count = (len(stream) - 1) // length
    return np.lib.stride_tricks.sliding_window_view(stream, length + 1)[: count * length : length]


def next_token_loss(model: nn.Module, rows: mx.array) -> mx.array:
    """Mean cross-entropy of the next token. rows [B, T + 1]."""
    return nn.losses.cross_entropy(model(rows[:, :-1]), rows[:, 1:], reduction="mean")


def train_target(model: nn.Module, windows: np.ndarray, recipe: TargetRecipe) -> float:
    """Train in place over randomly ordered windows; returns the mean loss of the last hundred steps."""
    model.train()
    optimizer = make_optimizer(recipe.steps, recipe.peak_rate, recipe.warmup, recipe.weight_decay)
    move = make_step(model, optimizer, next_token_loss)
    rng = np.random.default_rng(recipe.seed)
    epochs = -(-recipe.steps * recipe.rows // len(windows))
    order = np.concatenate([rng.permutation(len(windows)) for _ in range(epochs)])
    losses: list[float] = []
    started = time.monotonic()
    for step in range(recipe.steps):
        rows = mx.array(windows[order[step * recipe.rows : (step + 1) * recipe.rows]])
        losses.append(move(rows))
        if step % 20 == 19:
            pace = (time.monotonic() - started) / (step + 1)
            print(
                f"target: step {step + 1}/{recipe.steps} loss {np.mean(losses[-20:]):.3f} {pace:.2f} s/step",
                flush=True,
            )
    return float(np.mean(losses[-100:]))


def evaluate_target(model: nn.Module, windows: np.ndarray, rows: int = 16) -> float:
    """Mean loss over whole held-out windows."""
    model.eval()
    batches = [windows[start : start + rows] for start in range(0, len(windows), rows)]
    losses = [np.array(next_token_loss(model, mx.array(batch))) for batch in batches]
    return float(np.average(losses, weights=[len(batch) for batch in batches]))


def save_target(model: nn.Module, folder: Path) -> None:
    """Quantize to 8 bits and write config and weights. A_log stays in fp32, as mlx-lm's loader expects."""
    for _, module in model.named_modules():
        if isinstance(module, nn.Module):
            module.update(
                {
                    name: value.astype(mx.bfloat16)
                    for name, value in module.items()
                    if isinstance(value, mx.array) and name != "A_log"
                }
            )
    model, config = quantize_model(model, dict(ARCHITECTURE), group_size=64, bits=8)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    save_config(config, folder / "config.json")
