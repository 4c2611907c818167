"""Names of models: folders, cached hub ids, downloads from a hub on a local port, and what cannot be had."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, hub_server
from huggingface_hub import snapshot_download

from dflash_mlx import hub
from dflash_mlx.errors import ModelError
from dflash_mlx.hub import resolve

WEIGHTS = bytes(range(256)) * 2000
FILES = {"owner/name": {"config.json": b"{}", "model.safetensors": WEIGHTS, "weights.gguf": b"not ours"}}


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
    (snapshot / "model.safetensors").write_bytes(b"")
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


# --- downloads ----------------------------------------------------------------------------------


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on a local port, and an empty cache."""
    with hub_server(FILES) as server:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


def test_a_download_reports_its_bytes_and_is_used_again(
    online: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    seen: list[tuple[int, int]] = []
    folder = resolve("owner/name", progress=lambda done, total: seen.append((done, total)))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert hub.commit(folder) == COMMIT
    assert seen[-1] == (len(WEIGHTS) + 2, len(WEIGHTS) + 2)
    assert len(seen) > 50
    assert sum(done == total for done, total in seen) <= 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    online.served.clear()
    assert resolve("owner/name") == folder
    assert resolve("owner/name", COMMIT) == folder
    assert online.served == []


def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(
    online: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    online.break_after["model.safetensors"] = 100_000
    folder = resolve("owner/name")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert ("model.safetensors", 100_000) in online.served


def test_an_interrupted_download_keeps_the_files_it_completed(online: Hub, tmp_path: Path) -> None:
    def stop(done: int, _: int) -> None:
        if done > 10:
            while not list(tmp_path.rglob("config.json")):
                time.sleep(0.01)
            raise ConnectionError("the cable was pulled")

    with pytest.raises(ModelError, match="the hub answered: the cable was pulled"):
        resolve("owner/name", progress=stop)
    assert hub.cached("owner/name") is None, "half a model is not a model"
    online.served.clear()
    folder = resolve("owner/name")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert ("config.json", 0) not in online.served


def test_a_model_that_another_program_cached_without_its_card_is_complete(
    online: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online.files["owner/name"]["README.md"] = b"# Name"
    folder = Path(snapshot_download("owner/name", allow_patterns=["*.json", "model*.safetensors"]))
    assert not (folder / "README.md").exists()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve("owner/name") == folder


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("owner/gated", None, "cannot get owner/gated: it is gated; accept its terms at http"),
        ("owner/missing", None, "cannot get owner/missing: the hub has no such model, or it is private"),
        ("owner/name", "v9", "cannot get owner/name at v9: the hub has the model, but no revision 'v9'"),
    ],
)
def test_what_the_hub_refuses_is_named_with_what_to_do(
    online: Hub, name: str, revision: str | None, message: str
) -> None:
    online.files["owner/gated"] = FILES["owner/name"]
    online.gated.add("owner/gated")
    with pytest.raises(ModelError, match=message) as caught:
        resolve(name, revision)
    assert "\n" not in str(caught.value)


def test_a_model_larger_than_the_disk_is_refused_before_the_first_byte(online: Hub) -> None:
    online.claimed["model.safetensors"] = 10**16
    with pytest.raises(ModelError, match=r"no room for owner/name: 10000000\.0 GB are to be downloaded"):
        resolve("owner/name")
    assert online.served == []


def test_a_hub_that_does_not_answer_is_one_line(online: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="cannot get owner/name: it is not cached, and the hub") as caught:
        resolve("owner/name")
    assert "\n" not in str(caught.value)


def test_a_cached_config_alone_is_no_model(cache: Path) -> None:
    (cached(cache) / "model.safetensors").unlink()
    assert hub.cached("owner/name") is None
