"""Targets find their drafters: by shape, and by what they say of their origin where shapes are shared."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.errors import ModelError, PairError
from dflash_mlx.pairs import EMBEDDED, PUBLIC, Pair, base_models, drafter_for, find


def config(pair: Pair, **changes: Any) -> dict[str, Any]:
    """A flat config.json of a target of this pair's shape."""
    assert pair.shape is not None
    sizes = {
        "model_type": pair.shape.family,
        "hidden_size": pair.shape.hidden_size,
        "num_hidden_layers": pair.shape.layers,
        "vocab_size": pair.shape.vocab_size,
    }
    return {**sizes, **changes}


def pair(base: str) -> Pair:
    return next(pair for pair in PUBLIC if pair.base == base)


@pytest.mark.parametrize("known", PUBLIC, ids=lambda pair: pair.base)
def test_a_base_and_its_quantizations_find_the_drafter_made_for_them(known: Pair) -> None:
    for name in (known.target, f"mlx-community/{known.base}-4bit", f"/models/{known.base.lower()}-MLX-8bit"):
        match = find(config(known), [name])
        assert match.pair is known
        assert known.drafter_name in match.note


def test_nested_and_text_only_configs_are_the_same_target() -> None:
    muse, gemma = pair("Muse-Glimmer-30B"), pair("gemma-4-12B-it")
    nested = {"model_type": "muse_glimmer", "text_config": config(muse, model_type="muse_glimmer_text")}
    assert find(nested).pair is muse
    text = {key: value for key, value in config(gemma).items() if key != "vocab_size"}
    unified = {"model_type": "gemma4_unified", "text_config": text, "vocab_size": 262144}
    assert find(unified).pair is gemma


def test_a_fine_tune_with_a_name_of_its_own_is_found_by_its_shape_and_told_so() -> None:
    match = find(config(pair("Qwen3-8B")), ["someone/poet"])
    assert match.pair is pair("Qwen3-8B")
    assert "chosen by the target's shape; it was made for Qwen3-8B" in match.note


def test_where_bases_share_a_shape_the_first_telling_name_decides() -> None:
    shared = config(pair("Qwen3.8-27B"))
    assert find(shared, ["Qwen/Qwen3.6-27B", "someone/better-than-Qwen3.8-27B"]).pair is pair("Qwen3.6-27B")
    assert find(shared, ["someone/poet", "qwen3_5-27b"]).pair is pair("Qwen3.5-27B")
    with pytest.raises(
        PairError, match="several drafters have this target's shape, and nothing says"
    ) as caught:
        find(shared, ["someone/poet"])
    for base in ("Qwen3.8-27B-DFlash2", "Qwen3.6-27B-DFlash", "Qwen3.5-27B-DFlash", "'none'"):
        assert base in str(caught.value)
    with pytest.raises(PairError, match="several drafters"):
        find(shared, ["someone/Qwen3.6-27B-x-Qwen3.8-27B-merge"])


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("Qwen3-4B", "mlx-community/Qwen3-4B-Instruct-2507-4bit"),
        ("Qwen3-Coder-30B-A3B-Instruct", "Qwen/Qwen3-30B-A3B"),
        ("Qwen3-Coder-Next", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM-135M-Instruct"),
    ],
)
def test_a_sibling_without_a_drafter_is_not_given_its_neighbours(base: str, name: str) -> None:
    with pytest.raises(PairError, match="has its shape, but learned from another model") as caught:
        find(config(pair(base)), [name])
    assert pair(base).drafter in str(caught.value)


def test_another_shape_or_family_is_refused_with_what_was_seen() -> None:
    for other in (
        config(pair("Qwen3-8B"), hidden_size=4097),
        config(pair("Qwen3-8B"), num_hidden_layers=35),
        config(pair("Qwen3-8B"), vocab_size=151937),
        config(pair("Qwen3-8B"), model_type="qwen3_moe"),
        {"model_type": "qwen3"},
        {},
    ):
        with pytest.raises(PairError, match="no drafter is known for a target like this"):
            find(other, ["Qwen/Qwen3-8B"])


def test_the_card_of_a_folder_outweighs_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3.8-27B-lookalike"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(pair("Qwen3.8-27B"))))
    assert drafter_for(folder, str(folder)).pair is pair("Qwen3.8-27B")
    (folder / "README.md").write_text("---\nbase_model:\n- Qwen/Qwen3.6-27B\ntags: [mlx]\n---\n# Poet\n")
    assert drafter_for(folder, str(folder)).pair is pair("Qwen3.6-27B")


def test_base_models_are_read_from_a_cards_header_only() -> None:
    assert base_models("---\nbase_model: Qwen/Qwen3-8B\n---\n") == ["Qwen/Qwen3-8B"]
    assert base_models("---\nbase_model:\n  - a/b.c\n  - d/e\nlicense: mit/x\n---\n") == ["a/b.c", "d/e"]
    assert base_models("base_model: a/b\n") == []
    assert base_models("---\ntags: [x]\n---\nbase_model: a/b\n") == []


@pytest.mark.parametrize(("text", "message"), [(None, "cannot read"), ("{", "cannot read"), ("[]", "a list")])
def test_a_folder_without_a_config_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        drafter_for(tmp_path, "x")
    assert "\n" not in str(caught.value)


def test_the_embedded_pair_is_found_by_its_folder() -> None:
    assert drafter_for(Path(EMBEDDED.target), EMBEDDED.target).pair is EMBEDDED


def test_the_data_is_sound() -> None:
    assert len({pair.drafter for pair in PUBLIC}) == len({pair.target for pair in PUBLIC}) == len(PUBLIC)
    for known in PUBLIC:
        assert known.revision is None or re.fullmatch("[0-9a-f]{40}", known.revision)
        assert known.block_size is None or 2 <= known.block_size <= 32
        assert known.target_billions > known.drafter_billions > 0
