"""A sweep on a real Ray cluster of three workers, one of which is killed while it plans."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sweep_cells import begun, command_line, descendants, environment, many, rows_in, same_as_a_plan, until

pytest.importorskip("pyarrow")
pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")

CLUSTER = """
import sys
import ray
found = ray.init(
    num_cpus=3, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
    _node_ip_address="127.0.0.1", _temp_dir=sys.argv[1], _plasma_directory=sys.argv[1],
)
print(found.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""
PRICES = 6


@pytest.fixture
def cluster() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A cluster of its own and its address; nothing of it is left afterwards."""
    folder = tempfile.mkdtemp(prefix="lg")  # Ray's sockets are in there, whose names must be short.
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, folder], env=environment(), cwd=folder, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, process.communicate()[1]
        yield process, address
        all_of_it = descendants(process.pid)
        process.stdin.close()
        process.wait(60)
        until(lambda: not [one for one in all_of_it if folder in command_line(one) or "ray::" in command_line(one)])
    finally:
        for one in [*descendants(process.pid), process.pid] if process.poll() is None else []:
            os.kill(one, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
        shutil.rmtree(folder, ignore_errors=True)


def stopped_at_work(cluster: int) -> int:
    """A worker that has a cell in hand, and is stopped; 0 where none has."""
    for one in descendants(cluster):
        if command_line(one).startswith("ray::loadgauge"):
            os.kill(one, signal.SIGSTOP)
            if command_line(one).startswith("ray::loadgauge"):
                return one
            os.kill(one, signal.SIGCONT)
    return 0


@pytest.mark.long
def test_a_worker_of_ray_is_killed_and_no_cell_is_lost(
    cluster: tuple[subprocess.Popen[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, address = cluster
    (tmp_path / "tiny").mkdir()
    config = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 2, "n_positions": 4096}
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    # The workers run in another folder: the model's file is sent to them.
    (tmp_path / "sweep.toml").write_text(many(PRICES, '"gpt2", "./tiny", "./missing"'))
    words = ["--sweep", "sweep.toml", "--output", "out", "--ray", address, "--json"]
    first = begun(words, tmp_path)
    worker = until(lambda: stopped_at_work(process.pid))
    until(lambda: list((tmp_path / "out").glob("part-*")))  # The others work on.
    os.kill(worker, signal.SIGKILL)
    out, err = first.communicate(timeout=600)
    assert (first.returncode, err, out[:1]) == (0, "", "{"), out[:500]
    told = json.loads(out)
    rows = rows_in(tmp_path / "out")
    asked = {(row["model"], row["price"]) for row in rows}
    assert len(rows) == len({row["cell"] for row in rows}) == len(asked) == told["cells"] == 3 * PRICES
    assert [told[name] for name in ("fits", "nothing_fits", "cannot_tell")] == [2 * PRICES, 0, PRICES]
    assert sorted(row["deaths"] for row in rows)[-2:] == [0, 1]

    second = begun(words, tmp_path)
    again = json.loads(second.communicate(timeout=600)[0])
    assert (again["resumed"], again["planned"]) == (3 * PRICES, 0)
    os.chdir(tmp_path)
    monkeypatch.chdir(tmp_path)
    for model in ("gpt2", "./tiny", "./missing"):
        same_as_a_plan(next(row for row in rows if row["model"] == model and row["price"] == PRICES))
