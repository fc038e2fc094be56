"""`loadgauge lint`: what a finding says it saves is what the estimate of the patched file says, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import typed
from loadgauge.core.answers.post_training import answered
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.job_files.commands.findings import OWN, RULES, Linted, fixed, lint, patched
from loadgauge.job_files.commands.merged import merged
from loadgauge.job_files.commands.own_words import own_words, rules as rules_of_words
from loadgauge.job_files.reading.argv import Argv

AXOLOTL = """\
# A comment that stays.
base_model: Qwen/Qwen3-8B   # the base
load_in_4bit: True
adapter: qlora
lora_r: 16
lora_target_linear: True
sequence_len: 4096
micro_batch_size: 1
gradient_accumulation_steps: 8
optimizer: adamw_torch_fused
bf16: true
flash_attention: true
gradient_checkpointing: true
plugins:
  - axolotl.integrations.liger.LigerPlugin
"""
MEGATRON = """\
#!/bin/bash
ARGS=(
  --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --swiglu
  --group-query-attention --num-query-groups 8 --normalization RMSNorm --untie-embeddings-and-output-weights
  --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000
  --micro-batch-size 1 --global-batch-size 128 --bf16 --use-flash-attn
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1
)
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py "${ARGS[@]}"
"""
LLAMAFACTORY = """\
model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 16
bf16: true
output_dir: out
"""
DEEPSPEED = """\
{
  "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 16,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true}
}
"""
SPELLED = """\
model_name_or_path: Qwen/Qwen3-8B
dataset_mixer:
    - id: a
      split: train   \n\
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
gradient_checkpointing_kwargs:
    use_reentrant: False
max_length: 2048
bf16: True
report_to:
- none
warmup_ratio: 0.1"""
TRL = """\
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=1,  # as it always was
    gradient_accumulation_steps=8,
    max_length=1024,
    bf16=True,
)
SFTTrainer("Qwen/Qwen3-8B", args=args, train_dataset=rows, peft_config=LoraConfig(r=16)).train()
"""
UNSLOTH = """\
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen3-14B", max_seq_length = 2048, load_in_4bit = True)
model = FastLanguageModel.get_peft_model(model, r = 16, use_gradient_checkpointing = "unsloth")
from trl import SFTTrainer, SFTConfig
SFTTrainer(model = model, args = SFTConfig(per_device_train_batch_size = 2, gradient_accumulation_steps = 4)).train()
"""
TIED = """\
model_name: own
model_config: {name: own, block_size: 256, padded_vocab_size: 32000, n_layer: 6, n_head: 6, n_embd: 288, intermediate_size: 768,
  norm_class_name: RMSNorm, mlp_class_name: LLaMAMLP, bias: false}
