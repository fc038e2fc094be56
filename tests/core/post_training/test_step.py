"""Seconds of a step: phases add up, sides run at once, and what must hold whatever the model."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadgauge.core.base.errors import ConfigError, Error
from loadgauge.core.base.package_data import read_data
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.estimate import estimate
from loadgauge.core.plan.advise.task_fits import remedies
from loadgauge.core.plan.posttrain import (
    ALIKE,
    MOST,
    OLD,
    QUANTUM,
    Space,
    candidates,
    find_value,
    plain,
    plan_task,
    with_value,
)
from loadgauge.core.post_training.memory import memory
from loadgauge.core.post_training.step import SOFTWARE, forward_share, packed, server_of, step_time, timed
from loadgauge.core.post_training.sync import transfer
from loadgauge.core.resolve.posttrain import resolve_posttrain

JOB = Job(
    "qwen2.5-7b", task="grpo", gpu="h100-sxm5-80gb", gpus=8, zero=3, prompts=32, samples=8, prompt_len=512,
    answers="exp:800,4096", rollout="vllm:tp=2,utilization=0.6,sleep=1",
)  # fmt: skip


def seconds(job: Job) -> float:
    run, _ = resolve_posttrain(job)
    found, why = timed(run, memory(run))
    assert found is not None, why
    return found.step


def test_phases_on_one_set_of_gpus_add_up_to_the_step() -> None:
    found = step_time(resolve_posttrain(JOB)[0])
    assert sum(phase.seconds for phase in found.phases) == pytest.approx(found.step, rel=1e-12)
    assert found.low < found.step < found.high


def test_answers_are_decoding_and_each_prompt_once_times_the_factor_of_software() -> None:
    run, _ = resolve_posttrain(JOB)
    found = step_time(run)
    assert found.generation is not None
    assert found.prompts == pytest.approx(32 / 4 * server_of(run).prompts(512))
    phase = found.phases[0]
    assert phase.name == "generate"
    assert phase.seconds == pytest.approx(SOFTWARE * (found.generation.seconds + found.prompts))


def test_an_update_takes_what_training_takes_over_its_packed_tokens() -> None:
    run, _ = resolve_posttrain(JOB)
    member, lengths = run.trained, (run.sequences.answers.mean, run.sequences.answers.mean_square)
    layout, times = packed(run, member, member.layout.micro_batch * member.layout.seq_len, lengths, updates=True)
    trained = estimate(member.model, layout, member.training, run.gpu, member.cluster).time
    assert trained is not None
    update = next(one for one in step_time(run).phases if one.name == "update")
    assert update.seconds == pytest.approx(SOFTWARE * trained.step * times)


def test_two_sides_take_the_slower_one_and_what_both_wait_for() -> None:
    job = JOB.replace(gpus=16, placement="split:8+8", staleness=1, rollout="vllm:tp=2")
    found = step_time(resolve_posttrain(job)[0])
    both = sum(phase.seconds for phase in found.phases if phase.side == "both")
    assert found.step == pytest.approx(max(found.sides.values()) + both, rel=1e-12)
    assert found.bound == max(found.sides, key=found.sides.__getitem__)


def test_answers_that_may_be_older_hide_the_tail_and_never_slow_a_step() -> None:
    job = JOB.replace(gpus=16, placement="split:8+8", rollout="vllm:tp=2")
    steps = [step_time(resolve_posttrain(job.replace(staleness=age or None))[0]).step for age in (0, 1, 4)]
    assert steps[0] > steps[1] > steps[2]


def test_a_window_of_batches_is_a_queue_whose_batches_end_in_turn() -> None:
    """The slower side sets the pace: a producer with k batches on their way and a consumer, simulated."""
    draw = random.Random(1)
    for made, used, window in ((3.0, 2.0, 1), (2.0, 3.0, 2), (2.5, 2.5, 4)):
        ready: list[float] = []
        free, done, ends = 0.0, 0.0, []
        for number in range(400):
            begin = max(free, ends[number - window - 1] if number > window else 0.0)
            free = begin + made * draw.uniform(0.999, 1.001)
            ready.append(free)
            done = max(done, ready[number]) + used
            ends.append(done)
        assert ends[-1] / 400 == pytest.approx(max(made, used), rel=0.02)


def test_more_answers_or_a_slower_card_never_take_less() -> None:
    own = seconds(JOB)
    assert seconds(JOB.replace(samples=16)) > own
    assert seconds(JOB.replace(gpu="a100-sxm4-80gb")) > own
    assert seconds(JOB.replace(answers="exp:1600,8192")) > own
    assert seconds(JOB.replace(epochs=2)) > own


def test_packed_micro_batches_hold_every_token_and_pair_once() -> None:
    job = JOB.replace(zero=1, tp=2, framework="megatron", global_batch=64, micro_batch=1)
    run, _ = resolve_posttrain(job)
    answers, prompt = run.sequences.answers, run.sequences.prompt
    layout, times = packed(
        run, run.trained, 2 * run.trained.layout.seq_len, (answers.mean, answers.mean_square), updates=True
    )
    assert times == 4
    assert layout.tokens * layout.global_batch == pytest.approx(64 * (prompt + answers.mean))
    square = prompt**2 + 2 * prompt * answers.mean + answers.mean_square
    assert layout.pairs * layout.global_batch == pytest.approx(64 * square)
    assert layout.tokens <= 2 * run.trained.layout.seq_len


def test_a_forward_is_between_a_quarter_and_half_of_a_step() -> None:
    for recompute in (None, "full"):
        _, setup = resolve_posttrain(JOB.replace(recompute=recompute))
        time = estimate(setup.model, setup.layout, setup.training, setup.gpu, setup.cluster).time
        assert time is not None
        assert 0.2 < forward_share(time) < 0.45


def test_a_forward_s_share_by_hand() -> None:
    """All of its kernels, a third of the loss, of what ZeRO sends and of the host, half of what layers and stages send (a third
    with recomputation), and of the bubble what it is of the kernels."""
    parts = {
        "forward": 3.0, "backward": 6.0, "loss": 0.9, "tp": 1.2, "zero": 0.6, "pp": 0.4, "host": 0.3, "bubble": 1.8,
    }  # fmt: skip
    assert forward_share(SimpleNamespace(parts=parts, step=10.0)) == pytest.approx(0.50)  # type: ignore[arg-type]
    again = parts | {"recompute": 3.0}
    assert forward_share(SimpleNamespace(parts=again, step=10.0)) == pytest.approx(0.465)  # type: ignore[arg-type]


def test_shard_to_shard_takes_what_nemo_rl_states() -> None:
    """2.39 to 2.83 s for DeepSeek-V3 at TP 32 on H100 (nemo-rl, docs/design-docs/nccl-reshard-refit.md)."""
    job = Job(
        "deepseek-v3", task="grpo", gpu="h100-sxm5-80gb", gpus=512, prompts=64, samples=8, answers="512", prompt_len=128,
        rollout="vllm:tp=32", placement="split:256+256", zero=3,
    )  # fmt: skip
    assert 2.39 < transfer(resolve_posttrain(job)[0], "shard to shard").seconds < 2.83


def test_answers_cannot_be_old_on_the_same_gpus() -> None:
    with pytest.raises(ConfigError, match="staleness"):
        resolve_posttrain(JOB.replace(staleness=1))


@pytest.mark.slow
def test_the_plan_is_what_a_loop_over_estimates_finds() -> None:
    job = Job(
        "qwen3-1.7b",
        task="grpo",
        gpu="h100-sxm5-80gb",
        gpus=4,
        prompts=16,
        samples=8,
        prompt_len=256,
        answers="exp:600,2048",
    )
    space = Space.of(job, {
        "tp": (1, 2), "pp": (1,), "rollout_tp": (1, 2), "share": (0.6,), "micro_batch": (1, 4), "logprob_batch": (4,),
        "recompute": ("none", "full"),
    })  # fmt: skip
    found, one = plan_task(job, space).best, plain(job, space)
    assert found is not None
    assert one is not None
    assert found.job == one.job
    assert found.time.step == one.time.step
    assert found.memory == one.memory  # to the byte, phase by phase


SMALL_DPO = Job("qwen2.5-7b", task="dpo", gpu="h100-sxm5-80gb", gpus=4, global_batch=16)
NARROW = {"tp": (1, 2), "pp": (1, 2), "micro_batch": (1, 2), "recompute": ("none", "full")}


def test_a_task_that_generates_nothing_is_planned_as_a_loop_finds() -> None:
    space = Space.of(SMALL_DPO, NARROW)
    search, one = plan_task(SMALL_DPO, space), plain(SMALL_DPO, space)
    assert search.best is not None
    assert one is not None
    assert (search.best.job, search.best.time.step, search.best.memory) == (one.job, one.time.step, one.memory)


def test_the_longest_sequence_fits_and_a_longer_one_does_not() -> None:
    job = Job("mistral-7b", task="dpo", gpu="rtx4090", gpus=1, qlora=True)
    length = find_value(job, {}, "seq_len")
    assert length is not None
    for more, fits in ((0, True), (QUANTUM, False)):
        longer = job.replace(seq_len=length + more)
        assert (plan_task(longer, Space.of(longer, {})).best is not None) == fits
    full = SMALL_DPO.replace(gpus=None, global_batch=None)
    gpus = find_value(full, NARROW, "gpus")
    assert gpus is not None
    for number, fits in ((gpus, True), (gpus // 2, False)):
        of_them = full.replace(gpus=number)
        assert (plan_task(of_them, Space.of(of_them, NARROW)).best is not None) == fits


@pytest.mark.parametrize(("sought", "more"), [("micro_batch", 2), ("utilization", 0.01)])
def test_the_most_of_what_is_sought_fits_and_more_does_not(sought: str, more: float) -> None:
    """Of a micro-batch twice as much, of a share a hundredth more."""
    generates = sought == "utilization"
    job = JOB.replace(zero=None, rollout=None) if generates else SMALL_DPO
    locked = {"tp": (1,), "pp": (1,), "zero": (3,), "rollout_tp": (2,)} if generates else {"tp": (1, 2), "pp": (1, 2)}
    most = find_value(job, locked, sought)
    assert most is not None
    next_one = round(most + more, 2) if generates else most * more
    for value, fits in ((most, True), (next_one, False)):
        asked, axes = with_value(job, locked, sought, value)
        lean = {"recompute": ("full",), "micro_batch": (1,)} | ({"logprob_batch": (1,)} if generates else {}) | axes
        assert (plain(asked, Space.of(asked, lean)) is not None) == fits


@pytest.mark.parametrize(
    ("name", "answers", "expected"), [("qwen2.5-1.5b", "exp:1500,8192", 2), ("qwen2.5-7b", "2048", 0)]
)
def test_answers_are_no_older_than_the_step_needs(name: str, answers: str, expected: int) -> None:
    """With answers of many lengths the rollout hides once they are two updates old; alike ones may gain nothing by it."""
    job = Job(name, task="grpo", gpu="h100-sxm5-80gb", gpus=8, prompts=64, samples=8, prompt_len=512, answers=answers)
    axes = {"recompute": ("full",), "pp": (1,), "tp": (1,), "micro_batch": (4,), "logprob_batch": (4,), "share": (0.5,)}
    steps = {}
    for old in OLD:
        asked = job.replace(staleness=old or None)
        best = plain(asked, Space.of(asked, axes))
        assert best is not None
        steps[old] = best.time.step
    found = find_value(job, axes, "staleness")
    assert found == expected
    assert steps[found] <= min(steps.values()) * (1 + ALIKE)
    assert all(steps[old] > min(steps.values()) * (1 + ALIKE) for old in OLD if old < found)


def test_more_answers_to_a_prompt_need_little_memory_and_what_is_said_is_not_sought() -> None:
    job = JOB.replace(samples=None)
    assert find_value(job, {"tp": (1,), "pp": (1,), "zero": (3,)}, "samples") == MOST["samples"]
    for name, own in (("utilization", JOB), ("samples", JOB), ("micro_batch", JOB)):
        with pytest.raises(ConfigError, match=r"leave --.* out"):
            find_value(own, {"micro_batch": (1,)}, name)
    with pytest.raises(ConfigError, match="with --task dpo it is seq-len, micro-batch or gpus"):
        find_value(SMALL_DPO, {}, "samples")


def test_what_is_locked_is_loosened_before_anything_else() -> None:
    """One lock where that is enough, else one after another; each remedy is a run that fits."""
    job = Job("qwen2.5-7b", task="dpo", gpu="h100-sxm5-80gb", gpus=8, seq_len=8192, global_batch=64)
    locked: dict[str, tuple[object, ...]] = {"zero": (1,), "recompute": ("none",), "micro_batch": (8,)}
    assert next(each.flags for each in remedies(job, locked)) == "--micro-batch 1"
    (both, *_) = remedies(job, locked | {"tp": (1,), "pp": (1, 8)})
    assert both.flags.endswith("--micro-batch 1")
    assert both.words.count(",") >= 1
    for each in remedies(job, locked):
        assert each.choice.memory.verdict == "fits"


def test_what_makes_a_run_fit_is_said_before_more_gpus() -> None:
    job = Job("qwen2.5-7b", task="dpo", gpu="rtx4090", gpus=1, global_batch=8)
    assert plan_task(job, Space.of(job, {}), nearest=False).best is None
    rows = remedies(job, {})
    assert [row.flags for row in rows][-1].startswith("--gpus")
    assert "--qlora" in [row.flags for row in rows]
    for row in rows:
        run, _ = resolve_posttrain(row.choice.job)
        assert memory(run) == row.choice.memory
        assert row.choice.memory.verdict == "fits"


@pytest.mark.long
def test_where_nothing_fits_the_nearest_has_the_least_memory() -> None:
    """Of all candidates, each estimated by itself."""
    job = Job(
        "qwen2.5-7b", task="grpo", gpu="h100-sxm5-80gb", gpus=2, prompts=128, samples=8, prompt_len=1024, answers="4096"
    )
    space = Space.of(job, {
        "pp": (1, 2), "share": (0.5, 0.8), "micro_batch": (1, 8), "logprob_batch": (1, 16), "recompute": ("none", "full"),
    })  # fmt: skip
    needed = []
    for one in candidates(job, space):
        try:
            run = resolve_posttrain(one)[0]
            held = memory(run)
        except Error:
            continue
        if timed(run, held)[0] is not None:
            needed.append(held.decisive.high)
    found = plan_task(job, space)
    assert found.best is None
    assert found.nearest is not None
    assert found.nearest.memory.decisive.high == min(needed)
    assert found.looked < found.candidates / 3


@pytest.mark.slow
def test_why_no_candidate_is_a_run(tmp_path: Path) -> None:
    """Nothing says what joins 8 of a card of one's own; where all are refused alike, that reason is the whole answer."""
    card = read_data("gpus/h20-96gb.toml").replace("[link]", "[unread]").partition("[unread]")[0]
    (tmp_path / "mine.toml").write_text(card.replace("H20", "Mine"), encoding="utf-8")
    job = Job("qwen2.5-7b", task="grpo", gpu=str(tmp_path / "mine.toml"), gpus=8)
    with pytest.raises(ConfigError, match=r"no candidate of \d[\d,]* is a run; of [\d,]+ of them: what joins 8 x Mine"):
        plan_task(job, Space.of(job, {"tp": (1, 2), "pp": (1,)}))
    with pytest.raises(ConfigError, match=r"^'qwen2\.5-7x' is neither"):
        plan_task(job.replace(model="qwen2.5-7x"), Space.of(job, {"tp": (1,), "pp": (1,)}))


