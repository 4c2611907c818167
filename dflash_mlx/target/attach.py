"""Give one module instance a behaviour: its class, parameters and place in the tree stay as they are."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlx import nn

Undo = Callable[[], None]

if TYPE_CHECKING:

    class Mixin:
        """Stands for the module's own class, which follows a mixin in the method resolution order."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

        def as_linear(self, x: Any) -> Any: ...

else:
    Mixin = object


def attach(module: nn.Module, mixin: type[Mixin], **attributes: Any) -> Undo:
    """Make `module` an instance of a class made on the fly, `mixin` before its own class.

    Parameter paths, attributes and isinstance stay as they were. `attributes` are set as plain object
    attributes, because `nn.Module` would count lists, dicts and arrays among the parameters.

    Returns:
        A function that restores the module.
    """
    original = type(module)
    module.__class__ = type(mixin.__name__ + original.__name__, (mixin, original), {})
    for name, value in attributes.items():
        object.__setattr__(module, name, value)

    def undo() -> None:
        module.__class__ = original
        for name in attributes:
            object.__delattr__(module, name)

    return undo
