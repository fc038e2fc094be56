"""Files of tools that train from the start: what is read is what the tool's own code makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families.hf import from_dict
from loadgauge.job_files.exchange import JobFile, read
from loadgauge.job_files.pre_training.bridge import recipe
from loadgauge.job_files.reading.argv import Argv

NEOX = """
{
  "pipe_parallel_size": 2, "model_parallel_size": 4, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
  "seq_length": 2048, "max_position_embeddings": 2048, "pos_emb": "rotary", "rotary_pct": 0.25, "no_weight_tying": true,
  "gpt_j_residual": true, "optimizer": {"type": "Adam", "params": {"lr": 0.0001}}, "zero_optimization": {"stage": 1},
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "checkpoint_activations": true,
  "attention_config": [[["flash"], 32]], "precision": "bfloat16", "lr_decay_style": "cosine"
}
"""
NANOTRON = """
model:
  dtype: bfloat16
  make_vocab_size_divisible_by: 128
  model_config:
    is_llama_config: true
    hidden_size: 2048
    intermediate_size: 8192
    num_hidden_layers: 16
    num_attention_heads: 32
    num_key_value_heads: 8
    vocab_size: 128000
    tie_word_embeddings: true
optimizer: {accumulate_grad_in_fp32: true, zero_stage: 1, optimizer_factory: {name: adamW}}
parallelism: {dp: 4, tp: 2, pp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER, recompute_layer: true}
tokens: {sequence_length: 4096, micro_batch_size: 2, batch_accumulation_per_replica: 16, train_steps: 10}
"""


def facts(file: JobFile, *names: str) -> list[object]:
    return [getattr(file.job, name) for name in names]


def test_gpt_neox() -> None:
    """A step has 4 x 8 sequences on each of 16 / (2 x 4) ranks; the sizes are those of Pythia 6.9B but for the vocabulary,
    which is GPT-2's 50,257 where no tokenizer is named: https://huggingface.co/EleutherAI/pythia-6.9b."""
    found = read(NEOX, file="a.yml", given={"gpus": 16})
    assert found.dialect == "gpt-neox"
    names = ("pp", "tp", "zero", "micro_batch", "global_batch", "seq_len", "recompute", "attention", "precision")
    assert facts(found, *names) == [2, 4, 1, 4, 64, 2048, "full", "flash", "bf16"]
    assert found.extra.config is not None
    assert found.extra.config["model_type"] == "gpt_neox"
    assert found.extra.config["use_parallel_residual"] is True
    tables = 2 * (50_432 - 50_257) * 4096  # Pythia's table has 50,432 rows
    assert parameters(from_dict(found.extra.config)).total == 6_857_302_016 - tables


def test_gpt_neox_halves_a_gated_layer() -> None:
    """`ParallelMLP`: of an intermediate size of 33,024, two thirds are gate and up together, 11,008 each."""
    text = NEOX.replace('"pos_emb"', '"norm": "rmsnorm", "activation": "swiglu", "intermediate_size": 33024, "pos_emb"')
    config = read(text, file="a.yml").extra.config
    assert config is not None
    assert (config["model_type"], config["intermediate_size"]) == ("llama", 11_008)


def test_gpt_neox_with_experts_names_their_bytes() -> None:
    text = "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nmoe_num_experts: 4\npipe_parallel_size: 1\n"
    item = next(item for item in read(text, file="x.yml").uncounted if item.key == "moe_num_experts")
    assert item.high == 18 * 3 * 2 * 64 * 256 * 2


SIZED = "num_layers: %d\nhidden_size: %d\nnum_attention_heads: 12\nnorm: rmsnorm\npipe_parallel_size: 1\nseq_length: 512\n%s"


def test_gpt_neox_of_mamba_has_its_sizes() -> None:
    """Those of https://huggingface.co/state-spaces/mamba-1.4b-hf but for 50,280 rows; heads, which it ignores, do not divide."""
    found = read(SIZED % (48, 2048, 'attention_config: [[["mamba"], 48]]\n'), file="a.yml")
    assert found.extra.config is not None
    assert parameters(from_dict(found.extra.config)).total == 1_372_178_432 - (50_280 - 50_257) * 2048