out_dir: out/pretrain/own
precision: bf16-mixed
data: TinyStories
train: {global_batch_size: 512, micro_batch_size: 32, max_tokens: 9700000000, max_seq_length: 256, tie_embeddings: true}
devices: auto
"""
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "axolotl.yaml": (AXOLOTL, {"gpu": "h100"}),
    "megatron.sh": (MEGATRON, {"gpu": "h100"}),
    "wide.sh": (MEGATRON, {"gpu": "h200"}),
    "long.sh": (MEGATRON.replace("micro-batch-size 1", "micro-batch-size 4"), {"gpu": "h100"}),
    "llamafactory.yaml": (LLAMAFACTORY, {"gpu": "h200"}),
    "smaller.yaml": (LLAMAFACTORY, {"gpu": "rtx4080-16gb"}),
    "full.yaml": (LLAMAFACTORY.replace("finetuning_type: lora", "finetuning_type: full"), {"gpu": "b300"}),
    "across.sh": (
        MEGATRON.replace("parallel-size 4", "parallel-size 16").replace("groups 8", "groups 16"),
        {"gpu": "h100"},
    ),
    "few.sh": (
        MEGATRON.replace("parallel-size 4", "parallel-size 1")
        .replace("parallel-size 1\n", "parallel-size 8\n")
        .replace(
            "--micro-batch-size 1 --global-batch-size 128",
            "--micro-batch-size 2 --global-batch-size 32 --recompute-granularity"
            " full --recompute-method uniform --recompute-num-layers 1",
        ),
        {"gpu": "h100"},
    ),
    "bubble.sh": (
        MEGATRON.replace("parallel-size 4", "parallel-size 1")
        .replace("parallel-size 1\n", "parallel-size 4\n")
        .replace("global-batch-size 128", "global-batch-size 32"),
        {"gpu": "h100"},
    ),
    "eager.yaml": (f"{LLAMAFACTORY}flash_attn: disabled\n", {"gpu": "h100"}),
    "evaluates.yaml": (
        f"{LLAMAFACTORY}val_size: 0.1\nper_device_eval_batch_size: 16\neval_strategy: steps\neval_accumulation_steps: 4\n",
        {"gpu": "h100"},
    ),
    "offloads.json": (
        DEEPSPEED.replace('"stage": 3', '"stage": 2, "offload_optimizer": {"device": "cpu"}'),
        {"gpu": "h100", "gpus": 8, "base_model": "llama-3.2-3b"},
    ),
    "shards.json": (DEEPSPEED, {"gpu": "a100-sxm4-80gb", "gpus": 64, "base_model": "llama-3.2-3b"}),
    "trl.py": (TRL, {"gpu": "h100"}),
    "spelled.yaml": (SPELLED, {"gpu": "h100", "gpus": 8}),
    "cells.ipynb": (
        json.dumps({"cells": [{"cell_type": "code", "source": UNSLOTH.splitlines(keepends=True)}]}),
        {"gpu": "h100"},
    ),
    "tied.yaml": (TIED, {"gpu": "h100"}),
    "single.py": (TRL.replace("bf16=True", 'bf16=False, model_init_kwargs={"dtype": "float32"}'), {"gpu": "h100"}),
    "pads.yaml": (AXOLOTL.replace("_size: 1", "_size: 4"), {"gpu": "h100", "lengths": "uniform:4096"}),
}


def linted(folder: Path, name: str, change: tuple[str, str] = ("", "")) -> tuple[Linted, Job, str]:
    text, flags = FILES[name]
    path = folder / name
    path.write_text(text.replace(*change) if change[0] else text, encoding="utf-8")
    job = Job(model=str(path), **flags)
    return lint(job), job, path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FILES)
def test_a_patched_file_needs_what_the_finding_says(tmp_path: Path, name: str) -> None:
    of, job, text = linted(tmp_path, name)
    before, checked = of.result, 0
    for finding in of.findings:
        if not finding.patch or finding.keys:
            continue
        (tmp_path / name).write_text(patched(job, finding.fields, text)[0], encoding="utf-8")
        after = resolve_job(job.replace(padding=of.setup.job.padding)).estimate()
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert before.memory.total - after.memory.total == pytest.approx(finding.memory, rel=1e-6, abs=1)
        assert before.time is not None
        assert after.time is not None
        if finding.step:
            assert before.time.step - after.time.step == pytest.approx(finding.step, rel=1e-6)
        checked += 1
    assert checked or of.findings[0].left_out


def test_only_the_lines_that_say_something_else_change(tmp_path: Path) -> None:
    of, job, text = linted(tmp_path, "axolotl.yaml")
    new, mended = fixed(of, job, text)
    assert mended
    was, now = text.splitlines(), new.splitlines()
    assert [line for line in was if line not in now] == [line for line in was if any(
        f"-{line}" in each.patch.splitlines() for each in mended
    )]  # fmt: skip
    assert "load_in_4bit: True" in now
    assert "# A comment that stays." in now


FIRES = [
    ("axolotl.yaml", "small-micro-batch", ("micro_batch_size: 1", "micro_batch_size: 8")),
    ("axolotl.yaml", "needless-recompute", ("gradient_checkpointing: true", "gradient_checkpointing: false")),
    ("long.sh", "norms-replicated", ("--pipeline", "--sequence-parallel --pipeline")),
    ("megatron.sh", "states-replicated", ("--bf16", "--bf16 --use-distributed-optimizer")),
    ("wide.sh", "tensor-parallel-wide", ("parallel-size 4", "parallel-size 1")),
    ("full.yaml", "optimizer-32-bit", ("bf16: true", "bf16: true\noptim: adamw_bnb_8bit")),
    ("across.sh", "tensor-parallel-across-nodes", ("parallel-size 16", "parallel-size 8")),
    ("few.sh", "few-micro-batches", ("global-batch-size 32", "global-batch-size 512")),
    ("bubble.sh", "pipeline-bubble", ("parallel-size 4\n", "parallel-size 1 --recompute-activations\n")),
    ("eager.yaml", "eager-attention", ("disabled", "fa2")),
    ("evaluates.yaml", "evaluation-peak", ("eval_strategy: steps", "eval_strategy: 'no'")),
    ("offloads.json", "needless-offload", ('"cpu"', '"none"')),
    ("shards.json", "needless-zero-3", ('"stage": 3', '"stage": 1')),
    ("shards.json", "save-gathers", ('on_model_save": true', 'on_model_save": false')),
    ("trl.py", "needless-recompute", ("bf16=True", "bf16=True, gradient_checkpointing=False")),
    ("cells.ipynb", "needless-recompute", ('\\"unsloth\\"', "False")),
    ("pads.yaml", "padding", ("micro_batch_size: 4", "micro_batch_size: 4\nsample_packing: true")),
    ("smaller.yaml", "does-not-fit", ("cutoff_len: 2048", "cutoff_len: 64\nquantization_bit: 4")),
]


@pytest.mark.parametrize(("name", "rule", "change"), FIRES)
def test_a_rule_fires_where_it_must_and_not_where_it_must_not(
    tmp_path: Path, name: str, rule: str, change: tuple[str, str]
) -> None:
    def rules(of: Linted) -> set[str]:
        return {finding.rule for finding in of.findings}

    assert rule in rules(linted(tmp_path, name)[0])
    assert rule not in rules(linted(tmp_path, name, change)[0])


WORDS = [
    ("axolotl", "dead-key", "base_model: gpt2\nlora_r: 8\n", "adapter: lora\n"),
    ("llamafactory", "dead-key", "finetuning_type: full\nlora_rank: 8\n", "lora_rank: null\n"),
    ("deepspeed", "dead-key", '{"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9}}', ("2", "3")),
    ("megatron", "dead-key", "torchrun p.py --fp8-margin 1 --bf16", " --fp8-format hybrid"),
    ("trl", "keys-contradict", "model_name_or_path: gpt2\nfsdp: full_shard\ndeepspeed: a.json\n", ("deepspeed: a.json", "")),
    ("trl", "other-release", "model_name_or_path: gpt2\nmax_seq_length: 512\n", ("max_seq_length", "max_length")),
    ("axolotl", "key-twice", "base_model: gpt2\nbf16: true\nbf16: false\n", ("bf16: false", "")),
    ("megatron", "allocator-splits", "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64\ntorchrun p.py --bf16", ("_ALLOC", "_X")),
    ("megatron", "kernels-one-by-one", "export CUDA_LAUNCH_BLOCKING=1\ntorchrun p.py --bf16", ("=1", "=0")),
    ("megatron", "debug-checks", "export TORCH_DISTRIBUTED_DEBUG=DETAIL\ntorchrun p.py --bf16", ("export", "# export")),
    ("megatron", "links-off", "export NCCL_P2P_DISABLE=1\ntorchrun p.py --bf16", ("=1", "=0")),
    ("trl", "pageable-loading", "model_name_or_path: gpt2\ndataloader_pin_memory: false\n", ("false", "true")),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "rule", "text", "mend"), WORDS, ids=[f"{rule} {tool}" for tool, rule, _, _ in WORDS])
def test_a_rule_of_words_fires_where_it_must_and_not_where_it_must_not(
    tool: str, rule: str, text: str, mend: str | tuple[str, str]
) -> None:
    syntax = {"megatron": "argv", "deepspeed": "json"}.get(tool, "yaml")

    def rules(text: str) -> set[str]:
        return {words.rule for words in own_words(text, tool, syntax, nvlink=True)}

    assert rule in rules(text)
    assert rule not in rules(text.replace(*mend) if isinstance(mend, tuple) else text + mend)


def test_what_a_script_reads_from_another_is_not_called_missing() -> None:
    text = "source model.sh\ntorchrun p.py --fp8-margin 0"
    assert not list(own_words(text, "megatron", "argv"))


def test_lines_are_spelled_as_the_file_has_them(tmp_path: Path) -> None:
    of, job, text = linted(tmp_path, "spelled.yaml")
    assert any(each.rule == "does-not-fit" and each.patch for each in of.findings)
    for each in of.findings:
        if each.patch:
            lines = patched(job, each.fields, text, each.keys)[0].splitlines()
            gone = [line for line in text.splitlines() if line not in lines]
            assert not [line for line in gone if "batch_size" not in line and "accumulation" not in line]


def test_only_what_is_mended_differs_in_a_program_and_in_json(tmp_path: Path) -> None:
    for name, least in (("trl.py", 1), ("cells.ipynb", 1), ("offloads.json", 1)):
        of, job, text = linted(tmp_path, name)
        new, mended = fixed(of, job, text)
        assert mended
        was, now = text.splitlines(), new.splitlines()
        assert least <= len(set(was) - set(now)) <= 4
        assert "# as it always was" in new or name != "trl.py"
        json.loads(new) if name != "trl.py" else compile(new, name, "exec")


def test_the_command_says_it_writes_it_and_documents_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(AXOLOTL, encoding="utf-8")
    line = f"lint {path} --gpu h100"
    said = typed(line)
    assert said.code == 1
    assert "small-micro-batch" in said.out
    assert "+micro_batch_size:" in said.out
    found = json.loads(typed(f"{line} --json").out)["files"][0]["findings"]
    sarif = json.loads(typed(f"{line} --sarif").out)["runs"][0]
    assert [each["rule"] for each in found] == [each["ruleId"] for each in sarif["results"]]
    assert all(each["locations"][0]["physicalLocation"]["region"]["startLine"] >= 1 for each in sarif["results"])
    known = {rule.name for rule in (*RULES.values(), *OWN.values())} | set(rules_of_words())
    assert (
        {rule for _, rule, _, _ in WORDS} <= known == {row.split()[0] for row in typed("lint --rules").out.splitlines()}
    )
    assert len(known) >= 30
    assert {each["rule"] for each in found} <= known
    fix = typed(f"{line} --fix")
    assert fix.out.startswith("--- ")
    assert path.read_text(encoding="utf-8") != AXOLOTL
    rest = json.loads(typed(f"{line} --json").out)["files"][0]["findings"]
    assert not [each for each in rest if each["level"] == "time"]
    assert typed(f"lint {path} --gpu h100 --rule nothing").code == 2
    assert typed(f"lint {tmp_path / 'none.yaml'}").code == 2


def test_a_program_of_transformers_trainer_is_patched_where_the_batch_is(tmp_path: Path) -> None:
    """It is read again as it was read: as a program without adapters, not as a list of Trainer's arguments."""
    program = tmp_path / "train.py"
    program.write_text(
        "from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments\n"
        'tok = AutoTokenizer.from_pretrained("meta-llama/Llama-3.2-1B")\n'
        'model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", torch_dtype="bfloat16")\n'
        'args = TrainingArguments("out", per_device_train_batch_size=8, gradient_accumulation_steps=4, bf16=True,\n'
        '                         gradient_checkpointing=True, optim="adafactor")\n'
        'rows = ds.map(lambda b: tok(b["text"], truncation=True, max_length=2048))\n'
        "Trainer(model, args, train_dataset=rows).train()\n"
    )
    out = typed(["lint", str(program), "--gpu", "4090"]).out
    assert "+args = TrainingArguments" in out
    assert "per_device_train_batch_size=2, gradient_accumulation_steps=16" in out  # as many samples a step
    assert "no patch" not in out


