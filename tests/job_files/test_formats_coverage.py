"""No key of a job file is read over: each of the tools' own arguments is modelled, harmless, bounded, or stops the answer.

`keys/*.txt` has the arguments of each tool's classes with their defaults, as `extract_keys.py` reads them there.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from command_line import document, typed
from extract_keys import INSTALLED, TRL_OTHER, sections_of, text_of
from loadgauge import Layout, estimate, model
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.command_line.options.options import parse
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.definitions.training.training import training
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.job_files.dialects import FILES, dialect
from loadgauge.job_files.exchange import read
from loadgauge.job_files.ideas.coverage import OFF, SUSPECT, Coverage, Stop, suspect

TOOLS = {
    "transformers": ("transformers",), "trl": ("transformers", "trl"), "accelerate": ("accelerate",),
    "deepspeed": ("deepspeed",), "llamafactory": ("transformers", "llamafactory"), "axolotl": ("axolotl",),
    "megatron": ("megatron", "megatron-core"), "megatron-bridge": ("megatron-bridge",), "torchtitan": ("torchtitan",),
    "verl": ("verl",), "torchtune": ("torchtune",), "litgpt": ("litgpt",), "ms-swift": ("transformers", "ms-swift"),
    "megatron-swift": ("megatron-swift",), "llamafactory-v1": ("llamafactory-v1",),
    "llamafactory-megatron": ("llamafactory", "llamafactory-megatron"),
    "automodel": ("automodel",), "unsloth": ("unsloth",), "peft": ("peft",), "openrlhf": ("openrlhf",),
    "nemo-rl": ("nemo-rl",), "slime": ("slime",), "prime-rl": ("prime-rl",), "gpt-neox": ("gpt-neox",), "nanotron": ("nanotron",),
    "llm-foundry": ("llm-foundry",), "maxtext": ("maxtext",), "open-instruct": ("open-instruct",),
    "qwen-vl-finetune": ("transformers", "qwen-vl-finetune"), "deepspeed-chat": ("deepspeed-chat",), "lmflow": ("transformers",),
    "roll": ("roll",), "areal": ("areal",), "primus": ("primus",), "olmo-core": ("olmo-core",), "xtuner": ("xtuner",),
    "diffusers": ("diffusers",), "finetrainers": ("finetrainers",), "musubi-tuner": ("musubi-tuner",),
    "simpletuner": ("simpletuner",),
}  # fmt: skip
"""Dialects, and the files of `keys/` that their keys are in."""
SWITCHED_ON = (
    "fp8_config.",
    "float8.enabled",
    "zero_optimization.zenflow.",
    "peft.loftq_config.",
    "qat.",
    "mixed_precision.",
)
"""Sections that are a switch by being there."""
ROUTED = ("moe_token_dispatcher_type",)
"""Stops at its default, which Megatron's own documentation advises against."""


def test_every_dialect_has_its_tools_keys() -> None:
    assert set(TOOLS) == set(FILES)
    for files in TOOLS.values():
        for name in files:
            assert sum(len(keys) for _, keys in sections_of(name)) >= 40


@pytest.mark.parametrize("name", TOOLS)
def test_every_key_of_the_tool_is_in_exactly_one_list(name: str) -> None:
    chosen = dialect(name)
    for file in TOOLS[name]:
        for title, keys in sections_of(file):
            wrong = {key: kinds for key in keys if len(kinds := chosen.kinds(key)) != 1}
            assert not wrong, title


@pytest.mark.parametrize("name", TOOLS)
def test_a_key_at_its_default_does_not_stop_the_answer(name: str) -> None:
    chosen = dialect(name)
    for file in TOOLS[name]:
        for title, keys in sections_of(file):
            if title.rpartition(": ")[2] in TRL_OTHER:
                continue
            found = [
                key
                for key, default in keys.items()
                if key not in chosen.known
                and not key.startswith(SWITCHED_ON)
                and key.rpartition(".")[2] not in ROUTED
                and chosen.coverage.stop(key, default) is not None
            ]
            assert not found, title


@pytest.mark.parametrize("name", TRL_OTHER)
def test_arguments_that_only_another_trainer_has_stop_the_answer(name: str) -> None:
    """Also at their defaults, as only another trainer's file has them."""
    keys = next(keys for title, keys in sections_of("trl") if title.endswith(f": {name}"))
    chosen, shared = dialect("trl"), {"disable_dropout"}
    assert {key for key in keys if chosen.kinds(key) not in (("stops",), ("modelled",))} <= shared


