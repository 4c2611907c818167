"""What safetensors files hold, from their headers alone. Knows nothing of MLX."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.errors import CheckpointError
from dflash_mlx.progress import readable

LARGEST_HEADER = 100 << 20
"""Bytes; the format allows no more."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `dtype` in the format's own words, such as BF16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def tensor_files(folder: Path) -> list[Path]:
    """A folder's safetensors files; hidden ones are another program's, or were never finished."""
    return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("."))


def read_tensors(folder: Path) -> list[Tensor]:
    """All tensors of a folder's safetensors files.

    Raises:
        CheckpointError: there is no such file, or one is damaged.
    """
    files = tensor_files(folder)
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file")
    return [tensor for file in files for tensor in read_header(file)]


def read_header(file: Path) -> list[Tensor]:
    """The tensors of one file.

    Raises:
        CheckpointError: the file is damaged, or shorter than its header says.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > LARGEST_HEADER:
                raise ValueError("its first bytes are no header")
            header = json.loads(stream.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        spans = {name: entry["data_offsets"] for name, entry in entries.items()}
        tensors = [
            Tensor(
                name, str(entry["dtype"]), tuple(map(int, entry["shape"])), spans[name][1] - spans[name][0]
            )
            for name, entry in entries.items()
        ]
        whole = 8 + length + max((end for _, end in spans.values()), default=0)
        size = file.stat().st_size
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file} is no safetensors file: {error}") from error
    if size < whole:
        raise CheckpointError(f"{file} is truncated: {size:,} of {whole:,} bytes; is the download complete?")
    return tensors


def table(tensors: Iterable[Tensor]) -> str:
    """A line for all tensors that differ in their layer's number only: name, how many, type, shape, size."""
    counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    sizes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for tensor in tensors:
        key = re.sub(r"(?<=\.)\d+(?=\.)", "N", tensor.name), tensor.dtype, tensor.shape
        counts[key] += 1
        sizes[key] += tensor.nbytes
    width = max((len(name) for name, _, _ in counts), default=0)
    lines = []
    for key, count in counts.items():
        name, dtype, shape = key
        size = readable(sizes[key])
        lines.append(f"  {name:<{width}}  {count:>5} x {dtype:<5} {list(shape)!s:<20} {size:>10}")
    elements = sum(count * math.prod(shape) for (_, _, shape), count in counts.items())
    total = f"{counts.total():,} tensors, {elements:,} stored numbers, {readable(sizes.total())}"
    return "\n".join([*lines, f"  {total}"])
