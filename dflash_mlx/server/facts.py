"""What the endpoint tells about the loaded pair and this machine. Knows nothing of MLX."""

from dataclasses import dataclass

from dflash_mlx.params import SamplingParams


@dataclass(frozen=True)
class Facts:
    """What stays as it is while a pair is loaded."""

    block_size: int
    speculative: bool
    exactness: str
    fallbacks: tuple[str, ...]
    context_window: int | None
    notes: tuple[str, ...]
    reasoning_levels: tuple[str, ...]
    defaults: SamplingParams
    plain_tokens_per_second: float | None


@dataclass(frozen=True)
class Memory:
    """Bytes that MLX holds, held at most, and that the machine has."""

    active: int = 0
    peak: int = 0
    total: int = 0
