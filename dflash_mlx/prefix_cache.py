"""What was computed for earlier prompts and replies, for later ones that begin alike.

A conversation grows at its end: of a prompt of thousands of tokens only the last turn is new. So when a reply
ends, the target's caches and the drafter's context stay here, and the next prompt goes on from a copy of
those that share most with it. MLX copies data only when one of the two is written to.

Rows of keys and values can be cut to any prefix. A recurrent state, or a window that has moved on, cannot: of
these a context keeps marks, copies as they were where another prompt is likely to part from this one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce

from dflash_mlx.drafter.context import DrafterContext, LayerContext
from dflash_mlx.errors import NumericsError
from dflash_mlx.target.caches import Cache, arrays, copy_state, drop, droppable, fork, is_plain, leaves

SLOTS = 16
"""Contexts that are kept at most, however small they are."""

MARKS = 6
"""Places that a context can go back to where it cannot be cut."""

SHORT = 64
"""Tokens that are computed again without a thought."""

SMALL = 4
"""A context never pushes out one that takes so many times its memory: a short request spares a long one."""

BRANCH = 8
"""A context goes if another shares all of it but one part in so many: that much is soon computed again."""

Part = Cache | LayerContext


class Context:
    """Everything that was computed for one sequence of tokens.

    Attributes:
        tokens: one for each row.
        caches: the target's.
        drafter: the drafter's context, which has taken in the same rows; None: none drafted.
        partings: where prompts that begin like this one went on otherwise.
    """

    def __init__(self, caches: list[Cache], drafter: DrafterContext | None) -> None:
        self.tokens: tuple[int, ...] = ()
        self.caches = caches
        self.drafter = drafter
        self.partings: set[int] = set()
        self._marks: dict[int, list[Any]] = {}  # states of the parts, None where rows can be cut

    @property
    def needs_marks(self) -> bool:
        """Whether `reach` depends on where `note` was called."""
        return not all(_keeps_rows(part) for part in self._parts)

    def note(self, tokens: Sequence[int]) -> None:
        """Say whose rows are there now; a place to come back to.

        Args:
            tokens: those of the last call, and more.
        """
        self.tokens = tuple(tokens)
        if tokens and self.needs_marks:
            states = [None if _keeps_rows(part) else copy_state(part.state) for part in self._parts]
            self._marks[len(tokens)] = states
            self._thin()

    def settle(self) -> None:
        """Compute what is under way, so that no graph is kept."""
        mx.eval(arrays(self.caches), self.drafter.arrays if self.drafter else [])

    def reach(self, rows: int) -> int:
        """The longest prefix of at most so many rows that `cut` can give."""
        extra = max(0, len(self.tokens) - rows)
        if all(extra <= _droppable(part) for part in self._parts):
            return len(self.tokens) - extra
        return max((place for place in self._marks if place <= rows), default=0)

    def cut(self, rows: int, *, drafted: bool) -> "Context":
        """A new context with the first rows, as many as `reach` said; this one stays as it is."""
        context = Context([fork(cache) for cache in self.caches], None)
        if drafted and self.drafter:
            context.drafter = self.drafter.copy()
            context.drafter.position = rows
        context.tokens = self.tokens[:rows]
        context.partings = {place for place in self.partings if place <= rows}
        states = self._marks.get(rows) or [None] * len(self._parts)
        for part, state in zip(context._parts, states, strict=False):  # the drafter's are the last
            if state is None:
                _drop(part, len(self.tokens) - rows)
            else:
                part.state = copy_state(state)
        places = [place for place in self._marks if place <= rows]
        context._marks = {place: self._marks[place][: len(context._parts)] for place in places}
        return context

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps, marks included."""
        held = [part.state for part in self._parts], list(self._marks.values())
        bytes_of = tree_reduce(lambda n, value: n + getattr(value, "nbytes", 0), held, 0)
        return int(bytes_of)

    @property
    def _parts(self) -> list[Part]:
        return [*leaves(self.caches), *(self.drafter.layers if self.drafter else ())]

    def _thin(self) -> None:
        """Drop marks that are missed least: what would be computed again from the one before is short."""
        while len(self._marks) > MARKS:
            places = sorted(self._marks)
            missed = {place: place - before for before, place in pairwise([0, *places[:-1]])}
            del self._marks[min(missed, key=lambda place: (place in self.partings, missed[place]))]


class PrefixCache:
    """Contexts by their tokens, the least recently used first.

    Args:
        make: an empty context, with one for the drafter if it is true.
        budget: bytes that all of them may take.
    """

    def __init__(self, make: Callable[[bool], Context], budget: int) -> None:
        self._make = make
        self._budget = budget
        self._kept: list[Context] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(context.nbytes for context in self._kept)

    @contextmanager
    def resumed(self, prompt: tuple[int, ...], *, drafted: bool) -> Iterator[Context]:
        """A context with the longest prefix of this prompt, apart from its last token; it is kept afterwards.

        What was computed is as good after a cancellation. If anything fails, nothing of it is kept; numbers
        that are not finite may come from the prefix, which then goes too.
        """
        source, rows = self._longest(prompt, drafted)
        context = self._make(drafted) if source is None else source.cut(rows, drafted=drafted)
        # Where two prompts part a third is likely to: an agent's instructions end there, for one.
        parting = max((shared(other.tokens, prompt) for other in self._kept), default=0)
        if parting - rows > SHORT:
            context.partings.add(parting)
        if source is not None:
            self._kept.remove(source)
            self._kept.append(source)
        try:
            yield context
        except GeneratorExit:
            self._keep(context)
            raise
        except NumericsError:
            self._kept = [other for other in self._kept if other is not source]
            raise
        self._keep(context)

    def fit(self, limit: int) -> None:
        """Drop what was not used for longest until at most so many bytes are kept."""
        while self._kept and self.nbytes > limit:
            self._kept.pop(0)

    def _longest(self, prompt: tuple[int, ...], drafted: bool) -> tuple[Context | None, int]:
        best: tuple[Context | None, int] = None, 0
        for context in self._kept:
            if drafted and context.drafter is None:
                continue  # without its rows the drafter would guess badly
            rows = context.reach(min(shared(context.tokens, prompt), len(prompt) - 1))
            if rows > best[1]:
                best = context, rows
        return best

    def _keep(self, context: Context) -> None:
        if not context.tokens:
            return
        context.settle()
        self._kept = [old for old in self._kept if not _contains(context, old)]
        self._kept.append(context)
        while self.nbytes > self._budget or len(self._kept) > SLOTS:
            # The newest itself is the last in this order.
            self._kept.remove(next(c for c in self._kept if c.nbytes <= SMALL * context.nbytes))


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens from the first are the same."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _contains(new: Context, old: Context) -> bool:
    """Whether the old context is of little use beside the new one."""
    if old.drafter is not None and new.drafter is None:
        return False
    return (len(old.tokens) - shared(new.tokens, old.tokens)) * BRANCH <= len(old.tokens)


# --- parts of a context -------------------------------------------------------------------------


def _keeps_rows(part: Part) -> bool:
    return part.limit is None if isinstance(part, LayerContext) else is_plain(part)


def _droppable(part: Part) -> int:
    return part.droppable if isinstance(part, LayerContext) else droppable(part)


def _drop(part: Part, rows: int) -> None:
    if isinstance(part, LayerContext):
        part.drop(rows)
    else:
        drop(part, rows)
