"""Efficiencies from microbenchmarks: times of a known machine give its efficiencies back; a CPU runs the whole way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from command_line import typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.hardware.calibration import Both, Efficiencies, Wire, efficiencies
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.time.collectives import Fabric, Group, seconds as collective
from loadgauge.core.estimate.time.roofline import Machine, attention_seconds, gemm_seconds
from loadgauge.core.layers.operations.operations import Gemm, Operation
from loadgauge.core.resolve.rescale import anchor_of
from loadgauge.pytorch.measure import benchmarks
from loadgauge.pytorch.measure.anchor import anchor_text
from loadgauge.pytorch.measure.benchmarks import (
    ATTENTION,
    COLLECTIVES,
    ON_CUDA,
    Saved,
    Sizes,
    Timing,
    refuse_busy,
    seconds,
    timings,
)
from loadgauge.pytorch.measure.calibrate import calibrate, fit_efficiencies, text
from loadgauge.pytorch.measure.train_steps import MeasuredSteps

PEAK, BANDWIDTH = 989e12, 3.35e12
SMALL = Sizes(
    matmul=((128, 128, 64), (256, 128, 128)), attention=((1, 64, 2, 32),), elements=(2**18,), parameters=2**16,
    payloads=(2**12, 2**20),
)  # fmt: skip
HASTY = {"ENOUGH": 0.002, "LONG": {"cpu": 0.01}}


def times_of(known: Efficiencies) -> list[Timing]:
    """What a machine with these efficiencies would take."""
    cool = Machine(peak=PEAK, bandwidth=BANDWIDTH, efficiencies=msgspec.structs.replace(known, throttle=1.0))
    hot = Machine(peak=PEAK, bandwidth=BANDWIDTH, efficiencies=known)
    made = [
        Timing("matmul", {"m": m, "n": n, "k": k}, gemm_seconds(Gemm(m, n, k), cool), flops=2 * m * n * k)
        for m, n, k in ON_CUDA.matmul
    ]
    made.append(Timing("sustained", {"m": 8192, "n": 8192, "k": 8192}, gemm_seconds(Gemm(8192, 8192, 8192), hot)))
    for kernel in ATTENTION:
        for b, s, a, d in ON_CUDA.attention:
            flops = 4 * b * a * s * s * d
            gemms = (Gemm(s, s, d, b * a), Gemm(s, d, s, b * a))
            one = Operation(
                "a", "attention", (), (), gemms=gemms, forward_flops=flops, input_gradient_flops=2 * flops,
                rerun_flops=flops // 2, computed_share=0.5,
            )  # fmt: skip
            time = attention_seconds(one, msgspec.structs.replace(cool, attention=kernel))
            made.append(Timing(kernel, {"b": b, "s": s, "a": a, "d": d}, time.forward))
            made.append(Timing(f"{kernel}_backward", {"b": b, "s": s, "a": a, "d": d}, time.backward))
    rate = BANDWIDTH * known.memory["elementwise"].forward
    made += [Timing("launch", {"elements": 1}, known.launch)]
    made += [
        Timing(kind, {"elements": 1}, 2**30 / rate + known.launch, nbytes=2**30) for kind in ("copy", "add", "silu")
    ]
    norm = known.memory["norm-eager"]
    made.append(Timing("norm", {"elements": 1}, 2**30 / BANDWIDTH / norm.forward, nbytes=2**30))
    made.append(Timing("norm_backward", {"elements": 1}, 2**30 / BANDWIDTH / norm.backward, nbytes=2**30))
    fabric = Fabric(
        domain=8, inner_bandwidth=450e9, outer_bandwidth=1, inner_latency=0, outer_latency=0, wires=known.wires
    )
    for kind in COLLECTIVES:
        for payload in (2**12, 2**20, 2**24, 2**28):
            taken = collective(kind, payload, Group("dp", 8, 1), fabric)
            made.append(Timing(kind, {"bytes": payload, "ranks": 8}, taken))
    return made


@pytest.mark.parametrize(
    ("matmul", "throttle", "wave", "small_k", "share"),
    [(0.7, 0.9, 0.5, 50, 0.82), (0.62, 0.75, 0.9, 200, 0.9), (0.55, 1.0, 0.0, 0, 0.75)],
)
def test_known_efficiencies_come_back(
    matmul: float, throttle: float, wave: float, small_k: float, share: float
) -> None:
    usual = efficiencies("")
    known = msgspec.structs.replace(
        usual, matmul=matmul, throttle=throttle, wave=wave, small_k=small_k, launch=5e-6,
        memory=usual.memory | {"elementwise": Both(share, share), "norm-eager": Both(0.6, 0.3)},
        attention=usual.attention | {"fa2": Both(0.51, 0.33), "cudnn": Both(0.66, 0.44)},
        wires=dict.fromkeys(COLLECTIVES, Wire(9e-6, usual.wires["all_reduce"].step, 0.71, 4e-3)),
    )  # fmt: skip
    found = fit_efficiencies(times_of(known), peak=PEAK, bandwidth=BANDWIDTH, link=450e9)
    assert found.error < 1e-4
    for name in ("matmul", "throttle", "launch"):
        assert getattr(found.efficiencies, name) == pytest.approx(getattr(known, name), rel=1e-3), name
    assert (found.efficiencies.wave, found.efficiencies.small_k) == (wave, small_k)
    for name, kind in (
        ("memory", "elementwise"),
        ("memory", "norm-eager"),
        ("attention", "fa2"),
        ("attention", "cudnn"),
    ):
        mine, given = getattr(found.efficiencies, name)[kind], getattr(known, name)[kind]
        assert (mine.forward, mine.backward) == (
            pytest.approx(given.forward, rel=1e-3), pytest.approx(given.backward, rel=1e-3),
        )  # fmt: skip
    for kind in COLLECTIVES:
        assert found.efficiencies.wires[kind].share == pytest.approx(0.71, abs=0.03), kind
    assert {"contention", "routing", "outer_link"} <= set(found.kept)


@pytest.fixture(scope="module")
def hasty() -> Iterator[None]:
    """Rounds as long as a time needs that nobody relies on."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in HASTY.items():
            patched.setattr(benchmarks, name, value)
        yield


