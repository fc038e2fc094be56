"""Imports point one way only, heavy libraries are imported where they are used, files stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "loadgauge"
LEVELS = [  # a module imports only from rows above its own, or from its own folder
    {"errors"},
    {"units", "algebra", "sources", "lengths"},
    {"spec"},
    {"families", "layers"},
    {"estimate", "published"},
    {"search", "formats", "measure", "train"},
    {"validate"},
    {"show"},
]
LEVEL = {name: row for row, names in enumerate(LEVELS) for name in names}
HEAVY = {"torch", "transformers", "matplotlib", "sympy", "numpy", "rich", "starlette", "uvicorn", "ray", "pyarrow"}


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.stem[:2] != "__"]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module, and whether the import stands at the top of the file (outside type checking)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        top = getattr(node, "col_offset", 1) == 0 and id(node) not in guarded
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            yield node.module or "", top
        elif isinstance(node, ast.Import):
            yield from ((alias.name, top) for alias in node.names)


def test_every_module_has_a_level() -> None:
    assert {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in modules()} <= set(LEVEL)


def test_imports_point_one_way() -> None:
    wrong = []
    for path in modules():
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for module, _ in imports(path):
            head, _, rest = module.partition(".")
            if head != "loadgauge" or not rest:
                continue
            other = rest.split(".")[0]
            if other != own and LEVEL[other] >= LEVEL[own]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert not wrong


def test_heavy_libraries_are_imported_inside_functions() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}: {module}"
        for path in modules()
        for module, top in imports(path)
        if top
        and module.split(".")[0] in HEAVY
        and LEVEL[path.relative_to(PACKAGE).with_suffix("").parts[0]] < LEVEL["measure"]
    ]
    assert not wrong


def test_train_is_usable_alone() -> None:
    for path in (PACKAGE / "train").rglob("*.py"):
        assert not any(module.startswith("loadgauge.estimate") for module, _ in imports(path)), path


def test_files_stay_small() -> None:
    long = {
        str(path.relative_to(PACKAGE)): lines
        for path in modules()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 600
    }
    assert not long