def test_options_of_an_engine_change_its_answers() -> None:
    def answers(options: str) -> float:
        run, _ = resolve_posttrain(JOB.replace(rollout=f"vllm:tp=2,utilization=0.6,sleep=1{options}"))
        return step_time(run, memory(run).engine.pool).phases[0].seconds  # type: ignore[union-attr]

    own = answers("")
    # 3.32 accepted tokens gave 2.03 times the speed of decoding (skyrl, spec_decode.mdx); prompts stay.
    assert own / 2.1 < answers(",accepted=3.32") < own / 1.9
    assert answers(",prefix=false") > own
    assert answers(",turns=4,tool=5") == pytest.approx(own + 15)
    assert answers(",graphs=false") > own


def test_answers_that_outgrow_the_cache_are_read_again() -> None:
    run, _ = resolve_posttrain(JOB)
    token = 2 * 28 * 4 * 128 * 2 / 2  # keys and values of a token on one of two ranks [bytes]
    wide, narrow = step_time(run, 1e12), step_time(run, 24 * 1200 * token)
    assert wide.preempted == 0
    assert narrow.preempted > 1
    assert narrow.phases[0].seconds > wide.phases[0].seconds


@pytest.mark.parametrize("options", ["tool=5", "accepted=0", "turns=0", "prefix=perhaps"])
def test_options_that_mean_nothing_are_refused(options: str) -> None:
    with pytest.raises(ConfigError, match="rollout"):
        resolve_posttrain(JOB.replace(rollout=f"vllm:{options}"))


@pytest.mark.parametrize(("task", "sequences"), [("sft", 1), ("dpo", 2), ("rm", 2)])
def test_without_answers_the_rate_is_that_of_training(task: str, sequences: int) -> None:
    # A pair is two sequences of the whole length.
    job = Job("qwen2.5-7b", task=task, gpu="h100-sxm5-80gb", gpus=8, zero=3, global_batch=16, seq_len=2048)
    found = step_time(resolve_posttrain(job)[0])
    assert found.tokens_per_second_per_gpu == pytest.approx(16 * sequences * 2048 / found.step / 8)
