"""What a stage holds in flight, in bytes: against the order of work itself, and against the papers' own accounting."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from loadgauge import Layout
from loadgauge.core.definitions.layout.layout import SCHEDULES, V_SHAPED, RecomputePolicy, Schedule
from loadgauge.core.definitions.model.kernels import PAPER, Kernels
from loadgauge.core.definitions.model.model import Mlp, ModelSpec, Norm
from loadgauge.core.definitions.training.training import Training, training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.in_flight import Flight, pending_wgrad, works
from loadgauge.core.estimate.memory.liveness import backward_peak
from loadgauge.core.estimate.memory.phases import moments
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, Stage, stages
from loadgauge.core.estimate.schedule.simulate import Order, order_of_work
from loadgauge.core.families.reference import deepseek_block, gpt_model, llama_block
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.feed_forward.mlp import mlp
from loadgauge.core.layers.operations.builder import Builder
from orders import most_in_flight
from strategies import Sizes, kernels, kinds, sizes

HIDDEN, LENGTH = 256, 128


@st.composite
def pipelines(draw: st.DrawFn, schedules: tuple[Schedule, ...] = SCHEDULES) -> Layout:
    schedule = draw(st.sampled_from(schedules))
    stages, batches, vpp = draw(st.integers(1, 6)), draw(st.integers(1, 70)), 1
    if schedule == "interleaved":
        stages, vpp = stages + 1, draw(st.integers(2, 4))
        batches = stages * draw(st.integers(1, 12))
    elif schedule.startswith("dual"):
        stages = 2 * draw(st.integers(1, 3))
        batches = 2 * stages + 2 * draw(st.integers(0, 30))
    return Layout(pp=stages, vpp=vpp, global_batch=batches, seq_len=LENGTH, schedule=schedule)


def total(flight: Flight, sizes: list[int], kept: Fraction) -> Fraction:
    return sum((size * (whole + kept * waits) for size, whole, waits in zip(sizes, *flight, strict=True)), Fraction(0))


@settings(max_examples=300, deadline=None)
@given(pipelines(), st.fractions(0, 1, max_denominator=8), st.data())
def test_the_fullest_moment_is_that_of_the_order_of_work(layout: Layout, kept: Fraction, data: st.DataObject) -> None:
    """For any bytes of a micro-batch on each chunk; `most_in_flight` adds them up a second way, to the last batch."""
    chunks = layout.vpp if layout.schedule == "interleaved" else None
    order = order_of_work(layout.schedule, layout.pp, layout.num_microbatches, chunks)
    each = st.lists(st.integers(0, 9), min_size=layout.chunks, max_size=layout.chunks)
    sizes = data.draw(st.lists(each, min_size=layout.pp, max_size=layout.pp))
    held = [max(total(work.flight, own, kept) for work in works(layout, n)) for n, own in enumerate(sizes)]
    assert tuple(held) == most_in_flight(order, sizes, kept)


@settings(max_examples=100, deadline=None)
@given(pipelines())
def test_every_chunk_works_forward_and_backward_with_its_micro_batch_there(layout: Layout) -> None:
    for stage in range(layout.pp):
        found = works(layout, stage)
        assert {(work.forward, work.chunk) for work in found} == {
            (way, chunk) for way in (True, False) for chunk in range(layout.chunks)
        }
        assert all(work.flight.whole[work.chunk] >= 1 for work in found)
        assert any(work.splits for work in found) == layout.splits_backward or layout.schedule.startswith("dual")


# -- in bytes ----------------------------------------------------------------------------------------------------------


def papers_training() -> Training:
    return msgspec.structs.replace(training("megatron"), kernels=PAPER)


def peaks(model: ModelSpec, layout: Layout, how: Training) -> list[dict[str, float]]:
    """The largest of each part on each stage."""
    facts = MemoryModel(model, layout, how, view_of(layout, how))
    return [
        {part: max(moment.parts[part] for moment in moments(facts, stage)) for part in ("activations", "weights")}
        for stage in stages(model, layout)
    ]


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zero_bubble_schedules_hold_what_their_paper_says(p: int) -> None:
    """qi2024, section 2: stage i of ZB-H1 holds (p - i + 1) M_B + (i - 1) M_W, of ZB-H2 twice as many less one;
    M_B = s b h (34 + 5 a s / h) and M_W = 32 s b h of a GPT layer (table 1).
    """
    a, h, s, layers = 8, 512, 1024, 2
    model = gpt_model(layers * p, h, a, 1000)
    m_b, m_w = layers * s * h * (34 + 5 * a * s // h), layers * 32 * s * h
    embedding = s * h  # the mask of its dropout, on the first stage until the end of B
    for schedule, factor in (("zb-h1", 1), ("zb-2p", 2)):
        layout = Layout(pp=p, global_batch=6 * p, seq_len=s, schedule=schedule)  # type: ignore[arg-type]
        found = [stage["activations"] for stage in peaks(model, layout, papers_training())]
        for i, held in enumerate(found, 1):
            whole, waiting = factor * (p - i) + 1, factor * (i - 1)
            assert held == whole * (m_b + (embedding if i == 1 else 0)) + waiting * m_w


def mixed(layers: int, dense: int) -> ModelSpec:
    """Some dense layers, then some with experts."""
    first = llama_block(HIDDEN, 4, 4, 64, 512)
    second = deepseek_block(HIDDEN, 4, None, 64, 64, 32, 64, 8, 2, 64, 128)
    return ModelSpec(
        name="mixed", model_type="mixed", hidden_size=HIDDEN, vocab_size=1024, blocks=(first, second),
        pattern=(0,) * dense + (1,) * (layers - dense), final_norm=Norm("rmsnorm"), tie_word_embeddings=True,
    )  # fmt: skip


def model_for(layout: Layout, times: int, dense: int) -> ModelSpec:
    layers = layout.pp * layout.chunks * times
    return mixed(layers, min(dense, layers - 1))


@settings(max_examples=100, deadline=None)
@given(pipelines(), st.integers(1, 2), st.integers(1, 5))
def test_the_stages_together_hold_the_model_or_two(layout: Layout, times: int, dense: int) -> None:
    model = model_for(layout, times, dense)
    how = training("megatron")
    facts = MemoryModel(model, layout, how, view_of(layout, how))
    layers: Counter[int] = Counter()
    tables = parameters = 0
    for stage in stages(model, layout):
        counts = facts.counts(stage, stage.start, stage.stop)
        layers.update({key[0]: count for key, count in counts.items()})
        parameters += (facts.weights(counts) + facts.ends(stage)).total
        tables += sum(
            weight.numel // (model.vocab_size * HIDDEN)
            for layer, here in ((facts.embedding, stage.first), (facts.head, stage.last))
            if here
            for weight in layer.weights
        )
    assert [layers[kind] for kind in (0, 1)] == [layout.copies * count for count in model.layer_counts()]
    whole = MemoryModel(model, Layout(seq_len=LENGTH), how, view_of(Layout(seq_len=LENGTH), how))
    alone = stages(model, Layout(seq_len=1))[0]
    once = (whole.weights(whole.counts(alone, alone.start, alone.stop)) + whole.ends(alone)).total
    # The table that both ends share is there once where one stage has both, and twice where two stages have one each.
    ends = {"dualpipe": 2}.get(layout.schedule, 1 if layout.pp == 1 or layout.schedule in V_SHAPED else 2)
    assert tables == ends
    assert parameters == layout.copies * once + (tables - layout.copies) * model.vocab_size * HIDDEN


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.sampled_from(["none", "selective", "full"]), st.sampled_from(["megatron", "huggingface"]))
def test_no_moment_holds_less_than_nothing(layout: Layout, recompute: str, framework: str) -> None:
    model = model_for(layout, 1, 3)
    layout = msgspec.structs.replace(layout, recompute=RecomputePolicy.parse(recompute))
    how = training(framework)
    facts = MemoryModel(model, layout, how, view_of(layout, how))
    for stage in stages(model, layout):
        found = list(moments(facts, stage))
        assert all(value >= 0 for moment in found for value in moment.parts.values())
        assert {"loss" in moment.name for moment in found} == ({True, False} if stage.last else {False})


def walked(facts: MemoryModel, stage: Stage, order: Order) -> int:
    """The most that a stage holds for backward, its work walked through layer by layer and batch by batch."""
    delayed = facts.view.kernels.loss != "chunked"
    ends = (facts.embedding.saved(), facts.head_kept, pending_wgrad(facts.head) if delayed else 0)

    def parts(chunk: int) -> list[tuple[int, int]]:
        """What each of a chunk's layers keeps, and what of it waits; first of the embedding, last of the head."""
        own = stage.chunks[chunk]
        places = range(own.start, own.stop)
        layers = [facts.facts[stage.kind(place), facts.repeated(stage, place)] for place in places]
        first = (facts.shared + (ends[0] if own.first else 0), 0)
        return [first, *((one.kept, one.waiting) for one in layers), ends[1:] if own.last else (0, 0)]

    each = [parts(chunk) for chunk in range(len(stage.chunks))]
    alive: Counter[tuple[int, int]] = Counter()
    most = 0
    for work in order.work(stage.index):
        place, layers = (work.chunk, work.microbatch), each[work.chunk]
        if work.kind == "F":
            alive[place] = sum(kept for kept, _ in layers[:-1])  # the head has its own moment
            most = max(most, alive.total())
            alive[place] += layers[-1][0]
        elif work.kind == "W":
            del alive[place]
        else:
            at_moments = [stage.chunks[work.chunk].first, *(True for _ in layers[1:-1]), False]
            for (kept, waits), is_moment in reversed([*zip(layers, at_moments, strict=True)]):
                if is_moment:
                    most = max(most, alive.total())
                alive[place] += (waits if work.kind == "B" else 0) - kept
    assert not alive.total()
    return most