@pytest.fixture(scope="module")
def on_cpu(hasty: None) -> list[Timing]:
    return timings("cpu", SMALL)


def test_a_cpu_runs_the_whole_way(on_cpu: list[Timing], tmp_path: Path) -> None:
    kinds = {one.kind for one in on_cpu}
    assert {"matmul", "sustained", "fa2", "fa2_backward", "norm", "copy", "add", "launch", "adamw"} <= kinds
    assert all(one.seconds > 0 for one in on_cpu)
    found = calibrate("cpu", sizes=SMALL)
    known = msgspec.convert(tomllib.loads(text(found)), Efficiencies)
    for name in Efficiencies.__struct_fields__:
        value = getattr(found.efficiencies, name)
        if isinstance(value, (int, float, str)):
            assert getattr(known, name) == (pytest.approx(value, rel=5e-3) if isinstance(value, float) else value)
    assert known.attention["fa2"].forward == pytest.approx(found.efficiencies.attention["fa2"].forward, rel=5e-3)
    assert known.basis == "measured"
    assert all(one.name in text(found) for one in found.timings)
    assert "Not measured here:" in text(found)
    steps = MeasuredSteps("", "cpu", "", 2**30, 0, 0, {}, {}, (), (0.5, 0.25, 0.75), 1, 1, ())
    (tmp_path / "anchor.toml").write_text(anchor_text(Job(model="gpt2", seq_len=64), 2, gpu("l40s"), found, steps))
    anchor = anchor_of(Job(model="gpt2", measured=str(tmp_path / "anchor.toml")))
    assert anchor is not None
    assert anchor.run is not None
    assert anchor.run.layers == 2
    assert (anchor.gpu, anchor.run.step, anchor.run.allocated) == ("l40s", "0.5s", "1.000 GiB")
    assert anchor.kernels is not None
    assert anchor.kernels.matmul == known.matmul


