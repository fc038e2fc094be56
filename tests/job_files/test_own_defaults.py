"""Defaults that belong to one program of a tool, or to PEFT, and not to the tool's other programs."""

from __future__ import annotations

import pytest

from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.job_files.exchange import read
from loadgauge.job_files.ideas.facts import virtual_stages

ALIGN = "deepspeed examples/{}.py --model_name_or_path meta-llama/Llama-2-7b-hf --use_lora 1 --lora_r 8 --disable_group_texts 1\n"


@pytest.mark.parametrize(
    ("program", "batch", "length", "recompute", "optimizer", "task"),
    [
        # `args.py` of LMFlow 1.0: DPOAlignerArguments, DPOv2AlignerArguments, FinetunerArguments.
        ("dpo_train", (4, 4), 1024, "full", "paged-adamw-32bit", "dpo"),
        ("dpov2_train", (8, 1), 2048, "none", "adamw", "dpo"),
        ("finetune", (8, 1), 512, "none", "adamw", None),
    ],
)
def test_a_program_of_lmflow_has_its_own_defaults(
    program: str, batch: tuple[int, int], length: int, recompute: str, optimizer: str, task: str | None
) -> None:
    job = read(ALIGN.format(program), file="run.sh", given={"gpus": 1}).job
    assert (job.micro_batch, job.global_batch) == (batch[0], batch[0] * batch[1])
    assert (job.seq_len, job.recompute, job.optimizer, job.task) == (
        length, recompute, optimizer, task,
    )  # fmt: skip
    assert job.precision == ("bf16" if program == "dpo_train" else "fp32")
    assert ("wte" in str(job.lora_targets)) == (program == "dpo_train")


@pytest.mark.parametrize(
    ("name", "optimizer", "bounded"),
    [
        ("dummy", "adamw-loop", False),  # which keeps `exp_avg` and `exp_avg2`, and changes no weight
        ("muon", "adamw-loop", False),  # both moments, of matrices too (`src/lmflow/optim/muon.py`)
        ("novograd", "sgd-momentum", False),  # one moment, and a number for each layer
        ("adan", "adamw-loop", True),
    ],
)
def test_an_optimizer_of_lmflow_has_its_states(name: str, optimizer: str, bounded: bool) -> None:
    text = ALIGN.format("finetune").rstrip() + f" --use_customized_optim 1 --customized_optim {name}\n"
    file = read(text, file="run.sh", given={"gpus": 1})
    assert file.job.optimizer == optimizer
    assert [item.effect for item in file.uncounted if item.key == "--customized_optim"] == ["costs"] * bounded


def test_pairs_have_an_optimizer_by_another_name() -> None:
    text = ALIGN.format("dpo_train").rstrip() + " --optimizer_type adamw_bnb_8bit --max_length 2048\n"
    job = read(text, file="run.sh").job
    assert (job.optimizer, job.seq_len) == ("adamw-8bit", 2048)


@pytest.mark.parametrize(("alone", "whole"), [("--only_optimize_lora", None), ("", "embed_tokens,lm_head")])
def test_adapters_of_deepspeed_chat_freeze_what_they_adapt(alone: str, whole: str | None) -> None:
    """`dschat/utils/module/lora.py`: the weight below an adapter is frozen, whatever else is trained."""
    text = f"deepspeed main.py --model_name_or_path facebook/opt-1.3b --max_seq_len 512 --lora_dim 128 {alone}\n"
    job = read(text, file="run.sh").job
    assert (job.lora_rank, job.modules_to_save) == (128, whole)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-1.7B", "openai-community/gpt2", "tiiuae/falcon-7b"])
def test_without_names_peft_chooses_the_layers(model: str) -> None:
    constants = pytest.importorskip("peft.utils.constants")
    text = f"model_name_or_path: {model}\nuse_peft: true\npacking: false\nmax_length: 1024\noutput_dir: o\n"
    setup = resolve_job(read(text, "trl", file="run.yaml").job)
    chosen = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[setup.model.model_type]
    named = read(text + f"lora_target_modules: [{', '.join(chosen)}]\n", "trl", file="run.yaml")
    lora, other = setup.training.lora, resolve_job(named.job).training.lora
    assert lora is not None
    assert other is not None
    assert lora.targets == other.targets


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        # Several files of recipes have a constant of one name; the one beside the recipe is meant.
        ("exaone4_1p2b_sft_1gpu_h100_bf16_config", "LGAI-EXAONE/EXAONE-4.0-1.2B"),
        ("exaone45_vl_33b_sft_16gpu_h100_bf16_config", "LGAI-EXAONE/EXAONE-4.5-33B"),
    ],
)
def test_a_recipe_of_bridge_has_the_model_of_its_own_file(recipe: str, model: str) -> None:
    assert read(f"torchrun run_recipe.py --recipe {recipe}\n", file="run.sh", given={"gpus": 16}).job.model == model