@settings(max_examples=150, deadline=None)
@given(pipelines(), st.integers(1, 5), st.sampled_from(["auto", "chunked"]), st.sampled_from(["none", "full"]))
def test_what_is_held_is_what_a_walk_through_the_work_finds(layout: Layout, dense: int, loss: str, again: str) -> None:
    model = model_for(layout, 1, dense)
    layout = msgspec.structs.replace(layout, recompute=RecomputePolicy.parse(again))
    how = training("megatron", loss=loss)
    facts = MemoryModel(model, layout, how, view_of(layout, how))
    chunks = layout.vpp if layout.schedule == "interleaved" else None
    order = order_of_work(layout.schedule, layout.pp, layout.num_microbatches, chunks, facts.put_off)
    for stage in stages(model, layout):
        found = [m for m in moments(facts, stage) if m.name not in ("loss", "optimizer step")]
        assert max(m.parts["activations"] + m.parts["loss"] for m in found) == walked(facts, stage, order)


@settings(max_examples=60, deadline=None)
@given(sizes(), kinds, kernels)
def test_a_split_backward_ends_with_what_waits(size: Sizes, kind: str, how: Kernels) -> None:
    """The input of every matrix, and its output's gradient; the working set is never smaller for it."""
    layer = block_layer(size.block(kind), size.h, View.of(size.s, size.b, tp=size.t, kernels=how))
    split, whole = backward_peak(layer, split=True), backward_peak(layer)
    products = [operation for operation in layer if operation.kind == "gemm" and operation.weights]
    inputs = {tensor.name: tensor.nbytes for operation in products for tensor in operation.keeps}
    outputs = {operation.outputs[0].name: operation.outputs[0].nbytes for operation in products}
    assert pending_wgrad(layer) == sum(inputs.values()) + sum(outputs.values())
    assert split >= whole


