"""A folder or a Hugging Face hub id -> a local folder. Cached files are used without asking the network."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from dflash_mlx.errors import ModelError, one_line

PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja"]


def resolve(name: str, revision: str | None = None) -> Path:
    """Find `name`, downloading it where it is neither a folder nor cached.

    Args:
        name: a folder, or `owner/name` on the hub.
        revision: branch, tag or commit on the hub.

    Raises:
        ModelError: nothing of that name can be had, or a revision of a folder was asked for.
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
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=PATTERNS, local_files_only=True)
        )
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a folder nor a valid hub id") from error
    except LocalEntryNotFoundError:
        return _download(name, revision)


def _download(name: str, revision: str | None) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        where = name if revision is None else f"{name} at {revision}"
        raise ModelError(
            f"cannot get {where}: it is not cached, and the hub answered: {one_line(error)}"
        ) from error
