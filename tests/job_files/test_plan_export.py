"""The best layout as another tool's file: the file says that layout, keeps what the user wrote, and lists the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import document, typed
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families.catalogue import config, model, models
from loadgauge.core.families.hf import from_dict
from loadgauge.job_files.dialects import OF_TEXT
from loadgauge.job_files.exchange import read, write
from loadgauge.job_files.ideas.facts import Extra
from loadgauge.job_files.pre_training.megatron_model import missing_sizes

JOB = "plan llama-3.1-8b --gpu h200-sxm-141gb --gpus 8 --global-batch 16 --seq-len 4096 --pp 1 --cp 1 --replicas 1 --recompute none"
AXOLOTL = """\
# my run
base_model: NousResearch/Meta-Llama-3.1-8B
datasets:
  - path: mine  # not for others
    type: alpaca
sequence_len: 4096
micro_batch_size: 2   # was 4, went OOM
gradient_accumulation_steps: 4
gradient_checkpointing: true
bf16: true
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
optimizer: adamw_torch_fused
"""


@pytest.mark.parametrize("name", OF_TEXT)
def test_the_file_says_the_layout_that_was_planned(name: str) -> None:
    adapters = "--lora-rank 16" if name == "unsloth" else ""  # it has no other training
    found = document(f"{JOB} {adapters} --export {name}")
    written, best = found["export"], found["layouts"][0]["layout"]
    run = read(written["text"], name, given={"gpus": 8}).job
    left_out = " ".join(written["left_out"])
    plain: dict[str, Any] = {"tp": 1, "pp": 1, "cp": 1, "zero": 0, "micro_batch": 1}
    for axis, usual in plain.items():
        value = getattr(run, axis)
        assert (usual if value is None else value) == best[axis] or f"--{axis.replace('_', '-')} " in left_out, axis
    if run.seq_len is not None:
        assert run.seq_len == 4096
    # The search is over what the tool runs.
    assert "--tp" not in left_out
    # ms-swift's preset for FSDP recomputes every layer, which this job forbids; PEFT's file says no layout, and
    # open-instruct's launcher is told the stage of DeepSpeed, not its file; of OLMo-core's programs the model alone is written.
    if name not in ("ms-swift", "peft", "open-instruct", "olmo-core"):
        assert "--zero" not in left_out


def test_models_have_the_names_that_hubs_know() -> None:
    for name in ("trl", "transformers", "axolotl", "llamafactory", "verl"):
        assert "meta-llama/Llama-3.1-8B" in document(f"{JOB} --tp 1 --export {name}")["export"]["text"], name


def test_megatron_has_the_sizes_of_the_model() -> None:
    said = [name for name in models() if not missing_sizes(config(name))]
    assert {"llama-3.1-405b", "qwen3-8b", "mixtral-8x7b", "smollm2-135m"} <= set(said)
    for name in said:
        text = write(Job(model="", tp=1), "megatron", extra=Extra(config=config(name))).text
        sizes = read(text, "megatron").extra.config
        assert sizes is not None, name
        assert parameters(from_dict(sizes, "", "job")).total == parameters(model(name)).total, name


def test_only_the_file_goes_to_the_terminal() -> None:
    found = typed(f"{JOB} --export deepspeed")
    assert json.loads(found.out)["train_micro_batch_size_per_gpu"] >= 1
    lines = found.err.splitlines()
    assert any("a step of" in line for line in lines)
    assert any("DeepSpeed 0." in line for line in lines)
    assert any("--seq-len 4096: has no place in it" in line for line in lines)


def test_the_users_own_file_is_patched(tmp_path: Path) -> None:
    own, out = tmp_path / "run.yaml", tmp_path / "faster.yaml"
    own.write_text(AXOLOTL)
    found = typed(f"plan {own} --gpu h100-sxm5-80gb --gpus 8 --recompute none --export axolotl --out {out}")
    assert found.code == 0
    assert "Your file's layout: --zero 3 --recompute full --micro-batch 2" in " ".join(found.out.split())
    assert "times as fast" in found.out
    patched = out.read_text().splitlines()
    changed = [line for line in patched if line not in AXOLOTL.splitlines()]
    assert any("gradient_checkpointing: false" in line for line in changed)
    for comment in ("# my run", "# not for others", "# was 4, went OOM"):
        assert any(comment in line for line in patched)
    assert own.read_text() == AXOLOTL
    # The same job: as many sequences a step.
    before, after = (read(text, "axolotl", given={"gpus": 8}).job for text in (AXOLOTL, out.read_text()))
    assert before.global_batch == after.global_batch == 64


def test_a_job_file_is_planned_for_on_another_number_of_gpus(tmp_path: Path) -> None:
    own = tmp_path / "run.sh"
    own.write_text(
        "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --tensor-model-parallel-size 8 --num-layers 32"
        " --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --group-query-attention"
        " --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --vocab-size 128256"
        " --untie-embeddings-and-output-weights --position-embedding-type rope --micro-batch-size 1"
        " --global-batch-size 64 --seq-length 4096 --bf16 --lr 3e-4\n"
    )
    narrow = "--pp 1 --cp 1 --replicas 1 --recompute none"
    given = document(f"plan {own} --gpu h100-sxm5-80gb {narrow}")["layouts"][0]["layout"]
    assert (given["gpus"] if "gpus" in given else given["dp"] * given["tp"]) == 16
    assert given["global_batch"] == 64
    fewer = document(f"plan {own} --gpu h100-sxm5-80gb --gpus 4 {narrow}")["layouts"][0]["layout"]
    assert fewer["dp"] * fewer["tp"] == 4
    assert fewer["global_batch"] == 64


def test_flags_are_a_dialect_too() -> None:
    line = document(f"{JOB} --export flags")["export"]["text"]
    best = document(JOB)["layouts"][0]
    again = document(line.removeprefix("loadgauge "))
    assert again["time"]["step"] == best["time"]["step"]
    assert again["memory"]["total"] == best["memory"]["total"]


@pytest.mark.parametrize("line", [
    f"{JOB} --export megatron-ml", f"{JOB} --onto no-such-file.yaml", f"{JOB} --export trl --onto no-such-file.yaml",
    f"{JOB} --out x.yaml", f"{JOB} --export flags --onto x.sh", f"{JOB} --export trl --find gpus",
    f"{JOB} --export trl --why-not tp=8", f"{JOB} --export trl --out /no/such/folder/x.yaml",
    "plan no-such-file.yaml --gpu h100-sxm5-80gb",
])  # fmt: skip
def test_nonsense_is_one_clear_line(line: str) -> None:
    found = typed(line)
    assert found.code == 2
    assert "defect" not in found.err
    assert len(found.err.strip().splitlines()) == 1
