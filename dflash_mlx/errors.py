"""Everything that this package raises on purpose.

    DFlashError                    exit code 1, HTTP 500
    ├── UsageError (ValueError)    exit code 2, HTTP 400   a parameter or a prompt that cannot be honoured
    │   └── ContextLengthError     a prompt that leaves no room for a reply
    ├── ModelError                 exit code 3, HTTP 503   something about the files or the models
    │   ├── ConfigError            a drafter config that is not one, or contradicts itself
    │   ├── CheckpointError        weights that are missing, truncated, or of another shape
    │   ├── PairError              a drafter that was not trained for this target
    │   └── UnsupportedTargetError a target whose caches cannot be rolled back exactly
    ├── OutOfMemoryError           exit code 4, HTTP 503   MLX could not allocate; the process survives
    ├── NumericsError              exit code 1, HTTP 500   a model that produced NaN or infinity
    └── WrongThreadError           exit code 1, HTTP 500   a session used outside the thread that owns it

A message says what happened, the offending value, and what to do; it is one line.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class DFlashError(Exception):
    """Base class; catch it to catch everything below."""

    exit_code = 1
    http_status = 500


class UsageError(DFlashError, ValueError):
    """A parameter or a prompt that cannot be honoured."""

    exit_code = 2
    http_status = 400


class ContextLengthError(UsageError):
    """A prompt that leaves no room for a reply in the model's context."""


class ModelError(DFlashError):
    """The files of a model cannot be found, read or used."""

    exit_code = 3
    http_status = 503


class ConfigError(ModelError):
    """A drafter's config.json is not a DFlash config, or contradicts itself."""


class CheckpointError(ModelError):
    """The tensors of a checkpoint are not those that its config announces."""


class PairError(ModelError):
    """A drafter and a target that do not belong together."""


class UnsupportedTargetError(ModelError):
    """Speculation is refused because the target's caches cannot be rolled back exactly."""


class NumericsError(DFlashError):
    """A model produced NaN or infinity; the request fails, the session stays usable."""


class WrongThreadError(DFlashError):
    """A session was used outside the thread that loaded it."""


class OutOfMemoryError(DFlashError):
    """MLX could not allocate."""

    exit_code = 4
    http_status = 503


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn MLX's failed allocations into `OutOfMemoryError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise OutOfMemoryError(
            f"out of memory: {one_line(error)}; use a shorter prompt, fewer bits, or a smaller model"
        ) from error


def one_line(error: BaseException) -> str:
    """The first line of another library's message, which may go on for pages; two if one ends in a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
