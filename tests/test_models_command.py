"""`python -m dflash_mlx.models`: pairs against this machine, and model folders explained, without network."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_mlx.errors import ModelError
from dflash_mlx.models import inspect, listing, main
from dflash_mlx.pairs import EMBEDDED, PUBLIC, SMOLLM2

# Whatever asks a proxy at this address for the network is refused.
NO_NETWORK = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}


def copy(source: str, to: Path) -> Path:
    return Path(shutil.copytree(source, to))


def test_every_pair_is_listed_against_this_machine_and_the_cache(tmp_path: Path) -> None:
    known = next(pair for pair in PUBLIC if pair.revision)
    snapshot = (
        tmp_path / "hub" / f"models--{known.drafter.replace('/', '--')}" / "snapshots" / str(known.revision)
    )
    copy(EMBEDDED.drafter, snapshot)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "dflash_mlx.models"],
        env={"HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path), **NO_NETWORK},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for pair in PUBLIC:
        [line] = [line for line in done.stdout.splitlines() if line.split()[1:2] == [pair.drafter_name]]
        assert ("drafter cached" in line) == (pair is known)
        assert ("drafter in this package" in line) == (pair is SMOLLM2)
    assert "available" in done.stdout


def test_what_fits_depends_on_the_memory() -> None:
    def fitting(limit: int) -> int:
        return sum("fits" in line for line in listing(limit))

    assert fitting(0) == 0
    assert 0 < fitting(20_000_000_000) < len(PUBLIC) == fitting(10**12)


def test_a_drafter_is_explained() -> None:
    text = "\n".join(inspect(EMBEDDED.drafter))
    assert "a drafter" in text
    assert "target_layer_ids         (0, 1, 2)" in text
    assert "layers.N.mlp_conv.base_kernel" in text
    assert "21 tensors, 1,059,968 stored numbers, 2.1 MB" in text
    assert "fits targets with hidden size 256, 4 layers and a vocabulary of 2048: none that is known" in text


def test_a_target_is_explained_with_its_memory(tmp_path: Path) -> None:
    folder = copy(EMBEDDED.target, tmp_path / "model")
    text = "\n".join(inspect(str(folder)))
    assert "a target" in text
    assert "hidden size 256, 4 layers" in text
    assert "no drafter is known for a target like this (model_type 'qwen3_5', hidden_size 256" in text
    assert "tokens of context        1,024       4,096" in text


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", None, "holds no .safetensors file"),
        ("model.safetensors", b"xxx", "is no safetensors file: Expecting value"),
        ("model.safetensors", b"\xff" * 64, "is no safetensors file: its first bytes are no header"),
        ("model.safetensors", b"\x02" + bytes(7) + b"[]", "is no safetensors file: 'list'"),
        ("model.safetensors", truncate, "is truncated: "),
        ("config.json", None, "cannot read"),
        ("config.json", b'{"model_type": "teapot"}', "cannot load the target"),
        ("config.json", b'{"architectures": ["DFlashDraftModel"]}', "drafter config"),
    ],
)
def test_a_broken_folder_is_one_line_and_exit_code_3(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    content: bytes | Callable[[Path], None] | None,
    message: str,
) -> None:
    broken = copy(EMBEDDED.target, tmp_path / "model") / file
    if content is None:
        broken.unlink()
    elif isinstance(content, bytes):
        broken.write_bytes(content)
    else:
        content(broken)
    assert main(["inspect", str(broken.parent)]) == 3
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_hub_id_is_only_looked_for_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="neither a folder nor a hub id in the cache"):
        list(inspect("owner/name"))
    copy(EMBEDDED.drafter, tmp_path / "models--owner--name/snapshots" / ("0" * 40))
    refs = tmp_path / "models--owner--name/refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    assert next(inspect("owner/name")) == f"owner/name: a drafter, commit {'0' * 40}"


def test_a_hostile_name_does_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = json.dumps({"evil\x1b[31m": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (tmp_path / "config.json").write_text('{"model_type": "teapot"}')
    assert main(["inspect", str(tmp_path)]) == 3
    assert "evil[31m" in capsys.readouterr().out
