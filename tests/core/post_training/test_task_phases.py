"""What must hold of phases and roles, whatever the numbers: who is resident when, and what a share of the card means."""

from __future__ import annotations

import pytest

from command_line import document
from loadgauge import posttrain
from loadgauge.core.base.units import GIB
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.serving.inference import CACHE_FORMATS
from loadgauge.core.definitions.training.tasks import TASKS
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.post_training.answers import answers
from loadgauge.core.post_training.engine import Card
from loadgauge.core.post_training.memory import PhaseMemory, PostMemory, engine_of, memory
from loadgauge.core.resolve.posttrain import resolve_posttrain
from loadgauge.core.resolve.resolve import resolve_job

GRPO = {
    "task": "grpo", "gpu": "h100-sxm5-80gb", "gpus": 8, "zero": 3, "recompute": "full", "prompts": 64, "samples": 8,
    "prompt_len": 512, "answers": "1536",
}  # fmt: skip


def of(**flags: object) -> PostMemory:
    return posttrain("llama-3.1-8b", **GRPO | flags).memory  # type: ignore[arg-type]


def phase(found: PostMemory, name: str) -> PhaseMemory:
    return next(one for one in found.phases if one.name == name)


def test_every_pass_is_of_a_role_that_the_task_has() -> None:
    for task in TASKS.values():
        names = {role.name for role in task.roles}
        assert {one.role for one in task.passes} <= names
        assert task.rollout == any(one.does == "generate" for one in task.passes)
        assert any("train" in role.uses for role in task.roles)


def test_an_engine_that_sleeps_leaves_the_card_to_the_trainer() -> None:
    awake, asleep, dropped = (of(rollout=f"vllm:utilization=0.5,sleep={level}") for level in (0, 1, 2))
    assert phase(awake, "update").of("engine") > 30 * GIB
    assert phase(asleep, "update").of("engine") == phase(dropped, "update").of("engine") < 1 * GIB
    assert phase(awake, "generate").total == phase(asleep, "generate").total
    weights = 8 * 2 * float(parameters(find_model("llama-3.1-8b")).total)
    assert asleep.host["engine asleep"] == pytest.approx(weights, rel=1e-3)
    assert "engine asleep" not in dropped.host


def test_what_is_moved_away_is_on_the_host_and_not_on_the_card() -> None:
    stays, moved = of(), of(rollout_offload="all")
    states = phase(stays, "generate").of("actor")
    assert states > 0
    assert phase(moved, "generate").of("actor") == 0
    assert moved.host["moved while answers are generated"] == pytest.approx(8 * states)
    assert phase(moved, "update").total == phase(stays, "update").total


def test_a_frozen_model_on_the_host_is_only_there_for_its_pass() -> None:
    stays, moved = of(), of(frozen_offload=True)
    weights = phase(stays, "update").of("reference")
    assert weights > 0
    assert phase(moved, "update").of("reference") == 0
    assert phase(moved, "reference").total == phase(stays, "reference").total
    assert moved.host["frozen models"] == pytest.approx(8 * weights)


def test_both_sides_of_a_split_hold_nothing_of_the_other() -> None:
    found = of(placement="split:4+4", gpus=None, rollout="vllm:tp=2")
    assert {one.role for one in phase(found, "generate").residents} == {"engine"}
    assert phase(found, "update").of("engine") == 0


def test_a_share_of_the_card_is_what_the_engine_means_by_it() -> None:
    """vLLM's is of the whole memory, beside weights and the profile; SGLang's of what is free, beside weights alone."""
    more, less = (of(rollout=f"vllm:utilization={share}").engine for share in (0.7, 0.6))
    assert more is not None
    assert less is not None
    capacity = of().capacity
    assert capacity is not None
    assert more.pool - less.pool == pytest.approx(0.1 * capacity)
    assert more.weights + more.profile + more.pool == pytest.approx(0.7 * capacity)
    other = of(rollout="sglang:mem_fraction_static=0.7").engine
    assert other is not None
    assert other.weights + other.pool == pytest.approx(0.7 * (capacity - other.outside.value))


