"""What holds for all tests: nothing of the machine decides how they end; and which of them are slow."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from warm_children import warm_children, warm_source

__all__ = ["warm_children", "warm_source"]

# One thread each: the order of sums and the scratch of kernels do not depend on the number of cores, and processes that
# test side by side do not wait for each other. Before torch and numpy are imported; what tests start inherits it.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# A terminal's width and colours, and the language, as nowhere set.
for variable in (
    "PYTHONUNBUFFERED",
    "LOADGAUGE_LANG",
    "COLUMNS",
    "LINES",
    "FORCE_COLOR",
    "NO_COLOR",
    "CLICOLOR_FORCE",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
):
    os.environ.pop(variable, None)
os.environ["LC_ALL"] = "C.UTF-8"

# Tests make many objects and few circles of them; looking for circles all the time took an eighth of the suite's time.
gc.set_threshold(20_000, 20, 50)

HERE = Path(__file__).parent
OWN = {
    *sys.stdlib_module_names, "loadgauge", "_pytest", "click", "hypothesis", "msgspec", "numpy", "pytest", "rich", "ruamel",
    "sympy", "tomlkit",
}  # fmt: skip
"""What `make quick` has: the standard library, what loadgauge brings, and what the tests are written with."""
APART = {
    HERE / place
    for place in (
        # start PyTorch, or build something, without importing it themselves
        "evidence/articles", "pytorch", "test_docs.py", "test_packaging.py", "test_rooms.py", "test_site.py",
        # much to compute
        "core/answers/equations", "core/command_line/test_plan_command.py", "core/estimate/test_padding.py",
        "core/plan/test_deadline.py", "core/plan/test_plan_serving.py", "core/plan/test_planned_choices.py",
        "core/plan/test_questions.py", "core/plan/test_search_arrays.py", "core/plan/test_search_plan.py",
        "core/properties/test_printed_flags.py", "evidence/validate/test_operators.py", "fleets/test_simulate.py",
        "job_files/test_check.py", "job_files/test_formats_coverage.py", "job_files/test_formats_rollouts.py",
        "job_files/test_formats_round_trip.py", "sheets/test_plot.py", "test_prose_decides_nothing.py", "tools",
    )
}  # fmt: skip
"""Files without an import of other libraries that `make quick` leaves out all the same."""
SAMPLE, OF_QUICK = 2, 5
"""Cases, spread over its list, that `make test` takes of each test function, and where `make quick` has it too; of one that
is marked as long, the first of several. `make thorough` runs the others."""
FEW, OF_FEW = {HERE / place for place in ("core/oracle", "core/plan", "page", "pytorch")}, 3
"""Where most tests take seconds (a browser, PyTorch, a search): `make test` runs one of so many, spread over each file."""
SHARED = (HERE / "support", HERE.parent / "tools")
MANY = 25
"""Examples of a property in `make test`; `make thorough` has all that it asks for."""
ITEMS, EXAMPLES = 1, 5
"""What `make quick` takes of each test function with parameters, and of each property."""
KERNELS = {
    HERE / place
    for place in (
        "core/oracle/test_autocast.py", "core/oracle/test_forward_peak.py", "core/oracle/test_moe_peak.py",
        "core/oracle/test_peak.py", "core/oracle/test_unpadded_attention.py", "pytorch/measure/test_real.py",
        "pytorch/measure/test_scratch.py", "pytorch/trace/test_trace.py",
        "train/test_fused.py", "train/test_padfree_families.py", "train/test_padfree_kernel.py",
        "train/test_padfree_routes.py", "train/test_padfree_training.py",
    )
}  # fmt: skip
"""Where CPUs differ: peaks of memory, and results to the last digit. `make cpus` runs these as on other CPUs."""

WARM = {
    HERE / place
    for place in (
        "pytorch/trace", "pytorch/why/test_causes.py", "pytorch/capture", "pytorch/compare",
        "pytorch/measure/test_measure_page.py", "tools/test_gpu_runs.py", "test_site.py", "core/command_line/test_cli_errors.py",
        "core/command_line/test_schema.py",
    )
}  # fmt: skip
"""Whose child processes begin with PyTorch imported (`warm_children`)."""


def _in(path: Path, places: set[Path]) -> bool:
    return not places.isdisjoint((path, *path.parents))


@cache
def _imports(path: Path) -> tuple[set[str], set[Path]]:
    """The libraries that a file's lines import, and the files of `tests/support` and `tools`."""
    libraries, files = set(), set()
    for name in re.findall(r"^[ \t]*(?:from|import)[ \t]+([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
        library = name.partition(".")[0]
        shared = [
            base / f"{part.replace('.', '/')}.py" for base in SHARED for part in (name, library, f"{name}.__init__")
        ]
        here = [file for file in shared if file.is_file()]
        files |= set(here)
        libraries |= set() if here else {library}
    return libraries, files


@cache
def _alone(path: Path) -> bool:
    """Whether the tests of a file need nothing but loadgauge's own libraries, nor do their fixtures and what they share."""
    fixtures = (folder / "conftest.py" for folder in path.parents if HERE in folder.parents)
    seen = {path, *(file for file in fixtures if file.is_file())}
    reached = set(seen)
    while reached:
        reached = {file for reader in reached for file in _imports(reader)[1]} - seen
        seen |= reached
    return not _in(path, APART) and all(_imports(file)[0] <= OWN for file in seen)


def pytest_configure(config: pytest.Config) -> None:
    # No search of a test is kept in the home of who runs it (`test_kept.py` has one of its own).
    from loadgauge.core.plan.batch import kept

    kept.QUICK = float("inf")
    # How long an example takes to make says how busy the machine is. The same examples everywhere: what one machine finds,
    # each finds; `make search` looks for new ones.
    quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
    settings.register_profile("any machine", derandomize=True, **quiet)
    settings.register_profile("search", derandomize=False, print_blob=True, **quiet)
    settings.load_profile(config.getoption("--hypothesis-profile") or "any machine")
    config.addinivalue_line("markers", "slow: takes seconds, or starts PyTorch; not for `make quick`")
    config.addinivalue_line("markers", "long: takes many seconds; `make test` runs the first of several cases")
    config.addinivalue_line("markers", "thorough: one of many cases, or long; for `make thorough`, not for `make test`")
    config.addinivalue_line("markers", "property: has more examples in `make thorough`")
    config.addinivalue_line("markers", "quick: of the sample that `make quick` runs")
    config.addinivalue_line("markers", "kernels: depends on the kernels that PyTorch chooses for this CPU")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out whole files where that is known, which saves the import of PyTorch."""
    if collection_path.parent == HERE / "support":  # what tests share has no tests, other than examples in docstrings
        examples = collection_path.suffix == ".py" and ">>>" in collection_path.read_text(encoding="utf-8")
        return None if examples else True
    wanted: Any = config.option.markexpr
    if wanted == "quick" and collection_path.suffix == ".py" and not _alone(collection_path):
        return True
    if wanted == "kernels" and collection_path.suffix == ".py" and not _in(collection_path, KERNELS):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    taken: Counter[str] = Counter()
    cases, seen = Counter(item.nodeid.partition("[")[0] for item in items), Counter[str]()
    of_file = Counter[Path]()
    for item in items:
        if _in(item.path, KERNELS):
            item.add_marker("kernels")
        function = item.nodeid.partition("[")[0]
        taken_of = OF_QUICK if _alone(item.path) else SAMPLE
        before, after = ((seen[function] + step) * taken_of // cases[function] for step in (-1, 0))
        seen[function] += 1
        if item.get_closest_marker("long"):
            left_out = cases[function] == 1 or seen[function] > 1
        else:
            left_out = before == after
        if not left_out and _in(item.path, FEW):
            left_out = of_file[item.path] % OF_FEW > 0
            of_file[item.path] += 1
        if left_out:
            item.add_marker("thorough")
        if (
            taken[function] < ITEMS
            and _alone(item.path)
            and not (item.get_closest_marker("slow") or item.get_closest_marker("long"))
        ):
            item.add_marker("quick")
            taken[function] += 1
        how = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None)
        most = {"quick": EXAMPLES, "not thorough": MANY}.get(config.option.markexpr)
        if how is not None and how.max_examples > MANY:
            item.add_marker("property")
        if how is not None and most:
            few = settings(how, max_examples=min(how.max_examples, most))
            item.obj._hypothesis_internal_use_settings = few  # type: ignore[attr-defined]
        if isinstance(item, pytest.Function) and _in(item.path, WARM):
            item.fixturenames.insert(0, "warm_children")  # before what a file's fixtures start


def freeze() -> None:
    """What is alive by now is taken to live to the end: a collection of garbage, of which oracles make many, passes it over."""
    global imported
    gc.collect()
    gc.freeze()
    imported = len(sys.modules)


imported = 0
"""Modules at the last `freeze`."""


def pytest_collection_finish() -> None:
    freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    # Much of PyTorch and the code of each family of models are imported when a test first needs them.
    if nextitem is not None and len(sys.modules) > imported + 50:
        freeze()
