"""No result depends on a sentence written for people: what decides is a kind (an enum or a literal without spaces).

Read off the syntax tree: comparisons (`==`, `!=`, `in`, `not in`, `match`) and `startswith` and its like, of which one side
is a text. Texts are literals and constants of modules, also imported ones.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "loadgauge"
SUMS = (
    *(
        f"core/{folder}"
        for folder in ("base/lengths", "definitions", "layers", "estimate", "serving", "plan/batch", "plan/space")
    ),
    *(f"fleets/{file}.py" for file in ("failures", "fleet", "flows", "load", "queue", "simulate", "sites")),
)
"""Folders that read no text from outside, so that a comparison with a sentence can only be with one of our own."""
FOR_PEOPLE = {"what", "moment", "note", "not_counted", "left_out", "untimed", "sentence"}
"""Fields and variables that hold text for people, in any folder."""
NAMED = {"operation", "op", "moment"}
"""Things whose `name` is for people, or for users to choose by, and whose kind or phase decides."""
LOOKS = {"startswith", "endswith", "removeprefix", "removesuffix", "find", "index", "count"}
MATCHES = {"match", "search", "fullmatch"}
Constants = dict[str, tuple[str, ...]]


def texts_in(node: ast.AST, constants: Constants) -> Iterator[str]:
    """Every text that a side of a comparison stands for; of a dict only the keys, of a call nothing."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name):
        yield from constants.get(node.id, ())
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            if key is not None:
                yield from texts_in(key, constants)
    elif isinstance(
        node, (ast.Tuple, ast.List, ast.Set, ast.JoinedStr, ast.IfExp, ast.BinOp, ast.MatchValue, ast.MatchOr)
    ):
        for child in ast.iter_child_nodes(node):
            yield from texts_in(child, constants)


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The variables of a module, with what is assigned to them."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement.value
                elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                    for name, value in zip(target.elts, statement.value.elts, strict=True):
                        if isinstance(name, ast.Name):
                            yield name.id, value
        elif isinstance(statement, ast.AnnAssign) and statement.value and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement.value


@cache
def own_constants(path: Path) -> Constants:
    """The texts among the variables of a module."""
    found: Constants = {}
    for name, value in assigned(ast.parse(path.read_text(encoding="utf-8"))):
        found[name] = tuple(texts_in(value, found))
    return found


def constants_of(tree: ast.Module) -> Constants:
    """The texts that names in a module stand for, imported ones included."""
    found: Constants = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loadgauge."):
            path = PACKAGE.joinpath(*str(node.module).split(".")[1:]).with_suffix(".py")
            theirs = own_constants(path) if path.exists() else {}
            found.update({alias.asname or alias.name: theirs.get(alias.name, ()) for alias in node.names})
    for name, value in assigned(tree):
        found[name] = tuple(texts_in(value, found))
    return found


def comparisons(tree: ast.Module) -> Iterator[tuple[ast.expr, list[ast.AST]]]:
    """Whatever asks for a text, and its sides."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            if any(isinstance(each, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) for each in node.ops):
                yield node, [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in LOOKS:
                yield node, [node.func.value, *node.args]
            elif node.func.attr in MATCHES:
                yield node, list(node.args)
        elif isinstance(node, ast.Match):
            yield node.subject, [node.subject, *(case.pattern for case in node.cases)]


def for_people(node: ast.AST) -> bool:
    """Whether a side of a comparison is text for people."""
    if isinstance(node, ast.Attribute):
        base = node.value
        owner = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
        return node.attr in FOR_PEOPLE or (node.attr == "name" and owner in NAMED)
    return isinstance(node, ast.Name) and node.id in FOR_PEOPLE


def offences(source: str, *, sums: bool) -> list[str]:
    """What in a module depends on prose. sums: whether comparing with any sentence is one."""
    tree = ast.parse(source)
    constants = constants_of(tree)
    found = []
    for node, sides in comparisons(tree):
        texts = [text for side in sides if not for_people(side) for text in texts_in(side, constants)]
        sentence = any(" " in text.strip() for text in texts)
        if (texts and any(map(for_people, sides))) or (sums and sentence):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.long
def test_no_result_depends_on_a_sentence() -> None:
    wrong = []
    assert all((PACKAGE / folder).exists() for folder in SUMS)
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.is_relative_to("evidence/published"):  # reads notes that others wrote
            continue
        found = offences(path.read_text(encoding="utf-8"), sums=place.as_posix().startswith(SUMS))
        wrong += [f"{place}, {offence}" for offence in found]
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        'row.what.startswith("updated")',
        '"experts" in row.what',
        'ONCE = ("gradients of shared weights", "gradients of the tied table")\nrow.what in ONCE',
        'operation.name.endswith(".residual_dropout")',
        'operation.name != "mlp.router"',
        'self.moment.name == "optimizer step"',
        'note.startswith("time and network:")',
        '"GPUs" in what',
        'if "times the GPUs" in text or other: pass',
        'if found == "backward of the embedding": pass',
        'STEP = "optimizer step"\nfound = [one for one in moments if (one.name == STEP) == chosen]',
        'match text:\n    case "optimizer step": pass',
        're.search("of experts", text)',
        'row.moment in {"loss": 1}',
    ],
)
def test_such_branches_are_found(source: str) -> None:
    assert offences(source, sums=True)


@pytest.mark.parametrize(
    "source",
    [
        "row.kind is Carries.UPDATED_WEIGHTS",
        'layout.schedule in ("1f1b", "gpipe")',
        'NAMES = {"params": "parameters of one layer"}\nquantity in NAMES',
        "told.name == moment.name",
        "operation.name in recompute",
        'what = f"{name}, forward"',
    ],
)
def test_kinds_and_words_for_people_are_not(source: str) -> None:
    assert not offences(source, sums=True)
