"""Steps that really run: memory by module and phase, FLOPs and time, against what is known of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.measure.benchmarks import FlopCounter
from loadgauge.pytorch.measure.cpu_allocator import Event, ModuleUse, Range, live, uses
from loadgauge.pytorch.measure.train_steps import Held, MeasuredSteps, measure_steps
from loadgauge.pytorch.trace.programs.jobs import ConfigJob
from loadgauge.pytorch.trace.programs.script import FunctionJob
from loadgauge.pytorch.trace.trace import trace
from torch_models import build
from torch_runs import torch_run

H, TOKENS = 256, 32


class Net(nn.Module):
    """A matrix, a function that keeps nothing of its own, a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(H, 4 * H), nn.ReLU(), nn.Linear(4 * H, H)

    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.up(x)))


def job(accumulate: int = 1) -> FunctionJob:
    def run() -> Any:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9, foreach=False)
        x = torch.ones(TOKENS, H)

        def step() -> None:
            for _ in range(accumulate):
                net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return FunctionJob(run, "job")


@pytest.fixture(scope="module")
def taken() -> MeasuredSteps:
    return measure_steps(job())


WEIGHTS = 4 * (2 * 4 * H * H + 5 * H)


def test_states_and_modules(taken: MeasuredSteps) -> None:
    assert taken.states == dict.fromkeys(("weights", "gradients", "optimizer states"), WEIGHTS)
    wide, narrow = 4 * TOKENS * 4 * H, 4 * TOKENS * H
    assert taken.modules["up"] == taken.modules["act"] == ModuleUse(wide, wide)
    assert taken.modules["down"] == ModuleUse(narrow, narrow)
    # The output of `up` is not kept: its function keeps its own result.
    assert taken.modules["Net"] == ModuleUse(2 * wide, wide + narrow)


def test_peaks(taken: MeasuredSteps) -> None:
    """At the step: weights, gradients, momenta and the input. In backward of the last matrix: its gradients as well."""
    x, wide = 4 * TOKENS * H, 4 * TOKENS * 4 * H
    assert taken.step_peak == pytest.approx(3 * WEIGHTS + x, abs=64)  # and a number or two
    assert taken.backward_peak == pytest.approx(3 * WEIGHTS + x + wide, abs=wide + 4096)
    assert taken.peak == max(taken.step_peak, taken.backward_peak)
    traced = trace(job(), "cpu")
    assert taken.peak == pytest.approx(traced.peak.total, abs=64)
    assert sum(one.nbytes for one in taken.held) <= taken.peak
    assert Held("aten::linear", "up", wide) in taken.held or any(one.nbytes == wide for one in taken.held)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_flops_and_time(accumulate: int) -> None:
    found = measure_steps(job(accumulate), timed=2)
    want = accumulate * (2 * 3 - 1) * 2 * TOKENS * 4 * H * H  # the input needs no gradient
    assert found.flops == found.model_flops == want
    assert len(found.seconds) == 2
    assert found.step is not None
    assert min(found.seconds) <= found.step <= max(found.seconds)
    assert found.flops_per_second == pytest.approx(want / found.step)
    assert found.mfu(want / found.step * 4) == pytest.approx(0.25)


def test_model_flops_are_those_without_recomputation() -> None:
    built = build("llama-gqa", "eager", torch.float32)
    ids = built.ids(32, 2)
    counts = {}
    for checkpointed in (False, True):
        if checkpointed:
            built.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with FlopCounter() as counts[checkpointed]:
            built.model(ids, labels=ids).loss.backward()
    plain, again = counts[False], counts[True]
    assert plain.hardware == plain.model == again.model
    down = 2 * ids.numel() * built.config.hidden_size * built.config.intermediate_size
    layers = built.config.num_hidden_layers
    forward = plain.model / 3 - 2 * ids.numel() * built.config.hidden_size * built.config.vocab_size
    assert again.hardware - again.model == forward - layers * down  # the last matrix is not computed again


def test_model_flops_of_fused_attention() -> None:
    """Forward has two products, backward four, and one more to make the scores again."""
    q, k, v = (torch.ones(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    with FlopCounter() as counter:
        torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
    product = 2 * 2 * 16 * 16 * 8
    assert (counter.model, counter.hardware) == (6 * product, 7 * product)


def test_a_config() -> None:
    built = build("llama-gqa", "sdpa", torch.float32, hidden_size=256, intermediate_size=704)
    built.config.architectures = ["LlamaForCausalLM"]
    settings = torch_run(seq_len=32, precision="fp32", optimizer="adamw-fused")
    found = measure_steps(ConfigJob(built.config, settings), timed=0)
    assert found.peak == pytest.approx(trace(ConfigJob(built.config, settings), "cpu").peak.total, rel=1e-3)
    assert found.step is None
    assert found.flops_per_second is None
    assert {"model.layers.0.mlp", "lm_head"} <= set(found.modules)


def test_stretches_of_a_stream() -> None:
    def event(time: int, address: int, change: int) -> Event:
        return Event(time, address, change, "", "")

    stream = [event(1, 1, 10), event(2, 2, 7), event(3, 2, -7), event(4, 3, 2), event(6, 1, -10), event(7, 4, 1)]
    assert uses(stream, [Range("a", 2, 4), Range("a", 4, 4), Range("b", 5, 9)]) == {"a": ModuleUse(7, 2), "b": ModuleUse(0, -9)}
    # What is there at the beginning of a stretch counts.
    assert [live(stream, since, until).peak for since, until in ((0, 9), (3, 9), (7, 9))] == [17, 17, 3]


def test_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "def main():\n"
        "    net = torch.nn.Linear(64, 64)\n"
        "    optimizer = torch.optim.SGD(net.parameters())\n"
        "    def step():\n"
        "        net(torch.ones(8, 64)).sum().backward()\n"
        "        optimizer.step(); optimizer.zero_grad()\n"
        "    return step\n"
    )
    found = json.loads(typed(["measure", f"{script}:main", "--steps", "2", "--gpu", "h100-sxm5-80gb", "--json"]).out)
    assert found["flops"] == 2 * 2 * 8 * 64 * 64
    assert found["states"]["weights"] == 4 * (64 * 64 + 64)
    assert found["mfu"] == pytest.approx(found["model_flops"] / found["step"] / 989e12, rel=1e-2)


def test_errors() -> None:
    with pytest.raises(ConfigError, match="not on tpu"):
        measure_steps(job(), "tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA"):
            measure_steps(job(), "cuda")
        assert "no CUDA device here" in typed("measure gpt2 --device cuda").err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda() -> None:
    built = build("llama-gqa", "sdpa", torch.bfloat16, hidden_size=512, intermediate_size=1408)
    built.config.architectures = ["LlamaForCausalLM"]
    settings = torch_run(seq_len=512, optimizer="adamw-fused")
    found = measure_steps(ConfigJob(built.config, settings), "cuda")
    traced = trace(ConfigJob(built.config, settings), "cuda")
    beside = sum(one.nbytes for one in traced.hidden if one.where == "allocated")
    assert traced.allocated * 0.99 <= found.peak <= (traced.allocated + beside) * 1.01
