"""How much memory a pair needs at a context, known before its weights are read.

Weights and caches are counted: MLX is lazy, so a model that was built but not evaluated has all its shapes,
and so has a forward pass. What a pass needs while it runs depends on MLX's scheduler and is estimated, by
factors that were measured on the CPU backend.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import maybe_set_recommended_wired_limit

from dflash_mlx.config import SLIDING, DrafterConfig
from dflash_mlx.drafter import DrafterModel
from dflash_mlx.drafter.context import LayerContext
from dflash_mlx.errors import OutOfMemoryError
from dflash_mlx.progress import readable
from dflash_mlx.target import Target
from dflash_mlx.target.attach import Mixin, attach
from dflash_mlx.target.caches import Cache, is_recurrent, leaves
from dflash_mlx.target.mixers import HEADS
from dflash_mlx.target.window import WindowCache

STEP = 256
"""Rows by which caches grow."""

SMALLEST_CONTEXT = 1024
"""A pair that has no room for this many tokens is not loaded."""

LINEARS = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)

STREAMS = 9
"""Arrays of a row's hidden width that are alive at once while a pass runs: measured."""

WIDEST = 0.8
"""The share of the widest sub-layer's outputs that is alive with them: measured."""


@dataclass(frozen=True)
class Held:
    """What one cache holds: `fixed` bytes, and `per_row` for each row of the context up to `most`."""

    fixed: int = 0
    per_row: int = 0
    most: int | None = None

    def at(self, context: int) -> int:
        """Bytes at a context of this many tokens."""
        rows = -(-context // STEP) * STEP
        return self.fixed + self.per_row * (rows if self.most is None else min(rows, self.most))


@dataclass(frozen=True)
class Plan:
    """The memory of a pair; all in bytes.

    Attributes:
        weights, drafter_weights: parameters as they will be in memory, after casts and quantization; the rows
            of the target's head that the drafter has for itself are its own.
        caches, drafter_caches: one per cache.
        prefill_step: prompt rows per pass.
        row: what a pass needs for each of its rows.
        score: what attention needs for each pair of a row and a row that it sees; 0 where it is fused.
        sight: rows that the farthest sighted layer of a prompt pass sees; None: all of the context.
        block: what a verify pass keeps besides.
        longest: tokens that the target's context can have, None if unlimited.
    """

    weights: int
    drafter_weights: int
    caches: tuple[Held, ...]
    drafter_caches: tuple[Held, ...]
    prefill_step: int
    row: int
    score: int
    sight: int | None
    block: int
    longest: int | None = None

    def parts(self, context: int) -> dict[str, int]:
        """What adds up to the peak at a context of this many tokens."""
        rows = min(context, self.prefill_step)
        seen = context if self.sight is None else min(context, self.sight)
        held = [cache.at(context) for cache in self.caches]
        return {
            "target weights": self.weights,
            "drafter weights": self.drafter_weights,
            "target cache": sum(held),
            "drafter cache": sum(cache.at(context) for cache in self.drafter_caches),
            # A cache that grows is copied, one layer's keys or values at a time.
            "work space": max(rows * (self.row + self.score * seen), self.block) + max(held, default=0) // 2,
        }

    def total(self, context: int) -> int:
        """The peak at a context of this many tokens."""
        return sum(self.parts(context).values())

    def room(self, limit: int) -> int:
        """The longest context, in tokens, that stays within `limit` bytes; 0 if there is none."""
        low, high = 0, self.longest or 1 << 22
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.total(middle) <= limit else (low, middle - 1)
        return low

    def table(self, contexts: Iterable[int], limit: int) -> str:
        """For people: a line for each part, a column for each context."""
        contexts = list(contexts)
        columns = [self.parts(context) for context in contexts]
        lines = [f"{'tokens of context':<18}" + "".join(f"{context:>12,}" for context in contexts)]
        lines += [
            f"{name:<18}" + "".join(f"{readable(column[name]):>12}" for column in columns)
            for name in columns[0]
        ]
        totals = [sum(column.values()) for column in columns]
        lines.append(f"{'total':<18}" + "".join(f"{readable(total):>12}" for total in totals))
        fits = ["fits" if total <= limit else "too large" for total in totals]
        lines.append(f"{f'of {readable(limit)}':<18}" + "".join(f"{verdict:>12}" for verdict in fits))
        return "\n".join(lines)


def plan(target: Target, drafter: DrafterModel | None, prefill_step: int = 2048) -> Plan:
    """Plan for a target that is not attached yet; nothing of it is evaluated."""
    caches = target.make_cache()
    widest = _widest_outputs(target, caches)
    itemsize = target.embed(mx.array([[0]])).dtype.size
    row = round(STREAMS * target.hidden_size * itemsize + WIDEST * widest)
    recurrent = sum(_nbytes(cache) for cache in leaves(caches) if is_recurrent(cache))
    block = 1 if drafter is None else drafter.config.block_size
    if drafter is not None:
        # The tapped outputs, and all of them side by side.
        row += 2 * len(drafter.config.target_layer_ids) * target.hidden_size * itemsize
    return Plan(
        weights=_weights(target.model),
        drafter_weights=0 if drafter is None else _weights(drafter) + _head_rows(target, drafter),
        caches=tuple(_held(cache, prefill_step) for cache in leaves(caches)),
        drafter_caches=() if drafter is None else _drafter_caches(drafter, prefill_step),
        prefill_step=prefill_step,
        row=row,
        score=_score_bytes(target),
        sight=_sight(caches, prefill_step, tapped=drafter is not None),
        # States as before the block; logits of the target, of the drafter and of the filters.
        block=recurrent + block * (row + 4 * target.vocab_size * itemsize),
        longest=target.context_length,
    )


def available() -> int:
    """Bytes that this process may still take, of Metal's recommended working set or else of free memory."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended is not None:
        return int(recommended) - mx.get_active_memory()
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_room(plan: Plan, limit: int) -> int:
    """Tokens of context that there is room for.

    Raises:
        OutOfMemoryError: so few that loading makes no sense; with what would fit.
    """
    room = plan.room(limit)
    smallest = min(SMALLEST_CONTEXT, plan.longest or SMALLEST_CONTEXT)
    if room >= smallest:
        return room
    needed = plan.total(smallest)
    ways = ["a variant with fewer bits"]
    without = needed - plan.drafter_weights - plan.parts(smallest)["drafter cache"]
    if plan.drafter_weights and without <= limit:
        ways.append("drafter 'none'")
    raise OutOfMemoryError(
        f"not enough memory: {readable(needed)} for {smallest} tokens of context, of which the weights take "
        f"{readable(plan.weights + plan.drafter_weights)}; {readable(limit)} are available; "
        f"use {' or '.join(ways)}, or close other programs"
    )


def wire() -> None:
    """Let Metal keep the weights resident; nothing elsewhere. Call it on the thread that owns MLX."""
    maybe_set_recommended_wired_limit()


# --- counting -----------------------------------------------------------------------------------


def _weights(model: nn.Module) -> int:
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return sum(parameter.nbytes for parameter in parameters.values())


def _head_rows(target: Target, drafter: DrafterModel) -> int:
    """Of the rows of the target's head that a drafter with a list of token ids has for itself."""
    ids = drafter.head_ids
    return 0 if ids is None else sum(array.nbytes for array in target.head_rows(ids).arrays)


def _nbytes(cache: Cache) -> int:
    return sum(array.nbytes for array in cache.cache if array is not None)


def _held(cache: Cache, prefill_step: int) -> Held:
    """From a cache that one lazy pass of one row went through."""
    if is_recurrent(cache):
        return Held(fixed=_nbytes(cache))
    if getattr(cache, "keys", None) is None:
        return Held()  # a layer that uses another's keys and values
    per_row = sum(array.nbytes // array.shape[2] for array in (cache.keys, cache.values))
    if isinstance(cache, WindowCache):
        seen = cache.window + cache.block + cache.align
        return Held(per_row=per_row, most=seen + max(STEP, prefill_step))
    return Held(per_row=per_row, most=getattr(cache, "max_size", None))


def _drafter_caches(drafter: DrafterModel, prefill_step: int) -> tuple[Held, ...]:
    config: DrafterConfig = drafter.config
    itemsize = drafter.norm.weight.dtype.size
    per_row = 2 * config.num_key_value_heads * config.head_dim * itemsize
    sliding = None
    if config.sliding_window is not None:
        window = config.sliding_window + LayerContext.history + prefill_step
        sliding = window + max(LayerContext.step, config.sliding_window // 8)
    # Full layers grow by an eighth, so that copies stay rare; half of that is there on average.
    full = Held(per_row=per_row + per_row // 16)
    return tuple(
        Held(per_row=per_row, most=sliding) if kind == SLIDING else full for kind in config.layer_types
    )


def _sight(caches: list[Cache], prefill_step: int, *, tapped: bool) -> int | None:
    """How far a prompt pass sees: without taps nobody needs what the last attention puts out."""
    attended = [cache for cache in leaves(caches) if getattr(cache, "keys", None) is not None]
    attended = attended if tapped else attended[:-1]
    if not all(isinstance(cache, WindowCache) for cache in attended):
        return None
    return max((cache.window for cache in attended), default=0) + prefill_step


def _score_bytes(target: Target) -> int:
    """Bytes of attention scores for each pair of rows in the layer with most heads.

    On a GPU attention is fused. On the CPU one layer's scores are there at a time, thrice with sinks, which
    are put beside them.
    """
    if mx.default_device().type == mx.DeviceType.gpu:
        return 0
    modules = [module for _, module in target.model.named_modules()]
    heads = max(getattr(module, name, 1) for module in modules for name in HEADS)
    return 4 * heads * (3 if any("sinks" in module for module in modules) else 1)


class _Sized(Mixin):
    """Mixin of a linear layer that notes the size of its output."""

    _sizes: list[int]

    def __call__(self, *args: object, **kwargs: object) -> mx.array:
        out: mx.array = super().__call__(*args, **kwargs)
        self._sizes.append(out.nbytes)
        return out


def _widest_outputs(target: Target, caches: list[Cache]) -> int:
    """Bytes of linear outputs per row in the sub-layer that has most; fills `caches` with one lazy row."""
    sizes: dict[tuple[int, str], list[int]] = {}
    undos = []
    for index, layer in enumerate(target.layers):
        for name, module in layer.named_modules():
            if isinstance(module, LINEARS):
                noted = sizes.setdefault((index, name.partition(".")[0]), [])
                undos.append(attach(module, _Sized, _sizes=noted))
    try:
        target.model(mx.array([[0]]), cache=caches)
    finally:
        for undo in undos:
            undo()
    return max(map(sum, sizes.values()), default=0)
