"""The folders' rules: who may import whom, flat folders, no __init__.py in them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "kernels": {"kernels"},
    "models": {"models", "kernels"},
    "passes": {"passes", "kernels"},
    "runtime": {"runtime", "kernels"},
    "compile": {"compile", "runtime", "passes", "models", "kernels"},
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_follow_the_table(folder: str) -> None:
    files = sorted((ROOT / folder).glob("*.py"))
    assert files
    for path in files:
        for name in imported(path):
            first, _, rest = name.partition(".")
            assert first not in MAY_IMPORT, f"{path.name}: import seekforge.{name}, not {name}"
            if first == "seekforge":
                assert rest.split(".")[0] in MAY_IMPORT[folder], f"{folder}/{path.name}: {name}"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_are_flat_and_no_packages(folder: str) -> None:
    inside = [p.name for p in (ROOT / folder).iterdir() if p.name != "__pycache__"]
    allowed = (".py", ".txt", ".json", ".cu", ".cuh", ".css", ".js")
    assert all(name.endswith(allowed) for name in inside), inside
    assert "__init__.py" not in inside
