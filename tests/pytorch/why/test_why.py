"""Why memory ran out: texts of errors, snapshots, and snapshots that are none."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import typed
from loadgauge.core.base.errors import ConfigError, NothingFits
from loadgauge.core.base.units import GIB, MIB
from loadgauge.pytorch.record.caching_allocator import Allocator, replay
from loadgauge.pytorch.trace.programs.jobs import of_module
from loadgauge.pytorch.trace.trace import record
from loadgauge.pytorch.why.diagnose import of_file
from loadgauge.pytorch.why.message import parse
from loadgauge.pytorch.why.snapshot import BEFORE, summary
from loadgauge.pytorch.why.viewer import snapshot, write

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 79.15 GiB of"
    " which {free} is free. {others}Including non-PyTorch memory, this process has {process} memory in use. Of the"
    " allocated memory {allocated} is allocated by PyTorch, and {idle} is reserved by PyTorch but unallocated. If reserved"
    " but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.79 GiB total capacity; 5.20 GiB already"
    " allocated; 12.31 MiB free; 5.60 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try"
    " setting max_split_size_mb to avoid fragmentation."
)


def new(**keys: str) -> str:
    values = {
        "tried": "2.00 GiB", "free": "512.00 MiB", "process": "78.50 GiB", "allocated": "77.00 GiB", "idle": "1.00 GiB",
        "others": "",
    }  # fmt: skip
    return NEW.format(**{**values, **keys})


def test_numbers_of_an_error() -> None:
    found = parse(new())
    assert (found.tried, found.free) == (2 * GIB, 512 * MIB)
    assert found.capacity == round(79.15 * GIB)
    assert (found.allocated, found.idle, found.beside) == (77 * GIB, GIB, GIB // 2)
    old = parse(OLD)
    assert (old.tried, old.capacity, old.allocated) == (20 * MIB, round(7.79 * GIB), round(5.2 * GIB))
    assert old.idle == round(5.6 * GIB) - round(5.2 * GIB)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (new(), "the program's own tensors"),
        (new(idle="1.75 GiB", allocated="76.25 GiB"), "the program's own tensors"),
        (new(idle="7.75 GiB", allocated="70.25 GiB"), "fragmentation"),
        (new(others="Process 4711 has 40.25 GiB memory in use. ", allocated="37.00 GiB"), "other processes"),
        (new(allocated="60.00 GiB"), "memory beside the allocator"),
        (OLD, "fragmentation"),
    ],
)
def test_cause_of_an_error(text: str, cause: str, tmp_path: Path) -> None:
    assert parse(text).cause == cause
    path = tmp_path / "error.txt"
    wrapped = text.replace(". ", ".\n")
    path.write_text(f"Traceback (most recent call last):\n  ...\n{wrapped}\n[rank1]: {new()}")
    found = typed(["why", str(path)])
    assert found.code == 0, found.err
    assert found.out.startswith(f"CAUSE  {cause}")
    assert json.loads(typed(["why", str(path), "--json"]).out)["cause"] == cause


# -- snapshots ---------------------------------------------------------------------------------------------------------


def event(action: str, address: int, size: int, name: str = "") -> dict[str, Any]:
    frames = [
        {"name": "empty", "filename": "/x/site-packages/torch/_refs.py", "line": 7},
        {"name": name, "filename": "train.py", "line": 3},
    ]
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames if name else []}


def content(events: list[dict[str, Any]], blocks: list[dict[str, Any]], size: int = 100) -> dict[str, Any]:
    segment = {"device": 0, "address": 0, "total_size": size, "blocks": blocks}
    return {"segments": [segment], "device_traces": [events]}


def block(address: int, size: int, live: bool = True) -> dict[str, Any]:
    return {"address": address, "size": size, "state": "active_allocated" if live else "inactive", "frames": []}


def test_the_peak_counts_what_was_there_before() -> None:
    events = [
        event("alloc", 10, 5, "a"), event("free_completed", 50, 20), event("alloc", 15, 7, "b"), event("alloc", 30, 9, "a"),
        event("free_completed", 30, 9), event("oom", 0, 40),
    ]  # fmt: skip
    blocks = [block(0, 10), block(10, 5), block(15, 7), block(22, 78, live=False)]
    found = summary(content(events, blocks))
    # 10 at the end and 20 freed without having been allocated were there before; then 5, later 5 + 7 + 9.
    assert found.peak == 35
    assert {one.where: one.nbytes for one in found.holders} == {BEFORE: 30, "a (train.py:3)": 5}
    assert (found.allocated, found.reserved, found.idle, found.largest_idle) == (22, 100, 78, 78)
    assert (found.failed, found.events) == (40, 6)
    later = summary(content([*events[:2], event("alloc", 60, 30, "late"), *events[2:]], [*blocks[:3], block(60, 30)]))
    assert later.peak == 10 + 5 + 30 + 7 + 9
    assert later.holders[0].where == "late (train.py:3)"


def test_a_program_in_a_folder_named_torch_is_the_programs_own() -> None:
    allocated = event("alloc", 0, 5, "a")
    own = {"name": "train", "filename": "/home/user/torch/train.py", "line": 3}
    for filename in (
        "/v/lib/python3.11/site-packages/torch/functional.py", "/opt/pytorch/torch/serialization.py", "torch/csrc/x.cpp",
        "C:\\v\\torch\\nn\\functional.py", "/build/torch/_tensor.py", "??",
    ):  # fmt: skip
        allocated["frames"] = [{"name": "inner", "filename": filename, "line": 1}, own]
        found = summary(content([allocated], [block(0, 5)]))
        assert [one.where for one in found.holders] == ["train (/home/user/torch/train.py:3)"], filename


def test_a_trace_written_and_read_again(tmp_path: Path) -> None:
    found = record(of_module(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3))), torch.empty(64, 512)))
    path = tmp_path / "snapshot.pickle"
    write(found.stream, path)
    allocator = replay(found.stream)
    read_again = of_file(path)[0]
    assert read_again.peak == allocator.result().allocated
    assert sum(one.nbytes for one in read_again.holders) == read_again.peak
    assert read_again.reserved == allocator.reserved
    assert read_again.idle == allocator.reserved - allocator.allocated
    said = typed(["why", str(path)])
    assert said.out.startswith("CAUSE")
    assert "\nPEAK" in said.out
    assert json.loads(typed(["why", str(path), "--json"]).out)["peak"] == read_again.peak


@pytest.mark.parametrize(("released", "first"), [(range(0, 40, 2), True), ((0, 20), False)])
def test_fragmentation_is_seen(released: Sequence[int], first: bool, tmp_path: Path) -> None:
    """Every second buffer is let go, and then none as large as two of them fits; where 5 % are, that is as in any training."""
    big = Allocator(limit=800 * MIB)
    big.allocate(0, 800 * MIB)
    big.release(0)
    for number in range(40):
        big.allocate(number, 20 * MIB)
    for number in released:
        big.release(number)
    with pytest.raises(NothingFits):
        big.allocate(99, 40 * MIB)
    from loadgauge.pytorch.record.allocations import Record, Stream

    stream = Stream()
    stream.records = [Record(20 * MIB, "aten::empty", "", 0, (1,), "", -1) for _ in range(100)]
    path = tmp_path / "fragmented.pickle"
    path.write_bytes(pickle.dumps(snapshot(stream, big)))
    found = of_file(path)[0]
    assert (found.failed, found.idle, found.largest_idle) == (40 * MIB, len(released) * 20 * MIB, 20 * MIB)
    said = typed(["why", str(path)]).out
    assert said.startswith("CAUSE  fragmentation") == first
    assert ("expandable_segments" in said) == first


# -- what is no snapshot -----------------------------------------------------------------------------------------------


class Hostile:
    """Runs a command when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