@pytest.mark.parametrize("name", INSTALLED)
def test_the_keys_are_those_of_the_installed_tools(name: str) -> None:
    """`make parsers` installs the tools; here those of another version are left alone."""
    import importlib.metadata

    recorded = sections_of(name)[0][0].partition(":")[0]
    package, _, version = recorded.rpartition(" ")
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if installed != version:
        pytest.skip(f"{package} {installed} is installed, and the keys are of {version}")
    try:
        text = text_of(INSTALLED[name]())
    except ImportError as error:
        pytest.skip(str(error))
    assert text == Path(__file__).parent.joinpath("keys", f"{name}.txt").read_text(encoding="utf-8")


# -- keys that change the answer ---------------------------------------------------------------------------------------

LLAMAFACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
finetuning_type: lora
lora_rank: 8
cutoff_len: 2048
template: llama3
per_device_train_batch_size: 1
bf16: true
"""
AXOLOTL = """base_model: meta-llama/Llama-3.1-8B
sequence_len: 2048
micro_batch_size: 1
adapter: lora
lora_r: 8
datasets: [{path: x, type: alpaca}]
bf16: true
"""
TRL = """model_name_or_path: meta-llama/Llama-3.1-8B
max_length: 2048
per_device_train_batch_size: 1
bf16: true
output_dir: out
"""
VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1"""
MEGATRON = "torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --seq-length 4096 --bf16"
NEOX = """pipe_parallel_size: 0
model_parallel_size: 1
num_layers: 12
hidden_size: 768
num_attention_heads: 12
seq_length: 2048
train_micro_batch_size_per_gpu: 4
train_impl: dpo
"""
DEEPSPEED = '{"zero_optimization": {"stage": 2, %s}, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}'


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("a.yaml", LLAMAFACTORY + "use_mca: true\n", "use_mca"),
        ("a.yaml", LLAMAFACTORY.replace("sft", "ppo"), "stage: 'ppo'"),
        ("a.yaml", AXOLOTL + "rl: ppo\n", "rl: 'ppo'"),
        ("a.yaml", AXOLOTL + "peft_layer_replication: [[0, 16]]\n", "peft_layer_replication"),
        ("a.yaml", AXOLOTL + "model_config: {num_hidden_layers: 4}\n", "model_config.num_hidden_layers"),
        ("a.yaml", AXOLOTL + "plugins: [a.b.LigerPlugin, axolotl.integrations.hatchery.HatcheryPlugin]\n", "plugins"),
        ("a.yaml", TRL + "beta: 0.1\n", "beta: is an argument of another trainer"),
        ("a.yaml", TRL + "num_generations: 8\n", "num_generations"),
        ("a.yaml", TRL + "torch_dtype: float16\n", "torch_dtype"),
        ("a.sh", "trl online_dpo --model_name_or_path x --output_dir out --max_length 512", "online_dpo: starts a trainer"),
        ("a.sh", "accelerate launch run_nash_md.py --output_dir out --max_length 512", "nash_md.py: starts a trainer"),
        ("a.sh", "accelerate launch --use_megatron_lm train.py --output_dir out --max_length 512", "use_megatron_lm"),
        ("a.sh", MEGATRON + " --vision-pretraining", "--vision-pretraining"),
        ("a.sh", MEGATRON.replace("gpt", "t5"), "pretrain_t5.py: trains another model than a GPT"),
        ("verl.sh", VERL + " actor_rollout_ref.actor.ppo_micro_batch_size=64", "ppo_micro_batch_size"),
    ],
)  # fmt: skip
def test_what_changes_the_answer_stops_it(name: str, text: str, key: str, tmp_path: Path) -> None:
    place = tmp_path / name
    place.write_text(text)
    for line in (["estimate", str(place)], ["convert", str(place), "--to", "flags"]):
        found = typed(line)
        assert (found.code, found.out) == (2, ""), found
        assert found.err.startswith("loadgauge: ")
        assert found.err.count("\n") == 1
        assert key in found.err


