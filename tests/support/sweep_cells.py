"""What the tests of sweeps share: a small file of cells, results as Parquet has them, and work that goes wrong."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import loadgauge
from command_line import typed
from loadgauge.core.plan.space.grid import Cell, Row

SMALL = """
model = ["gpt2", "yi-6b", "no-such-model"]
gpu = "h100-sxm5-80gb"
gpus = [1, 2]
global-batch = 12
seq-len = 1024
precision = "bf16-mixed-16"
tp = 1
pp = 1
cp = 1
replicas = 1
"""
"""Six cells: three fit, in one nothing fits, two have no model."""


def many(count: int, models: str = '"gpt2"') -> str:
    """A file of cells that take about 0.2 s each, and differ in the price of a GPU-hour: 1, 2, 3, ..."""
    rest = SMALL.partition("gpus =")[2].partition("\n")[2]
    return f'model = [{models}]\ngpu = "h100-sxm5-80gb"\ngpus = 2\nprice = {list(range(1, count + 1))}\n{rest}'


def rows_in(folder: Path) -> list[Row]:
    """Every row of every file, as they are."""
    import pyarrow.parquet

    rows: list[Row] = []
    for path in sorted(folder.glob("part-*.parquet")):
        rows += pyarrow.parquet.ParquetFile(path).read().to_pylist()
    return rows


def begun(arguments: list[str], folder: Path, **more: Any) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "loadgauge", "plan", *arguments], cwd=folder, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
    )  # fmt: skip


def environment() -> dict[str, str]:
    """That of this process, where `import loadgauge` finds this very package."""
    package = str(Path(loadgauge.__file__).parents[1])
    before = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ, "PYTHONPATH": f"{package}{os.pathsep}{before}".rstrip(os.pathsep), "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0",
    }  # fmt: skip


def until(condition: Any, seconds: float = 600.0) -> Any:
    """The first value of a condition that is true; fails where there is none in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError("it did not come about")


def command_line(process: int) -> str:
    """What a process is called; empty where it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def descendants(process: int) -> list[int]:
    """All processes that a process has begun, and theirs; the oldest first."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if after[0] != "Z":
            parents.setdefault(int(after[1]), []).append(int(path.parent.name))
    found = [process]
    for one in found:
        found += sorted(parents.get(one, []))
    return found[1:]


def same_as_a_plan(row: Row) -> None:
    """Checks a row against the same plan, typed alone."""
    words = shlex.split(row["command"])[1:]
    if row["code"] == 2:
        alone = typed(words)
        assert (alone.code, alone.err) == (2, f"loadgauge: {row['error']}\n")
        return
    alone = typed([*words, "--json"])
    whole = json.loads(alone.out)
    assert alone.code == row["code"]
    if row["code"] == 1:
        assert whole["missing"] == row["missing"]
        assert row["error"].startswith("no layout of ")
        return
    best = whole["layouts"][0]
    layout, memory, step = best["layout"], best["memory"], best["time"]
    for name in ("dp", "tp", "pp", "vpp", "cp", "ep", "zero", "micro_batch", "num_microbatches", "sequence_parallel"):
        assert row[name] == layout[name], name
    assert row["recompute"] == layout["recompute"]
    assert row["gpus"] == layout["gpus"]
    assert (row["memory_total"], row["memory_capacity"]) == (memory["total"], memory["capacity"])
    assert (row["step"], row["step_low"], row["step_high"]) == (step["step"], step["low"], step["high"])
    assert (row["mfu"], row["hfu"]) == (step["mfu"], step["hfu"])
    assert row["tokens_per_second_per_gpu"] == step["tokens_per_second_per_gpu"]
    if row["price"] is not None:
        money = row["price"] * layout["gpus"] * step["step"] / 3600
        assert row["cost_per_billion_tokens"] == pytest.approx(money / step["tokens_per_step"] * 1e9, rel=1e-12)
    assert row["params"] == best["model"]["params"]
    assert [row[name] for name in ("evaluated", "valid", "fitting")] == [
        whole[name] for name in ("evaluated", "valid", "fitting")
    ]
    assert row["assumed"] == ", ".join(f"{flag} {value}" for flag, value in whole["assumed"].items())


def dies(cell: Cell, files: dict[str, bytes]) -> Row:
    """Work that kills its own process where the cell says so."""
    if cell.words == ("die",):
        os.kill(os.getpid(), signal.SIGKILL)
    if cell.words[0] == "once" and not Path(cell.words[1]).exists():
        Path(cell.words[1]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"cell": cell.key, "loadgauge": loadgauge.__version__, "process": os.getpid()}
