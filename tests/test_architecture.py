"""Imports point one way and in no circle, heavy libraries are imported where they are used, files stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "loadgauge"
LEVELS = [  # a module of the core imports only from rows above its own, or from its own folder
    {"base"},
    {"definitions"},
    {"families", "layers"},
    {"estimate"},
    {"serving"},
    {"post_training"},
    {"resolve"},
    {"plan"},
    {"answers"},
    {"text"},
    {"command_line"},
]
LEVEL = {name: row for row, names in enumerate(LEVELS) for name in names}
ROOMS = {"core", "job_files", "pytorch", "page", "fleets", "sheets", "train", "evidence"}
FACADE = {"__init__", "_version", "api"}
DOORS = {"core/base": 20, "job_files/ideas": 5}
"""Folders whose names others import from the folder itself, and how many files may still pass by that door twice."""
ENTERED = {
    "core/estimate": 143, "core/plan": 76, "core/resolve": 42, "core/families": 33, "core/layers": 29, "core/serving": 20,
    "core/post_training": 18, "pytorch/trace": 53, "pytorch/capture": 22,
}  # fmt: skip
"""Folders, and how many of their names others import: ceilings that only fall (docs/design/ways.md)."""
pytestmark = pytest.mark.slow  # the whole package is parsed
HEAVY = {"torch", "transformers", "matplotlib", "sympy", "numpy", "rich", "starlette", "uvicorn", "ray", "pyarrow"}


def modules() -> dict[str, Path]:
    """Every module by its name inside the package."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != PACKAGE or path.stem not in ("__init__", "__main__")
    }


@cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """Every module or name that is imported, and whether the import stands at the top of the file (outside type checking)."""
    return tuple(imported(path))


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """The same, in the order of the tree."""
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
            yield from ((f"{node.module}.{alias.name}", top) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, top) for alias in node.names)


def inside(name: str, known: dict[str, Path]) -> str | None:
    """The module of the package that an imported name is, or is in; None for other packages."""
    head, _, rest = name.partition(".")
    if head != "loadgauge":
        return None
    for module in (rest, rest.rpartition(".")[0]):
        for found in (module, f"{module}.__init__"):
            if found in known:
                return found
    return "__init__"


@cache
def graph() -> dict[str, set[str]]:
    known = modules()
    return {
        module: {other for name, _ in imports(path) if (other := inside(name, known)) is not None and other != module}
        for module, path in known.items()
    }


def test_every_module_is_in_a_room_and_of_the_core_in_a_folder_with_a_level() -> None:
    assert {module.split(".")[0] for module in modules()} - FACADE - {"__main__"} == ROOMS
    assert {module.split(".")[1] for module in modules() if module.startswith("core.")} - {"__init__"} == set(LEVEL)


def test_imports_of_the_core_point_one_way() -> None:
    wrong = {
        f"{module} -> {other}"
        for module, others in graph().items()
        for other in others
        if module.startswith("core.")
        and other.startswith("core.")
        and other != "core.__init__"
        and (above := module.split(".")[1]) != (below := other.split(".")[1])
        and LEVEL[below] >= LEVEL[above]
    }
    assert not wrong


def test_the_core_imports_no_other_room() -> None:
    """Not even inside functions: rooms register with hooks."""
    wrong = {
        f"{module} -> {other}"
        for module, others in graph().items()
        for other in others
        if module.startswith("core.") and other.split(".")[0] not in {"core"} | FACADE
    }
    assert not wrong


def test_nobody_inside_imports_the_facade() -> None:
    assert not [module for module, others in graph().items() if "__init__" in others]


@pytest.mark.parametrize("door", DOORS)
def test_folders_with_a_door_are_entered_by_it(door: str) -> None:
    tree = ast.parse((PACKAGE / door / "__init__.py").read_text(encoding="utf-8"))
    names = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    inner = f"loadgauge.{door.replace('/', '.')}."
    others = [path for path in PACKAGE.rglob("*.py") if PACKAGE / door not in path.parents]
    past = {
        path: {
            node.module
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith(inner)
            and {alias.name for alias in node.names} <= names
        }
        for path in others
    }
    assert sum(len(modules) > 1 for modules in past.values()) <= DOORS[door]


@pytest.mark.parametrize("folder", ENTERED)
def test_a_folder_is_entered_by_few_names(folder: str) -> None:
    inner = f"loadgauge.{folder.replace('/', '.')}."
    outside = [path for path in PACKAGE.rglob("*.py") if PACKAGE / folder not in path.parents]
    names = {name for path in outside for name, _ in imports(path) if name.startswith(inner)}
    assert len(names) <= ENTERED[folder]


def test_the_package_imports_no_tools() -> None:
    """Tools import the package; what the package needs of the repository, it has."""
    tools = {path.stem for path in (PACKAGE.parents[1] / "tools").iterdir() if path.stem[0] not in "_."}
    assert not [
        f"{module}: {name}"
        for module, path in modules().items()
        for name, _ in imports(path)
        if name.split(".")[0] in tools
    ]


def test_no_imports_in_a_circle() -> None:
    """Not even inside functions or for types alone."""
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle: {' -> '.join(error.args[1])}") from None


def test_heavy_libraries_are_imported_inside_functions() -> None:
    wrong = [
        f"{module}: {name}"
        for module, path in modules().items()
        for name, top in imports(path)
        if top
        and name.split(".")[0] in HEAVY
        and module.split(".")[0] not in ("train", "pytorch", "page", "sheets")
        and not module.startswith("core.command_line.")
    ]
    assert not wrong


def test_train_is_usable_alone() -> None:
    for module, others in graph().items():
        if module.startswith("train."):
            alone = {other for other in others if other.split(".")[0] == "train"} | {"core.base.errors", "_version"}
            assert not others - alone, module


def test_folders_have_twelve_entries_at_most_and_three_levels() -> None:
    assert not [module for module in modules() if module.count(".") > 3]
    entries: dict[str, set[str]] = {}
    for module in modules():
        parts = [part for part in module.split(".") if part not in ("__init__", "door", "room")]
        for depth in range(1, len(parts)):
            entries.setdefault(".".join(parts[:depth]), set()).add(parts[depth])
    assert not {folder: len(names) for folder, names in entries.items() if len(names) > 12}


def test_files_stay_small() -> None:
    long = {
        module: lines
        for module, path in modules().items()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 620
    }
    assert not long