@pytest.mark.parametrize(
    ("sort", "matrices"),
    [
        # Five of attention's size, two and one of the MLP, and the thin ones of the mixes and of the decay.
        ("rwkv", 6 * 768**2 + 2 * 768 * 2688 + 2 * 768 * (5 * 32 + 64)),
        ("gmlp", 12 * 768**2 + 512**2),
        ("amlp", 12 * 768**2 + 512**2 + 2 * 4 * 768 * 3 * 64 + 64 * 4 * 768),
    ],
)
def test_gpt_neox_s_layers_without_attention_have_their_weights(sort: str, matrices: int) -> None:
    """`megatron/model/rwkv/v6/rwkv.py`, `megatron/model/gmlp.py`: the sizes of a layer's matrices, counted there."""
    found = read(SIZED % (2, 768, f'attention_config: [[["{sort}"], "all"]]\n'), file="a.yml")
    assert found.extra.config is not None
    assert parameters(from_dict(found.extra.config)).layers / 2 == pytest.approx(matrices, rel=0.002)
    assert found.job.attention == "flash"
    assert any(item.key == "attention_config" for item in found.uncounted)


def test_nanotron() -> None:
    """GPUs are dp x tp x pp; gradients and master weights in float32, over `dp` ranks with ZeRO 1."""
    found = read(NANOTRON, file="a.yaml")
    assert found.dialect == "nanotron"
    names = (
        "gpus",
        "tp",
        "pp",
        "zero",
        "micro_batch",
        "global_batch",
        "seq_len",
        "recompute",
        "precision",
        "sequence_parallel",
    )
    assert facts(found, *names) == [16, 2, 2, 1, 2, 128, 4096, "full", "bf16-mixed-18", True]
    assert found.extra.config is not None
    assert found.extra.config["vocab_size"] == 128_000
    for words in ("128001", '"128001"'):  # quoted, too
        assert read(NANOTRON.replace("128000", words), file="a.yaml").extra.config["vocab_size"] == 128_128  # type: ignore[index]


def test_nanotron_says_what_is_not_counted() -> None:
    found = read(NANOTRON.replace("pp_engine: 1f1b", "pp_engine: afab"), file="a.yaml")
    assert [(item.key, item.effect) for item in found.uncounted] == [("parallelism.pp_engine", "costs")]


def test_nanotron_trains_mamba() -> None:
    """The sizes have names of their own, and the parameters are those of transformers' class."""
    sizes = "d_model: 96, num_hidden_layers: 3, vocab_size: 501, pad_vocab_size_multiple: 8"
    keys = f"is_mamba_config: true, {sizes}, ssm_cfg: {{d_state: 8, expand: 3, dt_rank: auto, dt_max: 0.1}}"
    at = NANOTRON.index("  model_config:")
    text = f"{NANOTRON[:at]}  model_config: {{{keys}}}\n{NANOTRON[NANOTRON.index('optimizer:') :]}"
    found = read(text, file="a.yaml")
    assert not found.uncounted
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    with torch.device("meta"):
        model = transformers.MambaForCausalLM(
            transformers.MambaConfig(
                hidden_size=96, num_hidden_layers=3, vocab_size=504, state_size=8, expand=3, tie_word_embeddings=False
            )
        )
    assert found.extra.config is not None
    assert parameters(from_dict(found.extra.config)).total == sum(each.numel() for each in model.parameters())


