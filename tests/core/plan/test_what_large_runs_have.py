"""What is assumed of runs of many GPUs where nothing is said, as published runs are typed."""

import msgspec
import pytest

from loadgauge import Layout, training
from loadgauge.core.definitions.hardware.hardware import gpu, gpu_ids
from loadgauge.core.definitions.hardware.usual import with_usual
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.layout import shared_out
from loadgauge.core.definitions.layout.overlap import Overlap
from loadgauge.core.estimate.time.traffic import exchange
from loadgauge.core.resolve.resolve import resolve_job


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "mtp", "split"),
    [
        (126, 16, 1, 0, (7, *[8] * 14, 7)),  # Llama 3.1 405B (dubey2024, 3.3.2)
        (61, 16, 1, 1, (3, *[4] * 14, 2)),  # DeepSeek-V3: 61 layers, embedding, loss and one of MTP are 4 x 16
        (70, 12, 1, 0, (5, *[6] * 10, 5)),  # BLOOM's `partition_method: type:transformer|embedding`
        (94, 8, 4, 0, (11, *[12] * 6, 11)),  # Qwen3 235B
    ],
)
def test_layers_that_do_not_divide_are_shared_out_with_both_ends(layers, pp, vpp, mtp, split):
    assert shared_out(layers, pp, vpp, mtp) == split


@pytest.mark.parametrize("layers", range(3, 80, 7))
@pytest.mark.parametrize("pp", [2, 3, 8])
def test_a_split_has_all_layers_and_no_stage_far_from_another(layers, pp):
    split = shared_out(layers, pp)
    assert sum(split) == layers
    assert len(split) == pp
    assert min(split) >= 0
    assert max(split) - min(split) <= 2


def test_a_run_typed_as_its_paper_says_has_an_answer():
    job = Job("llama-3.1-405b", gpu="h100", gpus=1024, tp=8, pp=16, zero=1, schedule="interleaved", seq_len=8192)
    setup = resolve_job(job)
    assert setup.layout.vpp > 1
    assert sum(setup.layout.stage_layers) == 126
    assert "--stage-layers" in setup.assumed
    assert "--vpp" in setup.assumed


def test_experts_with_tensor_parallelism_take_sequence_parallelism():
    setup = resolve_job(Job("mixtral-8x7b", gpus=16, tp=2, ep=4))
    assert setup.layout.sequence_parallel
    assert "--sequence-parallel" in setup.assumed


def test_what_nobody_said_decides_where_it_makes_a_large_run_fit():
    """Without sequence parallelism it does not fit, with it it does: DEPENDS, with both answers; said, it is as said."""
    words = {"gpu": "h100", "gpus": 6144, "tp": 8, "pp": 12, "vpp": 8, "zero": 1, "seq_len": 4096, "global_batch": 2304}
    open_ = resolve_job(Job("nemotron-4-340b", **words)).estimate()
    without = resolve_job(Job("nemotron-4-340b", **words, sequence_parallel=False, recompute="none")).estimate()
    with_it = resolve_job(Job("nemotron-4-340b", **words, sequence_parallel=True)).estimate()
    assert without.memory.total > with_it.memory.total == open_.memory.total
    assert open_.layout.sequence_parallel
    assert without.memory.verdict == "does not fit"
    assert open_.memory.verdict == ("depends" if with_it.memory.verdict == "fits" else with_it.memory.verdict)
    thing = next(thing for thing in open_.memory.unsaid if thing.flag == "--sequence-parallel")
    assert thing.more == pytest.approx(without.memory.allocated - with_it.memory.allocated)


def test_a_micro_batch_that_nobody_said_is_the_largest_that_fits():
    job = Job("llama-65b", gpu="a100-sxm4-80gb", gpus=512, tp=8, zero=1, seq_len=2048, global_batch=512)
    job = job.replace(sequence_parallel=True, recompute="selective")
    result = resolve_job(job).estimate()
    size = result.layout.micro_batch
    assert size > 1
    assert result.memory.roomy
    if size < 8:
        assert not resolve_job(job.replace(micro_batch=2 * size)).estimate().memory.roomy


