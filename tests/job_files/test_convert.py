"""`convert` as a function: jobs, names and job files into the files of any dialect, as the command writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.job_files.convert import convert
from loadgauge.job_files.dialects import OF_PICTURES, OF_TEXT
from loadgauge.job_files.exchange import Written, read
from loadgauge.job_files.export import words

SCRIPT = "torchrun --nproc-per-node 8 --nnodes 1 pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1  # mine\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    place = tmp_path / "train.sh"
    place.write_text(SCRIPT)
    return place


@pytest.mark.parametrize("dialect", OF_TEXT)
def test_a_job_becomes_a_file_that_says_it(dialect: str) -> None:
    written = convert(Job(model="llama-3.1-8b", gpus=16, zero=2, micro_batch=2), to=dialect)
    found = read(str(written), dialect, given={"gpus": 16}).job
    assert written.dialect == dialect
    assert found.zero == 2 or any("--zero 2" in line for line in written.left_out)
    assert found.micro_batch in (2, None)
    assert (found.micro_batch is None) == any("--micro-batch" in line for line in written.left_out)


@pytest.mark.parametrize("dialect", OF_PICTURES)
def test_a_trainer_of_pictures_takes_no_language_model(dialect: str) -> None:
    with pytest.raises(ConfigError, match="trains diffusion models, and"):
        convert(Job(model="llama-3.1-8b", gpus=16, zero=2, micro_batch=2), to=dialect)


def test_a_name_and_fields_are_a_job() -> None:
    assert convert("llama-3.1-8b", to="trl", gpus=8, zero=3) == convert(
        Job(model="llama-3.1-8b", gpus=8, zero=3), to="trl"
    )


@pytest.mark.parametrize("target", ["torchtitan", "megatron-bridge", "flags"])
def test_a_file_is_converted_as_by_the_command(script: Path, target: str) -> None:
    written = convert(script, to=target, gpus=16)
    found = typed(["convert", str(script), "--to", target, "--gpus", "16"])
    assert (found.code, found.out.rstrip("\n")) == (0, str(written).rstrip("\n"))
    assert convert([script], to=target, gpus=16) == convert(Job(model=str(script), gpus=16), to=target) == written
    for line in written.left_out:
        assert line in found.err


def test_a_file_of_the_dialect_is_patched(script: Path) -> None:
    assert str(convert(script, tp=4)) == SCRIPT.replace("-size 2", "-size 4")
    text = str(convert("llama-3.1-8b", onto=script, gpus=8, tp=8, seq_len=4096))
    assert text.startswith("torchrun --nproc-per-node 8 --nnodes 1 ")
    assert text.endswith("# mine\n")
    assert read(text).job.tp == 8


def test_none_takes_a_field_back() -> None:
    job = Job(model="llama-3.1-8b", gpus=8, tp=2)
    assert convert(job, tp=None) == convert(Job(model="llama-3.1-8b", gpus=8))


def test_what_cannot_be_converted_is_refused(script: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean tp"):
        convert("llama-3.1-8b", tpp=2)
    with pytest.raises(ConfigError, match=r"unknown dialect 'megatronn' .*; did you mean megatron\?"):
        convert("llama-3.1-8b", to="megatronn")
    with pytest.raises(ConfigError, match="no such file"):
        convert([tmp_path / "none.yaml"])
    with pytest.raises(ConfigError, match="7 GPUs cannot be split over 2"):
        convert(script, gpus=7)


def test_what_is_written_prints_as_its_text() -> None:
    assert f"{Written(dialect='trl', text='packing: false')}" == "packing: false"


@pytest.mark.parametrize("text", ["num_train_epochs: 3.0\n", ""])
def test_epochs_are_those_of_the_file(text: str, tmp_path: Path) -> None:
    """axolotl needs a number of epochs, so a new file has one: that of the file that is converted."""
    file = tmp_path / "train.yaml"
    file.write_text(
        "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 2048\nbf16: true\n" + text
    )
    words = str(convert([file], to="axolotl")).splitlines()
    assert ("num_epochs: 3.0" if text else "num_epochs: 1") in words


def test_experts_over_more_ranks_than_axolotls_axis_are_said(tmp_path: Path) -> None:
    """Megatron's lie on tensor parallel ranks too; axolotl's are an axis of its own (`utils/distributed.py`)."""
    file = tmp_path / "run.sh"
    file.write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --expert-model-parallel-size 8"
        " --expert-tensor-parallel-size 1 --micro-batch-size 1 --global-batch-size 16 --seq-length 4096 --bf16\n"
    )
    found = convert([file], to="axolotl", base_model="qwen3-30b-a3b")
    assert "--ep 8: it means 1" in found.left_out
    assert "expert_parallel_size" not in str(found)


def test_a_whole_model_is_trained_whole_in_unsloth(tmp_path: Path) -> None:
    """Its script has adapters unless `full_finetuning` says otherwise (`models/loader.py` of unsloth 2026.10)."""
    file = tmp_path / "train.yaml"
    file.write_text(
        "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: full\ncutoff_len: 2048\npure_bf16: true\n"
    )
    found = convert([file], to="unsloth")
    assert "full_finetuning=True" in str(found)
    assert not any("lora" in line for line in found.left_out)


def test_arguments_over_a_file_are_written_as_its_tool_reads_them(tmp_path: Path) -> None:
    """LLaMA-Factory merges `key=value` into the file that it is started with, and no `--key value` (`hparams/parser.py`)."""
    (tmp_path / "a.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: lora\nbf16: true\n"
    )
    (tmp_path / "run.sh").write_text("llamafactory-cli train a.yaml learning_rate=1e-5\n")
    found = convert(Job("qwen3-8b", micro_batch=4, seq_len=2048), to="llamafactory", onto=tmp_path / "run.sh")
    assert "per_device_train_batch_size=4" in str(found)
    assert "--per_device" not in str(found)


@pytest.mark.parametrize(
    ("before", "asked"), [("", "bfloat16"), (" --dtype float32", "bfloat16"), (" --dtype bfloat16", "float32")]
)
def test_the_dtype_of_a_base_with_adapters_is_said_to_the_trainer(before: str, asked: str, tmp_path: Path) -> None:
    """A remedy that needs another dtype of the frozen weights says it: without, what is pasted does not fit."""
    file = tmp_path / "run.sh"
    file.write_text(f"trl sft --model_name_or_path Qwen/Qwen3-0.6B --use_peft --bf16 true{before}\n")
    setups = [resolve_job(Job(str(file), weights=weights)) for weights in (None, asked)]
    assert words(*setups) == f"{file}: --dtype {asked}"
