"""ms-swift with Megatron-Core, its heads and servers; LLaMA-Factory's second layout and its other losses; files named by commands.

What is expected is worked out from the tools' own argument classes: ms-swift 4.6.0, LLaMA-Factory 0.9.5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import document, typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.job_files.exchange import JobFile, read

MEGATRON = "NPROC_PER_NODE=8 \\\nmegatron {} --model Qwen/Qwen3-8B --max_length 4096 {}\n"


def of(text: str, file: str = "a.sh", **more: Any) -> JobFile:
    return read(text, file=file, **more)


def job(text: str, file: str = "a.sh", **more: Any) -> Any:
    return of(text, file, **more).job


@pytest.mark.parametrize(
    ("program", "words", "expected"),
    [
        # Its own defaults: everything is trained, 16 sequences, ZeRO 1, attention recomputed, bfloat16, a fused loss.
        ("sft", "", {"framework": "megatron", "gpus": 8, "zero": 1, "micro_batch": 1, "global_batch": 16, "recompute": "selective",
                     "precision": "bf16", "loss": "jit", "lora_rank": 0, "attention": "fa2", "task": None}),
        ("sft", "--tuner_type lora --lora_rank 4", {"lora_rank": 4, "lora_targets": "all", "lora_dropout": 0.05}),
        ("sft", "--tensor_model_parallel_size 2 --sequence_parallel true", {"tp": 2, "sequence_parallel": True}),
        ("sft", "--sequence_parallel true", {"tp": 1, "sequence_parallel": False}),  # it is switched off with one rank
        ("sft", "--expert_model_parallel_size 4", {"ep": 4, "etp": 1}),
        ("sft", "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1", {"recompute": "full"}),
        ("sft", "--recompute_granularity none", {"recompute": "none"}),
        ("sft", "--torch_dtype float16", {"precision": "fp16"}),
        ("sft", "--fp8_format e4m3 --fp8_recipe blockwise --fp8_param_gather true", {"precision": "fp8-blockwise-primary"}),
        ("sft", "--optimizer muon", {"optimizer": "muon", "zero": 0}),  # no distributed optimizer with it
        ("sft", "--use_distributed_optimizer false", {"zero": 0}),
        ("sft", "--optimizer_cpu_offload true", {"offload": "optimizer"}),
        ("sft", "--packing true --packing_length 8192", {"seq_len": 8192}),
        ("rlhf", "", {"task": "dpo"}),
        ("rlhf", "--rlhf_type rm", {"task": "rm"}),
        ("rlhf", "--rlhf_type kto --tuner_type lora", {"task": "kto", "lora_rank": 8}),
        # 64 sequences, twice a step, of 8 answers to a prompt.
        ("rlhf", "--rlhf_type grpo --global_batch_size 64 --steps_per_generation 2",
         {"task": "grpo", "prompts": 16, "samples": 8, "reference": None, "global_batch": 64}),
        ("rlhf", "--rlhf_type grpo --beta 0 --vllm_mode colocate --sleep_level 1", {"reference": "none"}),
    ],
)  # fmt: skip
def test_megatron_of_ms_swift(program: str, words: str, expected: dict[str, Any]) -> None:
    found = job(MEGATRON.format(program, words))
    assert {name: getattr(found, name) for name in expected} == expected


def test_the_loss_was_not_fused_before_version_4() -> None:
    assert job(MEGATRON.format("sft", ""), version="3.12").loss is None


def test_experts_without_a_number_of_gpus_are_on_the_fewest() -> None:
    text = "megatron sft --model Qwen/Qwen3-30B-A3B --max_length 512 --expert_model_parallel_size 8"
    assert job(f"{text} --pipeline_model_parallel_size 2").gpus == 16
    assert job(text, given={"gpus": 32}).gpus == 32


def test_moments_in_16_bits_are_in_the_range() -> None:
    file = of(MEGATRON.format("sft", "--exp_avg_dtype bf16"))
    (item,) = file.uncounted
    assert (item.key, item.effect, item.parts) == ("--exp_avg_dtype", "saves", ("optimizer",))


SWIFT = "{}swift sft --model Qwen/Qwen2.5-0.5B --max_length 512 --tuner_type full {}\n"


@pytest.mark.parametrize(
    ("before", "words", "head", "micro"),
    [
        ("", "--task_type seq_cls --num_labels 3", 3, 1),
        ("", "--task_type seq_cls", 2, 1),
        ("", "--task_type reranker", 1, 8),  # one positive and at most 7 negatives
        ("MAX_NEGATIVE_SAMPLES=3 ", "--task_type reranker --per_device_train_batch_size 2", 1, 8),
        ("", "--task_type reranker --packing true", 1, 1),
        ("", "--task_type generative_reranker --loss_type pointwise_reranker", 1, 8),
        ("", "--task_type embedding", 1, 2),
    ],
)
def test_heads_and_sequences_of_a_sample(before: str, words: str, head: int | None, micro: int) -> None:
    file = of(SWIFT.format(before, words))
    assert (file.extra.head, file.job.micro_batch) == (head, micro)


def test_a_classifier_takes_the_logits_away(tmp_path: Path) -> None:
    """Qwen 2.5 0.5B has 896 x 151,936 weights of a tied head, and a classifier of 3 columns 896 x 3 of its own."""
    place, loss = tmp_path / "a.sh", {}
    for words in ("", "--task_type seq_cls --num_labels 3"):
        place.write_text(SWIFT.format("", words))
        loss[words] = document(f"estimate {place} --gpu h100-sxm5-80gb")["memory"]["largest"]["loss"]["bytes"]
    assert loss["--task_type seq_cls --num_labels 3"] < 2e7 < 512 * 151_936 * 4 <= loss[""]


@pytest.mark.parametrize(
    ("before", "gpus", "accumulation"),
    [
        ("NPROC_PER_NODE=4 ", 4, 4), ("NPROC_PER_NODE=4 NNODES=2 ", 8, 2), ("CUDA_VISIBLE_DEVICES=0 ", 1, 16),
        ("CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 ", 2, 8),
    ],
)  # fmt: skip
def test_a_step_has_16_sequences_at_least(before: str, gpus: int, accumulation: int) -> None:
    found = job(SWIFT.format(before, ""))
    assert (found.gpus, found.global_batch) == (gpus, gpus * accumulation)


def test_cards_of_one_process_share_the_layers_out() -> None:
    file = of(SWIFT.format("CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=2 ", ""))
    assert (file.job.gpus, file.job.pp, file.job.global_batch) == (4, 2, 16)
    assert [item.effect for item in file.uncounted] == ["costs"]


GROUPS = (
    "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-0.5B --use_vllm true --tuner_type lora --max_length 1024"
    " --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --num_generations 8 {}\n"
)


def test_servers_of_vllm_have_gpus_of_their_own() -> None:
    found = job(GROUPS.format("--vllm_mode server --vllm_server_host a b"))
    assert (found.gpus, found.placement, found.prompts) == (6, "split:4+2", None)
    with pytest.raises(ConfigError, match=r"--placement split:8\+1"):
        job(GROUPS.format("--vllm_mode server").replace("NPROC_PER_NODE=4 ", ""))


@pytest.mark.parametrize(
    ("words", "prompt", "answers"),
    [
        ("--vllm_max_model_len 1280", 768, "512"),  # answers are cut to what the context leaves
        ("--vllm_max_model_len 4096", 1024, "512"),
        ("--vllm_max_model_len 4096 --multi_turn_scheduler gym_scheduler --max_turns 4", 1024, "3072"),
        ("--multi_turn_scheduler gym_scheduler --max_turns 4", 1024, "2048"),
    ],
)
def test_answers_fit_the_context_of_vllm(words: str, prompt: int, answers: str) -> None:
    found = job(GROUPS.format(f"--vllm_mode colocate {words}"))
    assert (found.prompt_len, found.answers) == (prompt, answers)


def test_a_generation_of_all_gpus() -> None:
    """8 sequences on 4 GPUs in micro-batches of 2 are one of them each; a step of 2 micro-batches generates twice."""
    file = of(GROUPS.format("--vllm_mode colocate --generation_batch_size 8"))
    assert (file.extra.generated, file.job.global_batch) == (4, 16)
    with pytest.raises(ConfigError, match="no whole micro-batches"):
        of(GROUPS.format("--vllm_mode colocate --generation_batch_size 12"))


@pytest.mark.parametrize(
    "command",
    [
        "swift infer --adapters x",
        "swift export --model $MODEL",
        "megatron export --mcore_model x",
        "llamafactory-cli chat --template x",
    ],
)
def test_a_command_that_trains_nothing(command: str, tmp_path: Path) -> None:
    place = tmp_path / "a.sh"
    place.write_text(command)
    found = typed(f"estimate {place}")
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert "is no training job" in found.err


SMALL = "Qwen/Qwen2.5-0.5B"
BYTES = 988_065_536
"""Of its 494,032,768 parameters; of 49 norms of 896 each rank of two has its own."""


@pytest.mark.parametrize(
    ("name", "text", "layout", "weights"),
    [
        ("a.sh", f"swift infer --model {SMALL} --max_new_tokens 100 --max_batch_size 4\n",
         {"context": 1124, "batch": 4}, BYTES),
        ("a.sh", f"swift infer --model {SMALL} --load_in_4bit true\n", {"weight_format": "nf4"}, None),
        ("a.sh", f"NPROC_PER_NODE=4 megatron export --model {SMALL} --tensor_model_parallel_size 2\n",
         {"tp": 2, "gpus": 4, "replicas": 2, "context": 2}, BYTES // 2 + 49 * 896),
        ("a.sh", f"python src/merge_lora_weights.py --model-path out/lora --model-base {SMALL}\n", {"context": 2}, BYTES),
        ("a.sh", f"python -m verl.trainer.main_generation_server trainer.nnodes=1 actor_rollout_ref.model.path={SMALL}"
         " actor_rollout_ref.rollout.prompt_length=512 actor_rollout_ref.rollout.response_length=1024\n",
         {"context": 1536, "answer": 1024}, None),
        ("a.yaml", f"model_name_or_path: {SMALL}\nstage: sft\ndo_predict: true\nfinetuning_type: lora\ncutoff_len: 2048\n"
         "per_device_eval_batch_size: 8\n", {"context": 2048, "batch": 8}, None),
        ("a.toml", f"[deployment]\ntype = 'disaggregated'\nprefill_nodes_per_replica = 1\n[vllm]\nmodel = '{SMALL}'\n",
         {"batch": 1}, None),
    ],
)  # fmt: skip
def test_a_file_that_trains_nothing_is_a_request(
    name: str, text: str, layout: dict[str, Any], weights: int | None, tmp_path: Path
) -> None:
    place = tmp_path / name
    place.write_text(text)
    alone = typed(f"estimate {place} --json")
    assert "counted as --task generate" in alone.err
    found = json.loads(typed(f"estimate {place} --task generate --json").out)
    assert json.loads(alone.out) == found
    assert found["task"] == "generate"
    assert {key: found["layout"][key] for key in layout} == layout
    assert weights is None or found["memory"]["parts"]["weights"] == weights
    said = {*layout, "model"}
    assert all(one["effect"] in ("none", "either") and one["key"] not in said for one in found["unread"])


V1 = """model: Qwen/Qwen3-4B
model_class: llm
dist_config:
  name: fsdp2
