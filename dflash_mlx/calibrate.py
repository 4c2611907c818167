"""Measure what a cycle of each block size costs on this machine: a few seconds once, then remembered.

The decode loop itself is timed, over caches that are made deep without reading a prompt.
"""

import hashlib
import importlib.metadata
import time
from collections.abc import Iterable

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from dflash_mlx import memo
from dflash_mlx.decode import decode
from dflash_mlx.drafter import Drafter, DrafterModel
from dflash_mlx.params import SamplingParams
from dflash_mlx.sampling import Sampler
from dflash_mlx.schedule import Costs
from dflash_mlx.target import Target
from dflash_mlx.target.caches import Cache, leaves

DEPTHS = (8, 1024, 8192)
"""Context lengths to measure at: the shortest, and two between which attention's share shows."""
CYCLES = 5
"""Cycles of each size; the first one is not counted, and of the others the quickest: noise only ever adds."""
ENOUGH = 0.4
"""Seconds after which two cycles of a size must do: where they take long, noise is a small part of them."""
KIND = "costs"


def costs(target: Target, drafter: DrafterModel, numbers: str) -> Costs:
    """Costs of this pair on this machine, remembered or measured now.

    Args:
        numbers: how the session describes its arithmetic; another BLAS has other costs too.
    """
    key = {
        "pair": fingerprint(target.model, drafter),
        "chip": str(mx.device_info().get("device_name")),
        "device": str(mx.default_device()),
        "mlx": importlib.metadata.version("mlx"),
        "mlx-lm": importlib.metadata.version("mlx-lm"),
        "numbers": numbers,
        "depths": str(DEPTHS),
    }
    known = memo.recall(KIND, key)
    if known is not None:
        return Costs.from_json(known)
    found = measure_costs(target, drafter)
    memo.remember(KIND, key, found.to_json())
    return found


def fingerprint(*models: nn.Module) -> str:
    """What the costs depend on: the classes of all modules, and the shapes and types of all weights."""
    digest = hashlib.sha256()
    for model in models:
        for name, module in sorted(model.named_modules()):
            digest.update(f"{name} {type(module).__name__}\n".encode())
        weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]  # a list here
        for name, weight in weights:
            digest.update(f"{name} {weight.shape} {weight.dtype}\n".encode())
    return digest.hexdigest()[:16]


def measure_costs(target: Target, drafter: DrafterModel, depths: Iterable[int] = DEPTHS) -> Costs:
    """Time cycles of every block size, and a draft pass."""
    sizes, limit = drafter.config.block_size, target.context_length
    room = CYCLES * sizes * (sizes + 1) // 2
    depths = tuple(depth for depth in depths if limit is None or depth + room <= limit) or DEPTHS[:1]
    return Costs(
        depths=depths,
        cycles=tuple(_cycles(target, drafter, depth) for depth in depths),
        draft=_draft_pass(target, drafter),
    )


class _Sweep:
    """A policy that goes through all sizes, and notes what their cycles took.

    The largest come first: a plain step starts the pass of the next, so one before a block would look cheap.
    """

    def __init__(self, largest: int) -> None:
        self.seconds: dict[int, list[float]] = {rows: [] for rows in range(largest, 0, -1)}

    @property
    def done(self) -> bool:
        return all(map(_enough, self.seconds.values()))

    def rows(self, limit: int, keys: int) -> int:
        return next((rows for rows, times in self.seconds.items() if not _enough(times)), 1)

    def observe(self, rows: int, accepted: int, seconds: float, keys: int) -> None:
        self.seconds[rows].append(seconds)


def _enough(times: list[float]) -> bool:
    return len(times) >= CYCLES or (len(times) > 1 and sum(times) > ENOUGH)


def _cycles(target: Target, drafter: DrafterModel, depth: int) -> tuple[float, ...]:
    """Seconds of a cycle of 1, 2, ... rows after `depth` keys."""
    sweep = _Sweep(drafter.config.block_size)
    prompt = [0]
    sampler = Sampler(SamplingParams(), prompt, target.vocab_size)
    caches = deep_cache(target, depth)
    for _ in decode(
        target, caches, prompt, sampler, drafter=Drafter(drafter), policy=sweep, cancelled=lambda: sweep.done
    ):
        pass
    return tuple(min(sweep.seconds[rows][1:]) for rows in sorted(sweep.seconds))


def deep_cache(target: Target, depth: int) -> list[Cache]:
    """A cache that costs as much as one that has read `depth` tokens.

    A token's keys and values are repeated in caches that grow with the context; all others cost the same at
    any depth.
    """
    caches = target.make_cache()
    target.forward(mx.array([0]), caches)
    for cache in leaves(caches):
        if type(cache) is KVCache:
            keys, values, offset = cache.state
            cache.state = (*(mx.repeat(a[..., :offset, :], depth, axis=2) for a in (keys, values)), depth)
    mx.eval([cache.state for cache in leaves(caches)])
    return caches


def _draft_pass(target: Target, drafter: DrafterModel) -> float:
    """Seconds of one draft pass of the largest block, waited for."""
    proposer = Drafter(drafter)
    width = len(drafter.config.target_layer_ids) * target.hidden_size
    proposer.extend(mx.zeros((1, 1, width)))
    times: list[float] = []
    while not _enough(times):
        start = time.perf_counter()
        mx.eval(proposer.propose(0, drafter.config.block_size, target.embed, target.draft_head).tokens)
        times.append(time.perf_counter() - start)
    return min(times[1:])
