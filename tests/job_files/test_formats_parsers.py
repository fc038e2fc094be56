"""Exported files, read by the tools themselves, as far as they are installed here."""

from __future__ import annotations

import importlib.metadata
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from ruamel.yaml import YAML

from job_runs import runs
from loadgauge.core.definitions.job.job import Job
from loadgauge.job_files.exchange import write
from loadgauge.job_files.ideas.facts import Extra

FEW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
NO_GPU = "use_cpu: true\n"
"""What lets transformers check the arguments of a GPU job where there is no GPU."""
DTYPES = {"bf16": (True, False), "fp16": (False, True), "fp32": (False, False)}


def plain(run: Job) -> Job:
    """Without sharding, which transformers only takes where several processes have started."""
    return msgspec.structs.replace(run, zero=0, offload="none", framework="huggingface", gpus=None)


def arguments(text: str) -> list[str]:
    """The words of a command line after the program."""
    words = shlex.split(text)
    return words[next(index for index, word in enumerate(words) if word.endswith((".py", ".train"))) + 1 :]


@pytest.mark.parametrize("name", ["transformers", "trl"])
@pytest.mark.parametrize("syntax", ["yaml", "argv"])
@FEW
@given(data=st.data())
def test_transformers(name: str, syntax: str, data: st.DataObject, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run = plain(data.draw(runs(name, syntax)))
    classes: Any = transformers.TrainingArguments
    if name == "trl":
        trl = pytest.importorskip("trl")
        classes = (trl.SFTConfig, trl.ModelConfig)
    parser = transformers.HfArgumentParser(classes)
    template = (
        "torchrun train.py --output_dir out --use_cpu True\n" if syntax == "argv" else f"output_dir: out\n{NO_GPU}"
    )
    text = write(run, name, template, syntax=syntax).text
    if syntax == "argv":
        words = arguments(text)
        for own in ("--model_name_or_path", "--dtype") if name == "transformers" else ():  # the script's own
            if own in words:
                index = words.index(own)
                del words[index : index + 2]
        found = parser.parse_args_into_dataclasses(words)
    else:
        place = tmp_path / "args.yaml"
        place.write_text(text)
        found = parser.parse_yaml_file(str(place), allow_extra_keys=name == "transformers")
    args = found[0]
    assert args.per_device_train_batch_size == run.micro_batch
    assert (bool(args.bf16), bool(args.fp16)) == DTYPES[str(run.precision)]
    on = args.activation_checkpointing if args.activation_checkpointing is not None else args.gradient_checkpointing
    assert bool(on) == (run.recompute != "none")
    if name == "trl":
        model = found[1]
        assert args.max_length == run.seq_len
        assert (model.lora_r if model.use_peft else 0) == run.lora_rank
        assert (model.load_in_4bit, model.load_in_8bit) == (run.qlora and run.base != "int8", run.base == "int8")
        assert (model.attn_implementation == "eager") == (run.attention == "eager")


@FEW
@given(data=st.data())
def test_accelerate(data: st.DataObject, tmp_path: Path) -> None:
    arguments_of = pytest.importorskip("accelerate.commands.config.config_args")
    run = data.draw(runs("accelerate", "yaml"))
    extra = Extra(accumulation=data.draw(st.sampled_from((1, 4))))
    place = tmp_path / "accelerate.yaml"
    place.write_text(write(run, "accelerate", extra=extra).text)
    found = arguments_of.load_config_from_file(str(place))
    assert found.num_processes == run.gpus
    kind = str(found.distributed_type).rpartition(".")[2]
    if kind == "FSDP":
        assert run.zero == (3 if found.fsdp_config["fsdp_reshard_after_forward"] else 2)
    elif kind == "DEEPSPEED":
        assert found.deepspeed_config["zero_stage"] == run.zero
    elif kind == "MEGATRON_LM":
        assert found.megatron_lm_config["megatron_lm_use_distributed_optimizer"] == (run.zero == 1)
    else:
        assert run.zero == 0
    sizes = found.parallelism_config
    if sizes:
        from accelerate.parallelism_config import ParallelismConfig

        given_sizes = {key.removeprefix("parallelism_config_"): value for key, value in sizes.items()}
        assert ParallelismConfig(**given_sizes).total_size == run.gpus


@FEW
@given(data=st.data())
def test_deepspeed(data: st.DataObject) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    run = data.draw(runs("deepspeed", "json"))
    found = YAML(typ="safe").load(write(run, "deepspeed").text)
    ranks = (run.gpus or 1) // ((run.tp or 1) * (run.pp or 1) * (run.cp or 1))

    class Group:
        def get_data_parallel_world_size(self) -> int:
            return ranks

    with mock.patch.object(config.dist, "get_rank", return_value=0):
        checked = config.DeepSpeedConfig(found, mpu=Group())
    assert checked.zero_optimization_stage == run.zero
    assert checked.train_batch_size == run.global_batch
    assert checked.gradient_accumulation_steps == run.global_batch // (run.micro_batch * ranks)
    moved = checked.zero_config.offload_optimizer is not None and checked.zero_config.offload_optimizer.device == "cpu"
    assert moved == (run.offload != "none")


@FEW
@given(data=st.data())
def test_torchtitan(data: st.DataObject) -> None:
    manager = pytest.importorskip("torchtitan.config.manager")
    pytest.importorskip("torchtitan.models.llama3.config_registry")
    run = msgspec.structs.replace(data.draw(runs("torchtitan", "argv")), model="llama-3.1-8b")
    config = manager.ConfigManager().parse_args(arguments(write(run, "torchtitan").text))
    sizes = config.parallelism
    degrees = (sizes.tensor_parallel_degree, sizes.pipeline_parallel_degree, sizes.context_parallel_degree)
    assert degrees == (run.tp, run.pp, run.cp)
    assert degrees[0] == 1 or sizes.enable_sequence_parallel == run.sequence_parallel
    replicas, shards = sizes.data_parallel_replicate_degree, sizes.data_parallel_shard_degree
    assert replicas * shards * run.within == run.gpus
    assert (shards > 1 or (run.cp or 1) > 1) == (run.zero != 0)
    training = config.training
    assert (training.global_batch_size, training.seq_len) == (run.global_batch, run.seq_len)
    assert training.enable_cpu_offload == (run.offload == "all")
    kind = type(config.activation_checkpoint).__qualname__.partition(".")[0]
    assert kind == {"none": "NoneType", "full": "FullAC", "per-op": "SelectiveAC"}[str(run.recompute)]


@FEW
@given(data=st.data())
def test_megatron_core(data: st.DataObject) -> None:
    core = pytest.importorskip("megatron.core")
    assert core
    from megatron.core.transformer.transformer_config import TransformerConfig

    run = data.draw(runs("megatron", "argv"))
    words = arguments(write(run, "megatron").text)
    found: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            key = word[2:].replace("-", "_")
            found[key] = True
        else:
            found[key] = (
                word if found[key] is True else [*([found[key]] if isinstance(found[key], str) else found[key]), word]
            )
    sizes: dict[str, Any] = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "add_bias_linear": False}
    sizes["num_moe_experts"] = 16 if (run.ep or 1) > 1 else None
    known = TransformerConfig.__dataclass_fields__
    numbers = {
        key: int(value) for key, value in found.items() if key in known and isinstance(value, str) and value.isdecimal()
    }
    texts = {key: found[key] for key in ("recompute_granularity", "recompute_method") if key in found}
    modules = found.get("recompute_modules")
    modules = [modules] if isinstance(modules, str) else modules
    config = TransformerConfig(
        **sizes, **numbers, **texts, bf16="bf16" in found,
        sequence_parallel="sequence_parallel" in found, pipeline_dtype="bf16",
        recompute_modules=None if modules is None else [name for name in modules if name != "moe_act"],
    )  # fmt: skip
    assert config.tensor_model_parallel_size == run.tp
    assert config.context_parallel_size == run.cp
    assert config.pipeline_model_parallel_size == run.pp
    assert (config.recompute_granularity or "none") == {"modules": "selective"}.get(
        str(run.recompute).partition(":")[0], str(run.recompute).partition(":")[0]
    )


