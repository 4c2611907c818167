"""DFlash 2 speculative decoding on Apple's MLX: the target's own text, several tokens per pass.

    session = load("mlx-community/Qwen3.8-27B-4bit", "z-lab/Qwen3.8-27B-DFlash2")
    for event in session.stream([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=96)):
        print(event.text, end="")

Names are resolved on first use, so that importing errors, events or settings does not import MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_mlx.errors import (
        CheckpointError,
        ConfigError,
        ContextLengthError,
        DFlashError,
        ModelError,
        NumericsError,
        OutOfMemoryError,
        PairError,
        UnsupportedTargetError,
        UsageError,
        WrongThreadError,
    )
    from dflash_mlx.events import Block, Event, Finished, Prefilled, Prefilling
    from dflash_mlx.loading import load
    from dflash_mlx.params import SamplingParams
    from dflash_mlx.result import Result
    from dflash_mlx.session import Session

__version__ = "0.1.0"

_HOMES = {
    "errors": (
        "CheckpointError",
        "ConfigError",
        "ContextLengthError",
        "DFlashError",
        "ModelError",
        "NumericsError",
        "OutOfMemoryError",
        "PairError",
        "UnsupportedTargetError",
        "UsageError",
        "WrongThreadError",
    ),
    "events": ("Block", "Event", "Finished", "Prefilled", "Prefilling"),
    "loading": ("load",),
    "params": ("SamplingParams",),
    "result": ("Result",),
    "session": ("Session",),
}

__all__ = [
    "Block",
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "DFlashError",
    "Event",
    "Finished",
    "ModelError",
    "NumericsError",
    "OutOfMemoryError",
    "PairError",
    "Prefilled",
    "Prefilling",
    "Result",
    "SamplingParams",
    "Session",
    "UnsupportedTargetError",
    "UsageError",
    "WrongThreadError",
    "load",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"dflash_mlx.{module}"), name)
    raise AttributeError(f"module 'dflash_mlx' has no attribute {name!r}")
