"""A folder or a Hugging Face hub id -> a local folder. Cached files are used without asking the network."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from dflash_mlx.errors import ModelError, one_line
from dflash_mlx.progress import readable
from dflash_mlx.tensors import tensor_files

NEEDED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja"]
# The card names the base of a fine-tune or of a quantization, by which its drafter is found. Models that
# other programs cached lack it, and are complete nevertheless.
PATTERNS = [*NEEDED, "README.md"]

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and those there will be, from any thread, often."""


def resolve(name: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Find `name`, downloading it where it is neither a folder nor cached.

    Files that an interrupted download completed are kept, so that the next one goes on with the others.

    Args:
        name: a folder, or `owner/name` on the hub.
        revision: branch, tag or commit on the hub.
        progress: told how far a download is; never called without one.

    Raises:
        ModelError: nothing of that name can be had, there is no room for it, or a revision of a folder was
            asked for.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelError(
                f"revision is {revision!r}, but {name} is a folder; revisions exist on the hub only"
            )
        return folder
    if folder.is_absolute() or name.startswith(("~", ".")) or name.count("/") != 1:
        raise ModelError(f"{name!r} is neither a folder nor a hub id of the form owner/name")
    try:
        return cached(name, revision) or _download(name, revision, progress)
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a folder nor a valid hub id") from error


def cached(name: str, revision: str | None = None) -> Path | None:
    """The folder of a hub id whose files are all in the cache, or None; the network is not asked."""
    try:
        found = snapshot_download(name, revision=revision, allow_patterns=NEEDED, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    folder = Path(found)
    # Other programs download a config alone, and then no list of the files says what is missing.
    return folder if tensor_files(folder) else None


def cache_folder() -> Path:
    """Where the hub's files are kept on this machine."""
    return Path(constants.HF_HUB_CACHE)


def cached_ids() -> list[str]:
    """The hub ids of which the cache holds anything."""
    folders = sorted(cache_folder().glob("models--*--*"))
    return ["/".join(folder.name.split("--", 2)[1:]) for folder in folders]


def commit(folder: Path) -> str | None:
    """The commit that a folder of the hub's cache holds, or None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def _download(name: str, revision: str | None, progress: Progress | None) -> Path:
    where = name if revision is None else f"{name} at {revision}"
    try:
        files = snapshot_download(
            name, revision=revision, allow_patterns=PATTERNS, dry_run=True, tqdm_class=_bars(None, 0, 0)
        )
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        present = sum(file.file_size or 0 for file in files) - missing
        _check_room(where, missing)
        bars = _bars(progress, present, present + missing)
        return Path(snapshot_download(name, revision=revision, allow_patterns=PATTERNS, tqdm_class=bars))
    except (HFValidationError, ModelError):
        raise
    except Exception as error:  # huggingface_hub raises its own, its HTTP client's and the system's
        raise ModelError(f"cannot get {where}: {_reason(name, revision, error)}") from error


def _check_room(where: str, needed: int) -> None:
    """Refuse before the first byte what would fill the disk after many."""
    folder = cache_folder()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ModelError(
            f"no room for {where}: {readable(needed)} are to be downloaded, {readable(free)} are free "
            f"at {existing}; make room, or set HF_HOME to a folder on another disk"
        )


def _reason(name: str, revision: str | None, error: Exception) -> str:
    """What went wrong and what to do, in a line."""
    if isinstance(error, DryRunError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    page = f"{constants.ENDPOINT}/{name}"
    if isinstance(error, GatedRepoError):
        return f"it is gated; accept its terms at {page}, then run: hf auth login"
    if isinstance(error, RevisionNotFoundError):
        return f"the hub has the model, but no revision {revision!r}; see {page}/tree/main"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no such model, or it is private; see {page}, or run: hf auth login"
    if constants.HF_HUB_OFFLINE:
        return "it is not cached, and HF_HUB_OFFLINE forbids to ask the network"
    return f"it is not cached, and the hub answered: {one_line(error)}"


def _bars(progress: Progress | None, present: int, total: int) -> type[tqdm]:
    """A bar that shows nothing and tells `progress`, for huggingface_hub reports by bars only.

    It opens one for bytes received and one for bytes written. Which of the two moves depends on how the
    files are transferred, so the longer one counts.
    """
    lock = threading.Lock()
    moved: dict[int, int] = {}  # bytes by bar

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts = options.get("unit") == "B"
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if not self.counts:
                return
            with lock:
                moved[id(self)] = moved.get(id(self), 0) + int(n or 0)
                done = present + max(moved.values())
            if progress is not None:
                progress(min(done, total), total)

    return Bar
