"""Runs that files hold in something else's words: targets, cells, pages, logs, wrapped values, words of one's own, folders.

The oracle is the command itself: each file says the same run, and is read as that command is.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgauge.core.base import ConfigError
from loadgauge.core.command_line.main import run
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.families.catalogue import names_file
from loadgauge.job_files.exchange import read
from loadgauge.job_files.job_file import from_job_file, is_job_file
from loadgauge.job_files.reading.documents import load, of_folder
from loadgauge.job_files.reading.held import Part, parts

OPTIONS = {
    "model_name_or_path": "Qwen/Qwen3-8B", "per_device_train_batch_size": 3, "gradient_accumulation_steps": 5,
    "bf16": True, "gradient_checkpointing": True,
}  # fmt: skip
WORDS = " ".join(f"--{name} {value}" for name, value in OPTIONS.items())
COMMAND = f"torchrun --nproc_per_node 4 train.py {WORDS}"
LINES = "".join(f"{name}: {value}\n" for name, value in OPTIONS.items())
AXOLOTL = (
    "base_model: Qwen/Qwen3-8B\nmicro_batch_size: 3\ngradient_accumulation_steps: 5\nsequence_len: 2048\nbf16: true\n"
    "gradient_checkpointing: true\ndatasets: [{path: a, type: alpaca}]\n"
)


def notebook(*cells: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]})


HOLDS = {
    "Makefile": f"MODEL ?= {OPTIONS['model_name_or_path']}\nlint:\n\truff check\ntrain: data\n"
    "\t@torchrun --nproc_per_node 4 train.py \\\n"
    f"\t\t{WORDS.replace('Qwen/Qwen3-8B', '$(MODEL)')}\n",
    "justfile": f'gpus := "4"\ntrain batch="3":\n    torchrun --nproc_per_node {{{{gpus}}}} train.py '
    f"{WORDS.replace('size 3', 'size {{batch}}')}\n",
    "Taskfile.yml": f"vars: {{GPUS: 4}}\ntasks:\n  train:\n    cmds:\n"
    f"      - torchrun --nproc_per_node={{{{.GPUS}}}} train.py {WORDS}\n",
    "ci.yml": f"jobs:\n  t:\n    steps:\n      - run: pip install x\n      - name: Train\n        env: {{N: '4'}}\n"
    f"        run: torchrun --nproc_per_node $N train.py {WORDS}\n",
    "azure.yml": f"command: torchrun --nproc_per_node 4 train.py {WORDS.replace('size 3', 'size ${{inputs.b}}')}\n"
    "inputs: {b: 3}\n",
    "vertex.yaml": "workerPoolSpecs:\n- machineSpec: {acceleratorCount: 4}\n  replicaCount: 1\n  containerSpec:\n"
    f"    command: [torchrun, train.py]\n    args: {json.dumps(WORDS.split())}\n",
    "dvc.yaml": f"vars: [batch: 3]\nstages:\n  train:\n    cmd: {COMMAND.replace('size 3', 'size ${batch}')}\n",
    "launch.json": '{"configurations": [{"name": "t", "request": "launch", // mine\n "module": "torch.distributed.run", "args": '
    f'{json.dumps(["--nproc_per_node=4", "train.py", *WORDS.split()])},}}]}}',
    "page.md": f"# Run\n```bash\n$ pip install x\n```\nthen\n```bash\n$ {COMMAND}\n```\n",
    "page.qmd": f"```{{bash}}\n{COMMAND}\n```\n```{{r}}\nplot(1)\n```\n",
    "cells.ipynb": notebook("!pip install x", f"%%bash\n{COMMAND}", "import os"),
    "line.ipynb": notebook(f"!{COMMAND}"),
    "written.sh": f"cat > go.sh <<'EOF'\n{COMMAND}\nEOF\nsrun bash go.sh\n",
    "inside.sbatch": f"srun bash <<'EOF'\n{COMMAND}\nEOF\n",
    "sweep.yaml": "method: grid\nprogram: train.py\n"
    "command: ['${env}', torchrun, --nproc_per_node=4, '${program}', '${args}']\nparameters:\n"
    + "".join(f"  {name}: {{value: {value}}}\n" for name, value in OPTIONS.items()).replace("value: 3", "values: [1, 3, 2]"),
    "lightning.yaml": "trainer: {devices: 4, accumulate_grad_batches: 5, precision: bf16-mixed}\n"
    "model: {init_args: {model_name: Qwen/Qwen3-8B, gradient_checkpointing: true}}\ndata: {batch_size: 3}\n",
    "hparams.yaml": "model: {name_or_path: Qwen/Qwen3-8B}\ntraining:\n  n_gpus: 4\n  batch_size: 3\n  grad_accum: 5\n  bf16: true\n"
    "  gradient_checkpointing: true\neval:\n  batch_size: 64\n",
    "cloud.py": f"h = {OPTIONS}\nPyTorch(entry_point='train.py', hyperparameters=h,\n"
    "        instance_type='ml.g5.12xlarge', instance_count=1,\n"
    "        distribution={'torch_distributed': {'enabled': True}})\n",
    "config.yaml": "_wandb: {value: {}}\nworld_size: {value: 4}\nhidden_size: {value: 4096}\n"
    "_name_or_path: {value: Qwen/Qwen3-8B}\n"
    "model_type: {value: qwen3}\nmax_length: {value: 20}\n"
    + "".join(f"{name}: {{value: {value}}}\n" for name, value in OPTIONS.items() if name != "model_name_or_path"),
    "train.log": "0: loading models--Qwen--Qwen3-8B/snapshots/1/config.json\n0: TrainingArguments(\n0: _n_gpu=4,\n"
    + "".join(f"0: {name}={value},\n" for name, value in OPTIONS.items() if name != "model_name_or_path")
    + "0: fsdp=[],\n0: optim=OptimizerNames.ADAMW_TORCH,\n0: )\n0: world_size 4\n",
}  # fmt: skip


def put(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return str(file)


def opened(file: str) -> Job:
    return read(load(file), file=file, given={} if "log" not in file else {"gpus": 4}).job


@pytest.mark.parametrize("name", HOLDS)
def test_a_file_that_holds_a_run_is_read_as_its_command_is(name: str, tmp_path: Path) -> None:
    file = put(tmp_path, name, HOLDS[name])
    job, command = opened(file), read(COMMAND).job
    same = ("model", "micro_batch", "gpus", "recompute", "lora_rank", "zero")
    assert is_job_file(file)
    assert [getattr(job, each) for each in same] == [getattr(command, each) for each in same]
    assert job.micro_batch == 3
    assert job.global_batch in (60, None)  # None: of accumulation, which is worked out with the model


MEGATRON = """------------------------ arguments ------------------------
  add_bias_linear ................. False
  bf16 ............................ True
  attention_backend ............... AttnBackend.flash
  ffn_hidden_size ................. 14336
  global_batch_size ............... 64
  hidden_size ..................... 4096
  lr .............................. None
  normalization ................... RMSNorm
  untie_embeddings_and_output_weights ... True
  micro_batch_size ................ 2
  num_attention_heads ............. 32
  num_layers ...................... 30
  padded_vocab_size ............... 64000
  params_dtype .................... torch.bfloat16
  position_embedding_type ......... rope
  seq_length ...................... 2048
  max_position_embeddings ......... 2048
  swiglu .......................... True
  tensor_model_parallel_size ...... 2
  vocab_size ...................... None
  world_size ...................... 8
