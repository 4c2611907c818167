"""Measure what a cycle of each block size costs on this machine: at the first loads, then remembered.

The decode loop itself is timed, over caches that are made deep without reading a prompt. Noise only ever
adds, so of several timings the quickest counts. They are spread over several loads, and in each of them over
all sizes in turns: a moment in which the machine was busy must not decide how it decodes from then on.
"""

import hashlib
import importlib.metadata
import time

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from dflash_mlx import memo
from dflash_mlx.costs import Costs
from dflash_mlx.decode import decode
from dflash_mlx.drafter import Drafter, DrafterModel
from dflash_mlx.errors import memory_errors
from dflash_mlx.kernels import Walker
from dflash_mlx.params import SamplingParams
from dflash_mlx.sampling import Sampler
from dflash_mlx.schedule import Plan
from dflash_mlx.target import Target
from dflash_mlx.target.caches import Cache, leaves

DEPTHS = (8, 1024, 8192)
"""Context lengths to measure at: the shortest, and two between which attention's share shows."""
LOADS = 3
"""Loads of a pair that measure."""
ROUNDS = 3
"""Times that each of them goes round all sizes; the first, which warms up, does not count."""
ENOUGH = 2.0
"""Seconds at one depth after which two rounds must do."""
METHOD = 2
"""Changes when the loop or what is timed does, so that what others measured is measured again."""
KIND = "costs"


def costs(
    target: Target,
    drafter: DrafterModel,
    numbers: str,
    window: int | None = None,
    walker: Walker | None = None,
) -> Costs:
    """Costs of this pair on this machine: remembered, or measured now as at the first loads.

    Args:
        numbers: how the session describes its arithmetic; another BLAS has other costs too.
        window: tokens of context that there may be; None: any number.
        walker: of the session's drafters.

    Raises:
        OutOfMemoryError: there is no room for the caches.
    """
    depths = depths_within(window, drafter.config.block_size)
    key = {
        "pair": fingerprint(target.model, drafter),
        "chip": str(mx.device_info().get("device_name")),
        "device": str(mx.default_device()),
        "mlx": importlib.metadata.version("mlx"),
        "mlx-lm": importlib.metadata.version("mlx-lm"),
        "numbers": numbers,
        "measured": f"depths {depths}, {ROUNDS} rounds, {LOADS} loads, method {METHOD}",
    }
    known = memo.recall(KIND, key) or {"loads": 0}
    if known["loads"] >= LOADS:
        return Costs.from_json(known["costs"])
    with memory_errors():
        found = measure_costs(target, drafter, depths, walker)
    if known["loads"]:
        found = found.quickest(Costs.from_json(known["costs"]))
    memo.remember(KIND, key, {"loads": known["loads"] + 1, "costs": found.to_json()})
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


def depths_within(window: int | None, largest: int) -> tuple[int, ...]:
    """Those of `DEPTHS` that leave room to measure in a context of so many tokens; the first in any case."""
    room = ROUNDS * sum(_round(largest))
    return tuple(depth for depth in DEPTHS if window is None or depth + room <= window) or DEPTHS[:1]


def measure_costs(
    target: Target, drafter: DrafterModel, depths: tuple[int, ...], walker: Walker | None = None
) -> Costs:
    """Time cycles of every block size at some depths, and a draft pass."""

    def deep(depth: int) -> Drafter:
        return deep_drafter(target, drafter, depth, walker)

    return Costs(
        depths=depths,
        cycles=tuple(_cycles(target, deep(depth), depth) for depth in depths),
        draft=_draft_pass(target, deep(DEPTHS[0])),
    )


def _round(largest: int) -> list[int]:
    """The sizes of a round, the largest first; of the plain steps at its end only the inner two count.

    The loop times those alone that start ahead and start the next. There are two since every size is compared
    with plain steps.
    """
    return [*range(largest, 1, -1), 1, 1, 1, 1]


class _Sweep:
    """A policy that goes round all sizes, and notes what their cycles took."""

    copies = False

    def __init__(self, largest: int) -> None:
        self._round = _round(largest)
        self._asked = 0
        self._observed = 0
        self._total = 0.0
        self.seconds: dict[int, list[float]] = {rows: [] for rows in range(1, largest + 1)}

    @property
    def done(self) -> bool:
        rounds = self._observed // len(self._round)
        timed = min(map(len, self.seconds.values()))
        return timed > 1 and (rounds >= ROUNDS or (rounds > 1 and self._total > ENOUGH))

    def plan(self, limit: int, keys: int, match: int = 0) -> Plan:
        self._asked += 1
        return Plan(self._round[(self._asked - 1) % len(self._round)])

    def observe(self, plan: Plan, accepted: int, seconds: float, keys: int) -> None:
        if seconds > 0:
            self.seconds[plan.rows].append(seconds)
        self._observed += 1
        self._total += seconds


def _cycles(target: Target, drafter: Drafter, depth: int) -> tuple[float, ...]:
    """Seconds of a cycle of 1, 2, ... rows after `depth` keys."""
    sweep = _Sweep(drafter.config.block_size)
    prompt = [0]
    sampler = Sampler(SamplingParams(), prompt, target.vocab_size)
    caches = deep_cache(target, depth)
    for _ in decode(
        target, caches, prompt, sampler, drafter=drafter, policy=sweep, cancelled=lambda: sweep.done
    ):
        pass
    return tuple(min(times[1:]) for times in sweep.seconds.values())


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


def deep_drafter(target: Target, model: DrafterModel, depth: int, walker: Walker | None) -> Drafter:
    """A drafter that costs as much as one that has taken in `depth` rows: one row's keys are repeated."""
    drafter = Drafter(model, walker)
    drafter.extend(mx.zeros((1, 1, len(model.config.target_layer_ids) * target.hidden_size)))
    for layer in drafter.context.layers:
        assert layer.keys is not None
        assert layer.values is not None
        unseen = layer.unseen(depth - 1)
        rows = depth - 1 - unseen
        keys, values = (mx.repeat(held[:, :, :1], rows, axis=2) for held in (layer.keys, layer.values))
        layer.append(keys, values, unseen)
    drafter.context.position = depth
    mx.eval(drafter.arrays)
    return drafter


def _draft_pass(target: Target, drafter: Drafter) -> float:
    """Seconds of one draft pass of the largest block, waited for."""
    times: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        mx.eval(drafter.propose(0, drafter.config.block_size, target.embed, target.draft_head).tokens)
        times.append(time.perf_counter() - start)
    return min(times[1:])
