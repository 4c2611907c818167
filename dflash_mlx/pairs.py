"""Known target -> drafter pairs, as data, and how a target's own config finds its drafter.

Knows nothing of MLX. A drafter fits any target of one shape: a fine-tune or a quantization of its base keeps
the shape, whatever it is called. Where bases share a shape, what the target says of its origin decides.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.errors import ModelError, PairError

DEMO = Path(__file__).parent / "demo"


@dataclass(frozen=True)
class Shape:
    """What a drafter's weights depend on, and the family that tells equal sizes apart.

    Attributes:
        family: how `model_type` begins, after which only "_text" or "_unified" may follow.
    """

    family: str
    hidden_size: int
    layers: int
    vocab_size: int


@dataclass(frozen=True)
class Pair:
    """A target and the drafter trained for it: folders, or ids on the Hugging Face hub.

    Attributes:
        target: the base that the drafter was trained on.
        shape: of that base; None for the embedded pair, which is found by its folder.
        block_size: rows of a block as published; the drafter's own config is what counts.
        revision: the commit of the drafter that these facts are of; None where none is known to us.
        target_billions, drafter_billions: parameters, for estimates of sizes.
        siblings: bases of the same shape that the drafter was not trained on.
    """

    target: str
    drafter: str
    shape: Shape | None = None
    block_size: int | None = None
    revision: str | None = None
    target_billions: float = 0.0
    drafter_billions: float = 0.0
    siblings: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        """The target's name without its owner."""
        return self.target.rpartition("/")[2]

    @property
    def drafter_name(self) -> str:
        """What the drafter is called: its id on the hub, or the name of its folder."""
        path = Path(self.drafter)
        return path.name if path.is_absolute() else self.drafter


@dataclass(frozen=True)
class Match:
    """A pair found for a target, and what to tell the user of how it was found."""

    pair: Pair
    note: str


EMBEDDED = Pair(str(DEMO / "demo-target"), str(DEMO / "demo-drafter"), block_size=5)
"""The small trained pair that ships with the package: it completes Python and cannot converse."""

SMOLLM2 = Pair(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    str(DEMO / "smollm2-drafter"),
    Shape("llama", 576, 30, 49152),
    block_size=5,
    target_billions=0.135,
    drafter_billions=0.012,
    siblings=("SmolLM-135M",),
)
"""A small model that converses. Its drafter was trained here and ships with the package."""

_QWEN3_5_27B = Shape("qwen3_5", 5120, 64, 248320)
_QWEN3_5_35B = Shape("qwen3_5_moe", 2048, 40, 248320)

