"""Keys that change an answer only beside another, or only where they are not there: each is heard."""

from __future__ import annotations

from typing import Any

import pytest

from loadgauge import estimate
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.families.hf import from_dict
from loadgauge.job_files.exchange import JobFile, read
from loadgauge.job_files.job_file import from_job_file

SIZED = (
    "torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --seq-length 4096 --max-position-embeddings 4096 --bf16"
    " --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 32000"
)
LLAMA = f"{SIZED} --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
SWIFT = "megatron sft --model Qwen/Qwen3-30B-A3B"
PRIMUS = """modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: {model}
    overrides: {{{sizes}}}
"""
AREAL = """cluster: {{n_gpus_per_node: 8}}
gconfig: {{n_samples: 4}}
actor:
  path: Qwen/Qwen3-8B
  backend: fsdp:d4
  {role}
rollout: {{backend: "sglang:d4"}}
enable_offload: {on}
"""
VERL = (
    "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml actor_rollout_ref.actor.strategy=megatron"
    " actor_rollout_ref.rollout.name=vllm data.train_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    " trainer.n_gpus_per_node=8 algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-8B"
    " actor_rollout_ref.model.lora.rank=8"
)
PRIME = '[model]\nname = "Qwen/Qwen3-0.6B"\n[orchestrator]\nbatch_size = 64\n[orchestrator.algo]\ntype = "{}"\n'


def of(text: str, name: str) -> JobFile:
    syntax = "toml" if text[0] == "[" else "yaml" if ":\n" in text or ": {" in text else "sh"
    return read(text, name, file=f"job.{syntax}", alone=True)


def named(text: str, name: str) -> dict[str, tuple[str, float]]:
    return {item.key: (item.effect, item.share) for item in of(text, name).uncounted}


@pytest.mark.parametrize(
    ("text", "name", "facts"),
    [
        (f"{SWIFT}\n", "megatron-swift", {"recompute": "selective", "loss": "jit"}),
        (f"{SWIFT} --recompute_modules moe core_attn\n", "megatron-swift", {"recompute": "modules:core_attn,moe"}),
        (f"{SWIFT} --moe_layer_recompute true\n", "megatron-swift", {"recompute": "modules:core_attn,moe"}),
        (f"{SWIFT} --cross_entropy_fusion_impl te\n", "megatron-swift", {"loss": "fused"}),
        (f"{LLAMA} --recompute-granularity selective --moe-layer-recompute\n", "megatron", {"recompute": "modules:core_attn,moe"}),
        (f"{VERL}\n", "verl", {"lora_rank": 8, "lora_dropout": None}),
        (f"{VERL} actor_rollout_ref.model.lora.dropout=0.1\n", "verl", {"lora_dropout": 0.1}),
        (AREAL.format(role="offload: false", on="false"), "areal", {"placement": "split:4+4", "rollout_offload": "none"}),
        (AREAL.format(role="offload: false", on="true"), "areal", {"placement": "split:4+4", "rollout_offload": "none"}),
        (AREAL.format(role="offload: true", on="true"), "areal", {"placement": "split:4+4", "rollout_offload": "all"}),
        (AREAL.format(role="scheduling_strategy: {type: colocation, target: rollout}", on="true"), "areal",
         {"placement": None, "gpus": 4, "rollout_offload": "all"}),
        ("MAX_PIXELS=1003520 swift sft --model Qwen/Qwen2.5-VL-7B-Instruct --freeze_vit true\n", "ms-swift",
         {"max_pixels": 1003520, "tower": "frozen"}),
    ],
)  # fmt: skip
def test_a_key_beside_another_is_heard(text: str, name: str, facts: dict[str, Any]) -> None:
    job = of(text, name).job
    assert {fact: getattr(job, fact) for fact in facts} == facts