def test_what_a_recipe_of_bridge_sets_for_the_next_tokens_and_the_optimizer() -> None:
    """`recipes/deepseek/h100/deepseek_v3.py`: one head more, 16-bit moments and main gradients. `recipes/qwen_vl/h100/
    qwen35_vl.py`: one head more, which its configuration does not tell the size of."""
    own = read("torchrun run_recipe.py --recipe deepseek_v3_pretrain_config\n", file="run.sh", given={"gpus": 1024})
    assert own.job.mtp
    assert {"optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype", "optimizer.main_grads_dtype"} <= {
        item.key for item in own.uncounted
    }
    other = read("torchrun run_recipe.py --recipe qwen35_vl_800m_sft_config\n", file="run.sh", given={"gpus": 8})
    assert not other.job.mtp
    assert {item.key for item in other.uncounted} == {"model.mtp_num_layers"}


@pytest.mark.parametrize(
    ("named", "train", "width"),
    [("zai-org/GLM-4.5-Air", 2, 8), ("Qwen/Qwen3-8B", 2, 1), ("zai-org/GLM-4.5-Air", None, 4)],
)
def test_experts_of_prime_rl_are_shared_by_themselves(named: str, train: int | None, width: int) -> None:
    """`ModelConfig.ep`: "auto" is the smaller of 8 and of the ranks that share the weights, for a model with experts."""
    placed = (
        f'type = "multi_node"\nnum_train_nodes = {train}\nnum_infer_nodes = 1\n'
        if train
        else "num_train_gpus = 4\nnum_infer_gpus = 4\n"
    )
    text = f'seq_len = 4096\n[model]\nname = "{named}"\n[deployment]\n{placed}[trainer.optim]\nlr = 1e-6\n'
    text += "[orchestrator]\nbatch_size = 64\n"
    assert read(text, "prime-rl", file="rl.toml").job.ep == width
    assert (
        read(
            text.replace("[trainer.optim]", "[trainer.model]\nep = 2\n[trainer.optim]"), "prime-rl", file="rl.toml"
        ).job.ep
        == 2
    )


def test_litgpt_takes_the_gpus_that_are_there() -> None:
    """`devices: auto` says no number: it is assumed, and `--gpus` says it."""
    text = "model_name: pythia-160m\nprecision: bf16-mixed\ntrain:\n  global_batch_size: 64\n  micro_batch_size: 4\n"
    text += "devices: auto\nnum_nodes: 1\n"
    assert read(text, "litgpt", file="pretrain.yaml").job.gpus is None
    assert read(text, "litgpt", file="pretrain.yaml", given={"gpus": 8}).job.zero == 3
    assert read(text.replace("auto", "2"), "litgpt", file="pretrain.yaml").job.gpus == 2


def test_lengths_that_a_file_does_not_tell_apart_are_said() -> None:
    one = "seq_len = 4096\n[trainer.optim]\nlr = 1e-6\n[orchestrator]\nbatch_size = 64\n"
    other = one + "[orchestrator.train.sampling]\nmax_completion_tokens = 512\n"
    said = "prompts are taken to have 512 tokens, and answers 3584"
    assert said in read(one, "prime-rl", file="rl.toml").remarks
    assert not any("prompts are taken" in line for line in read(other, "prime-rl", file="rl.toml").remarks)


@pytest.mark.parametrize(
    ("names", "targets", "more"),
    [
        ("target_modules: '*_proj'", "all", []), ("target_modules: ['*']", "all,lm_head", ["experts"]),
        ("match_all_linear: true", "all,lm_head", []), ("exclude_modules: ['*vision*']", "all,lm_head", []),
        ("exclude_modules: ['*lm_head*']", "all", []),
        ("match_all_linear: true\nloss_fn: {_target_: nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy}", "all",
         ["the head"]),
    ],
)  # fmt: skip
def test_patterns_of_automodel_that_fit_the_head(names: str, targets: str, more: list[str]) -> None:
    """`components/_peft/module_matcher.py`: `*` fits every name, and all linear layers are the head's too."""
    text = f"""recipe: TrainFinetuneRecipeForNextTokenPrediction
model:
  pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B
peft:
  _target_: nemo_automodel.components._peft.lora.PeftConfig
  dim: 8
  {names}
"""
    file = read(text, "automodel", file="job.yaml", given={"gpus": 8})
    notes = [item.note for item in file.uncounted if "puts adapters on" in item.note]
    assert file.job.lora_targets == targets
    assert [word for word in ("the head", "experts") for note in notes if f"on {word} too" in note] == more