def test_where_each_micro_batch_gathers_the_weights_the_fastest_of_what_fits_is_assumed():
    """By trying every micro-batch with and without recomputation."""
    words = {"gpu": "a100-sxm4-80gb", "gpus": 992, "tp": 8, "zero": 3, "seq_len": 2048, "global_batch": 992}
    job = Job("opt-175b", **words, precision="fp16", framework="fsdp")
    open_ = resolve_job(job).estimate()
    said = [{"micro_batch": size, "recompute": word} for size in (1, 2, 4, 8) for word in ("none", "full")]
    all_ = [resolve_job(job.replace(**each, sequence_parallel=False)).estimate() for each in said]
    assert open_.time.step == pytest.approx(min(each.time.step for each in all_ if each.memory.roomy))
    assert (open_.setup.assumed["--recompute"][:4], open_.setup.assumed["--micro-batch"][0]) == ("full", "8")


def test_what_runs_again_for_little_comes_before_everything():
    words = {"gpu": "h800", "gpus": 2048, "pp": 16, "ep": 64, "zero": 1, "schedule": "dualpipe", "global_batch": 15360}
    job = Job("deepseek-v3", **words, precision="fp8-blockwise", mtp=True, framework="megatron", seq_len=4096)
    ladder = ["none", "selective", "modules:core_attn,layernorm,mla_up_proj,moe_act", "full"]
    words = [resolve_job(job.replace(recompute=word)).untimed_estimate().memory.verdict for word in ladder]
    mildest = next(word for word, verdict in zip(ladder, words, strict=True) if verdict != "does not fit")
    assert resolve_job(job).estimate().setup.assumed["--recompute"].split(" ")[0] == mildest == ladder[2]


def test_hidden_communication_adds_to_the_frameworks_and_none_replaces_it():
    own = Overlap(tp=True, prefetch=True)
    assert Overlap.parse("dp", own).tp
    assert Overlap.parse("dp", own).dp
    assert not Overlap.parse("none,dp", own).tp
    assert Overlap.parse(own.alone(), Overlap(ep=True)) == own
    job = Job("llama-3.1-8b", gpu="h100", gpus=16, framework="nemo", tp=8)
    more = resolve_job(job.replace(overlap="ep")).training.overlap
    assert more == msgspec.structs.replace(resolve_job(job).training.overlap, ep=True)


def test_where_overlap_is_not_said_the_range_of_time_has_both_ends():
    job = Job("llama-3.1-70b", gpu="h100", gpus=128, tp=8, zero=1, seq_len=4096, global_batch=128)
    time = resolve_job(job).estimate().time
    ends = [resolve_job(job.replace(overlap=word)).estimate().time for word in ("all", "none")]
    assert time.low == pytest.approx(min(end.low for end in ends))
    assert time.high == pytest.approx(max(end.high for end in ends))


def test_zero_2_under_a_pipeline_reduces_once_a_step():
    for zero, often in ((1, False), (2, False), (3, True)):
        staged = Layout(dp=8, pp=2, zero=zero, global_batch=32, seq_len=1)
        assert exchange(staged, training("megatron")).reduces is often
    assert exchange(Layout(dp=8, zero=2, global_batch=32, seq_len=1), training("megatron")).reduces


def test_dualpipe_hides_the_exchange_of_experts_and_sends_each_node_one_copy():
    job = Job("deepseek-v3", gpu="h100", gpus=512, pp=16, ep=32, zero=1, schedule="dualpipe", global_batch=4096)
    kind = resolve_job(job).training
    assert kind.overlap.ep
    assert kind.kernels.dispatch == "deduplicated"
    assert not resolve_job(job.replace(schedule="1f1b")).training.overlap.ep


@pytest.mark.parametrize("id", gpu_ids())
def test_every_card_has_a_time_over_several_nodes(id):
    result = resolve_job(Job("llama-3.2-1b", gpu=id, gpus=64, zero=3, seq_len=512)).estimate()
    peaks = gpu(id).peaks
    if not (peaks.fp32 or peaks.bf16 or peaks.fp16):  # as announced, without a rate of these
        assert result.time is None
        return
    assert result.time is not None
    assert result.time.step > 0


def test_figures_that_a_source_states_are_never_replaced():
    for id in gpu_ids():
        card = gpu(id)
        filled, assumed = with_usual(card)
        if card.memory.bandwidth is not None:
            assert filled.memory == card.memory
        if card.peaks.bf16 is not None or card.peaks.fp16 is not None:
            assert filled.peaks == card.peaks
        assert bool(assumed) == (filled != card)