@pytest.mark.parametrize(
    ("name", "text", "effects", "facts"),
    [
        ("a.yaml", LLAMAFACTORY + "use_galore: true\ngalore_target: q_proj\n", {"galore_target": "costs"}, {}),
        ("a.yaml", LLAMAFACTORY + "use_badam: true\nbadam_mode: ratio\n", {"badam_mode": "either"}, {"optimizer": "badam"}),
        ("a.yaml", LLAMAFACTORY + "quantization_bit: 8\nquantization_method: hqq\n", {}, {"base": "int8"}),
        ("a.yaml", LLAMAFACTORY + "quantization_bit: 3\n", {"quantization_bit": "either"}, {"base": "nf4"}),
        ("a.yaml", TRL + "optim: galore_adamw\noptim_target_modules: [attn]\n", {"optim_target_modules": "costs"}, {}),
        ("a.sh", "swift sft --model x --tuner_type boft --max_length 512", {"--tuner_type": "either"}, {"lora_rank": 8}),
        ("a.sh", "swift sft --model x --tuner_type llamapro --max_length 512", {"--tuner_type": "costs"}, {"lora_rank": 8}),
        ("a.yaml", NEOX, {}, {"task": "dpo", "reference": "model"}),
        ("a.yaml", NEOX + "dpo_reference_free: true\n", {}, {"task": "dpo", "reference": None}),
        ("a.yaml", "model: {seq_length: 4096, hf_model_id: x, tensor_model_parallel_size: 2}\ntrain: {micro_batch_size: 1}\n"
         "mixed_precision: {grad_reduce_in_fp32: false}\n", {"mixed_precision.grad_reduce_in_fp32": "saves"}, {"tp": 2}),
        ("a.yaml", "distributed_type: MULTI_NPU\nnum_processes: 8\nmixed_precision: fp8\n",
         {"mixed_precision": "either"}, {"precision": "bf16", "gpus": 8}),
        ("a.yaml", AXOLOTL + "optimizer: my_own\n", {"optimizer": "either"}, {"optimizer": "adamw"}),
        ("a.sh", MEGATRON + " --optimizer soap --attention-backend 7",
         {"--optimizer": "either", "--attention-backend": "either"}, {}),
        ("v.sh", VERL + " +actor_rollout_ref.model.override_config.rope_theta=5 +actor_rollout_ref.model.override_config.moe_top=3",
         {}, {"task": "grpo"}),
        ("a.sh", "swift sft --model x --deepspeed_autotp_size 2 --freeze_llm true --max_length 512",
         {"--freeze_llm": "saves"}, {"tp": 2}),
        ("a.sh", "swift sft --model x --quant_method eetq --max_length 512", {}, {"base": "int8", "qlora": True}),
        ("ds.json", DEEPSPEED % '"zero_hpz_partition_size": 8',
         {"zero_optimization.zero_hpz_partition_size": "costs"}, {"zero": 2}),
        ("ds.json", DEEPSPEED % '"zero_quantized_weights": true',
         {"zero_optimization.zero_quantized_weights": "either"}, {"zero": 2}),
        ("ds.json", (DEEPSPEED % '"cpu_offload_param": true').replace("2", "3"), {}, {"zero": 3, "offload": "all"}),
        ("ds.json", DEEPSPEED.replace("}}", '}, "tensor_parallel": {"tp": {"tp_size": 2}}}') % '"mics_shard_size": 8',
         {"zero_optimization.mics_shard_size": "costs"}, {"tp": 2}),
        ("a.sh", MEGATRON + " --recompute-granularity selective --recompute-modules new core_attn",
         {"--recompute-modules": "saves"}, {"recompute": "selective"}),
    ],
)  # fmt: skip
def test_what_has_a_bound_is_named_and_the_nearest_is_counted(
    name: str, text: str, effects: dict[str, str], facts: dict[str, object]
) -> None:
    file = read(text, file=name)
    named = {item.key: item.effect for item in file.uncounted}
    assert effects.items() <= named.items()
    assert {fact: getattr(file.job, fact) for fact in facts} == facts


