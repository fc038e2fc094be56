"""The GPUs that a file asks its cluster for are those of its job, unless others are given."""

import json
from pathlib import Path

import pytest

from command_line import document, typed
from loadgauge.job_files.exchange import read
from loadgauge.job_files.reading.configured import asked_for

TRL = "torchrun --nproc_per_node 8 -m trl.scripts.sft --model_name_or_path Qwen/Qwen3-0.6B --max_length 1024 --bf16 true\n"
PROGRAM = (
    "from trl import SFTTrainer, SFTConfig\n{0}\ndef train(name='Qwen/Qwen3-0.6B', batch=2):\n"
    "    SFTTrainer(model=name, args=SFTConfig(max_length=512, per_device_train_batch_size=batch, bf16=True)).train()\n"
)
NOTEBOOK = {"cells": [{"cell_type": "code", "source": PROGRAM.format("")}], "metadata": {"colab": {"gpuType": "L4"}}}


@pytest.mark.parametrize(
    ("name", "text", "gpu", "gpus"),
    [
        ("run.sbatch", f"#!/bin/bash\n#SBATCH --gres=gpu:a100:8\n{TRL}", "a100-sxm4-80gb", 8),
        ("run.sh", f"#!/bin/bash\n#SBATCH -N 1 --gpus-per-node=h200:8\n{TRL}", "h200-sxm-141gb", 8),
        ("run.sh", f"#!/bin/bash\n#SBATCH --gres=gpu:8\n#SBATCH --constraint=v100\n{TRL}", "v100-sxm2-32gb", 8),
        ("sky.yaml", f"resources:\n  accelerators: L40S:8\nrun: |\n  {TRL}", "l40s", 8),
        ("dstack.yml", f"commands:\n  - {TRL}resources:\n  gpu: H100:8\n", "h100-sxm5-80gb", 8),
        ("pod.yaml", f"apiVersion: v1\nnodeSelector:\n  nvidia.com/gpu.product: A100-SXM4-80GB\ncommand: [sh, -c, '{TRL}']\n",
         "a100-sxm4-80gb", 8),
        ("modal.py", PROGRAM.format("@app.function(gpu='A100-80GB:4')"), "a100-sxm4-80gb", 4),
        ("sage.py", PROGRAM.format("instance_type='ml.g5.12xlarge'"), "a10g", 4),
        ("colab.ipynb", json.dumps(NOTEBOOK), "l4", 1),
        ("colab.ipynb", json.dumps(NOTEBOOK).replace("L4", "A100"), "a100-sxm4-40gb", 1),
    ],
)  # fmt: skip
def test_each_cluster_s_words(name: str, text: str, gpu: str, gpus: int, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    answer = document(f"estimate {file}")
    assert (answer["gpu"], answer["layout"]["gpus"]) == (gpu, gpus)
    assert f"its GPUs are {gpu}" in json.dumps(answer)
    assert document(f"estimate {file} --gpu b200")["gpu"] == "b200-sxm-180gb"  # what is typed goes first


@pytest.mark.parametrize(
    "words", ["#SBATCH --gres=gpu:8", "#SBATCH --constraint=rome", "#SBATCH --gres=gpu:quantum:8", "# gpu: big"]
)
def test_no_gpu_is_made_up(words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"#!/bin/bash\n{words}\n{TRL}")
    assert document(f"estimate {file}")["gpu"] is None


def test_a_plan_takes_them_too(tmp_path: Path) -> None:
    file = tmp_path / "run.sbatch"
    file.write_text(f"#!/bin/bash\n#SBATCH --gres=gpu:h100:8\n{TRL}")
    found = typed(f"plan {file} --gpus 8")
    assert found.code == 0, found.err
    assert "--gres=gpu:h100:8 as --gpu h100-sxm5-80gb" in found.err


@pytest.mark.parametrize(
    "text", ["\n", " ", "gpu:" + " " * 99_000, "accelerators: ", "instance_type  ", "#SBATCH --x ", "srun  \n"]
)
def test_a_long_file_is_searched_once(text: str) -> None:
    """Patterns that look at each blank again for each line would take minutes of 100,000 letters."""
    assert asked_for(text * (100_000 // len(text))) is None


@pytest.mark.parametrize(
    ("count", "launcher", "gpus", "batch"),
    [
        ("NUM_GPUS=4", "deepspeed", 4, 64),
        ("NUM_GPUS=4", "deepspeed --num_gpus 2", 2, 32),  # the launcher's own word goes first
        ("export WORLD_SIZE=2", "torchrun", 2, 64),
    ],
)
def test_a_batch_that_is_divided_says_the_gpus(count: str, launcher: str, gpus: int, batch: int) -> None:
    name = count.split("=")[0].split()[-1]
    text = f"BATCH_PER_GPU=2\n{count}\nPASSES=$((64 / (BATCH_PER_GPU * {name})))\n"
    text += f"{launcher} train.py --model_name_or_path Qwen/Qwen3-0.6B --max_length 1024 --bf16 true --output_dir out"
    text += " --per_device_train_batch_size $BATCH_PER_GPU --gradient_accumulation_steps $PASSES\n"
    job = read(text, "trl", file="run.sh").job
    assert (job.gpus, job.micro_batch, job.global_batch) == (gpus, 2, batch)
