"""A tool's own default, written out, changes no fact of a file that leaves it out.

The defaults are those of the tools' own classes (`keys/*.txt`, which `make parsers` compares with the installed tools), the
files the shortest that each of its programs takes.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from test_formats_coverage import TOOLS

from extract_keys import sections_of
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.job_files.dialects import dialect
from loadgauge.job_files.exchange import read
from loadgauge.job_files.job_file import usual
from loadgauge.job_files.reading.documents import document

VERL = (
    "python3 -m verl.trainer.main_ppo %s actor_rollout_ref.rollout.name=vllm data.train_batch_size=1024"
    " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 trainer.n_gpus_per_node=8 algorithm.adv_estimator=grpo\n"
)
TYPED = "--attn_impl flash_attn --model Qwen/Qwen3-8B\n"
FILES = [
    ("verl", VERL % "", "_ppo_trainer"),
    ("verl", VERL % "--config-name=ppo_megatron_trainer.yaml actor_rollout_ref.actor.strategy=megatron", "megatron"),
    ("prime-rl", '[model]\nname = "Qwen/Qwen3-0.6B"\n[orchestrator]\nbatch_size = 64\n[trainer.optim]\nlr = 1e-6\n', "RLConfig"),
    ("prime-rl", '[model]\nname = "Qwen/Qwen3-0.6B"\n[data]\nbatch_size = 64\n[optim]\nlr = 1e-6\n', "SFTConfig"),
    ("openrlhf", "deepspeed --module openrlhf.cli.train_dpo --ds.packing_samples\n", "0.11.2: train_dpo"),
    ("openrlhf", "deepspeed --module openrlhf.cli.train_dpo --packing_samples --zero_stage 2\n", "0.9.10: train_dpo"),
    ("areal", "cluster:\n  n_gpus_per_node: 8\ngconfig:\n  n_samples: 4\nactor:\n  backend: fsdp:d4\n"
     "rollout:\n  backend: sglang:d4\n", "PPO"),
    ("ms-swift", f"swift sft {TYPED}", "ms-swift"),
    ("ms-swift", f"swift sft --tuner_type full {TYPED}", "ms-swift"),
    ("ms-swift", f"swift rlhf --rlhf_type dpo {TYPED}", "ms-swift"),
    ("ms-swift", f"swift rlhf --rlhf_type grpo --num_generations 8 {TYPED}", "ms-swift"),
    ("megatron-swift", "megatron sft --model Qwen/Qwen3-30B-A3B\n", "(Data|Model|Quantize|Template|Megatron)Arg|TunerMixin"),
    ("megatron-swift", "megatron rlhf --rlhf_type dpo --model Qwen/Qwen3-30B-A3B\n", "(Data|Model|Megatron)Arg|TunerMixin"),
    ("torchtitan", "torchrun -m torchtitan.train --dump_folder out\n", "torchtitan"),
    ("trl", "trl sft --use_peft --output_dir o\n", "SFTConfig|ModelConfig|ScriptArguments"),
    ("trl", "trl dpo --output_dir o\n", "DPOConfig|ModelConfig"),
    ("trl", "trl grpo --output_dir o\n", "GRPOConfig|ModelConfig"),
    ("trl", "trl kto --output_dir o\n", "KTOConfig|ModelConfig"),
    ("llamafactory", "stage: dpo\nfinetuning_type: lora\n", "llamafactory"),
    ("llamafactory", "stage: sft\nfinetuning_type: full\n", "llamafactory"),
    ("axolotl", "base_model: Qwen/Qwen3-8B\nadapter: lora\nlora_r: 8\nsequence_len: 2048\nmicro_batch_size: 1\n", "axolotl"),
    ("automodel", "distributed:\n  strategy: fsdp2\n  pp_size: 2\n  ep_size: 4\n"
     "model:\n  pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B\n",
     "FSDP2|Sizes|Pipeline|Scheduler|MoE"),
    ("open-instruct", "python open_instruct/dpo_tune_cache.py --max_seq_length 2048\n", "open-instruct"),
    ("slime", "python3 train.py --colocate --actor-num-gpus-per-node 8 --rollout-batch-size 32 --n-samples-per-prompt 8"
     " --global-batch-size 256 --rollout-max-response-len 8192 --micro-batch-size 1 --hf-checkpoint /models/Qwen3-4B\n", "slime"),
    ("gpt-neox", "num_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\n"
     "train_micro_batch_size_per_gpu: 4\nseq_length: 128\n", "NeoX"),
    ("qwen-vl-finetune", "deepspeed src/train/train_sft.py --bf16 True\n", "Qwen-VL"),
]  # fmt: skip
SAME = {
    "tower": "frozen", "replicas": 1, "lora_dropout": None, "overlap": None, "max_pixels": None, "attention": None, "model": None,
    "critic": None, "precision": "bf16", "accumulation": 1, "lora_rank": None, "lora_targets": None, "seq_len": None,
}  # fmt: skip
"""Facts that a file may leave unsaid, and what they are then; None: whatever the tool has, as what is said is the default."""
OTHERWISE = {
    "optimizer": ("adamw", "adamw-fused"),  # which release of PyTorch runs decides it, where nothing is said
    "lora_rank": (0, 16),  # a section that is there by a key of its own
    "loss_type": "another trainer's",
}


def facts_of(name: str, text: str, file: str) -> dict[str, Any]:
    return {fact: said.value for fact, said in read(text, name, file=file, alone=True, given={"gpus": 8}).facts.items()}


@pytest.mark.parametrize(("name", "text", "classes"), FILES)
def test_a_default_said_is_the_default_unsaid(name: str, text: str, classes: str) -> None:
    chosen = dialect(name)
    syntax = "toml" if text[0] == "[" else "argv" if " " in text.partition(":")[0] else "yaml"
    file = {"argv": "run.sh", "toml": "job.toml", "yaml": "job.yaml"}[syntax]
    base, compared, wrong = facts_of(name, text, file), 0, {}
    for listed in TOOLS[name]:
        for title, keys in sections_of(listed):
            for key, default in keys.items() if re.search(classes, title) else ():
                opened = document(text, syntax, chosen, "", None)
                if key not in chosen.known or key in OTHERWISE or default in (None, "", "???") or "${" in str(default):
                    continue
                if key in opened.names():
                    continue
                opened.put(key, default)
                try:
                    facts = facts_of(name, opened.text(), file)
                except ConfigError as error:
                    wrong |= {} if re.search("trainer|contradicts", str(error)) else {key: (str(error), None, None)}
                    continue
                compared += 1
                for fact in {*base, *facts}:
                    pair = base.get(fact), facts.get(fact)
                    unsaid = pair[0] is None and fact in SAME and SAME[fact] in (None, pair[1])
                    if pair[0] != pair[1] and not unsaid and pair != OTHERWISE.get(fact):
                        wrong[key] = (fact, *pair)
    assert not wrong
    assert compared >= 8


@pytest.mark.parametrize(
    "name", ["trl", "verl", "openrlhf", "nemo-rl", "slime", "prime-rl", "roll", "areal", "axolotl", "ms-swift"]
)
@pytest.mark.parametrize("gpus", [1, 8])
def test_a_tool_named_for_a_task_answers(name: str, gpus: int) -> None:
    """Its own job file may need a batch or lengths that nobody gave; then its training alone says what it does by itself."""
    own = usual(name, Job("qwen3-8b", task="grpo", gpus=gpus))
    assert own["framework"] == dialect(name).framework
    assert set(own) > {"framework"}


def test_a_tool_named_for_a_task_brings_its_engine() -> None:
    """The engine of `--framework verl` is that of a verl command that says nothing of it."""
    file = read(VERL % "", "verl", alone=True)
    assert usual("verl", Job("qwen3-8b", task="grpo", gpus=8))["rollout"] == file.job.rollout
    assert "rollout" not in usual("verl", Job("qwen3-8b", task="grpo", gpus=1))  # its two ranks are more than there are
    assert "rollout" not in usual("verl", Job("qwen3-8b", task="grpo", gpus=8, rollout="sglang"))