def test_sequences_wait_where_their_cache_does_not_fit() -> None:
    many = {"samples": 64, "answers": "7680", "rollout": "vllm:utilization=0.3"}
    found = of(**many).engine
    assert found is not None
    assert found.preempts
    assert found.running * found.token * (512 + 7680 / 2) <= found.pool
    narrow = of(**many | {"rollout": "vllm:utilization=0.3,kv=fp8"}).engine
    assert narrow is not None
    assert narrow.token / found.token == CACHE_FORMATS["fp8"] / CACHE_FORMATS["bf16"]
    assert narrow.running > found.running


def test_a_reference_inside_the_update_is_counted_on_a_pipeline_s_stages_too() -> None:
    """A rank of the first stage has no head, and keeps its micro-batches while the reference runs."""
    found = {
        pp: posttrain("llama-3.1-8b", task="dpo", gpus=8, tp=8 // pp, pp=pp, recompute="none").memory for pp in (1, 4)
    }
    for run in found.values():
        both = phase(run, "reference")
        kept = sum(one.nbytes for one in both.residents if one.part == "kept")
        assert kept > 0.5 * sum(one.nbytes for one in phase(run, "update").residents if one.part == "activations")
        assert both.of("reference") >= phase(run, "update").of("reference")


def test_a_teacher_is_whole_on_every_card_of_trl_under_fsdp() -> None:
    found = posttrain("llama-3.2-1b", task="gkd", teacher="llama-3.1-8b", gpus=8, zero=3, weights="bfloat16").memory
    whole = 2 * float(parameters(find_model("llama-3.1-8b")).total)
    held = next(one.nbytes for one in phase(found, "update").residents if one.role == "teacher")
    assert held == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "mean"), [("exp:1000,1000000", 1000.5), ("lognormal:500,1,2000000", 500 * 2.718281828**0.5)]
)
def test_laws_of_answers_have_the_means_of_their_textbooks(text: str, mean: float) -> None:
    """Lengths are rounded up to a step of the law's grid, here of 122 and 244 tokens."""
    step = int(text.rpartition(",")[2]) // 8192
    assert answers(text).mean == pytest.approx(mean + step / 2, rel=0.02)


