"""The embedded pair, loaded once in float32 as `make demo` runs it, and a cache folder of our own."""

import json
from collections.abc import Iterator

import pytest

import dflash_mlx
from dflash_mlx.pairs import DEMO, EMBEDDED


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests remember about the machine stays out of the user's cache folder, in child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def pair() -> "dflash_mlx.Session":
    return dflash_mlx.load(EMBEDDED.target, dequantize=True)


@pytest.fixture(scope="session")
def held_out() -> list[str]:
    """Pieces of code that neither model was trained on."""
    prompts: list[str] = json.loads((DEMO / "held_out.json").read_text(encoding="utf-8"))
    return prompts
