"""The embedded pair, loaded once: float32 on the CPU, as `make demo` runs it."""

import json

import pytest

import dflash_mlx
from dflash_mlx.pairs import MODELS


@pytest.fixture(scope="session")
def pair() -> "dflash_mlx.Session":
    return dflash_mlx.load(dequantize=True)


@pytest.fixture(scope="session")
def held_out() -> list[str]:
    """Pieces of code that neither model was trained on."""
    prompts: list[str] = json.loads((MODELS / "held_out.json").read_text(encoding="utf-8"))
    return prompts
