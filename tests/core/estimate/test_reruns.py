"""What of a checkpointed layer runs again: all of it, or what backward asks for."""

from __future__ import annotations

from typing import Any

import pytest

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.plan.answer import answer as find_plan
from loadgauge.core.plan.request import PlanRequest, cases as planned_cases
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


@pytest.mark.parametrize(("word", "gathers"), [("full:partitioned", 32), ("full:every=2:partitioned", 16)])
def test_partitioned_inputs_are_kept_in_parts_and_gathered_again(word: str, gathers: int) -> None:
    """ZeRO-R: of each layer that runs again a rank keeps b s h / t, and receives the rest of it (`equation partitioned`)."""
    job = Job(
        "llama-3.1-8b", gpu="h100", gpus=4, tp=4, seq_len=4096, micro_batch=2, global_batch=4, framework="megatron"
    )
    answers = [
        resolve_job(job.replace(recompute=each)).estimate() for each in (word.removesuffix(":partitioned"), word)
    ]
    whole, parts = (answer.memory.parts["activations"] for answer in answers)
    one = 2 * 2 * 4096 * 4096
    assert whole - parts == pytest.approx(gathers * one * 3 / 4, rel=1e-3)
    sent = [sum(row.sent for row in answer.network if row.collective == "all_gather") for answer in answers]
    assert sent[1] - sent[0] == pytest.approx(gathers * 2 * one * 3 / 4, rel=1e-6)
    assert answers[1].timing.step > answers[0].timing.step
    alone = [resolve_job(job.replace(tp=None, recompute=each)).estimate() for each in ("full", "full:partitioned")]
    assert alone[0].memory.total == alone[1].memory.total
    assert alone[0].timing.step == alone[1].timing.step
    shared = [
        resolve_job(job.replace(recompute=each, sequence_parallel=True)).estimate()
        for each in ("full", "full:partitioned")
    ]
    assert shared[0].memory.total == shared[1].memory.total


def test_a_plan_has_the_memory_of_partitioned_inputs_that_estimate_has() -> None:
    words = {
        "gpu": "h100",
        "gpus": "8",
        "seq_len": "8192",
        "global_batch": "8",
        "recompute": "full:partitioned",
        "tp": "4,8",
    }
    request = PlanRequest.of("llama-3.1-8b", words)
    best = find_plan(request, *planned_cases(request)).best
    assert str(best.estimate.layout.recompute) == "full:partitioned"
    again = resolve_job(best.job).estimate()
    assert again.memory.total == best.estimate.memory.total
