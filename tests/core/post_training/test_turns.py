"""Answers of several turns: beside a loop over every turn, and what is read between two by hand."""

from __future__ import annotations

import heapq
import random
import statistics

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.post_training.answers import answers
from loadgauge.core.post_training.memory import memory
from loadgauge.core.post_training.step import StepTime, server_of, step_time
from loadgauge.core.post_training.tail import generation, in_turns
from loadgauge.core.resolve.posttrain import resolve_posttrain
from loadgauge.core.text.post_training.posttrain_time import lines
from loadgauge.job_files.exchange import read

JOB = Job(
    "qwen2.5-7b", task="grpo", gpu="h100-sxm5-80gb", gpus=8, zero=3, prompts=64, samples=8, prompt_len=512, answers="exp:1000,4096",
    rollout="vllm:tp=2,utilization=0.6,sleep=1",
)  # fmt: skip


def line(running: float, context: float) -> float:
    return 5e-3 + 1e-4 * running + 2e-8 * running * context


def looped(lengths: Lengths, n: int, slots: int, turns: int, wait: float, seed: int) -> float:
    """Seconds of n answers: a turn that ends leaves its slot, comes back after `wait`, and stands behind those that wait."""
    draw = random.Random(seed)
    at = sorted(draw.randrange(lengths.cumulative[-1]) for _ in range(n))
    drawn, index = [], 0
    for each in at:
        while lengths.cumulative[index] <= each:
            index += 1
        drawn.append(lengths.values[index])
    draw.shuffle(drawn)
    turn = [max(1, round(tokens / turns)) for tokens in drawn]
    left, done, context = list(turn), [0] * n, [200] * n
    queue, running, away, now = list(range(n)), [], [], 0.0
    while min(done) < turns:
        while away and away[0][0] <= now:
            queue.append(heapq.heappop(away)[1])
        while queue and len(running) < slots:
            running.append(queue.pop(0))
        if not running:
            now = away[0][0]
            continue
        jump = min(4, *(left[each] for each in running))
        now += jump * line(len(running), statistics.fmean(context[each] for each in running))
        for each in running:
            left[each], context[each] = left[each] - jump, context[each] + jump
        for each in [each for each in running if left[each] == 0]:
            running.remove(each)
            done[each], left[each] = done[each] + 1, turn[each]
            if done[each] < turns:
                heapq.heappush(away, (now + wait, each))
    return now


@pytest.mark.parametrize("law", ["exp:400,2000", "uniform:1000"])
@pytest.mark.parametrize(("n", "slots"), [(64, 64), (128, 32)])
@pytest.mark.parametrize(("turns", "wait"), [(4, 2.0), (8, 2.0), (4, 10.0)])
def test_turns_take_what_a_loop_over_every_turn_takes(law: str, n: int, slots: int, turns: int, wait: float) -> None:
    lengths, asked = answers(law), {"sequences": n, "slots": slots, "prompt": 200, "replicas": 1}
    plain = generation(lengths, line, **asked)  # type: ignore[arg-type]
    found = in_turns(plain, lengths, line, away=(turns - 1) * wait, **asked)  # type: ignore[arg-type]
    seen = statistics.fmean(looped(lengths, n, slots, turns, wait, seed) for seed in range(6))
    assert 0.93 < found.seconds / seen < 1.14
    # Slots are as busy as before.
    assert (1 - found.idle) * found.seconds == pytest.approx((1 - plain.idle) * plain.seconds)


def test_a_tool_that_takes_no_time_changes_nothing() -> None:
    lengths, asked = answers("exp:400,2000"), {"sequences": 128, "slots": 32, "prompt": 200, "replicas": 2}
    plain = generation(lengths, line, **asked)  # type: ignore[arg-type]
    assert in_turns(plain, lengths, line, away=0.0, **asked).seconds == pytest.approx(plain.seconds)  # type: ignore[arg-type]


def time_of(options: str, **flags: object) -> StepTime:
    run, _ = resolve_posttrain(JOB.replace(rollout=f"{JOB.rollout}{options}", **flags))
    card = memory(run).engine
    assert card is not None
    return step_time(run, card.pool)


