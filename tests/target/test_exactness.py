"""A target whose numbers depend on how many rows ride along is found out and said."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import FAMILIES, Scripted, scripts, tiny_model, tiny_target

from dflash_mlx.decode import decode
from dflash_mlx.params import SamplingParams
from dflash_mlx.sampling import Sampler
from dflash_mlx.schedule import Fixed
from dflash_mlx.target import Target
from dflash_mlx.target.attach import Mixin, attach
from dflash_mlx.target.exactness import EXACT, measure_exactness

OPENBLAS = [*Path("/usr").glob("lib/*/openblas-pthread/libopenblas.so.0")]


class RowCountNoise(Mixin):
    """Mixin of a layer: moves its output by noise that is a function of the number of rows alone."""

    _scale: float

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        noise = mx.random.normal(out.shape[-1:], key=mx.random.key(out.shape[1]))
        return out + self._scale * noise


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_exact_target_is_found_exact(family: str) -> None:
    assert measure_exactness(tiny_target(family), range(2, 9), (0, 2)) == EXACT


@pytest.mark.parametrize(
    ("layer", "where"), [(0, "layer 0 or one before"), (2, "layer 2 or one"), (3, "what follows the taps")]
)
def test_noise_keyed_by_the_row_count_is_found_and_placed(layer: int, where: str) -> None:
    target = Target(tiny_model("qwen3_5"))
    attach(target.layers[layer], RowCountNoise, _scale=1e-5)
    target.attach([0, 2])
    found = measure_exactness(target, [2, 5], (0, 2))
    assert found.startswith(f"not exact: with 2 rows in a pass, {where}")


def test_the_noise_would_have_changed_the_text() -> None:
    """Else the test above would guard nothing."""
    target = tiny_target("qwen3")
    for layer in target.layers:
        attach(layer, RowCountNoise, _scale=3e-2)
    changed = 0
    for start in range(30):
        prompt = [start, start + 40, start + 80]
        replies: list[list[int]] = []
        for block_size in (1, 4):
            drafter = Scripted(3, replies[0], scripts()["wrong"]) if replies else None
            options: dict[str, Any] = {"drafter": drafter, "policy": Fixed(block_size), "max_tokens": 12}
            sampler = Sampler(SamplingParams(), prompt, target.vocab_size)
            try:
                events = list(decode(target, target.make_cache(), prompt, sampler, **options))
            except AssertionError:  # the scripted drafter saw another text than the plain one
                changed += 1
                break
            replies.append([t for e in events for t in e.tokens])
    assert changed > 0


PROBE = """
from dflash_mlx import load
from dflash_mlx.pairs import EMBEDDED
print(load(EMBEDDED.target, dequantize=True).exactness)
"""


def exactness_of_the_pair(**environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="MLX's own CPU library is what its Linux wheel brings")
def test_the_embedded_pair_is_exact_on_mlxs_own_cpu_library() -> None:
    assert exactness_of_the_pair(LD_PRELOAD="") == EXACT


@pytest.mark.skipif(not OPENBLAS, reason="no OpenBLAS is installed: apt install libopenblas0-pthread")
def test_a_preloaded_openblas_is_found_not_to_be_exact() -> None:
    assert exactness_of_the_pair(LD_PRELOAD=str(OPENBLAS[0])).startswith("not exact: with ")
