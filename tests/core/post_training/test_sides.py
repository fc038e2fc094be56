"""Roles on GPUs of their own: what each set holds, what runs at once, and the words of OpenRLHF and ROLL."""

from __future__ import annotations

import pytest

from loadgauge import ConfigError, posttrain
from loadgauge.core.answers.post_training import RunOfTask
from loadgauge.core.base.errors import Error
from loadgauge.core.post_training.memory import PhaseMemory
from loadgauge.core.post_training.roles import Placement
from loadgauge.core.post_training.step import StepTime
from loadgauge.job_files.exchange import read, write

PPO = {
    "task": "ppo", "gpu": "h100-sxm5-80gb", "zero": 3, "recompute": "full", "prompts": 64, "samples": 8, "prompt_len": 512,
    "answers": "exp:800,1536", "reward_model": "qwen2.5-7b", "rollout": "vllm:tp=2,utilization=0.5", "framework": "fsdp",
}  # fmt: skip
OWN = "split:8+8,critic+reward=8,reference=4"


def of(placement: str, gpus: int, **flags: object) -> RunOfTask:
    return posttrain("qwen2.5-7b", **PPO | {"placement": placement, "gpus": gpus} | flags)  # type: ignore[arg-type]


def phases(found: RunOfTask) -> dict[str, PhaseMemory]:
    return {phase.name: phase for phase in found.memory.phases}


def test_each_set_holds_its_own_roles() -> None:
    apart, together = phases(of(OWN, 28)), phases(of("split:8+8", 16))
    sides = {name: phase.side for name, phase in apart.items()}
    assert sides == {
        "generate": "rollout", "old log-probs": "trainer", "reference": "reference", "reward": "critic + reward model",
        "values": "critic + reward model", "critic update": "critic + reward model", "update": "trainer",
        "weight sync": "trainer",
    }  # fmt: skip
    moved = {"reference", "reward model", "critic"}
    for name in ("old log-probs", "update", "weight sync"):
        gone = sum(together[name].of(role) for role in moved)
        assert gone > 2**30
        assert apart[name].total == pytest.approx(together[name].total - gone)
    # A set of as many GPUs holds as much of its own.
    assert apart["critic update"].of("critic") == pytest.approx(together["critic update"].of("critic"))
    assert {one.role for one in apart["critic update"].residents} == {"critic", "reward model", "trainer"}
    # On half of them a sharded model's weights are twice.
    weights = [sum(one.nbytes for one in found["reference"].residents if (one.role, one.part) == ("reference", "weights"))
               for found in (apart, together)]  # fmt: skip
    assert weights[0] == pytest.approx(2 * weights[1])


def took(time: StepTime | None) -> dict[str, float]:
    assert time is not None
    return {phase.name: phase.seconds for phase in time.phases} | {"step": time.step}


def test_sets_score_at_once_and_then_update_at_once() -> None:
    apart, together = took(of(OWN, 28).time), took(of("split:8+8", 16).time)
    scores = max(apart["old log-probs"], apart["reference"], apart["reward"] + apart["values"])
    updates = max(apart["update"], apart["critic update"])
    assert apart["step"] == pytest.approx(1.05 * (apart["generate"] + scores + updates + apart["weight sync"]))
    for name in ("old log-probs", "reward", "values", "update", "critic update", "generate"):
        assert apart[name] == pytest.approx(together[name], rel=0.02), name
    assert apart["reference"] == pytest.approx(2 * together["reference"], rel=0.1)
    assert together["step"] == pytest.approx(1.05 * (sum(together.values()) - together["step"] - together["rest"]))


def test_beside_old_answers_the_trainer_is_as_slow_as_its_slowest_set() -> None:
    late = of(OWN, 28, staleness=1).time
    assert late is not None
    assert late.beside is not None
    found = took(late)
    update = max(found["old log-probs"], found["reference"], found["reward"] + found["values"]) + max(
        found["update"], found["critic update"]
    )
    assert late.step / 1.05 >= update + found["weight sync"] - 1e-6
    assert late.step / 1.05 - late.beside.waits == pytest.approx(update + found["weight sync"])


def test_colocated_roles_may_have_their_own_too() -> None:
    found = of("colocated,reward=4", 12)
    assert found.run.placement == Placement(trainer=8, apart=((("reward model",), 4),))
    assert phases(found)["reward"].side == "reward model"
    assert found.time is not None
    assert found.time.gpus == 12
    assert phases(found)["reward"].of("engine") == 0 < phases(found)["values"].of("engine")


