"""`loadgauge.plan(...)`: the plan of the command, whose flags give its estimates."""

from __future__ import annotations

import json
import re

import pytest

import loadgauge
from command_line import document, typed

FLAGS = {"gpu": "h100-sxm5-80gb", "gpus": 8, "seq_len": 8192, "global_batch": 64, "pp": (1, 2), "replicas": 1}
COMMAND = "plan llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --seq-len 8192 --global-batch 64 --pp 1,2 --replicas 1"


@pytest.fixture(scope="module")
def plan() -> loadgauge.core.plan.answer.Plan:
    return loadgauge.plan("llama-3.1-8b", **FLAGS)


def test_the_flags_of_a_planned_layout_give_its_estimate_to_the_bit(plan: loadgauge.core.plan.answer.Plan) -> None:
    for planned in (plan.best, *plan.layouts[1:3], *plan.pareto[-2:]):
        assert " --framework " in planned.flags()
        again = document(f"estimate llama-3.1-8b {planned.flags()}")
        assert planned.estimate.time is not None
        assert again["time"]["step"] == planned.estimate.time.step
        assert again["memory"]["total"] == planned.estimate.memory.total
        assert loadgauge.estimate(planned.job).memory == planned.estimate.memory


@pytest.mark.slow
def test_it_is_the_plan_of_the_command(plan: loadgauge.core.plan.answer.Plan) -> None:
    command = document(COMMAND)
    own = json.loads(json.dumps(plan.to_dict()))
    assert {**own, "seconds": 0} == {**{name: command[name] for name in own}, "seconds": 0}
    printed, shown = (re.sub(r"[\d.]+ s\.|─", "", text).split() for text in (typed(COMMAND).out, str(plan)))
    assert printed == shown
    assert plan.best.command() in str(plan)


def test_a_job_is_planned_with_its_fields_locked() -> None:
    job = loadgauge.Job(
        model="llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, tp=2, recompute="none", global_batch=8, pp=1
    )
    locked = loadgauge.plan(job, objective="headroom", zero=(1, 2), micro_batch="1,2")
    assert {planned.job.tp for planned in locked.layouts} == {2}
    assert {planned.estimate.layout.zero for planned in locked.layouts} <= {1, 2}
    assert {str(planned.estimate.layout.recompute) for planned in (*locked.layouts, *locked.pareto)} == {"none"}
    card = loadgauge.plan(loadgauge.model("llama-3.1-8b"), gpu=loadgauge.gpu("h100-sxm5-80gb"), gpus=8, tp=2, pp=1,
                          recompute="none", global_batch=8, zero=(1, 2), micro_batch=(1, 2), objective="headroom")  # fmt: skip
    assert card.best == locked.best


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"tpp": 2}, "tpp"), ({"tokens": "1T"}, "tokens"), ({"tp": 3.5}, "tp"), ({"tp": (2, "x")}, "whole number"),
        ({"schedule": "zigzag"}, "zigzag"), ({"objective": "fame"}, "fame"), ({"gpu": None}, "gpu"), ({"margin": -1}, "margin"),
        ({"sequence_parallel": "perhaps"}, "sequence_parallel"), ({"cp_comm": "ring", "cp": 1}, "cp_comm"),
    ],
)  # fmt: skip
def test_nonsense_is_a_config_error(flags: dict[str, object], word: str) -> None:
    with pytest.raises(loadgauge.ConfigError, match=word):
        loadgauge.plan("gpt2", **{"gpu": "l4", "gpus": 8, **flags})


def test_nothing_that_fits_raises_with_the_nearest_layout() -> None:
    with pytest.raises(loadgauge.NothingFits) as raised:
        loadgauge.plan("llama-3.1-70b", gpu="rtx4090", gpus=1, global_batch=1)
    assert raised.value.missing > 0
