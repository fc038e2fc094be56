"""Lists the arguments that a checkout of a tool has and that none of its lists of keys does.

    python tests/support/unlisted_keys.py DIALECT DIR [PATTERN ...] [--sizes]

Every annotated field of a class whose name ends in Config, Args, Arguments or Script, and every option given to `argparse`, in the
Python files below DIR that a pattern matches (`**/*.py` without one). `--sizes`: only those that would stop a file, because their
names say a size, a model or a task. A name counts as listed where any key of the dialect ends in it: sections are not compared.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

from extract_keys import options_of
from loadgauge.job_files.dialects import dialect as dialect_of
from loadgauge.job_files.ideas.coverage import primary

ENDS = ("Config", "Args", "Arguments", "Script", "ConfigBase", "ConfigMixin")


def fields_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each class of settings in a file with each of its fields."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name.endswith(ENDS):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id[0] != "_":
                    yield node.name, line.target.id


def unlisted(dialect: str, root: Path, patterns: list[str]) -> dict[tuple[str, str], list[str]]:
    """Return the arguments in no list, by file and class."""
    tool = dialect_of(dialect)
    coverage = tool.coverage
    listed = {*tool.known, *coverage.harmless, *coverage.stops, *coverage.bounded}
    ends = {key.rpartition(".")[2].replace("-", "_") for key in listed}
    stars = tuple(end.removesuffix("*") for end in ends if end.endswith("*") and end != "*")
    missing: dict[tuple[str, str], list[str]] = {}
    for pattern in patterns or ["**/*.py"]:
        for path in sorted(root.glob(pattern)):
            if "test" in path.parts or "tests" in path.parts:
                continue
            try:
                arguments = [*fields_of(path), *(("argparse", key) for key in options_of(path))]
            except SyntaxError:
                continue
            for kind, name in arguments:
                if name not in ends and not (stars and name.startswith(stars)):
                    missing.setdefault((str(path.relative_to(root)), kind), []).append(name)
    return missing


def main() -> None:
    """Print what is in no list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dialect")
    parser.add_argument("root", type=Path)
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--sizes", action="store_true")
    given = parser.parse_args()
    for (file, kind), names in unlisted(given.dialect, given.root, given.patterns).items():
        shown = [
            name
            for name in dict.fromkeys(names)
            if not given.sizes or any(primary(name, value) for value in (7, "x", True))
        ]
        if shown:
            print(f"{file} {kind}: {' '.join(shown)}")


if __name__ == "__main__":
    main()