def test_sequences_that_were_dropped_are_read_again_together() -> None:
    """What the cache has no room for is read from its start as it comes back, as many tokens a step as the cache holds: such a
    step has the peak of an engine whose largest step is of as many tokens."""

    def card(samples: int, most: int) -> Card:
        job = Job(
            "qwen2.5-7b", task="grpo", gpu="h100-sxm5-80gb", prompts=1, samples=samples, prompt_len=256, answers="7936",
            rollout=f"vllm:utilization=0.5,max_num_seqs={samples},max_batched_tokens={most}", lora_rank=8, rollout_offload="all",
        )  # fmt: skip
        return engine_of(resolve_posttrain(job)[0])

    full = card(64, 196_608)
    held = int(full.pool // full.token)
    assert full.preempts
    assert held < 196_608
    assert full.serving == pytest.approx(card(64, held).profile, rel=1e-3)
    assert not card(4, 16_384).preempts
    assert card(4, 16_384).serving < full.serving / 10


@pytest.mark.parametrize(("framework", "nbytes"), [("deepspeed", 2), ("fsdp", 4)])
def test_a_model_that_deepspeed_runs_returns_logits_of_16_bits(framework: str, nbytes: int) -> None:
    """No autocast is around it, so that accelerate widens nothing, and TRL takes logits as they come."""
    job = Job("qwen2.5-0.5b", task="dpo", gpus=2, zero=2, framework=framework, seq_len=1024)
    found = memory(resolve_posttrain(job)[0])
    kept = phase(found, "reference").residents
    logits = next(one.nbytes for one in kept if one.part == "logits")
    assert logits == pytest.approx(nbytes * 2 * 1024 * 151_936, rel=0.03)


def test_states_that_are_away_but_for_the_update_are_on_no_other_pass() -> None:
    """OpenRLHF reloads them before `fit` and offloads them after it (`ppo_trainer.py`, `_run_sleep`): weights stay throughout."""
    stays, away = of(rollout_offload="optimizer"), of(rollout_offload="states")
    for one, other in zip(stays.phases, away.phases, strict=True):
        states = sum(
            each.nbytes for each in one.residents if each.part in ("optimizer", "gradients") and each.role == "actor"
        )
        gone = states if one.side == "trainer" and one.name != "update" else 0.0
        assert one.total - other.total == pytest.approx(gone, abs=1)
        assert (gone > 0) == (one.name in ("old log-probs", "reference", "weight sync"))


def test_a_role_that_is_idle_leaves_the_card_to_the_others() -> None:
    """Between its own passes a worker of verl or ROLL has nothing on the card (verl, `workers/engine_workers.py`: each method loads
    what it needs and offloads it; ROLL, `state_offload_manager`); an update has all of its own role, and no reference."""
    stays, leaves = of(rollout_offload="all"), of(rollout_offload="idle")
    for one, other in zip(stays.phases, leaves.phases, strict=True):
        assert one.name == other.name
        states = sum(each.nbytes for each in one.residents if each.part == "optimizer")
        if one.side == "rollout":
            assert other.total == one.total
        elif one.name == "update":
            assert other.of("reference") == 0
            assert other.of("actor") == one.of("actor")
        else:
            assert states > 0
            assert other.total <= one.total - 0.99 * states
            # What works holds its weights, and what does not has none.
            working = "reference" if one.name == "reference" else "actor"
            held = {
                each.role
                for each in other.residents
                if each.part == "weights" and each.nbytes > 0 and each.role != "engine"
            }
            assert held == {working}


def test_weights_that_an_engine_maps_again_do_not_widen_the_range() -> None:
    """They lie beside the trainer's allocator: in half as many bytes the phase is smaller, and its range as wide."""
    whole, half = (phase(of(rollout=f"vllm:sleep=1,weights={name}"), "weight sync") for name in ("bf16", "fp8"))
    assert whole.total > half.total + GIB
    (mapped,) = (
        resident.nbytes for resident in whole.residents if (resident.role, resident.part) == ("engine", "weights")
    )
    assert mapped == pytest.approx(2 * parameters(find_model("llama-3.1-8b")).total, rel=1e-3)
    assert whole.high - whole.total == pytest.approx(half.high - half.total)
    assert whole.total - whole.low == pytest.approx(half.total - half.low)


@pytest.mark.parametrize(
    ("model", "gpus", "task"),
    [("llama-3.1-70b", 64, "grpo"), ("llama-3.1-70b", 64, "dpo"), ("qwen3-30b-a3b", 16, "grpo")],
)
def test_what_is_advised_fits_as_it_says_typed_beside_the_rest(model: str, gpus: int, task: str) -> None:
    line = f"estimate {model} --gpu h100-sxm5-80gb --gpus {gpus} --task {task}"
    before = document(line)
    change = before["remedies"][0]
    after = document(f"{line} {change['flags']}")
    assert before["memory"]["verdict"] == "does not fit"
    assert change["flags"].find("lora") < 0
    assert after["memory"]["verdict"] == "fits"
    assert after["memory"]["total"] == change["memory"]["total"]


def test_a_fine_tuning_of_many_gpus_has_the_layout_of_its_training() -> None:
    run, _ = resolve_posttrain(Job("llama-3.1-70b", task="sft", gpu="h100-sxm5-80gb", gpus=64))
    alone = resolve_job(Job("llama-3.1-70b", gpu="h100-sxm5-80gb", gpus=64)).estimate()
    shared = ("zero", "tp", "pp", "recompute")
    assert [getattr(run.trained.layout, name) for name in shared] == [getattr(alone.layout, name) for name in shared]
    assert run.trained.layout.zero > 0


def test_an_engine_of_which_nothing_is_said_is_on_as_few_gpus_as_hold_it() -> None:
    job = Job("qwen3-235b-a22b", task="grpo", gpu="h200-sxm-141gb", gpus=64)
    run, _ = resolve_posttrain(job)
    assert run.engine is not None
    half, _ = resolve_posttrain(job.replace(rollout=f"vllm:tp={run.engine.tp // 2}"))
    assert run.engine.tp > 1
    assert not engine_of(run).unstarted
    assert engine_of(half).unstarted
    assert run.assumed["--rollout"].startswith(run.engine.text())
