"""Files that hold a run in something else's words: manifests of clusters, launchers in Python, interpolations, parsers' names."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgauge.core.definitions.job.job import Job
from loadgauge.job_files.exchange import JobFile, read
from loadgauge.job_files.reading.documents import load

WORDS = "--model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 2 --bf16 --max_seq_length 4096"
CONTAINER = (
    f"{{name: t, command: [bash, -lc, 'accelerate launch train.py {WORDS}'],"
    " resources: {limits: {nvidia.com/gpu: 8}}}"
)
MANIFESTS = {
    "kubernetes": f"apiVersion: batch/v1\nkind: Job\nspec: {{template: {{spec: {{containers: [{CONTAINER}]}}}}}}\n",
    "kubeflow": "apiVersion: kubeflow.org/v1\nspec:\n  pytorchReplicaSpecs:\n"
    + "".join(
        f"    {name}: {{replicas: {count}, template: {{spec: {{containers: [{CONTAINER}]}}}}}}\n"
        for name, count in (("Master", 1), ("Worker", 3))
    ),
    "skypilot": "resources: {accelerators: H100:8}\nnum_nodes: 2\nenvs: {BATCH: 2}\nrun: |\n  torchrun"
    " --nnodes $SKYPILOT_NUM_NODES"
    f" --nproc_per_node $SKYPILOT_NUM_GPUS_PER_NODE \\\n    train.py {WORDS.replace('size 2', 'size $BATCH')}\n",
    "dstack": "type: task\nenv: [TOKEN, 'BATCH=2']\ncommands:\n  - pip install x\n"
    "  - accelerate launch --num_processes $DSTACK_GPUS_NUM"
    f" train.py {WORDS.replace('size 2', 'size $BATCH')}\nresources: {{gpu: 'H100:4'}}\n",
    "compose": f"services:\n  train:\n    command: torchrun --nproc_per_node 4 train.py {WORDS}\n",
    "ray": f"entrypoint: torchrun --nproc_per_node 4 train.py {WORDS}\n",
}


def opened(text: str, file: Path) -> JobFile:
    file.write_text(text)
    return read(load(file), file=str(file))


@pytest.mark.parametrize(
    ("name", "gpus"),
    [("kubernetes", 8), ("kubeflow", 32), ("skypilot", 16), ("dstack", 4), ("compose", 4), ("ray", 4)],
)
def test_a_manifest_holds_a_command(name: str, gpus: int, tmp_path: Path) -> None:
    """The command of its containers is read, with their variables; GPUs are those that it reserves where the command is silent."""
    job = opened(MANIFESTS[name], tmp_path / "job.yaml").job
    assert (job.model, job.micro_batch, job.seq_len, job.gpus) == ("Qwen/Qwen3-8B", 2, 4096, gpus)


def test_a_file_with_a_key_of_manifests_stays_what_it_is(tmp_path: Path) -> None:
    text = "run: a\nmodel_name_or_path: Qwen/Qwen3-8B\nbf16: true\nmax_length: 2048\nper_device_train_batch_size: 2\n"
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert load(file) == text


LOOP = """from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
{head}
def train():
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")
    args = TrainingArguments("o", per_device_train_batch_size=2, bf16=True, deepspeed={{"zero_optimization": {{"stage": 2}}}})
    Trainer(model=model, args=args).train()
{end}
"""


@pytest.mark.parametrize(
    ("head", "end"),
    [
        ('@app.function(gpu="H100:4", timeout=60)', ""),
        ("", "TorchTrainer(train, scaling_config=ScalingConfig(num_workers=4, use_gpu=True)).fit()"),
    ],
)
def test_a_program_reserves_its_gpus(head: str, end: str) -> None:
    """Modal's and Ray Train's launchers; the DeepSpeed configuration within the call is the run's."""
    job = read(LOOP.format(head=head, end=end), file="a.py").job
    assert (job.gpus, job.zero, job.micro_batch) == (4, 2, 2)


PARSED = """import argparse
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-8B")
parser.add_argument("--bs", type=int, default=4)
{name} = parser.{call}()
model = AutoModelForCausalLM.from_pretrained({owner}.model)
Trainer(model=model, args=TrainingArguments("o", per_device_train_batch_size={owner}.bs, bf16=True)).train()
"""


@pytest.mark.parametrize(("name", "call"), [("args", "parse_args"), ("a", "parse_args"), ("p, _", "parse_known_args")])
def test_whatever_the_arguments_are_called(name: str, call: str) -> None:
    job = read(PARSED.format(name=name, call=call, owner=name[:4].partition(",")[0]), file="a.py").job
    assert (job.model, job.micro_batch) == ("Qwen/Qwen3-8B", 4)


def test_a_reference_of_omegaconf_is_followed() -> None:
    text = (
        "size: 2048\nrank: 4\nmodel: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_rank: '${rank}',\n"
        "  lora_attn_modules: [q_proj]}\n"
        "tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: '${size}'}\n"
        "batch_size: 2\ndataset: {_component_: torchtune.datasets.alpaca_dataset}\n"
        "optimizer: {_component_: torch.optim.AdamW}\nloss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}\n"
    )
    job: Job = read(text, "torchtune", file="a.yaml").job
    assert (job.lora_rank, job.seq_len) == (4, 2048)


def test_as_many_processes_as_a_machine_has_cards() -> None:
    """`--nproc-per-node gpu` says no number; a line that only asks for help trains nothing."""
    text = f"python train.py --help --bf16 --lora_r 8\ntorchrun --nproc-per-node {{}} train.py {WORDS}\n"
    assert [read(text.format(word)).job.gpus for word in ("gpu", "4")] == [None, 4]
