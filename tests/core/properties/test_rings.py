"""Every rank of small clusters, played through: what is sent is received, groups lie where their ranks lie."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import assume, given, settings, strategies as st

from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.estimate.time.collectives import Fabric, Group, adapter_bytes, groups, joined, wire_bytes
from loadgauge.core.estimate.time.traffic import layout_groups

Rank = int


def ranks_of(degrees: dict[str, int], order: tuple[str, ...], axes: tuple[str, ...]) -> list[list[Rank]]:
    """Every group of some axes, by going through all coordinates; the first axis of the order is the fastest."""
    found: dict[tuple[int, ...], list[Rank]] = {}
    for rank, reverse in enumerate(itertools.product(*(range(degrees[axis]) for axis in reversed(order)))):
        place = dict(zip(reversed(order), reverse, strict=True))
        found.setdefault(tuple(place[axis] for axis in order if axis not in axes), []).append(rank)
    return list(found.values())


class Wires:
    """Bytes sent and received by each rank, and over the border of each domain."""

    def __init__(self, domain: int) -> None:
        self.domain, self.sent, self.received = domain, Counter[Rank](), Counter[Rank]()
        self.left: Counter[int] = Counter()

    def send(self, source: Rank, target: Rank, nbytes: int) -> None:
        self.sent[source] += nbytes
        self.received[target] += nbytes
        if source // self.domain != target // self.domain:
            self.left[source // self.domain] += nbytes


def ring_pass(wires: Wires, group: list[Rank], held: list[list[set[Rank]]], nbytes: int, shift: int) -> None:
    """n - 1 steps: rank i hands chunk i - step + shift on to its neighbour, which adds what it holds of it."""
    n = len(group)
    for step in range(n - 1):
        moving = [(i, (i - step + shift) % n) for i in range(n)]
        parts = [set(held[i][chunk]) for i, chunk in moving]
        for (i, chunk), part in zip(moving, parts, strict=True):
            wires.send(group[i], group[(i + 1) % n], nbytes // n)
            held[(i + 1) % n][chunk] |= part


def play(kind: str, group: list[Rank], nbytes: int, wires: Wires) -> None:
    """One collective of one group, chunk by chunk; checks that everybody ends with what it should."""
    n = len(group)
    own = [[{i} for _ in range(n)] for i in range(n)]
    everybody = set(range(n))
    if kind == "all_gather":
        held = [[{chunk} if chunk == i else set() for chunk in range(n)] for i in range(n)]
        ring_pass(wires, group, held, nbytes, 0)
        assert all(held[i][chunk] == {chunk} for i in range(n) for chunk in range(n))
    elif kind == "reduce_scatter":
        ring_pass(wires, group, own, nbytes, 0)
        assert all(own[i][(i + 1) % n] == everybody for i in range(n))
    elif kind == "all_reduce":
        ring_pass(wires, group, own, nbytes, 0)
        ring_pass(wires, group, own, nbytes, 1)
        assert all(own[i][chunk] == everybody for i in range(n) for chunk in range(n))
    elif kind == "all_to_all":
        for source, target in itertools.permutations(group, 2):
            wires.send(source, target, nbytes // n)
    elif kind == "broadcast":
        for source, target in itertools.pairwise(group):
            wires.send(source, target, nbytes)


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


Known = tuple[dict[str, int], tuple[str, ...], int]
ANY, POWERS = st.integers(1, 6), st.sampled_from([1, 2, 4])


@st.composite
def clusters(draw: st.DrawFn, sizes: st.SearchStrategy[int] = ANY) -> Known:
    """Degrees, the order of the axes, GPUs of a domain; the cluster is made of whole domains."""
    names = ("tp", "cp", "dp", "pp")
    degrees = {axis: draw(sizes) for axis in names}
    world = math.prod(degrees.values())
    assume(world <= 128)
    domain = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    return degrees, draw(st.permutations(names).map(tuple)), domain


@settings(max_examples=150, deadline=None)
@given(clusters(), st.sampled_from(KINDS), st.sampled_from(["tp", "cp", "dp", "pp"]))
def test_what_is_sent_is_received_and_is_the_formula(cluster: Known, kind: str, axis: str) -> None:
    degrees, order, domain = cluster
    n = degrees[axis]
    wires, nbytes = Wires(domain), 60 * 7 * n
    for group in ranks_of(degrees, order, (axis,)):
        play(kind, group, nbytes, wires)
    world = math.prod(degrees.values())
    assert sum(wires.sent.values()) == sum(wires.received.values()) == world * wire_bytes(kind, nbytes, n)
    assert {wires.sent[rank] for rank in range(world)} == {wire_bytes(kind, nbytes, n)}
    assert {wires.received[rank] for rank in range(world)} == {wire_bytes(kind, nbytes, n)}


@settings(max_examples=300, deadline=None)
@given(st.one_of(clusters(), clusters(POWERS)), st.sampled_from(["tp", "cp", "dp", "pp", "cp dp"]))
def test_a_group_lies_where_its_ranks_lie(cluster: Known, axes: str) -> None:
    degrees, order, domain = cluster
    made, chosen = groups(degrees, order), tuple(axes.split())
    group = made[axes] if len(chosen) == 1 else joined("dp", *sorted((made["cp"], made["dp"]), key=lambda g: g.stride))
    listed = ranks_of(degrees, order, chosen)
    counted = [Counter(rank // domain for rank in ranks) for ranks in listed]
    fewest, most = min(min(each.values()) for each in counted), max(len(each) for each in counted)
    assert group.ranks == len(listed[0])
    # Never better than it is, and exact where sizes divide one another, as powers of two do.
    assert group.members(domain) <= fewest
    assert group.domains(domain) >= most
    if all(size & (size - 1) == 0 for size in (*degrees.values(), domain)):
        assert (group.members(domain), group.domains(domain)) == (fewest, most)
        assert group.link(domain) == ("none" if group.ranks == 1 else "outer" if most > 1 else "inner")
    places = [{frozenset(r % domain for r in ranks if r // domain == node) for node in each}
              for ranks, each in zip(listed, counted, strict=True)]  # fmt: skip
    if group.aligned(domain):
        assert all(len(each) == 1 for each in places), "members have the same places in each domain"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 8, 12])
def test_groups_that_straddle_domains(ranks: int) -> None:
    places = [(s, d) for s in (1, 2, 4, 8, 24) for d in (4, 6, 8, 12, 72) if s % d == 0 or d % s == 0]
    for stride, domain in places:
        # So many groups that they begin everywhere they can.
        listed = ranks_of({"tp": stride, "cp": ranks, "dp": domain, "pp": 1}, ("tp", "cp", "dp", "pp"), ("cp",))
        counted = [Counter(rank // domain for rank in group) for group in listed]
        group = Group("cp", ranks, stride)
        assert group.members(domain) == min(min(each.values()) for each in counted), (stride, domain)
        assert group.domains(domain) == max(len(each) for each in counted), (stride, domain)


@settings(max_examples=150, deadline=None)
@given(clusters(POWERS), st.sampled_from(KINDS), st.sampled_from(["tp", "cp", "dp", "pp"]))
def test_bytes_over_the_adapters_of_a_domain(cluster: Known, kind: str, axis: str) -> None:
    degrees, order, domain = cluster
    n = degrees[axis]
    group = groups(degrees, order)[axis]
    fabric = Fabric(domain=domain, inner_bandwidth=1, outer_bandwidth=1, inner_latency=0, outer_latency=0)
    wires, nbytes = Wires(domain), 64 * 7 * n
    for ranks in ranks_of(degrees, order, (axis,)):
        play(kind, ranks, nbytes, wires)
    world = math.prod(degrees.values())
    for node in range(world // domain):
        assert wires.left[node] == pytest.approx(domain * adapter_bytes(kind, nbytes, group, fabric))


@pytest.mark.parametrize(
    ("dp", "tp", "cp", "ep", "etp", "pp", "order"),
    [
        (8, 2, 2, 4, 1, 2, ("tp", "cp", "ep", "dp", "pp")),
        (4, 4, 1, 4, 2, 2, ("tp", "cp", "ep", "dp", "pp")),
        (8, 2, 1, 2, 1, 2, ("tp", "cp", "ep", "pp", "dp")),
        (6, 2, 1, 3, 2, 1, ("tp", "cp", "ep", "dp", "pp")),
    ],
)
def test_expert_groups_are_the_same_ranks_numbered_anew(
    dp: int, tp: int, cp: int, ep: int, etp: int, pp: int, order: tuple[str, ...]
) -> None:
    layout = Layout(dp=dp, tp=tp, cp=cp, ep=ep, etp=etp, pp=pp, order=order, seq_len=1)
    made = layout_groups(layout)
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": dp, "pp": pp}
    expert = {"tp": etp, "cp": 1, "ep": ep, "dp": layout.expert_dp, "pp": pp}
    assert ranks_of(dense, order, ("pp",)) == ranks_of(expert, order, ("pp",)), "one pipeline for both"
    for name, degrees, axes in (
        ("tp", dense, ("tp",)), ("dp", dense, ("dp",)), ("pp", dense, ("pp",)), ("zero", dense, ("cp", "dp")),
        ("etp", expert, ("tp",)), ("ep", expert, ("ep",)), ("expert_dp", expert, ("dp",)),
    ):  # fmt: skip
        first = ranks_of(degrees, order, axes)[0]
        group: Group = made[name]
        places = sorted(
            sum(step * stride for step, (_, stride) in zip(steps, group.levels, strict=True))
            for steps in itertools.product(*(range(int(n)) for n, _ in group.levels))
        )
        assert places == first, name


def test_replicas_are_the_ranks_of_other_shards() -> None:
    # FSDP2's mesh: replicas, then shards, then cp, then tp.
    made = layout_groups(Layout(dp=6, tp=2, cp=2, replicas=3, seq_len=1))
    axes = {"tp": 2, "cp": 2, "shard": 2, "replicas": 3}
    order = ("tp", "cp", "shard", "replicas")
    for name, chosen in (("zero", ("cp", "shard")), ("replicas", ("replicas",))):
        group = made[name]
        assert ranks_of(axes, order, chosen)[0] == [step * group.stride for step in range(int(group.ranks))]


def test_a_broadcast_leaves_each_rank_but_the_last_once() -> None:
    wires = Wires(4)
    play("broadcast", list(range(8)), 100, wires)
    assert max(wires.sent.values()) == max(wires.received.values()) == wire_bytes("broadcast", 100, 8)
    assert sum(wires.sent.values()) == sum(wires.received.values())
