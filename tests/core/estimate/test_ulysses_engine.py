"""DeepSpeed's engine under Ulysses reduces gradients in float32 (`seq_parallel_communication_data_type`): bytes by hand."""

from __future__ import annotations

from typing import Any

import pytest

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.memory.phases import StageAtWork
from loadgauge.core.estimate.memory.rank_memory import stages
from loadgauge.core.estimate.states.zero_engine import flattened
from loadgauge.core.resolve.resolve import resolve_job

PARAMETERS = 8_030_261_248
BUCKET = 5e8


def run(zero: int, comm: str, **more: Any) -> Any:
    job = {
        "model": "llama-3.1-8b",
        "framework": "deepspeed",
        "gpu": "a100-sxm4-80gb",
        "gpus": 8,
        "cp": 4,
        "seq_len": 32768,
    }
    return resolve_job(Job(**job, zero=zero, cp_comm=comm, recompute="full", global_batch=2, **more)).estimate()


@pytest.mark.parametrize(
    ("zero", "comm", "each"),
    # ZeRO 2 flattens a bucket and casts that; ZeRO 3 casts each gradient, and flattens those.
    [(2, "ring", 2), (3, "ring", 2), (2, "all_to_all", 2 + 4), (3, "all_to_all", 4 + 4)],
)
def test_a_full_bucket_is_copied_to_float32(zero: int, comm: str, each: int) -> None:
    memory = run(zero, comm).workings.memory
    (stage,) = stages(memory.model, memory.layout)
    point = StageAtWork(memory, stage).point("backward", 16)
    assert flattened(memory, stage, point) == pytest.approx(each * BUCKET, rel=1e-9)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_are_float32_on_the_wire(zero: int) -> None:
    sent = {}
    for comm in ("ring", "all_to_all"):
        rows = run(zero, comm).network
        sent[comm] = sum(row.payload * row.calls_per_step for row in rows if row.what.startswith("gradients"))
    assert sent["all_to_all"] == pytest.approx(4 * PARAMETERS, rel=1e-6)
    assert sent["ring"] == pytest.approx(2 * PARAMETERS, rel=1e-6)


def test_without_ranks_of_a_sequence_they_are_not() -> None:
    job = Job(model="llama-3.1-8b", framework="deepspeed", gpu="a100-sxm4-80gb", gpus=8, seq_len=2048, zero=2)
    rows = resolve_job(job).estimate().network
    assert sum(row.payload * row.calls_per_step for row in rows if row.what.startswith("gradients")) == pytest.approx(
        2 * PARAMETERS
    )
