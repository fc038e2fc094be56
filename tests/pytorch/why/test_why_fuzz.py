"""Whatever `why` is given, it answers or refuses in one line: no defect, no negative bytes, no code run, no memory eaten."""

from __future__ import annotations

import json
import os
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from command_line import typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.why.files import content_of
from loadgauge.pytorch.why.message import parse
from loadgauge.pytorch.why.pickles import check, plain
from loadgauge.pytorch.why.snapshot import load

TEXT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of"
    " which 512.00 MiB is free. Process 4711 has 1.25 GiB memory in use. Including non-PyTorch memory, this process has"
    " 77.25 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 7.00 GiB is reserved by"
    " PyTorch but unallocated."
)
ODD = ["-1", "0", "1e400", "9" * 400, "17179869184.00", "nan", "inf", "1.2.3", ".", "80.00", "0.00", "5e9"]


def frame(name: str) -> dict[str, Any]:
    return {"name": name, "filename": "train.py", "line": 3}


def content() -> dict[str, Any]:
    blocks = [
        {"address": 0, "size": 4096, "requested_size": 4000, "state": "active_allocated", "frames": [frame("forward")]},
        {"address": 4096, "size": 1024, "requested_size": 1024, "state": "inactive", "frames": []},
    ]
    segment = {"device": 0, "address": 0, "total_size": 5120, "blocks": blocks, "stream": 0, "segment_type": "small"}
    events = [
        {"action": "alloc", "addr": 0, "size": 4096, "stream": 0, "frames": [frame("forward"), frame("softmax")]},
        {"action": "alloc", "addr": 4096, "size": 1024, "stream": 0, "frames": [frame("run_backward")]},
        {"action": "free_completed", "addr": 4096, "size": 1024, "stream": 0, "frames": []},
        {"action": "oom", "addr": 0, "size": 9000, "stream": 0, "frames": [], "device_free": 100},
    ]
    return {"segments": [segment], "device_traces": [events], "allocator_settings": {}}


class Runs:
    """Makes a file when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def changed(value: Any, dice: random.Random, mark: Path) -> Any:
    """A structure with one value somewhere exchanged."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(list(value))
        return {**value, key: changed(value[key], dice, mark)}
    if isinstance(value, list) and value and dice.random() < 0.9:
        place = dice.randrange(len(value))
        return [*value[:place], changed(value[place], dice, mark), *value[place + 1 :]]
    odd = [
        -1,
        -(2**70),
        2**70,
        float("inf"),
        float("nan"),
        None,
        "",
        "active",
        [],
        {},
        True,
        b"x",
        Runs(mark),
        (1, 2),
        1e308,
    ]
    return dice.choice(odd)


def negative(document: Any) -> list[int]:
    """Numbers below zero, wherever they are, but for the cause's `device`."""
    if isinstance(document, dict):
        return [found for value in document.values() for found in negative(value)]
    if isinstance(document, list):
        return [found for value in document for found in negative(value)]
    return [document] if isinstance(document, int | float) and document < 0 else []


def answered(path: Path) -> None:
    """One answer in JSON without negative bytes, or one line and exit code 2, which names no defect."""
    found = typed(["why", str(path), "--json"])
    if found.code == 0:
        assert not negative(json.loads(found.out)), found.out
    else:
        assert found.code == 2
        assert found.err.count("\n") == 1, found.err
        assert "defect" not in found.err, found.err


def test_changed_snapshots(tmp_path: Path) -> None:
    dice, mark, path = random.Random(7), tmp_path / "ran", tmp_path / "x.pickle"
    for number in range(250):
        data = bytearray(pickle.dumps(changed(content(), dice, mark), dice.randrange(2, 6)))
        if number % 2:
            for _ in range(dice.randrange(1, 4)):
                data[dice.randrange(1, len(data))] = dice.choice(
                    [*b"rqp.(]}uR\x94\x95\x8d\x8e\x96cbio", dice.randrange(256)]
                )
        path.write_bytes(data)
        answered(path)
    assert not mark.exists()


def test_changed_errors(tmp_path: Path) -> None:
    dice, path = random.Random(8), tmp_path / "x.txt"
    words = TEXT.split(" ")
    numbers = [place for place, word in enumerate(words) if word[:1].isdigit()]
    for _ in range(250):
        new = list(words)
        for place in dice.sample(numbers, dice.randrange(1, 4)):
            new[place] = dice.choice(ODD)
        if dice.random() < 0.3:
            del new[dice.randrange(len(new))]
        path.write_text(" ".join(new))
        answered(path)