def seconds(options: str) -> float:
    return time_of(options).phases[0].seconds


def test_what_is_observed_is_read_and_not_made() -> None:
    """Of an answer of 984 tokens in the mean, 5 x 100 are read: their prefill beside 48 % of the decoding."""
    run, _ = resolve_posttrain(JOB.replace(rollout=f"{JOB.rollout},turns=6,observed=100"))
    server, mean = server_of(run), run.sequences.answers.mean
    whole, part = time_of(""), time_of(",turns=6,observed=100")
    assert whole.generation is not None
    each = run.sequences.number / run.replicas / server.asked.attentions
    reads = 0.0
    for turn in range(1, 6):
        at = 512 + round(turn * mean / 6)
        reads += server.prompts(at + 100) - server.prompts(at)
    decoding = 1.30 * whole.generation.seconds
    own = whole.phases[0].seconds - decoding
    assert part.phases[0].seconds == pytest.approx(own + decoding * (1 - 500 / mean) + 1.30 * each * reads, rel=1e-3)
    assert part.phases[-3].seconds == whole.phases[-3].seconds  # the update is of all tokens


def test_without_its_blocks_every_turn_reads_all_before_it() -> None:
    kept, again = seconds(",turns=4"), seconds(",turns=4,prefix=false")
    plain = seconds(",prefix=false")
    assert kept == pytest.approx(seconds(""))
    run, _ = resolve_posttrain(JOB)
    server, mean = server_of(run), run.sequences.answers.mean
    reads = sum(server.prompts(512 + round(turn * mean / 4)) for turn in (1, 2, 3))
    assert again - plain == pytest.approx(1.30 * 512 / run.replicas * reads, rel=1e-3)


def test_many_turns_are_timed_by_eight() -> None:
    eight, nine = (seconds(f",turns={turns},observed=20") for turns in (9, 10))
    assert 0.97 < nine / eight < 1.03


def test_the_answer_says_what_is_trained_on() -> None:
    job = JOB.replace(rollout=f"{JOB.rollout},turns=6,tool=2,observed=100")
    run, _ = resolve_posttrain(job)
    text = " ".join(lines(run, step_time(run), job))
    assert (
        f"6 turns an answer, 2 s between two; {500 / run.sequences.answers.mean:.0%} of an answer is observed" in text
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("observed=5", "observed= is what is read between turns"),
        (
            "turns=11,observed=200",
            "11 turns and 200 tokens of each observation leave nothing of 984 tokens of an answer",
        ),
    ],
)
def test_observations_that_cannot_be_are_refused(options: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_posttrain(JOB.replace(rollout=f"vllm:{options}"))


VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 data.max_response_length=4096"
    " actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.ppo_mini_batch_size=64 {}"
)
ROLL = """pretrain: Qwen/Qwen2.5-7B
adv_estimator: grpo
rollout_batch_size: 64
sequence_length: 8192
prompt_length: 1024
max_actions_per_traj: 10
max_tokens_per_step: 512
train_env_manager: {group_size: 8}
actor_train:
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
actor_infer: {strategy_args: {strategy_name: vllm}, device_mapping: "list(range(0,8))"}
"""


def test_turns_of_files() -> None:
    """verl limits what a tool says by characters; ROLL what a turn makes, of a trajectory as long as a sequence."""
    many = "actor_rollout_ref.rollout.multi_turn."
    on = f"{many}enable=True {many}max_assistant_turns=5 {many}max_tool_response_length=1000"
    assert "turns=5,observed=250" in str(read(VERL.format(on), file="a.sh").job.rollout)
    assert "turns" not in str(read(VERL.format(f"{many}max_assistant_turns=5"), file="a.sh").job.rollout)
    # 8,192 - 1,024 - 10 x 512 tokens in 9 parts.
    assert f"turns=10,observed={(8192 - 1024 - 5120) // 9}" in str(read(ROLL, file="a.yaml").job.rollout)
    narrow = ROLL.replace("step: 512", "step: 1024")
    assert "turns=10" in str(read(narrow, file="a.yaml").job.rollout)
    assert "observed" not in str(read(narrow, file="a.yaml").job.rollout)
