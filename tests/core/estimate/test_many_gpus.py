"""What is assumed and shown of runs of many GPUs where nothing is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from loadgauge.core.base import seconds
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.text.estimate.estimate import text

EXPERTS = {"gpu": "h100", "gpus": 64, "ep": 32, "framework": "megatron", "zero": 1, "seq_len": 1024, "micro_batch": 1}


@pytest.mark.parametrize(
    ("flags", "hidden"),
    [
        ({"pp": 2, "vpp": 4}, True),
        ({}, True),
        ({"pp": 2}, False),  # the schedule needs several chunks of a stage
        ({"pp": 2, "vpp": 4, "ep": 8}, False),  # within a node
        ({"pp": 2, "vpp": 4, "recompute": "full"}, False),
        ({"pp": 2, "vpp": 4, "overlap": "none"}, False),
        ({"pp": 2, "framework": "megatron-deepspeed"}, False),
    ],
)
def test_experts_between_nodes_exchange_beside_compute(flags: dict[str, object], hidden: bool):
    setup = resolve_job(Job.of("qwen3-30b-a3b", {**EXPERTS, **flags}))
    assert setup.training.overlap.ep is hidden
    assert ("exchange of experts" in setup.assumed.get("--overlap", "")) is hidden


@pytest.mark.parametrize(("more", "shown"), [({}, True), ({"micro_batch": 1}, False), ({"recompute": "none"}, False)])
def test_a_table_where_micro_batch_and_recomputation_are_unsaid(more: dict[str, object], shown: bool):
    job = Job.of("llama-3.2-1b", {"gpu": "h100", "gpus": 64, "seq_len": 1024, "global_batch": 512, **more})
    setup = resolve_job(job)
    printed = text(setup, setup.estimate())
    assert ("Neither micro-batch nor recomputation is said" in printed) is shown
    if shown:
        rows = printed.split("Neither micro-batch")[1].split("\n\n")[0].splitlines()[-4:]
        assert [row.split()[0] for row in rows] == ["1", "2", "4", "8"]
        again = resolve_job(job.replace(micro_batch=8, recompute="full")).estimate()
        assert f"{again.memory.total / 2**30:.1f} " in rows[-1]


@pytest.mark.parametrize(
    "flags",
    [
        {"model": "mixtral-8x22b", "gpus": 128, "tp": 2, "pp": 8, "ep": 8},
        {"model": "llama-3.1-70b", "gpus": 64, "zero": 3},
    ],
)
def test_the_ends_of_a_step_are_those_that_the_flag_gives(flags: dict[str, Any]) -> None:
    """What is printed as `--overlap all: 5.01 s` is what `--overlap all` gives."""
    job = Job(gpu="h100-sxm5-80gb", seq_len=4096, global_batch=256, micro_batch=1, **flags)
    shown = resolve_job(job).estimate().assumed["--overlap"]
    for word in ("all", "none"):
        time = resolve_job(job.replace(overlap=word)).estimate().time
        assert time is not None
        assert f"--overlap {word}: {seconds(time.step)}" in shown