class Builtin:
    def __reduce__(self) -> Any:
        return eval, ("1 + 1",)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    mark, path = tmp_path / "ran", tmp_path / "hostile.pickle"
    for hostile in (Hostile(mark), {"segments": [Hostile(mark)]}, {"segments": [], "x": Builtin()}):
        path.write_bytes(pickle.dumps(hostile, protocol))
        with pytest.raises(ConfigError, match="is no allocator snapshot: it asks for"):
            of_file(path)
        said = typed(["why", str(path)])
        assert said.code == 2
        assert said.err.count("\n") == 1
    assert not mark.exists()
    # It is the real thing: an ordinary reader would have run it.
    pickle.loads(pickle.dumps(Hostile(mark), protocol))
    assert mark.exists()


@pytest.mark.parametrize(
    "bytes_of",
    [
        b"\x80", b"\x80\x04", b"\x80\x04.", pickle.dumps(3), pickle.dumps({"segments": 3}), pickle.dumps({}),
        pickle.dumps({"segments": [{}]}), pickle.dumps({"segments": [{"device": 0, "blocks": [7], "address": 0}]}),
        pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc"}]]}), b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    ],
)  # fmt: skip
def test_broken_files_are_one_line(bytes_of: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.pickle"
    path.write_bytes(bytes_of)
    with pytest.raises(ConfigError, match="is no allocator snapshot"):
        of_file(path)
    assert typed(["why", str(path)]).err.count("\n") == 1


def test_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.txt"
    path.write_text("nothing here")
    assert "no out-of-memory error" in typed(["why", str(path)]).err
    assert typed(["why", str(tmp_path / "missing")]).code == 2
    monkeypatch.setattr("sys.stdin", io.StringIO(new()))
    assert typed("why -").out.startswith("CAUSE")