def test_a_key_that_axolotl_has_none_of_is_dropped(tmp_path: Path) -> None:
    """pydantic ignores what `AxolotlInputConfig` has no field for, so that a typing error changes nothing."""
    place = tmp_path / "a.yaml"
    totals = []
    for more in ("", "context_paralel_size: 8\n"):
        place.write_text(AXOLOTL + more)
        totals.append(document(f"estimate {place} --strict --gpu h100-sxm5-80gb")["memory"]["total"])
    assert totals[0] == totals[1]
    found = document(f"estimate {place} --gpu h100-sxm5-80gb")["unread"]
    assert [one["why"] for one in found] == [
        "axolotl has no such key, and drops it; did you mean context_parallel_size?"
    ]


@pytest.mark.parametrize(
    ("more", "key", "effect"),
    [
        ("lisa_n_layers: 4\n", "lisa_n_layers", "saves"),
        ("activation_offloading: disk\n", "activation_offloading", "costs"),
        ("selective_checkpointing: true\ngradient_checkpointing: true\n", "selective_checkpointing", "costs"),
        ("plugins: [a.b.LigerPlugin, my.own.Plugin]\n", "plugins", "either"),
        ("plugins: [axolotl.integrations.spectrum.SpectrumPlugin]\n", "plugins", "saves"),
        ("plugins: [axolotl.integrations.densemixer.DenseMixerPlugin]\n", "plugins", "costs"),
        ("lora_mlp_kernel: true\n", "lora_mlp_kernel", "saves"),
        ("qat: {weight_dtype: int4}\n", "qat.weight_dtype", "costs"),
        ("tiled_mlp: true\n", "tiled_mlp", "saves"),
        ("optimizer: came_pytorch\n", "optimizer", "either"),
        ("attn_implementation: my/kernel@v1\n", "attn_implementation", "either"),
    ],
)
def test_what_axolotl_runs_that_is_not_modelled_is_named(more: str, key: str, effect: str, tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(AXOLOTL + more)
    found = [one for one in document(f"estimate {place} --gpu h100-sxm5-80gb")["unread"] if one["key"] == key]
    assert [one["effect"] for one in found] == [effect]
    assert typed(f"estimate {place} --gpu h100-sxm5-80gb --strict").code == 2


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("a.yaml", LLAMAFACTORY + "my_lora_dtype: x\n", "my_lora_dtype: 'x' is not known here, and its name suggests"),
        ("a.yaml", TRL + "unknownOptimizerStates: 8\n", "unknownOptimizerStates"),
        ("a.sh", MEGATRON + " --new-quantization e2m1", "--new-quantization"),
    ],
)  # fmt: skip
def test_a_key_in_no_list_whose_name_suggests_memory_stops_where_it_is_asked_to(
    name: str, text: str, key: str, tmp_path: Path
) -> None:
    place = tmp_path / name
    place.write_text(text)
    for line in (["estimate", str(place)], ["convert", str(place), "--to", "flags"]):
        found = typed([*line, "--strict"])
        assert (found.code, found.out) == (2, ""), found
        assert key in found.err


@pytest.mark.parametrize(
    "text",
    [
        LLAMAFACTORY.replace("sft", "pt"),
        LLAMAFACTORY + "use_dora: false\nadditional_target: null\nuse_galore: 'no'\ngalore_rank: 16\n",
        AXOLOTL
        + "rl:\nlora_modules_to_save: []\nunfrozen_parameters:\nplugins: [axolotl.integrations.liger.LigerPlugin]\n",
        TRL + "torch_compile: false\nlabel_smoothing_factor: 0.0\nuse_dora: false\n",
        # What is in no list, and off.
        TRL + "some_offloading: false\nother_lora_thing: null\n",
    ],
)
def test_a_switch_that_is_off_does_not(text: str) -> None:
    read(text, file="a.yaml")


def test_several_keys_that_stop_are_named_together() -> None:
    with pytest.raises(ConfigError, match=r"use_mca: .* \(so do 1 more: use_hyper_parallel\)"):
        read(LLAMAFACTORY + "use_mca: true\nuse_hyper_parallel: true\n", file="a.yaml")