train_dataset: data.yaml
micro_batch_size: 2
"""
LORA = "peft_config:\n  name: lora\n  r: 16\n  target_modules: all\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A whole model is float32, which FSDP2 computes in bfloat16; layers are recomputed; sequences of 2,048 tokens.
        (V1, {"zero": 3, "precision": "bf16", "weights": "float32", "recompute": "full", "seq_len": 2048, "loss": "float32"}),
        (V1 + LORA, {"lora_rank": 16, "lora_targets": "all", "lora_dropout": 0.05, "weights": "bfloat16"}),
        (V1 + "bf16: false\n", {"precision": "fp32"}),
        (V1.replace("dist_config:\n  name: fsdp2\n", ""), {"zero": 0, "precision": "fp32"}),  # nothing casts
        (V1.replace("fsdp2", "fsdp2\n  reshard_after_forward: false\n  offload_params: true"), {"zero": 2, "offload": "all"}),
        (V1 + LORA + "quant_config:\n  name: bnb\n  quantization_bit: 4\n", {"qlora": True, "base": "nf4"}),
        (V1 + "kernel_config:\n  name: liger_kernel\n", {"kernels": "liger", "loss": "float32"}),
        (V1 + "flash_attn: flash_attention_2\n", {"attention": "fa2"}),
        (V1 + "enable_activation_checkpointing: false\n", {"recompute": "none"}),
        (V1.replace("fsdp2", "fsdp2\n  cp_size: 2"), {"cp": 2, "cp_comm": "all_to_all"}),
    ],
)  # fmt: skip
def test_the_second_layout_of_llamafactory(text: str, expected: dict[str, Any]) -> None:
    file = of(text, "a.yaml")
    assert file.dialect == "llamafactory-v1"
    assert {name: getattr(file.job, name) for name in expected} == expected


def test_an_export_of_the_second_layout_is_no_training_job() -> None:
    with pytest.raises(ConfigError, match="trains nothing"):
        of("model: Qwen/Qwen3-4B\npeft_config:\n  name: lora\n  export_dir: x\n", "a.yaml")


V0 = """model_name_or_path: Qwen/Qwen2.5-0.5B
stage: sft
do_train: true
finetuning_type: full
template: qwen
cutoff_len: 1024
per_device_train_batch_size: 1
bf16: true
"""


@pytest.mark.parametrize(
    ("more", "key", "effect"),
    [
        ("use_eaft_loss: true\n", "use_eaft_loss", "costs"), ("use_asft_loss: true\n", "use_asft_loss", "costs"),
        ("use_kt: true\n", "use_kt", "saves"), ("fp8: true\n", "fp8", "either"),
        ("predict_with_generate: true\n", "predict_with_generate", "costs"),
    ],
)  # fmt: skip
def test_what_is_not_counted_of_llamafactory_is_named(more: str, key: str, effect: str) -> None:
    assert [(item.key, item.effect) for item in of(V0 + more, "a.yaml").uncounted] == [(key, effect)]


def test_other_losses_have_logits_in_float32() -> None:
    assert job(V0 + "use_dft_loss: true\n", "a.yaml").loss == "float32"


def test_llama_pro_and_freezing_train_some_layers() -> None:
    text = V0.replace("finetuning_type: full", "finetuning_type: freeze\nfreeze_trainable_layers: 4")
    assert job(text, "a.yaml").train == "layers.-4:"
    file = of(text + "use_llama_pro: true\n", "a.yaml")
    assert file.job.train == "layers.:4"
    assert {item.key for item in file.uncounted} == {"finetuning_type", "use_llama_pro"}


def test_what_a_name_alone_says_is_in_the_range() -> None:
    """Pairs that the trainer of the release cannot take, and a checkpoint of fewer bits than its adapters' tool keeps."""
    (pairs,) = of(V1 + "train_dataset: data/dpo_demo.yaml\n", "a.yaml").uncounted
    assert (pairs.key, pairs.effect) == ("train_dataset", "costs")
    assert not of(V1 + "train_dataset: data/sft.yaml\n", "a.yaml").uncounted
    text = V0.replace("Qwen/Qwen2.5-0.5B", "nvidia/Qwen2.5-0.5B-NVFP4")
    (stored,) = of(text.replace("full\n", "lora\n"), "a.yaml").uncounted
    assert (stored.key, stored.effect, "weights" in stored.parts) == ("model_name_or_path", "saves", True)
    assert not of(text, "a.yaml").uncounted


