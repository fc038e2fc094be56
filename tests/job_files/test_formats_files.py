"""Files as people have them: what is read, what is listed, what contradicts, and what a patch leaves alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from command_line import document, typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.job_files.exchange import combine, read, write

SCRIPT = """#!/bin/bash
# Trains a model of 8 billion parameters.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NNODES:-"4"}  # machines
TP=2
DATA=$1

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --swiglu
    --normalization RMSNorm
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --vocab-size 128256
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size $((4 * 32))  # sequences
    --bf16
    "--lr 3e-4"
    # --fp16
    --recompute-granularity selective
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 4
    --sequence-parallel  # with TP
    --use-distributed-optimizer
)
if [ -n "$WANDB" ]; then
    LOGGING_ARGS+=(--wandb-project x)
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \\
    ${PARALLEL_ARGS[@]} --data-path $DATA
echo done
"""
AXOLOTL = """# my fine-tune
base_model: NousResearch/Meta-Llama-3.1-8B  # the base

datasets:
  - path: tatsu-lab/alpaca   # instructions
    type: alpaca
sequence_len: 4096
sample_packing: true
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_target_linear: true
# batch
gradient_accumulation_steps: 4  # four
micro_batch_size: 2
optimizer: paged_adamw_8bit
learning_rate: 2e-4
bf16: auto
# memory
gradient_checkpointing: true
flash_attention: true
"""
DEEPSPEED = """{
    "bf16": {"enabled": true},
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 5e8
    },
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4
}
"""
AUTO = """{
  "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto"
}
"""
TOML = """# torchtitan, before 2026-02
[model]
name = "llama3"
flavor = "70B"

[training]
batch_size = 2  # a rank
seq_len = 8192
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 16
tensor_parallel_degree = 8  # within the node

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP  # sharded
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
ARGUMENTS = """model_name_or_path: meta-llama/Llama-3.1-8B
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
bf16: true
max_length: 2048
learning_rate: 1e-5
output_dir: out
"""


def run_of(text: str, name: str = "", **beside: object) -> Job:
    return read(text, file=name, given=beside).job


def test_a_shell_script_of_megatron() -> None:
    found = read(SCRIPT, file="train.sh")
    assert found.dialect == "megatron"
    wanted = {
        "gpus": 32, "gpus_per_node": 8, "tp": 2, "pp": 2, "vpp": 4, "sequence_parallel": True, "zero": 1,
        "micro_batch": 1, "global_batch": 128, "seq_len": 8192, "precision": "bf16", "recompute": "selective",
        "schedule": "interleaved", "framework": "megatron",
    }  # fmt: skip
    assert {name: getattr(found.job, name) for name in wanted} == wanted
    assert found.extra.config is not None
    assert found.extra.config["model_type"] == "llama"
    assert set(found.unread) == {"--lr", "--data-path"}  # WANDB is set nowhere, so that branch is not taken


def test_a_script_as_a_model(tmp_path: Path) -> None:
    """The sizes are those of Llama 3.1 8B, whose parameters Meta publishes as 8,030,261,248."""
    place = tmp_path / "train.sh"
    place.write_text(SCRIPT)
    found = document(f"estimate {place}")
    assert found["model"]["params"] == 8_030_261_248
    layout = found["layout"]
    assert [layout[name] for name in ("dp", "tp", "pp", "vpp", "global_batch")] == [8, 2, 2, 4, 128]
    assert "--data-path" in found["file"]
    beside = document(f"estimate {place} --gpus 64 --micro-batch 2")["layout"]
    assert [beside[name] for name in ("dp", "micro_batch", "global_batch")] == [16, 2, 128]


def test_a_patch_of_a_script_keeps_all_else() -> None:
    run = msgspec.structs.replace(read(SCRIPT, file="train.sh").job, tp=4, recompute="none", zero=0, seq_len=4096)
    text = write(run, "megatron", SCRIPT, file="train.sh").text
    assert read(text, file="train.sh").job == run
    before, after = SCRIPT.splitlines(), text.splitlines()
    gone = [line for line in before if line not in after]
    assert gone == [
        "    --seq-length 8192", "    --recompute-granularity selective", "    --tensor-model-parallel-size $TP",
        "    --use-distributed-optimizer",
    ]  # fmt: skip
    assert [line for line in after if line not in before] == [
        "    --seq-length 4096",
        "    --tensor-model-parallel-size 4",
    ]


def test_what_a_script_is_given_when_it_starts_must_be_said() -> None:
    script = "torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size $TP --micro-batch-size 1"
    with pytest.raises(ConfigError, match=r"TP is set nowhere: add --set TP=\.\.\. --model NAME"):
        read(script, file="job.sh")
    assert run_of(script, "job.sh", tp=4).tp == 4
    assert read(script, file="job.sh", variables={"TP": "2"}).job.tp == 2