DPO = """\
model_name_or_path: meta-llama/Llama-3.1-8B
stage: dpo
pref_beta: 0.1
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 16
bf16: true
flash_attn: fa2
disable_gradient_checkpointing: true
output_dir: out
"""


def test_a_file_of_preferences_is_judged_whole_and_mended(tmp_path: Path) -> None:
    place = tmp_path / "dpo.yaml"
    place.write_text(DPO, encoding="utf-8")
    job = Job(str(place), gpu="a100-sxm4-40gb", gpus=1)
    linted = lint(job)
    own = answered(job.replace(task="dpo")).memory
    assert (linted.result.memory.total, linted.setup) == (own.total, None)
    assert own.verdict in ("tight", "does not fit")
    finding = next(each for each in linted.findings if each.level == "fails")
    assert finding.mends, finding.left_out
    text, mended = fixed(linted, job, DPO)
    assert finding in mended
    place.write_text(text, encoding="utf-8")
    after = answered(job.replace(task="dpo")).memory
    assert after.verdict == "fits"
    assert own.total - after.total == pytest.approx(finding.memory)
    found = typed(f"lint {place} --gpu a100-sxm4-40gb --gpus 1")
    assert (found.code, "nothing found; FITS" in found.out) == (0, True)


def test_a_file_with_an_engine_of_its_own_gpus_is_judged(tmp_path: Path) -> None:
    place = tmp_path / "grpo.yaml"
    place.write_text(
        "model_name_or_path: Qwen/Qwen3-8B\nuse_vllm: true\nvllm_mode: server\nnum_generations: 8\n"
        "per_device_train_batch_size: 8\nmax_completion_length: 1024\nbf16: true\ngradient_checkpointing: true\n",
        encoding="utf-8",
    )
    found = typed(f"lint {place} --gpu h100-sxm5-80gb --gpus 8 --placement split:4+4 --task grpo --json")
    assert found.code in (0, 1), found.err
    told = json.loads(found.out)["files"][0]
    estimated = json.loads(
        typed(f"estimate {place} --gpu h100-sxm5-80gb --gpus 8 --placement split:4+4 --task grpo --json").out
    )
    assert told["verdict"] == estimated["verdict"]


