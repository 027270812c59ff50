"""Who imports whom, as docs/design.md has it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxcache"
MODELS_AND_UP = ("flax", "jaxcache.models", "jaxcache.engine", "jaxcache.serve", "jaxcache.replay")
FORBIDDEN = {
    "core": ("jaxcache.kernels", *MODELS_AND_UP),
    "kernels": ("jaxcache.core", *MODELS_AND_UP),
    "models": ("jaxcache.core", "jaxcache.engine", "jaxcache.serve", "jaxcache.replay"),
    "engine": ("jaxcache.serve", "jaxcache.replay"),
}


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return names | {f"{node.module}.{alias.name}" for node in modules for alias in node.names}


@pytest.mark.parametrize("part", FORBIDDEN)
def test_a_part_knows_only_those_below_it(part):
    files = list((PACKAGE / part).rglob("*.py"))
    assert len(files) > 5
    wrong = [
        (str(path.relative_to(PACKAGE)), name)
        for path in files
        for name in imported(path)
        if any(f"{name}.".startswith(f"{other}.") for other in FORBIDDEN[part])
    ]
    assert wrong == []
