"""Attention in job files: each tool's word is the kernel that it names, and is written back."""

from __future__ import annotations

import pytest

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.job_files.exchange import read, write

TRL = "model_name_or_path: meta-llama/Llama-3.1-8B\nper_device_train_batch_size: 1\nmax_length: 2048\n"
AXOLOTL = "base_model: meta-llama/Llama-3.1-8B\nmicro_batch_size: 1\nsequence_len: 2048\nsequence_parallel_degree: 1\n"
FACTORY = "model_name_or_path: meta-llama/Llama-3.1-8B\nstage: sft\nfinetuning_type: full\ncutoff_len: 2048\n"
MEGATRON = "torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 \\\n"
VERL = "actor_rollout_ref:\n  model:\n    path: meta-llama/Llama-3.1-8B\n    override_config:\n      attn_implementation: {}\n"
BACKEND = (
    "actor_rollout_ref:\n  model:\n    path: meta-llama/Llama-3.1-8B\n  actor:\n    strategy: megatron\n    megatron:\n"
    "      override_transformer_config:\n        attention_backend: {}\n"
)
WORDS = [
    *((TRL + "attn_implementation: {}\n", *pair) for pair in (
        ("sdpa", "flash"), ("flash_attention_2", "fa2"), ("flash_attention_3", "fa3"), ("eager", "eager"),
        ("kernels-community/flash-attn3", "fa3"), ("flex_attention", "fa2"),
    )),
    *((AXOLOTL + "{}: true\n", *pair) for pair in (
        ("flash_attention", "fa2"), ("sdp_attention", "flash"), ("xformers_attention", "fa1"), ("eager_attention", "eager"),
    )),
    (AXOLOTL + "attn_implementation: {}\n", "flash_attention_3", "fa3"),
    *((FACTORY + "flash_attn: {}\n", *pair) for pair in (
        ("fa2", "fa2"), ("fa3", "fa3"), ("sdpa", "flash"), ("auto", "flash"), ("disabled", "eager"),
    )),
    *((MEGATRON + "  --attention-backend {}\n", *pair) for pair in (
        ("flash", "fa2"), ("fused", "cudnn"), ("auto", "flash"), ("unfused", "eager"),
    )),
    (VERL, "flash_attention_3", "fa3"), (VERL, "eager", "eager"), (BACKEND, "fused", "cudnn"), (BACKEND, "flash", "fa2"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "word", "kernel"), WORDS)
def test_a_word_is_the_kernel_that_it_names(text: str, word: str, kernel: str):
    assert read(text.format(word)).job.attention == kernel


# Tools that have no word for a kernel leave theirs; what is left is what they choose themselves.
KERNELS = {
    "trl": ("flash", "fa2", "fa3", "fa4", "eager"), "axolotl": ("flash", "fa1", "fa2", "fa3", "fa4", "eager"),
    "llamafactory": ("flash", "fa2", "fa3", "eager"), "ms-swift": ("flash", "fa2", "fa3", "fa4", "eager"),
    "automodel": ("flash", "fa2", "fa3", "fa4", "eager"), "megatron": ("flash", "fa2", "cudnn", "eager"),
    "megatron-bridge": ("flash", "fa2", "cudnn", "eager"), "verl": ("fa2", "fa3", "fa4", "eager"),
}  # fmt: skip


@pytest.mark.parametrize(("dialect", "kernel"), [(name, kernel) for name, each in KERNELS.items() for kernel in each])
def test_a_kernel_is_written_and_read_again(dialect: str, kernel: str):
    framework = "megatron" if "megatron" in dialect else "huggingface"
    job = Job(
        model="llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, attention=kernel, framework=framework, zero=1, seq_len=2048
    )
    text = write(job, dialect).text
    assert read(text, dialect).job.attention == kernel


def test_the_generation_decides_the_time():
    def step(word: str) -> float:
        job = read(TRL.replace("2048", "16384") + f"attn_implementation: {word}\n").job
        time = resolve_job(job.replace(gpu="h100-sxm5-80gb", gpus=8, zero=3, lora_rank=None)).estimate().time
        assert time is not None
        return time.step

    assert step("flash_attention_3") < 0.95 * step("flash_attention_2")
    assert step("flash_attention_2") < step("eager")