def test_workers_of_ray_are_gpus() -> None:
    assert job(V0 + "ray_num_workers: 4\n", "a.yaml").gpus == 4


@pytest.mark.parametrize("words", ["do_predict: true\n", "do_eval: true\n", "export_dir: x\n"])
def test_a_file_of_llamafactory_that_trains_nothing(words: str) -> None:
    with pytest.raises(ConfigError, match=r"training job|trains nothing"):
        of(V0.replace("do_train: true\n", words), "a.yaml")


def test_the_file_that_a_command_names(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.yaml").write_text(V0)
    place = tmp_path / "run.sh"
    place.write_text("NPROC_PER_NODE=2 llamafactory-cli train configs/a.yaml cutoff_len=512\n")
    file = of(place.read_text(), str(place))
    assert (file.dialect, file.job.gpus, file.job.seq_len, file.job.model) == (
        "llamafactory",
        2,
        512,
        "Qwen/Qwen2.5-0.5B",
    )
    assert file.remarks == ("its arguments are in configs/a.yaml",)
    place.write_text("llamafactory-cli train other.yaml\n")
    found = typed(f"estimate {place}")
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert "has its arguments in other.yaml, which is not there" in found.err


def test_llamafactory_with_megatron() -> None:
    """mcore_adapter's arguments beside LLaMA-Factory's own: no distributed optimizer unless it is said, and whole layers."""
    text = V0 + "gradient_accumulation_steps: 8\npipeline_model_parallel_size: 2\nrecompute_granularity: full\n"
    file = of(text, "a.yaml", given={"gpus": 4})
    found = file.job
    assert (file.dialect, found.framework, found.pp, found.recompute) == (
        "llamafactory-megatron",
        "megatron",
        2,
        "full",
    )
    assert (found.zero, found.global_batch, found.seq_len) == (0, 16, 1024)
    assert job(text + "use_distributed_optimizer: true\n", "a.yaml").zero == 1


def test_checkpoints_that_are_quantised_and_weights_that_stay_in_16_bits() -> None:
    lora = V0.replace("finetuning_type: full", "finetuning_type: lora")
    found = job(lora.replace("Qwen2.5-0.5B", "Qwen2.5-0.5B-Instruct-GPTQ-Int4"), "a.yaml")
    assert (found.qlora, found.base) == (True, "gptq")
    assert job(V0.replace("bf16: true\n", "use_badam: true\n"), "a.yaml").precision == "bf16-pure"
