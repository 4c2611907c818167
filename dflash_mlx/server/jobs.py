"""A request on its way through the engine, and what the engine says about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dflash_mlx.events import Event

if TYPE_CHECKING:
    from dflash_mlx.session import Prepared


@dataclass(frozen=True)
class Queued:
    """The request waits for this many others."""

    ahead: int


@dataclass(frozen=True)
class Begun:
    """The request is being worked on."""

    prompt_tokens: int


@dataclass(frozen=True)
class Step:
    """An event, and the texts of single tokens that it takes to report it."""

    event: Event
    texts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """The request is over without a reply."""

    error: BaseException


Message = Queued | Begun | Step | Failed


@dataclass(eq=False)
class Job:
    """One request on its way through the engine.

    Attributes:
        deliver: takes what becomes of it; the last message is a `Step` with `Finished`, or `Failed`.
        texts_of: which tokens of an event the receiver wants to read one by one.
    """

    prepared: "Prepared"
    deliver: Callable[[Message], None]
    texts_of: Callable[[Event], set[int]]
    cancelled: bool = False