PUBLIC: tuple[Pair, ...] = (
    # DFlash 2
    SMOLLM2,
    Pair(
        "Qwen/Qwen3.8-27B",
        "z-lab/Qwen3.8-27B-DFlash2",
        _QWEN3_5_27B,
        block_size=8,
        revision="50307d4c4cde6860d4eee73e2547cd786fe8e8a4",
        target_billions=27,
        drafter_billions=1.92,
    ),
    Pair(
        "meta-models/Muse-Glimmer-30B",
        "z-lab/Muse-Glimmer-30B-DFlash2",
        Shape("muse_glimmer", 6656, 52, 202048),
        block_size=16,
        revision="b54ffdd11fa9cfe2af370012e5763d492c904128",
        target_billions=30,
        drafter_billions=2.77,
    ),
    # DFlash
    Pair(
        "Qwen/Qwen3.6-27B",
        "z-lab/Qwen3.6-27B-DFlash",
        _QWEN3_5_27B,
        block_size=16,
        revision="0919688658996800f86b895034249700e9481106",
        target_billions=27,
        drafter_billions=1.73,
    ),
    Pair(
        "Qwen/Qwen3.6-35B-A3B",
        "z-lab/Qwen3.6-35B-A3B-DFlash",
        _QWEN3_5_35B,
        block_size=16,
        revision="f181eece646affea2c38b2765f1aaa01a9734ccd",
        target_billions=35,
        drafter_billions=0.39,
    ),
    Pair(
        "Qwen/Qwen3.5-4B",
        "z-lab/Qwen3.5-4B-DFlash",
        Shape("qwen3_5", 2560, 32, 248320),
        block_size=16,
        target_billions=4,
        drafter_billions=0.5,
    ),
    Pair(
        "Qwen/Qwen3.5-9B",
        "z-lab/Qwen3.5-9B-DFlash",
        Shape("qwen3_5", 4096, 32, 248320),
        block_size=16,
        target_billions=9,
        drafter_billions=1,
    ),
    Pair(
        "Qwen/Qwen3.5-27B",
        "z-lab/Qwen3.5-27B-DFlash",
        _QWEN3_5_27B,
        block_size=16,
        target_billions=27,
        drafter_billions=1.73,
    ),
    Pair(
        "Qwen/Qwen3.5-35B-A3B",
        "z-lab/Qwen3.5-35B-A3B-DFlash",
        _QWEN3_5_35B,
        target_billions=35,
        drafter_billions=0.5,
    ),
    Pair(
        "Qwen/Qwen3.5-122B-A10B",
        "z-lab/Qwen3.5-122B-A10B-DFlash",
        Shape("qwen3_5_moe", 3072, 48, 248320),
        block_size=16,
        target_billions=122,
        drafter_billions=0.8,
    ),
    Pair(
        "Qwen/Qwen3.5-397B-A17B",
        "z-lab/Qwen3.5-397B-A17B-DFlash",
        Shape("qwen3_5_moe", 4096, 60, 248320),
        target_billions=397,
        drafter_billions=1,
    ),
    Pair(
        "Qwen/Qwen3-4B",
        "z-lab/Qwen3-4B-DFlash-b16",
        Shape("qwen3", 2560, 36, 151936),
        block_size=16,
        revision="b74e3a329c4d963783143b1e970d95b002be72bd",
        target_billions=4,
        drafter_billions=0.5,
        siblings=("Qwen3-4B-Instruct-2507", "Qwen3-4B-Thinking-2507"),
    ),
    Pair(
        "Qwen/Qwen3-8B",
        "z-lab/Qwen3-8B-DFlash-b16",
        Shape("qwen3", 4096, 36, 151936),
        block_size=16,
        revision="9b41424b7109f9c5413454f481b09a82b85333f4",
        target_billions=8,
        drafter_billions=1,
    ),
    Pair(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "z-lab/Qwen3-Coder-30B-A3B-DFlash",
        Shape("qwen3_moe", 2048, 48, 151936),
        target_billions=30.5,
        drafter_billions=0.5,
        siblings=("Qwen3-30B-A3B",),
    ),
    Pair(
        "Qwen/Qwen3-Coder-Next",
        "z-lab/Qwen3-Coder-Next-DFlash",
        Shape("qwen3_next", 2048, 48, 151936),
        target_billions=80,
        drafter_billions=0.5,
        siblings=("Qwen3-Next-80B-A3B",),
    ),
    Pair(
        "google/gemma-4-12B-it",
        "z-lab/gemma4-12B-it-DFlash",
        Shape("gemma4", 3840, 48, 262144),
        block_size=16,
        target_billions=12,
        drafter_billions=0.73,
    ),
    Pair(
        "google/gemma-4-31B-it",
        "z-lab/gemma-4-31B-it-DFlash",
        Shape("gemma4", 5376, 60, 262144),
        block_size=16,
        target_billions=31,
        drafter_billions=1.6,
    ),
    Pair(
        "google/gemma-4-26B-A4B-it",
        "z-lab/gemma-4-26B-A4B-it-DFlash",
        Shape("gemma4", 2816, 30, 262144),
        block_size=16,
        target_billions=26,
        drafter_billions=0.4,
    ),
    Pair(
        "openai/gpt-oss-20b",
        "z-lab/gpt-oss-20b-DFlash",
        Shape("gpt_oss", 2880, 24, 201088),
        block_size=8,
        target_billions=21,
        drafter_billions=0.8,
    ),
    Pair(
        "openai/gpt-oss-120b",
        "z-lab/gpt-oss-120b-DFlash",
        Shape("gpt_oss", 2880, 36, 201088),
        target_billions=117,
        drafter_billions=0.8,
    ),
    Pair(
        "meta-llama/Llama-3.1-8B-Instruct",
        "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        Shape("llama", 4096, 32, 128256),
        block_size=10,
        target_billions=8,
        drafter_billions=1,
        siblings=("Llama-3-8B", "Meta-Llama-3-8B"),
    ),
)
"""The drafters for public targets that mlx-lm runs; sizes from their configs, model cards and file lists."""


