"""A published run becomes the job that its own columns describe; nothing that was measured decides it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgauge.core.definitions.hardware.hardware import gpu_ids
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.layout import FULL_PIPE
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.evidence.published import assumptions, tables, vocabulary
from loadgauge.evidence.published.expression import _chunks, express
from loadgauge.evidence.published.free_text import Flags, chunks_of
from loadgauge.evidence.published.models import named
from loadgauge.evidence.published.rows import counter, difference, row_of
from loadgauge.evidence.published.source_rows import SourceRow, parse, read
from loadgauge.evidence.validate.overrides import apply
from loadgauge.evidence.validate.runs import Measured, Run, published as packaged, setup_of, variant_setups
from published_runs.convert import main
from published_runs.tables import MEASURED, RAW, published

RUNS = {run.id: run for run in published()}
ROWS = {run.id: run for run in packaged().runs}

# Every word of these columns in the published files and in others of the same kind.
HARDWARE = """24GB GPU; 40GB GPU; 80GB GPU; A100 (size and form not stated); A100-40GB-SXM; A100-80GB; A100-80GB-SXM;
A10G-24GB; A800-80GB; Ampere GPU (A100-class; model not named in table); Ascend 910B (Atlas 900 A2 PODc);
Ascend Atlas 900 A3 SuperPoD; B200-SXM; B200-SXM (power limited); B300-SXM; GB200; GB300; Gaudi2-96GB; H100-80GB-SXM;
H100-80GB-SXM (Grand Teton); H100-94GB; H100-96GB-HBM2e (500W, Grand Teton); H200-141GB-NVL; H200-141GB-SXM;
H800-80GB-SXM; L40S-48GB; MI300X-192GB; MI325X-256GB; MI350X-288GB; MI355X-288GB; RTX-A6000-48GB; RTX3090-24GB (PCIe);
RTX4090-24GB; TPU-v3-256 (cores); TPU-v4; TPU-v5e; TPU-v5p; TPU-v6e-Trillium; TPU7x-Ironwood (per chip)"""
PRECISION = """bf16; bf16 (autocast, fp32 optimizer); bf16 + NF4; bf16-mixed (fp32 weights); bf16-true; bf16/fp16; fp16;
fp16/bf16 mixed (12.55 GB params); fp8; fp8 (32x32 blocks); fp8 (TE); fp8 (TE, amp_fp8); fp8 (float8nocompile);
fp8 (no recipe name); fp8 (per config); fp8 e4m3 (tensorwise, fp32 rest); fp8 hybrid (blockwise, bf16 rest);
fp8 hybrid (tensorwise, bf16 rest); fp8-blockwise mixed; fp8-current-scaling; fp8-mxfp8; fp8-mxfp8 (cublas);
fp8-mxfp8 (cublas, rceil); fp8-rowwise; fp8-rowwise (bf16 rest); fp8-rowwise_with_gw_hp;
fp8-rowwise_with_gw_hp (bf16 rest); fp8-tensorwise; fp8-tensorwise (bf16 rest); mxfp8; mxfp8 grouped GEMM only;
mxfp8 linears only; mxfp8 linears+grouped; nvfp4; nvfp4 (per config)"""
SHARDING = """fsdp; fsdp (8 within node) + dp across nodes; fsdp (zero2-like: params not resharded for backward);
fsdp (zero3); fsdp 8; fsdp SHARD_GRAD_OP (zero2); fsdp2; fsdp2 (zero3); hsdp; megatron-fsdp optim_grads_params; none;
none (ddp); zero1; zero1 (BF16Optimizer, fp32 grad accum); zero2; zero2-like; zero3"""
OPTIMIZER = """AdamW; SGD; adam; adamw; adamw (CPU offload); adamw 8-bit; bnb PagedAdamW; decoupled_adamw; dist_muon; muon;
torch.optim.AdamW"""


def listed(text: str) -> list[str]:
    return [" ".join(word.split()) for word in re.split(r";\s(?![^(]*\))", text)]


def test_every_word_is_mapped() -> None:
    for text, table in (
        (HARDWARE, vocabulary.HARDWARE),
        (PRECISION, vocabulary.PRECISION),
        (SHARDING, vocabulary.SHARDING),
        (OPTIMIZER, vocabulary.OPTIMIZER),
    ):
        assert not [word for word in listed(text) if word not in table]
    assert {name for name in vocabulary.HARDWARE.values() if name != vocabulary.UNNAMED} <= set(gpu_ids())
    assert set(vocabulary.OPTIMIZER.values()) <= set(OPTIMIZERS)
    assert {name for _, name, _ in vocabulary.FRAMEWORKS} <= set(FRAMEWORKS)


@pytest.mark.parametrize(("word", "column"), [("LOMO", "optimizer"), ("Cray-1", "hardware"), ("int3", "precision")])
def test_a_word_that_is_not_mapped_is_the_reason(word: str, column: str) -> None:
    run = msgspec.structs.replace(RUNS["T-SM-001"], **{column: word})
    found = express(run)
    assert found.job is None
    assert f"{column}: {word!r}" in found.reason


def test_nothing_measured_decides_the_job() -> None:
    measured = dict.fromkeys(MEASURED, 1.2345)
    chosen = [run for number, run in enumerate(RUNS.values()) if number % 17 == 0]
    assert len(chosen) > 80
    for run in chosen:
        assert express(msgspec.structs.replace(run, **measured)) == express(run), run.id
        assert express(msgspec.structs.replace(run, **dict.fromkeys(MEASURED))) == express(run), run.id


@pytest.mark.parametrize(
    ("id", "params"),
    [  # as published: transformers' own counts, and the papers' tables
        ("M-TT-001", 8_030_261_248),  # Llama 3.1 8B
        ("T-MB-074", 70_553_706_496),  # Llama 3 70B
        ("T-TT-013", 405_853_388_800),  # Llama 3.1 405B
        ("M-LG-011", 6_738_415_616),  # Llama 2 7B
        ("T-KOR-001", 22.0e9),
        ("T-KOR-003", 174.6e9),
        ("T-KOR-005", 529.6e9),
        ("T-KOR-007", 1008.0e9),
        ("T-ZB-007", 1.5e9),
        ("T-ZB-019", 6.2e9),
        ("T-ZB-031", 14.6e9),
        ("T-ZB-043", 28.3e9),
        ("T-MB-227", 30_532_122_624),  # Qwen3 30B A3B
        ("T-MSL-008", 46_702_792_704),  # Mixtral 8x7B
        ("T-TL-001", 1_100_048_384),  # TinyLlama
    ],
)
def test_models_have_the_published_parameters(id: str, params: float) -> None:
    expression = express(RUNS[id])
    assert expression.job is not None, expression.reason
    own = 2e-5 if params == int(params) and params % 1e8 else 0.02
    lora = expression.job.training.lora
    assert lora is None or lora.rank
    assert parameters(expression.job.model).total == pytest.approx(params, rel=own)


def test_a_layout_holds_the_gpus_and_the_batch_of_its_row() -> None:
    checked = 0
    for run in RUNS.values():
        job = express(run).job
        if job is None:
            continue
        layout = job.layout
        if run.gpus is not None:
            assert layout.gpus == run.gpus, run.id
            checked += 1
        if run.global_batch is not None:
            assert layout.global_batch == run.global_batch, run.id
        if run.seq_len is not None:
            capped = "is a cap" in run.notes and layout.seq_len < run.seq_len
            assert capped or layout.seq_len == run.seq_len, run.id
        further = job.model.num_hidden_layers - (run.layers or job.model.num_hidden_layers)
        assert further in (0, 1), run.id  # 1: a layer of multi-token prediction
        assert sum(layout.layers_of(job.model)) == job.model.num_hidden_layers, run.id
    assert checked > 1000


def test_most_rows_of_quality_a_can_be_expressed() -> None:
    for letter in "TM":
        rows = [run for run in RUNS.values() if run.id[0] == letter and run.quality == "A"]
        found = [run for run in rows if express(run).job is not None]
        assert len(found) / len(rows) >= 0.85, letter


def test_a_row_without_a_job_says_why() -> None:
    for run in RUNS.values():
        found = express(run)
        assert (found.job is None) == bool(found.reason), run.id


def test_open_knobs_become_variants() -> None:
    stated = RUNS["T-SM-001"]
    assert "recompute" not in {variant.knob for variant in express(stated).variants}
    found = express(msgspec.structs.replace(stated, recompute=""))
    values = {
        variant.value: variant.job.layout.recompute.mode for variant in found.variants if variant.knob == "recompute"
    }
    assert values == {"selective (attention)": "selective", "full": "full"}
    assert found.job is not None
    assert found.job.layout.recompute.mode == "none"


# -- the package's rows ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_rows_of_the_package_are_what_the_tables_make_of_them() -> None:
    assert main(["--check"]) == 0


def test_a_row_of_the_package_resolves_to_what_the_source_s_row_means() -> None:
    checked = 0
    for number, (id, run) in enumerate(ROWS.items()):
        meant = express(RUNS[id])
        assert (run.job is None) == (meant.job is None)
        if meant.job is None or number % 13:
            continue
        setup, others = setup_of(run), list(variant_setups(run))
        assert (setup.layout, setup.training, setup.gpu) == (meant.job.layout, meant.job.training, meant.job.gpu), id
        assert setup.model.blocks == meant.job.model.blocks
        assert setup.model.pattern == meant.job.model.pattern
        expected = [(variant.knob, variant.job.layout, variant.job.training) for variant in meant.variants]
        assert [(knob, other.layout, other.training) for knob, other in others] == expected
        checked += 1
    assert checked > 80


def test_flags_and_overrides_alone_say_what_a_row_is() -> None:
    """Rows are data: reading one back gives the same run, and its job can be typed."""
    from loadgauge.core.command_line.options.options import parse as typed

    for run in list(ROWS.values())[::29]:
        assert msgspec.json.decode(msgspec.json.encode(run), type=Run) == run
        if run.job is not None:
            assert typed([run.job.model, *run.job.words()]) == run.job


def test_differences_between_models_can_be_applied() -> None:
    known = [setup_of(ROWS[id]).model for id in ("T-KOR-003", "T-MB-001", "T-MSL-008", "M-SM-013", "T-MB-227")]
    for old in known:
        for new in known:
            assert apply(old, difference(old, new)) == new


def test_one_s_own_table_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = (
        "id,model,layers,hidden,heads,kv_heads,ffn,gated,vocab,hardware,gpus,seq_len,precision,tp,framework,step_time_s"
    )
    row = "T-ME-1,my own,12,1024,16,8,4096,yes,32000,H100-80GB-SXM,8,2048,bf16,2,Megatron-LM,1.5"
    (tmp_path / "mine.csv").write_text(f"{head}\n{row}\nT-ME-2,my own,many,,,,,,,,,,,,,\n", encoding="utf-8")
    assert main([str(tmp_path / "mine.csv")]) == 0
    printed = capsys.readouterr()
    assert "layers: must be a whole number, got 'many'" in printed.err
    run = msgspec.json.decode(printed.out, type=Run)
    assert run == row_of(parse(f"{head}\n{row}\n").rows[0])
    assert run.job is not None
    assert (run.job.tp, run.job.gpu, run.measured) == (2, "h100-sxm5-80gb", Measured(step_time_s=1.5))
    model = setup_of(run).model
    assert (model.num_hidden_layers, model.hidden_size, model.vocab_size) == (12, 1024, 32000)
    assert isinstance(run.job, Job)


# -- counters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words_of_the_source", "kind", "last"),
    [
        ("active (active_bytes.all.peak)", "active", False),
        ("allocated (max over all ranks)", "allocated", False),
        ("allocated (torch max_memory_allocated; last rank = last pipeline stage)", "allocated", True),
        ("reserved (torchtitan log)", "reserved", False),
        ("nvidia-smi snapshot (integer GB)", "device", False),
        ("unknown (integer GB; likely nvidia-smi)", "unknown", False),
        ("per GPU, from screenshot text", "unknown", False),
        ("", "unknown", False),
    ],
)
def test_counters(words_of_the_source: str, kind: str, last: bool) -> None:
    found = counter(SourceRow(id="x", memory_kind=words_of_the_source))
    assert (found.kind, found.last_stage) == (kind, last)


# -- parts -------------------------------------------------------------------------------------------------------------


def test_pipeline_layouts_of_megatron() -> None:
    found = chunks_of("Et*4|(t*4|)*14tmL")  # DeepSeek-V3's 61 layers in 16 chunks
    assert len(found) == 16
    assert sum(layers for layers, _ in found) == 61
    assert [further for _, further in found] == [False] * 15 + [True]
    assert [layers for layers, _ in chunks_of("Et|(tt|)*6mL")] == [1, *[2] * 6, 0]


@pytest.mark.parametrize(("layers", "count"), [(22, 8), (61, 16), (126, 32), (30, 8), (94, 32), (7, 3)])
def test_uneven_chunks_hold_every_layer_and_leave_the_ends_no_more(layers: int, count: int) -> None:
    chunks = _chunks(layers, count)
    assert sum(chunks) == layers
    assert len(chunks) == count
    assert max(chunks) - min(chunks) <= 1
    assert chunks[-1] == min(chunks)


def test_flags() -> None:
    flags = Flags.of("mtp-num-layers=1;  torch.compile ; a=b=c")
    assert flags.number("mtp_num_layers") == 1
    assert flags.has("torch.compile")
    assert not flags.has("torch")
    assert flags.value("a") == "b=c"
    assert flags.number("a") is None


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Llama 3.1 8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen3-30B-A3B-Base", "qwen3-30b-a3b"),
        ("Qwen2.5-14B", "qwen2.5-14b"),
        ("Mixtral 8x7B", "mixtral-8x7b"),
        ("GPT-like 4B vocab 32k", None),
    ],
)
def test_public_names(name: str, known: str | None) -> None:
    found = named(name)
    assert (None if found is None else found.name) == known


@pytest.mark.parametrize(
    ("id", "said", "instead"),
    [
        ("T-MB-064", "", True),  # fp8_param_gather of Megatron-Bridge's recipes with current scaling
        ("T-MB-065", "", True),  # and of MXFP8
        ("T-MB-064", "; fp8-param-gather=false", False),
    ],
)
def test_recipes_of_megatron_bridge_hold_weights_in_8_bits_alone(id: str, said: str, instead: bool) -> None:
    run = RUNS[id]
    job = express(msgspec.structs.replace(run, other_flags=run.other_flags + said)).job
    assert job is not None
    assert job.training.precision.name.endswith("-primary") is instead


@pytest.mark.parametrize(
    ("column", "cell", "says"),
    [
        ("layers", "12.5", "must be a whole number, got '12.5'"),
        ("gpus", "0", "must be above 0, got '0'"),
        ("tp", "-1", "must be above 0, got '-1'"),
        ("mfu", "nan", "must be a number, got 'nan'"),
        ("gpus", "1e30", "must be at most 1,000,000,000,000,000, got '1e30'"),
    ],
)
def test_a_bad_cell_rejects_its_row_alone(column: str, cell: str, says: str) -> None:
    found = parse(f"id,{column}\nT-1,{cell}\nT-2,\n")
    assert [(bad.id, bad.line, bad.reason) for bad in found.rejected] == [("T-1", 2, f"{column}: {says}")]
    assert [row.id for row in found.rows] == ["T-2"]


@pytest.mark.parametrize(("key", "value"), [("layers", "1000000000"), ("layers", "2147483648"), ("vpp", "100000")])
def test_a_number_that_an_estimate_would_count_to_is_bounded(key: str, value: str) -> None:
    found = parse(f"id,{key}\nT-X-1,{value}\n")
    assert not found.rows
    assert found.rejected[0].reason.startswith(f"{key}: must be at most ")


def test_every_column_of_the_tables_has_a_meaning() -> None:
    found = parse("id,colour,split\nT-1,red,dev\n")
    assert found.rows == (SourceRow(id="T-1"),)
    assert found.ignored == ("colour",)
    for file in ("throughput.csv", "memory.csv"):
        table = read(RAW / file)
        assert not table.rejected
        assert not table.ignored


@pytest.mark.parametrize("name", ["throughput", "memory"])
@pytest.mark.long
def test_validate_reads_tables_in_the_words_of_their_sources(name: str) -> None:
    """`validate --runs` of a source's table is what the package has of it; columns of neither kind are reported."""
    rows = [run for run in packaged().runs if run.id.startswith("T-" if name == "throughput" else "M-")]
    table = tables.read(RAW / f"{name}.csv")
    assert not table.rejected
    ours = {run.id: msgspec.structs.replace(run, measured=Measured()) for run in rows}
    assert {run.id: msgspec.structs.replace(run, measured=Measured()) for run in table.runs} == ours


