"""What lies between a step's tensors and what the driver shows: NCCL's buffers, idle blocks, releases that decide."""

from __future__ import annotations

import pytest

from loadgauge import estimate
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.training.memory_range import memory_range
from loadgauge.core.estimate.states.overhead import CONNECTION, SWITCHED, communication

MIB = 2**20


def test_a_connection_has_a_buffer_of_each_protocol_in_pages_of_2_mib() -> None:
    # NCCL's constants: lines x threads x steps x bytes (src/include/device.h, src/init.cc)
    low_latency, of_128, simple = 8 * 512 * 8 * 16, 120 * 640 * 8 * 8, 1 << 22
    assert -(-(low_latency + of_128 + simple) // (2 * MIB)) * 2 * MIB == CONNECTION
    assert SWITCHED.value == 16 * 2 * (8 * 128 * 1024) * 8  # channels x directions x steps of 128 KiB x heads


def test_the_first_all_to_all_takes_what_was_measured() -> None:
    # NVIDIA/nccl#1685: 3.3 GB on each of the 8 GPUs of a node, with the communicator itself
    card = gpu("h100-sxm5-80gb")
    both, alone = (communication(Layout(dp=8, ep=ep, seq_len=1), card).value for ep in (8, 1))
    assert both - 2 * alone == pytest.approx(3.3e9, rel=0.05)  # of data parallelism, and of all ranks


def test_faster_links_and_more_groups_have_more_buffers() -> None:
    cards = ("rtx4090", "v100-sxm2-32gb", "a100-sxm4-80gb", "h100-sxm5-80gb")
    for layout in (Layout(dp=8, seq_len=1), Layout(dp=4, tp=2, seq_len=1)):
        values = [communication(layout, gpu(card)).value for card in cards]
        assert values == sorted(set(values))
    assert communication(Layout(seq_len=1), gpu("h100-sxm5-80gb")).value == 0


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({"framework": "megatron"}, "static"),
        ({}, "fixed"),
        ({"framework": "deepspeed", "gpus": 8, "zero": 3}, "fixed"),
        ({"gpus": 8, "zero": 3}, "fixed"),
        ({"framework": "deepspeed", "gpus": 8, "zero": 2}, "fixed"),
    ],
)
def test_the_total_has_what_the_allocator_usually_holds_idle(flags: dict[str, object], kind: str) -> None:
    memory = estimate("gpt2", gpu="h100-sxm5-80gb", seq_len=1024, **flags).memory
    share, known = getattr(memory_range(), kind).reserved.usual, memory.margins.spread
    outside, pools = memory.margins.outside.value, memory.margins.pools
    # Where weights are gathered on streams of their own, what these hold at most is beside the main pool's peak.
    assert (pools.further > 0) == (flags.get("zero") == 3)
    held = memory.allocated + pools.further
    assert held == pytest.approx(memory.allocated - pools.beside + pools.most if pools.most else memory.allocated)
    assert memory.total == pytest.approx(held * (1 + share) * known.middle + outside)
    assert 1.0 < known.middle < 1.25  # cards of every class show more
    least = memory.margins.needed(memory.allocated).low  # of a full card, which gives idle blocks back
    assert (
        0.85 * memory.allocated <= least <= memory.allocated * (1 + memory.margins.fragmentation.needed.usual) + outside
    )
    assert least <= memory.low  # what lies beside the tensors is never less than nothing
    assert memory.total == pytest.approx(sum(memory.parts.values()))
    assert memory.low <= memory.total <= memory.high


def test_a_card_shows_no_more_than_it_has() -> None:
    flags = {"gpu": "a100-sxm4-80gb", "framework": "deepspeed", "gpus": 2, "zero": 3}
    roomy = estimate("llama-2-7b", **flags | {"gpu": "h200-sxm-141gb"}, seq_len=1024, micro_batch=2).memory
    full = estimate("llama-2-7b", **flags, seq_len=1024, micro_batch=2).memory
    assert full.capacity is not None
    needed = full.margins.shown(full.allocated) * full.margins.returned + full.margins.outside.value
    assert needed < full.capacity < roomy.total
    assert full.total == full.capacity == full.reading("nvidia-smi").value
    assert full.total == pytest.approx(sum(full.parts.values()))
    assert full.allocated == pytest.approx(roomy.allocated, rel=1e-3)
    less = estimate("llama-2-7b", **flags | {"gpu": "a100-sxm4-40gb"}, seq_len=1024, micro_batch=2).memory
    assert less.total > 1.5 * less.capacity  # what is needed, however full the card


def test_which_release_quantises_experts_decides() -> None:
    flags = {"gpu": "a100-sxm4-80gb", "qlora": True, "recompute": "full", "seq_len": 2048, "precision": "fp16"}
    found = estimate("mixtral-8x7b", **flags).memory
    assert found.verdict == "depends"
    assert found.question is not None
    assert [found.question.flag, *(choice.verdict for choice in found.question.choices)] == [
        "--version",
        "does not fit",
        "fits",
    ]
    older = found.question.choices[1]
    said = estimate("mixtral-8x7b", **flags, version=older.value).memory
    assert older.total == pytest.approx(said.total, rel=0.01)
    assert estimate("mixtral-8x7b", **flags, version="transformers=5.23").memory.verdict == "does not fit"