def test_a_budget_of_memory_keeps_that_share_of_a_layer():
    whole = resolve_job(
        Job("llama-3.1-8b", gpus=8, zero=3, framework="fsdp", compile=True, recompute="none")
    ).estimate()
    parts = {}
    for share in (0.25, 0.5, 0.75):
        job = Job("llama-3.1-8b", gpus=8, zero=3, framework="fsdp", compile=True, recompute=f"memory_budget={share}")
        result = resolve_job(job).estimate()
        parts[share] = result.memory.parts["activations"] / whole.memory.parts["activations"]
        assert parts[share] <= share + 0.02
        assert result.flops.hardware >= whole.flops.hardware + (share < 0.5)
    assert parts[0.25] < parts[0.5] < parts[0.75]


@pytest.mark.parametrize(
    ("framework", "attention", "remark"),
    [
        ("torchtitan", "flash", "per-op (torchtitan's selective"),
        ("megatron", "flash", "it saves nothing"),
        ("huggingface", "eager", "huggingface itself has none and full"),
        ("megatron", "eager", ""),
    ],
)
def test_a_word_of_recomputation_means_what_it_means_there(framework: str, attention: str, remark: str) -> None:
    job = Job(model="llama-3.1-8b", gpu="h100", gpus=8, framework=framework, attention=attention)
    setup = resolve_job(job.replace(recompute="selective"))
    assert remark in setup.assumed.get("--recompute", "")
    assert bool(remark) == ("--recompute" in setup.assumed)
    saved = resolve_job(job).estimate().memory.total - setup.estimate().memory.total
    assert (saved > 2**28) == ("nothing" not in remark)


@pytest.mark.parametrize("model", ["llama-65b", "dbrx"])
def test_of_a_layout_of_which_nothing_is_said_the_fastest_usual_one_is_assumed(model):
    """Without any sharding it does not fit; said, what is assumed is the same run, and no other of the usual is faster."""
    job = Job(model, gpu="a100-sxm4-80gb", gpus=2048, seq_len=2048)
    open_ = resolve_job(job).estimate()
    assert open_.memory.verdict in ("depends", "tight")
    words = {thing.flag.strip("-").replace("-", "_"): thing.assumed for thing in open_.memory.unsaid}
    fields = {name: int(word) if word.isdigit() else True if word == "on" else word for name, word in words.items()}
    said = resolve_job(job.replace(**fields)).estimate()
    assert said.memory.total == open_.memory.total
    for zero in (1, 3):
        for recompute in (None, "full"):
            other = resolve_job(job.replace(zero=zero, recompute=recompute)).estimate()
            if other.memory.fits:
                assert other.time.step / other.time.tokens >= open_.time.step / open_.time.tokens


def test_a_batch_of_fewer_sequences_than_gpus_shares_out_layers():
    setup = resolve_job(Job("llama-2-70b", gpu="a100-sxm4-80gb", gpus=2048, global_batch=1024))
    assert (setup.layout.tp, setup.layout.dp, setup.layout.global_batch) == (2, 1024, 1024)


@pytest.mark.parametrize(("batch", "micro", "counted"), [(1024, 1, 992), (1024, 3, 1116), (5, 1, 124), (248, 2, 248)])
def test_a_batch_that_ranks_cannot_share_out_is_the_nearest_and_said(batch, micro, counted):
    setup = resolve_job(
        Job("opt-175b", gpu="a100-sxm4-80gb", gpus=992, tp=8, zero=3, global_batch=batch, micro_batch=micro)
    )
    assert setup.layout.global_batch == counted
    assert [item.key for item in setup.uncounted] == ["global_batch"] * (batch != counted)


@pytest.mark.parametrize(
    ("model", "words", "flags"),
    [
        ("dbrx", {"gpus": 3072, "ep": 8, "seq_len": 4096}, {"--zero"}),
        ("llama-4-maverick", {"gpus": 1024, "ep": 128, "seq_len": 8192}, {"--zero"}),
        ("llama-3-70b", {"gpus": 1024, "gpu": "a100-40gb", "tp": 2}, {"--zero"}),
    ],
)
def test_what_a_layout_said_in_part_leaves_open_is_tried(model: str, words: dict[str, object], flags: set[str]) -> None:
    """Experts or layers are shared out as it says; sharded weights are what it leaves open."""
    answer = resolve_job(Job(model, **{"gpu": "h100", **words})).estimate()
    assert answer.memory.verdict != "does not fit"
    assert flags <= answer.setup.assumed.keys()
    for axis in ("ep", "tp"):
        assert getattr(answer.setup.layout, axis) == words.get(axis, 1)
    closed = resolve_job(Job(model, **{"gpu": "h100", **words, "zero": 1})).estimate()
    assert closed.memory.verdict == "does not fit"