def test_a_table_with_a_wrong_cell_and_an_unknown_column(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("id,task,framework,model,hardware,gpus,colour\nT-X-1,pretrain,Megatron-LM,gpt2,H100,many,red\n")
    table = tables.read(file)
    assert (table.runs, table.ignored) == ((), ("colour",))
    assert "gpus: must be a whole number" in table.rejected[0].reason


# -- what a row is, and what is not invented ----------------------------------------------------------------------------


def row(**cells: Any) -> SourceRow:
    """A row of a model of the catalogue on 64 H100s."""
    base = {"id": "T-X-1", "model": "llama-3.1-8b", "hardware": "H100-80GB-SXM", "gpus": 64, "seq_len": 4096}
    return SourceRow(
        **{**base, "precision": "bf16", "micro_batch": 1, "global_batch": 512, "recompute": "none", **cells}
    )


def job(**cells: Any) -> Any:
    found = express(row(**cells))
    assert found.job is not None, found.reason
    return found.job


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NeMo 25.04", "megatron"),
        ("NeMo AutoModel", "automodel"),
        ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("DeepSpeed 0.16 + transformers", "deepspeed"),
        ("IBM fms-fsdp", "fsdp"),
        ("llm-foundry / Composer FSDP", "llm-foundry"),
        ("MaxText (XLA GPU)", "maxtext"),
        ("nanoGPT", "nanogpt"),
        ("Paxml", "maxtext"),
    ],
)
def test_frameworks_are_known_by_whole_words(text: str, name: str) -> None:
    assert job(framework=text, year=2022).training.framework.name == name
    # A word within another one says nothing.
    assert assumptions.framework(row(framework=f"x{text.replace(' ', '')}x"))[2].startswith("habits: ")


