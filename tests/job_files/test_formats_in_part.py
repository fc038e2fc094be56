"""What NeMo AutoModel, NeMo-RL, slime, prime-rl and OpenRLHF resolve by default, and what an answer says it leaves out.

Values are worked out by hand from each tool's own code, which is named beside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.exchange import JobFile, read, write
from loadgauge.job_files.ideas.facts import virtual_stages

AUTO = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 8}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B%s}
distributed: {strategy: fsdp2%s}
optimizer: {_target_: %s}
"""
ADAM, FUSED = "torch.optim.AdamW", "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
RECIPE = """defaults: grpo_math_1B.yaml
policy: {model_name: meta-llama/Llama-3.1-8B-Instruct%s}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
PRIME = """seq_len = 4096
[model]
name = "Qwen/Qwen3-4B"
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[orchestrator]
group_size = 16
%s
"""
SLIME = """python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /root/%s \\
   --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --rollout-num-gpus-per-engine 8 %s
"""
PPO = """python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --actor.num_gpus_per_node 4 --vllm.num_engines 4 \\
   --actor.model_name_or_path meta-llama/Llama-3.1-8B --reward.model_name_or_path meta-llama/Llama-3.1-8B \\
   --critic.num_nodes 1 --critic.num_gpus_per_node 4 --train.colocate_actor_ref
