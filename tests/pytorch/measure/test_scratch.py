"""What a kernel takes and gives back inside one operation is not the program's memory, on whatever CPU it runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from loadgauge.pytorch.measure.cpu_allocator import Event, events, is_kernel, live, mark_scratch, profiler, tensors
from loadgauge.pytorch.measure.profile import measured

MIB = 2**20


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("aten::mm", True), ("aten::_to_copy", True), ("aten::sum", True), ("aten::convolution", True),
        ("aten::linear", False), ("aten::to", False), ("aten::matmul", False), ("aten::scaled_dot_product_attention", False),
        ("MmBackward0", False), ("torch::autograd::AccumulateGrad", False), ("nowhere::op", False),
    ],
)  # fmt: skip
def test_which_operations_are_one_kernel(name: str, kernel: bool) -> None:
    """As a dispatch mode sees them: composed operations are seen as their parts."""
    assert is_kernel(name) == kernel


def test_scratch_is_given_back_before_the_kernel_ends() -> None:
    stream = [
        Event(1, 10, 8, "aten::mm", "", 5),  # the result, released later
        Event(2, 20, 64, "aten::mm", "", 5),
        Event(4, 20, -64, "aten::mm", "", 5),
        Event(6, 20, 3, "aten::add", "", 7),  # the same address again
        Event(8, 20, -3, "", ""),
        Event(8, 10, -8, "", ""),
        Event(9, 30, 16, "", ""),  # outside any kernel
        Event(9, 30, -16, "", ""),
    ]
    assert [one.scratch for one in mark_scratch(stream)] == [False, True, True, *[False] * 5]
    assert live(mark_scratch(stream)).peak == 72
    assert live(tensors(mark_scratch(stream))).peak == 16


@pytest.fixture
def thirsty() -> torch.library.Library:
    """An operation with a kernel that takes 8 MiB of scratch."""
    library = torch.library.Library("loadgauge_scratch", "FRAGMENT")
    if not hasattr(torch.ops.loadgauge_scratch, "thirsty"):
        library.define("thirsty(Tensor x) -> Tensor")
        library.impl("thirsty", lambda x: torch.empty(8 * MIB, dtype=torch.uint8)[: x.numel()] * x, "CPU")
    return library


def test_a_kernel_with_scratch(thirsty: torch.library.Library) -> None:
    x = torch.ones(MIB, dtype=torch.uint8)
    with profiler() as running:
        kept = torch.ops.loadgauge_scratch.thirsty(x)
    stream = events(running)
    assert live(stream).peak == 9 * MIB
    assert live(tensors(stream)).peak == live(tensors(stream)).end == kept.nbytes == MIB
    with measured("cpu") as block:
        torch.ops.loadgauge_scratch.thirsty(x)
    assert (block.usage.peak, block.usage.scratch) == (MIB, 8 * MIB)


LINEAR = """
import torch
from loadgauge.pytorch.measure.profile import measured
x, w = (torch.ones(n, 512, dtype=torch.bfloat16, requires_grad=True) for n in (256, 4096))
with measured("cpu") as forward:
    y = torch.nn.functional.linear(x, w)
gradient = torch.ones_like(y)
with measured("cpu") as backward:
    y.backward(gradient)
print(forward.usage.peak, backward.usage.peak)
"""


@pytest.mark.long
def test_bfloat16_without_bfloat16_instructions() -> None:
    """oneDNN multiplies in float32 then, with copies: the model's memory is the same. (Where the CPU has less than
    AVX-512, the variable changes nothing.)"""
    done = subprocess.run(
        [sys.executable, "-c", LINEAR], env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    forward, backward = map(int, done.stdout.split())
    assert forward == 2 * 256 * 4096
    assert backward == 2 * 512 * (256 + 4096)