def test_a_run_that_no_usual_layout_holds_is_shown_with_the_nearest() -> None:
    job = Job("kimi-k3", gpu="b200", gpus=64)
    setup = resolve_job(job)
    assert setup.instead is not None
    answer, tried = setup.estimate(), [each.setup.untimed_estimate().memory for each in setup.instead()]
    assert {memory.verdict for memory in tried} == {"does not fit"}
    assert answer.memory.verdict == "does not fit"
    assert answer.memory.allocated == min(memory.allocated for memory in tried)
    assert answer.setup.layout.ep > 1


@pytest.mark.parametrize(
    ("framework", "zero"),
    [("fsdp", 3), ("torchtitan", 3), ("torchtune", 3), ("litgpt", 3), ("nemo", 1), ("nanogpt", 0), ("megatron", 0)],
)
def test_a_frameworks_scripts_shard_where_nothing_is_said(framework, zero):
    """litgpt: `pretrain.py`, FSDPStrategy; torchtitan: `data_parallel_shard_degree = -1`; nanoGPT and Megatron-LM: DDP."""
    assert resolve_job(Job("llama-3.2-1b", gpus=4, framework=framework)).layout.zero == zero
    assert resolve_job(Job("llama-3.2-1b", gpus=1, framework=framework)).layout.zero == 0
    assert resolve_job(Job("llama-3.2-1b", gpus=4, framework=framework, zero=0)).layout.zero == 0


def test_a_large_run_that_does_not_fit_keeps_what_its_framework_shards():
    """FSDP shards weights over the ranks of a long sequence too: no stage of less is tried in its place."""
    words = {"gpu": "h100", "gpus": 64, "framework": "torchtitan", "cp": 64, "seq_len": 2**20, "micro_batch": 1}
    result = resolve_job(Job("llama-3.1-8b", **words)).estimate()
    assert result.layout.zero == 3
    assert result.memory.total < resolve_job(Job("llama-3.1-8b", **words, recompute="none")).estimate().memory.total


def test_a_die_is_what_a_program_counts_and_superchips_stand_in_fours():
    """Of OLCF's Frontier: 4 MI250X a node, 8 devices of 64 GB, 200 Gbit/s each package. CSCS' Alps: 4 GH200 a node, NVLink."""
    frontier = resolve_job(Job("gpt3-175b", gpu="mi250x", gpus=1024, tp=8))
    assert frontier.gpu.id == "mi250x-gcd"
    assert frontier.gpu.memory.label.text == "64 GB"
    assert [(link.domain, link.bandwidth) for link in frontier.cluster.links][1:] == [(1024, 12.5e9)]
    assert frontier.cluster.links[0].domain == 8
    alps = resolve_job(Job("apertus-70b", gpu="gh200", gpus=64, tp=4))
    assert [(link.domain, link.bandwidth) for link in alps.cluster.links] == [(4, 450e9), (64, 25e9)]
    assert "GPUs on one link of the GPU" in alps.assumed


def test_experts_are_split_with_the_layer_before_weights_are_gathered():
    words = {"gpu": "h100", "gpus": 1024, "tp": 8, "ep": 8, "seq_len": 8192, "global_batch": 256}
    result = resolve_job(Job("grok-1", **words)).estimate()
    assert (result.layout.etp, result.layout.zero) == (8, 1)
    assert "--etp" in result.assumed
    gathered = resolve_job(Job("grok-1", **words, zero=3, etp=1)).estimate()
    assert result.time.step < gathered.time.step / 2


def test_weights_that_are_gathered_often_are_so_for_large_micro_batches():
    """galactica (arXiv:2211.09085) ran on 128 cards: of what fits with sharded weights the fastest, not the first."""
    words = {"gpu": "a100-sxm4-80gb", "gpus": 128, "tp": 8, "seq_len": 2048, "global_batch": 1024}
    open_ = resolve_job(Job("galactica-120b", **words)).estimate()
    none = resolve_job(Job("galactica-120b", **words, zero=3, recompute="none", micro_batch=1)).estimate()
    assert open_.layout.zero == 3
    assert open_.time.step < 0.7 * none.time.step


def test_recipes_for_blackwell_dispatch_tokens_once_a_domain():
    words = {"gpus": 64, "pp": 8, "ep": 8, "framework": "nemo"}
    blackwell, hopper = (resolve_job(Job("qwen3-235b-a22b", gpu=card, **words)) for card in ("gb200", "h100"))
    assert (blackwell.training.kernels.dispatch, hopper.training.kernels.dispatch) == ("deduplicated", "all_to_all")
    assert "dispatch of tokens" in blackwell.assumed