def _refusal(model: Any, values: dict[str, Any]) -> str:
    try:
        model(**values)
    except (ValueError, ImportError) as error:  # ImportError: of the ring of context parallelism
        return str(error)
    return ""


@FEW
@given(data=st.data())
def test_axolotl(data: st.DataObject) -> None:
    schema = pytest.importorskip("axolotl.utils.schemas.config")
    run = data.draw(runs("axolotl", "yaml"))
    if run.framework == "deepspeed":
        run = msgspec.structs.replace(
            run, tp=1, gpus=None, global_batch=None
        )  # for which axolotl opens DeepSpeed's configuration as a file
    found = YAML(typ="safe").load(write(run, "axolotl").text)
    liger = pytest.importorskip("axolotl.integrations.liger.args").LigerArgs
    assert any("LigerPlugin" in one for one in found.get("plugins", ())) or not set(found) & set(liger.model_fields)
    plugins = {"expert_parallel_size", *liger.model_fields}
    unknown = set(found) - set(schema.AxolotlInputConfig.model_fields) - plugins
    assert not unknown
    rest = {"datasets": [{"path": "x", "type": "alpaca"}], "learning_rate": 1e-5, "output_dir": "out", "num_epochs": 1}
    refused = _refusal(schema.AxolotlInputConfig, {**rest, **found})
    if refused:
        # What axolotl does not let stand together is no matter of spelling.
        assert "Extra inputs" not in refused
        assert "Input should be" not in refused
        return
    checked = schema.AxolotlInputConfig(**{**rest, **found})
    assert (checked.micro_batch_size, checked.sequence_len) == (run.micro_batch, run.seq_len)
    four_bits = run.qlora and run.base not in ("int8", "gptq")  # which axolotl calls LoRA on a quantised base
    assert checked.adapter == (None if not run.lora_rank else "qlora" if four_bits else "lora")


