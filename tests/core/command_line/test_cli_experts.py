"""Experts and multi-token prediction on the command line."""

from __future__ import annotations

import pytest

from command_line import document, typed
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job

MIXTRAL = "estimate mixtral-8x7b --gpu h100-sxm5-80gb --gpus 32 --ep 8 --zero 1 --global-batch 32"
DEEPSEEK = "estimate deepseek-v3 --gpu h200-sxm-141gb --gpus 256 --ep 32 --zero 1 --global-batch 256"


def test_the_worst_routing_is_shown_beside_the_assumed_one() -> None:
    found = document(MIXTRAL)
    experts, memory = found["experts"], found["memory"]
    assert found["assumed"]["--expert-imbalance"].startswith("1.0")
    assert experts["imbalance"] == 1
    assert experts["worst_imbalance"] == 4  # 8 experts, 2 a token: all tokens to one rank are 4 times the mean
    assert experts["worst_case"]["total"] > memory["total"]
    assert experts["worst_case"]["step"] > found["time"]["step"]
    between = document(f"{MIXTRAL} --expert-imbalance 2")
    assert memory["total"] < between["memory"]["total"] < experts["worst_case"]["total"]
    assert found["time"]["step"] < between["time"]["step"] < experts["worst_case"]["step"]
    at_worst = document(f"{MIXTRAL} --expert-imbalance 4")
    assert "experts" not in at_worst
    assert at_worst["memory"]["total"] == experts["worst_case"]["total"]
    assert "busiest rank" in typed(MIXTRAL).out


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--expert-imbalance 9", "expert_imbalance"),
        ("--expert-imbalance 0.5", "balanced"),
        ("--expert-imbalance x", "number"),
    ],
)
def test_routing_that_cannot_be(flags: str, word: str) -> None:
    found = typed(f"{MIXTRAL} {flags}")
    assert found.code == 2
    assert word in found.err
    dense = typed("estimate llama-3.1-8b --expert-imbalance 2")
    assert dense.code == 2
    assert "no experts" in dense.err


def test_multi_token_prediction_is_asked_for() -> None:
    without, beside = document(DEEPSEEK), document(f"{DEEPSEEK} --mtp")
    assert any("num_nextn_predict_layers" in note for note in without["not_counted"])
    assert not any("num_nextn_predict_layers" in note for note in beside["not_counted"])
    assert 11e9 < beside["model"]["params"] - without["model"]["params"] < 12e9
    assert beside["flops"]["model_per_step"] > 1.01 * without["flops"]["model_per_step"]
    assert beside["time"]["step"] > without["time"]["step"]
    assert beside["memory"]["total"] > without["memory"]["total"]
    assert "1 module as the last layer" in typed("estimate llama-3.1-8b --mtp").out


@pytest.mark.parametrize(
    ("given", "ranks"), [({"tp": 4}, 4), ({"tp": 4, "etp": 1}, 1), ({"tp": 4, "ep": 4}, 1), ({}, 1)]
)
def test_experts_that_nobody_shares_out_are_split_as_their_layer(given: dict[str, int], ranks: int) -> None:
    """megatron-core, model_parallel_config.py: `expert_tensor_parallel_size` is that of tensor parallelism unless it is given."""
    assert resolve_job(Job(model="mixtral-8x7b", gpus=8, **given)).layout.etp == ranks