MANIFEST = f"""\
resources: {{accelerators: H100:8}}
num_nodes: 1
run: |
  # as before
  torchrun --nproc_per_node 8 pretrain_gpt.py {" ".join(MEGATRON.partition("(")[2].partition(")")[0].split())}
"""
BYTES = {
    "unended": AXOLOTL.partition("\nplugins")[0],
    "crlf": AXOLOTL.replace("\n", "\r\n"),
    "marked": f"\ufeff{AXOLOTL}",
    "manifest": MANIFEST,
}


@pytest.mark.parametrize("kind", BYTES)
def test_a_diff_has_the_lines_of_the_file_and_fix_writes_those_of_the_diff(tmp_path: Path, kind: str) -> None:
    path, text = tmp_path / "job.yaml", BYTES[kind]
    path.write_bytes(text.encode())
    diff = typed(f"lint {path} --gpu h100 --diff").out
    typed(f"lint {path} --gpu h100 --fix")
    new = path.read_bytes().decode()
    assert new != text
    assert new.endswith("\n") == text.endswith("\n")
    was, now = text.split("\n"), new.split("\n")
    for row in diff.split("\n")[2:-1]:
        assert row[:1] in "+@\\" or row[1:] in was
        assert row[:1] in "-@\\" or row[1:] in now
    assert ("\\ No newline" in diff) == (kind == "unended")
    assert len(set(was) - set(now)) <= 4
    assert "  # as before" in now or kind != "manifest"


