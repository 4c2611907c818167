"""What the endpoint tells about the loaded pair and this machine. Knows nothing of MLX."""

from dataclasses import dataclass

from dflash_mlx.params import SamplingParams
from dflash_mlx.server.syntax import Syntax


@dataclass(frozen=True)
class Facts:
    """What stays as it is while a pair is loaded.

    Attributes:
        syntax: how the model calls tools; None: it cannot, or not in a way that is known here.
        plain_tokens_per_second: of a plain step after a short context; None without a drafter.
    """

    block_size: int
    speculative: bool
    exactness: str
    fallbacks: tuple[str, ...]
    context_window: int | None
    notes: tuple[str, ...]
    reasoning_levels: tuple[str, ...]
    syntax: Syntax | None
    defaults: SamplingParams
    plain_tokens_per_second: float | None


@dataclass(frozen=True)
class Memory:
    """Bytes that MLX holds, held at most, and that the machine has."""

    active: int = 0
    peak: int = 0
    total: int = 0
