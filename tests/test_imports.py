"""Who may import whom: lower layers do not know the higher ones."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("dflash_mlx", "metal/dflash_metal", "app/dflash_chat")

# From low to high; a unit is a module or a whole folder, `api` is dflash_mlx/__init__.py.
LAYERS: tuple[set[str], ...] = (
    {"errors", "markdown", "options", "terminal"},
    {
        "config",
        "events",
        "lookup",
        "memo",
        "pairs",
        "params",
        "progress",
        "remote",
        "tensors",
        "dflash_metal",
    },
    {"kernels", "hub", "gguf"},
    {"smollm2"},
    {"drafter", "target"},
    {"costs", "interval", "memory", "sampling"},
    {"schedule"},
    {"decision", "result"},
    {"cycles"},
    {"decode"},
    {"text", "prefix_cache", "calibrate"},
    {"chat_template", "block_sizes"},
    {"prompt"},
    {"session"},
    {"loading"},
    {"api"},
    {"generate", "benchmark", "doctor", "models", "server", "train"},
    {"dflash_chat"},
)
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
# Where the layers alone would allow more.
ONLY_IMPORTER = {"dflash_metal": "kernels"}
ONLY_IMPORTS = {"dflash_chat": {"errors", "events", "config", "options", "terminal"}}


def modules() -> dict[str, Path]:
    """Every module of the three packages, by its dotted name."""
    found = {}
    for root in map(REPOSITORY.joinpath, PACKAGES):
        for path in root.rglob("*.py"):
            parts = path.relative_to(root.parent).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()
OURS = {Path(package).name for package in PACKAGES}


def unit(module: str) -> str:
    package, _, rest = f"{module}.api".partition(".")
    return rest.partition(".")[0] if package == "dflash_mlx" else package


def imports(module: str, path: Path) -> Iterator[str]:
    """The modules of ours that `module` imports anywhere, also inside functions."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*(base if node.level else []), *filter(None, [node.module])])
            children = [f"{source}.{alias.name}" for alias in node.names]
            names = [child if child in MODULES else source for child in children]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in OURS)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_downwards(module: str) -> None:
    me = unit(module)
    assert me in LEVEL, f"{module}: place {me!r} in LAYERS, between what it imports and its users"
    for imported in imports(module, MODULES[module]):
        it = unit(imported)
        if it == me:
            continue
        assert LEVEL.get(it, 0) <= LEVEL[me], f"{module} imports {imported} from a higher layer"
        assert me == ONLY_IMPORTER.get(it, me), f"{module} imports {it}"
        assert it in ONLY_IMPORTS.get(me, {it}), f"{module} imports {imported}"


@pytest.mark.parametrize("module", ["", ".errors", ".events", ".config", ".options", ".terminal"])
def test_imports_without_mlx(module: str) -> None:
    """The chat and a failing start need these where MLX may not even load."""
    code = f"import sys, dflash_mlx{module}; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