def test_fix_of_a_command_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = typed(["lint", "trl sft --model_name_or_path Qwen/Qwen3-0.6B --bf16", "--gpu", "h100", "--fix"])
    assert (found.code, list(tmp_path.iterdir())) == (2, [])


CALL = """\
from trl import SFTConfig, SFTTrainer
{start}
{inside}args = SFTConfig(per_device_train_batch_size={size}, gradient_accumulation_steps=8, max_length=1024, bf16=True)
{inside}SFTTrainer("Qwen/Qwen3-0.6B", args=args, train_dataset=rows).train()
"""
SAID = {
    "a name": ("SIZE = 1  # each", "SIZE", "SIZE = 8  # each"),
    "a key": ('run = {"size": 1, "rate": 1}', 'run["size"]', 'run = {"size": 8, "rate": 1}'),
    "a field": ("class Run:\n    size: int = 1\nrun = Run()", "run.size", "    size: int = 8"),
    "a variable": ('import os\nsize = int(os.environ.get("SIZE", "1"))', "size", 'size = int(os.environ.get("SIZE", "8"))'),
    "an option": (
        'import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("--size", default=1)\n'
        "options = parser.parse_args()",
        "options.size",
        'parser.add_argument("--size", default=8)',
    ),
    "a parameter": ("def main(size: int = 1):", "size", "def main(size: int = 8):"),
    "a default of click": ('@click.option("--size", default=1)\ndef main(size):', "size", '@click.option("--size", default=8)'),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAID)
def test_a_program_is_mended_where_it_says_the_value(tmp_path: Path, kind: str) -> None:
    start, size, wanted = SAID[kind]
    text = CALL.format(start=start, size=size, inside="    " * start.endswith(":"))
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    job = Job(str(path), gpu="h100")
    new, left_out = patched(job, {"micro_batch": 8, "global_batch": 8}, text)
    assert not left_out
    assert wanted in new.splitlines()
    assert f"per_device_train_batch_size={size}," in new
    # What two keys are given by stands for both, so that only one of them is changed in its call.
    both = text.replace("accumulation_steps=8", f"accumulation_steps={size}")
    path.write_text(both, encoding="utf-8")
    new, left_out = patched(job, {"micro_batch": 8, "global_batch": 8}, both)
    assert not left_out
    assert "per_device_train_batch_size=8," in new


