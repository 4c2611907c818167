"""The tables of docs/models.md: each line is written by the proof that it reports."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from mlx import nn
from prove import prove_pair, prove_target, shrunk
from published import PUBLIC, TARGETS
from tiny import EXACT as FAMILIES
from tiny import tiny_model
from zoo import NOT_BUILT, models, zoo_model

from dflash_mlx.config import DrafterConfig

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
QUANTIZATIONS: dict[str, tuple[int | None, str]] = {
    "none": (None, "affine"),
    "4-bit": (4, "affine"),
    "8-bit": (8, "affine"),
    "mxfp4": (4, "mxfp4"),
    "nvfp4": (4, "nvfp4"),
}


def page() -> str:
    """The page with its tables as they should be; takes a few minutes."""
    tables = {
        "published": [
            "| target | mlx-lm class | drafter | with it | quantizations tried |",
            "| --- | --- | --- | --- | --- |",
            *map(published_line, TARGETS),
        ],
        "mlx-lm": ["| mlx-lm class | with a drafter |", "| --- | --- |", *map(zoo_line, models())],
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in tables.items():
        marked = re.compile(rf"(<!-- models: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        table = "\n".join(lines).replace("\\", r"\\")
        text = marked.sub(rf"\g<1>{table}\n\g<2>", text)
    return text


def published_line(name: str) -> str:
    """A target of the drafters' authors."""
    target = TARGETS[name]
    if target.family is None:
        return f"| {name} | none | DFlash | no: mlx-lm has no model for it | |"
    if target.drafter is None:
        alone = prove_target(zoo_model(target.family))
        return f"| {name} | `{target.family}` | DFlash | later: the target alone is {alone} | none |"
    raw = PUBLIC[target.drafter][0]
    decode_pair(target.family, json.dumps(shrunk(raw), sort_keys=True))
    found = {family_outcome(target.family, quantization) for quantization in QUANTIZATIONS}
    config = DrafterConfig.from_dict(raw)
    shape = f"DFlash{' 2' if config.generation == 2 else ''}, block {config.block_size}"
    if not target.known:
        shape += f"; in the shape of {target.drafter}'s"
    module, _ = FAMILIES[target.family]
    return f"| {name} | `{module}` | {shape} | {' or '.join(sorted(found))} | {', '.join(QUANTIZATIONS)} |"


@cache
def decode_pair(family: str, config: str) -> None:
    """Whole replies with a drafter of this config; that of several targets is the same but for its sizes."""
    prove_pair(_tiny(family, "none"), json.loads(config))


@cache
def family_outcome(family: str, quantization: str) -> str:
    """What a tiny target of this family can do."""
    return prove_target(_tiny(family, quantization))


def _tiny(family: str, quantization: str) -> nn.Module:
    bits, mode = QUANTIZATIONS[quantization]
    return tiny_model(family, bits=bits, mode=mode)


def zoo_line(name: str) -> str:
    """A model of mlx-lm."""
    found = (
        f"not tried: {NOT_BUILT[name]}"
        if name in NOT_BUILT
        else prove_target(zoo_model(name), block=5, keeps=(5, 2))
    )
    return f"| `{name}` | {found} |"
