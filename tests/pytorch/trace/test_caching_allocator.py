"""The simulated caching allocator: its rules one by one, its books, and the snapshot that PyTorch's viewer reads."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from loadgauge.core.base.errors import NothingFits
from loadgauge.core.base.units import KIB, MIB
from loadgauge.pytorch.record.allocations import Record, Stream
from loadgauge.pytorch.record.caching_allocator import Allocator, Pool, replay
from loadgauge.pytorch.trace.programs.jobs import of_module
from loadgauge.pytorch.trace.trace import record
from loadgauge.pytorch.why.viewer import snapshot, write


def test_small_requests_share_a_segment_of_2_mib() -> None:
    allocator = Allocator()
    allocator.allocate(1, 1)
    allocator.allocate(2, MIB)
    assert (allocator.allocated, allocator.reserved) == (512 + MIB, 2 * MIB)
    allocator.allocate(3, MIB)  # no room behind the first two
    assert allocator.reserved == 4 * MIB


def test_middling_requests_share_a_segment_of_20_mib() -> None:
    allocator = Allocator()
    allocator.allocate(1, MIB + 1)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(2, 10 * MIB)
    assert allocator.reserved == 20 * MIB


def test_large_requests_get_their_own() -> None:
    allocator = Allocator()
    allocator.allocate(1, 33 * MIB + 1)
    assert allocator.reserved == 34 * MIB
    assert allocator.allocated == 34 * MIB  # a rest of 1 MiB less 512 bytes is too small to split off


def test_the_best_fit_serves_and_neighbours_join() -> None:
    allocator = Allocator()
    for storage, size in ((1, 40), (2, 12), (3, 24)):
        allocator.allocate(storage, size * MIB)
    for storage in (1, 2, 3):
        allocator.release(storage)
    allocator.allocate(4, 22 * MIB)  # from the segment of 24, the smallest that fits
    allocator.allocate(5, 40 * MIB)
    allocator.allocate(6, 12 * MIB)
    assert allocator.reserved == 76 * MIB
    for storage in (4, 5, 6):
        allocator.release(storage)
    assert sorted(block.size // MIB for _, _, block in allocator.pools[Pool(0, False)]) == [12, 24, 40]


@pytest.mark.parametrize(("expandable", "reserved"), [(False, sum(range(30, 900, 30))), (True, 880)])
def test_growing_buffers_fragment(expandable: bool, reserved: int) -> None:
    """Each buffer a little larger than the one before it: none fits where the last one was, unless segments grow."""
    allocator = Allocator(expandable=expandable)
    for number in range(1, 30):
        allocator.allocate(number, number * 30 * MIB)
        allocator.release(number)
    result = allocator.result()
    assert result.allocated == 870 * MIB
    assert result.reserved == reserved * MIB
    assert result.idle == pytest.approx(1 - 870 / reserved)


def test_a_block_serves_no_other_stream() -> None:
    """What one stream has freed lies idle while another asks for as much."""
    for expandable in (False, True):
        allocator = Allocator(expandable=expandable)
        allocator.allocate(1, 40 * MIB)
        allocator.release(1)
        allocator.allocate(2, 40 * MIB, stream=1)
        assert allocator.reserved == 80 * MIB
        allocator.allocate(3, 40 * MIB)
        assert allocator.reserved == 80 * MIB


def test_the_limit() -> None:
    allocator = Allocator(limit=100 * MIB)
    allocator.allocate(1, 60 * MIB)
    allocator.release(1)
    allocator.allocate(2, 80 * MIB)  # the cached 60 go back to the driver first
    assert allocator.reserved == 80 * MIB
    assert allocator.retries == 1
    with pytest.raises(NothingFits, match="do not fit") as error:
        allocator.allocate(3, 30 * MIB)
    assert error.value.missing == 10 * MIB


def test_max_split_keeps_large_blocks_whole() -> None:
    allocator = Allocator(max_split=128 * MIB)
    allocator.allocate(1, 200 * MIB)
    allocator.release(1)
    allocator.allocate(2, 50 * MIB)
    assert allocator.reserved == 250 * MIB
    plain = Allocator()
    plain.allocate(1, 200 * MIB)
    plain.release(1)
    plain.allocate(2, 50 * MIB)
    assert plain.reserved == 200 * MIB


requests = st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 30)), min_size=1, max_size=120)


@settings(max_examples=60, deadline=None)
@given(requests, st.booleans(), st.sampled_from([0, 300 * MIB, 800 * MIB]))
def test_its_books(calls: list[tuple[int, int]], expandable: bool, limit: int) -> None:
    """Blocks tile their segments; live bytes are those asked for, rounded; nothing is lost when all is given back."""
    allocator = Allocator(limit, expandable)
    live: dict[int, int] = {}
    for number, (nbytes, victim) in enumerate(calls):
        try:
            allocator.allocate(number, nbytes)
        except NothingFits:
            assert limit
        else:
            live[number] = nbytes
        assert allocator.reserved <= (limit or allocator.reserved)
        if victim in live:
            allocator.release(victim)
            del live[victim]
        assert allocator.requested == sum(live.values())
        assert allocator.allocated >= sum(-(-size // 512) * 512 for size in live.values())
        mapped = 0
        for segment in allocator.segments.values():
            place, block = segment.address, segment.first
            while block is not None:
                assert block.address == place
                place += block.size
                mapped += 0 if block.unmapped else block.size
                assert block.next is None or not (block.free and block.next.free)
                block = block.next
            assert place == segment.address + segment.size
        assert allocator.reserved == mapped
    for number in list(live):
        allocator.release(number)
    assert allocator.allocated == 0
    if not allocator.retries:
        assert sum(len(pool) for pool in allocator.pools.values()) == len(allocator.segments)


def test_pages_of_an_expandable_segment_go_where_they_are_needed() -> None:
    """Every second of 40 buffers is let go: without whole segments to give back nothing larger fits; with pages it does."""
    for expandable in (False, True):
        allocator = Allocator(800 * MIB, expandable)
        allocator.allocate(0, 800 * MIB)
        allocator.release(0)
        for number in range(40):
            allocator.allocate(number, 20 * MIB)
        for number in range(0, 40, 2):
            allocator.release(number)
        if not expandable:
            with pytest.raises(NothingFits):
                allocator.allocate(99, 400 * MIB)
            continue
        allocator.allocate(99, 400 * MIB)
        assert allocator.reserved == allocator.allocated == 800 * MIB
        assert sum(one.action == "segment_unmap" for one in allocator.trace) == 20


def test_a_storage_that_grows_is_moved() -> None:
    stream = Stream()
    stream.records = [Record(0, "x", "", 0, (), "", -1)]
    stream.ids, stream.changes = [0, 0, 0], [KIB, 3 * KIB, -4 * KIB]
    allocator = replay(stream)
    assert allocator.result().requested == 4 * KIB
    assert allocator.allocated == 0


@pytest.mark.long
def test_a_snapshot_that_pytorchs_viewer_reads(tmp_path: Path) -> None:
    found = record(of_module(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3))), torch.empty(64, 512)))
    allocator = replay(found.stream)
    path = tmp_path / "snapshot.pickle"
    write(found.stream, path)
    read = pickle.loads(path.read_bytes())
    assert read == snapshot(found.stream, allocator)
    assert sum(segment["total_size"] for segment in read["segments"]) == allocator.reserved
    live = highest = 0
    for event in read["device_traces"][0]:
        live += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        highest = max(highest, live)
    assert highest == allocator.result().allocated >= found.trace.allocated
    for what in ("stats", "trace_plot"):
        command = [sys.executable, "-m", "torch.cuda._memory_viz", what, str(path)]
        output = ["-o", str(tmp_path / "page.html")] if what == "trace_plot" else []
        done = subprocess.run([*command, *output], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-500:]
