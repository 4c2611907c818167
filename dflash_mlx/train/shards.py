"""Recorded responses on disk: one safetensors file per batch, written whole or not at all.

Hidden states are bfloat16. Files are mapped into memory, so that a run of any length trains in little of it;
numpy has no bfloat16, so here they are its bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

_NUMPY = {"I32": np.int32, "U16": np.uint16, "BF16": np.uint16}


@dataclass(frozen=True)
class Sample:
    """One prompt with its response.

    Attributes:
        tokens: [n], beginning with `prompt` prompt tokens.
        taps: [n - 1, taps * H], the tapped hidden states of all tokens but the last, which was never fed.
        final: [n - 1, H], the states that the head saw: with the head they give the target's own logits.
        prompt: how many tokens are the prompt's.
    """

    tokens: np.ndarray
    taps: np.ndarray
    final: np.ndarray
    prompt: int

    @property
    def written(self) -> int:
        """Tokens of the response."""
        return len(self.tokens) - self.prompt


def narrow(states: mx.array) -> np.ndarray:
    """Hidden states -> the bits of bfloat16."""
    return np.array(states.astype(mx.bfloat16).view(mx.uint16))


def widen(bits: np.ndarray) -> mx.array:
    """The bits of bfloat16 -> float32."""
    return mx.array(np.ascontiguousarray(bits)).view(mx.bfloat16).astype(mx.float32)


def save_samples(samples: Sequence[Sample], file: Path) -> None:
    """Write samples to one file, end to end; a killed process leaves no half a file under this name."""
    arrays = {
        "lengths": mx.array(np.array([[len(s.tokens), s.prompt] for s in samples], dtype=np.int32)),
        "tokens": mx.array(np.concatenate([s.tokens for s in samples]).astype(np.int32)),
        "taps": mx.array(np.concatenate([s.taps for s in samples])),
        "final": mx.array(np.concatenate([s.final for s in samples])),
    }
    partial = file.with_name(f".{file.name}")  # mx.save_safetensors insists on its ending
    mx.save_safetensors(str(partial), arrays)
    partial.replace(file)


def load_samples(files: Iterable[Path]) -> list[Sample]:
    """Map what `save_samples` wrote."""
    samples = []
    for file in files:
        arrays = _map(file)
        token = row = 0
        for length, prompt in arrays["lengths"].tolist():
            rows = slice(row, row + length - 1)
            tokens = arrays["tokens"][token : token + length]
            samples.append(Sample(tokens, arrays["taps"][rows], arrays["final"][rows], prompt))
            token, row = token + length, row + length - 1
    return samples


def _map(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, without reading them: a length, a JSON header, then the data."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    return {
        name: np.memmap(
            file,
            dtype=_NUMPY[entry["dtype"]],
            mode="r",
            offset=8 + size + entry["data_offsets"][0],
            shape=tuple(entry["shape"]),
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }
