"""Collectives against NCCL's own documents, and against closed forms that follow from the links alone."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.hardware.calibration import efficiencies
from loadgauge.core.definitions.hardware.hardware import Cluster, Link, gpu
from loadgauge.core.definitions.layout.axes import RANK_ORDER
from loadgauge.core.estimate.time.collectives import (
    Fabric,
    Group,
    adapter_bytes,
    bus_factor,
    groups,
    joined,
    seconds,
    wire_bytes,
)

FABRIC = Fabric(domain=8, inner_bandwidth=400e9, outer_bandwidth=50e9, inner_latency=3e-6, outer_latency=14e-6)
FREE = Fabric(domain=8, inner_bandwidth=400e9, outer_bandwidth=50e9, inner_latency=0, outer_latency=0)
SIZE = 1e9
NODE, ACROSS, WHOLE = Group("tp", 8, 1), Group("dp", 16, 8), Group("dp", 64, 1)

# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "factor"),
    [  # nccl-tests, doc/PERFORMANCE.md, summary
        ("all_reduce", lambda n: 2 * (n - 1) / n),
        ("reduce_scatter", lambda n: (n - 1) / n),
        ("all_gather", lambda n: (n - 1) / n),
        ("broadcast", lambda n: 1),
        ("reduce", lambda n: 1),
        ("all_to_all", lambda n: (n - 1) / n),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3, 8, 512])
def test_bus_factors_of_nccl_tests(kind: str, factor: object, ranks: int) -> None:
    assert bus_factor(kind, ranks) == factor(ranks)  # type: ignore[operator]
    # The document's time of a large tensor where every rank has a bandwidth B: S / B times the factor.
    alone = Fabric(domain=ranks, inner_bandwidth=7e9, outer_bandwidth=1, inner_latency=0, outer_latency=0)
    assert seconds(kind, SIZE, Group("x", ranks, 1), alone) == pytest.approx(SIZE / 7e9 * bus_factor(kind, ranks))
    assert wire_bytes(kind, SIZE * ranks, ranks) == SIZE * ranks * bus_factor(kind, ranks)


def test_an_unknown_collective_is_refused() -> None:
    for call in (lambda: bus_factor("gossip", 8), lambda: wire_bytes("gossip", 8, 8)):
        with pytest.raises(ConfigError, match="unknown collective 'gossip'"):
            call()
    with pytest.raises(ConfigError, match="unknown algorithm 'star'"):
        seconds("all_reduce", SIZE, NODE, FABRIC, "star")


def test_nobody_sends_anything_alone() -> None:
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv"):
        assert wire_bytes(kind, SIZE, 1) == seconds(kind, SIZE, Group("x", 1, 1), FABRIC) == 0


def test_chunks_that_do_not_divide_are_sent_as_the_largest_one() -> None:
    assert wire_bytes("all_gather", 10, 4) == 3 * 3
    assert wire_bytes("all_reduce", 10, 4) == 2 * 3 * 3


def test_bytes_are_one_formula_for_numbers_arrays_and_symbols() -> None:
    S, n = sympy.symbols("S n", positive=True, integer=True)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        closed = wire_bytes(kind, S, n)
        assert sympy.simplify(closed - S * bus_factor(kind, n)) == 0
        ranks = np.array([1.0, 2.0, 8.0])
        for number, one in zip(wire_bytes(kind, 1024.0, ranks), ranks, strict=True):
            assert number == wire_bytes(kind, 1024, int(one)) == closed.subs({S: 1024, n: int(one)})


def test_seconds_of_arrays_are_those_of_their_elements() -> None:
    ranks, strides = np.array([1.0, 2.0, 8.0, 6.0, 64.0, 4.0]), np.array([1.0, 4.0, 1.0, 1.0, 1.0, 12.0])
    for kind in ("all_reduce", "all_gather", "all_to_all", "broadcast", "send_recv"):
        found = seconds(kind, SIZE, Group("x", ranks, strides), FABRIC)
        each = [seconds(kind, SIZE, Group("x", int(n), int(s)), FABRIC) for n, s in zip(ranks, strides, strict=True)]
        assert found == pytest.approx(each)
        assert each[0] == 0


# -- links ------------------------------------------------------------------------------------------------------------


def test_a_ring_over_nodes_uses_every_adapter_of_a_node() -> None:
    # 8 members a node: 8 x 50 GB/s cross each border, as fast as the link inside.
    assert seconds("all_gather", SIZE, WHOLE, FREE) == pytest.approx(SIZE * 63 / 64 / 400e9)
    # One member a node has its own adapter only.
    assert seconds("all_gather", SIZE, ACROSS, FREE) == pytest.approx(SIZE * 15 / 16 / 50e9)
    assert adapter_bytes("all_gather", 64.0, WHOLE, FREE) == 63 / 8
    assert adapter_bytes("all_gather", 64.0, ACROSS, FREE) == 60
    assert adapter_bytes("all_gather", 64.0, NODE, FREE) == 0


def test_a_ring_is_no_faster_than_its_slowest_link() -> None:
    slow = Fabric(domain=8, inner_bandwidth=100e9, outer_bandwidth=50e9, inner_latency=0, outer_latency=0)
    assert seconds("all_gather", SIZE, WHOLE, slow) == pytest.approx(SIZE * 63 / 64 / 100e9)


def test_the_first_and_the_last_of_a_group() -> None:
    ends = Group("pp", 2, 24, part_of=Group("pp", 4, 8))
    assert (ends.members(8), ends.domains(8), ends.link(8), ends.aligned(8)) == (1, 2, "outer", True)
    assert (ends.members(32), ends.domains(32), ends.link(32)) == (2, 1, "inner")


def test_all_to_all_over_nodes_is_bound_by_the_adapter() -> None:
    group = Group("ep", 16, 1)
    assert seconds("all_to_all", SIZE, group, FREE) == pytest.approx(SIZE * 8 / 16 / 50e9)
    assert adapter_bytes("all_to_all", 1600, group, FREE) == 800
    # In one node it is not.
    assert seconds("all_to_all", SIZE, NODE, FREE) == pytest.approx(SIZE * 7 / 8 / 400e9)


def test_a_rack_of_72_keeps_inside_what_nodes_of_8_send_out() -> None:
    rack = Fabric(domain=72, inner_bandwidth=900e9, outer_bandwidth=50e9, inner_latency=0, outer_latency=0)
    group = Group("ep", 36, 2)
    assert group.link(72) == "inner"
    assert group.link(8) == "outer"
    assert seconds("all_to_all", SIZE, group, rack) == pytest.approx(SIZE * 35 / 36 / 900e9)
    # 64 ranks do not divide 72: every other group straddles two racks, with as few as 8 of its members in one.
    straddling = Group("tp", 64, 1)
    assert (straddling.members(72), straddling.domains(72), straddling.link(72)) == (8, 2, "outer")


def test_tp_of_8_on_nodes_of_4_goes_over_the_network() -> None:
    nodes = Fabric(domain=4, inner_bandwidth=400e9, outer_bandwidth=50e9, inner_latency=0, outer_latency=0)
    assert NODE.link(4) == "outer"
    assert seconds("all_reduce", SIZE, NODE, nodes, "ring") == pytest.approx(SIZE * 14 / 8 / (4 * 50e9))


def test_neighbours_in_a_pipeline() -> None:
    assert seconds("send_recv", SIZE, Group("pp", 2, 4), FREE) == SIZE / 400e9
    assert seconds("send_recv", SIZE, Group("pp", 2, 8), FREE) == SIZE / 50e9
    assert seconds("send_recv", SIZE, Group("pp", 4, 8), FABRIC) == SIZE / 50e9 + 14e-6


def test_a_group_whose_axes_are_apart() -> None:
    made = groups({"tp": 2, "cp": 2, "pp": 2, "dp": 4}, ("tp", "cp", "pp", "dp"))
    both = joined("dp", made["cp"], made["dp"])
    # Ranks 0, 2 | 8, 10 | 16, 18 | 24, 26 on nodes of 8.
    assert (both.ranks, both.members(8), both.domains(8)) == (8, 2, 4)
    assert joined("dp", made["tp"], made["cp"]) == Group("dp", 4, 1)
    # Nothing lies between them in the usual order.
    near = groups({"tp": 2, "cp": 2, "dp": 4, "pp": 2}, RANK_ORDER)
    assert joined("dp", near["cp"], near["dp"]) == Group("dp", 8, 2)


# -- algorithms -------------------------------------------------------------------------------------------------------


def test_latency_of_a_ring_as_nccl_counts_it() -> None:
    # tuning.cc: (nsteps - nInterSteps) intraLat + nInterSteps interLat; nsteps 2(n-1) or n-1, nInterSteps 2(d-1) or d-1.
    n, d, intra, inter = 64, 8, 3e-6, 14e-6
    gather = (n - 1 - (d - 1)) * intra + (d - 1) * inter
    assert seconds("all_gather", 0, WHOLE, FABRIC) == pytest.approx(gather)
    assert seconds("reduce_scatter", 0, WHOLE, FABRIC) == pytest.approx(gather)
    assert seconds("all_reduce", 0, WHOLE, FABRIC, "ring") == pytest.approx(2 * gather)
    assert seconds("all_gather", 0, NODE, FABRIC) == pytest.approx(7 * intra)


def test_latency_of_a_tree_as_nccl_counts_it() -> None:
    # tuning.cc: 2 ((nRanks / nNodes - 1) intraLat + log2(nNodes) interLat), at 0.92 x 0.5 of the bus bandwidth.
    latency = 2 * (7 * 3e-6 + 3 * 14e-6)
    assert seconds("all_reduce", 0, WHOLE, FABRIC, "tree") == pytest.approx(latency)
    assert seconds("all_reduce", SIZE, WHOLE, FABRIC, "tree") == pytest.approx(latency + SIZE / (400e9 * 0.92 * 0.5))


def test_small_tensors_take_the_tree_and_large_ones_the_ring() -> None:
    for nbytes, better in ((1e4, "tree"), (1e10, "ring")):
        each = {name: seconds("all_reduce", nbytes, ACROSS, FABRIC, name) for name in ("ring", "tree")}
        assert min(each, key=lambda name: each[name]) == better
        assert seconds("all_reduce", nbytes, ACROSS, FABRIC) == each[better]


def test_a_hierarchy_sends_what_a_ring_sends() -> None:
    # 2 (m-1)/m S inside and 2 (d-1)/d S/m between are together 2 (n-1)/n S.
    m, d = 8, 8
    inside, between = 2 * (m - 1) / m * SIZE, 2 * (d - 1) / d * SIZE / m
    assert inside + between == pytest.approx(wire_bytes("all_reduce", SIZE, m * d))
    assert seconds("all_reduce", SIZE, WHOLE, FREE, "hierarchical") == pytest.approx(inside / 400e9 + between / 50e9)
    # With no second level it is a ring; its latency grows with m + d and not with m d.
    for group in (NODE, ACROSS):
        ring = seconds("all_reduce", SIZE, group, FABRIC, "ring")
        assert seconds("all_reduce", SIZE, group, FABRIC, "hierarchical") == pytest.approx(ring)
    assert seconds("all_reduce", 0, WHOLE, FABRIC, "hierarchical") == pytest.approx(2 * (7 * 3e-6 + 7 * 14e-6))


# -- oversubscription -------------------------------------------------------------------------------------------------


def slower(group: Group, kind: str = "all_gather", **how: object) -> float:
    """By what oversubscription by 4 stretches a collective."""
    import msgspec

    crowded = msgspec.structs.replace(FREE, oversubscription=4.0, **how)
    return seconds(kind, SIZE, group, crowded) / seconds(kind, SIZE, group, FREE)


def test_oversubscription_and_rails() -> None:
    assert slower(NODE) == 1
    assert slower(ACROSS) == pytest.approx(4)
    # Members of one place stay on their rail ...
    assert slower(ACROSS, rails=True) == 1
    assert slower(Group("dp", 16, 4), rails=True) == 1
    # ... those of changing places do not: ranks 0, 12, 24, 36 are GPUs 0, 4, 0, 4 of their nodes.
    assert slower(Group("pp", 4, 12), "send_recv", rails=True) == pytest.approx(4)
    assert slower(Group("pp", 4, 16), "send_recv", rails=True) == 1
    # A rail ends with its pod; without rails a pod is what hangs on one switch.
    assert slower(ACROSS, rails=True, pod=128) == 1
    assert slower(ACROSS, rails=True, pod=64) == pytest.approx(4)
    assert slower(ACROSS, pod=128) == 1
    assert slower(ACROSS, pod=64) == pytest.approx(4)


def test_a_cluster_of_three_links_has_pods() -> None:
    inner = Link(bandwidth=450e9, latency=2e-6, domain=8)
    network = Link(bandwidth=50e9, latency=5e-6, domain=64)
    spine = Link(bandwidth=12.5e9, latency=9e-6, domain=512)
    h100 = gpu("h100-sxm5-80gb")
    fabric = Fabric.of(Cluster(gpu=h100, gpus=512, gpus_per_node=8, links=(inner, network, spine)), efficiencies(""))
    assert (fabric.domain, fabric.pod, fabric.oversubscription) == (8, 64, 4)
    share = efficiencies("").outer_link
    assert fabric.outer_for(Group("dp", 8, 8)) == pytest.approx(50e9 * share)
    assert fabric.outer_for(Group("dp", 16, 8)) == pytest.approx(12.5e9 * share)
    two = Fabric.of(Cluster(gpu=h100, gpus=64, gpus_per_node=8, links=(inner, network)), efficiencies(""))
    assert (two.pod, two.oversubscription, two.inner) == (None, 1, pytest.approx(450e9 * efficiencies("").inner_link))
    one = Fabric.of(Cluster(gpu=h100, gpus=8, gpus_per_node=8, links=(inner,)), efficiencies(""))
    assert (one.domain, one.inner, one.outer) == (8, one.outer, pytest.approx(450e9 * efficiencies("").inner_link))
