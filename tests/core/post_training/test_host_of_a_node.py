"""Host memory of the node that needs the most, where roles have GPUs of their own."""

from __future__ import annotations

import pytest

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.post_training.memory import memory
from loadgauge.core.post_training.roles import Placement
from loadgauge.core.resolve.posttrain import resolve_posttrain


def host(placement: str, **more: int) -> dict[str, float]:
    job = Job(
        "qwen3-8b",
        gpu="h100",
        task="ppo",
        offload="optimizer",
        placement=placement,
        zero=1,
        framework="megatron",
        **more,
    )
    return memory(resolve_posttrain(job)[0]).host


def test_a_node_has_the_states_of_the_sets_that_stand_on_it_once() -> None:
    """Shared out over 4 GPUs or over 2, a role's states are as many bytes; a set on a node of its own adds nothing."""
    both = host("split:4+2,critic=2")["offloaded states"]
    assert host("split:2+2,critic=4")["offloaded states"] == pytest.approx(both, rel=1e-3)
    actor = host("split:8+8,critic=8")["offloaded states"]  # the larger, for its head
    assert 0.5 * both < actor < 0.55 * both
    straddling = host("split:4+2,critic=4")["offloaded states"]  # two of the critic's four ranks
    assert straddling == pytest.approx(actor + (both - actor) / 2, rel=1e-3)


def test_every_gpu_of_a_set_is_on_one_node() -> None:
    """All nodes together have all GPUs, where each holds the start or the end of a set."""
    for text in ("split:8+4,critic=6", "split:3+2,critic=2,reward=4", "split:16+8"):
        placement = Placement.parse(text, None)
        nodes = placement.nodes(8)
        assert all(sum(node.values()) <= 8 for node in nodes)
        assert sum(sum(node.values()) for node in nodes) == placement.gpus