@pytest.mark.parametrize(
    ("text", "name", "key", "bound"),
    [
        (f"{LLAMA} --cpu-offloading-num-layers 4\n", "megatron", "--cpu-offloading-num-layers", ("saves", 1.0)),
        (f"{LLAMA} --use-precision-aware-optimizer\n", "megatron", "--use-precision-aware-optimizer", ("saves", 1 / 6)),
        (f"{LLAMA} --use-precision-aware-optimizer --optimizer-cpu-offload\n", "megatron", "--use-precision-aware-optimizer", None),
        (f"{LLAMA} --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather\n", "megatron", "--fp8-param-gather", ("costs", 0.5)),
        (f"{LLAMA} --num-experts 8\n", "megatron", "--moe-grouped-gemm", ("costs", 1.0)),
        (f"{LLAMA} --num-experts 8 --moe-grouped-gemm\n", "megatron", "--moe-grouped-gemm", None),
        (f"{SWIFT} --masked_softmax_fusion false\n", "megatron-swift", "--masked_softmax_fusion", ("", 1.0)),
        (PRIME.format("sft"), "prime-rl", "orchestrator.algo.type", ("either", 1.0)),
        (PRIME.format("grpo"), "prime-rl", "orchestrator.algo.type", None),
        (AREAL.format(role="disable_dropout: true", on="false") + 'ref: {path: x, backend: "fsdp:d8"}\n', "areal",
         "ref.backend", ("either", 1.0)),
    ],
)  # fmt: skip
def test_what_is_not_counted_is_named(text: str, name: str, key: str, bound: tuple[str, float] | None) -> None:
    assert named(text, name).get(key) == bound


@pytest.mark.parametrize("coefficient", ["0.0", "0.1"])
def test_an_entropy_that_is_only_computed_is_named(coefficient: str) -> None:
    """`return_entropy` of OpenRLHF's `ppo_actor.py` asks whether there is a coefficient, not whether it is 0."""
    text = "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path x --vllm.num_engines 1"
    assert "--actor.entropy_coef" in named(f"{text} --actor.entropy_coef {coefficient}\n", "openrlhf")


@pytest.mark.parametrize(("hidden", "scores"), [("", ""), (" --hidden-dropout 0", " --attention-dropout 0.2")])
def test_dropout_of_a_family_that_has_it_is_counted(hidden: str, scores: str) -> None:
    config = of(f"{SIZED}{hidden}{scores}\n", "megatron").extra.config
    assert config is not None
    rates = (config["resid_pdrop"], config["embd_pdrop"], config["attn_pdrop"])
    assert rates == ((0.0, 0.0, 0.2) if hidden else (0.1, 0.1, 0.1))


def test_dropout_of_a_family_without_it_is_megatrons() -> None:
    """Masks of a byte for the embedding's output and both halves of each layer (source: korthikanti2022)."""
    kept = []
    for rate in ("0.1", "0.0"):
        config = of(f"{LLAMA} --hidden-dropout {rate}\n", "megatron").extra.config
        assert config is not None
        model = from_dict(config)
        assert {block.dropout for block in model.blocks} == {float(rate)}
        answer = estimate(model, framework="megatron", micro_batch=1, seq_len=4096, recompute="none")
        kept.append(answer.memory.largest("activations").parts["activations"])
    assert kept[0] - kept[1] == pytest.approx((2 * 8 + 1) * 4096 * 1024, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "sizes", "layers", "experts"),
    [
        ("llama3.1_8B.yaml", "", 32, 0),
        ("llama3.1_8B.yaml", "num_layers: 4", 4, 0),
        ("mixtral_8x7B_v0.1.yaml", "num_layers: 4, num_experts: 4", 4, 4),
        ("deepseek_v3.yaml", "num_layers: 6, moe_layer_freq: '[0]*2+[1]*4'", 6, 256),
    ],
)  # fmt: skip
def test_sizes_of_its_own_go_before_those_of_a_name(
    model: str, sizes: str, layers: int, experts: int, tmp_path: Any
) -> None:
    place = tmp_path / "job.yaml"
    place.write_text(PRIMUS.format(model=model, sizes=sizes))
    spec = from_job_file(Job(model=str(place), gpus=8)).model
    assert spec.num_hidden_layers == layers
    last = spec.blocks[-1].mlp
    assert getattr(last, "num_experts", 0) == experts


PACKED = "swift rlhf --rlhf_type {kind} --model Qwen/Qwen3-8B --max_length 8192 --packing {on} --num_train_epochs 1"


