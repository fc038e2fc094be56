"""What `lint` says of files with branches, of models without another attention, and of folders that say the task."""

from __future__ import annotations

import pytest

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.plan.advise.changes import Kind, Run, changes
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.job_files.commands.own_words import own_words
from loadgauge.job_files.exchange import read, write

DPO = "model_name_or_path: Qwen/Qwen3-8B\nbeta: 0.1\nmax_length: 512\nper_device_train_batch_size: 2\n"
TP = "torchrun pretrain_gpt.py --tensor-model-parallel-size ${TP} --sequence-parallel\n"


@pytest.mark.parametrize(("head", "dead"), [("TP=1\n", 1), ("case $A in x) TP=1;; y) TP=4;; esac\n", 0)])
def test_a_variable_that_branches_set_says_nothing_for_certain(head: str, dead: int) -> None:
    found = [words for words in own_words(head + TP, "megatron", "argv", "a.sh") if words.rule == "dead-key"]
    assert len(found) == dead


def test_activations_of_axolotl_are_moved_with_checkpoints_alone() -> None:
    text = "base_model: Qwen/Qwen3-8B\ngradient_checkpointing: true\nactivation_offloading: true\n"
    file = read(text, "axolotl", file="a.yaml")
    written = write(file.job.replace(recompute="none"), "axolotl", text, extra=file.extra, file="a.yaml")
    assert "gradient_checkpointing: true" in written.text  # `check_activation_offloading_wo_gc` refuses the other
    assert any("recompute" in line for line in written.left_out)


@pytest.mark.parametrize(("model", "offered"), [("deepseek-v4-flash", 0), ("qwen3-8b", 1)])
def test_no_attention_is_offered_that_the_class_has_not(model: str, offered: int) -> None:
    run = Run.of_setup(
        resolve_job(Job(model=model, gpus=8, zero=3, framework="huggingface", attention="eager", seq_len=512))
    )
    assert len(list(changes(run, [Kind.ATTENTION]))) == offered


def test_a_file_whose_folder_says_the_task_is_written_where_it_is() -> None:
    file = read(DPO, "trl", file="recipes/dpo/a.yaml")
    written = write(file.job.replace(micro_batch=1), "trl", DPO, extra=file.extra, file="recipes/dpo/a.yaml")
    assert "per_device_train_batch_size: 1" in written.text
