"""Texts of out-of-memory errors, as people have posted them, from PyTorch 1.0 to today."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import typed
from loadgauge.core.base.units import GIB, MIB
from loadgauge.pytorch.why.message import OutOfMemory, parse

NEEDS = "the program's own tensors"
POSTED = {
    # PyTorch 1.0: github.com/pytorch/pytorch/pull/13751
    "1.0": (
        "RuntimeError: CUDA out of memory. Tried to allocate 16.00 GiB (GPU 0; 11.93 GiB total capacity; 4.00 GiB already"
        " allocated; 7.33 GiB free; 179.00 KiB cached)",
        {"tried": 16 * GIB, "capacity": round(11.93 * GIB), "idle": 179 * 1024, "free": round(7.33 * GIB)},
        "one tensor is larger than the GPU",
    ),
    # PyTorch 1.10: github.com/pytorch/pytorch/issues/67971
    "1.10": (
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 6.00 GiB total capacity; 4.88 GiB already"
        " allocated; 0 bytes free; 4.96 GiB reserved in total by PyTorch)",
        {"tried": 2 * MIB, "free": 0, "allocated": round(4.88 * GIB), "idle": round(4.96 * GIB) - round(4.88 * GIB)},
        NEEDS,
    ),
    # PyTorch 2.0: github.com/Gaoyiminggithub/Graphonomy/issues/34
    "2.0": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.41 GiB (GPU 0; 2.00 GiB total capacity;"
        " 330.44 MiB already allocated; 1.23 GiB free; 410.00 MiB reserved in total by PyTorch) If reserved memory is >>"
        " allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management"
        " and PYTORCH_CUDA_ALLOC_CONF",
        {"tried": round(1.41 * GIB), "idle": 410 * MIB - round(330.44 * MIB), "process": None},
        NEEDS,
    ),
    # PyTorch 2.1 in a container, in its spelling: github.com/FoundationVision/GenerateU/issues/10
    "2.1": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total capacty of"
        " 14.75 GiB of which 235.06 MiB is free. Process 20398 has 14.52 GiB memory in use. Of the allocated memory 14.06"
        " GiB is allocated by PyTorch, and 330.42 MiB is reserved by PyTorch but unallocated. If reserved but unallocated"
        " memory is large try setting max_split_size_mb to avoid fragmentation.",
        {"capacity": round(14.75 * GIB), "process": round(14.52 * GIB), "others": 0, "own": 20398},
        NEEDS,
    ),
    # PyTorch 2.1, not in a container: github.com/kerrj/lerf/issues/73
    "2.1 itself": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacty of 23.65"
        " GiB of which 1.66 GiB is free. Including non-PyTorch memory, this process has 20.81 GiB memory in use. Of the"
        " allocated memory 12.09 GiB is allocated by PyTorch, and 4.84 GiB is reserved by PyTorch but unallocated.",
        {"process": round(20.81 * GIB), "own": None, "idle": round(4.84 * GIB)},
        "fragmentation",
    ),
    # PyTorch 2.1 without NVML: github.com/wxian3/NeuroLens/issues/2
    "2.1 without processes": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 55.57 GiB. GPU 0 has a total capacty of 12.00"
        " GiB of which 9.02 GiB is free. Of the allocated memory 984.52 MiB is allocated by PyTorch, and 463.48 MiB is"
        " reserved by PyTorch but unallocated.",
        {"tried": round(55.57 * GIB), "process": None, "beside": None},
        "one tensor is larger than the GPU",
    ),
    # PyTorch 2.5 and later: github.com/murong-xu/CADS/issues/4
    "2.5": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.47 GiB"
        " of which 12.73 GiB is free. Including non-PyTorch memory, this process has 18.73 GiB memory in use. Of the"
        " allocated memory 9.08 GiB is allocated by PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated. If"
        " reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid"
        " fragmentation.  See documentation for Memory Management "
        " (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)",
        {"capacity": round(31.47 * GIB), "free": round(12.73 * GIB), "allocated": round(9.08 * GIB)},
        NEEDS,
    ),
    # The wording of github.com/pytorch/pytorch/pull/124673, and that of set_per_process_memory_fraction.
    "private pools": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of"
        " which 0.50 GiB is free. Including non-PyTorch memory, this process has 78.50 GiB memory in use. Of the allocated"
        " memory 77.00 GiB is allocated by PyTorch, with 20.00 GiB allocated in private pools (e.g., CUDA Graphs), and"
        " 1.00 GiB is reserved by PyTorch but unallocated.",
        {"allocated": 77 * GIB, "pools": 20 * GIB, "idle": GIB},
        "private pools of CUDA graphs",
    ),
    "allowed": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of"
        " which 40.00 GiB is free. 38.00 GiB allowed; Of the allocated memory 37.00 GiB is allocated by PyTorch, and 1.00"
        " MiB is reserved by PyTorch but unallocated.",
        {"allowed": 38 * GIB, "allocated": 37 * GIB},
        "the limit that the program has set itself",
    ),
    # ROCm: the same text under another name.
    "ROCm": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.98 GiB of"
        " which 1.20 GiB is free. Of the allocated memory 22.00 GiB is allocated by PyTorch, and 0.30 GiB is reserved by"
        " PyTorch but unallocated.",
        {"capacity": round(23.98 * GIB), "allocated": 22 * GIB, "stated": ""},
        NEEDS,
    ),
    # The wordings of aten/src/ATen/mps/MPSAllocator.mm, PyTorch 1.13 and 2.13.
    "MPS, first": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 8.60 GB, other allocations: 384.00 KB, max allowed: 9.07 GB)."
        " Tried to allocate 512.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for"
        " memory allocations (may cause system failure).",
        {"tried": 512 * MIB, "allocated": round(8.6 * GIB), "capacity": round(9.07 * GIB), "idle": None},
        NEEDS,
    ),
    "MPS": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 17.50 GiB, other allocations: 2.00 MiB, max allowed: 18.13"
        " GiB). Tried to allocate 1.00 GiB on private pool.",
        {"tried": GIB, "allocated": round(17.5 * GIB), "capacity": round(18.13 * GIB)},
        NEEDS,
    ),
    # c10/core/impl/alloc_cpu.cpp: DeepSpeed's and FSDP's offloading, and weights on their way.
    "the host": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
        " allocate 26843545600 bytes. Error code 12 (Cannot allocate memory)",
        {"tried": 25 * GIB, "capacity": None, "free": None},
        "the host's memory",
    ),
}


@pytest.mark.parametrize("version", POSTED)
def test_every_wording(version: str) -> None:
    text, figures, cause = POSTED[version]
    found = parse(text)
    assert {name: getattr(found, name) for name in figures} == figures
    assert found.cause == cause
    assert parse("some log\n" + text.replace(". ", ".\n  ")) == found


def listed(*sizes: float, allocated: float) -> OutOfMemory:
    lines = "".join(f"Process {number} has {size} GiB memory in use. " for number, size in enumerate(sizes, 1))
    return parse(
        f"Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is free. {lines}Of the"
        f" allocated memory {allocated} GiB is allocated by PyTorch, and 0.50 GiB is reserved by PyTorch but unallocated."
    )


def test_which_of_the_processes_is_this_one() -> None:
    """Only where no room is left for it beside the ones that are listed; what the others hold is then right."""
    assert (listed(78.0, allocated=77.0).own, listed(78.0, allocated=77.0).others) == (1, 0)
    both = listed(40.0, 38.5, allocated=37.5)
    assert (both.own, both.others, both.cause) == (2, 40 * GIB, "other processes")
    hidden = listed(40.0, allocated=37.5)  # this one is not listed, and there is room for it
    assert (hidden.own, hidden.others) == (None, 40 * GIB)


def test_what_a_person_reads(tmp_path: Path) -> None:
    path = tmp_path / "error.txt"
    path.write_text(POSTED["2.1"][0])
    said = typed(["why", str(path)]).out
    assert "process 20398 is this one" in said
    assert said.startswith("CAUSE  the program's own tensors: 14.06 GiB of 14.75 GiB, and 0.48 GiB more")
    assert said.index("loadgauge trace") < said.index("expandable_segments")  # 2 % lie idle: not the first advice
    path.write_text(POSTED["1.0"][0])
    assert "16.00 GiB   tried to allocate" in typed(["why", str(path)]).out
