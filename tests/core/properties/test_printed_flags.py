"""A command line that is printed says what it means: typed again, it gives the same bytes and seconds, to the bit."""

from __future__ import annotations

import itertools
import random
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from command_line import document, typed
from loadgauge.core.base.errors import Error
from loadgauge.core.command_line.options.options import options, parse, run_options, whole_run_options
from loadgauge.core.definitions.job.job import POSTTRAIN, Job, fields
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.advise.advice import advice
from loadgauge.core.resolve.reproduce import completer
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.page.inputs.changes import changes
from loadgauge.page.inputs.flags import job_of
from loadgauge.page.inputs.uploads import Uploads

QUIET = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def again(command: str) -> Estimate:
    """The estimate of a printed command line."""
    words = shlex.split(command)
    assert words[:2] == ["loadgauge", "estimate"]
    return resolve_job(parse(words[2:])).estimate()


def same(one: Estimate, other: Estimate) -> None:
    """Bytes and seconds are equal, to the bit; the range of the one that says more is no wider than the other's."""
    assert one.memory.total == other.memory.total
    widths = sorted((memory.low, -memory.high) for memory in (one.memory, other.memory))
    assert widths[0][1] <= widths[1][1]
    assert one.memory.parts == other.memory.parts
    assert (one.time is None) == (other.time is None)
    if one.time is not None and other.time is not None:
        assert (one.time.step, one.time.parts) == (other.time.step, other.time.parts)


# -- the text form of a job ---------------------------------------------------------------------------------------


def _values(option: click.Option) -> st.SearchStrategy[Any]:
    """Values that an option can have, None among them."""
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
    if option.is_flag:
        return st.sampled_from([None, True, False])
    field = fields()[str(option.name)]
    if field.kind == "whole":
        return st.none() | st.integers(field.low, field.high)
    if field.kind in ("positive", "price"):
        return st.none() | st.floats(0, exclude_min=True, allow_infinity=False, allow_nan=False)
    if field.kind == "electricity":
        return st.none() | st.sampled_from(["france", "POL", "400"])
    if field.kind == "count":
        return st.none() | st.sampled_from(["15T", "1.4e12", "300_000"])
    if isinstance(option.type, click.Choice):
        return st.none() | st.sampled_from(list(option.type.choices))
    return st.none() | text


def _options() -> dict[str, click.Option]:
    command = options(run_options(whole_run_options(click.Command("any"))), POSTTRAIN)
    return {str(option.name): option for option in command.params if isinstance(option, click.Option)}


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
REQUESTS = st.fixed_dictionaries({"model": NAMES, **{name: _values(option) for name, option in _options().items()}})


def test_every_field_has_a_flag() -> None:
    assert set(_options()) == set(Job.__struct_fields__) - {"model"}


@QUIET
@given(REQUESTS)
def test_what_is_written_is_read_back(values: dict[str, Any]) -> None:
    job = Job(**values)
    words = shlex.split(job.command())
    assert words[:2] == ["loadgauge", "estimate"]
    assert parse(words[2:]) == job


def test_a_shell_reads_the_words() -> None:
    job = Job(model="-x y", lengths='it\'s "a" $HOME `ls` \\ * ~ #.txt', measured="step=1s;true", gpu="a\nb", mtp=False)
    found = subprocess.run(["sh", "-c", f"printf '%s\\0' {job.command()}"], capture_output=True, check=True)
    assert parse(found.stdout.decode().split("\0")[2:-1]) == job


# -- the complete flags of a run ----------------------------------------------------------------------------------------

