"""Frameworks, optimizers and axes are records: no other file asks for a framework by name or lists the axes by hand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.axes import (
    AXES,
    COMMUNICATION,
    DEGREES,
    FACTORS,
    MODEL_PARALLEL,
    RANK_AXES,
    RANK_ORDER,
    STAGE_AXES,
)
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS, torch_optimizers
from loadgauge.core.definitions.training.precision import PRECISIONS
from loadgauge.core.estimate.states.states import state_elements
from loadgauge.core.layers.operations.operations import Weight

PACKAGE = Path(__file__).parents[1] / "src" / "loadgauge"
OWN = (
    "core/definitions/layout/axes.py",
    *(f"job_files/pre_training/{name}.py" for name in ("torchtitan", "bridge", "maxtext", "nanotron")),
    *(f"job_files/rollouts/{name}.py" for name in ("nemo_rl_rollout", "verl", "verl_names")),
)
"""The table, and dialects' words for it."""
PARALLEL = set(AXES) - {"zero", "replicas"}


@cache
def sources() -> list[tuple[str, ast.Module]]:
    """The files of the package, parsed."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [(str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))) for path in files]


def names_of_frameworks_asked_for(tree: ast.AST) -> Iterator[int]:
    """Lines that compare `framework.name`, or look something up by it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts: list[ast.expr] = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("get", "startswith")
        ):
            parts = [node.func.value, *node.args[:1]]
        else:
            continue
        if any(ast.unparse(part).endswith("framework.name") for part in parts):
            yield node.lineno


SOURCES = "evidence/published/"
"""Tables in the words of their sources, which name frameworks and axes."""


@pytest.mark.slow
def test_no_framework_is_asked_for_by_name() -> None:
    assert not [
        f"{file}:{line}"
        for file, tree in sources()
        if file != "core/definitions/training/frameworks.py" and not file.startswith(SOURCES)
        for line in names_of_frameworks_asked_for(tree)
    ]
    wrong = 'if given.framework.name == "megatron" or TABLE[framework.name]: pass'
    assert list(names_of_frameworks_asked_for(ast.parse(wrong))) == [1, 1]


def lists_of_axes(tree: ast.AST) -> Iterator[int]:
    """Lines with a literal that names three or more axes, or gives each a word.

    What an `Idea` of a dialect reads is its own; a rule or a text for each axis belongs to who has it.
    """
    facts = {
        id(keyword.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Idea", "reads")
        for keyword in node.keywords
        if keyword.arg == "facts"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            parts: list[ast.expr | None] = list(node.elts)
        elif isinstance(node, ast.Dict):
            words_alone = all(isinstance(value, ast.Constant) and " " not in str(value.value) for value in node.values)
            parts = list(node.keys) if words_alone else []
        else:
            continue
        words = {part.value for part in parts if isinstance(part, ast.Constant)}
        if len(words & PARALLEL) > 2 and id(node) not in facts:
            yield node.lineno


@pytest.mark.slow
def test_no_list_of_axes_is_written_by_hand() -> None:
    assert not [
        f"{file}:{line}"
        for file, tree in sources()
        if file not in OWN and not file.startswith(SOURCES)
        for line in lists_of_axes(tree)
    ]
    assert list(lists_of_axes(ast.parse('for axis in ("tp", "cp", "pp"): pass'))) == [1]


def test_every_axis_is_a_size_of_a_layout() -> None:
    assert set(AXES) <= set(Layout.__struct_fields__)
    assert set(AXES) - {"dp"} <= set(Job.__struct_fields__)
    assert [axis for axis in Job.__struct_fields__ if axis in DEGREES] == list(DEGREES)


def test_gpus_are_the_product_of_the_axes_with_ranks_of_their_own() -> None:
    layout = Layout(seq_len=1, **dict(zip(FACTORS, (2, 3, 5, 7), strict=True)))
    assert layout.gpus == 2 * 3 * 5 * 7
    for axis in set(AXES) - set(FACTORS):
        assert Layout(seq_len=1, **{axis: 2}).gpus == 1


def test_the_views_of_the_axes_belong_together() -> None:
    assert sorted(RANK_ORDER) == sorted(RANK_AXES)
    assert set(FACTORS) < set(RANK_ORDER)
    assert set(STAGE_AXES) == set(MODEL_PARALLEL) - {"pp"}
    assert set(MODEL_PARALLEL) < set(DEGREES)
    assert len(COMMUNICATION) == len(set(COMMUNICATION))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_names_recipes_that_exist(name: str) -> None:
    framework = FRAMEWORKS[name]
    assert framework.name == name
    assert framework.precision in PRECISIONS
    assert set(framework.sends_in_turn) <= {"1f1b", "gpipe", "interleaved"}
    assert framework.casts == "autocast" or PRECISIONS[framework.precision].autocast


@pytest.mark.parametrize("name", torch_optimizers())
def test_the_state_of_an_optimizer_is_what_pytorch_allocates(name: str) -> None:
    """Bytes of the states of a float32 matrix after a step of the class that the record names."""
    torch = pytest.importorskip("torch")
    known = torch_optimizers()[name]
    weight = torch.nn.Parameter(torch.ones(64, 32))
    kind = getattr(torch.optim, known.factory.rpartition(".")[2])
    optimizer = kind([weight], **known.options)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    states = [state for state in optimizer.state[weight].values() if torch.is_tensor(state) and state.numel() > 1]
    record = OPTIMIZERS[known.optimizer]
    kept = state_elements((Weight("matrix", 64 * 32, shape=(64, 32)),), record)
    assert sum(state.numel() * state.element_size() for state in states) == 4 * sum(kept.values())