def test_of_two_values_for_one_flag_the_last_counts() -> None:
    """As `argparse` has it."""
    script = "torchrun --nproc-per-node 8 x.py --micro-batch-size 1 --global-batch-size 16 --micro-batch-size 2"
    assert read(script, file="job.sh").job.micro_batch == 2


def test_axolotl() -> None:
    found = read(AXOLOTL, file="job.yaml")
    wanted = {
        "model": "NousResearch/Meta-Llama-3.1-8B", "seq_len": 4096, "micro_batch": 2, "qlora": True,
        "lora_rank": 32, "lora_targets": "all", "optimizer": "paged-adamw-8bit", "recompute": "full", "precision": "bf16",
    }  # fmt: skip
    assert found.dialect == "axolotl"
    assert {name: getattr(found.job, name) for name in wanted} == wanted
    assert found.extra.accumulation == 4
    assert found.unread == ("datasets", "sample_packing", "learning_rate")
    assert found.auto == ("bf16",)
    # On 8 GPUs a step is 2 x 4 x 8 sequences.
    assert run_of(AXOLOTL, "job.yaml", gpus=8).global_batch == 64


def test_a_patch_of_yaml_keeps_comments_and_lists() -> None:
    run = msgspec.structs.replace(
        read(AXOLOTL, file="job.yaml").job, micro_batch=1, qlora=False, base=None, lora_rank=16
    )
    text = write(run, "axolotl", AXOLOTL, file="job.yaml").text
    before, after = AXOLOTL.splitlines(), text.splitlines()
    assert [line for line in before if line not in after] == [
        "adapter: qlora", "load_in_4bit: true", "lora_r: 32", "micro_batch_size: 2",
    ]  # fmt: skip
    assert [line for line in after if line not in before] == ["adapter: lora", "lora_r: 16", "micro_batch_size: 1"]
    assert "gradient_accumulation_steps: 4  # four" in after


@pytest.mark.parametrize("key", ["# one\na: 1\n# two\nb: 2\n# three\nc: 3\n"])
def test_comments_outlive_the_key_before_them(key: str) -> None:
    from loadgauge.job_files.reading.nested import yaml_document

    for name in "abc":
        found = yaml_document(key)
        found.drop(name)
        assert found.names() == tuple(other for other in "abc" if other != name)
        assert [word for word in ("one", "two", "three") if f"# {word}" in found.text()] == ["one", "two", "three"]


def test_deepspeed_says_how_many_gpus() -> None:
    run = run_of(DEEPSPEED, "ds.json")
    assert (run.gpus, run.zero, run.global_batch, run.micro_batch) == (8, 2, 64, 2)
    with pytest.raises(ConfigError, match=r"train_batch_size = 64 contradicts .* x 16 data-parallel ranks"):
        combine(
            [read(DEEPSPEED, file="ds.json"), read(ACCELERATE.replace("FSDP  # sharded", "DEEPSPEED"), file="a.yaml")]
        )


def test_a_patch_of_json_keeps_order_and_numbers() -> None:
    run = msgspec.structs.replace(run_of(DEEPSPEED, "ds.json"), zero=3)
    text = write(run, "deepspeed", DEEPSPEED, file="ds.json").text
    assert '"reduce_bucket_size": 5e8' in text
    assert list(text.split('"')[1::2]) == list(DEEPSPEED.split('"')[1::2])
    assert '"stage": 3' in text


def test_auto_is_filled_from_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(AUTO)
    place = tmp_path / "train.yaml"
    place.write_text(ARGUMENTS + "deepspeed: ds.json\n")
    found = read(place.read_text(), file=str(place), given={"gpus": 4})
    assert found.dialect == "trl"
    run = found.job
    assert (run.zero, run.offload, run.framework, run.precision) == (3, "optimizer", "deepspeed", "bf16")
    assert (run.micro_batch, run.global_batch) == (2, 64)
    (tmp_path / "ds.json").write_text(
        AUTO.replace('"train_micro_batch_size_per_gpu": "auto"', '"train_micro_batch_size_per_gpu": 4')
    )
    with pytest.raises(
        ConfigError, match="train_micro_batch_size_per_gpu = 4 contradicts per_device_train_batch_size = 2"
    ):
        read(place.read_text(), file=str(place))
    (tmp_path / "ds.json").unlink()
    with pytest.raises(ConfigError, match=r"names ds.json, which is not there.*give --zero"):
        read(place.read_text(), file=str(place), strict=True)
    assert read(place.read_text(), file=str(place), given={"zero": 1}).job.zero == 1