@pytest.mark.parametrize(
    ("cells", "name"),
    [
        ({"tp": 8, "pp": 4}, "megatron"),
        ({"tp": 8, "sharding": "zero3"}, "torchtitan"),
        ({}, "fsdp"),
        ({"hardware": "TPU-v5p"}, "maxtext"),
        ({"gpus": 1, "global_batch": 8}, "huggingface"),
    ],
)
def test_an_unknown_framework_has_the_habits_of_its_parallelism(cells: dict[str, Any], name: str) -> None:
    """Fused attention, gradients reduced beside the backward, and a range over what else it may be."""
    found = express(row(framework="HomeGrown 1.0", year=2025, **cells))
    assert found.job is not None, found.reason
    assert found.job.training.framework.name == name
    assert found.job.training.kernels.attention == "flash"
    assert found.job.training.overlap.dp
    assert any("is not known" in said for said in found.assumed)
    assert "framework" in {variant.knob for variant in found.variants}


def test_a_batch_that_is_not_stated_keeps_the_pipe_full() -> None:
    layout = job(framework="Megatron-LM", tp=2, pp=8, global_batch=None).layout
    assert layout.num_microbatches == FULL_PIPE * 8
    assert job(framework="Megatron-LM", tp=2, global_batch=None).layout.num_microbatches == 1


