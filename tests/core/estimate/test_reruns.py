"""What of a checkpointed layer runs again: all of it, or what backward asks for."""

from __future__ import annotations

from typing import Any

import pytest

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job


@pytest.mark.parametrize(("reentrant", "products"), [(True, 2), (False, 1)])
def test_pytorch_stops_before_the_last_product(reentrant: bool, products: int):
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += "addmm" in str(func)
            return func(*args, **(kwargs or {}))

    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    out = checkpoint(layer, torch.randn(2, 8, requires_grad=True), use_reentrant=reentrant)
    # With a bias forward is an `addmm`, and the gradients are `mm`.
    with Count() as again:
        out.sum().backward()
    assert again.seen == products


def parts(framework: str, **flags: Any) -> dict[str, float]:
    values = {
        "gpu": "a100-sxm4-80gb",
        "gpus": 8,
        "zero": 3,
        "recompute": "full",
        "seq_len": 4096,
        "framework": framework,
    }
    time = resolve_job(Job(model="llama-3.1-8b", **{**values, **flags})).estimate().time
    assert time is not None
    return time.parts


@pytest.mark.parametrize(
    ("framework", "flags", "share"),
    [
        # The MLP's last matrix is 14336 x 4096 of 218e6 weights in a layer's products; attention and norms run again.
        ("huggingface", {}, (0.70, 0.85)),
        ("llm-foundry", {}, (0.70, 0.85)),
        ("huggingface", {"version": "transformers=4.57"}, (0.999, 1.001)),
        ("torchtitan", {}, (0.999, 1.001)),
        ("megatron", {"zero": 1, "tp": 2, "sequence_parallel": True}, (0.999, 1.001)),
        # An adapter of the last matrix needs what goes into its second product.
        ("huggingface", {"lora_rank": 16}, (0.95, 0.999)),
    ],
)
def test_the_last_product_is_left_out(framework: str, flags: dict[str, Any], share: tuple[float, float]):
    found = parts(framework, **flags)
    assert share[0] < found["recompute"] / found["forward"] < share[1]