@pytest.mark.parametrize(
    ("recipe", "beside"),
    [
        # `recipes/common.py`: pretraining sums gradients beside compute; the recipes of fine-tuning say no.
        ("llama3_8b_pretrain_config", True), ("llama3_8b_sft_config", False), ("qwen35_vl_800m_sft_config", False),
    ],
)  # fmt: skip
def test_recipes_of_bridge_say_what_runs_beside_compute(recipe: str, beside: bool) -> None:
    text = f"torchrun run_recipe.py --recipe {recipe}"
    assert ("dp" in str(read(text, file="run.sh", given={"gpus": 16}).job.overlap).split(",")) == beside
    other = read(f"{text} ddp.overlap_grad_reduce={not beside}", file="run.sh", given={"gpus": 16})
    assert ("dp" in str(other.job.overlap).split(",")) != beside


def test_nemo_rl_sums_gradients_of_megatron_beside_compute() -> None:
    """`grpo_math_1B.yaml` has `overlap_grad_reduce: true`, which Megatron's workers alone read (`models/megatron/setup.py`)."""
    text = "defaults: grpo_math_8B_megatron.yaml\npolicy:\n  model_name: Qwen/Qwen3-8B\n"
    assert "dp" in str(read(text, "nemo-rl", file="job.yaml").job.overlap).split(",")
    section = "  megatron_cfg:\n    distributed_data_parallel_config:\n      overlap_grad_reduce: false\n"
    assert "dp" not in str(read(text + section, "nemo-rl", file="job.yaml").job.overlap).split(",")
    assert read(text.replace("grpo_math_8B_megatron", "grpo_math_8B"), "nemo-rl", file="job.yaml").job.overlap is None


@pytest.mark.parametrize(
    ("first", "last", "split"), [(None, 3, "6,6,6,6,6,6,6,3"), (3, 6, "3,6,6,6,6,6,6,6"), (4, 5, "4,6,6,6,6,6,6,5")]
)
def test_ends_of_a_pipeline_go_with_the_layers_of_the_model(first: int | None, last: int | None, split: str) -> None:
    """`TransformerConfig`: what the ends leave is shared out evenly; Step 3.5 Flash has 45 layers."""
    ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    said = " ".join(f"model.{key}={number}" for key, number in ends.items() if number)
    text = (
        f"torchrun run_recipe.py --recipe step35_196b_a11b_pretrain_config model.pipeline_model_parallel_size=8 {said}"
    )
    file = read(text, file="run.sh", given={"gpus": 64})
    said = file.extra.layers_per_stage or ""
    assert virtual_stages(said, 45, 8, file.job.schedule) == {"stage_layers": split}
    assert not any("pipeline_stage" in item.key for item in file.uncounted)


@pytest.mark.parametrize(("rank", "wanted"), [("r=model_args.lora_r, ", 16), ("r=4, ", 4), ("", 8)])
def test_what_a_parser_fills_has_the_default_of_its_class(rank: str, wanted: int) -> None:
    """`ModelConfig.lora_r` of TRL 1.16 is 16, where `LoraConfig.r` of PEFT is 8."""
    program = f"""
from peft import LoraConfig
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser

parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
training_args.max_length = 1024
adapter = LoraConfig({rank}target_modules=["q_proj"])
trainer = SFTTrainer(model="Qwen/Qwen3-0.6B", args=training_args, peft_config=adapter)
trainer.train()
"""
    assert read(program, file="train.py", given={"gpus": 1}).job.lora_rank == wanted


@pytest.mark.parametrize(
    ("passed", "release", "weights"),
    [
        ("dtype=model_args.dtype", None, "float32"),  # `ModelConfig.dtype` of TRL 1.16, where transformers 5 has `auto`
        ("dtype=chosen", None, "float32"),
        ("revision=None", None, "auto"),
        ("dtype=model_args.dtype", "0.26", "auto"),
    ],
)
@pytest.mark.parametrize("trainer", ["SFT", "CPO"])
def test_a_program_loads_in_the_dtype_of_its_parser(
    trainer: str, passed: str, release: str | None, weights: str
) -> None:
    program = f"""
import torch
from transformers import AutoModelForCausalLM
from trl import ModelConfig, TrlParser
from trl.experimental import {trainer}Config, {trainer}Trainer

parser = TrlParser(({trainer}Config, ModelConfig))
training_args, model_args = parser.parse_args_and_config()
training_args.max_length = 1024
if model_args.dtype is None:
    chosen = torch.float16
else:
    chosen = getattr(torch, model_args.dtype)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", {passed})
{trainer}Trainer(model, args=training_args).train()
"""
    file = read(program, file="train.py", version=release, given={"gpus": 1})
    assert (file.job.weights, [item.key for item in file.uncounted]) == (weights, [])
