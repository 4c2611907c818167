"""Which blocks a pair decodes with: of the size that is asked for, or of the best one for every cycle."""

from collections.abc import Callable
from functools import cached_property

from dflash_mlx.costs import Costs
from dflash_mlx.drafter import DrafterModel
from dflash_mlx.errors import UsageError
from dflash_mlx.schedule import PLAIN, Adaptive, Fixed, Policy


class BlockSizes:
    """What a session knows of them.

    Attributes:
        default: rows of a verify pass where a request names none; None: chosen for every cycle.

    Args:
        measure: what their cycles cost; asked for once, if at all.
    """

    def __init__(
        self, drafter: DrafterModel | None, default: int | None, measure: Callable[[DrafterModel], Costs]
    ) -> None:
        self._drafter = drafter
        self._measure = measure
        self.default: int | None = None
        self.default = self.checked(default)

    @property
    def largest(self) -> int:
        """Rows of the block that the drafter was trained for; 1 without a drafter."""
        return 1 if self._drafter is None else self._drafter.config.block_size

    @cached_property
    def costs(self) -> Costs:
        """What cycles cost on this machine; may take some seconds when first asked for.

        Raises:
            UsageError: there is no drafter.
        """
        if self._drafter is None:
            raise UsageError("there is no drafter, so there is no block size to choose")
        return self._measure(self._drafter)

    def checked(self, size: int | None) -> int | None:
        """The size, or the default without one.

        Raises:
            UsageError: it is not one that the drafter was trained for.
        """
        if size is None:
            return self.default
        if not 1 <= size <= self.largest:
            made_for = (
                "there is no drafter"
                if self._drafter is None
                else f"the drafter was trained for {self.largest}"
            )
            raise UsageError(f"block_size is {size}: it must be between 1 and {self.largest} ({made_for})")
        return size

    def policy(self, size: int | None) -> Policy:
        """How a reply chooses its blocks, if they are not all of one size."""
        if self._drafter is None:
            return PLAIN
        if size is not None:
            return Fixed(size)
        return self._adaptive if self.costs.can_pay else PLAIN

    @cached_property
    def _adaptive(self) -> Adaptive:
        """One for all replies: the next text is most like the last."""
        return Adaptive(self.costs)

    def why_plain(self, size: int | None) -> str | None:
        """Where a size is to be chosen and none can ever pay: why, for the user."""
        if self._drafter is None or size is not None or self.costs.can_pay:
            return None
        price = self.costs.seconds(self.largest, 0) / self.costs.seconds(1, 0)
        return (
            f"decoding plainly: a pass of {self.largest} rows costs {price:.1f} plain steps here, "
            "more than it could ever give"
        )
