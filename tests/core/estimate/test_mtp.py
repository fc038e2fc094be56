"""Multi-token prediction: what its publishers say of it, and what an estimate makes of it."""

from __future__ import annotations

import msgspec
import pytest

from loadgauge import Layout, RecomputePolicy, estimate, model
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.ledger import NOT_ITEMISED
from loadgauge.core.estimate.memory.phases import PARTS, moments
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, stages
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.estimate.time.flops import microbatch_flops
from loadgauge.core.families import from_dict
from loadgauge.core.families.reference import llama_model
from loadgauge.core.layers import View, block_layer, head_layer
from loadgauge.core.layers.embedding_head import prediction_layer
from loadgauge.core.resolve.resolve import resolve_job

BLOCK_OF_SCALES = 128 * 128
"""Elements that share one scale in DeepSeek-V3's published FP8 weights."""


def test_deepseek_v3_as_published() -> None:
    """README_WEIGHTS.md of its repository: 671B in the main model; of the module 11.5B its own, 2.4B active, embedding
    and head included; README.md: 685B together on Hugging Face, 14B more.

    Tensor by tensor the module has 11.6B: what is published is its block, without the matrix of 2h x h before it. The
    685B hold the table and the head twice, the experts' correction biases, and a scale for each 128 x 128 of FP8.
    """
    spec = model("deepseek-v3")
    main, both = parameters(spec), parameters(spec.with_mtp())
    shared = main.embedding + main.head
    assert round(main.total / 1e9) == 671
    assert (both.total - main.total, both.layers) == (both.mtp, main.layers)
    join, norms = 2 * 7168 * 7168, 3 * 7168
    block = both.mtp - join - norms
    assert round(block / 1e9, 1) == 11.5
    assert round(both.mtp / 1e9, 1) == 11.6
    active = both.active - main.active - join - norms
    assert round((active + shared) / 1e9, 1) == 2.4
    layers = main.layers + block
    assert round((both.total + shared) / 1e9) == 684
    published = both.total + shared + 59 * 256 + layers / BLOCK_OF_SCALES
    assert round(published / 1e9) == 685
    assert round(published / 1e9) - round(main.total / 1e9) == 14


def test_a_model_without_modules_is_trained_with_one_and_that_is_said() -> None:
    setup = resolve_job(Job(model="kimi-k2", gpu="h200-sxm-141gb", gpus=64, ep=8, mtp=True))
    assert (setup.model.mtp_layers, setup.assumed["--mtp"]) == (
        1,
        "1 module as the last layer (kimi-k2 comes with none)",
    )
    own = resolve_job(Job(model="deepseek-v3", gpu="h200-sxm-141gb", gpus=64, ep=8, mtp=True))
    assert "--mtp" not in own.assumed


def test_what_can_be_asked_for() -> None:
    spec = model("deepseek-v3")
    assert (spec.mtp_layers, spec.with_mtp().mtp_layers, spec.with_mtp(3).mtp_layers) == (0, 1, 3)
    assert any("num_nextn_predict_layers" in note for note in estimate(spec, Layout(seq_len=1)).not_counted)
    assert not any(
        "num_nextn_predict_layers" in note for note in estimate(spec.with_mtp(), Layout(seq_len=1)).not_counted
    )
    assert parameters(spec.with_mtp(3)).mtp == 3 * parameters(spec.with_mtp()).mtp
    with pytest.raises(ConfigError, match=r"kimi-k2 has no multi-token prediction layers: --draft eagle"):
        model("kimi-k2").with_mtp()
    assert parameters(model("kimi-k2").with_mtp(1)).mtp > 17e9
    with pytest.raises(ConfigError, match="no multi-token"):
        spec.with_mtp(0)
    headless = from_dict({"model_type": "llama", "architectures": ["LlamaModel"]}, class_defaults=True)
    with pytest.raises(ConfigError, match="no language-model head"):
        headless.with_mtp(1)


def test_its_work_by_hand() -> None:
    """Per token: the block, 2 x 2h x h for the matrix before it and 2 h v for the head's second pass; twice backward."""
    h, v, s = 512, 1000, 64
    spec = llama_model(4, h, 8, v, intermediate_size=1024)
    block = block_layer(spec.blocks[0], h, View.of(s, 1)).forward_flops
    more = microbatch_flops(spec.with_mtp(2), View.of(s, 1))
    once = microbatch_flops(spec, View.of(s, 1))
    assert more.forward - once.forward == 2 * (block + 2 * s * (2 * h * h + h * v))
    assert more.backward == 2 * more.forward
    full = RecomputePolicy(mode="full")
    assert microbatch_flops(spec.with_mtp(2), View.of(s, 1), full).recompute == once.recompute * 6 / 4 + 6 * block
    some = RecomputePolicy(mode="full", layers=1)
    again = microbatch_flops(spec.with_mtp(2), View.of(s, 1), some).recompute
    assert again == microbatch_flops(spec, View.of(s, 1), some).recompute + once.recompute * 2 / 4


