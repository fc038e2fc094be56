"""What `make gpu` does on a machine with a GPU, done on a CPU with less."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import gpu_runs
from command_line import typed
from gpu_runs import CASES, ON_CPU, Report, case, find_gpu_by_name, main, report, row, write
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.units import GIB
from loadgauge.core.definitions.hardware.hardware import gpu, gpu_ids
from loadgauge.evidence.published.tables import read
from loadgauge.evidence.validate.validate import validate
from loadgauge.pytorch.compare.compare import Formula
from loadgauge.pytorch.measure import benchmarks
from loadgauge.pytorch.measure.benchmarks import Sizes
from loadgauge.pytorch.measure.train_steps import MeasuredSteps
from loadgauge.pytorch.trace.programs.jobs import ConfigJob
from loadgauge.pytorch.trace.programs.target import find_job
from loadgauge.pytorch.trace.torch_run import TorchRun
from once import once

SMALL = Sizes(
    matmul=((128, 128, 64),), attention=((1, 64, 2, 32),), elements=(2**16,), parameters=2**12, payloads=(2**12,)
)  # fmt: skip
BIG = 40 * GIB


def test_the_list() -> None:
    """At least 20 trainings, all different, of several kinds; each has a formula and fits on a small data-centre GPU."""
    assert len(CASES) >= 20
    assert len({one.name for one in CASES}) == len(CASES)
    assert {one.job.attention for one in CASES} == {"flash", "eager"}
    assert {one.job.recompute for one in CASES} == {"none", "full"}
    assert len({one.job.model for one in CASES}) >= 10
    for training in CASES:
        asked = find_job(training.job.model, TorchRun.of(training.job), training.layers)
        assert isinstance(asked, ConfigJob)
        formula = Formula(asked.config, asked.run)
        assert formula.spec.num_hidden_layers == training.layers
        assert formula.estimate.memory.allocated < BIG, training.name


@pytest.fixture(scope="module", autouse=True)
def hasty() -> Iterator[None]:
    """Rounds of a calibration as long as times need that nobody relies on."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(benchmarks, "ENOUGH", 0.002)
        patched.setattr(benchmarks, "LONG", {"cpu": 0.01})
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Report:
    good = case("electra-small", 1, 16, precision="fp32")
    bad = case("electra-small", 1, 100_000)
    made = once(tmp_path_factory, "gpu", lambda: msgspec.to_builtins(report(None, "cpu", (good, bad), SMALL, timed=1)))
    return msgspec.convert(made, Report)


def test_a_report(found: Report, tmp_path: Path) -> None:
    good, bad = found.outcomes
    assert good.comparison is not None, good.error
    rows = {one.quantity: one for one in good.comparison.rows}
    assert rows["peak"].measured == pytest.approx(rows["peak"].trace, rel=0.01)
    assert good.comparison.real is not None
    assert len(good.comparison.real.seconds) == 1
    assert bad.comparison is None
    assert "100000 is more than" in bad.error
    assert (found.device, found.torch) == ("cpu", str(torch.__version__))
    path = tmp_path / "report.json"
    write(found, path)
    assert msgspec.to_builtins(msgspec.json.decode(path.read_bytes(), type=Report)) == msgspec.to_builtins(found)


def test_validate_reads_its_runs(found: Report, tmp_path: Path) -> None:
    """Rows of a GPU that is not here: what is predicted for them stands in for what would be measured."""
    card, runs = gpu("h100-sxm5-80gb"), []
    for number, training in enumerate(CASES):
        asked = find_job(training.job.model, TorchRun.of(training.job), training.layers)
        assert isinstance(asked, ConfigJob)
        formula = Formula(asked.config, asked.run)
        peak = int(formula.estimate.memory.allocated)
        taken = MeasuredSteps("", card.name, "", peak, peak, 0, {}, {}, (), (0.5,), 0, 0, ())
        runs.append(row(training, taken, card, number))
    path = tmp_path / "report.json"
    write(msgspec.structs.replace(found, runs=tuple(runs)), path)
    rows = read(path)
    assert not rows.rejected
    assert not rows.ignored
    assert [one.measured.step_time_s for one in rows.runs] == [0.5] * len(CASES)
    records = validate(rows, ("time", "memory"))
    assert {record.id for record in records} == {one["id"] for one in runs}
    assert [record.reason for record in records if record.predicted is None] == []
    said = typed(["validate", "--runs", str(path), "--rows"])
    assert said.code == 0, said.err
    assert all(one["id"] in said.out for one in runs)
    # Its own prediction stands in for the measurement: what `validate` makes of a row is what was run. On a GPU that is
    # named, cuBLAS has its workspaces too.
    errors = {record.id: record.error for record in records if record.quantity == "memory"}
    assert all(error is not None and abs(error) < 0.01 for error in errors.values()), errors


@pytest.mark.long
def test_the_whole_way_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make gpu` does it, with the result that `validate` reads, and the file that `estimate` would."""
    monkeypatch.setattr(benchmarks, "ON_CPU", SMALL)
    monkeypatch.setattr(gpu_runs, "ON_CPU", ON_CPU[-1:])
    path = tmp_path / "gpu.json"
    assert main(["--device", "cpu", str(path)]) == 0
    found = json.loads(path.read_bytes())
    assert {"device", "torch", "transformers", "cuda", "date", "calibration", "outcomes", "runs"} <= set(found)
    assert len(found["outcomes"]) == len(ON_CPU[-1:])
    assert [one["error"] for one in found["outcomes"]] == [""] * len(ON_CPU[-1:])
    assert tomllib.loads(path.with_suffix(".toml").read_text())["basis"] == "measured"
    said = typed(["validate", "--runs", str(path)])
    assert (said.code, "has no runs" in said.err) == (2, True)  # a CPU is no GPU of the catalogue


def test_what_is_no_report(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"a": 1}')
    assert "is no result of `make gpu`" in typed(["validate", "--runs", str(path)]).err
    assert main(["--device", "cpu", str(tmp_path / "none" / "gpu.json")]) == 2


def test_names_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_gpu_by_name("NVIDIA H200").id == "h200-sxm-141gb"
    assert find_gpu_by_name("NVIDIA GeForce RTX 4090").id == "rtx4090"
    assert "a100-sxm4-80gb" in gpu_ids()
    with pytest.raises(ConfigError, match="name it with --gpu"):
        find_gpu_by_name("NVIDIA H100")
    if not torch.cuda.is_available():
        assert main(["nowhere.json"]) == 2
        assert "no CUDA device" in capsys.readouterr().err
