"""What padding costs: against every batch there can be, batches drawn at random, and the article's formulas."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from command_line import document, typed
from loadgauge import Layout, cluster, estimate, gpu, model, training
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.base.units import GIB
from loadgauge.core.definitions.hardware.calibration import efficiencies
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.layout import RecomputePolicy
from loadgauge.core.definitions.model.kernels import Dtypes, Kernels
from loadgauge.core.definitions.model.model import Attention
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.padding import METHODS, Forecast, Method, forecast, of_method
from loadgauge.core.estimate.time.roofline import Machine
from loadgauge.core.families.reference import gpt_model
from loadgauge.core.layers import View, block_layer
from loadgauge.core.resolve.resolve import resolve_job
from published_formulas import padded_flash_activations, padding_free_activations

H, A, B = 6144, 48, 8
ARTICLE = msgspec.structs.replace(training(), kernels=Kernels(dtypes=Dtypes(norm_statistic=0, index=0)))
BIG = gpt_model(2, H, A, 1000)
SMALL = gpt_model(3, 64, 4, 100)


def tokens_of(method: Method, batch: Sequence[int]) -> dict[str, float | None]:
    """Tokens and pairs of one given batch."""
    real, longest = sum(batch), max(batch)
    squares, padded = sum(length * length for length in batch), len(batch) * longest
    return {
        "padded, eager": {"tokens": padded, "pairs": padded * longest},
        "padded, flash": {"tokens": padded, "pairs": squares, "kernel_tokens": real},
        "padding-free": {"tokens": real, "pairs": squares},
    }[method]


# -- the article ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [512, 1024, 2048, 4096, 8192, 16384, 32768])
def test_the_articles_layer(n: int) -> None:
    lengths = Lengths.uniform(n)
    found = forecast(BIG, lengths, Layout(micro_batch=B, global_batch=B, seq_len=1), ARTICLE)
    padded, real = B * lengths.expected_max(B), lengths.expected_sum(B)
    naive, flash, free = (row.layer for row in found.rows)
    assert naive == pytest.approx(34 * H * padded + 5 * A * B * lengths.expected_max_square(B), rel=1e-12)
    assert flash == pytest.approx(28 * H * padded + (8 * H + 4 * A) * real, rel=1e-12)
    assert free == pytest.approx((34 * H + 4 * A) * real, rel=1e-12)
    # What the post prints: half of the kernel's own term is lost, and its output counted twice.
    assert padded_flash_activations(H, A, padded, real) == pytest.approx(34 * H * padded + (H + 2 * A) * real)
    assert free - padding_free_activations(H, A, real) == pytest.approx((2 * A - H) * real)
    assert [row.method for row in found.rows] == list(METHODS)


@pytest.mark.parametrize(("n", "printed"), [(512, 1.085), (8192, 107.347), (32768, 1581.386)])
def test_naive_is_what_was_printed(n: int, printed: float) -> None:
    (row, *_) = forecast(BIG, Lengths.uniform(n), Layout(micro_batch=B, global_batch=B, seq_len=1), ARTICLE).rows
    assert row.layer is not None
    assert round(row.layer / GIB, 3) == printed


# -- expectations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [[3], [2, 7], [1, 5, 16], [4, 4, 9, 30]])
@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_against_every_possible_batch(data: list[int], b: int, recompute: str) -> None:
    lengths = Lengths.of(data)
    layout = Layout(micro_batch=b, global_batch=2 * b, dp=2, recompute=RecomputePolicy.parse(recompute), seq_len=1)
    found = forecast(SMALL, lengths, layout)
    batches = list(itertools.product(data, repeat=b))
    for row in found.rows:
        flops = hardware = kept = 0.0
        for batch in batches:
            _, how = of_method(row.method, lengths, layout, training())
            each = msgspec.structs.replace(layout, seq_len=max(data), **tokens_of(row.method, batch))
            if b == 1 or len(data) == 1:  # no padding, no mask
                each = msgspec.structs.replace(each, kernel_tokens=None)
            result = estimate(SMALL, each, how)
            flops, hardware = flops + result.flops.model, hardware + result.flops.hardware
            kept += max(moment.parts["activations"] for moment in result.memory.moments)
        many = len(batches)
        assert (row.flops, row.hardware_flops) == pytest.approx((flops / many, hardware / many), rel=1e-12)
        assert row.activations == pytest.approx(kept / many, rel=1e-12)
        assert row.layer is not None
        assert row.activations is not None
        assert 0 < 3 * row.layer < row.activations


def test_time_of_the_expected_batch_is_near_the_mean_time() -> None:
    """Time is not linear, so this one is near, not equal: within 3 % of the mean over drawn batches."""
    machines = cluster(gpu("h100-sxm5-80gb"), 1)
    llama, lengths, b = model("llama-3.2-1b"), Lengths.uniform(4096), 4
    layout = Layout(micro_batch=b, global_batch=b, seq_len=1)
    found = forecast(llama, lengths, layout, cluster=machines)
    draw = random.Random(20240801)
    batches = [[draw.randint(1, 4096) for _ in range(b)] for _ in range(60)]
    for row in found.rows:
        _, how = of_method(row.method, lengths, layout, training())
        ratio = []
        for batch in batches:
            each = msgspec.structs.replace(layout, seq_len=4096, **tokens_of(row.method, batch))
            result = estimate(llama, each, how, cluster=machines)
            assert result.time is not None
            ratio.append((result.time.step, result.flops.model))
        # Each batch's time for the FLOPs it has, so that the luck of the draw does not count.
        seconds, flops = (sum(values) / len(values) for values in zip(*ratio, strict=True))
        assert row.step is not None
        assert row.flops is not None
        assert row.step / row.flops == pytest.approx(seconds / flops, rel=0.03)


def test_without_padding_everything_is_less() -> None:
    machines = cluster(gpu("h100-sxm5-80gb"), 8)
    layout = Layout(dp=8, zero=3, micro_batch=8, global_batch=64, seq_len=1)
    found = forecast(model("llama-3.1-8b"), Lengths.uniform(8192), layout, cluster=machines)
    for quantity in ("layer", "activations", "peak", "flops", "step"):
        shares = [found.share(row, quantity) for row in found.rows]
        assert shares[0] == 1
        assert None not in shares
        assert 1 > shares[1] > shares[2] > 0  # type: ignore[operator]
    assert found.worst == 8 * 8192
    naive, flash, free = found.rows
    assert naive.tokens == flash.tokens > free.tokens
    assert naive.pairs > flash.pairs == free.pairs
    # What is kept falls nearly with the tokens; of the kernel's own share flash_attention_2 keeps no padding either.
    assert free.layer is not None
    assert flash.layer is not None
    assert free.tokens / flash.tokens < free.layer / flash.layer < 1.05 * free.tokens / flash.tokens


@pytest.mark.parametrize(("lengths", "b"), [(Lengths.of([512]), 8), (Lengths.uniform(512), 1)])
def test_where_nothing_is_padding_nothing_is_saved(lengths: Lengths, b: int) -> None:
    found = forecast(SMALL, lengths, Layout(micro_batch=b, global_batch=b, seq_len=1))
    flash, free = (msgspec.structs.replace(row, method="padding-free") for row in found.rows[1:])
    assert flash == free


def test_the_layers_of_a_rank_add_up() -> None:
    layout = Layout(micro_batch=4, global_batch=4, seq_len=1)
    lengths = Lengths.uniform(256)
    for row in forecast(SMALL, lengths, layout).rows:
        each, how = of_method(row.method, lengths, layout, training())
        (block,) = SMALL.blocks
        assert row.layer == pytest.approx(block_layer(block, SMALL.hidden_size, view_of(each, how)).saved(), rel=1e-12)


def test_context_parallel_ranks_share_what_the_kernel_sees() -> None:
    lengths = Lengths.uniform(256)
    one, two = (
        forecast(SMALL, lengths, Layout(micro_batch=4, global_batch=4, cp=cp, seq_len=1), training("megatron")).rows[1]
        for cp in (1, 2)
    )
    assert one.flops == pytest.approx(two.flops, rel=1e-12)
    assert one.layer == pytest.approx(2 * two.layer, rel=1e-12)  # type: ignore[operator]


def test_a_window_cuts_what_the_kernel_sees() -> None:
    """Far beyond the window each real token sees so many, whatever padding there is and how many ranks share it."""
    mistral, lengths, b = model("mistral-7b-v0.1"), Lengths.uniform(16384), 4
    (block,) = mistral.blocks
    assert isinstance(block.attention, Attention)
    assert block.attention.sliding_window == 4096
    rows = [
        forecast(mistral, lengths, Layout(micro_batch=b, global_batch=b, cp=cp, seq_len=1)).rows[1] for cp in (1, 2)
    ]  # fmt: skip
    whole = [
        forecast(mistral, Lengths.of([each]), Layout(micro_batch=b, global_batch=b, seq_len=1)).rows[1].flops
        for each in (2, 4)
    ]
    by_token = (whole[1] - whole[0]) / (2 * b) - 3 * 32 * 4 * 6 * 4096  # type: ignore[operator]
    assert by_token > 0
    attention = 3 * 32 * 4 * 4096 * lengths.expected_sum(b) * 4096
    for row in rows:
        assert row.flops == pytest.approx(by_token * row.tokens + attention, rel=1e-9)


# -- the command line -------------------------------------------------------------------------------------------------

LINE = "estimate llama-3.1-8b --micro-batch 8 --lengths uniform:8192"


def test_the_command_prints_what_the_document_has() -> None:
    timed = f"{LINE} --gpu h100-sxm5-80gb --gpus 8 --zero 3"
    told = document(timed)
    found, text = told["forecast"], typed(timed).out
    assert "With and without padding: expected values for a micro-batch of 8" in text
    assert [row["method"] for row in found["rows"]] == list(METHODS)
    free = found["rows"][2]
    # The forecast is of the expected micro-batch, and the estimate of the fullest.
    assert free["peak"] < told["memory"]["total"] < found["rows"][1]["peak"] * 2
    assert free["step"] == told["time"]["step"]  # flash attention is the default, without padding
    assert free["flops"] == told["flops"]["model_per_step"]
    for row in found["rows"]:
        (line,) = (line for line in text.splitlines() if line.startswith(row["method"]))
        assert f"{row['layer'] / GIB:,.2f}" in line
        assert f"{row['activations'] / GIB:,.2f}" in line
        shares = row["share_of_naive"]
        assert f"{shares['layer']:.1%}" in line
        assert f"{shares['step']:.1%}" in line
    eager = document(f"{timed} --attention eager")
    assert eager["memory"]["total"] > eager["forecast"]["rows"][0]["peak"] == found["rows"][0]["peak"]
    assert found["worst_tokens"] == 8 * 8192


def test_without_lengths_or_a_gpu_it_says_less() -> None:
    assert "forecast" not in document("estimate llama-3.1-8b --micro-batch 8 --seq-len 8192")
    assert all(row["step"] is None for row in document(LINE)["forecast"]["rows"])
    (head,) = (line for line in typed(LINE).out.splitlines() if line.startswith("method"))
    assert "step" not in head


def test_what_is_not_modelled_has_its_reason() -> None:
    eager, *others = document(f"{LINE} --cp 2 --gpus 2")["forecast"]["rows"]
    assert "context parallelism of eager attention" in eager["reason"]
    assert eager["layer"] is eager["peak"] is None
    assert all(row["layer"] for row in others)
    assert "context parallelism of eager attention" in " ".join(typed(f"{LINE} --cp 2 --gpus 2").out.split())


def test_a_window_makes_a_bound_of_it() -> None:
    (note,) = document("estimate mistral-7b-v0.1 --lengths uniform:8192")["forecast"]["notes"]
    assert "4096" in note
    assert document("estimate mistral-7b-v0.1 --lengths uniform:4096")["forecast"]["notes"] == []


def test_the_document_is_plain() -> None:
    found = forecast(SMALL, Lengths.of([8, 16]), Layout(micro_batch=2, global_batch=2, seq_len=1))
    assert isinstance(found, Forecast)
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = (Path(__file__).parents[3] / "docs" / "padding-free.md").read_text(encoding="utf-8")
    block = page.partition("```\n$ loadgauge ")[2].partition("```")[0]
    line, table = block.split("\n\n")
    assert table.rstrip() in typed(line).out


def test_memory_is_of_the_fullest_micro_batch_and_time_of_the_expected_one() -> None:
    line = "estimate llama-3.2-1b --gpu h100 --micro-batch 4 --global-batch 16"
    ragged = f"{line} --lengths uniform:4096"
    free, padded, whole = (
        document(one) for one in (ragged, f"{ragged} --padding dynamic", f"{ragged} --padding max-length")
    )
    # What is padded is handed a mask, as where all sequences are padded to one length.
    longest = document(f"{line} --seq-len 4096 --padding max-length")
    assert whole["memory"]["total"] == longest["memory"]["total"] == padded["memory"]["total"]
    assert whole["time"]["step"] == longest["time"]["step"] > padded["time"]["step"] > free["time"]["step"]
    fullest = Lengths.uniform(4096).expected_fullest(4)
    # The activations of as many tokens, which are linear in them.
    one, two = (document(f"{line} --seq-len {seq}")["memory"]["parts"]["loss"] for seq in (1024, 2048))
    slope = (two - one) / (4 * 1024)
    assert free["memory"]["parts"]["loss"] == pytest.approx(one + slope * (fullest - 4096), rel=1e-6)
    assert free["memory"]["total"] < longest["memory"]["total"]
    assert free["memory"]["high"] > longest["memory"]["total"]


def test_a_padded_batch_hands_attention_a_mask() -> None:
    """The memory-efficient kernel takes all pairs, a causal one half of them; each query head has keys and values of its own,
    and each layer makes a mask of 16 bits that it keeps."""
    tokens, layers, heads, kv, width = 2 * 4096, 16, 32, 8, 64
    whole, padded = (
        estimate("llama-3.2-1b", micro_batch=2, seq_len=4096, gpu="a100-sxm4-80gb", precision="bf16-pure", padding=how)
        for how in (None, "max-length")
    )
    mask, repeated = 2 * 2 * 4096**2, 2 * 2 * tokens * (heads - kv) * width
    kept = [result.memory.largest("activations").parts["activations"] for result in (whole, padded)]
    assert kept[1] - kept[0] == pytest.approx(layers * (mask + repeated), rel=1e-3)
    fused = estimate(
        "llama-3.2-1b", micro_batch=2, seq_len=4096, gpu="a100-sxm4-80gb", precision="bf16-pure", attention="fa1"
    )
    assert padded.time is not None
    assert fused.time is not None
    assert padded.time.step > 1.15 * fused.time.step


def test_a_run_that_padded_all_its_batches_took_as_long() -> None:
    """A user's own trainer pads to 8,192 tokens and takes 4.7 s; without a mask it would take little more than half of that."""
    line = "estimate llama-3.1-8b --gpu h100-sxm5-80gb --seq-len 8192 --micro-batch 2 --recompute full --precision bf16-pure"
    line += " --version transformers=4.49,torch=2.5"
    assert document(f"{line} --padding max-length")["time"]["step"] == pytest.approx(4.7, rel=0.08)
    assert document(line)["time"]["step"] < 0.65 * 4.7


