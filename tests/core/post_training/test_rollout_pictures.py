"""Policies that see: the engine has the tower beside the language model, and the update sees the pictures of each sequence."""

from __future__ import annotations

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.estimate import estimate
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.post_training.memory import engine_of
from loadgauge.core.post_training.roles import Run
from loadgauge.core.post_training.step import packed, server_of
from loadgauge.core.resolve.posttrain import resolve_posttrain

JOB = Job(
    "qwen2.5-vl-7b", task="grpo", gpu="h100-sxm5-80gb", gpus=8, zero=3, prompts=32, samples=8, prompt_len=1500,
    answers="exp:400,2596", rollout="vllm:utilization=0.6,max_batched_tokens=8192", recompute="full",
)  # fmt: skip
PATCHES, TOKENS = 3996, 999
"""Of a picture of 1024 x 768: sides of 1036 and 756 in patches of 14, of which four are a token."""


def run_of(**changes: object) -> Run:
    return resolve_posttrain(JOB.replace(**changes))[0]


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_holds_the_tower_and_a_prompt_waits_for_its_picture(tp: int) -> None:
    both = [
        run_of(rollout=f"vllm:tp={tp},utilization=0.6,max_batched_tokens=8192", pictures=pictures)
        for pictures in ("1x1024x768", None)
    ]
    (seeing, blind), (own, alone) = (engine_of(run) for run in both), (server_of(run) for run in both)
    tower = parameters(both[0].trained.model).total - parameters(find_model("qwen2.5-vl-7b")).total
    assert tower == 676_550_144
    assert (seeing.weights - blind.weights) * tp == pytest.approx(
        2 * tower, rel=1e-3 if tp == 1 else 0.08
    )  # what joins patches is on each rank
    assert seeing.pool <= blind.pool - (seeing.weights - blind.weights)
    assert own.step(16, 2000.0) == alone.step(16, 2000.0)
    assert own.tower is not None
    flops = own.tower.passed(own.asked, own.machines).flops * 1.0
    # Products of 28 blocks 1,280 wide with gated MLPs of 3,420, the stem, and what joins four patches.
    linear = 32 * (4 * 1280**2 + 3 * 1280 * 3420) + 3 * 2 * 14**2 * 1280 + (5120**2 + 5120 * 3584) / 4
    assert flops == pytest.approx(2 * PATCHES * linear, rel=0.1)
    assert own.prompts(1500) > alone.prompts(1500)


def test_an_update_sees_the_picture_of_each_sequence_however_many_are_packed() -> None:
    run = run_of(pictures="1x1024x768", padding="free", micro_batch=4)
    member, answers = run.trained, run.sequences.answers
    layout, times = packed(run, member, 4 * member.layout.seq_len, (answers.mean, answers.mean_square), updates=True)
    assert times == 1
    assert layout.global_batch == pytest.approx(256, rel=0.1)
    assert layout.micro_batch > 4
    assert layout.num_microbatches * layout.dp * layout.tokens == pytest.approx(256 * (1500 + answers.mean))
    several, blind = (estimate(spec, layout, member.training) for spec in (member.model, find_model(JOB.model)))
    more = several.flops.forward - blind.flops.forward
    one = member.layout
    single = (
        estimate(member.model, one, member.training).flops.forward
        - estimate(find_model(JOB.model), one, member.training).flops.forward
    )
    assert more / layout.global_batch == pytest.approx(single / one.global_batch, rel=1e-6)


def test_a_prompt_holds_its_pictures() -> None:
    usual = run_of(prompt_len=None, answers=None, pictures="1x1024x768").sequences
    assert (usual.prompt, int(usual.answers.longest)) == (1024 + TOKENS, 3072)
    with pytest.raises(ConfigError, match="3,996 tokens of each prompt, which has --prompt-len 1,500"):
        run_of(pictures="4x1024x768")
