"""Kernels whose sums have one order: what FlashAttention-2 needs for that, and the bound of a step's time."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.command_line import typed

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import SLOWEST_BACKWARD
from loadgauge.job_files.exchange import read

JOB = {
    "model": "llama-3.1-8b",
    "gpu": "a100-sxm4-80gb",
    "gpus": 8,
    "framework": "torchtitan",
    "zero": 3,
    "seq_len": 4096,
}


def setup(**more: Any) -> Any:
    return resolve_job(Job(**{**JOB, "micro_batch": 1, "recompute": "none", **more}))


def attention(result: Any) -> Any:
    return next(run for run in result.workings.operations if run.operation.kind == "attention")


@pytest.mark.parametrize(
    ("gpu", "micro_batch", "splits"),
    # 32 heads a sequence: 108 multiprocessors are for four groups of its blocks, and for one of four sequences.
    [("a100-sxm4-80gb", 1, 4), ("a100-sxm4-80gb", 2, 2), ("a100-sxm4-80gb", 4, 1), ("rtx4090", 1, 4)],
)
def test_flash_attention_2_sums_each_group_of_blocks_by_itself(gpu: str, micro_batch: int, splits: int) -> None:
    """`dq_accum` of (multiprocessors + b a - 1) / (b a) times its float32 size (csrc/flash_attn/flash_api.cpp, `mha_bwd`)."""
    plain, ordered = (
        attention(setup(gpu=gpu, micro_batch=micro_batch, determinism=word).estimate()).operation
        for word in (None, "kernels")
    )
    more = ordered.backward_workspace - plain.backward_workspace
    assert more == (splits - 1) * 4 * micro_batch * 4096 * 4096
    assert ordered.workspace == plain.workspace


def test_a_step_needs_that_in_backward() -> None:
    def most(word: str | None) -> float:
        memory = setup(determinism=word).estimate().memory
        return max(moment.parts["transient"] for moment in memory.moments if "backward of layer" in moment.name)

    assert most("kernels") >= most(None)


def test_other_kernels_have_no_sums_of_their_own() -> None:
    """FlashAttention-3 and cuDNN wait for their turn instead (hopper/flash_api.cpp: `dq_semaphore`)."""
    for framework, gpu in (("megatron", "h100-sxm5-80gb"), ("torchtitan", "b200-sxm-180gb")):
        kernels = setup(framework=framework, gpu=gpu, zero=0, determinism="kernels").training.kernels
        assert (kernels.sums_over > 0) == (kernels.flash == "fa2")


def test_the_bound_is_of_attention_fills_and_waits() -> None:
    plain, ordered, waited = (setup(determinism=word).estimate() for word in (None, "kernels", "blocking"))
    assert ordered.time.step == pytest.approx(plain.time.step)
    assert ordered.time.low == pytest.approx(plain.time.low)
    rate = plain.workings.step.machine.memory("elementwise").forward
    host = plain.workings.step.machine.host
    more = launches = 0.0
    for run in plain.workings.operations:
        sides = (*run.operation.outputs, *(run.operation.inputs if run.operation.gradients else ()))
        slower = (SLOWEST_BACKWARD - 1) * run.seconds.input_gradient if run.operation.kind == "attention" else 0
        more += run.times * (sum(tensor.nbytes for tensor in sides) / rate + slower)
        launches += run.times * (1 + run.operation.gradients) * host
    share = ordered.time.high / plain.time.high - 1
    assert share == pytest.approx(more / plain.time.step, rel=1e-6)
    # Nothing hides behind a launch that is waited for.
    alone = setup(overlap="none").estimate()
    assert waited.time.step == pytest.approx(alone.time.step)
    assert waited.time.high / alone.time.high - 1 == pytest.approx((more + launches) / alone.time.step, rel=1e-3)
    assert "every launch waited for" in waited.assumed["--determinism"]


def test_pytorch_fills_what_it_does_not_write() -> None:
    torch = pytest.importorskip("torch")
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        assert torch.empty(1000).isnan().all()
    finally:
        torch.use_deterministic_algorithms(before)


def test_the_words_of_the_tools_say_it() -> None:
    for words, ours in (("--deterministic-mode", "kernels"), ("--full-determinism", "blocking")):
        said = typed(f"estimate llama-3.1-8b --gpu h100-sxm5-80gb --framework megatron {words}").err
        assert f"as --determinism {ours}" in said


@pytest.mark.parametrize(
    ("name", "text", "ours"),
    [
        ("a.yaml", "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: full\noutput_dir: x\nfull_determinism: true\n",
         "blocking"),
        ("a.sh", "python train.py --model_name_or_path Qwen/Qwen3-8B --output_dir x --full_determinism True\n", "blocking"),
        ("b.sh", "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
         " --micro-batch-size 1 --deterministic-mode\n", "kernels"),
    ],
)  # fmt: skip
def test_job_files_say_it(name: str, text: str, ours: str) -> None:
    assert read(text, file=name).job.determinism == ours
