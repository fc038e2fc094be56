"""Programs that take DeepSpeed's own configuration, as its examples do, and scripts that train something else or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.job_files.exchange import read, write
from loadgauge.job_files.job_file import from_job_file, variables_of

ENGINE = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}},
}
SQUAD = (
    "deepspeed --num_gpus 8 squad.py --bert_model bert-large-uncased --train_batch_size 12 --max_seq_length 384"
    " --gradient_accumulation_steps 2 --deepspeed --deepspeed_config {} --output_dir out"
)
PRETRAIN = (
    "deepspeed --num_gpus 8 train.py --cf sizes.json --max_seq_length 128 --deepspeed --deepspeed_config engine.json\n"
)
CHOICE = """MODE=$1
if [ "$MODE" = "a" ]; then
cat > engine.json <<EOF
{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}
EOF
elif [ "$MODE" = "b" ]; then
cat > engine.json <<EOF
{"train_batch_size": 16, "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}
EOF
fi
CMD="deepspeed --num_gpus=8 tune.py --deepspeed_config=engine.json
    --model_name gpt2 --batch_size 4 --max_length 512"
eval $CMD
"""


def test_the_configuration_of_the_engine_decides(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(json.dumps(ENGINE))
    file = read(SQUAD.format("engine.json"), file=str(tmp_path / "run.sh"))
    job = file.job
    assert (job.model, job.gpus, job.zero, job.precision) == ("bert-large-uncased", 8, 2, "fp16")
    assert (job.micro_batch, job.global_batch, job.seq_len, file.extra.head) == (4, 64, 384, 2)
    assert "optimizer.type" in [item.key for item in file.uncounted]


def test_without_it_the_program_says_the_batch_and_flags_the_rest(tmp_path: Path) -> None:
    place = str(tmp_path / "run.sh")
    file = read(SQUAD.format("engine.json"), file=place)
    assert file.job.zero == 0
    assert [item.effect for item in file.uncounted if "not there" in item.note] == [
        "either",
        "either",
        "either",
    ]  # precision, optimizer, ZeRO
    bare = read(PRETRAIN.replace("sizes.json", "bert_large.json"), file=place)
    assert bare.job.model == "bert-large"
    assert [item.share for item in bare.uncounted if "micro-batch" in item.note] == [63]
    with pytest.raises(ConfigError, match="give --model NAME"):
        read(PRETRAIN, file=place)
    job = read(SQUAD.format("engine.json --fp16"), file=place, given={"zero": 1}).job
    assert (job.micro_batch, job.precision, job.zero) == (6, "fp16", 1)


def test_a_model_from_outside_is_what_the_path_says() -> None:
    line = "deepspeed main.py --model_name_or_path $1 --max_seq_len 512"
    file = read(line, file="training_scripts/opt/run_1.3b_lora.sh")
    assert (file.job.model, file.facts["model"].default) == ("opt-1.3b", True)
    with pytest.raises(ConfigError, match="--set 1=VALUE"):
        read(line, file="training_scripts/run.sh")


def test_sizes_of_a_model_in_a_file_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(json.dumps(ENGINE))
    sizes = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072}
    (tmp_path / "sizes.json").write_text(json.dumps({"bert_model_config": sizes}))
    config = read(PRETRAIN, file=str(tmp_path / "run.sh")).extra.config
    assert config is not None
    assert (config["num_hidden_layers"], config["vocab_size"]) == (6, 30528)


@pytest.mark.parametrize(("first", "wanted"), [("", (8, 3, "bf16")), ("1=a", (8, 3, "bf16")), ("1=b", (16, 1, "fp16"))])
def test_a_configuration_that_the_script_writes_and_an_argument_chooses(
    tmp_path: Path, first: str, wanted: tuple[int, int, str]
) -> None:
    job = read(CHOICE, file=str(tmp_path / "run.sh"), variables=variables_of(first)).job
    assert (job.global_batch, job.zero, job.precision) == wanted


def test_part_of_the_optimizer_stays_on_the_gpu() -> None:
    moved = {"device": "cpu", "ratio": 0.75, "super_offload": True}
    text = json.dumps(ENGINE | {"zero_optimization": {"stage": 3, "offload_optimizer": moved}, "optimizer": {}})
    kept = {item.key: item for item in read(text).uncounted}
    assert read(text).job.offload == "optimizer:0.75"
    patched = json.loads(write(read(text).job.replace(offload="optimizer:0.25"), "deepspeed", text).text)
    assert patched["zero_optimization"]["offload_optimizer"]["ratio"] == 0.25
    with pytest.raises(ConfigError, match="needs stage 3, not 2"):  # as DeepSpeed's own validator has it
        read(text.replace('"stage": 3', '"stage": 2'))
    assert kept["zero_optimization.offload_optimizer.super_offload"].effect == "costs"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("deepspeed main.py -a resnet50 --deepspeed_config x.json", "no language model"),
        ("deepspeed cifar10_deepspeed.py --deepspeed_config x.json", "no language model"),
        ("python chat.py --model_path x", "chat.py: is no training job"),
        ("bash sweep/run_one.sh 2", "starts sweep/run_one.sh, which is not there"),
        ("python train_x.py --checkpoint_dir ./x", "starts train_x.py, none of whose options"),
        ("torchrun validate.py --tensor-model-parallel-size 2 --num-layers 2", "is no training job"),
    ],
)
def test_what_trains_no_language_model_is_said(script: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(script + "\n", file="run.sh")


def test_a_file_whose_name_is_an_argument_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "a.sh").write_text('ARGS="--num-layers 2 --hidden-size 256 --num-attention-heads 4"\n')
    script = (
        "source conf/${1}.sh\ntorchrun --nproc_per_node 1 finetune.py $ARGS --micro-batch-size 1 --seq-length 512\n"
    )
    place = str(tmp_path / "run.sh")
    first = read(script, file=place)
    assert any("conf/a.sh is read, the first of 1: add --set 1=VALUE" in remark for remark in first.remarks)
    assert first.extra.config == read(script, file=place, variables={"1": "a"}).extra.config is not None
    assert read(script.replace("conf/$", "none/$"), file=place).extra.config is None
    (tmp_path / "conf" / "b.sh").write_text('ARGS="--num-layers 9 --hidden-size 256 --num-attention-heads 4"\n')
    doubts = {item.key: item.effect for item in read(script, file=place).uncounted}
    assert doubts["$1"] == "either"  # one of two, which decides
    assert "$1" not in {item.key for item in read(script, file=place, variables={"1": "b"}).uncounted}


def test_a_batch_that_whoever_starts_the_script_says_is_a_range() -> None:
    """`train_batch_size` of a script's second argument: one sequence is counted, and the range has more."""
    script = (
        "N=2\ndeepspeed run.py --deepspeed --deepspeed_config none.json --bert_model bert-base-uncased"
        " --max_seq_length 128 --train_batch_size $(($2/N))\n"
    )
    file = read(script, file="run.sh", given={"gpus": 2})
    doubt = next(item for item in file.uncounted if item.key == "--train_batch_size")
    assert (file.facts["micro_batch"].value, doubt.effect, doubt.share) == (1, "costs", 63)
    known = read(script, file="run.sh", given={"gpus": 2}, variables={"1": "x", "2": "32"})
    assert known.facts["micro_batch"].value == 16
    assert read(script, file="run.sh", given={"gpus": 2, "micro_batch": 4}).job.micro_batch == 4


def test_files_of_the_disk_are_not_read_for_a_text_alone(tmp_path: Path) -> None:
    """As the page reads what is dropped on it: a name in a script opens nothing."""
    sizes = tmp_path / "sizes.json"
    sizes.write_text('{"bert_model_config": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}}')
    text = f"deepspeed train.py --deepspeed --deepspeed_config none.json --cf {sizes} --max_seq_length 128\n"
    given = {"gpus": 1, "zero": 1, "micro_batch": 1, "precision": "fp16"}
    assert read(text, file="run.sh", given=given).extra.config is not None
    assert read(text, file="run.sh", given=given, alone=True).extra.config is None


def test_dropout_that_a_script_sets_to_zero_is_not_counted(tmp_path: Path) -> None:
    """OPT's config drops a tenth of the outputs; `configure_dropout` (dschat/utils/model) sets the rates that are given."""
    script = tmp_path / "run.sh"
    for rate, found in (("", 0.1), (" --dropout 0.0", 0.0), (" --dropout 0.1", 0.1)):
        script.write_text(
            f"deepspeed --num_gpus 8 main.py --model_name_or_path facebook/opt-350m --max_seq_len 512{rate}"
            " --per_device_train_batch_size 4 --zero_stage 2 --deepspeed\n"
        )
        model = from_job_file(Job(model=str(script))).model
        assert {block.dropout for block in model.blocks} == {found}