BRIDGE = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
MODEL_NAME=llama3_8b
CMD="uv run --no-sync python scripts/training/run_recipe.py --recipe ${MODEL_NAME}_sft_config model.tensor_model_parallel_size=4"
srun --container-image=x bash -c "$CMD train.global_batch_size=32"
"""


def test_a_recipe_of_megatron_bridge_is_beneath() -> None:
    """recipes/llama/h100/llama3.py: tp 2, a length of 4,096 and micro-batches of one, in bf16_mixed."""
    found = read(BRIDGE, file="run.sh")
    assert found.dialect == "megatron-bridge"
    names = ("model", "gpus", "tp", "micro_batch", "global_batch", "seq_len", "precision", "lora_rank")
    assert facts(found, *names) == ["meta-llama/Meta-Llama-3-8B", 16, 4, 1, 32, 4096, "bf16", 0]
    assert read(BRIDGE.replace("sft_config", "peft_config"), file="run.sh").job.lora_rank == 32


def test_a_recipe_by_model_and_mode() -> None:
    found = recipe(Argv("python run_recipe.py --model llama3_8b --mode lora -x --seq_length 512", "hydra"))
    assert (found["model.hf_model_id"], found["peft.dim"], found["dataset.seq_length"]) == (
        "meta-llama/Meta-Llama-3-8B", "32", "512",
    )  # fmt: skip


def test_a_recipe_that_is_not_known_is_said() -> None:
    found = read(BRIDGE.replace("llama3_8b", "mine"), file="run.sh", given={"model": "llama-3-8b"})
    assert [item.key for item in found.uncounted] == ["--recipe"]


SIZES = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1"
    " --vocab-size 1000 --untie-embeddings-and-output-weights"
)
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --ffn-hidden-size 512 --position-embedding-type rope"
# Megatron's layers, counted by hand: h = 256, 4 heads of 64, f = 512, a vocabulary of 1,000 twice, and norms.
ENDS = 2 * 1000 * 256
MODELS = {
    LLAMA: ENDS + 256 + 4 * (4 * 256**2 + 3 * 256 * 512 + 2 * 256),
    f"{LLAMA} --add-qkv-bias": ENDS + 256 + 4 * (4 * 256**2 + 3 * 256 * 512 + 2 * 256 + 3 * 256),
    f"{LLAMA} --qk-layernorm": ENDS + 256 + 4 * (4 * 256**2 + 3 * 256 * 512 + 2 * 256 + 2 * 64),
    f"{LLAMA} --group-query-attention --num-query-groups 2": ENDS + 256 + 4 * (3 * 256**2 + 3 * 256 * 512 + 2 * 256),
    f"{LLAMA} --num-experts 8 --moe-router-topk 2 --qk-layernorm": ENDS
    + 256
    + 4 * (4 * 256**2 + 8 * (3 * 256 * 512 + 256) + 2 * 256 + 2 * 64),
    "--position-embedding-type rope --disable-bias-linear": ENDS + 2 * 256 + 4 * (4 * 256**2 + 8 * 256**2 + 4 * 256),
    # learned positions, and biases of 3h + h + 4h + h
    "": ENDS + 64 * 256 + 2 * 256 + 4 * (12 * 256**2 + 9 * 256 + 4 * 256),
    f"{LLAMA.replace('--swiglu', '--squared-relu')}": ENDS + 256 + 4 * (4 * 256**2 + 2 * 256 * 512 + 2 * 256),
}


@pytest.mark.parametrize("more", MODELS)
def test_parameters_of_megatrons_arguments(more: str) -> None:
    found = read(f"torchrun --nproc-per-node 1 pretrain_gpt.py {SIZES} {more}", file="a.sh")
    assert found.extra.config is not None
    assert parameters(from_dict(found.extra.config)).total == MODELS[more]


def test_a_tokenizer_of_unknown_size_is_in_the_range() -> None:
    script = f"torchrun pretrain_gpt.py {SIZES.replace('--vocab-size 1000', '--tokenizer-model $2')} {LLAMA}"
    found = read(script, file="a.sh")
    assert found.extra.config is not None
    assert found.extra.config["vocab_size"] == 2**17
    assert {item.effect for item in found.uncounted if item.key == "--tokenizer-model"} == {"either"}


def test_older_names_of_megatron() -> None:
    sizes = SIZES.replace("micro-batch-size", "batch-size")
    script = f"python pretrain_gpt.py {sizes} --checkpoint-activations --model-parallel-size 2"
    assert facts(read(script, file="a.sh", given={"gpus": 2}), "tp", "recompute", "micro_batch") == [2, "full", 1]


FOUNDRY = """
variables: {max_seq_len: 2048}
max_seq_len: ${variables.max_seq_len}
model:
  {name: mpt_causal_lm, d_model: 4096, n_heads: 32, n_layers: 32, vocab_size: 50432, no_bias: true, attn_config: {alibi: true}}
