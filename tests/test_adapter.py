"""LoRA adapters: honoured by plain and speculative decoding alike, or refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

from dflash_mlx import ModelError, SamplingParams, load
from dflash_mlx.pairs import EMBEDDED

LORA = {"rank": 4, "scale": 4.0, "dropout": 0.0}
PROMPT = "import os\n\ndef main(argv):\n"
PARAMS = SamplingParams(max_tokens=32)


def save_adapter(folder: Path, layers: dict[str, Any] = LORA, **changes: Any) -> Path:
    """A random adapter for every linear layer of the embedded target, strong enough to change the text."""
    folder.mkdir()
    model, _ = load_model(Path(EMBEDDED.target), lazy=True)
    linear_to_lora_layers(model, 4, layers)
    mx.random.seed(1)
    parameters: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    adapter = {
        name: mx.random.normal(value.shape) * 0.1
        for name, value in parameters.items()
        if name.endswith(("lora_a", "lora_b"))
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), adapter)
    config = {"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": layers, **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("lora") / "adapter")


@pytest.mark.parametrize("dequantize", [True, False])
def test_an_adapter_changes_the_text_and_speculation_does_not(adapter: Path, dequantize: bool) -> None:
    without = load(EMBEDDED.target, dequantize=dequantize).generate(PROMPT, PARAMS)
    session = load(EMBEDDED.target, adapter=str(adapter), dequantize=dequantize)
    assert f"adapter {adapter}" in session.notes
    assert session.exactness == "exact"
    plain = session.generate(PROMPT, PARAMS, speculative=False)
    assert plain.tokens != without.tokens
    for block_size in (2, 5):
        result = session.generate(PROMPT, PARAMS, block_size=block_size)
        assert result.tokens == plain.tokens
    assert any(cycle.drafted for cycle in result.cycles)
    logits, _ = session.target.forward(mx.array(session.encode(PROMPT)), session.target.make_cache())
    bare = load(EMBEDDED.target, dequantize=dequantize).target
    others, _ = bare.forward(mx.array(session.encode(PROMPT)), bare.make_cache())
    assert not mx.allclose(logits, others, atol=0.1)


@pytest.mark.parametrize("dequantize", [True, False])
def test_the_drafter_shares_an_embedding_and_a_head_with_their_adapter(
    tmp_path: Path, dequantize: bool
) -> None:
    layers = {**LORA, "keys": ["language_model.model.embed_tokens"]}
    adapter = save_adapter(tmp_path / "adapter", layers)
    session = load(EMBEDDED.target, adapter=str(adapter), dequantize=dequantize)
    embedding: Any = session.target.model.language_model.model.embed_tokens
    assert "lora_a" in embedding
    ids, hidden = mx.array([[5, 6, 7]]), mx.random.normal((1, 3, 256), key=mx.random.key(0))
    assert mx.array_equal(session.target.embed(ids), embedding(ids))
    assert mx.array_equal(session.target.head(hidden), embedding.as_linear(hidden))
    assert not mx.allclose(session.target.embed(ids), embedding.embedding(ids), atol=1e-3)
    plain = session.generate(PROMPT, PARAMS, speculative=False)
    assert session.generate(PROMPT, PARAMS, block_size=5).tokens == plain.tokens


def peft(folder: Path) -> None:
    (folder / "adapters.safetensors").rename(folder / "adapter_model.safetensors")


def alpha(folder: Path) -> None:
    config = {"num_layers": 4, "lora_parameters": {"rank": 4, "alpha": 8}}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def foreign(folder: Path) -> None:
    mx.save_safetensors(str(folder / "adapters.safetensors"), {"model.layers.9.lora_a": mx.zeros((2, 2))})


def half(folder: Path) -> None:
    file = folder / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def without_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (peft, "is a PEFT adapter: mlx-lm cannot apply it"),
        (alpha, "missing required key 'scale'"),
        (foreign, r"incompatible tensors: model\.layers\.9\.lora_a: not an adapter parameter"),
        (half, "cannot apply the adapter"),
        (without_config, "cannot apply the adapter"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_no_adapter_for_this_target_is_one_line(
    adapter: Path, tmp_path: Path, harm: Any, message: str
) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    harm(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load(EMBEDDED.target, adapter=str(folder), drafter="none")
    assert "\n" not in str(caught.value)


def test_an_adapter_that_is_nowhere_is_refused() -> None:
    with pytest.raises(ModelError, match="'/no/such' is neither a folder nor a hub id"):
        load(EMBEDDED.target, adapter="/no/such")