def test_a_step_of_a_batch_that_is_not_stated_is_not_compared() -> None:
    made = {"framework": "Megatron-LM", "tp": 2, "pp": 8, "global_batch": None}
    assert row_of(row(**made, step_time_s=3.0)).untimed.startswith("global_batch")
    assert not row_of(row(**made, tokens_per_s_per_gpu=3000.0)).untimed


def test_data_parallel_ranks_may_count_those_of_context_parallelism() -> None:
    layout = job(framework="NeMo 24.03", tp=2, cp=4, dp=32).layout
    assert (layout.dp, layout.cp) == (8, 4)
    assert job(framework="NeMo 24.03", tp=2, cp=4, dp=8).layout == layout


def test_a_card_below_its_power_is_not_timed() -> None:
    assert express(row(framework="torchtitan", hardware="B200-SXM (power limited)")).untimed.startswith("hardware")


def test_a_cap_of_lengths_is_not_timed() -> None:
    cells = {"framework": "torchtune", "notes": 'row "Baseline" is unpacked (seq 4096 is a cap)'}
    assert express(row(**cells, other_flags="Baseline")).untimed.startswith("seq_len")
    assert not express(row(**cells, other_flags="Baseline; + Packed Dataset")).untimed


def test_gradients_like_zero_2_in_a_pipeline_are_sent_once() -> None:
    assert job(framework="MegaScale", tp=8, pp=8, gpus=256, sharding="zero2-like").layout.zero == 1
    assert job(framework="torchtitan", tp=8, pp=8, gpus=256, sharding="fsdp2").layout.zero == 2


def test_flags_say_what_is_hidden() -> None:
    said = job(
        framework="Megatron-Core", year=2021, tp=8, other_flags="tp-comm-overlap; overlap grad reduce"
    ).training.overlap
    assert (said.tp, said.dp, said.pp) == (True, True, False)


def test_sizes_of_maxtext() -> None:
    """The names that MaxText's README gives its scales, in parameters (its `get_individual_scales`)."""
    for scale, billions in ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256), (512, 512), (1024, 1024)):
        flags = f"global_parameter_scale={scale}; per_device_batch_size=1"
        cells = {"model": f"MaxText-{billions}B", "hardware": "TPU-v5p", "framework": "MaxText", "global_batch": None}
        found = job(**cells, tp=4, sharding="fsdp", other_flags=flags)
        assert parameters(found.model).total == pytest.approx(billions * 1e9, rel=0.1)
        assert (found.layout.micro_batch, found.layout.global_batch) == (4, 64)