def test_two_files_of_one_job() -> None:
    run, _ = combine([read(ACCELERATE, file="a.yaml"), read(ARGUMENTS, file="train.yaml")])
    assert (run.gpus, run.gpus_per_node, run.zero, run.recompute) == (16, 8, 2, "full")
    assert (run.micro_batch, run.global_batch, run.seq_len) == (2, 2 * 8 * 16, 2048)
    with pytest.raises(ConfigError, match=r"contradicts a\.yaml: mixed_precision = fp16"):
        combine([read(ACCELERATE.replace("bf16", "fp16"), file="a.yaml"), read(ARGUMENTS, file="train.yaml")])


def test_torchtitan_of_old() -> None:
    run = run_of(TOML, "70b.toml")
    wanted = {
        "model": "llama-3.1-70b", "tp": 8, "sequence_parallel": True, "gpus": 256, "zero": 3, "replicas": 2,
        "micro_batch": 2, "global_batch": 64, "seq_len": 8192, "recompute": "full:every=2", "loss": None,
    }  # fmt: skip
    assert {name: getattr(run, name) for name in wanted} == wanted
    text = write(msgspec.structs.replace(run, tp=4, gpus=128), "torchtitan", TOML, file="70b.toml").text
    assert "tensor_parallel_degree = 4  # within the node" in text
    assert text.count("#") == TOML.count("#")


@pytest.mark.parametrize(
    ("version", "length", "recompute", "precision", "loss"),
    [
        # The defaults of the released packages' SFTConfig.
        ("0.15", 1024, "none", "fp32", "auto"),
        ("0.19", 1024, "none", "bf16", "auto"),
        ("0.22", 1024, "full", "bf16", "auto"),
        ("1.5", 1024, "full", "bf16", "auto"),
        ("1.6", 1024, "full", "bf16", "chunked"),
        ("1.16", 1024, "full", "bf16", "tiled"),
        (None, 1024, "full", "bf16", "tiled"),
    ],
)
def test_defaults_are_those_of_the_version(
    version: str | None, length: int, recompute: str, precision: str, loss: str
) -> None:
    run = read("per_device_train_batch_size: 4\n", "trl", file="a.yaml", version=version).job
    assert (run.seq_len, run.recompute, run.precision, run.loss) == (length, recompute, precision, loss)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", ARGUMENTS + "fp16: true\n", "fp16: contradicts bf16"),
        ("a.yaml", ARGUMENTS.replace("2048", "long"), "max_length: must be a whole number"),
        ("a.yaml", ARGUMENTS + "max_seq_length: 4096\n", "max_seq_length: 4096 contradicts max_length = 2048"),
        (
            "a.yaml",
            ARGUMENTS + "fsdp: full_shard\ndeepspeed: {zero_optimization: {stage: 2}}\n",
            "deepspeed: contradicts fsdp",
        ),
        ("a.yaml", ACCELERATE.replace("num_processes: 16", "num_processes: 15"), "15 cannot be split over 2 machines"),
        (
            "a.yaml",
            ACCELERATE + "parallelism_config:\n  parallelism_config_tp_size: 3\n",
            "16 GPUs cannot be split over 3",
        ),
        (
            "a.yaml",
            ACCELERATE.replace("  fsdp_reshard", "  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_reshard"),
            "fsdp_sharding_strategy: contradicts",
        ),
        ("ds.json", DEEPSPEED.replace('"stage": 2', '"stage": 4'), "must be 0, 1, 2 or 3"),
        ("ds.json", DEEPSPEED.replace('"stage": 2', '"stage": 3, "mics_shard_size": 8'), "up to release 0.17"),
        ("ds.json", DEEPSPEED.replace('"bf16"', '"fp16": {"enabled": true}, "bf16"'), "fp16.enabled: contradicts"),
        ("ds.json", DEEPSPEED.replace("64", "60"), "train_batch_size = 60 contradicts"),
        ("a.sh", "torchrun x.py --bf16 --fp16 --micro-batch-size 1 --seq-length 8", "contradicts --bf16"),
        (
            "a.sh",
            "torchrun x.py --recompute-granularity full --micro-batch-size 1 --seq-length 8",
            "full needs --recompute-method",
        ),
        (
            "a.sh",
            "torchrun x.py --optimizer soap --micro-batch-size 1 --seq-length 8",
            "'soap': is not known here",
        ),
        ("job.yaml", AXOLOTL.replace("adapter: qlora\n", ""), "no adapter trains"),
        ("job.yaml", AXOLOTL + "fp16: true\nbfloat16: true\n", "contradicts another switch"),
        ("x.py", "print(1)", "is no training job: it calls no trainer"),
        ("x.yaml", "a: 1\n", "no keys of a job file that is known"),
    ],
)
def test_what_contradicts_is_one_clear_line(name: str, text: str, words: str, tmp_path: Path) -> None:
    place = tmp_path / name
    place.write_text(text)
    found = typed(["convert", str(place), "--to", "flags", "--strict"])
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("loadgauge: ")
    assert found.err.count("\n") == 1
    assert words in found.err