SOME: dict[str, list[Any]] = {
    "model": [
        "llama-3.2-1b",
        "llama-3.1-8b",
        "mixtral-8x7b",
        "deepseek-v2-lite",
        "gpt2",
        "bert-base-uncased",
        "deepseek-v3",
    ],
    "gpu": [None, "h100-sxm5-80gb", "rtx4090", "gb200-nvl72"],
    "gpus": [None, 8, 16, 144],
    **{name: [None, None, 1, 2] for name in ("tp", "pp", "cp")},
    **{name: [None, None, None, 2] for name in ("ep", "etp", "replicas", "vpp")},
    "zero": [None, 0, 1, 2, 3],
    "sequence_parallel": [None, True],
    "schedule": [None, None, "gpipe", "zb-v", "interleaved"],
    "recompute": [None, "none", "selective", "full", "full:every=2", "mlp.activation,attention.norm"],
    "micro_batch": [None, 1, 2, 3],
    "global_batch": [None, None, 96],
    "seq_len": [None, 512],
    "lengths": [None, None, None, "uniform:300"],
    "precision": [None, None, "bf16", "fp16", "fp32", "bf16-pure", "fp8"],
    "optimizer": [None, None, "adamw", "adamw-8bit", "muon"],
    "attention": [None, None, "flash", "eager"],
    "loss": [None, None, "auto", "float32", "inplace", "chunked", "chunked:3"],
    "framework": [None, None, "huggingface", "megatron", "torchtitan", "deepspeed"],
    "lora_rank": [None, None, None, 8],
    "lora_targets": [None, None, None, "attention"],
    "qlora": [None, None, None, True],
    "base": [None, None, None, "nf4-single"],
    "offload": [None, None, None, "optimizer", "optimizer:0.5", "all"],
    "gpus_per_node": [None, None, None, 4],
    "link_bandwidth": [None, None, None, "123.456GB/s"],
    "nic_bandwidth": [None, None, None, "100 Gbit/s"],
    "cp_comm": [None, None, "all_gather", "all_to_all"],
    "mtp": [None, None, None, True],
    "expert_imbalance": [None, None, None, 1.3],
    "order": [None, None, None, "dp,tp,cp,pp"],
    "overlap": [None, None, None, "none", "dp,pp", "all"],
    "measured": [None, None, None, "step=2s", "step=2s,zero=0", "mfu=0.3,gpus=32,recompute=full"],
}


@st.composite
def runs(draw: st.DrawFn) -> Any:
    """A job that can be estimated. What cannot go together is mended where that is simple, so that few are thrown away."""
    values = {name: draw(st.sampled_from(some)) for name, some in SOME.items()}
    if values["lengths"] is not None:
        values["seq_len"] = None
    if values["gpu"] is None:
        values |= dict.fromkeys(
            ("gpus_per_node", "link_bandwidth", "nic_bandwidth", "overlap", "order", "tokens", "measured")
        )
    if (values["pp"] or 1) == 1:
        values |= {"schedule": None, "vpp": None}
    if values["schedule"] != "interleaved" and values["schedule"] is not None:
        values["vpp"] = None
    if (values["cp"] or 1) == 1:
        values["cp_comm"] = None
    if "deepseek" not in values["model"] and "mixtral" not in values["model"]:
        values |= {"ep": None, "etp": None, "expert_imbalance": None}
    elif (values["tp"] or 1) > 1:
        values["sequence_parallel"] = True
    if (values["tp"] or 1) == 1:
        values["sequence_parallel"] = None
    if values["qlora"] is None:
        values["base"] = None
        if values["lora_rank"] is None:
            values["lora_targets"] = None
    if "bert" in values["model"]:
        values["loss"] = None
    if not (values["zero"] or 0):
        values["replicas"] = None
    try:
        found = resolve_job(Job(**values))
        result = found.estimate()
    except Error:
        assume(False)
        raise
    return found, result


@settings(QUIET, max_examples=100)
@given(runs())
def test_the_complete_flags_of_a_run_give_it_again(run: Any) -> None:
    found, result = run
    complete = completer(found.job)(result)
    same(again(complete.command()), result)
    # What is written out is no default any more, and completing it again adds nothing.
    assert completer(complete)(result) == complete


@settings(QUIET, max_examples=20)
@given(runs(), st.randoms(use_true_random=False))
def test_flags_in_any_order_mean_the_same(run: Any, chance: random.Random) -> None:
    found, result = run
    words = found.job.words()
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    flags = [words[start:end] for start, end in itertools.pairwise([*starts, len(words)])]
    chance.shuffle(flags)
    same(resolve_job(parse([word for flag in flags for word in flag] + [found.job.model])).estimate(), result)


@settings(QUIET, max_examples=8)
@given(runs())
@pytest.mark.long
def test_advice_is_what_its_flags_give(run: Any) -> None:
    found, result = run
    assume(result.memory.fits is False)
    for change in advice(found):
        words = [found.job.model, *found.job.words(), *shlex.split(change.flags)]
        same(resolve_job(parse(words)).estimate(), change.result)
        same(again(change.command), change.result)


