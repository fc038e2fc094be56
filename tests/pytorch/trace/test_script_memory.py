"""A script that measures its own memory gets the simulated device's, and nothing it says or does is hidden."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from command_line import typed
from loadgauge.pytorch.record.allocations import Stream
from loadgauge.pytorch.trace.programs.script import FunctionJob
from loadgauge.pytorch.trace.trace import BLOCK, record

SCRIPT = """
import json, sys
import torch, torch.nn as nn
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
at_import = torch.ones(1000, device=device)  # lives on

def measures():
    said = []
    def note(what):
        torch.cuda.synchronize()
        now = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        assert now == (torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated(0))
        stats = torch.cuda.memory_stats()
        assert now == (stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"])
        assert torch.cuda.memory.memory_allocated(device) == now[0]
        assert torch.cuda.memory_reserved() >= now[0] and torch.cuda.max_memory_reserved() >= now[1]
        free, total = torch.cuda.mem_get_info()
        assert free == total - torch.cuda.memory_reserved() and total == torch.cuda.get_device_properties(0).total_memory
        said.append((what, *now))
    note("begin")
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(device)
    note("model")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        x = torch.randn(512, 256, device=device)
        assert x.is_cuda and x.device.type == "cuda" and device.type == "cuda"
        loss = model(x).square().mean()
        note("forward")
        loss.backward()
        del loss, x
        note("backward")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        note("step")
    del model, optimizer
    torch.cuda.empty_cache()
    note("end")
    assert torch.cuda.memory_reserved() == 2 * 2**20, torch.cuda.memory_reserved()
    print(json.dumps(said))
    print("to standard error", file=sys.stderr)

def recomputes():
    from torch.utils.checkpoint import checkpoint
    layer = nn.Linear(64, 64).to(device)
    x = torch.randn(8, 64, device=device, requires_grad=True)
    checkpoint(lambda x: layer(x + torch.ones(64, device=device)).relu(), x, use_reentrant=False).sum().backward()
    assert x.grad.device == torch.device("cuda", 0)

def activates():
    import torch.nn.functional as F
    for name in ("silu", "mish", "gelu", "relu", "sigmoid", "tanh", "elu", "leaky_relu", "hardswish", "softplus", "logsigmoid"):
        x = torch.randn(256, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
        y = getattr(F, name)(x)
        gradient = torch.empty_like(y)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y.backward(gradient)
        print(name, torch.cuda.max_memory_allocated() - before)

def scales():
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(8, 64, device="cuda")).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

def forward_only():
    x = torch.randn(2**20, device="cuda", requires_grad=True)
    y = (x.exp() * x.cos()).sum()

def by_grad():
    x = torch.randn(2**20, device="cuda", requires_grad=True)
    torch.autograd.grad((x.exp() * x.cos()).sum(), x)

def on_cpu():
    print("once")
    x = torch.randn(2**20, requires_grad=True)
    (x.exp() * x.cos()).sum().backward()

def nothing():
    return None

def leaves():
    import argparse
    argparse.ArgumentParser().parse_args()
    torch.ones(3).cuda()
    sys.exit(0)
"""
MIB = 2**20


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripts") / "measuring.py"
    path.write_text(SCRIPT)
    return path


def traced(script: Path, name: str) -> tuple[Any, Stream, str]:
    """The trace, the stream of its events and what was printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = record(FunctionJob(None, f"{script}:{name}"), "cuda")
    return found.trace, found.stream, printed.getvalue()


def test_counters_are_those_of_the_trace(script: Path) -> None:
    """The parts are known: weights W, inputs, what GELU and the linears keep, gradients, two states; multiples of 512."""
    trace, stream, printed = traced(script, "measures")
    said = [(what, now, most) for what, now, most in json.loads(printed.splitlines()[0])]
    weights, first = 4 * (2 * 256 * 1024 + 1024 + 256), 4096  # 1,000 numbers of 4 bytes, in blocks of 512
    assert said[0] == ("begin", first, first)
    assert said[1][1] == first + weights
    x, wide = 4 * 512 * 256, 4 * 512 * 1024
    kept = x + wide + wide + x  # input, input of GELU, its result, what is squared
    assert said[2][1] == first + weights + kept + BLOCK  # and the loss
    assert said[3][1] == first + 2 * weights
    states = 2 * weights + 0  # the counts of steps are on the CPU
    assert said[4][1] == said[7][1] == first + weights + states
    assert said[6][1] == first + 2 * weights + states
    assert said[-1][1] == first
    assert max(most for _, _, most in said) == trace.allocated  # the report's own
    levels = stream.levels(BLOCK)
    assert all(now in levels and most in levels for _, now, most in said)


def test_what_a_script_prints_is_shown(script: Path) -> None:
    found = typed(["trace", f"{script}:measures"])
    assert found.code == 0, found.err
    assert found.out.startswith('[["begin", 4096')
    assert "\nPEAK" in found.out
    assert found.err == "to standard error\n"
    document = typed(["trace", f"{script}:measures", "--json"])
    assert json.loads(document.out)["steps"] == 2
    assert '[["begin", 4096' in document.err  # the two streams are one here


def test_the_backward_of_an_activation_is_one_kernel(script: Path) -> None:
    # As on the CPU and on CUDA: nothing is allocated but the gradient of the input.
    printed = traced(script, "activates")[2]
    assert [line.split()[1] for line in printed.splitlines()] == [str(2 * 256 * 512)] * 11


def test_checkpoints_and_scalers(script: Path) -> None:
    """In backward no function mode is on; a scaler asks values whether to step."""
    trace, _, _ = traced(script, "recomputes")
    assert trace.peak.categories["weights"] == 4 * (64 * 64 + 64)
    trace, _, _ = traced(script, "scales")
    assert trace.steps == 2
    assert trace.peak.categories["optimizer states"] == 8 * (64 * 64 + 64)


def test_kept_and_saved_agree(script: Path) -> None:
    trace, _, _ = traced(script, "by_grad")
    assert trace.saved_nbytes == 3 * 4 * MIB  # x, exp(x), cos(x)
    assert trace.phases["backward"] > trace.phases["forward"]
    trace, _, _ = traced(script, "forward_only")
    assert (trace.saved_nbytes, trace.peak.categories["saved activations"]) == (0, 3 * 4 * MIB)
    said = typed(["trace", f"{script}:forward_only"]).out
    assert "saved for a backward that never ran: 0.01 GiB" in said
    assert "no optimizer step was taken" in said


@pytest.mark.long
def test_a_function_on_the_cpu(script: Path) -> None:
    source = script.read_text(encoding="utf-8").replace("at_import =", "# at_import =")
    path = script.with_name("without.py")
    path.write_text(source)
    found = typed(["trace", f"{path}:on_cpu", "--json"])
    assert found.code == 0, found.err
    trace = json.loads(found.out)
    assert trace["device"] == "cpu"
    assert "nothing of this script was on cuda" in trace["assumed"]["device"]
    assert trace["saved_nbytes"] == 3 * 4 * MIB
    assert found.err == "once\n"  # what the second run prints is not shown
    refused = typed(["trace", f"{path}:on_cpu", "--device", "cuda"])
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "nothing ran on the simulated CUDA device" in refused.err
    empty = typed(["trace", f"{path}:nothing"])
    assert (empty.code, empty.err.count("\n")) == (2, 1)
    assert "made no tensor" in empty.err


def test_a_script_that_leaves(script: Path) -> None:
    trace, _, _ = traced(script, "leaves")
    assert trace.events > 0
