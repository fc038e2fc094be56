"""What holds for all tests: nothing of the machine decides how they end; and which of them are slow."""

from __future__ import annotations

import gc
import os
import sys
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
for variable in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(variable, None)
os.environ["LC_ALL"] = "C.UTF-8"

# Tests make many objects and few circles of them; looking for circles all the time took an eighth of the suite's time.
gc.set_threshold(20_000, 20, 50)

HERE = Path(__file__).parent
SLOW = {
    HERE / place
    for place in (
        # PyTorch and transformers, processes, a server or a browser
        "oracle", "trace", "capture", "versions", "measure", "oom", "compare", "train", "web", "formats/test_formats_parsers.py",
        "families/test_class_defaults.py", "families/test_defaults.py", "families/test_params.py",
        "families/test_param_variants.py",
        "families/test_param_variants_2026.py", "families/test_published_2026.py", "families/test_towers.py",
        "plan/test_sweep_processes.py", "plan/test_sweep_ray.py", "paper/test_article5.py",
        "articles/test_items.py",
        # much to compute
        "plan/test_search_arrays.py", "plan/test_search_plan.py", "plan/test_planned_choices.py", "plot", "plan/test_deadline.py",
        "equation/test_equation.py", "equation/test_equation_experts.py", "formats/test_formats_round_trip.py",
        "test_docs.py", "test_packaging.py", "test_site.py",
    )
}  # fmt: skip
"""What `make quick` leaves out."""
KERNELS = {
    HERE / place
    for place in (
        "oracle/test_autocast.py", "oracle/test_forward_peak.py", "oracle/test_moe_peak.py", "oracle/test_peak.py",
        "oracle/test_unpadded_attention.py", "measure/test_real.py", "measure/test_scratch.py", "trace/test_trace.py",
        "train/test_fused.py", "train/test_padfree_families.py", "train/test_padfree_kernel.py",
        "train/test_padfree_routes.py", "train/test_padfree_training.py",
    )
}  # fmt: skip
"""Where CPUs differ: peaks of memory, and results to the last digit. `make cpus` runs these as on other CPUs."""

WARM = {
    HERE / place
    for place in (
        "trace", "oom/test_causes.py", "capture/test_command.py", "compare", "measure/test_measure_page.py", "test_site.py",
        "cli/test_cli_errors.py",
    )
}  # fmt: skip
"""Whose child processes begin with PyTorch imported (`warm_children`)."""


def _in(path: Path, places: set[Path]) -> bool:
    return not places.isdisjoint((path, *path.parents))


def pytest_configure(config: pytest.Config) -> None:
    # How long an example takes to make says how busy the machine is.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
    config.addinivalue_line("markers", "slow: takes long, or needs PyTorch, a browser or other processes")
    config.addinivalue_line("markers", "kernels: depends on the kernels that PyTorch chooses for this CPU")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out whole files where that is known, which saves the import of PyTorch."""
    if collection_path.parent == HERE / "support" and ">>>" not in collection_path.read_text(encoding="utf-8"):
        return True  # what tests share has no tests, other than examples in docstrings
    wanted: Any = config.option.markexpr
    if wanted == "not slow" and _in(collection_path, SLOW):
        return True
    if wanted == "kernels" and collection_path.suffix == ".py" and not _in(collection_path, KERNELS):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark, places in (("slow", SLOW), ("kernels", KERNELS)):
            if _in(item.path, places):
                item.add_marker(mark)
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
