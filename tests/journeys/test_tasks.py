"""Tasks to learn by: each begins short of its goal, and is solved by its answer with all kept that is to be kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from loadgauge.core.answers.equations.equation import QUANTITIES
from loadgauge.core.answers.equations.run_forms import FORMS
from loadgauge.core.base.package_data import read_table
from loadgauge.core.definitions.job.job import fields
from loadgauge.page.inputs.uploads import Uploads
from loadgauge.page.panels.posttrain import OfTask, answer as after_pretraining
from loadgauge.page.server.handlers import Question, estimate

TABLE = read_table("tasks.toml")
TASKS: dict[str, dict[str, Any]] = {task["id"]: task for task in TABLE["task"]}
UNITS = {"GiB": 2**30, "GB": 1e9, "%": 0.01, "s": 1, "": 1}


@pytest.fixture(scope="module")
def uploads() -> Iterator[Uploads]:
    made = Uploads()
    yield made
    made.close()


def answered(flags: dict[str, str], uploads: Uploads) -> dict[str, Any]:
    """What the page's questions answer."""
    rl = {name.removeprefix("rl-"): value for name, value in flags.items() if name.startswith("rl-")}
    run = {name: value for name, value in flags.items() if not name.startswith("rl-")}
    found: dict[str, Any]
    if rl:
        found = after_pretraining(OfTask(flags=run, asked=rl), uploads)
    else:
        found = estimate(Question(flags=run, want=[]), uploads)["estimate"]
    return found


def at(found: Any, path: str) -> Any:
    """A number of an answer, or the quotient of two."""
    if "/" in path:
        upper, lower = path.split("/")
        return at(found, upper) / at(found, lower)
    for name in path.split("."):
        found = found[name]
    return found


def amount(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(.*)", text).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def holds(found: Any, goal: str) -> bool:
    path, sign, value = goal.split()
    is_ = at(found, path)
    if sign == "==":
        return bool(is_ == value)
    return bool(is_ <= amount(value) if sign == "<=" else is_ >= amount(value))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_unsolved_at_first_and_solved_by_its_answer(name: str, uploads: Uploads) -> None:
    task = TASKS[name]
    assert not set(task["keep"]) & set(task["answer"])
    first = answered(task["start"], uploads)
    assert not all(holds(first, goal) for goal in task["goal"])
    for line in task.get("says", ()):
        path, _, value = line.split()
        assert at(first, path) == pytest.approx(amount(value), rel=0.1), line
    then = answered({**task["start"], **task["answer"]}, uploads)
    assert all(holds(then, goal) for goal in task["goal"]), {goal: at(then, goal.split()[0]) for goal in task["goal"]}


def test_the_table_is_whole() -> None:
    assert len(TASKS) >= 30
    assert {task["track"] for task in TASKS.values()} == {track["id"] for track in TABLE["tracks"]}
    assert {task.get("article") for task in TASKS.values()} >= {1, 2, 3, 4, 5}
    for task in TASKS.values():
        assert task["equation"].split()[0] in {**QUANTITIES, **dict.fromkeys(FORMS)}, task["equation"]
        known = {name.replace("_", "-") for name in fields()}
        flags = {*task["start"], *task["answer"], *task["keep"]}
        assert {flag.removeprefix("rl-") for flag in flags} <= known
        for language in ("en", "zh"):
            assert set(task[language]) == {"goal", "hint", "why"}
    assert {preset.get("door") for preset in TABLE["preset"]} >= {"card", "node", "cluster"}