@FEW
@given(data=st.data())
def test_llamafactory(data: st.DataObject) -> None:
    with mock.patch.dict("os.environ", DISABLE_VERSION_CHECK="1"):  # it wants older packages than the other tools
        parser = pytest.importorskip("llamafactory.hparams.parser")
    import transformers

    run = plain(data.draw(runs("llamafactory", "yaml")))
    run = msgspec.structs.replace(run, model="meta-llama/Llama-3.1-8B")
    found = YAML(typ="safe").load(write(run, "llamafactory", f"stage: sft\noutput_dir: out\n{NO_GPU}").text)
    classes = transformers.HfArgumentParser(parser._TRAIN_ARGS).parse_dict(found)
    model, data_of, training, tuning = classes[:4]
    assert (data_of.cutoff_len, training.per_device_train_batch_size) == (run.seq_len, run.micro_batch)
    assert (tuning.finetuning_type, tuning.pure_bf16) == (
        (run.adapter or "lora") if run.lora_rank else "full",
        run.precision == "bf16-pure",
    )
    bits = {"int8": 8, "gptq": None}.get(run.base or "", 4)  # a GPTQ checkpoint says it itself
    assert model.quantization_bit == (bits if run.qlora else None)
    assert model.disable_gradient_checkpointing == (run.recompute == "none")


@pytest.mark.parametrize("syntax", ["yaml"])
@FEW
@given(data=st.data())
def test_verl(syntax: str, data: st.DataObject) -> None:
    """Every key is one of the trainer's own configuration, which Hydra would refuse to add to."""
    try:
        root = Path(str(importlib.metadata.distribution("verl").locate_file("verl/trainer/config")))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("verl is not installed")
    run = data.draw(runs("verl", syntax))
    name = "_generated_ppo_megatron_trainer.yaml" if run.framework == "megatron" else "_generated_ppo_trainer.yaml"
    known = YAML(typ="safe").load((root / name).read_text())

    def walk(ours: dict[str, Any], theirs: Any, path: str) -> None:
        for key, value in ours.items():
            assert key in theirs, f"{path}{key}"
            if isinstance(value, dict):
                walk(value, theirs[key], f"{path}{key}.")

    walk(YAML(typ="safe").load(write(run, "verl", syntax=syntax).text), known, "")
