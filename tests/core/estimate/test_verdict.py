"""The verdict of a range, the counters of one peak, and what happens around the step."""

from __future__ import annotations

import math

import msgspec
import pytest

from command_line import document, typed
from loadgauge import estimate
from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.model.model import Attention
from loadgauge.core.definitions.training.memory_range import COUNTERS, memory_range, spread

JOB = "estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3"
MEMORY = estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, loss="float32").memory
LEAST = MEMORY.margins.needed(MEMORY.allocated).low


@pytest.mark.parametrize(
    ("capacity", "verdict", "fits"),
    [(None, "unknown", None), (MEMORY.high, "fits", True), (MEMORY.high - 1, "tight", False), (LEAST, "tight", False),
     (LEAST - 1, "does not fit", False)],
)  # fmt: skip
def test_the_verdict_is_of_the_range(capacity: float | None, verdict: str, fits: bool | None) -> None:
    memory = msgspec.structs.replace(MEMORY, capacity=capacity)
    assert (memory.verdict, memory.fits) == (verdict, fits)


def test_the_range_is_made_of_what_is_stated() -> None:
    known = spread("fine-tuning", card=True)
    outside = MEMORY.margins.outside
    held = MEMORY.allocated + MEMORY.margins.pools.further  # streams that gather weights have pools of their own
    shown = (1 + memory_range().fixed.reserved.usual) * known.middle * held
    assert MEMORY.total == pytest.approx(shown + outside.value)
    least = MEMORY.allocated * (1 + MEMORY.margins.fragmentation.needed.low)
    assert pytest.approx(least * known.floor + outside.low) == LEAST  # of the tensors, not of what lies idle
    # Idle blocks stay on a card with room; what is unknown of cards and of what lies beside the allocator adds up as squares.
    below, above = (
        math.hypot(shown * share, beside)
        for share, beside in (
            (1 - known.low, outside.value - outside.low),
            (known.high - 1, outside.high - outside.value),
        )
    )
    assert MEMORY.low == pytest.approx(MEMORY.total - below)
    assert MEMORY.high == pytest.approx(MEMORY.total + above)


@pytest.mark.parametrize(
    "flags", [{"gpus": 8, "zero": 3}, {"qlora": True}, {"framework": "megatron", "gpus": 8, "tp": 8}]
)
def test_idle_blocks_are_given_back_by_a_full_card_alone(flags: dict[str, object]) -> None:
    """The range begins at what a card with room shows, unless that is beyond the card; either way the verdict is the same."""
    memory = estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", **flags).memory
    margins, allocated = memory.margins, memory.allocated
    least, roomy = margins.needed(allocated).low, margins.needed(allocated, None).low
    assert least < roomy < memory.total
    for capacity, low in ((roomy * 1.001, roomy), (roomy * 0.999, least), (least * 0.999, least)):
        assert margins.needed(allocated, capacity).low == low
        told = msgspec.structs.replace(memory, capacity=capacity).verdict
        assert (told == "does not fit") == (capacity < least) or told == "depends"


def test_what_is_not_known_widens_every_range() -> None:
    wider = MEMORY.widened(1e9, 2e9, "--lengths")
    assert wider.widths["--lengths"] == 3e9
    assert wider.total == MEMORY.total
    assert wider.low < MEMORY.low - 0.8e9
    assert wider.high > MEMORY.high + 2e9
    for counter in COUNTERS:
        assert wider.reading(counter).low < MEMORY.reading(counter).low
        assert wider.reading(counter).high > MEMORY.reading(counter).high


def test_each_counter_holds_what_the_one_before_holds() -> None:
    shown = document(JOB)["memory"]["counters"]
    assert list(shown) == list(COUNTERS)
    for end in ("low", "value", "high"):
        values = [shown[counter][end] for counter in COUNTERS]
        assert values == sorted(values)
    assert shown["allocated"]["value"] == MEMORY.allocated


def test_a_counter_is_printed_where_it_is_asked_for() -> None:
    for extra in ("", " --brief"):
        out = typed(f"{JOB} --counter nvidia-smi{extra}").out
        assert f"nvidia-smi shows {MEMORY.reading('nvidia-smi').value / 2**30:,.1f}"[:-2] in out


def test_tight_is_no_unless_it_is_allowed() -> None:
    line = "estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3 --seq-len 8192"
    assert document(line)["memory"]["verdict"] == "tight"
    assert (typed(line).code, typed(f"{line} --allow-tight").code) == (1, 0)
    assert typed("estimate llama-3.1-8b --gpu rtx4090 --allow-tight").code == 1


@pytest.mark.parametrize("line", [JOB, f"{JOB} --seq-len 8192", "estimate llama-3.1-8b --gpu rtx4090", "estimate gpt2"])
def test_the_short_answer_has_ten_lines_at_most(line: str) -> None:
    long, short = typed(line), typed(f"{line} --brief --counter reserved")
    lines = short.out.splitlines()
    assert len(lines) <= 10 + 3  # a remedy, the run and why a range is wide may wrap in a pipe of 80 columns
    assert lines[0].split("  ")[0] == long.out.split("  ")[0]
    assert short.code == long.code
    assert ("Try --" in short.out) == (short.code == 1)