HUNGRY = [
    (b"\x80\x02Nr\xff\xff\xff\x1f.", "of its memo"),  # LONG_BINPUT
    (b"\x80\x02Np536870911\n.", "of its memo"),  # PUT
    (b"\x80\x04\x8d\xff\xff\xff\xff\x0f\x00\x00\x00.", "are left"),  # BINUNICODE8
    (b"\x80\x04\x8e\xff\xff\xff\xff\x0f\x00\x00\x00.", "are left"),  # BINBYTES8
    (b"\x80\x05\x96\xff\xff\xff\xff\x00\x00\x00\x00.", "are left"),  # BYTEARRAY8
    (b"\x80\x04\x95\xff\xff\xff\xff\x0f\x00\x00\x00.", "are left"),  # FRAME
    (b"\x80\x02X\xff\xff\xff\x7f.", "are left"), (b"\x80\x02\x8b\xff\xff\xff\x7f.", "are left"),  # BINUNICODE, LONG4
    (b"\x80\x02\xff.", "is no opcode"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "says"), HUNGRY)
def test_a_pickle_that_asks_for_memory(data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=says):
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", range(6))
def test_ordinary_pickles_pass(protocol: int) -> None:
    value = {"segments": [content(), "ä" * 300, "x" * 70_000, 2**70, -1, 1.5, None, True, (1, 2), list(range(3000))]}
    value["again"] = value["segments"]
    assert plain(pickle.dumps(value, protocol)) == value
    check(pickle.dumps(value, protocol))


@pytest.mark.parametrize(
    ("key", "value"), [("size", -3), ("size", float("inf")), ("size", 2**60), ("size", "4096"), ("size", 5000)]
)
def test_sizes_that_cannot_be(key: str, value: Any, tmp_path: Path) -> None:
    wrong = content()
    wrong["segments"][0]["blocks"][0][key] = value
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps(wrong))
    found = typed(["why", str(path)])
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert "bytes" in found.err


def test_devices_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps(content()))
    assert typed(["why", str(path)]).code == 0
    assert "knows no device 3; those it knows: 0" in typed(["why", str(path), "--gpu-index", "3"]).err
    assert typed(["why", str(path), "--gpu-index", "-1"]).code == 2


def test_figures_that_contradict_each_other() -> None:
    found = parse(TEXT.replace("77.25", "10.00"))
    assert found.beside is None
    assert found.contradictions == ("this process has 10.00 GiB in use, and PyTorch in it 77.00 GiB",)
    assert parse(TEXT).contradictions == ()
    # What Windows' subsystem for Linux says: 2^64 bytes.
    wsl = parse(TEXT.replace("1.25", "17179869184.00").replace("77.25", "17179869184.00"))
    assert (wsl.process, wsl.others, wsl.beside) == (None, 0, None)
    assert len(wsl.contradictions) == 2
    for number in ("9" * 400, "1e400"):
        with pytest.raises(ConfigError, match=r"is no number of GiB|cannot be read"):
            parse(TEXT.replace("2.00 GiB", f"{number} GiB", 1))


def test_only_regular_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/zero")):
        found = typed(["why", str(path)])
        assert (found.code, found.err.count("\n")) == (2, 1)
        assert "is not a regular file" in found.err
    (tmp_path / "long").write_bytes(b"x" * 11)
    with pytest.raises(ConfigError, match="is larger than"):
        content_of(tmp_path / "long", 10)


def test_a_document_does_not_decide_what_runs(tmp_path: Path) -> None:
    """A trace names its target; `why` traces a model again with other flags, but never a script."""
    from loadgauge.pytorch.trace.programs.jobs import of_module
    from loadgauge.pytorch.trace.trace import trace
    from loadgauge.pytorch.why.remedies import retrace
    from torch_runs import torch_run

    torch = pytest.importorskip("torch")
    import msgspec

    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\ndef main(): ...\n")
    found = trace(of_module(torch.nn.Linear(8, 8), torch.empty(2, 8)))
    forged = msgspec.structs.replace(
        found, target=f"{tmp_path}/evil.py:main", assumed={"settings": torch_run().flags(2)}
    )
    assert retrace(forged) == ()
    assert not (tmp_path / "ran").exists()