optimizer: {name: decoupled_adamw, lr: 1.2e-4}
global_train_batch_size: 1024
device_train_microbatch_size: 8
max_duration: 10ba
precision: amp_bf16
fsdp_config: {sharding_strategy: SHARD_GRAD_OP, activation_checkpointing: true}
"""


def test_llm_foundry() -> None:
    """The sizes of MPT-7B, whose parameters MosaicML publishes as 6,649,286,656."""
    found = read(FOUNDRY, file="a.yaml", given={"gpus": 8})
    assert found.dialect == "llm-foundry"
    names = ("zero", "micro_batch", "global_batch", "seq_len", "recompute", "precision", "optimizer")
    assert facts(found, *names) == [2, 8, 1024, 2048, "full", "bf16", "adamw"]
    assert found.extra.config is not None
    assert parameters(from_dict(found.extra.config)).total == 6_649_286_656


def test_a_batch_that_composer_finds_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"device_train_microbatch_size: .*--micro-batch"):
        read(FOUNDRY.replace("microbatch_size: 8", "microbatch_size: auto"), file="a.yaml")


def test_maxtext() -> None:
    """Sequences of a device times the devices that share them: 2 x 4 of a replica of 4."""
    text = (
        "model_name: llama3.1-8b\nper_device_batch_size: 2\nmax_target_length: 8192\nici_fsdp_parallelism: 2\n"
        "ici_tensor_parallelism: 4\nremat_policy: full\n"
    )
    found = read(text, file="a.yml")
    assert found.dialect == "maxtext"
    names = ("model", "gpus", "tp", "zero", "micro_batch", "seq_len", "recompute", "precision")
    assert facts(found, *names) == ["llama-3.1-8b", 8, 4, 3, 8, 8192, "full", "bf16"]
    words = text.replace(": ", "=").replace("\n", " ")
    assert read(f"python3 -m maxtext.train base.yml {words}", file="a.sh").job == found.job


@pytest.mark.parametrize(
    ("line", "key", "effect"),
    [
        ("activations_in_float32: true", "activations_in_float32", "either"),
        ("sparse_matmul: false", "sparse_matmul", "either"),
        ("num_moe_token_chunks: 4", "num_moe_token_chunks", "either"),
        ("wi_tile_fwd_mlp_dim: 2048", "wi_tile_fwd_mlp_dim", "either"),
        ("dropout_rate: 0.1", "dropout_rate", "costs"),
        ("remat_policy: custom", "remat_policy", "either"),
        ("sparse_matmul: true\nnum_moe_token_chunks: 1\nactivations_in_float32: false", "", ""),
    ],
)
def test_what_maxtext_does_another_way_than_usual_is_named(line: str, key: str, effect: str) -> None:
    """Each key is off at its own default alone."""
    found = read(f"model_name: llama3.1-8b\nper_device_batch_size: 2\n{line}\n", "maxtext", file="a.yml")
    assert [(item.key, item.effect) for item in found.uncounted] == [(key, effect)] * bool(key)


def test_kernels_of_attention_that_keep_the_scores() -> None:
    text = "model_name: llama3.1-8b\nper_device_batch_size: 2\nattention: dot_product\n"
    assert read(text, "maxtext", file="a.yml").job.attention == "eager"
    kept = FOUNDRY.replace("attn_config: {", "attn_config: {attn_impl: torch, ")
    assert kept != FOUNDRY
    assert read(kept, file="a.yaml", given={"gpus": 8}).job.attention == "eager"


def test_mixtures_and_sizes_of_llm_foundry_that_are_not_read_are_refused() -> None:
    for line in ("ffn_config: {ffn_type: mb_dmoe}", "ffn_config: {ffn_hidden_size: 4096}"):
        with pytest.raises(ConfigError, match="ffn_config"):
            read(FOUNDRY.replace("no_bias: true,", f"no_bias: true, {line},"), file="a.yaml", given={"gpus": 8})


def test_a_command_that_only_names_a_job_file(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(NANOTRON)
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nproc_per_node=8 run_train.py --config-file model.yaml\n")
    found = read(script.read_text(), file=str(script))
    assert (found.dialect, found.remarks) == ("nanotron", ("its arguments are in model.yaml",))


@pytest.mark.parametrize(
    ("command", "name", "text", "wanted"),
    [
        ("trl dpo --config a.yaml --max_length 512", "a.yaml", "model_name_or_path: gpt2\nmax_length: 1024\noutput_dir: o\n",
         ("gpt2", 512)),
        ("docker exec x bash -c 'accelerate launch --num_processes 4 -m axolotl.cli.train a.yaml --sequence_len 256'", "a.yaml",
         "base_model: gpt2\nsequence_len: 512\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\n", ("gpt2", 256)),
        ("torchrun --nproc-per-node 2 finetune.py --config b.yaml --step_scheduler.local_batch_size 4", "b.yaml",
         "step_scheduler: {global_batch_size: 8, local_batch_size: 1}\nmodel: {pretrained_model_name_or_path: gpt2, _target_:"
         " nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained}\n", ("gpt2", 4)),
        ("python run_grpo.py --config c.yaml policy.train_micro_batch_size=2", "c.yaml",
         "defaults: grpo_math_1B.yaml\npolicy: {model_name: gpt2}\n", ("gpt2", 1024)),
        ("accelerate launch --use_deepspeed --zero_stage 3 train.py --model_name_or_path gpt2 --output_dir o"
         " --per_device_train_batch_size 1", "", "", ("gpt2", 3)),
        ("accelerate launch --use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP train.py --model_name_or_path gpt2 --output_dir o"
         " --per_device_train_batch_size 1", "", "", ("gpt2", 2)),
        ("torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=gpt2 data.max_length=512"
         " data.micro_batch_size_per_gpu=1", "", "", ("gpt2", 512)),
        ("torchrun $(python -c 'x')/cli/sft.py --model gpt2 --max_length 512 --dataset x", "", "", ("gpt2", 512)),
    ],
)  # fmt: skip
def test_a_command_goes_before_the_file_that_it_names(
    command: str, name: str, text: str, wanted: tuple[str, int], tmp_path: Path
) -> None:
    if name:
        (tmp_path / name).write_text(text)
    job = read(f"{command}\n", file=str(tmp_path / "run.sh"), given={"gpus": 2}).job
    assert job.model == wanted[0]
    assert wanted[1] in (job.seq_len, job.micro_batch, job.logprob_tokens, job.zero)


GPT = (
    "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 96 --hidden-size 12288 --num-attention-heads 96"
    " --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536 {}"
)


@pytest.mark.parametrize(
    ("said", "gpus"),
    [
        ("--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16", 128),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 8),
        ("--num-experts 16 --expert-model-parallel-size 16 --expert-tensor-parallel-size 1", 16),
    ],
)
def test_an_example_that_starts_fewer_gpus_than_its_layout_has_takes_those_that_it_needs(said: str, gpus: int) -> None:
    file = read(GPT.format(said), file="run.sh")
    assert file.job.gpus == gpus
    assert any("are taken" in remark for remark in file.remarks) == (gpus > 8)
    if gpus == 128:
        with pytest.raises(ConfigError, match="cannot be split over 128"):
            read(GPT.format(said), file="run.sh", given={"gpus": 8})


@pytest.mark.parametrize(
    ("said", "wanted"),
    [("", "full"), ("--activations-checkpoint-num-layers 4", "full:group=4"), ("block 2", "full:layers=2")],
)
def test_the_method_of_2021_is_the_switch_of_recomputation(said: str, wanted: str) -> None:
    """`--activations-checkpoint-method`, None by default, of Megatron-LM 2.5 (`megatron/arguments.py`)."""
    way, _, number = said.partition(" ") if said.startswith("block") else ("uniform", "", "")
    more = f" --activations-checkpoint-num-layers {number}" if number else f" {said}"
    assert read(GPT.format(f"--activations-checkpoint-method {way}{more}"), file="a.sh").job.recompute == wanted


def test_frozen_parts_of_a_model_of_images_are_named_without_the_encoders_type() -> None:
    file = read(GPT.format("--freeze-LM --freeze-ViT"), file="a.sh")
    assert {item.key: item.effect for item in file.uncounted}["--freeze-LM"] == "saves"


@pytest.mark.parametrize(("both", "optimizer"), [("bf16", "adamw:moments=bf16"), ("fp32", "adamw")])
def test_moments_of_megatron(both: str, optimizer: str) -> None:
    text = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --bf16"
        " --micro-batch-size 1 --seq-length 64 --max-position-embeddings 64 --use-precision-aware-optimizer"
    )
    found = read(f"{text} --exp-avg-dtype {both} --exp-avg-sq-dtype {both}\n", file="a.sh")
    assert found.job.optimizer == optimizer
    assert not any("exp-avg" in item.key for item in found.uncounted)
    one = read(f"{text} --exp-avg-dtype bf16\n", file="a.sh")
    assert any("exp" in item.key for item in one.uncounted)


def test_a_model_that_an_example_builds_itself_is_named() -> None:
    """Sizes on the command line are not those of a provider's own code, which may freeze most of it; `gpt` is Megatron's own."""
    line = "torchrun --nproc_per_node 8 pretrain.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096"
    line += " --max-position-embeddings 4096 --micro-batch-size 1 --model-provider "
    for provider, named in (("my_towers", True), ("gpt", False)):
        found = read(line + provider, file="run.sh", name="megatron")
        assert ("model_provider" in {item.key.lstrip("-").replace("-", "_") for item in found.uncounted}) is named


def test_muon_by_layers_shares_out_its_states() -> None:
    """`dist_muon` is Muon in a `LayerWiseDistributedOptimizer`, though the distributed optimizer of Adam is off; Bridge's recipe of
    Kimi K2 takes it, and one of DeepSeek-V4 takes Muon without (recipes/kimi, recipes/deepseek)."""
    line = "torchrun --nproc_per_node 8 pretrain.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096"
    line += " --max-position-embeddings 4096 --micro-batch-size 1 --optimizer "
    for name, stage in (("dist_muon", 1), ("muon", 0)):
        assert facts(read(line + name, name="megatron", file="run.sh"), "optimizer", "zero") == ["muon", stage]
    for name, stage in (("kimi_k2_pretrain_config", 1), ("deepseek_v4_flash_pretrain_muon_config", 0)):
        line = f"torchrun --nproc_per_node 8 --nnodes 128 run_recipe.py --recipe {name}"
        assert facts(read(line, file="run.sh"), "optimizer", "zero") == ["muon", stage]
