"""How the estimate of memory moves when one size of a job moves, over random valid jobs of the shipped models.

Exceptions are named where they are: each is how a framework behaves, with its reason.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from loadgauge import Layout, RecomputePolicy, estimate, model
from loadgauge.core.base.errors import NotModelled
from loadgauge.core.definitions.layout.layout import Schedule
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
from loadgauge.core.definitions.training.training import Training, training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.phases import moments
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.schedule.stages import stages

MODELS = (
    "llama-3.2-1b", "llama-3.1-8b", "gpt2", "qwen3-8b", "gemma-2-9b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3",
    "olmo-2-32b", "bloom-560m", "bert-base", "llama-4-scout", "falcon-h1-34b", "nemotron-h-8b", "mamba2-2.7b", "kimi-k2",
)  # fmt: skip

STATES = ("weights", "gradients", "optimizer")
LESS_TO_MORE = ("none", "full:every=2", "full")
deterministic = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@functools.cache
def spec(name: str) -> ModelSpec:
    """The first layers of a shipped model, which run through all its kinds of layers."""
    whole = model(name)
    every = max(whole.pattern.index(kind) for kind in set(whole.pattern)) + 1
    layers = min(whole.num_hidden_layers, max(8, -(-every // 4) * 4))
    return msgspec.structs.replace(whole, pattern=whole.pattern[:layers])


@dataclass(frozen=True)
class Job:
    """A random job that can exist."""

    model: ModelSpec
    layout: Layout
    how: Training

    def but(self, **sizes: object) -> Job:
        """The same with other sizes; not tried where it cannot exist."""
        layout = msgspec.structs.replace(self.layout, **sizes)
        assume(not layout.valid(self.model))
        return Job(self.model, layout, self.how)

    @functools.cached_property
    def estimate(self) -> Estimate:
        return estimate(self.model, self.layout, self.how)

    @property
    def peak(self) -> float:
        return self.estimate.memory.total

    @property
    def states(self) -> list[float]:
        """Model states of each stage."""
        facts = MemoryModel(self.model, self.layout, self.how, view_of(self.layout, self.how))
        return [
            facts.states(facts.weights(facts.counts(stage, stage.start, stage.stop)) + facts.ends(stage)).total
            for stage in stages(self.model, self.layout)
        ]

    @property
    def kept(self) -> list[float]:
        """What each stage keeps of one micro-batch from forward to backward."""
        facts = MemoryModel(self.model, self.layout, self.how, view_of(self.layout, self.how))
        return [
            sum(facts.of_layers(facts.counts(stage, chunk.start, chunk.stop)).kept for chunk in stage.chunks)
            for stage in stages(self.model, self.layout)
        ]


@st.composite
def jobs(draw: st.DrawFn, frameworks: tuple[str, ...] = tuple(FRAMEWORKS)) -> Job:
    which = spec(draw(st.sampled_from(MODELS)))
    framework = draw(st.sampled_from(frameworks))
    parallel = framework in ("megatron", "torchtitan")
    few = st.sampled_from([1, 2])
    tp, pp, cp = (draw(few) if parallel else 1 for _ in range(3))
    dp, batch = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 2]))
    schedule: Schedule = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])) if pp > 1 else "1f1b"
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=draw(st.sampled_from([1, dp])), zero=draw(st.integers(0, 3)),
        sequence_parallel=tp > 1 and draw(st.booleans()), micro_batch=batch, schedule=schedule,
        global_batch=batch * dp * draw(st.sampled_from([1, 4])), seq_len=draw(st.sampled_from([128, 512])),
        recompute=RecomputePolicy.parse(draw(st.sampled_from(["none", "selective", "full"]))),
    )  # fmt: skip
    assume(not layout.valid(which))
    how = training(
        framework, draw(st.sampled_from(["bf16", "fp32", "bf16-pure", "bf16-autocast"])),
        draw(st.sampled_from(["adamw", "adamw-8bit", "adafactor", "sgd"])),
        draw(st.sampled_from(["flash", "eager"])) if cp == 1 else "flash",
        lora=draw(st.sampled_from([None, None, Lora(rank=16)])), offload=draw(st.sampled_from(["none", "none", "all"])),
    )  # fmt: skip
    try:
        MemoryModel(which, layout, how, view_of(layout, how))
    except NotModelled:
        assume(False)
    return Job(which, layout, how)


@deterministic
@given(jobs())
def test_parts_moments_and_range(job: Job) -> None:
    memory = job.estimate.memory
    assert sum(memory.parts.values()) == pytest.approx(memory.total)
    assert memory.total == pytest.approx(max(moment.total for moment in memory.moments))
    assert memory.low <= memory.total <= memory.high
    for moment in memory.moments:
        assert moment.total == pytest.approx(sum(moment.parts.values()))
        assert all(nbytes >= -1e-6 for nbytes in moment.parts.values()), moment


@deterministic
@given(jobs(), st.sampled_from(["micro_batch", "seq_len"]))
def test_a_larger_batch_or_longer_sequence_needs_no_less(job: Job, size: str) -> None:
    changes = {size: 2 * getattr(job.layout, size)}
    if size == "micro_batch":
        changes["global_batch"] = 2 * job.layout.global_batch  # as many micro-batches
    assert job.but(**changes).peak >= job.peak


@deterministic
@given(jobs())
def test_more_layers_need_no_less(job: Job) -> None:
    more = msgspec.structs.replace(job.model, pattern=2 * job.model.pattern)
    assume(not job.layout.valid(more))
    assert Job(more, job.layout, job.how).peak >= job.peak


@deterministic
@given(jobs())
def test_model_states_never_rise_with_the_zero_stage(job: Job) -> None:
    assume(job.layout.replicas == 1)
    stages = [job.but(zero=zero).states for zero in range(4)]
    for less, more in pairwise(stages):
        assert all(after <= before for before, after in zip(less, more, strict=True))


@deterministic
@given(jobs())
def test_the_peak_falls_with_the_zero_stage_but_where_copies_stand_beside_the_shards(job: Job) -> None:
    """A stage may need as much more as it holds in copies that the stage before has not: what FSDP gathers beside its
    shards, DeepSpeed's buckets and live parameters, Megatron-FSDP's layers. It never needs more than these. (In one
    recipe: accelerate makes float32 of 16-bit weights before it shards them.)"""
    assume(job.how.by_sharding is None)
    found = [job.but(zero=zero).estimate.memory for zero in range(4)]
    for before, after in pairwise(found):
        copies = max(moment.parts["gathered"] + moment.parts["transient"] for moment in after.moments)
        assert after.total - after.parts["outside"] <= before.total - before.parts["outside"] + copies


@deterministic
@given(jobs())
def test_fully_sharding_frees_what_stage_2_keeps_gathered(job: Job) -> None:
    """FSDP's stage 3 holds the same shards as its stage 2 and gathers no more, at any moment.

    (DeepSpeed's and Megatron's hold shards beside what they gather, and so more than stage 2 of a small model.)
    """
    assume(job.how.framework.fully_shards)
    assert job.but(zero=3).peak <= job.but(zero=2).peak * (1 + 1e-9)


@deterministic
@given(jobs())
def test_more_recomputation_keeps_no_more(job: Job) -> None:
    """What is kept. The peak may rise a little: a layer that runs again is whole at once, while one that does not gives
    back its MLP before its attention begins (PyTorch's trace has it too: `test_recomputation_can_raise_the_peak_of_few_layers`)."""
    found = [job.but(recompute=RecomputePolicy.parse(mode)).kept for mode in LESS_TO_MORE]
    for less, more in pairwise(found):
        assert all(after <= before for before, after in zip(less, more, strict=True))


@deterministic
@given(jobs())
def test_more_micro_batches_need_no_less(job: Job) -> None:
    """1F1B and GPipe: with more micro-batches no fewer are in flight, and gradients are added to those that are there.

    Where gradients come with backward that is in place, so that a layer's own need not all be there at once: a little less
    where the first ones are not in the way.
    """
    assume(job.layout.schedule in ("1f1b", "gpipe"))
    assume(job.how.precision.casts != "fsdp" or job.layout.zero_ranks > 1)  # what FSDP casts is of shards
    in_place = 1e-9 if job.how.framework.gradients_persist else 0.03
    assert job.but(global_batch=2 * job.layout.global_batch).peak >= job.peak * (1 - in_place)


@settings(deterministic, max_examples=25)
@given(jobs())
def test_layouts_read_together_are_each_as_alone(job: Job) -> None:
    """Micro-batches of 1, 2 and 4, as floating-point arrays."""
    layout = msgspec.structs.replace(job.layout, schedule="1f1b")
    columns = {"micro_batch": [1, 2, 4], "dp": [2, 8, 4], "global_batch": [8, 64, 64]}
    layout = msgspec.structs.replace(layout, ep=1)

    def totals(sizes: dict[str, object]) -> list[object]:
        one = msgspec.structs.replace(layout, **sizes)
        facts = MemoryModel(job.model, one, job.how, view_of(one, job.how))
        return [moment.total for stage in stages(job.model, one) for moment in moments(facts, stage)]

    together = totals({name: np.array(column, float) for name, column in columns.items()})
    for index in range(3):
        alone = totals({name: column[index] for name, column in columns.items()})
        for whole, one in zip(together, alone, strict=True):
            assert np.broadcast_to(whole, (3,))[index] == pytest.approx(one, rel=1e-9)