@pytest.mark.parametrize(("kind", "length"), [("dpo", 4096), ("rm", 4096), ("kto", 8192)])
def test_two_answers_share_a_packed_row(kind: str, length: int) -> None:
    """ms-swift packs by the sum of both lengths (`dataset/packing.py`); unpacked, each answer may be as long as `max_length`."""
    assert read(PACKED.format(kind=kind, on="true"), "ms-swift").job.seq_len == length
    assert read(PACKED.format(kind=kind, on="false"), "ms-swift").job.seq_len == 8192


def test_preferences_of_qwen_vl_have_ligers_kernels_without_its_loss() -> None:
    """`train_dpo.py` patches the model as `train_sft.py` does; the patched forward makes whole logits where it has no labels."""
    words = (
        "deepspeed src/train/train_dpo.py --model_id Qwen/Qwen2.5-VL-3B-Instruct --use_liger {on} --freeze_llm False"
    )
    jobs = [read(words.format(on=on), "qwen-vl-finetune").job for on in ("True", "False")]
    assert [(job.kernels, job.loss) for job in jobs] == [("liger", "float32"), ("native", None)]


def test_packs_of_balanced_rows_are_as_long_as_is_said() -> None:
    """ROLL fills micro-batches up to a number of tokens (`LoadBalancePacker`), and without that packs the rows of each."""
    text = (
        "rollout_batch_size: 8\nnum_return_sequences_in_group: 8\nprompt_length: 1024\nresponse_length: 1024\nadv_estimator: grpo\n"
        "pretrain: Qwen/Qwen2.5-7B\nactor_train:\n  use_sequence_packing: true\n  device_mapping: list(range(0,8))\n"
        "  training_args: {per_device_train_batch_size: 1, gradient_accumulation_steps: 8}\n"
        "  strategy_args: {strategy_name: megatron_train}\n"
        "  sequence_packing_args: {algorithm: %s, max_packed_sequence_length_train: 8192}\n"
    )
    assert [read(text % name, "roll").job.micro_batch for name in ("load_balance", "none")] == [4, 1]


def test_a_recipe_whose_base_is_not_there_has_the_model_of_its_name() -> None:
    """NeMo-RL's recipes are called after algorithm, model, GPUs and layout; the nearest base has another model."""
    file = "recipes/vlm_grpo-qwen2.5-vl-3b-instruct-clevr-1n8g-dtensor2tp1.v1.yaml"
    got = read("defaults: ../vlm_grpo_9B.yaml\npolicy:\n  max_total_sequence_length: 3072\n", "nemo-rl", file=file)
    assert (got.job.model, got.job.framework) == ("qwen2.5-vl-3b", "torchtitan")
    assert any("as the name of the file says" in remark for remark in got.remarks)


CARDS = """from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
gpu_memory_gb = torch.cuda.get_device_properties(0).total_memory / 1024**3
if gpu_memory_gb >= 150:
    name, rank = "unsloth/Llama-3.3-70B-Instruct", 64
elif gpu_memory_gb >= 40:
    name, rank = "unsloth/Llama-3.1-8B-Instruct", 32
else:
    name, rank = "unsloth/Llama-3.2-1B-Instruct", 16
half = torch.cuda.is_bf16_supported()
model, tokenizer = FastLanguageModel.from_pretrained(name, dtype=torch.bfloat16 if half else torch.float16)
model = FastLanguageModel.get_peft_model(model, r=rank)
trainer = SFTTrainer(model=model, args=SFTConfig(bf16=half, fp16=not half))
"""


def test_a_program_that_asks_the_card_is_read_for_80_gb() -> None:
    """A condition on the card's memory chooses among a program's branches, and is named as what decides."""
    got = read(CARDS, "unsloth")
    assert (got.job.model, got.job.lora_rank, got.job.precision) == ("unsloth/Llama-3.1-8B-Instruct", 32, "bf16")
    assert [(item.key, item.effect) for item in got.uncounted] == [
        ("gpu_memory_gb >= 150", "either"),
        ("gpu_memory_gb >= 40", "either"),
    ]