-------------------- end of arguments ---------------------
"""


@pytest.mark.parametrize("before", ["", "3: ", "[rank3]:"])
def test_megatron_s_printed_arguments_are_its_options(before: str, tmp_path: Path) -> None:
    lines = "".join(f"{before}{line}\n" for line in MEGATRON.splitlines())
    file = put(tmp_path, "out.log", lines + f"{before}iteration 1\n" * 50)
    found = from_job_file(Job(file))
    job = found.job
    assert (job.framework, job.tp, job.micro_batch, job.global_batch, job.seq_len) == ("megatron", 2, 2, 64, 2048)
    assert job.gpus == 8
    assert (found.model.num_hidden_layers, found.model.vocab_size) == (30, 64000)


def test_deepspeed_s_printed_configuration_is_its_file(tmp_path: Path) -> None:
    settings = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2, "train_batch_size": 16}
    inner = json.dumps(settings, indent=4)
    file = put(tmp_path, "a.log", f"[INFO] [config.py:986:print]   json = {inner}\n[INFO] a\n")
    job = read(load(file), file=file).job
    assert (job.zero, job.micro_batch, job.global_batch) == (3, 2, 16)


def test_several_runs_are_listed_with_a_command_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = put(
        tmp_path, "Makefile", f"a:\n\t{COMMAND}\nb:\n\t{COMMAND.replace('size 3', 'size 2')}\nc:\n\techo --done\n"
    )
    assert run([file, "--gpu", "h100"]) == 2
    said = capsys.readouterr().err
    assert f"holds 2 runs; give one: `loadgauge {file}:a`, `loadgauge {file}:b`" in said
    assert opened(f"{file}:b").micro_batch == 2
    assert run([f"{file}:b", "--gpu", "h100", "--seq-len", "128", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["layout"]["micro_batch"] == 2
    with pytest.raises(ConfigError, match=r"holds no run 'd' \(known: a, b, c\)"):
        load(f"{file}:d")


def test_a_chosen_value_is_said(tmp_path: Path) -> None:
    file = put(tmp_path, "sweep.yaml", HOLDS["sweep.yaml"])
    assert "per_device_train_batch_size 3 of 1, 3, 2" in "".join(read(load(file), file=file).remarks)


@pytest.mark.parametrize(
    ("suggests", "batch"),
    [("trial.suggest_categorical('b', [1, 4, 2])", 4), ("trial.suggest_int('b', 1, 6)", 6), ("tune.choice([2, 1])", 2)],
)
def test_a_search_is_read_at_its_largest_batch(suggests: str, batch: int) -> None:
    text = (
        "from trl import SFTConfig, SFTTrainer\ndef f(trial):\n"
        f"    SFTTrainer('Qwen/Qwen3-8B', args=SFTConfig(per_device_train_batch_size={suggests})).train()\n"
    )
    found = read(text, file="a.py")
    assert found.job.micro_batch == batch
    assert any("is taken as" in remark for remark in found.remarks)


def test_ray_train_hands_its_settings_to_its_loop() -> None:
    text = (
        "from trl import SFTConfig, SFTTrainer\ndef loop(c):\n    SFTTrainer(c['m'], args=SFTConfig(max_length=c['n'])).train()\n"
        "TorchTrainer(loop, train_loop_config={'m': 'Qwen/Qwen3-8B', 'n': 768},"
        " scaling_config=ScalingConfig(num_workers=2, use_gpu=True))\n"
    )
    job = read(text, file="a.py").job
    assert (job.model, job.seq_len, job.gpus) == ("Qwen/Qwen3-8B", 768, 2)


def test_words_of_one_s_own_that_contradict_ask_for_a_value(tmp_path: Path) -> None:
    text = "teacher: {model_name: gpt2}\nstudent: {model_name: Qwen/Qwen3-8B}\n"
    text += "training: {batch_size: 2, max_length: 512, bf16: true}\n"
    file = put(tmp_path, "a.yaml", text)
    with pytest.raises(ConfigError, match="add --set model_name_or_path="):
        read(load(file), file=file, variables={})
    assert read(load(file), file=file, variables={"model_name_or_path": "gpt2"}).job.model == "gpt2"


CONTAINER = {
    "command": ["torchrun", "train.py"],
    "args": WORDS.split(),
    "resources": {"limits": {"nvidia.com/gpu": 8}, "requests": {"nvidia.com/gpu": 8}},
}


@pytest.mark.parametrize(
    ("kind", "spec", "gpus"),
    [
        ("TrainJob", {"trainer": {"numNodes": 3, **CONTAINER}}, 24),
        (
            "JobSet",
            {"jobs": [{"replicas": 2, "template": {"spec": {"parallelism": 2, "containers": [CONTAINER]}}}]},
            32,
        ),
        (
            "PyTorchJob",
            {name: {"replicas": n, "template": {"c": [{**CONTAINER}]}} for name, n in (("m", 1), ("w", 4))},
            40,
        ),
    ],
)
def test_machines_of_a_manifest_are_counted(kind: str, spec: object, gpus: int, tmp_path: Path) -> None:
    text = json.dumps({"apiVersion": "a/v1", "kind": kind, "spec": spec})
    assert opened(put(tmp_path, "a.yaml", text)).gpus == gpus


ADAPTER = '{"base_model_name_or_path": "gpt2", "peft_type": "LORA", "r": 8}'
FOLDERS: dict[str, tuple[dict[str, str], str, list[str]]] = {
    "a script over its configuration": (
        {
            "run.sh": f"{COMMAND} --deepspeed z.json\n",
            "z.json": '{"zero_optimization": {"stage": 3}}',
            "train.py": "a()\n",
        },
        "run.sh",
        [],
    ),
    "what a run of adapters leaves": (
        {
            "adapter_config.json": ADAPTER,
            "config.json": "{}",
            "args.json": json.dumps(OPTIONS),
            "trainer_state.json": "{}",
        },
        "args.json",
        ["adapter_config.json"],
    ),
    "a page where nothing else says it": ({"README.md": HOLDS["page.md"], "setup.py": "setup()\n"}, "README.md", []),
    "a target that starts a script": ({"Makefile": "train:\n\tbash run.sh --now 1\n", "run.sh": COMMAND}, "run.sh", []),
    "hydra's": (
        {".hydra/config.yaml": HOLDS["hparams.yaml"], ".hydra/overrides.yaml": "- a.b=1\n"},
        ".hydra/config.yaml",
        [],
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_the_file_that_says_its_run(name: str, tmp_path: Path) -> None:
    files, main, beside = FOLDERS[name]
    for each, text in files.items():
        put(tmp_path, each, text)
    found = of_folder(str(tmp_path))
    assert found == (str(tmp_path / main), [str(tmp_path / each) for each in beside])
    assert is_job_file(str(tmp_path))


def test_a_folder_with_several_runs_or_none_says_so(tmp_path: Path) -> None:
    put(tmp_path, "setup.py", "setup()\n")
    with pytest.raises(ConfigError, match="nor a file that says a training run"):
        of_folder(str(tmp_path))
    names = [put(tmp_path, f"configs/{each}.yaml", AXOLOTL) for each in "ab"]
    with pytest.raises(ConfigError, match="has 2 files that say a run; give one") as error:
        of_folder(str(tmp_path))
    assert all(f"`loadgauge {name}`" in str(error.value) for name in names)


def test_a_run_in_a_file_is_a_file_s_name_for_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser may name no file of the server, in whatever words."""
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "Makefile", HOLDS["Makefile"])
    assert names_file("Makefile:train")
    assert not names_file("Makefile2:train")