RECIPE = """# Model arguments
model_name_or_path: meta-llama/Llama-3.1-8B
model_revision: main
torch_dtype: bfloat16
use_flash_attention_2: true

# Data
chat_template: "{{ messages }}"
dataset_mixer:
  someone/chats: 1.0
dataset_splits: [train_sft, test_sft]
preprocessing_num_workers: 12

# Trainer
bf16: true
do_eval: true
evaluation_strategy: epoch
gradient_accumulation_steps: 2
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: False
hub_model_id: mine
learning_rate: 2.0e-05
max_seq_length: 1536
num_train_epochs: 1
output_dir: data/mine
overwrite_output_dir: true
per_device_eval_batch_size: 8
per_device_train_batch_size: 16
push_to_hub: true
remove_unused_columns: true
report_to: [tensorboard]
save_strategy: "no"
seed: 42
warmup_ratio: 0.1
"""


def test_a_recipe_of_the_alignment_handbooks_form(tmp_path: Path) -> None:
    found = read(RECIPE, file="config_full.yaml")
    assert found.dialect == "trl"
    run = found.job
    assert (run.seq_len, run.micro_batch, run.attention, run.recompute) == (1536, 16, "fa2", "full")
    assert (run.precision, run.weights) == ("bf16", "bfloat16")
    assert found.uncounted == ()
    # With FSDP accelerate casts the weights to float32, and adapters train on a frozen base.
    for more, recipe in (
        ("", "bf16-autocast-8"),
        ("fsdp: full_shard\n", "bf16-fsdp-16"),
        ("use_peft: true\n", "bf16-mixed-16"),
    ):
        job = read(RECIPE + more, file="a.yaml").job
        job = job.replace(model="llama-3.2-1b", lora_rank=job.lora_rank or None)
        assert resolve_job(job).training.precision.name == recipe
    assert read(RECIPE.replace("bfloat16", "float32"), file="a.yaml").job.weights == "float32"
    place = tmp_path / "config_full.yaml"
    place.write_text(RECIPE)
    assert document(f"estimate {place}")["layout"]["seq_len"] == 1536
    auto = RECIPE.replace("bfloat16", "auto")
    place.write_text(auto)
    assert read(auto, file="a.yaml").job.weights == "auto"
    assert typed(f"estimate {place} --precision bf16-pure").code == 0


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ("", "float32"),  # TRL loads a model that it is given by its name in float32
        ("torch_dtype: auto\n", "auto"),
        ("model_init_kwargs: {dtype: bfloat16}\n", "bfloat16"),
    ],
)
def test_the_dtype_that_weights_are_loaded_in(more: str, weights: str) -> None:
    assert read(TRL + more, file="a.yaml").job.weights == weights


def test_without_autocast_the_dtype_of_the_weights_is_that_of_everything() -> None:
    plain = "per_device_train_batch_size: 2\noutput_dir: out\n"
    assert read(plain, file="a.yaml").job.precision == "bf16-pure"  # as checkpoints are, since transformers 5
    assert read(plain + "torch_dtype: float32\n", file="a.yaml").job.precision == "fp32"
    assert read(plain + "bf16: true\n", file="a.yaml").job.weights is None


def test_what_llama_factory_trains_is_float32_unless_it_is_pure() -> None:
    whole = "stage: sft\nfinetuning_type: full\ncutoff_len: 512\ntemplate: llama3\nbf16: true\n"
    assert read(whole, file="a.yaml").job.weights == "float32"
    assert read(whole + "pure_bf16: true\n", file="a.yaml").job.precision == "bf16-pure"


def test_length_of_a_plain_script() -> None:
    run = read("per_device_train_batch_size: 2\noutput_dir: out\nblock_size: 1024\n", file="a.yaml").job
    assert run.seq_len == 1024


def test_what_starts_the_job_says_how_many_gpus(tmp_path: Path) -> None:
    line = "accelerate launch --num_processes 16 --num_machines 2 {} train.py --output_dir out --max_length 512"
    run = read(line.format(""), file="a.sh").job
    assert (run.gpus, run.gpus_per_node) == (16, 8)
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nmixed_precision: bf16\n"
    )
    place = tmp_path / "a.sh"
    place.write_text(line.format("--config_file fsdp.yaml"))
    assert read(place.read_text(), file=str(place)).job.zero == 3
    (tmp_path / "fsdp.yaml").unlink()
    with pytest.raises(ConfigError, match="names fsdp\\.yaml, which is not there"):
        read(place.read_text(), file=str(place), strict=True)
    assert read(place.read_text(), file=str(place)).job.zero == 3