def test_attention_in_float32_is_of_three_products_in_tf32() -> None:
    """PyTorch's memory-efficient kernel on tensor cores, at a third of their TF32 rate; without them on the plain cores."""
    for card, faster in (("a100-sxm4-80gb", 156 / 19.5 / 3), ("v100-sxm2-16gb", 1.0)):
        machine = Machine.of(gpu(card), efficiencies(card), training(precision="fp32"))
        share = machine.efficiencies.attention["fa1"].forward * machine.efficiencies.throttle
        assert machine.fused_attention.forward * machine.software == pytest.approx(
            share * gpu(card).peak("fp32") * faster, rel=0.005
        )


def test_the_ledger_is_of_the_fullest_micro_batch() -> None:
    result = estimate("llama-3.2-1b", micro_batch=4, lengths="uniform:4096", padding="dynamic")
    assert sum(entry.nbytes for entry in result.ledger) == pytest.approx(result.memory.total)
    explained = result.explain("activations")
    assert sum(step.nbytes for step in explained.steps) == pytest.approx(result.memory.parts["activations"])


def test_padding_goes_with_lengths_and_with_what_can_run_it() -> None:
    assert typed("estimate gpt2 --padding dynamic").code == 2
    assert typed("estimate gpt2 --lengths uniform:64 --attention eager --padding free").code == 2
    told = typed("plan llama-3.2-1b --gpu h100 --gpus 2 --global-batch 4 --lengths uniform:512 --padding max-length")
    assert told.code == 0
    assert "--padding max-length" in told.out


def test_the_longest_batch_is_in_the_range() -> None:
    """The upper end is that of a micro-batch of the longest sequences alone, with what other streams' pools hold then."""
    job = Job("llama-3.2-1b", gpu="rtx4090", gpus=2, lengths="uniform:3000", global_batch=64, micro_batch=2, zero=2)
    setup = resolve_job(job.replace(precision="bf16-pure"))
    own, worst = setup.estimate().memory, setup.worst_case().memory
    pools = worst.margins.pools.further - own.margins.pools.further
    assert own.nearby["--lengths"] == pytest.approx(worst.allocated - own.allocated + pools)
    assert worst.allocated > own.allocated
    assert pools > 0


def test_a_mask_of_booleans_is_turned_round_before_it_is_written() -> None:
    """One byte a pair beside the mask that the kernel keeps, two or four bytes a pair."""
    llama = model("llama-3.2-1b")
    view = View(tokens=64, pairs=64 * 64, kernels=Kernels(masks=True, attention="flash"))
    (mask,) = (each for each in block_layer(llama.blocks[0], llama.hidden_size, view) if each.name == "attention.mask")
    assert mask.workspace == 64 * 64
    assert mask.outputs[0].numel == 64 * 64