def test_a_script_is_mended_where_its_variable_is_set(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    text = MEGATRON.replace("ARGS", "TP=${TP:-4}  # each\nSIZE=1\nARGS", 1).replace(
        "parallel-size 4", 'parallel-size "$TP"'
    )
    text = text.replace("micro-batch-size 1", "micro-batch-size $SIZE").replace(
        "nnodes 2", "nnodes 2 --master_port $SIZE"
    )
    path.write_text(text, encoding="utf-8")
    new, left_out = patched(Job(str(path), gpu="h100"), {"tp": 2, "micro_batch": 2, "global_batch": 128}, text)
    assert not left_out
    gone, come = (set(one.splitlines()) - set(other.splitlines()) for one, other in ((text, new), (new, text)))
    assert (gone, come) == ({"TP=${TP:-4}  # each", "SIZE=1"}, {"TP=${TP:-2}  # each", "SIZE=2"})


def test_an_option_goes_behind_the_quotes_of_the_one_before() -> None:
    text = 'ARGS=(\n  actor.a=1\n  "++actor.b=\'[1,2]\'"\n)\nENV=(\n  env.c="--long 1"\n)\npython3 -m verl ${ARGS[@]} ${ENV[@]}\n'
    line = Argv(text, "hydra")
    line.put("actor.d", 2)
    assert line.text() == text.replace("'[1,2]'\"\n", "'[1,2]'\"\n  actor.d=2\n")


def test_words_of_truth_are_spelled_as_the_file_has_them(tmp_path: Path) -> None:
    text = AXOLOTL.replace(": true", ": True")
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    new = patched(Job(str(path), gpu="h100"), {"recompute": "none"}, text)[0]
    assert new == text.replace("gradient_checkpointing: True", "gradient_checkpointing: False")


def test_sarif_has_what_code_hosts_need(tmp_path: Path) -> None:
    """OASIS, SARIF 2.1.0: 3.19 tool, 3.27 result, 3.4 locations by URI."""
    place = tmp_path / "two words.json"
    text, flags = FILES["shards.json"]
    place.write_text(text, encoding="utf-8")
    line = [
        "lint",
        str(place),
        *(word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))),
    ]
    told = json.loads(typed([*line, "--sarif"]).out)
    (run,) = told["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert (told["version"], run["tool"]["driver"]["name"]) == ("2.1.0", "loadgauge")
    assert "save-gathers" in {result["ruleId"] for result in run["results"]}
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        where = result["locations"][0]["physicalLocation"]
        assert where["artifactLocation"]["uri"] == place.as_uri()
        assert 1 <= where["region"]["startLine"] <= len(text.splitlines())


def test_an_ordinary_file_is_told_on_one_screen(tmp_path: Path) -> None:
    linted(tmp_path, "axolotl.yaml")
    out = typed(f"lint {tmp_path / 'axolotl.yaml'} --gpu h100").out
    assert len(out.splitlines()) <= 12
    # A command of one line shows the words that change.
    out = typed(["lint", MANIFEST.strip().rpartition("  ")[2], "--gpu", "h100"]).out
    rows = [line.strip() for line in out.splitlines() if line.strip()[:1] in "+-" and line[:1] == " "]
    assert rows
    assert all(row[1:5] == "... " and len(row) < 120 for row in rows)


def test_what_a_writer_wraps_otherwise_is_written_anew_alone() -> None:
    source = "a: null\nb: ${mul:${c},\n  2}\nd:\n  e: 1\nf: null\n"
    plain, changed = "a:\nb: ${mul:${c}, 2}\nd:\n  e: 1\nf:\n", "a:\nb: ${mul:${c}, 2}\nd:\n  e: 2\nf:\n"
    assert merged(source, plain, changed) == source.replace("e: 1", "e: 2")
    after = "a:\nz: 1\nb: ${mul:${c}, 2}\nd:\n  e: 1\nf:\n"
    assert merged(source, plain, after) == "a: null\nz: 1\nb: ${mul:${c}, 2}\nd:\n  e: 1\nf: null\n"
