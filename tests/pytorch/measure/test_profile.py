"""Memory of blocks that really run, where the answer is known."""

from __future__ import annotations

import pytest
import torch

from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.measure.cpu_allocator import Event, live
from loadgauge.pytorch.measure.profile import measure, measured, profiled
from loadgauge.pytorch.trace.programs.call import trace_call
from torch_models import build

UNIT = 4096


def block_of(count: int) -> torch.Tensor:
    """Allocates `count` pieces at once and leaves one."""
    pieces = [torch.empty(UNIT // 4) for _ in range(count)]
    return pieces[0]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_peak_and_what_is_left(count: int) -> None:
    with measured("cpu") as block:
        kept = block_of(count)
    usage = block.usage
    assert (usage.persistent, usage.peak) == (UNIT, count * UNIT)
    assert usage.beyond(kept) == (0, (count - 1) * UNIT)
    assert sum(usage.by_op.values()) == usage.peak
    assert usage.seconds > 0


def test_what_was_there_before_and_goes_is_not_seen_on_a_cpu() -> None:
    before = [torch.empty(UNIT), torch.empty(UNIT)]
    with measured("cpu") as block:
        before.clear()
        kept = torch.empty(UNIT)
    assert block.usage.persistent == block.usage.peak == kept.nbytes


def test_a_function_and_a_decorator() -> None:
    result, usage = measure(block_of, 3)
    assert result.nbytes == usage.persistent == UNIT
    decorated = profiled(block_of)
    held = [decorated(2), decorated(4)]
    assert [usage.peak for usage in decorated.usages] == [2 * UNIT, 4 * UNIT]  # type: ignore[attr-defined]
    assert decorated.__name__ == "block_of"
    assert len(held) == 2


def test_the_peak_is_shared_out_over_operations_and_modules() -> None:
    built = build("llama-gqa", "eager", torch.float32)
    ids = built.ids(32, 2)
    with measured("cpu", built.model) as block:
        loss = built.model(ids, labels=ids).loss
    usage = block.usage
    assert sum(usage.by_op.values()) == sum(usage.by_module.values()) == usage.peak > 0
    modules = {name for name, _ in built.model.named_modules()}
    assert set(usage.by_module) <= modules | {"", type(built.model).__name__}
    layers = [f"model.layers.{number}.mlp.act_fn" for number in range(3)]
    assert {usage.by_module[name] for name in layers} == {4 * 2 * 32 * built.config.intermediate_size}
    assert loss.item() > 0


def test_measured_is_what_is_traced() -> None:
    """Two ways that share no code, on a module with branches and views."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.rand(2, 16, 32, requires_grad=True)
    with measured("cpu") as block:
        z = layer(x)
    traced = trace_call(layer_on_fakes(layer), x, *layer.parameters(), device="cpu")
    assert traced.extra == pytest.approx(block.usage.beyond(z), abs=256)


def layer_on_fakes(layer: torch.nn.Module):  # type: ignore[no-untyped-def]
    names = [name for name, _ in layer.named_parameters()]

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    return run


def test_errors() -> None:
    with pytest.raises(ConfigError, match="not on tpu"), measured("tpu"):
        pass
    with pytest.raises(ConfigError, match="not over"), measured("cpu") as block:
        _ = block.usage
    with pytest.raises(ConfigError, match="inside one another"), measured("cpu"), measured("cpu"):
        pass
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA"), measured("cuda"):
            pass
    with pytest.raises(ValueError, match="mine"), measured("cpu"):
        raise ValueError("mine")
    with measured("cpu") as after:
        pass
    assert (after.usage.peak, after.usage.persistent) == (0, 0)


def test_the_highest_sum_of_a_stream() -> None:
    def event(address: int, change: int) -> Event:
        return Event(0, address, change, f"aten::op{address}", "")

    found = live([event(1, 10), event(2, 5), event(1, -10), event(3, 4), event(1, 7), event(2, -5)])
    assert (found.peak, found.end) == (16, 11)
    assert found.by_op() == {"aten::op1": 7, "aten::op2": 5, "aten::op3": 4}
    assert live([]).peak == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda() -> None:
    x = torch.rand(2**20, device="cuda", requires_grad=True)
    with measured("cuda") as block:
        z = torch.sigmoid(torch.sigmoid(x))
    assert block.usage.beyond(z) == (x.nbytes, x.nbytes)
    assert block.usage.device_total is not None
