"""What one training is to make, and where its files are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.errors import DFlashError, UsageError, one_line
from dflash_mlx.target.window import LARGEST_BLOCK

TAP_DEPTHS = (0.15, 0.38, 0.62, 0.83, 0.95)
"""Tapped layers by their depth: denser towards the end, where most is known of the next tokens."""


@dataclass(frozen=True)
class Job:
    """The settings of one training.

    Attributes:
        model: the target, a folder or hub id.
        tokens: how many the target is to write, all responses together.
        prompts: a file of prompts, or None for our own.
        start: a drafter to go on from, a folder or hub id, or None to begin anew.
        layers, block_size, rank: of the drafter; `rank` is the candidate selector's.
        draft_head: how many token ids the drafter proposes from; 0: all.
        epochs: how often each response is learned from.
    """

    model: str
    tokens: int = 1_000_000
    prompts: str | None = None
    start: str | None = None
    layers: int = 2
    block_size: int = 8
    rank: int = 32
    draft_head: int = 0
    epochs: float = 4.0

    def __post_init__(self) -> None:
        least = {"tokens": 1000, "layers": 1, "block_size": 2, "rank": 1, "draft_head": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise UsageError(f"{name} is {getattr(self, name)}: it must be at least {bound}")
        if self.block_size > LARGEST_BLOCK:
            raise UsageError(f"block_size is {self.block_size}: it must be at most {LARGEST_BLOCK}")
        if not 0 < self.epochs < math.inf:
            raise UsageError(f"epochs is {self.epochs}: it must be positive and finite")


def tapped_layers(count: int) -> list[int]:
    """The layers of a target with `count` of them that a new drafter is conditioned on; never the last."""
    return sorted({min(int(count * depth), max(count - 2, 0)) for depth in TAP_DEPTHS})


class Workplace:
    """The folder that a training writes: the drafter itself, and under work/ what it is made from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self._job = self.work / "job.json"
        self.responses = self.work / "responses"
        self.checkpoint = self.work / "checkpoint.safetensors"
        self.fitted = self.work / "fitted.json"
        self.checked = self.work / "check.json"

    def check_free(self) -> None:
        """Refuse to begin where there is a training already, or a model: the target itself, for one.

        Raises:
            UsageError: there is one.
        """
        if self._job.exists():
            raise UsageError(f"{self.folder} holds a training already: pass --resume, or another --out")
        if any(file for name in ("config.json", "*.safetensors") for file in self.folder.glob(name)):
            raise UsageError(
                f"{self.folder} holds a model already, which a drafter would overwrite: pass another --out"
            )

    def begin(self, job: Job) -> None:
        """Write down what is being made.

        Raises:
            DFlashError: the folder cannot be written.
        """
        with writing(self.folder):
            self.responses.mkdir(parents=True, exist_ok=True)
            write_text(self._job, json.dumps(asdict(job), indent=2) + "\n")

    def resume(self, wanted: Mapping[str, Any]) -> Job:
        """The job that was begun here.

        Args:
            wanted: settings that were asked for again.

        Raises:
            UsageError: none was, or a setting differs.
        """
        if not self._job.exists():
            raise UsageError(f"{self.folder} holds no training to resume")
        try:
            job = Job(**json.loads(self._job.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            reason = one_line(error)
            raise UsageError(f"cannot read {self._job}: {reason}; begin anew in another --out") from error
        for name, value in wanted.items():
            if value != getattr(job, name):
                raise UsageError(
                    f"{name} is {value!r}, but this training began with {getattr(job, name)!r}: "
                    "leave it out, or begin anew in another --out"
                )
        return job

    def shards(self, name: str) -> list[Path]:
        """The recorded responses of one set, `train` or `held_out`."""
        return sorted(self.responses.glob(f"{name}-*.safetensors"))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong in writing under `path` into one clear error; what was written before stays."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # What MLX says of a file that it cannot open, or not write to the end.
        if isinstance(error, RuntimeError) and not str(error).startswith(("[save", "[write]")):
            raise
        raise DFlashError(
            f"cannot write under {path}: {one_line(error)}; what was done is kept: "
            "make room or choose a folder that can be written, then pass --resume"
        ) from error


def write_text(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = file.with_name(f".{file.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