def test_a_document_has_no_short_form_and_a_reason_has() -> None:
    assert typed(f"{JOB} --brief --json").code == 2
    assert len(typed(f"{JOB} --brief --explain weights").out.splitlines()) < 10


def test_more_evaluation_batches_keep_more_logits() -> None:
    def kept(batches: int) -> float:
        memory = estimate("llama-3.1-8b", gpus=2, zero=3, seq_len=1024, eval_batch=2, eval_batches=batches).memory
        return next(
            moment.parts["evaluation"] for moment in memory.moments if moment.name == "evaluation: logits joined"
        )

    one = 2 * 2 * 2 * 1024 * 128256 * 4  # twice, of 2 ranks, 2 sequences, in float32, which accelerate makes of them
    assert kept(1) == one
    assert kept(5) == 5 * one


def test_a_cache_of_a_window_stays_as_long_as_the_window() -> None:
    from loadgauge.core.estimate.memory.around import cache_bytes
    from loadgauge.core.families.catalogue import find_model

    model = find_model("mistral-7b-v0.3")
    windowed = msgspec.structs.replace(
        model, blocks=tuple(_with_window(block, 1024) for block in model.blocks)
    )  # fmt: skip
    assert cache_bytes(windowed, 1, 4096, 2) == cache_bytes(windowed, 1, 1024, 2) == cache_bytes(model, 1, 1024, 2)


def _with_window(block: msgspec.Struct, window: int) -> msgspec.Struct:
    attention = block.attention  # type: ignore[attr-defined]
    assert isinstance(attention, Attention)
    return msgspec.structs.replace(block, attention=msgspec.structs.replace(attention, sliding_window=window))


def test_a_full_checkpoint_gathers_the_largest_weight_and_needs_the_model_on_the_host() -> None:
    result = estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, save="full")
    moment = result.memory.moments[-1]
    assert (moment.phase, moment.parts["gathered"]) == (
        "saving",
        4 * 128256 * 4096,
    )  # in float32, as accelerate shards them
    assert result.memory.saving == 4 * result.params
    assert not estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, save="full").memory.saving


def test_the_ledger_adds_up_between_steps() -> None:
    result = estimate("llama-3.1-8b", gpus=8, zero=3, eval_batch=4, eval_batches=2, generate=64, save="full")
    for index, moment in enumerate(result.memory.moments):
        ledger = result.workings.ledger(index)
        for part, nbytes in moment.parts.items():
            if part != "outside" and moment.phase.between_steps:
                assert sum(entry.nbytes for entry in ledger.entries(part)) == pytest.approx(nbytes, abs=1)


def test_what_does_not_go_together_is_refused() -> None:
    for name in ("eval_batches", "generate"):
        with pytest.raises(ConfigError, match="eval-batch"):
            estimate("llama-3.1-8b", **{name: 1})
    with pytest.raises(NotModelled, match="pipeline"):
        estimate("llama-3.1-8b", gpus=2, pp=2, eval_batch=1)
    with pytest.raises(NotModelled, match="cache"):
        estimate("mamba2-2.7b", eval_batch=1, generate=8)


def test_an_evaluation_that_does_not_fit_has_its_own_remedy() -> None:
    found = typed(f"{JOB} --recompute full --eval-batch 6 --eval-batches 4 --brief")
    assert found.code == 1
    assert "Try --eval-batches 0" in found.out


@pytest.mark.parametrize(
    "line",
    [
        "estimate llama-7b --gpu a100-sxm4-80gb --gpus 8 --zero 3 --offload all",
        "estimate qwen2.5-0.5b --gpu h100 --gpus 8 --task grpo --zero 3 --recompute full --offload all",
    ],
)
def test_a_nodes_memory_has_a_verdict_of_its_own(line: str) -> None:
    """What eight ranks keep is eight times what one does, and the exit code is that of the worse verdict."""
    told = document(line)
    host = sum(told["host"].values()) if "host" in told else told["memory"]["host"] * 8
    for factor, code in ((1.01, 0), (0.99, 1)):
        answer = typed(f"{line} --host-memory {host * factor:.0f}B")
        assert answer.code == code
        assert ("DOES NOT FIT" in answer.out) == bool(code)
        short = typed(f"{line} --host-memory {host * factor:.0f}B --brief").out
        for told_first in (answer.out, short):
            assert ("host DOES NOT HOLD" in told_first.splitlines()[0]) == bool(code)
        assert ("DOES NOT FIT" in short) == bool(code)
    refused = typed(f"{line} --host-memory 3x")
    assert (refused.code, refused.out) == (2, "")


@pytest.mark.parametrize("framework", ["huggingface", "deepspeed", "torchtitan", "megatron"])
def test_the_headline_is_what_the_card_shows(framework: str) -> None:
    """One figure for one thing: the total, its range and the counter of the card are the same; PyTorch's are parts of it."""
    memory = estimate(
        "llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, recompute="full", framework=framework
    ).memory
    card, reserved = memory.reading("nvidia-smi"), memory.reading("reserved")
    assert (card.low, card.value, card.high) == pytest.approx((memory.low, memory.total, memory.high))
    assert memory.allocated < reserved.value <= memory.total
    assert reserved.high <= memory.high