def test_a_model_s_folder_stays_a_model(tmp_path: Path) -> None:
    put(tmp_path, "config.json", '{"model_type": "gpt2"}')
    assert not is_job_file(str(tmp_path))


def test_plain_job_files_hold_nothing(tmp_path: Path) -> None:
    assert not parts(AXOLOTL, "a.yaml")
    assert not parts(COMMAND, "a.sh")
    assert load(put(tmp_path, "a.yaml", AXOLOTL)) == AXOLOTL


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "apiVersion: &a\n  run: --x 1\n  b: *a\n"),
        (
            "b.yaml",
            "run: a --b\na0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)),
        ),
        ("c.json", '{"run": ' + "[" * 5000),
        ("d.yaml", "run: !!python/object/apply:os.system ['echo --x']\n"),
        ("a.log", "json = {\n" * 20_000 + "-" * 200_000),
        ("b.log", "TrainingArguments(\n" * 20_000),
        ("c.log", "python \\\n" * 20_000),
        ("d.log", "Namespace(a=" * 50_000),
        ("e.log", "--- arguments ---\n" * 20_000 + " a ...\n" * 20_000),
        ("a.md", "".join("`" * count + "\n" for count in range(3, 300))),
    ],
)
def test_a_hostile_file_holds_nothing_or_is_refused(name: str, text: str, tmp_path: Path) -> None:
    assert not [
        part for part in parts(text, str(tmp_path / name)) if isinstance(part, Part) and "os.system" in part.text
    ]
    with pytest.raises(ConfigError):
        read(load(put(tmp_path, name, text)), file=name)


def test_variables_do_not_grow_without_end() -> None:
    with pytest.raises(ConfigError, match="too large"):
        parts(f"A={'x' * 1500}\nt:\n\techo --a {'$(A)' * 2000}\n", "Makefile")