def test_every_key_that_is_not_read_is_listed(tmp_path: Path) -> None:
    place = tmp_path / "job.yaml"
    place.write_text(AXOLOTL + "some_new_key: 1\nnested:\n  inner: 2\n")
    found = typed(f"convert {place} --to llamafactory")
    assert found.code == 0
    for words in ("some_new_key = 1", "nested.inner = 2"):
        assert f"not counted: {words}: axolotl has no such key, and drops it" in found.err
    assert "change neither memory nor the time of a step: datasets, sample_packing, learning_rate" in found.err
    assert "llamafactory: the 5 keys of" in found.err
    assert "not carried over" in found.err
    assert "quantization_bit: 4" in found.out
    both = document(f"convert {place} --to llamafactory")
    assert both["files"][0]["not_read"][-2:] == ["some_new_key", "nested.inner"]
    assert both["text"] == found.out
    shown = document(f"check --facts {place}")["files"][0]
    assert (shown["aside"]["sample_packing"], shown["aside"]["some_new_key"]) == ("True", "1")
    rows = [line.split() for line in typed(f"check --facts {place}").out.splitlines()]
    number = place.read_text().split("sample_packing")[0].count("\n") + 1
    assert ["sample_packing", "True", "changes", "neither", "memory", "nor", "time", str(number)] in rows
    lines = {fact["name"]: (fact["key"], fact["line"]) for fact in shown["facts"] if not fact["default"]}
    assert all(key.split(" and ")[0] in place.read_text().split("\n")[line - 1] for key, line in lines.values())
    assert lines["micro_batch"][0] == "micro_batch_size"


def test_what_a_dialect_cannot_say_is_listed(tmp_path: Path) -> None:
    place = tmp_path / "train.sh"
    place.write_text(SCRIPT)
    found = typed(f"convert {place} --to deepspeed --gpu h100-sxm5-80gb")
    assert found.code == 0
    for words in ("--pp 2: has no place in it", "--recompute selective", "--gpu h100-sxm5-80gb: has no place in it"):
        assert words in found.err


def test_flags_change_the_run(tmp_path: Path) -> None:
    place = tmp_path / "ds.json"
    place.write_text(DEEPSPEED)
    assert '"stage": 3' in typed(f"convert {place} --to deepspeed --zero 3").out
    line = typed(f"convert {place} --to flags --gpus 16").out
    assert line.startswith("loadgauge estimate MODEL --gpus 16")
    assert "--zero 2" in line
    assert "--global-batch 64" in line
    # The line can be typed as it stands.
    assert typed(line.replace("loadgauge ", "", 1).replace("MODEL", "gpt2").split()).code == 0


def test_a_job_without_a_model_says_so(tmp_path: Path) -> None:
    place = tmp_path / "ds.json"
    place.write_text(DEEPSPEED)
    found = typed(f"estimate {place}")
    assert found.code == 2
    assert found.err.endswith("names no model that is read: add --model NAME\n")
    told = typed(f"estimate {place} --model llama-3.2-1b --gpu h100 --brief")
    assert (told.code, told.out.split()[0]) == (0, "FITS")


def test_a_model_in_a_folder_of_another_machine_is_asked_for(tmp_path: Path) -> None:
    place = tmp_path / "train.yaml"
    place.write_text("base_model: /nowhere/model\nmicro_batch_size: 1\nsequence_len: 512\n")
    found = typed(f"estimate {place} --gpu h100")
    assert (found.code, found.err) == (
        2,
        f"loadgauge: {place}: its model /nowhere/model is a folder that is not here: add --model NAME\n",
    )
    assert typed(f"estimate {place} --gpu h100 --model llama-3.2-1b --brief").code == 0


def test_a_job_file_is_a_model(tmp_path: Path) -> None:
    place = tmp_path / "job.yaml"
    place.write_text(AXOLOTL)
    found = document(f"estimate {place} --gpu rtx4090")
    direct = document(
        "estimate llama-3.1-8b --gpu rtx4090 --framework huggingface --zero 0 --recompute full --micro-batch 2"
        " --global-batch 8 --seq-len 4096 --precision bf16 --optimizer paged-adamw-8bit --attention flash --lora-rank 32"
        " --lora-targets all --qlora --base nf4 --kbit-upcast none --loss auto --weights bfloat16 --kernels lora"
    )
    assert found["memory"] == direct["memory"]
    assert found["time"] == direct["time"]
    assert "NousResearch/Meta-Llama-3.1-8B is taken for llama-3.1-8b" in found["file"]
    assert "sample_packing" in found["file"]
    printed = typed(f"estimate {place} --gpu rtx4090")
    assert "Your job file" in printed.out
