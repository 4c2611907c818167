"""What was measured on this machine, kept between runs: a small JSON file per fact in the cache folder.

A fact that cannot be read back, for whatever reason, counts as not yet measured.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

Key = Mapping[str, str | int | float | None]
"""All that the fact depends on, such as chip, versions and a hash of the code that measured it."""


def cache_folder() -> Path:
    """`~/Library/Caches/dflash-chat` on macOS; `dflash-chat` in `$XDG_CACHE_HOME` or `~/.cache` elsewhere."""
    return user_cache_path("dflash-chat", appauthor=False)


def recall(kind: str, key: Key, folder: Path | None = None) -> Any | None:
    """The JSON value that `remember` was given for exactly this key, or None."""
    try:
        entry = json.loads(_file(kind, key, folder).read_text(encoding="utf-8"))
        return entry["value"] if entry["key"] == dict(key) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(kind: str, key: Key, value: Any, folder: Path | None = None) -> None:
    """Keep a JSON value; where the folder cannot be written, it will be measured again."""
    file = _file(kind, key, folder)
    text = json.dumps({"key": dict(key), "value": value}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".part")
    except OSError:
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as part:
            part.write(text)
        Path(name).replace(file)  # at once: a second process reads the old fact or the new one
    except OSError:
        Path(name).unlink(missing_ok=True)


def _file(kind: str, key: Key, folder: Path | None) -> Path:
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
    return (folder or cache_folder()) / f"{kind}-{digest}.json"