def weights_of(layout: Layout, count: int = 1, *, tied: bool = False) -> list[int]:
    """Weights on each stage for the modules alone."""
    spec = llama_model(8, 512, 8, 1024, intermediate_size=1024, tie_word_embeddings=tied)
    how = training("megatron")
    held = []
    for chosen in (spec, spec.with_mtp(count)):
        facts = MemoryModel(chosen, layout, how, view_of(layout, how))
        held.append([facts.ends(stage).total for stage in stages(chosen, layout)])
    return [more - less for less, more in zip(*held, strict=True)]


def test_the_stage_of_the_head_holds_it() -> None:
    module = parameters(llama_model(8, 512, 8, 1024, intermediate_size=1024).with_mtp(1)).mtp
    table = 512 * 1024
    assert weights_of(Layout(seq_len=1)) == [module]
    # A stage without the embedding has a copy of its table, but for a tied one, which it has as its head.
    assert weights_of(Layout(pp=2, seq_len=1)) == [0, module + table]
    assert weights_of(Layout(pp=2, seq_len=1), tied=True) == [0, module]
    assert weights_of(Layout(pp=2, seq_len=1), 3) == [0, 3 * module + table]
    # In a V the last part of the model is beside the first, and with DualPipe at both ends.
    assert weights_of(Layout(pp=2, schedule="zb-v", seq_len=1)) == [module, 0]
    assert weights_of(Layout(pp=2, schedule="dualpipe", global_batch=4, seq_len=1)) == [module, module]


@pytest.mark.parametrize("again", ["none", "full", "selective"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_what_it_keeps(schedule: str, again: str) -> None:
    spec = llama_model(8, 512, 8, 1024, intermediate_size=1024)
    layout = Layout(
        pp=2,
        global_batch=8,
        seq_len=256,
        schedule=schedule,
        recompute=RecomputePolicy.parse(again),  # type: ignore[arg-type]
        # The last stage puts off as much as the first one's memory allows.
        stage_layers=(7, 1) if schedule == "zb-h1" else None,
    )
    how = training("megatron")
    view = view_of(layout, how)
    loss, last = {}, {}
    for chosen in (spec, spec.with_mtp(2)):
        facts = MemoryModel(chosen, layout, how, view)
        stage = next(stage for stage in stages(chosen, layout) if stage.last)
        found = list(moments(facts, stage))
        loss[chosen.mtp_layers] = next(moment for moment in found if moment.name == "loss")
        backward = [m for m in found if m.name.startswith("backward of the") and m.position == stage.stop - 1]
        last[chosen.mtp_layers] = backward[0]
    work = loss[0].work
    assert work is not None
    place = next(index for index, chunk in enumerate(stage.chunks) if chunk.last)
    whole, waits = work.flight.whole[place], work.flight.waiting[place]
    assert loss[2].work == work
    block, ends = facts.facts[0, again != "none"], prediction_layer(spec, view)
    head = head_layer(spec, view, shared=True)
    # Where layers run again, what waits is more than what the first stage keeps, and nothing is put off.
    assert (whole, waits > 0) == (1, schedule == "zb-h1" and again != "full")
    more = {part: loss[2].parts[part] - loss[0].parts[part] for part in PARTS}
    # What waits: the input and the output's gradient of the matrix before the block, and of the head's.
    joined, logits = 2 * 256 * (2 * 512 + 512), 2 * 256 * (512 + 1024)
    assert more["activations"] == 2 * (block.kept + ends.saved() + waits * (block.waiting + joined))
    assert more["loss"] == 2 * (head.saved() + waits * logits)
    # By the backward of the layers it has given back what it kept.
    left = waits + last[2].work.splits
    assert last[2].parts["activations"] - last[0].parts["activations"] == 2 * left * (block.waiting + joined)
    assert last[2].parts["loss"] - last[0].parts["loss"] == 2 * left * logits


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "dualpipe"])
@pytest.mark.parametrize("heavy", ["head", "block"])
def test_the_explanation_adds_up(heavy: str, schedule: str, part: str) -> None:
    sizes = {"head": (64, 8192), "block": (4096, 1024)}[heavy]
    spec = llama_model(8, 512, 8, sizes[1], intermediate_size=sizes[0]).with_mtp(2)
    layout = Layout(pp=2, global_batch=8, seq_len=1024, zero=3, dp=2, schedule=schedule)  # type: ignore[arg-type]
    found = estimate(spec, layout, training("torchtitan", "bf16", loss="auto" if heavy == "head" else "chunked"))
    told = found.explain(part)
    assert sum(step.nbytes for step in told.steps) == pytest.approx(found.memory.parts[part], rel=1e-12)
    assert NOT_ITEMISED not in [step.what for step in told.steps]


def test_its_backward_can_be_the_peak() -> None:
    spec = llama_model(2, 512, 8, 1024, intermediate_size=8192).with_mtp(1)
    memory = estimate(spec, Layout(seq_len=1024), training("megatron", loss="chunked")).memory
    assert memory.moment == "backward of multi-token prediction"
    for framework in ("megatron", "torchtitan", "huggingface"):
        found = estimate(spec, Layout(seq_len=1024), training(framework, loss="chunked"))
        for part in PARTS:
            assert NOT_ITEMISED not in [step.what for step in found.explain(part).steps], (framework, part)
    less = estimate(msgspec.structs.replace(spec, mtp_layers=0), Layout(seq_len=1024), training("megatron")).memory
    assert memory.total > less.total