@pytest.mark.parametrize(
    ("placement", "gpus", "words"),
    [
        ("split:8+8,judge=4", 20, "like reward=8"),
        ("split:8+8,reward=0", 16, "like reward=8"),
        ("split:8+8,reward=4", 16, r"8 \+ 8 \+ 4 GPUs are not the 16"),
        ("split:8+8,reward=4,critic+reward=4", 24, "once"),
        ("colocated,reward=8", 8, "leave none to the trainer"),
        ("split:8+8,teacher=4", 20, "ppo has no teacher here"),
        ("split:8+8,critic=3", 19, "512 sequences of an update over 3 GPUs of the critic"),
    ],
)
def test_sets_that_cannot_be_are_refused(placement: str, gpus: int, words: str) -> None:
    with pytest.raises(Error, match=words):
        of(placement, gpus)


def test_a_reference_that_is_the_trained_model_stays_on_its_gpus() -> None:
    with pytest.raises(ConfigError, match="the reference is the trained model's"):
        of("split:8+8,reference=4", 20, lora_rank=16)


def test_verifiers_on_a_host_are_waited_for() -> None:
    plain, waits = (
        took(of("split:8+8", 16).time),
        took(of("split:8+8", 16, rollout="vllm:tp=2,utilization=0.5,verify=20").time),
    )
    assert waits["generate"] == pytest.approx(plain["generate"] + 20)


OPENRLHF = """python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --actor.num_gpus_per_node 8 \\
   --ref.num_nodes 1 --ref.num_gpus_per_node 4 --critic.num_nodes 1 --critic.num_gpus_per_node 8 \\
   --reward.num_nodes 1 --reward.num_gpus_per_node 8 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 \\
   --actor.model_name_or_path Qwen/Qwen2.5-7B --reward.model_name_or_path Qwen/Qwen2.5-7B \\
   --critic.model_name_or_path Qwen/Qwen2.5-7B \\
   --train.batch_size 128 --rollout.batch_size 128 --data.max_len 2048 --ds.zero_stage 3 --algo.kl.init_coef 0.01 {}
"""


@pytest.mark.parametrize(
    ("words", "gpus", "placement"),
    [
        ("", 36, "split:8+8,reference=4,critic=8,reward=8"),
        ("--train.colocate_critic_reward", 28, "split:8+8,reference=4,critic+reward=8"),
        ("--train.colocate_actor_ref --ref.num_gpus_per_node 8", 32, "split:8+8,critic=8,reward=8"),
    ],
)
def test_openrlhf_says_how_many_gpus_each_role_has(words: str, gpus: int, placement: str) -> None:
    """cli/train_ppo_ray.py: a placement group for each pair that shares, and a model of its own beside them."""
    found = read(OPENRLHF.format(words), file="a.sh")
    assert (found.job.gpus, found.job.placement) == (gpus, placement)
    written = write(found.job, "openrlhf")
    assert read(written.text, file="a.sh").job.placement == placement
    assert not [item for item in found.uncounted if "colocate" in item.key]


ROLL = """pretrain: Qwen/Qwen2.5-7B
adv_estimator: {}
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 512
response_length: 1536
init_kl_coef: {}
actor_train:
  strategy_args: {{strategy_name: megatron_train, strategy_config: {{tensor_model_parallel_size: 2}}}}
  device_mapping: list(range(0,8))
actor_infer: {{strategy_args: {{strategy_name: vllm}}, device_mapping: "list(range(8,16))"}}
reference: {{device_mapping: "list(range(16,20))"}}
critic: {{device_mapping: "list(range(20,28))"}}
"""


@pytest.mark.parametrize(
    ("estimator", "penalty", "gpus", "placement"),
    [
        ("gae", 0.1, 28, "split:8+8,reference=4,critic=8"),
        ("grpo", 0.1, 20, "split:8+8,reference=4"),
        ("grpo", 0, 16, "split:8+8"),
    ],
)
def test_roll_s_roles_have_the_devices_of_their_maps(estimator: str, penalty: float, gpus: int, placement: str) -> None:
    found = read(ROLL.format(estimator, penalty), file="a.yaml").job
    assert (found.gpus, found.placement, found.staleness) == (gpus, placement, None)
