"""A plan of a server in which nothing fits says what is nearest and what would make it fit; 0.3 said that no layout existed."""

from __future__ import annotations

import pytest
from tests.support.command_line import document, typed

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.plan.serving import Limits, plan_serving

CARD = ("--task", "generate", "--context", "1024")


@pytest.mark.parametrize("more", [(), ("--batch", "2"), ("--find", "batch")])
def test_what_does_not_fit_is_said_with_what_would(more: tuple[str, ...]) -> None:
    code, out, _ = typed(["plan", "llama-3.1-8b", "--gpu", "rtx3060", "--gpus", "1", *CARD, *more])
    first, second, *rest = out.splitlines()
    assert code == 1
    assert first.startswith("DOES NOT FIT")
    assert second.startswith("Nothing fits of ")
    tries = [line for line in rest if line.startswith("Try ")]
    assert tries
    flags = tries[0].removeprefix("Try ").partition(":")[0].split()
    words = [word for word in (*CARD, *more, "--server", "vllm", "--answer", "512") if word not in ("--find", "batch")]
    gpus = () if "--gpus" in flags else ("--gpus", "1")
    line = " ".join(["estimate llama-3.1-8b --gpu rtx3060", *gpus, *words, *flags])
    assert document(line)["memory"]["verdict"] == "fits"


def test_the_nearest_to_a_limit_of_time_is_the_fastest() -> None:
    job, request = Job(model="llama-3.1-8b", gpu="h100", gpus=4), {"context": 2048}
    missed = plan_serving(job, request, {}, Limits(token=1e-4)).nearest
    every = plan_serving(job, request, {}, Limits())
    assert missed is not None
    assert missed.answer.token == min(row.answer.token or 0 for row in every.choices)
