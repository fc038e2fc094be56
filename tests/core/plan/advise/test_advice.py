"""What is advised when a run does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import loadgauge.core.plan.advise.assumptions as advised
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.plan.advise.advice import DEAR, advice
from loadgauge.core.plan.advise.assumptions import assumptions
from loadgauge.core.plan.advise.try_ import effort
from loadgauge.core.resolve.resolve import resolve_job


def test_zero_shards_over_context_parallel_ranks_too() -> None:
    """One replica whose ranks share the sequence: they hold the same weights, so ZeRO can share those out."""
    given = resolve_job(Job(model="llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, cp=8, seq_len=32768, loss="chunked"))
    assert given.layout.dp == 1
    assert given.estimate().memory.fits is False
    found = {change.flags: change.result for change in advice(given)}
    assert {"--zero 1", "--zero 3"} <= set(found)
    assert all(result.memory.verdict != "does not fit" for result in found.values())


def test_what_fits_precedes_what_is_tight() -> None:
    given = resolve_job(Job(model="llama-3.1-70b", gpu="h100-sxm5-80gb", gpus=16, tp=8, global_batch=32))
    verdicts = [change.result.memory.verdict for change in advice(given)]
    assert set(verdicts) == {"fits", "tight"}
    assert verdicts == sorted(verdicts)


def test_an_alternative_changes_what_its_flag_changes() -> None:
    job = Job(model="llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, seq_len=8192)
    setup = resolve_job(job)
    result = setup.estimate()
    rows = {row.alternative: row for row in assumptions(setup, result)}
    assert set(rows) == {"--attention eager", "--attention fa2", "--loss fused"}
    for flag, changed in (
        ("--attention eager", job.replace(attention="eager")),
        ("--attention fa2", job.replace(attention="fa2")),
        ("--loss fused", job.replace(loss="fused")),
    ):
        other = resolve_job(changed).estimate()
        assert rows[flag].memory == other.memory.total - result.memory.total
        assert result.time is not None
        assert other.time is not None
        assert rows[flag].step == other.time.step - result.time.step


def test_what_is_assumed_is_said_where_that_alone_is_in_the_way() -> None:
    """transformers 4 loads float32, 5 what the checkpoint has: full recomputation fits with one, not with the other."""
    given = resolve_job(Job(model="mistral-7b", gpu="rtx3090", lora_rank=16, seq_len=2048))
    assert given.estimate().memory.verdict == "does not fit"
    first = advice(given)[0]
    assert (first.flags, first.result.memory.verdict) == ("--recompute full --weights bfloat16", "fits")
    assert resolve_job(first.job).estimate().memory.fits
    assert resolve_job(given.job.replace(recompute="full")).estimate().memory.verdict == "depends"


def test_the_same_adapters_on_the_same_card_by_unsloth() -> None:
    given = resolve_job(Job(model="qwen3-8b", gpu="rtx3060-12gb", qlora=True))
    first = advice(given)[0]
    assert (first.flags, first.result.memory.verdict) == ("--framework unsloth", "fits")
    two = resolve_job(Job(model="qwen3-8b", gpu="rtx3060-12gb", qlora=True, gpus=2))
    assert not any("unsloth" in trial.flags for trial in advice(two))


def test_experts_that_transformers_leaves_in_16_bits_are_advised_by_unsloth_in_4() -> None:
    """Unsloth's own page has 65 GB for it; the fewest GPUs are those on which it fits as assumed."""
    more, unsloth = advice(resolve_job(Job(model="gpt-oss-120b", gpu="h100-sxm5-80gb", lora_rank=8)))
    assert (unsloth.flags, unsloth.result.memory.verdict) == ("--framework unsloth --qlora", "tight")
    assert 60e9 < unsloth.result.memory.allocated < 80e9
    assert more.result.memory.verdict == "fits"
    half = resolve_job(more.job.replace(gpus=more.job.gpus // 2, global_batch=None)).estimate()
    assert half.memory.verdict != "fits"


def test_full_training_on_one_card_is_advised_as_adapters_before_a_cluster() -> None:
    first, *others = advice(resolve_job(Job(model="qwen3-8b", gpu="rtx4090")))
    assert (first.job.qlora, first.job.framework, first.job.gpus) == (True, "unsloth", None)
    assert others[-1].job.gpus >= 8


def test_shorter_sequences_are_advised_where_nothing_else_fits() -> None:
    given = resolve_job(Job(model="qwen2.5-14b", gpu="rtx3090", qlora=True, framework="unsloth", seq_len=1 << 19))
    shorter = next(trial for trial in advice(given) if "--seq-len" in trial.flags)
    assert shorter.result.memory.fits
    longer = resolve_job(shorter.job.replace(seq_len=2 * shorter.job.seq_len))
    assert not longer.estimate().memory.fits


def test_experts_that_are_not_quantised_are_reported() -> None:
    """bitsandbytes finds no `nn.Linear` in transformers 5's experts; in those of transformers 4 it does."""
    job = Job(model="qwen3-30b-a3b", gpu="rtx4090", qlora=True)
    setup = resolve_job(job)
    result = setup.estimate()
    row = next(row for row in assumptions(setup, result) if row.name == "--version")
    older = resolve_job(job.replace(version="transformers=4.57")).estimate()
    assert row.memory == older.memory.total - result.memory.total
    assert row.memory < -0.5 * result.memory.total
    given = resolve_job(job.replace(version="transformers=5.2"))
    assert "--version" not in {row.name for row in assumptions(given, given.estimate())}


def test_an_unfused_optimizer_step_is_reported_where_it_is_the_peak() -> None:
    """Little is kept for backward here: the step's temporaries, a copy of the weights, decide the peak."""
    setup = resolve_job(
        Job(model="llama-3.2-1b", gpu="h100-sxm5-80gb", seq_len=16, precision="bf16-pure", loss="fused")
    )
    rows = {row.name: row.memory for row in assumptions(setup, setup.estimate())}
    assert rows["optimizer step"] > 0
    given = resolve_job(Job(model="llama-3.2-1b", gpu="h100-sxm5-80gb", framework="megatron"))
    assert "optimizer step" not in {row.name for row in assumptions(given, given.estimate())}


def test_what_was_given_is_not_assumed() -> None:
    given = resolve_job(Job(model="gpt2", gpu="rtx4090", attention="flash", loss="float32", framework="megatron"))
    assert not assumptions(given, given.estimate())


def test_that_peft_may_adapt_experts_is_named() -> None:
    """PEFT adds the adapters of experts to their matrices, and keeps the sums: those of Mixtral's 32 layers, in 16 bits."""
    job = Job("mixtral-8x7b", gpu="b200", gpus=8, zero=3, lora_rank=16, seq_len=2048, framework="huggingface")
    setup = resolve_job(job)
    row = next(row for row in assumptions(setup, setup.estimate()) if row.name == "--lora-targets")
    idle = 1 + setup.estimate().memory.margins.held  # what the allocator holds of more grows with it
    assert row.memory == pytest.approx(2 * 32 * 8 * 3 * 4096 * 14336 * idle, rel=0.08)
    for other in (
        job.replace(model="llama-3.1-8b"),
        job.replace(lora_targets="all"),
        job.replace(version="transformers=4.57"),
    ):
        given = resolve_job(other)
        assert "--lora-targets" not in {row.name for row in assumptions(given, given.estimate())}


def test_of_smaller_micro_batches_the_largest_that_fits_is_advised() -> None:
    job = Job("gpt2", gpu="h100-sxm5-80gb", gpus=8, micro_batch=64)
    sizes = [change.fields["micro_batch"] for change in advice(resolve_job(job)) if "micro_batch" in change.fields]
    fitting = [
        size for size in (32, 16, 8, 4, 2, 1) if resolve_job(job.replace(micro_batch=size)).estimate().memory.fits
    ]
    assert sizes[0] == fitting[0] > 1


def test_what_makes_a_run_many_times_slower_comes_after_what_does_not() -> None:
    words = {"gpu": "a100-sxm4-40gb", "gpus": 4096, "tp": 8, "pp": 8, "zero": 1, "global_batch": 2048, "seq_len": 2048}
    setup = resolve_job(Job("falcon-180b", **words))
    first = advice(setup)[0].result
    assert first.memory.fits
    assert first.time.step < 2 * setup.estimate().time.step


def test_what_another_job_or_more_cards_would_do_comes_after_what_this_one_can() -> None:
    """Full training of 8B on a card: 8-bit states and recomputation, not host memory, GPUs or adapters."""
    first = advice(resolve_job(Job("llama-3.1-8b", gpu="h100-sxm5-80gb")))[0]
    assert first.result.memory.fits
    assert not first.fields.keys() & {"gpus", "qlora", "offload", "seq_len"}
    apple = advice(resolve_job(Job("llama-3.1-8b", gpu="m3-max-36gb", adapter="lora")))
    assert not any("unsloth" in trial.flags for trial in apple)


def test_alternatives_capture_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    own = SimpleNamespace(most=8)
    monkeypatch.setattr(advised, "_alternatives", lambda _: seen.append(own.most) or iter(()))
    assert advised.assumptions(SimpleNamespace(model=SimpleNamespace(listed=own)), SimpleNamespace()) == []  # type: ignore[arg-type]
    assert (seen, own.most) == ([0], 8)


def test_what_takes_many_times_as_long_does_not_come_before_what_takes_less() -> None:
    """A mixture on one node fits with splits and states on the host, in fifty times the time: adapters and more GPUs come first."""
    setup = resolve_job(Job("mixtral-8x7b", gpu="h100-sxm5-80gb", gpus=8, zero=3))
    trials = advice(setup)
    assert trials[0].result.memory.fits
    assert effort(trials[0].result, setup.estimate()) < DEAR[0]
