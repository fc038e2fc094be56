"""What nccl-tests measured stands in place of the table, and the algorithm that is named is the faster one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.command_line import typed

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.hardware.calibration import of_cluster
from loadgauge.core.definitions.hardware.cluster import cluster
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.estimate.time.busbw import measured, on
from loadgauge.core.estimate.time.collectives import Fabric, Group, algorithm, bus_factor, seconds

H100 = cluster(gpu("h100-sxm5-80gb"), 64)
FABRIC = Fabric.of(H100, of_cluster(H100))
RUN = """# nThread 1 nGpus 4 minBytes 1024 maxBytes 1073741824 step: 1048576(factor) warmup iters: 5 iters: 20 agg iters: 1
#  Rank  0 Group  0 Pid  9000 on      node1 device  0 [0x1b] A GPU
#  Rank  1 Group  0 Pid  9000 on      node1 device  1 [0x43] A GPU
#  Rank  2 Group  0 Pid  9000 on      node1 device  2 [0x52] A GPU
#  Rank  3 Group  0 Pid  9000 on      node1 device  3 [0x61] A GPU
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    20.00    0.05    0.08      0    19.00    0.05    0.08      0
  1073741824     268435456     float     sum      -1   5020.0  213.89  320.83      0   5010.0  214.32  321.48    N/A
"""


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_a_collective_takes_what_was_measured(kind: str, ranks: int) -> None:
    """nccl-tests: busbw is the factor of the collective times bytes over seconds, algbw bytes over seconds."""
    group = Group("dp", ranks, 1)
    speed = 200 if kind == "all_reduce" else 30
    for word, factor in (("", float(bus_factor(kind, ranks))), ("algbw:", 1.0)):
        fabric = on(FABRIC, measured(f"{kind}={word}{speed}GB/s:1GiB:{ranks}", 8))
        assert seconds(kind, 2**30, group, fabric) == pytest.approx(2**30 * factor / (speed * 1e9), rel=1e-6)


def test_the_text_of_a_run_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.txt"
    file.write_text(RUN, encoding="utf-8")
    points = measured(f"all_reduce={file}", 8)
    assert [(point.nbytes, point.ranks) for point in points] == [(1024, 4), (2**30, 4)]
    assert [point.seconds for point in points] == pytest.approx([2e-5, 5.02e-3])
    fabric, group = on(FABRIC, points), Group("dp", 4, 1)
    for point in points:
        assert seconds("all_reduce", point.nbytes, group, fabric) == pytest.approx(point.seconds, rel=0.01)
    found = typed(f"network llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --tp 8 --busbw all_reduce={file}")
    assert "reaches" in found.out


def table(kind: str, ranks: int) -> str:
    """Rows as nccl-tests prints them: time in microseconds, bytes over it, and that times the factor of its PERFORMANCE.md."""
    factor = {"all_reduce": 2 * (ranks - 1) / ranks}.get(kind, (ranks - 1) / ranks)
    redop = "none" if kind == "all_gather" else "sum"
    text = ""
    for size, took in ((2**20, 40.0), (2**30, 4000.0)):
        times = f" {took:.2f} {size / took / 1e3:.2f} {factor * size / took / 1e3:.2f} 0"
        text += f"  {size}  {size // 4}  float  {redop}  -1 {times} {times}\n"
    return text


@pytest.mark.parametrize(("kind", "ranks"), [("all_reduce", 2), ("all_reduce", 16), ("reduce_scatter", 8)])
def test_a_pasted_table_says_its_collective_and_its_ranks_by_its_two_bandwidths(kind: str, ranks: int) -> None:
    points = measured(table(kind, ranks), 8)
    assert {(point.kind, point.ranks) for point in points} == {(kind, ranks)}
    assert [point.seconds for point in points] == pytest.approx([4e-5, 4e-3])
    assert points == measured(f"{kind}={table(kind, ranks)}", 8)


def test_a_pasted_table_of_two_possible_collectives_is_asked_for_its_name() -> None:
    with pytest.raises(ConfigError, match="does not name its collective"):
        measured(table("all_gather", 8), 8)
    assert {point.ranks for point in measured(f"all_gather={table('all_gather', 8)}", 4)} == {8}
    with pytest.raises(ConfigError, match="no row"):
        measured("all_reduce=# nothing\n", 8)


def test_an_algorithm_bandwidth_is_the_bus_bandwidth_over_the_factor() -> None:
    line = "network llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --tp 8"
    alone, bus = (typed(f"{line} --{word}").out for word in ("algbw all_reduce=200:1GiB", "busbw all_reduce=350:1GiB"))
    assert alone == bus != typed(line).out


@pytest.mark.parametrize("text", ["reduce=", "ring=1GB/s:1GiB", "all_reduce=1GiB:1GB/s", "all_reduce=1GB/s:1GiB:1"])
def test_what_is_no_measurement_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be|between 2 ranks"):
        measured(text, 8)


@pytest.mark.parametrize("ranks", [8, 16, 64])
def test_the_algorithm_that_is_named_is_the_faster_one_on_both_sides_of_its_end(ranks: int) -> None:
    group = Group("dp", ranks, 1)
    names = {}
    for power in range(10, 36):
        size = 2.0**power
        names[size] = algorithm("all_reduce", size, group, FABRIC)
        ring, taken = (seconds("all_reduce", size, group, FABRIC, how) for how in ("ring", "auto"))
        assert names[size].startswith("ring") == (ring <= taken)
    assert algorithm("all_gather", 1e9, group, FABRIC) == "ring"
    assert algorithm("all_to_all", 1e9, group, FABRIC) == "pairs"