def test_what_estimate_advises_can_be_copied() -> None:
    out = typed("estimate llama-3.1-8b --gpu rtx4090 --gpus 8").out
    advised, size = re.findall(r"^(--.+?)  +([0-9.]+)  +(?:fits|depends|tight) ", out, re.MULTILINE)[0]
    (line,) = reproduced(out)
    assert all(flag in line for flag in re.findall(r"--\S+(?: [^-]\S*)?", advised))
    assert f"{again(line).memory.total / 2**30:.1f}" == size


@settings(QUIET, max_examples=6)
@given(runs())
@pytest.mark.long
def test_changes_on_the_page_are_what_their_flags_give(run: Any) -> None:
    found, _ = run
    state = {
        name.replace("_", "-"): "true" if value is True else str(value)
        for name in Job.__struct_fields__
        if (value := getattr(found.job, name)) is not None
    }
    kept = Uploads()
    try:
        for row in changes(job_of(state, kept)):
            changed = {name: value for name, value in {**state, **row["flags"]}.items() if value is not None}
            other = job_of(changed, kept).estimate()
            assert other.memory.total == row["memory"]
            assert (None if other.time is None else other.time.step) == row["step"]
    finally:
        kept.close()


def test_a_measured_run_is_not_changed_by_advice() -> None:
    """It was measured as it is; what a change brings is predicted, and not that it takes as long."""
    plain = Job(model="llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=1, global_batch=64)
    before = resolve_job(plain).estimate().time
    assert before is not None
    scaled = resolve_job(msgspec.structs.replace(plain, measured=f"step={before.step * 1.5!r}s"))
    steps = {row["label"]: row["step"] for row in changes(resolve_job(plain))}
    assert len(set(steps.values())) > 5
    for row in changes(scaled):
        assert row["step"] == pytest.approx(1.5 * steps[row["label"]])


# -- plans --------------------------------------------------------------------------------------------------------------

PLANS = [
    "llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --seq-len 8192 --global-batch 64",
    "llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --global-batch 16 --tp 1 --pp 1 --cp 1",
    "llama-3.1-8b --gpu h100-sxm5-80gb --gpus 16 --pp 1,4 --cp 2 --tp 2 --cp-comm all_gather --gpus-per-node 4 --vpp 1,2",
    "llama-3.1-8b --gpu rtx4090 --gpus 2 --qlora --base nf4-single --lora-targets attention --optimizer adamw-8bit",
    "llama-3.1-8b --gpu h100-sxm5-80gb --gpus 4,8 --lora-rank 8 --loss chunked:4 --tp 2 --pp 1 --overlap all",
    "mixtral-8x7b --gpu h100-sxm5-80gb --gpus 16 --global-batch 32 --tp 1,2 --pp 1,2 --cp 1 --precision fp8 --zero 1,3"
    " --expert-imbalance 1.2 --order tp,cp,dp,pp --replicas 1,2 --nic-bandwidth 200Gbit/s --schedule 1f1b",
    "llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --framework torchtitan --pp 2,4 --cp 1 --tp 1 --schedule all"
    " --global-batch 32 --stage-layers 9,8,8,7 --objective headroom",
    "llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --framework deepspeed --offload optimizer --attention eager --seq-len 1000",
    "llama-3.2-1b --gpu h100-sxm5-80gb --framework torchtitan --gpus 2 --tp 1 --pp 1 --cp 1 --objective money --price 2",
]


@pytest.mark.parametrize("line", PLANS)
@pytest.mark.slow
def test_every_layout_of_a_plan_can_be_typed(line: str) -> None:
    found = document(f"plan {line} --top 20")
    assert found["layouts"]
    for layout in (*found["layouts"], *found["pareto"]):
        result = again(layout["command"])
        assert result.time is not None
        assert result.memory.total == layout["memory"]["total"], layout["command"]
        assert result.time.step == layout["time"]["step"], layout["command"]
        assert "--framework" in layout["command"]


def reproduced(text: str) -> list[str]:
    """The command lines in what is printed, each on a line of its own."""
    return [line.strip() for line in text.splitlines() if line.startswith("  loadgauge estimate ")]


@pytest.mark.slow
def test_what_plan_prints_can_be_copied() -> None:
    best = document(f"plan {PLANS[1]}")["layouts"][0]
    lines = [*reproduced(typed(f"plan {PLANS[1]}").out), typed(f"plan {PLANS[1]} --export flags").out.strip()]
    assert len(lines) == 2
    for line in lines:
        told = document(line.removeprefix("loadgauge "))
        assert told["memory"] == best["memory"]
        assert told["time"] == {**best["time"], "days": None, "cost": None}
    nearest = "plan llama-3.1-8b --gpu rtx4090 --global-batch 4 --seq-len 2048"
    assert (
        again(reproduced(typed(nearest).out)[0]).memory.total == document_of_no(nearest)["nearest"]["memory"]["total"]
    )


def document_of_no(line: str) -> Any:
    """The document of a command whose answer is no."""
    found = typed(f"{line} --json")
    assert (found.code, found.err) == (1, "")
    return msgspec.json.decode(found.out)


def test_a_plan_of_lengths_can_be_typed() -> None:
    line = "llama-3.2-1b --gpu rtx4090 --gpus 2 --lengths uniform:3000 --global-batch 64 --precision bf16-pure --zero 2"
    for layout in document(f"plan {line}")["layouts"]:
        told = document(layout["command"].removeprefix("loadgauge "))
        assert (told["memory"]["total"], told["time"]["step"]) == (layout["memory"]["total"], layout["time"]["step"])
        # It must fit with the longest sequences alone.
        assert layout["memory"]["high"] == told["memory"]["high"] > told["lengths"]["worst_case"]["total"]


@pytest.mark.parametrize("line", [
    f"{PLANS[1]} --what-next", f"{PLANS[4]} --zero 1 --recompute full --what-next",
    "llama-3.1-8b --gpu h100-sxm5-80gb --gpus 16 --tp 8 --pp 1 --cp 1 --zero 1 --micro-batch 1 --recompute none"
    " --sequence-parallel --replicas 1 --link-bandwidth 123.4567GB/s --what-next",
    "llama-3.1-8b --gpu rtx4090 --global-batch 4 --seq-len 2048",
    "llama-3.1-8b --gpu rtx4090 --global-batch 8 --gpus 2 --seq-len 2048 --tp 1 --pp 1 --cp 1",
])  # fmt: skip
@pytest.mark.long
def test_every_change_of_a_plan_can_be_typed(line: str) -> None:
    found = msgspec.json.decode(typed(f"plan {line} --json").out)
    assert len(found["changes"]) > 2
    for change in found["changes"]:
        result = again(change["command"])
        assert result.time is not None
        assert (result.memory.total, result.time.step) == (change["memory"]["total"], change["step"]), change
        # And so can the change, after the flags of the plan.
        replanned = document(f"plan {line.removesuffix(' --what-next')} {change['flags']}")["layouts"][0]
        assert (replanned["memory"]["total"], replanned["time"]["step"]) == (
            change["memory"]["total"],
            change["step"],
        ), change


@pytest.mark.parametrize("line", [
    "llama-3.2-1b --gpu h100-sxm5-80gb --find micro-batch",
    "llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --find micro-batch --tp 1 --pp 1 --cp 1 --zero 3 --global-batch 64",
    "llama-3.2-1b --gpu h100-sxm5-80gb --find seq-len --recompute full",
    "llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --find gpus --pp 1 --cp 1 --zero 1",
    "llama-3.1-8b --gpu h100-sxm5-80gb --gpus 16 --pp 1 --cp 1 --find nic --exposed 0.9 --global-batch 64",
    "llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --pp 1 --cp 1 --prices h100-sxm5-80gb=2,a100-sxm4-80gb=1",
    "qwen3 --gpu rtx4090 --qlora --global-batch 1 --micro-batch 1 --find model",
])  # fmt: skip
@pytest.mark.slow
def test_every_answer_can_be_typed(line: str) -> None:
    answers = document(f"plan {line}")["answers"]
    for answer in answers:
        result = again(answer["best"]["command"])
        assert result.time is not None
        assert result.memory.total == answer["best"]["memory"]["total"]
        assert result.time.step == answer["best"]["time"]["step"]
        for point in answer.get("curve", ()):
            there = again(point["command"])
            assert there.time is not None
            assert (there.memory.total, there.time.step) == (point["memory"]["total"], point["step"])
            assert there.layout.micro_batch == point["micro_batch"]
    assert len(reproduced(typed(f"plan {line}").out)) == len(answers)


JOB_FILE = """\
base_model: NousResearch/Meta-Llama-3.1-8B
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
bf16: true
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
optimizer: adamw_torch_fused
adapter: qlora
lora_r: 32
lora_target_linear: true
"""


def test_flags_beside_a_job_file_say_what_the_file_says_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(JOB_FILE)
    line = f"{file} --gpu h100-sxm5-80gb --gpus 4"
    result = resolve_job(parse(shlex.split(line))).estimate()
    same(again(completer(parse(shlex.split(line)))(result).command()), result)
    for layout in document(f"plan {line} --zero 0,2,3 --top 20")["layouts"]:
        told = again(layout["command"])
        assert told.time is not None
        assert (told.memory.total, told.time.step) == (layout["memory"]["total"], layout["time"]["step"])
    file.write_text(JOB_FILE.replace("adapter: qlora\n", "").replace("lora_r: 32\nlora_target_linear: true\n", ""))
    for layout in document(f"plan {line} --optimizer adamw-8bit --zero 0,3")["layouts"]:
        told = again(layout["command"])
        assert told.time is not None
        assert (told.memory.total, told.time.step) == (layout["memory"]["total"], layout["time"]["step"])


def test_a_converted_job_file_can_be_typed(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text in (JOB_FILE, JOB_FILE.replace("adapter: qlora\n", "")):
        file.write_text(text)
        line = f"{file} --gpu h100-sxm5-80gb --gpus 4"
        same(again(typed(f"convert {line} --to flags").out), resolve_job(parse(shlex.split(line))).estimate())


def test_sequence_parallelism_of_a_job_file_can_be_turned_off(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --num-layers 32 --sequence-parallel"
        " --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --swiglu --normalization RMSNorm"
        " --disable-bias-linear --vocab-size 128256 --untie-embeddings-and-output-weights --micro-batch-size 1"
        " --position-embedding-type rope --global-batch-size 64 --seq-length 4096 --bf16 --lr 3e-4\n"
    )
    line = f"{file} --gpu h100-sxm5-80gb"
    assert document(f"estimate {line}")["layout"]["sequence_parallel"]
    assert not document(f"estimate {line} --no-sequence-parallel")["layout"]["sequence_parallel"]
    layouts = document(f"plan {line} --no-sequence-parallel --tp 4,8 --pp 1,2 --cp 1 --zero 0,1")["layouts"]
    for layout in layouts:
        told = again(layout["command"])
        assert told.time is not None
        assert (told.memory.total, told.time.step) == (layout["memory"]["total"], layout["time"]["step"])


# -- one rule for the framework -----------------------------------------------------------------------------------------


@settings(QUIET, max_examples=10)
@given(st.fixed_dictionaries({name: st.sampled_from([1, 1, 2]) for name in ("tp", "pp", "cp", "ep")}), st.booleans())
@pytest.mark.slow
def test_a_plan_of_one_layout_is_its_estimate(degrees: dict[str, int], adapters: bool) -> None:
    """Where nothing is open, `plan` and `estimate` are the same question, and choose the same framework."""
    words = [f"--{name}={value}" for name, value in degrees.items()]
    words += ["--gpus=8", "--global-batch=16", "--gpu=h200-sxm-141gb", "--zero=1", "--replicas=1", "--recompute=full"]
    words += ["--lora-rank=8"] if adapters else []
    spread = ["--sequence-parallel"] if degrees["tp"] > 1 else []
    line = ["mixtral-8x7b", *words, *spread, "--micro-batch=1", "--etp=1", "--json"]
    alone = msgspec.json.decode(typed(["estimate", *line]).out)
    found = typed(["plan", *line, *["--no-sequence-parallel"][len(spread) :], "--vpp=1"])
    planned = msgspec.json.decode(found.out)
    best = planned["layouts"][0] if planned["layouts"] else planned["nearest"]
    assert (best["memory"]["total"], best["time"]["step"]) == (alone["memory"]["total"], alone["time"]["step"])
    assert best["training"]["framework"] == alone["training"]["framework"]
