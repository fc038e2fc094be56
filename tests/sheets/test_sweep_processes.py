"""Sweeps on real processes: one is killed, the whole sweep is killed and goes on, a cell kills whatever works on it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from loadgauge.core.plan.space.grid import DEATHS, Cell, run
from loadgauge.sheets.sweep.workers import Processes
from sweep_cells import begun, command_line, descendants, dies, many, rows_in, same_as_a_plan, until

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
ENDLESS, MORE = 2000, 6


def sweep_of(count: int, folder: Path) -> list[str]:
    """The command line of a sweep of so many cells."""
    (folder / "sweep.toml").write_text(many(count))
    return ["--sweep", "sweep.toml", "--output", "out", "--workers", "2", "--json"]


def workers_of(process: int) -> list[int]:
    """The processes that plan."""
    return [one for one in descendants(process) if "spawn_main" in command_line(one)]


def parts(folder: Path) -> dict[Path, bytes]:
    """The files of results."""
    return {path: path.read_bytes() for path in (folder / "out").glob("part-*")}


def goes_on(folder: Path) -> None:
    """The same sweep, cut to some cells more than are done, does only these; each row is that of a plan typed alone."""
    before, there = parts(folder), rows_in(folder / "out")
    count = int(max(row["price"] for row in there)) + MORE
    assert MORE < count < ENDLESS
    again = begun(sweep_of(count, folder), folder)
    out, err = again.communicate(timeout=600)
    assert (again.returncode, err) == (0, "")
    told = json.loads(out)
    assert [told[name] for name in ("cells", "resumed", "planned")] == [count, len(there), count - len(there)]
    assert before.items() <= parts(folder).items()
    rows = rows_in(folder / "out")
    assert sorted(row["price"] for row in rows) == list(range(1, count + 1))
    assert len({row["cell"] for row in rows}) == count
    costs = [row["cost_per_billion_tokens"] / row["price"] for row in rows]
    assert costs == pytest.approx([costs[0]] * count, rel=1e-12)
    for row in (rows[0], rows[len(there)], rows[-1]):
        same_as_a_plan(row)


@pytest.mark.long
def test_a_killed_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = begun(sweep_of(ENDLESS, tmp_path), tmp_path)
    until(lambda: parts(tmp_path))
    workers = workers_of(first.pid)
    assert len(workers) == 2
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    until(lambda: not any("spawn_main" in command_line(worker) for worker in workers))
    goes_on(tmp_path)


@pytest.mark.long
def test_a_killed_worker_costs_no_cell_and_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    first = begun(sweep_of(ENDLESS, tmp_path), tmp_path, start_new_session=True)
    there = len(until(lambda: parts(tmp_path)))
    os.kill(workers_of(first.pid)[0], signal.SIGKILL)
    until(lambda: len(parts(tmp_path)) > there)
    os.killpg(first.pid, signal.SIGINT)
    out, err = first.communicate(timeout=600)
    done = len(rows_in(tmp_path / "out"))
    assert (first.returncode, out) == (2, "")
    assert (
        err == f"loadgauge: interrupted: {done} of {ENDLESS:,} cells are done; the same command continues from there\n"
    )
    goes_on(tmp_path)


def test_whatever_is_killed_nothing_is_printed(tmp_path: Path) -> None:
    """Python's own tracker of shared resources among it."""
    first = begun(sweep_of(3, tmp_path), tmp_path)
    killed = until(lambda: [] if len(workers_of(first.pid)) < 2 else descendants(first.pid))
    assert any("resource_tracker" in command_line(process) for process in killed)
    for process in killed:
        os.kill(process, signal.SIGKILL)
    out, err = first.communicate(timeout=120)
    assert (first.returncode, err) == (0, "")
    assert len(json.loads(out)["results"]) == 3


def test_a_cell_that_kills_its_worker_is_given_up_and_no_other(tmp_path: Path) -> None:
    named = {"a": ("live",), "b": ("die",), "c": ("live",), "d": ("once", str(tmp_path / "seen")), "e": ("live",)}
    wanted = [Cell(key, words) for key, words in named.items()]
    workers = Processes(dies, 2)
    kept: list[object] = []
    version = __import__("loadgauge").__version__
    rows = run(
        wanted, workers, kept.extend, lambda cell: {"cell": cell.key, "loadgauge": version, "lost": True}, version
    )
    found = {row["cell"]: row for row in rows}
    assert {key: row["deaths"] for key, row in found.items()} == {"a": 0, "b": DEATHS, "c": 0, "d": 1, "e": 0}
    assert [key for key, row in found.items() if row.get("lost")] == ["b"]
    assert os.getpid() not in {row.get("process") for row in found.values()}
    assert len(kept) == len(wanted) - 1
    assert not [one for one in descendants(os.getpid()) if "spawn_main" in command_line(one)]
