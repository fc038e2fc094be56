"""Fake tensors made from a plan are those that PyTorch itself makes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.initialization import no_init_weights

from loadgauge.pytorch.device import fake
from loadgauge.pytorch.device.simulated import fake_tensors, simulated_device
from loadgauge.pytorch.record.tracker import Tracker
from loadgauge.pytorch.trace.programs.call import trace_call
from torch_models import CASES, build


def stream_of(name: str, attention: str, device: str, dtype: torch.dtype) -> tuple[list[Any], int]:
    """Every event of two training steps."""
    with fake_tensors() as mode, torch.device(device), no_init_weights():
        built = build(name, attention, dtype)
        optimizer = torch.optim.AdamW(built.model.parameters())
        ids = built.ids(32, 2)
        tracker = Tracker(device)
        with tracker:
            for _ in range(2):
                built.model(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        stream = tracker.stream
        shapes = [(tuple(record.shape), record.dtype, record.op) for record in stream.records]
        return [*zip(stream.ids, stream.changes, strict=True), *shapes], len(mode.plans)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("llama-gqa", "cuda"), ("gpt2", "cuda"), ("bert", "cuda"), ("gemma3", "cuda"), ("modernbert", "cuda"), ("opt", "cuda"),
        ("llama-gqa", "cpu"), ("bert", "cpu"),
    ],
)  # fmt: skip
def test_models(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = simulated_device() if device == "cuda" else "cpu"
    attention = "sdpa" if CASES[name].config != "BertConfig" else "eager"
    with_plans, count = stream_of(name, attention, place, torch.bfloat16)
    assert count > 100
    monkeypatch.setattr(fake, "suits", lambda func: False)
    without, none = stream_of(name, attention, place, torch.bfloat16)
    assert none == 0
    assert with_plans == without


OPERATIONS = {
    "view": lambda x: x.view(-1)[3:9].view(2, 3),
    "transpose": lambda x: x.t()[1:],
    "expand": lambda x: x[:1].expand(5, -1),
    "split": lambda x: x.split([1, 3]),
    "unbind": lambda x: x.unbind(0),
    "max": lambda x: x.max(dim=1),
    "in place": lambda x: x.clone().add_(1).mul_(2),
    "in place view": lambda x: x.clone().t_(),
    "out": lambda x: torch.add(x, x, out=torch.empty(0)),
    "resize": lambda x: x.clone().resize_(2, 2),
    "bool": lambda x: (x > 0).any(),
    "real": lambda x: torch.view_as_real(torch.complex(x, x)),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "index": lambda x: x[torch.tensor([0, 2], device=x.device)],
    "to": lambda x: x.to(torch.bfloat16),
    "same": lambda x: x.to(torch.float32).contiguous(),
    "contiguous": lambda x: x.t().contiguous(),
    "numbers": lambda x: (
        torch.full((2,), 2),
        torch.full((2,), 2.0),
        torch.full((1,), True),
        torch.full((1,), 1),
        x * 2,
        x.to(torch.int64) * 2.5,
        x.to(torch.int64) * 2,
    ),
    "lists": lambda x: torch.cat([x, x[:1], x.to(torch.float64)]),
    "layer norm": lambda x: torch.native_layer_norm(x, (6,), None, None, 1e-5),
    "flat pair": lambda x: torch._foreach_add([x, x[:2]], 1.0),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2), 1),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_operations(operation: Any) -> None:
    """Twice in one mode: the second is made from the plan. Compared with real tensors."""
    real = described(operation(torch.rand(4, 6)))
    with fake_tensors():
        for _ in range(2):
            x = torch.empty(4, 6)
            assert described(operation(x)) == real


def described(out: Any) -> Any:
    """Shape, strides, offset, dtype, and the size of the storage."""
    if isinstance(out, tuple | list):
        return [described(one) for one in out]
    return tuple(out.shape), out.stride(), out.storage_offset(), out.dtype, out.untyped_storage().nbytes()


def test_views_of_a_plan_lie_in_their_source() -> None:
    with fake_tensors():
        for _ in range(2):
            x = torch.empty(4, 6)
            for view in (x[1:], x.t(), x.view(-1), x.detach()):
                assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert x.clone().untyped_storage()._cdata != x.untyped_storage()._cdata


def test_a_value_is_never_needed() -> None:
    with fake_tensors():
        x = torch.rand(3)
        assert x.sum().item() == 1
        assert (x > 0).all()
        assert torch.tensor(7).item() == 7


def test_what_is_returned_as_it_came_is_not_made() -> None:
    x = torch.empty(1024, device="meta")
    assert trace_call(lambda x: (x, x.view(32, 32), x + 1), x, device="cpu").extra == (0, 0)
    assert trace_call(lambda x: (x, x.view(32, 32), x + 1), x).made == x.nbytes


@pytest.mark.parametrize("kind", [torch.nn.Linear, torch.nn.Embedding])
def test_what_is_dropped_is_gone(kind: Any) -> None:
    """A graph that never runs backward goes with its result, and the storage of a copied module with the module."""
    place = simulated_device()
    with fake_tensors():
        tracker = Tracker(place)
        with tracker:
            module = copy.deepcopy(kind(16, 32).to(place))
            before = tracker.live()
            norm = torch.linalg.norm(module.weight * 2, dim=1)
            assert tracker.live() > before
            del norm
            assert tracker.live() == before > 0
            del module
            assert tracker.live() == 0
