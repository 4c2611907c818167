"""Names of models: folders, cached hub ids, and what cannot be had."""

from pathlib import Path

import pytest

from dflash_mlx.errors import ModelError
from dflash_mlx.hub import resolve


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a network that must not be asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def cached(cache: Path, revision: str = "main", commit: str = "0" * 40) -> Path:
    repo = cache / "models--owner--name"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / revision).write_text(commit)
    return snapshot


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


def test_a_cached_hub_id_is_found_without_the_network(cache: Path) -> None:
    snapshot = cached(cache)
    other = cached(cache, "v2", "1" * 40)
    assert resolve("owner/name") == snapshot
    assert resolve("owner/name", "v2") == other
    assert resolve("owner/name", "1" * 40) == other


def test_what_is_not_cached_and_cannot_be_fetched_is_one_line(cache: Path) -> None:
    with pytest.raises(ModelError, match="cannot get owner/other at v1: it is not cached") as caught:
        resolve("owner/other", "v1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such", "./relative", "a/b/c", "plain", "own er/na me", "~/nothing"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="neither a folder nor a"):
        resolve(name)


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="revision is 'main'"):
        resolve(str(tmp_path), "main")