def test_a_split_backward_by_hand() -> None:
    """Two matrices with an activation between them; at the activation's backward the most is alive."""
    tokens, hidden, wide = 96, 32, 80
    build = Builder(View.of(tokens, 1, kernels=Kernels(activation="unfused")))
    mlp(build, build.tensor("x", tokens * hidden), Mlp(intermediate_size=wide, gated=False, activation="gelu"), hidden)
    layer = build.layer("mlp")
    narrow, broad = 2 * tokens * hidden, 2 * tokens * wide
    # x and the output's gradient; the activation, its input and the gradients of both.
    assert backward_peak(layer, split=True) == 2 * narrow + 4 * broad
    # Whole, the output's gradient is gone by then, and when it is there that of the activation's input is not.
    assert backward_peak(layer) == 2 * narrow + 3 * broad
    assert pending_wgrad(layer) == 2 * narrow + 2 * broad


def test_what_waits_for_a_product_in_8_bits_is_quantised() -> None:
    """Its input and the gradient of its output, a byte an element and a float32 scale for every 128 of a column."""
    tokens, hidden, wide = 256, 128, 384
    low = training("megatron", "fp8-blockwise").kernels.products
    build = Builder(View.of(tokens, 1, kernels=Kernels(activation="fused")), low=low)
    mlp(build, build.tensor("x", tokens * hidden), Mlp(intermediate_size=wide, gated=False, activation="gelu"), hidden)
    elements = 2 * tokens * (hidden + wide)
    assert pending_wgrad(build.layer("mlp")) == elements * (1 + 4 / 128)


@given(
    st.lists(st.integers(0, 2), max_size=12),
    st.sampled_from(["none", "full", "full:every=2", "full:every=3", "full:layers=1", "full:layers=5"]),
    st.integers(0, 50),
    st.data(),
)
def test_layers_are_counted_as_they_come(kinds: list[int], again: str, begin: int, data: st.DataObject) -> None:
    policy = RecomputePolicy.parse(again)
    stage = Stage(0, begin, begin + len(kinds), True, True, tuple(kinds), ())
    start = begin + data.draw(st.integers(0, len(kinds)))
    stop = data.draw(st.integers(start, begin + len(kinds)))
    one_by_one = Counter((stage.kind(place), stage.repeated(policy, place)) for place in range(start, stop))
    assert stage.counts(policy, start, stop) == one_by_one
