"""The optimizer states of a part of the parameters on the host: Megatron-Core's fraction and DeepSpeed's ratio, by their code."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.command_line import document, typed

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job

LLAMA = {"model": "llama-3.1-8b", "gpu": "h100-sxm5-80gb", "gpus": 8, "micro_batch": 1, "seq_len": 2048}
PARAMETERS = 8_030_261_248
MEGATRON = {**LLAMA, "framework": "megatron", "zero": 1}
DEEPSPEED = {**LLAMA, "framework": "deepspeed", "zero": 3, "gpus": 2}


def run(base: dict[str, Any], **more: Any) -> Any:
    return resolve_job(Job(**{**base, **more})).estimate()


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_megatrons_fraction_is_of_the_parameters(fraction: float) -> None:
    """Of what moves: float32 weights, two moments and float32 gradients on the host (`HybridDeviceOptimizer`), page-locked but for
    the moments."""
    part, none = run(MEGATRON, offload=f"optimizer:{fraction}"), run(MEGATRON, offload="none")
    share = PARAMETERS / 8
    kept = none.memory.parts["optimizer"]
    assert kept == pytest.approx(12 * share, rel=1e-6)
    assert part.memory.parts["optimizer"] == pytest.approx((1 - fraction) * kept, rel=1e-9)
    assert part.memory.parts["gradients"] == none.memory.parts["gradients"]
    assert part.memory.host == pytest.approx(fraction * 16 * share, rel=1e-6)
    assert part.memory.pinned == pytest.approx(fraction * 8 * share, rel=1e-6)
    # Float32 gradients go and 16-bit weights come; the node's cores update what its GPUs moved.
    whole = fraction * PARAMETERS
    seconds = 6 * whole / 8 / 25e9 + whole / 4e9
    assert part.time.parts["optimizer"] == pytest.approx(seconds, rel=1e-6)


def test_the_card_updates_its_part_beside_the_host() -> None:
    none, some = (run(MEGATRON, offload=word) for word in ("none", "optimizer:0.0001"))
    assert some.time.parts["optimizer"] == pytest.approx(none.time.parts["optimizer"], rel=1e-3)


@pytest.mark.parametrize(
    ("ratio", "size", "kept"),
    [
        # A share of 4.015e9 is five sub-groups of at most 1e9, and one of weights without decay: int((1 - ratio) 6) stay.
        (0.5, 10**9, 3e9),
        (0.9, 10**9, 0),
        (0.25, 10**9, 4e9),
        (0.1, 10**9, PARAMETERS / 2),
        # Eleven and one of 0.365e9.
        (0.5, 365 * 10**6, 6 * 0.365e9),
        # One of all, and that without decay.
        (0.6, 5 * 10**9, 0),
        (0.5, 5 * 10**9, PARAMETERS / 2),
    ],
)
def test_deepspeeds_ratio_is_of_its_sub_groups(ratio: float, size: int, kept: float) -> None:
    """`_create_fp32_partitions` of zero/stage3.py; float32 gradients of what stays are never freed, and all 16-bit ones are on the
    host."""
    part = run(DEEPSPEED, offload=f"optimizer:{ratio}", engine=f"sub_group_size={size}")
    share = PARAMETERS / 2
    assert part.memory.parts["optimizer"] == pytest.approx(12 * kept, rel=1e-6)
    assert part.memory.parts["gradients"] == pytest.approx(4 * kept, rel=1e-6)
    assert part.memory.host == pytest.approx(16 * (share - kept) + 2 * share, rel=1e-6)


def test_the_parts_are_explained_and_add_up() -> None:
    result = run(DEEPSPEED, offload="optimizer:0.5")
    for part in ("optimizer", "gradients"):
        why = result.explain(part)
        assert sum(step.nbytes for step in why.steps) == pytest.approx(why.total)
        assert "in part" in why.rule
    assert sum(result.memory.parts.values()) == pytest.approx(result.memory.total)


def test_the_printed_command_and_a_plan_keep_the_part() -> None:
    flags = "llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --framework megatron --offload optimizer:0.5"
    found = document(f"estimate {flags} --zero 1")
    assert found["training"]["offload"] == "optimizer:0.5"
    assert "--offload optimizer:0.5" in typed(f"plan {flags} --seq-len 2048 --global-batch 64").out


def test_what_no_library_does_is_refused() -> None:
    with pytest.raises(NotModelled, match="a part is of Megatron-Core's"):
        run({**DEEPSPEED, "zero": 2}, offload="optimizer:0.5")
    with pytest.raises(NotModelled, match="a part is of Megatron-Core's"):
        run({**LLAMA, "framework": "torchtitan"}, offload="optimizer:0.5")
    with pytest.raises(ConfigError, match="a part is of the optimizer"):
        run(MEGATRON, offload="all:0.5")


def test_states_that_wait_on_the_host_come_back_for_the_update() -> None:
    """Of prime-rl's `CPUOffloadOptimizer`: passes without two float32 moments, the update with them, two ways over PCIe."""
    base = {**LLAMA, "framework": "torchtitan", "zero": 3}
    none, waits = (run(base, offload=word) for word in ("none", "states"))
    moments, share = (answer.memory.moments for answer in (none, waits)), 8 * PARAMETERS / 8
    for before, after in zip(*moments, strict=True):
        held = share if before.phase == "step" else 0
        assert (before.parts["optimizer"], after.parts["optimizer"]) == pytest.approx((share, held), rel=1e-6)
    assert waits.memory.host == waits.memory.pinned == pytest.approx(share, rel=1e-6)
    seconds = waits.time.parts["optimizer"] - none.time.parts["optimizer"]
    assert seconds == pytest.approx(2 * share / 25e9, rel=1e-6)
    with pytest.raises(NotModelled, match="without DeepSpeed"):
        run(DEEPSPEED, offload="states")
    why = waits.explain("optimizer", at="step")
    assert why.total == pytest.approx(share, rel=1e-6)
    assert sum(step.nbytes for step in why.steps) == pytest.approx(share, rel=1e-6)
