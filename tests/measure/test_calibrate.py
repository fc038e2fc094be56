"""Efficiencies from microbenchmarks: times of a known machine give its efficiencies back; a CPU runs the whole way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
import torch

from command_line import typed
from loadgauge.errors import ConfigError
from loadgauge.estimate.time.roofline import Machine, gemm_seconds
from loadgauge.layers.operations import Gemm
from loadgauge.measure import benchmarks
from loadgauge.measure.benchmarks import ON_CUDA, Sizes, Timing, seconds, timings
from loadgauge.measure.calibrate import calibrate, fit_efficiencies, text
from loadgauge.spec.calibration import DEFAULT, Rates
from loadgauge.spec.hardware import gpu

PEAK, BANDWIDTH = 989e12, 3.35e12
SMALL = Sizes(
    matmul=((128, 128, 64), (256, 128, 128)), attention=((1, 64, 2, 32),), elements=(2**18,), parameters=2**16,
    payloads=(2**12, 2**20),
)  # fmt: skip


def times_of(known: Rates, machine: Machine) -> list[Timing]:
    """What a machine with these efficiencies would take."""
    made = [
        Timing("matmul", {"m": m, "n": n, "k": k}, gemm_seconds(Gemm(m, n, k), machine), flops=2 * m * n * k)
        for m, n, k in ON_CUDA.matmul
    ]
    made += [Timing(kind, {"s": 1}, 1e12 / (PEAK * getattr(known, kind)), flops=10**12)
             for kind in ("flash2", "flash2_backward", "attention", "attention_backward")]  # fmt: skip
    copied = 2**30 / (BANDWIDTH * known.memory)
    made += [Timing("copy", {"elements": 1}, copied, nbytes=2**30), Timing("launch", {"elements": 1}, known.launch)]
    made += [Timing(kind, {"elements": 1}, known.traffic * copied, nbytes=2**30) for kind in ("add", "mul", "silu")]
    for payload in (2**12, 2**28):
        wire = 2 * 7 * payload // 8
        taken = 14 * known.inner_latency + wire / (450e9 * known.inner_link)
        made.append(Timing("all_reduce", {"bytes": payload, "ranks": 8}, taken, nbytes=wire))
    return made


@pytest.mark.parametrize(
    ("matmul", "wave", "small_k", "memory"), [(0.7, 0.5, 50, 0.82), (0.62, 0.9, 200, 0.9), (0.55, 0.0, 0, 0.75)]
)
def test_known_efficiencies_come_back(matmul: float, wave: float, small_k: float, memory: float) -> None:
    known = msgspec.structs.replace(
        DEFAULT, matmul=matmul, wave=wave, small_k=small_k, memory=memory, flash2=0.51, flash2_backward=0.33,
        attention=0.66, attention_backward=0.44, traffic=1.3, launch=5e-6, inner_link=0.71, inner_latency=3e-6,
    )  # fmt: skip
    times = times_of(known, Machine(peak=PEAK, bandwidth=BANDWIDTH, rates=known))
    found = fit_efficiencies(times, peak=PEAK, bandwidth=BANDWIDTH, link=450e9)
    assert found.error < 1e-4
    for name in (
        "matmul",
        "memory",
        "flash2",
        "flash2_backward",
        "attention",
        "attention_backward",
        "traffic",
        "launch",
    ):
        assert getattr(found.rates, name) == pytest.approx(getattr(known, name), rel=1e-3), name
    assert (found.rates.wave, found.rates.small_k) == (wave, small_k)
    assert found.rates.inner_link == pytest.approx(0.71, rel=0.01)
    assert found.rates.inner_latency == pytest.approx(3e-6, rel=0.01)
    assert {"contention", "routing", "outer_link", "low", "high"} <= set(found.kept)


@pytest.fixture(scope="module")
def on_cpu() -> list[Timing]:
    return timings("cpu", SMALL)


def test_a_cpu_runs_the_whole_way(on_cpu: list[Timing], tmp_path: Path) -> None:
    kinds = {one.kind for one in on_cpu}
    assert {"matmul", "flash2", "flash2_backward", "copy", "add", "launch", "adamw"} <= kinds
    assert all(one.seconds > 0 for one in on_cpu)
    found = calibrate("cpu", sizes=SMALL)
    known = msgspec.convert(tomllib.loads(text(found)), Rates)
    for name in Rates.__struct_fields__:
        value = getattr(found.rates, name)
        assert getattr(known, name) == (pytest.approx(value, rel=5e-3) if isinstance(value, float) else value)
    assert known.basis == "measured"
    assert known.rows == tuple(one.name for one in found.timings)
    assert "Defaults, not measured here:" in text(found)


def test_a_file_is_read_as_the_shipped_ones_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An estimate reads it in place of a shipped file."""
    from loadgauge import package_data
    from loadgauge.spec import calibration as module

    folder = tmp_path / "data" / "calibration"
    folder.mkdir(parents=True)
    card = gpu("h100-sxm5-80gb")
    times = times_of(DEFAULT, Machine(peak=PEAK, bandwidth=BANDWIDTH, rates=DEFAULT))
    (folder / f"{card.id}.toml").write_text(text(fit_efficiencies(times, peak=PEAK, bandwidth=BANDWIDTH, gpu=card.id)))
    monkeypatch.setattr(package_data, "FOLDER", str(tmp_path / "data"))
    module.rates.cache_clear()
    try:
        assert module.rates(card.id).matmul == pytest.approx(DEFAULT.matmul, rel=1e-2)
    finally:
        monkeypatch.undo()
        module.rates.cache_clear()


def test_seconds_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the call moves: the median of rounds, one of which is disturbed."""
    now, calls = [0.0], iter(range(10_000))

    def call() -> None:
        now[0] += 9.0 if next(calls) == 4 else 0.01

    monkeypatch.setattr(benchmarks.time, "perf_counter", lambda: now[0])
    assert seconds(call, "cpu", 3) == pytest.approx(0.01)


def test_command_under_torchrun(tmp_path: Path) -> None:
    """Two processes time their all-reduce too; one of them writes the file."""
    path = tmp_path / "cpu.toml"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "loadgauge",
            "calibrate", "--device", "cpu", "--output", str(path),
        ],
        capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-800:]
    known = msgspec.convert(tomllib.loads(path.read_text()), Rates)
    assert any(row.startswith("all_reduce") and "ranks=2" in row for row in known.rows)
    assert known.inner_latency != DEFAULT.inner_latency


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not tpu"):
        timings("tpu")
    with pytest.raises(ConfigError, match="which one it is"):
        calibrate("cuda")
    if not torch.cuda.is_available():
        assert "no CUDA device" in typed("calibrate --gpu h100-sxm5-80gb").err
    assert "no such folder" in typed(f"calibrate --device cpu --output {tmp_path}/none/x.toml").err
    with pytest.raises(ConfigError, match="no matrix product"):
        fit_efficiencies([Timing("copy", {}, 1.0, nbytes=1), Timing("launch", {}, 1.0), Timing("add", {}, 1.0, nbytes=1)],
               peak=1, bandwidth=1)  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda() -> None:
    found = json.loads(typed("calibrate --gpu h100-sxm5-80gb --json").out)
    assert 0.2 < found["rates"]["matmul"] <= 1.0