def drafter_for(folder: Path, name: str) -> Match:
    """The pair for a target in a local folder, which the user called `name`.

    Raises:
        ModelError: the folder has no readable config.json.
        PairError: as for `find`.
    """
    if folder.resolve() == Path(EMBEDDED.target).resolve():
        return Match(EMBEDDED, "")
    config = read_config(folder)
    try:
        bases = base_models((folder / "README.md").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        bases = []
    return find(config, [*bases, str(config.get("_name_or_path", "")), name, folder.resolve().name])


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's config.json.

    Raises:
        ModelError: it is missing, or no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}, expected a JSON object")
    return config


def find(config: Mapping[str, Any], names: Sequence[str] = ()) -> Match:
    """The pair for a target.

    Args:
        config: the target's config.json.
        names: what says where the target comes from, the most telling first: bases that its card names,
            its hub id, its folder.

    Raises:
        PairError: no drafter is known for it, or several fit and no name decides.
    """
    pairs = [pair for pair in PUBLIC if pair.shape is not None and _has_shape(config, pair.shape)]
    hint = "name a drafter, or pass 'none' to decode plainly"
    if not pairs:
        raise PairError(f"no drafter is known for a target like this ({_described(config)}); {hint}")
    offered = " or ".join(f"{pair.drafter} (made for {pair.base})" for pair in pairs)
    base = _origin(names, [name for pair in pairs for name in (_stem(pair.base), *pair.siblings)])
    made_for_it = [pair for pair in pairs if _stem(pair.base) == base]
    if made_for_it:
        pair = made_for_it[0]
        return Match(pair, f"drafter {pair.drafter_name}, made for {pair.base}")
    if base is not None:
        raise PairError(
            f"no drafter is known for {base}; {offered} has its shape, but learned from another model: {hint}"
        )
    if len(pairs) > 1:
        raise PairError(
            f"several drafters have this target's shape, and nothing says its base: {offered}; {hint}"
        )
    [pair] = pairs
    return Match(
        pair,
        f"drafter {pair.drafter_name}, chosen by the target's shape; it was made for {pair.base}, and drafts "
        "worse the further the target is from it",
    )


def fits(hidden_size: int, layers: int, vocab_size: int) -> list[Pair]:
    """The pairs whose targets have these sizes."""
    return [
        pair
        for pair in PUBLIC
        if pair.shape is not None
        and (pair.shape.hidden_size, pair.shape.layers, pair.shape.vocab_size)
        == (hidden_size, layers, vocab_size)
    ]


def base_models(card: str) -> list[str]:
    """What a model card (README.md) names as its base in the header, if anything."""
    header = re.match(r"---\n(.*?)\n---", card, re.DOTALL)
    entry = re.search(r"^base_model:(.*(?:\n *- .*)*)", header[1], re.MULTILINE) if header else None
    return re.findall(r"[\w.-]+/[\w.-]+", entry[1]) if entry else []


def _has_shape(config: Mapping[str, Any], shape: Shape) -> bool:
    text = _text_config(config)
    kind = str(config.get("model_type", ""))
    return re.fullmatch(rf"{shape.family}(_text|_unified)?", kind) is not None and (
        text.get("hidden_size"),
        text.get("num_hidden_layers"),
        text.get("vocab_size", config.get("vocab_size")),
    ) == (shape.hidden_size, shape.layers, shape.vocab_size)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that is about text: multimodal models nest it."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _described(config: Mapping[str, Any]) -> str:
    text = _text_config(config)
    facts = [f"model_type {config.get('model_type')!r}"]
    facts += [
        f"{key} {text[key]}" for key in ("hidden_size", "num_hidden_layers", "vocab_size") if key in text
    ]
    return ", ".join(facts)


def _origin(names: Sequence[str], bases: Sequence[str]) -> str | None:
    """The one base that the first telling name contains; the longest where one contains another."""
    for name in names:
        found = [base for base in bases if _plain(base) in _plain(name)]
        longest = [base for base in found if all(len(base) >= len(other) for other in found)]
        if len(longest) == 1:
            return longest[0]
    return None


def _stem(base: str) -> str:
    """A base's name without the word that only says it was tuned for chat."""
    return re.sub(r"-(it|Instruct)$", "", base)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