def test_a_file_is_read_as_the_shipped_ones_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An estimate reads it in place of a shipped file."""
    from loadgauge.core.base import package_data
    from loadgauge.core.definitions.hardware import calibration as module

    folder = tmp_path / "data" / "calibration"
    shutil.copytree(Path(package_data.FOLDER) / "calibration", folder)
    (tmp_path / "data" / "gpus").symlink_to(Path(package_data.FOLDER) / "gpus")
    card = gpu("h100-sxm5-80gb")
    usual = msgspec.structs.replace(efficiencies(""), matmul=0.5, throttle=0.8)
    times = times_of(usual)
    (folder / f"{card.id}.toml").write_text(text(fit_efficiencies(times, peak=PEAK, bandwidth=BANDWIDTH, gpu=card.id)))
    monkeypatch.setattr(package_data, "FOLDER", str(tmp_path / "data"))
    for read in (module.efficiencies, package_data.read_table):
        read.cache_clear()
    try:
        assert module.efficiencies(card.id).matmul == pytest.approx(0.5, rel=1e-2)
        assert module.efficiencies(card.id).throttle == pytest.approx(0.8, rel=1e-2)
    finally:
        monkeypatch.undo()
        for read in (module.efficiencies, package_data.read_table):
            read.cache_clear()


def test_seconds_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the call moves: the median of rounds, one of which is disturbed."""
    now, calls = [0.0], iter(range(10_000))

    def call() -> None:
        now[0] += 9.0 if next(calls) == 4 else 0.01

    monkeypatch.setattr(benchmarks.time, "perf_counter", lambda: now[0])
    assert seconds(call, "cpu", 3) == pytest.approx(0.01)


@pytest.mark.long
def test_command_under_torchrun(tmp_path: Path) -> None:
    """Two processes time their all-reduce too; one of them writes the file."""
    path, program = tmp_path / "cpu.toml", tmp_path / "program.py"
    root = Path(__file__).parents[3]
    hasty = "".join(f"benchmarks.{name} = {value}\n" for name, value in HASTY.items())
    hasty += f"benchmarks.ON_CPU = benchmarks.{SMALL!r}\n"
    program.write_text(
        "import sys\nfrom loadgauge.core.command_line.main import main\n"
        f"from loadgauge.pytorch.measure import benchmarks\n{hasty}sys.exit(main())\n"
    )
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program),
            "calibrate", "--device", "cpu", "--output", str(path),
        ],
        capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-800:]
    known = msgspec.convert(tomllib.loads(path.read_text()), Efficiencies)
    assert known.basis == "measured"
    for kind in ("all_reduce", "all_gather", "all_to_all"):
        assert f"{kind} bytes=" in path.read_text()


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: None) -> None:
    path = tmp_path / "cpu.toml.part"
    calls: list[str] = []

    def stopped(*_: object) -> object:
        calls.append("norm")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(benchmarks, "_norm", stopped)
        with pytest.raises(KeyboardInterrupt):
            timings("cpu", SMALL, Saved(path, "cpu"))
    first = Saved(path, "cpu").parts
    assert {"products", "sustained", "attention", "memory"} == set(first)
    again = timings("cpu", SMALL, Saved(path, "cpu"))
    assert again[: len(first["products"])] == first["products"], "measured once"
    assert {"norm", "launch"} <= {one.kind for one in again}
    assert not Saved(path, "another device").parts
    Saved(path, "cpu").done()
    assert not path.exists()


def test_a_busy_card_is_refused() -> None:
    refuse_busy("cuda", used=2**20)
    refuse_busy("cpu")
    with pytest.raises(ConfigError, match=r"5\.0 GiB of the card are in use"):
        refuse_busy("cuda", used=5 * 2**30)


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
    assert 0.2 < found["efficiencies"]["matmul"] <= 1.0