"""


def named(file: JobFile) -> dict[str, str]:
    """What an answer names as not counted, and what each can do."""
    return {item.key: item.effect for item in file.uncounted}


@pytest.mark.parametrize(
    ("said", "layers", "pp", "schedule", "flags"),
    [
        ("2,down", 61, 4, "interleaved", {"vpp": 7, "stage_layers": "16,15,15,15"}),  # 31 stages, 28: 5 of 3 layers
        ("2,up", 61, 4, "interleaved", {"vpp": 8, "stage_layers": "16,15,15,15"}),  # 32 stages, 3 of 1 layer
        ("4,", 32, 4, "interleaved", {"vpp": 2}),
        ("0,", 32, 4, "interleaved", {"vpp": 2}),  # two virtual stages a rank
        ("8,", 32, 4, "1f1b", {"vpp": None}),
        ("ends,14,16", 78, 8, "1f1b", {"stage_layers": "14,8,8,8,8,8,8,16"}),
    ],
)
def test_layers_are_shared_out_as_the_tools_do(
    said: str, layers: int, pp: int, schedule: str, flags: dict[str, Any]
) -> None:
    assert virtual_stages(said, layers, pp, schedule) == flags


@pytest.mark.parametrize(
    ("said", "layers", "schedule"), [("2,", 61, "interleaved"), ("2,", 64, "1f1b"), ("ends,1,", 62, "1f1b")]
)
def test_layers_that_cannot_be_shared_out_are_one_line(said: str, layers: int, schedule: str) -> None:
    with pytest.raises(ConfigError):
        virtual_stages(said, layers, 4, schedule)


@pytest.mark.parametrize(
    ("model", "distributed", "optimizer", "job"),
    [
        # components/moe/parallelizer.py: experts' layers stay gathered; components/distributed/parallelizer.py: stages too
        ("", ", ep_size: 8, dp_size: 8", ADAM, {"zero": 2, "ep": 8, "gpus": 8}),
        ("", ", ep_size: 8, moe: {reshard_after_forward: true}", ADAM, {"zero": 3, "gpus": 8}),
        ("", ", pp_size: 2, dp_size: 2", ADAM, {"zero": 2, "gpus": 4}),
        ("", ", tp_size: 2, dp_size: 2", ADAM, {"zero": 3, "optimizer": "adamw-loop"}),  # `_foreach_for_mesh`
        ("", ", offload_policy: {_target_: torch.distributed.fsdp.CPUOffloadPolicy}", ADAM, {"offload": "all"}),
        (", torch_dtype: float32", "", ADAM, {"precision": "bf16-autocast"}),
        (", torch_dtype: float32", ", mp_policy: {param_dtype: float32}", ADAM, {"precision": "fp32"}),
        ("", "", f"{FUSED}, master_weights: true", {"precision": "bf16-mixed-16", "optimizer": "adamw-fused"}),
        ("", "", FUSED, {"precision": "bf16-pure-32", "optimizer": "adamw-anyprecision"}),  # float32 moments
    ],
)
def test_automodel(model: str, distributed: str, optimizer: str, job: dict[str, Any]) -> None:
    found = read(AUTO % (model, distributed, optimizer), file="a.yaml").job
    assert {name: getattr(found, name) for name in job} == job


def test_automodel_reads_a_model_by_its_sizes_and_one_that_teaches() -> None:
    sizes = "hidden_size: 2048, num_hidden_layers: 2, vocab_size: 1000"
    text = (AUTO % ("", "", ADAM)).replace(
        "pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B", f"config: {{_target_: transformers.LlamaConfig, {sizes}}}"
    )
    config = read(text, file="a.yaml").extra.config or {}
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 2)
    fewer = read(AUTO % (", config: {num_hidden_layers: 2}", "", ADAM), file="a.yaml").extra.config or {}
    assert (fewer["num_hidden_layers"], fewer["num_experts"]) == (2, 128)
    other = read(AUTO % ("", "", "dion.Dion"), file="a.yaml")
    assert (other.job.optimizer, named(other)) == ("adamw-foreach", {"optimizer._target_": "either"})
    taught = AUTO % ("", "", ADAM) + "teacher_model: {pretrained_model_name_or_path: Qwen/Qwen3-32B}\nkd_ratio: 0.5\n"
    assert (read(taught, file="a.yaml").job.task, read(taught, file="a.yaml").job.teacher) == ("gkd", "Qwen/Qwen3-32B")


def test_automodel_reads_the_recipe() -> None:
    text = AUTO % (", num_labels: 3", "", ADAM)
    labels = text.replace("ForNextTokenPrediction", "ForSequenceClassification")
    assert (read(text, file="a.yaml").extra.head, read(labels, file="a.yaml").extra.head) == (None, 3)
    with pytest.raises(ConfigError, match="trains embeddings"):
        read(text.replace("TrainFinetuneRecipeForNextTokenPrediction", "TrainBiEncoderRecipe"), file="a.yaml")


def test_automodel_names_what_it_leaves_out() -> None:
    text = AUTO % (", backend: {dispatcher: deepep}", ", ep_size: 8", ADAM) + "qat: {enabled: true}\n"
    assert named(read(text, file="a.yaml")) == {"model.backend.dispatcher": "costs", "qat.enabled": "costs"}


def test_nemo_rl_shards_within_replicas() -> None:
    text = (RECIPE % ", dtensor_cfg: {enabled: true, dp_replicate_size: 4}").replace("grpo_math_1B", "sft")
    file = read(text + "sft: {val_period: 1}\n", "nemo-rl", file="sft.yaml")
    assert (file.job.replicas, file.job.gpus) == (4, 16)
    written = write(file.job, "nemo-rl", text, extra=file.extra, file="sft.yaml").text
    assert "dp_replicate_size: 4" in written


def test_nemo_rl_over_a_recipe_and_with_other_engines(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(RECIPE % "")
    (tmp_path / "run.yaml").write_text("defaults: base.yaml\nlogger: {wandb_enabled: false}\n")
    assert read((tmp_path / "run.yaml").read_text(), file=str(tmp_path / "run.yaml")).dialect == "nemo-rl"
    mine = ", megatron_cfg: {enabled: true, tensor_model_parallel_size: 4}, dtensor_cfg: {enabled: false}"
    file = read(RECIPE % f"{mine}, generation: {{backend: megatron}}", file="a.yaml")
    assert Engine.parse(file.job.rollout or "").tp == 4  # those of the trainer (`merged_inference_megatron_cfg`)
    assert named(file)["policy.generation.backend"] == "either"
    servers = "{mem_fraction_static: 0.7, sglang_server_config: {num_gpus_per_engine: 2}}"
    file = read(RECIPE % f", generation: {{backend: sglang, sglang_cfg: {servers}}}", file="a.yaml")
    engine = Engine.parse(file.job.rollout or "")
    assert (engine.kind, engine.tp, engine.static_fraction) == ("sglang", 2, 0.7)
    assert "policy.generation.backend" not in named(file)


@pytest.mark.parametrize(
    ("base", "said", "wanted"),
    [("grpo_math_1B", "", False), ("mine", "", None), ("mine", ", sequence_parallel: false", False)],
)
def test_a_recipe_in_a_missing_place_forbids_nothing(base: str, said: str, wanted: bool | None) -> None:
    """What a layout needs is assumed where only the recipe that stands for a missing one says no."""
    megatron = (
        f", megatron_cfg: {{enabled: true, tensor_model_parallel_size: 2{said}}}, dtensor_cfg: {{enabled: false}}"
    )
    text = (RECIPE % megatron).replace("grpo_math_1B", base)
    assert read(text, file="a.yaml").job.sequence_parallel is wanted


def test_nemo_rl_trains_a_critic_and_gives_gpus_to_a_reward_model() -> None:
    text = (
        RECIPE % ""
        + "ppo: {num_prompts_per_step: 64, num_generations_per_prompt: 1}\nvalue: {model_name: Qwen/Qwen3-4B}\n"
    )
    job = read(text.replace("defaults: grpo_math_1B.yaml\n", ""), file="a.yaml").job
    # PPOConfig: four epochs; log-probabilities of a reference are skipped by default.
    assert (job.task, job.critic, job.epochs, job.reference) == ("ppo", "Qwen/Qwen3-4B", 4, "none")
    teachers = "distillation: {num_prompts_per_step: 8}\nteachers: [{model_name: Qwen/Qwen3-4B}, {model_name: Qwen/Qwen3-8B}]\n"
    file = read((RECIPE % "").replace("grpo_math_1B", "sft") + teachers, file="a.yaml")
    assert (file.job.task, file.job.teacher, file.job.rollout, named(file)["teachers"]) == (
        "gkd",
        "Qwen/Qwen3-4B",
        None,
        "costs",
    )
    scored = "env: {reward_model: {enabled: true, model_name: x, resources: {gpus_per_node: 8, num_nodes: 1}}}\n"
    assert read(RECIPE % "" + scored, file="a.yaml").job.gpus == 8  # one of the two nodes is the reward model's


def test_prime_rl_batches_and_states_of_the_optimizer() -> None:
    # 262,144 tokens are 64 answers of 4,096; four groups of 16.
    job = read(PRIME % "token_batch_size = 262144", file="a.toml").job
    assert (job.global_batch, job.prompts) == (64, 4)
    assert read(PRIME % "", file="a.toml").job.global_batch == 128  # OrchestratorConfig
    for text, offload in (
        ("", "states"),
        ("optim_cpu_offload = false", "none"),
        ("full_offload = true", "optimizer"),
        ("fsdp_cpu_offload = true", "all"),
    ):
        assert read(PRIME % f"[trainer.model]\n{text}", file="a.toml").job.offload == offload
    whole = read(PRIME % "[trainer.model]\nfull_offload = true\noptim_cpu_offload = false", file="a.toml").job
    assert (whole.offload, whole.precision) == ("optimizer", "bf16-mixed-16")


def test_prime_rl_of_supervised_training_and_of_servers() -> None:
    job = read("[data]\nseq_len = 1024\nbatch_size = 4\n[eval]\ninterval = 5\n[inference]\n", file="a.toml").job
    assert (job.model, job.task, job.seq_len, job.global_batch) == ("Qwen/Qwen3-0.6B", None, 1024, 4)
    many = PRIME.replace("num_train_gpus = 2\nnum_infer_gpus = 6", 'type = "multi_node"\nnum_train_nodes = 2')
    servers = (
        '[inference.deployment]\ntype = "disaggregated"\nprefill_nodes_per_replica = 2\ndecode_nodes_per_replica = 4\n'
    )
    servers += "num_prefill_replicas = 3\n"
    file = read(many % servers, file="a.toml")
    assert file.job.placement == "split:16+80"  # 2 x 3 + 4 nodes of 8
    assert named(file)["inference.deployment.type"] == "either"
    with pytest.raises(ConfigError, match="servers alone"):
        read('[vllm]\nmodel = "Qwen/Qwen3-4B"\n[slurm]\njob_name = "x"\n', file="a.toml")


def test_slime_reads_formats_by_the_checkpoint_and_stages_by_their_ends() -> None:
    file = read(SLIME % ("Qwen3-30B-A3B-FP8", "--sglang-dp-size 4 --sglang-enable-dp-attention"), file="a.sh")
    engine = Engine.parse(file.job.rollout or "")
    assert (file.job.model, engine.weights, engine.tp, engine.ep) == ("Qwen3-30B-A3B", "fp8", 2, 8)
    staged = "--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 22 --moe-enable-deepep --use-opd"
    file = read(SLIME % ("Qwen3-235B-A22B-INT4", staged), file="a.sh")
    assert (file.extra.layers_per_stage, Engine.parse(file.job.rollout or "").weights) == ("ends,,22", "gptq")
    assert named(file) == {"--moe-enable-deepep": "costs", "--use-opd": "costs"}


def test_openrlhf_gives_roles_gpus_of_their_own() -> None:
    file = read(PPO, file="a.sh")
    assert (file.job.placement, file.job.gpus, named(file)) == ("split:4+4,critic=4,reward=8", 20, {})
    with pytest.raises(ConfigError, match="serve_rm: is no training job"):
        read("python -m openrlhf.cli.serve_rm --reward.model_name_or_path x --ds.param_dtype bf16\n", file="a.sh")


UNSLOTH = """from unsloth import FastLanguageModel
from trl import GRPOConfig, GRPOTrainer
longest = 1024
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen3-4B", max_seq_length=longest, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=16)
of_prompts = len(tokenizer("x")) + 1
trainer = GRPOTrainer(model=model, args=GRPOConfig(
    max_prompt_length=of_prompts, max_completion_length=longest - of_prompts, num_generations=4,
    per_device_train_batch_size=4,
))
"""


def test_unsloths_answers_are_what_prompts_leave_of_the_whole() -> None:
    found = read(UNSLOTH, file="a.py", given={"gpus": 1})
    assert (found.job.task, found.job.samples, found.job.micro_batch) == ("grpo", 4, 4)
    assert (found.job.answers, found.job.prompt_len) == ("1023", 1)
    assert [(one.key, one.effect, one.parts) for one in found.uncounted] == [
        ("max_completion_length", "saves", ("loss", "transient"))
    ]


def test_a_batch_that_is_not_known_does_not_take_the_task_away() -> None:
    text = UNSLOTH.replace("per_device_train_batch_size=4", "per_device_train_batch_size=asked()")
    with pytest.raises(ConfigError, match="micro-batch"):
        read(text, file="a.py", given={"gpus": 1})


@pytest.mark.parametrize("folder", ["qwen", "./qwen", "qwen/"])
def test_a_folder_that_a_program_downloads_to_is_the_repository(folder: str) -> None:
    start = 'from huggingface_hub import snapshot_download\nsnapshot_download("Qwen/Qwen3-0.6B", local_dir="qwen")\n'
    own = f'{start}FastModel.from_pretrained("{folder}", max_seq_length=512)\nFastModel.get_peft_model(m, r=8)\n'
    trl = f'{start}SFTTrainer("{folder}", args=SFTConfig(max_length=512))\n'
    for text in (own + "SFTTrainer(args=SFTConfig())\n", trl):
        assert read(text, file="a.py").job.model == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("name", ["transformer.blocks.[0-7].", "transformer.h.[0-7]."])
def test_layers_of_older_classes_are_layers(name: str) -> None:
    text = f"base_model: LnL-AI/dbrx-base-converted-v2\nsequence_len: 512\nmicro_batch_size: 1\nunfrozen_parameters: ['{name}']\n"
    assert read(text, file="a.yaml", given={"gpus": 8}, name="axolotl").job.train == "model.layers.[0-7]."


TRL = "model_name_or_path: meta-llama/Llama-3.1-8B\nmax_length: 2048\nper_device_train_batch_size: 1\noutput_dir: out\n"


@pytest.mark.parametrize(
    ("line", "effect", "parts"),
    [
        ("auto_find_batch_size: true", "saves", "activations loss transient"),
        ("label_smoothing_factor: 0.1", "costs", "loss"),
        ("torch_compile_mode: max-autotune", "either", "activations transient"),
        ("use_cache: true", "costs", "activations"),
        ("ddp_backend: gloo", "costs", ""),
        ("fsdp: full_shard\nfsdp_config: {forward_prefetch: true}", "costs", "gathered"),
    ],
)
def test_arguments_with_a_bound_are_named_with_it(line: str, effect: str, parts: str) -> None:
    last = read(TRL + line, file="a.yaml", given={"gpus": 8}).uncounted[-1]
    assert last.key.rpartition(".")[2] == line.split("{")[-1].partition(":")[0]
    assert (last.effect, last.parts) == (effect, tuple(parts.split()))


def test_scores_of_answers_without_an_end_change_nothing() -> None:
    text = 'from trl import NashMDConfig, NashMDTrainer\nNashMDTrainer("gpt2", args=NashMDConfig(missing_eos_penalty=1.0))\n'
    assert [one.key for one in read(text, file="a.py", given={"gpus": 1}).uncounted] == ["trainer.nash_md"]
    ppo = 'from trl import PPOConfig, PPOTrainer\nPPOTrainer("gpt2", args=PPOConfig(response_length=64))\n'
    file = read(ppo, file="a.py", given={"gpus": 1})
    assert (file.job.samples, file.job.answers, named(file)["trainer.ppo"]) == (1, "64", "costs")
    for said, head in (("", 2), (", num_labels=5", 5)):
        model = f'AutoModelForSequenceClassification.from_pretrained("gpt2"{said})'
        labels = f"from transformers import *\nTrainer(model={model}, args=TrainingArguments(output_dir='x'))\n"
        assert read(labels, file="a.py").extra.head == head


def test_bits_that_are_not_known_leave_the_adapters_rank() -> None:
    text = UNSLOTH.replace("load_in_4bit=False", "load_in_4bit=asked()")
    with pytest.raises(ConfigError, match=r"add --qlora$"):
        read(text, file="a.py", given={"gpus": 1})
    assert read(text, file="a.py", given={"gpus": 1, "qlora": True}).job.lora_rank == 16


@pytest.mark.parametrize(
    ("member", "optimizer"),
    [("ADAMW_TORCH_FUSED", "adamw-fused"), ("ADAMW_BNB", "adamw-8bit"), ("PAGED_ADAMW", "paged-adamw-32bit")],
)
def test_members_of_transformers_enumerations(member: str, optimizer: str) -> None:
    text = f'SFTTrainer("gpt2", args=SFTConfig(optim=training_args.OptimizerNames.{member}))\n'
    assert read(text, file="a.py").job.optimizer == optimizer


def test_the_trainers_own_length_counts_where_it_is_shorter() -> None:
    text = (
        UNSLOTH[: UNSLOTH.index("of_prompts")] + "DPOTrainer(max_length=512, max_prompt_length=256, args=DPOConfig())\n"
    )
    found = read(text, file="a.py", given={"gpus": 1})
    assert (found.job.task, found.job.seq_len, found.uncounted) == ("dpo", 512, ())


LOADS = 'model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"%s)\n'
OWN = LOADS + "%strainer = %s(model=model, args=%s(per_device_train_batch_size=2, max_length=512))\n"
ADAPTED = "model = get_peft_model(model, LoraConfig(r=8))\n"
PREPARED = "model = prepare_model_for_kbit_training(model)\n" + ADAPTED
BITS = ', quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")'
PLAIN, SFT = ("Trainer", "TrainingArguments"), ("SFTTrainer", "SFTConfig")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # transformers 5.23: `from_pretrained` keeps the checkpoint's dtype, where TRL 1.16 loads a name in float32.
        (OWN % ("", "", *SFT), {"weights": "auto", "precision": "bf16", "recompute": "full", "loss": "tiled"}),
        ('SFTTrainer(model="gpt2", args=SFTConfig(max_length=512))\n', {"weights": "float32"}),
        ('SFTTrainer(model="gpt2", args=SFTConfig(max_length=512))\n' + LOADS % ', dtype="bfloat16"', {"weights": "float32"}),
        ('SFTTrainer(model="gpt2", quantization_config=BitsAndBytesConfig(load_in_4bit=True), args=SFTConfig(max_length=512))\n'
         + LOADS % "", {"qlora": True, "base": "fp4", "model": "gpt2"}),
        (OWN % ("", ADAPTED, "SFTTrainer", "TrainingArguments"), {"precision": "bf16-pure", "recompute": "none", "loss": "tiled"}),
        # transformers' own trainer has its own defaults, with adapters of PEFT 0.21 too.
        (OWN % (", dtype=torch.bfloat16", ADAPTED, *PLAIN), {"precision": "bf16-pure", "lora_dtype": "float32", "lora_rank": 8,
         "recompute": "none", "loss": None}),
        (OWN % (BITS, ADAPTED, *PLAIN), {"qlora": True, "kbit_upcast": "none", "lora_dtype": None, "recompute": "none"}),
        (OWN % (BITS, PREPARED, *PLAIN), {"kbit_upcast": "all", "recompute": "full"}),
        (OWN % (BITS, PREPARED.replace("(model)", "(model, use_gradient_checkpointing=False)"), *PLAIN), {"recompute": "none"}),
    ],
)  # fmt: skip
def test_a_program_has_the_defaults_of_its_own_trainer(text: str, wanted: dict[str, object]) -> None:
    job = read(text, file="a.py", given={"gpus": 1}).job
    assert {key: getattr(job, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("lines", "length"),
    [
        ("MAX = 2048\ntokens = tokenizer(text, truncation=True, max_length=MAX)\n", 2048),
        (
            "a = tok(x, truncation=True, max_length=256)\nb = tok(y, truncation=True, padding='max_length', max_length=2 * 192)\n",
            384,
        ),
        ("block_size = 128\n", 128),
        ("tokens = tokenizer(text, max_length=64)\n", None),  # cuts nothing
        ("", None),
    ],
)
def test_transformers_own_trainer_has_the_length_that_the_program_cuts_to(lines: str, length: int | None) -> None:
    text = f"{LOADS % ''}{lines}Trainer(model=model, args=TrainingArguments(per_device_train_batch_size=2))\n"
    assert read(text, file="a.py", given={"gpus": 1}).job.seq_len == length
    # TRL cuts by its own argument.
    other = text.replace("Trainer(model", "SFTTrainer(model").replace("TrainingArguments", "SFTConfig")
    assert read(other, file="a.py", given={"gpus": 1}).job.seq_len == 1024


def test_a_length_that_is_not_known_is_named() -> None:
    cut = "tokens = tokenizer(text, truncation=True, max_length=longest(data))\n"
    text = f"{LOADS % ''}{cut}Trainer(model=model, args=TrainingArguments(per_device_train_batch_size=2))\n"
    assert named(read(text, file="a.py", given={"gpus": 1})) == {"max_length": "either"}
    assert not named(read(text, file="a.py", given={"gpus": 1, "seq_len": 512}))


COMMON = "--model_name_or_path gpt2 --dataset_name x --per_device_train_batch_size 2 --output_dir x"


@pytest.mark.parametrize(
    ("start", "more", "wanted"),
    [
        ("torchrun transformers/examples/pytorch/language-modeling/run_clm.py", "--block_size 512", "transformers"),
        ("accelerate launch run_clm_no_trainer.py", "--block_size 512", "transformers"),
        ("deepspeed run_glue.py", "--max_seq_length 128", "transformers"),
        ("python train.py", "--max_seq_length 128", "transformers"),
        ("python trl/scripts/sft.py", "", "trl"),
        ("python train.py", "--use_peft --lora_r 8", "trl"),
    ],
)
def test_a_script_that_is_not_trls_has_none_of_its_defaults(start: str, more: str, wanted: str) -> None:
    found = read(f"{start} {COMMON} {more}\n", file="a.sh", given={"gpus": 1})
    assert found.dialect == wanted
    assert (found.job.recompute, found.job.loss) == (("none", None) if wanted == "transformers" else ("full", "tiled"))


@pytest.mark.parametrize(
    ("said", "precision", "named_so"),
    [
        ('optimization_dtype = "bfloat16"', "bf16-pure-32", {}),  # gradients are reduced in float32 (`reduce_dtype`)
        ('optimization_dtype = "bfloat16"\nreduce_dtype = "bfloat16"', "bf16-pure", {}),
        ('reduce_dtype = "bfloat16"', "bf16", {"trainer.model.reduce_dtype": "saves"}),
    ],
)
def test_prime_rl_optimizes_and_reduces_in_formats_of_their_own(
    said: str, precision: str, named_so: dict[str, str]
) -> None:
    file = read(PRIME % f"[trainer.model]\n{said}\n", file="a.toml")
    assert file.job.precision == precision
    assert {key: effect for key, effect in named(file).items() if "dtype" in key} == named_so


@pytest.mark.parametrize(
    ("text", "file", "said"),
    [
        (AUTO % ("", "", f"{FUSED}, master_weights: true"), "a.yaml", {"optimizer._target_": "costs"}),
        (  # ModelOpt's draft beside a frozen model
            "torchrun convert_model.py --algorithm eagle3 --save x\ntorchrun finetune.py --num-layers 4 --hidden-size 1024"
            " --num-attention-heads 16 --seq-length 512 --micro-batch-size 1 --vocab-size 1000 --load x --bf16\n",
            "a.sh", {"--load": "saves"},
        ),
        (
            "deepspeed main.py --max_seq_len 512 --lm_model_name_or_path meta-llama/Llama-2-7b-hf --zero_stage 3"
            " --vision_model_name_or_path openai/clip-vit-large-patch14\n",
            "a.sh", {"--vision_model_name_or_path": "either"},
        ),
    ],
)  # fmt: skip
def test_parts_that_are_trained_or_summed_another_way_are_named(text: str, file: str, said: dict[str, str]) -> None:
    assert named(read(text, file=file)).items() >= said.items()
