"""`loadgauge lint`: what a finding says it saves is what the estimate of the patched file says, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import typed
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.job_files.commands.findings import OWN, RULES, Linted, fixed, lint, patched

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
FILES = {
    "axolotl.yaml": (AXOLOTL, {"gpu": "h100"}),
    "megatron.sh": (MEGATRON, {"gpu": "h100"}),
    "wide.sh": (MEGATRON, {"gpu": "h200"}),
    "long.sh": (MEGATRON.replace("micro-batch-size 1", "micro-batch-size 4"), {"gpu": "h100"}),
    "llamafactory.yaml": (LLAMAFACTORY, {"gpu": "h200"}),
    "smaller.yaml": (LLAMAFACTORY, {"gpu": "rtx4080-16gb"}),
    "full.yaml": (LLAMAFACTORY.replace("finetuning_type: lora", "finetuning_type: full"), {"gpu": "b200"}),
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
    before, checked = resolve_job(job).estimate(), 0
    for finding in of.findings:
        if not finding.patch or finding.left_out:
            continue
        (tmp_path / name).write_text(patched(job, finding.fields, text)[0], encoding="utf-8")
        after = resolve_job(job).estimate()
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
    known = {rule.name for rule in (*RULES.values(), *OWN.values())} | {"does-not-fit", "key-not-read"}
    assert {each["rule"] for each in found} <= known
    fix = typed(f"{line} --fix")
    assert fix.out.startswith("--- ")
    assert path.read_text(encoding="utf-8") != AXOLOTL
    rest = json.loads(typed(f"{line} --json").out)["files"][0]["findings"]
    assert not [each for each in rest if each["level"] == "time"]
    assert typed(f"lint {path} --gpu h100 --rule nothing").code == 2
    assert typed(f"lint {tmp_path / 'none.yaml'}").code == 2
