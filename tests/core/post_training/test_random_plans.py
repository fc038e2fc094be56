"""Plans of random jobs after pre-training, beside each candidate estimated by itself."""

from __future__ import annotations

import random

import msgspec
import pytest

from loadgauge.core.base.errors import ConfigError, Error
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.definitions.training.tasks import TASKS
from loadgauge.core.plan.posttrain import plain, plan_task
from loadgauge.core.plan.space.task_space import Space, candidates
from loadgauge.core.post_training.memory import memory
from loadgauge.core.post_training.step import timed
from loadgauge.core.resolve.posttrain import resolve_posttrain


def drawn(seed: int) -> tuple[Job, Space]:
    draw = random.Random(seed)
    task = draw.choice(["dpo", "grpo", "ppo", "kto", "orpo", "gkd", "opd", "rm", "simpo", "rloo"])
    model = draw.choice(["qwen2.5-7b", "llama-3.1-8b", "qwen3-0.6b", "qwen3-30b-a3b", "qwen2.5-1.5b", "qwen2.5-32b"])
    gpus, more = draw.choice([1, 2, 4, 8]), {}
    axes: dict[str, tuple[object, ...]] = {
        "tp": (1, 2),
        "pp": (1,),
        "micro_batch": (1, 4),
        "recompute": ("none", "full"),
    }
    if TASKS[task].rollout:
        more |= {
            "prompts": draw.choice([8, 16]),
            "samples": 8,
            "prompt_len": 512,
            "answers": draw.choice(["1024", "exp:600,4096"]),
        }
        more |= {"staleness": draw.choice([1, 4])} if gpus > 1 and draw.random() < 0.5 else {}
        axes |= {"share": (0.5, 0.8), "rollout_tp": (1, 2), "logprob_batch": (1, 8)}
    else:
        more |= {"seq_len": draw.choice([1024, 4096]), "global_batch": 64}
        if seed % 5 == 0:
            more |= {"seq_len": None, "lengths": "uniform:2048"}
    more |= {"teacher": "qwen3-0.6b"} if TASKS[task].name in ("gkd", "opd") else {}
    more |= draw.choice([{}, {}, {"qlora": True}, {"lora_rank": 16}])
    gpu = draw.choice(["h100-sxm5-80gb", "a100-sxm4-80gb", "rtx4090", "h200"])
    job = Job(model, task=task, gpu=gpu, gpus=gpus, **more)  # type: ignore[arg-type]
    return job, Space.of(job, axes)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(40))
def test_a_plan_s_memory_is_an_estimate_s_to_the_byte_and_the_nearest_is_the_nearest(seed: int) -> None:
    job, space = drawn(seed)
    runs = []
    for candidate in candidates(job, space):
        try:
            run = resolve_posttrain(candidate)[0]
            held = memory(run)
            time = timed(run, held)[0]
        except Error:
            continue
        layout = run.trained.layout
        if time is not None and layout.global_batch % (layout.micro_batch * layout.dp) == 0:
            runs.append((time.step, candidate, held))
    if not runs:  # an engine that does not start on this card
        with pytest.raises(ConfigError, match="no candidate"):
            plan_task(job, space)
        return
    fit = [row for row in runs if row[2].verdict == "fits"]
    found = plan_task(job, space)
    if fit:
        step, best, held = min(fit, key=lambda row: row[0])
        assert found.best is not None
        assert (found.best.job, found.best.time.step, found.best.memory) == (best, step, held)
    else:
        assert found.best is None
        assert found.nearest is not None
        assert found.nearest.memory.decisive.high == min(row[2].decisive.high for row in runs)
        assert found.nearest.memory == memory(resolve_posttrain(found.nearest.job)[0])


def late(seed: int) -> tuple[Job, Space]:
    """A run of two sides whose answers may be old: its split, its engine and how both wait are drawn."""
    draw = random.Random(1000 + seed)
    options = [f"vllm:every={draw.choice([1, 1, 3])}", draw.choice(["partial=true", "partial=false", "prefix=true"])]
    options += draw.choice([[], ["turns=4,tool=5"], ["turns=4,tool=5,observed=50"], ["verify=10"], ["inflight=64"]])
    options += draw.choice([[], ["sync=delta"], ["sync=disk,disk=5GB/s"], ["sync=reshard"], ["suspend=true"]])
    job = Job(
        draw.choice(["qwen3-0.6b", "qwen2.5-1.5b", "qwen2.5-7b"]), task="grpo", gpu=draw.choice(["h100-sxm5-80gb", "h200"]),
        gpus=draw.choice([4, 8, 16]), staleness=draw.choice([1, 2, 4]), prompts=draw.choice([16, 48]), samples=8, prompt_len=512,
        answers=draw.choice(["1024", "exp:600,4096", "uniform:2048"]), rollout=",".join(options),
    )  # fmt: skip
    return job, Space.of(job, {
        "tp": (1, 2), "pp": (1,), "zero": (1, 3), "micro_batch": (1, 4), "logprob_batch": (4,), "recompute": ("full",),
        "rollout_tp": (1, 2), "share": (0.8,),
    })  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(20))
def test_the_split_of_a_run_with_old_answers_is_the_best_of_all_splits(seed: int) -> None:
    job, space = late(seed)
    assert len(space.placement) >= min(3, (job.gpus or 2) - 1)
    found, single = plan_task(job, space, nearest=False).best, plain(job, space)
    assert (found is None) == (single is None)
    if found is not None and single is not None:
        assert (found.job, found.time.step, found.memory) == (single.job, single.time.step, single.memory)


def test_what_no_node_trains_or_serves_is_laid_out_across_nodes():
    job = Job("qwen3-235b-a22b", task="grpo", gpu="h100-sxm5-80gb", gpus=128, rollout_offload="all")
    lean = {
        "tp": (1, 4),
        "zero": (1,),
        "recompute": ("full",),
        "micro_batch": (1,),
        "logprob_batch": (1,),
        "share": (0.5, 0.9),
    }
    space = Space.of(job, lean)
    inside = plan_task(job, msgspec.structs.replace(space, wider={}))
    across = plan_task(job, space)
    assert space.ep == (1, 8)
    assert set(space.wider) == {"pp", "ep", "rollout_tp"}
    assert inside.best is None
    assert across.best is not None
    assert max(across.best.job.pp or 1, across.best.job.ep or 1, Engine.parse(across.best.job.rollout or "").tp) > 8
    assert across.best.memory == memory(resolve_posttrain(across.best.job)[0])


def test_a_model_without_experts_has_no_axis_of_them():
    assert Space.of(Job("llama-3.1-8b", task="grpo", gpus=16), {}).ep == (1,)