def test_a_file_beside_is_looked_through_too(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(TRL + "deepspeed: ds.json\n")
    (tmp_path / "ds.json").write_text(DEEPSPEED % '"zero_quantized_weights": true')
    assert "zero_quantized_weights" in typed(f"estimate {place}").out
    (tmp_path / "ds.json").write_text(DEEPSPEED % '"stage3_model_persistence_threshold": 1e9')
    assert any("model_persistence" in line for line in document(f"estimate {place}")["not_counted"])


# -- what is bounded ---------------------------------------------------------------------------------------------------


def test_a_bounded_key_widens_the_range_and_stands_at_the_top(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    inner = "deepspeed: {zero_optimization: {stage: 3, stage3_model_persistence_threshold: %s}}\n"
    place.write_text(TRL + inner % "9223372036854775807")
    usual = document(f"estimate {place} --gpu h100-sxm5-80gb --gpus 8")
    place.write_text(TRL + inner % "1e9")
    wide = document(f"estimate {place} --gpu h100-sxm5-80gb --gpus 8")
    assert wide["memory"]["total"] == usual["memory"]["total"]
    # 1,000,000,000 elements of 16 bits: the upper end is that of a run that needs so much more.
    known = resolve_job(parse(f"{place} --gpu h100-sxm5-80gb --gpus 8".split())).estimate().memory
    margins, total = msgspec.structs.replace(known.margins, fewer=0.0, more=0.0), known.allocated
    assert known.margins.more + sum(thing.more for thing in known.unsaid) == 2e9
    high = margins.needed(total + 2e9).high - margins.needed(total).high
    assert wide["memory"]["widest"]["high"] - usual["memory"]["high"] == pytest.approx(high)
    assert high > 2e9  # what is not known of it is spread as the rest is
    assert wide["memory"]["low"] == usual["memory"]["low"]
    assert "model_persistence" in wide["not_counted"][0]
    assert "model_persistence" not in " ".join(usual["not_counted"])


def test_an_unknown_key_stands_at_the_top(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(TRL + "my_own_thing: 3\n")
    found = document(f"estimate {place}")
    assert found["not_counted"][0].startswith("my_own_thing: a key that is not known here")
    assert "1 of its keys is not known here, and not counted: my_own_thing" in found["file"]


def test_what_trains_beside_adapters_is_counted(tmp_path: Path) -> None:
    """Keys that stopped an answer before: the estimate is that of the flags."""
    place = tmp_path / "a.yaml"
    for text, flags in (
        (LLAMAFACTORY + "use_dora: true\n", {"use_dora": True}),
        (LLAMAFACTORY + "additional_target: embed_tokens,lm_head\n", {"modules_to_save": "embed_tokens,lm_head"}),
        (LLAMAFACTORY + "upcast_layernorm: true\n", {"kbit_upcast": "norms"}),
        (LLAMAFACTORY + "quantization_bit: 8\n", {"qlora": True, "base": "int8", "kbit_upcast": "none"}),
        (AXOLOTL + "lora_modules_to_save: [embed_tokens, lm_head]\n", {"modules_to_save": "embed_tokens,lm_head"}),
        (AXOLOTL + "peft_use_dora: true\n", {"use_dora": True}),
        (
            TRL + "use_peft: true\nload_in_4bit: true\n",
            {"qlora": True, "kbit_upcast": "none", "lora_dtype": "bfloat16"},
        ),
    ):
        place.write_text(text)
        job = read(text, file="a.yaml").job
        assert {name: getattr(job, name) for name in flags} == flags


def test_dropout_of_adapters_is_counted(tmp_path: Path) -> None:
    """TRL's default is 0.05."""
    place = tmp_path / "a.yaml"
    place.write_text(
        TRL + "use_peft: true\nlora_target_modules: all-linear\ngradient_checkpointing: false\nloss_type: dft\n"
    )
    found = document(f"estimate {place}")
    place.write_text(place.read_text() + "lora_dropout: 0.0\n")
    without = document(f"estimate {place}")
    layout, spec = Layout(seq_len=2048), model("llama-3.1-8b")
    plain, dropped = (
        estimate(
            spec, layout, training("huggingface", "bf16", lora=Lora(rank=16, dropout=share), weights="float32")
        ).memory.total
        for share in (0.0, 0.05)
    )
    assert dropped - plain > 2**30
    assert found["memory"]["total"] - without["memory"]["total"] == pytest.approx(dropped - plain)


# -- convert -----------------------------------------------------------------------------------------------------------


def test_a_patch_keeps_what_there_is_no_estimate_with(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(AXOLOTL + "lisa_n_layers: 4\n")
    found = typed(f"convert {place} --to axolotl --micro-batch 4")
    assert found.code == 0
    assert "lisa_n_layers: 4" in found.out
    assert "micro_batch_size: 4" in found.out
    assert "not counted: lisa_n_layers = 4" in found.err
    assert "carried over" not in found.err
    strict = typed(f"convert {place} --to axolotl --strict")
    assert "stays as it is, and there is no estimate with it: lisa_n_layers: 4" in strict.err
    other = typed(f"convert {place} --to trl")
    assert (other.code, "not counted: lisa_n_layers = 4" in other.err) == (0, True)
    assert re.search(r"trl: the \d+ keys of \S+ that are listed above are not carried over", other.err)
    assert typed(f"convert {place} --to trl --strict").code == 2


def test_dropout_of_adapters_is_carried_over(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(AXOLOTL + "lora_dropout: 0.1\n")
    assert "lora_dropout: 0.1" in typed(f"convert {place} --to llamafactory").out
    assert "--lora-dropout 0.1" in typed(f"convert {place} --to flags").out
    assert "0.1" in typed(f"convert {place} --to megatron-bridge").err


# -- the mechanism -----------------------------------------------------------------------------------------------------


def test_the_most_exact_name_counts() -> None:
    lists = Coverage(harmless=frozenset({"a.*", "b_*"}), stops={"a.b": Stop("stops"), "a.c.*": Stop("stops")})
    assert [lists.kinds(key) for key in ("a.b", "a.x", "a.c.d", "b_c", "d")] == [
        ("stops",), ("harmless",), ("stops",), ("harmless",), (),
    ]  # fmt: skip


@pytest.mark.parametrize("value", [*OFF, "False", "0.0", [], [False], "None"])
def test_values_that_are_off(value: object) -> None:
    lists = Coverage(stops={"key": Stop("stops")})
    assert lists.stop("key", value) is None
    assert lists.stop("my_lora_thing", value) is None


@pytest.mark.parametrize("value", [True, "true", 1, 0.5, "x", [0, 1], {"a": 0}, 10**400])
def test_values_that_are_on(value: object) -> None:
    lists = Coverage(stops={"key": Stop("stops")})
    assert lists.stop("key", value) is not None


def test_names_that_suggest_memory_or_time() -> None:
    for part in ("dtype", "quant", "optim", "offload", "lora", "checkpointing", "batch", "len", "stage", "rl"):
        assert part in SUSPECT
        assert suspect(f"my_{part}_x")
    for name in ("project_name", "hub_token", "logger", "note", "author"):
        assert not suspect(name)


def test_settings_of_deepspeeds_engine_reach_it(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    inner = "deepspeed: {zero_optimization: {stage: %s, %s}}\n"

    def total(stage: int, setting: str = "overlap_comm: false") -> float:
        place.write_text(TRL + inner % (stage, setting + ", offload_optimizer: {device: cpu}"))
        given = document(f"estimate {place} --gpu h100-sxm5-80gb --gpus 8")
        assert not any("zero_optimization" in line for line in given["not_counted"])
        return float(given["memory"]["total"] - given["memory"]["parts"]["outside"])  # what is handed out

    assert total(2, "reduce_bucket_size: 4e9") > total(2) > total(2, "reduce_bucket_size: auto")
    assert total(2, "overlap_comm: true") == pytest.approx(total(2) + 2 * 5e8)  # a second bucket of 16 bits
    assert total(3, "stage3_max_live_parameters: 3e9") > total(3) > total(3, "stage3_max_live_parameters: 1e8")
    assert total(3, "stage3_param_persistence_threshold: 1e8") > total(3)
    assert total(2, "allgather_bucket_size: 1e9") == total(2)  # updated weights are gathered in place
    place.write_text(TRL + inner % (2, "contiguous_gradients: false"))
    assert "contiguous_gradients" in typed(f"estimate {place}").out
    place.write_text(TRL + inner % (2, "reduce_bucket_size: 1.5"))
    assert "whole number" in typed(f"estimate {place}").err
