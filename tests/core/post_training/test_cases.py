"""Numbers with printed results, one by one (source: the column of `cases.csv`), through what the package makes of a run."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec
import pytest

from loadgauge.core.base.units import GIB, MIB
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.layers import View, head_layer
from loadgauge.core.post_training.engine import captured, on_card
from loadgauge.core.post_training.memory import memory
from loadgauge.core.post_training.step import REST, step_time
from loadgauge.core.post_training.sync import SHARE, transfer
from loadgauge.core.resolve.posttrain import resolve_posttrain

with (Path(__file__).parents[2] / "data" / "posttrain" / "cases.csv").open(encoding="utf-8") as file:
    PRINTED = {row["id"]: float(row["printed"]) for row in csv.DictReader(file)}


def card(model: str, text: str, **more: int):  # type: ignore[no-untyped-def]
    asked = {"sequences": 20, "unique": 1, "prompt": 512, "mean": 1024, "longest": 1024} | more
    return on_card(find_model(model), Engine.parse(text), None, **asked)  # type: ignore[arg-type]


def test_cache_of_twenty_thousand_tokens() -> None:
    assert card("llama-3.1-8b", "vllm").demand == pytest.approx(PRINTED["kv-llama8b-20k"], rel=1e-3)


def test_cache_over_four_ranks_of_a_model_of_four_key_heads() -> None:
    """A pool holds whole blocks, so it is at most what its tokens need."""
    found = card("qwen3-235b-a22b", "vllm:tp=4", sequences=1, longest=178_880, prompt=1024)
    assert found.demand == pytest.approx(8.02 * GIB, rel=1e-3)
    assert 0.98 < found.demand / PRINTED["vllm-21348"] < 1


def test_weights_in_an_engine_alone_and_over_two_ranks() -> None:
    alone, two = card("llama-3-8b", "vllm"), card("llama-3-8b", "vllm:tp=2")
    assert alone.weights == pytest.approx(PRINTED["vllm-10511-weights"], rel=1e-3)
    assert two.weights / GIB == pytest.approx(7.48, abs=0.01)


def test_pool_of_an_engine_that_counts_what_lies_outside() -> None:
    """vLLM before its first release with V1 subtracted all that is outside PyTorch: 71.30 - 14.96 - 1.79 - 1.26."""
    engine = Engine.parse("vllm:utilization=0.9")
    found = engine.cache_room(79.22 * GIB, weights=14.96 * GIB, profile=(1.79 + 1.26) * GIB, outside=0)
    assert found / GIB == pytest.approx(PRINTED["vllm-10511-pool"], abs=0.01)


def head_tensor(model: str, loss: str, tokens: int, name: str, chunks: int = 1) -> float:
    kernels = Kernels(loss=loss, loss_chunks=chunks, logprobs="rows")  # type: ignore[arg-type]
    layer = head_layer(find_model(model), View.of(tokens, 1, kernels=kernels))
    return float(next(tensor.nbytes for one in layer for tensor in (*one.outputs, *one.keeps) if tensor.name == name))


def test_two_copies_of_logits_of_a_group() -> None:
    tokens = 8 * 20 * 1024
    assert 2 * head_tensor("llama-3.1-8b", "plain", tokens, "head.logits") == pytest.approx(
        PRINTED["grpo-logits-unsloth"], rel=1e-3
    )


def test_logits_of_a_prefill() -> None:
    assert head_tensor("qwen2.5-7b", "plain", 16 * 4096, "head.logits") == pytest.approx(
        PRINTED["skyrl-891"] * 152_064 / 151_936, rel=6e-3
    )


def test_tile_of_a_chunked_head() -> None:
    """441 rows of 151,936 columns: 255.6 MiB in float32 and 127.8 in 16 bits (AgileRL)."""
    kernels = Kernels(loss="chunked", loss_chunks=1, logprobs="rows")
    head = head_layer(find_model("qwen2.5-0.5b"), View.of(441, 1, kernels=kernels))
    loss = next(one for one in head if one.name == "head.logprobs")
    assert loss.workspace == pytest.approx(PRINTED["agile-tile32"], rel=1e-3)
    assert loss.inputs[0].nbytes == pytest.approx(PRINTED["agile-tile16"], rel=1e-3)


def test_float32_log_softmax_is_four_bytes_a_logit() -> None:
    kept = head_tensor("llama-3.1-8b", "float32", 20_000, "head.float32")
    assert kept / 128_256 * 131_072 == pytest.approx(10_485_760_000)


def test_optimizers_of_a_small_model() -> None:
    """Differences of two logged readings: 5.76 GiB of AdamW of a 1.5B model in bfloat16, and 2.94 of 8-bit moments with a scale
    for each 256."""
    params = float(parameters(find_model("qwen2.5-1.5b")).total)
    assert params == 1_543_714_304
    for optimizer, name in (("adamw", "garg-adamw"), ("adamw-torchao-8bit", "garg-adamw8")):
        job = Job("qwen2.5-1.5b", task="sft", precision="bf16-pure", optimizer=optimizer, recompute="full", seq_len=64)
        found = memory(resolve_posttrain(job)[0]).phases[0]
        states = next(one.nbytes for one in found.residents if one.part == "optimizer")
        assert states == pytest.approx(PRINTED[name], rel=0.015)


def test_a_parameter_of_an_adapter_is_twenty_bytes() -> None:
    """Rank 8 to 64: weight, gradient and two moments in float32, and the reference's copy."""

    def held(rank: int) -> tuple[float, float]:
        job = Job(
            "qwen2.5-0.5b", task="grpo", lora_rank=rank, lora_targets="all", lora_dtype="float32", precision="bf16-pure",
            reference="adapter", prompt_len=16, answers="16", prompts=1, samples=1, rollout="vllm:max_batched_tokens=32",
        )  # fmt: skip
        run, setup = resolve_posttrain(job)
        update = next(phase for phase in memory(run).phases if phase.name == "update")
        count = setup.estimate().workings.worst.rank.weights.all.trainable
        step = next(one for one in setup.estimate().memory.moments if one.phase.value == "step").parts
        adapters = sum(one.nbytes for one in update.residents if one.part == "adapters")
        return float(count), float(step["weights"] + step["gradients"] + step["optimizer"]) + adapters

    few, many = held(8), held(64)
    assert (many[1] - few[1]) / (many[0] - few[0]) == pytest.approx(PRINTED["agile-adapter"])


def test_states_of_a_distillation() -> None:
    """3B from 14B in bfloat16: 6 + 6 + 12 GB of the student, 28 of the teacher."""
    job = Job(
        "qwen2.5-3b", task="gkd", teacher="qwen2.5-14b", precision="bf16-pure", seq_len=16, recompute="full",
    )  # fmt: skip
    run, setup = resolve_posttrain(job)
    update = next(phase for phase in memory(run).phases if phase.name == "update")
    teacher = update.of("teacher")
    step = next(one for one in setup.estimate().memory.moments if one.phase.value == "step").parts
    student = sum(float(step[name]) for name in ("weights", "gradients", "optimizer"))
    scale = (3e9 / run.trained.params, 14e9 / run.members["teacher"].params)
    assert student * scale[0] / 1e9 + teacher * scale[1] / 1e9 == pytest.approx(PRINTED["torchtune-2213"], rel=1e-6)


def test_states_on_the_host_are_sixteen_bytes_a_parameter() -> None:
    """32B: 3 weights, the optimizer and gradients (verl); the estimate moves 2 + 2 + 12 of them."""
    job = Job(
        "qwen2.5-32b", task="grpo", gpus=8, zero=3, gpu="h100-sxm5-80gb", precision="bf16-mixed-16", framework="megatron",
        recompute="full", rollout_offload="all", rollout="vllm:tp=8", prompts=8, samples=1,
    )  # fmt: skip
    run, _ = resolve_posttrain(job)
    found = memory(run).host["moved while answers are generated"]
    assert found / run.trained.params == pytest.approx(PRINTED["verl-1964"] / 32, rel=0.01)


def test_sizes_that_an_engine_captures() -> None:
    assert (captured(256), captured(4), captured(1)) == (67, 4, 2)
    assert pytest.approx(PRINTED["agile-tile32"], rel=1e-3) == 255.6 * MIB


def test_log_softmax_of_a_block_that_ran_out() -> None:
    """About 10 GiB of 20,000 tokens and 131,072 columns (NeMo-RL #4222); the block of the report holds some more tokens."""
    found = head_tensor("llama-3.1-8b", "float32", 20_000, "head.float32") / 128_256 * 131_072
    assert found == pytest.approx(PRINTED["nemo-4222"], rel=0.02)


def test_chunks_that_autograd_keeps_are_the_whole() -> None:
    """8,192 tokens of 248,320 columns, of which the report says 8 GiB."""
    found = head_tensor("qwen3.5-27b", "float32", 8192, "head.float32")
    assert found == 8192 * 248_320 * 4
    assert found == pytest.approx(PRINTED["molt-121"], rel=0.06)


def colocated(model: str, **more: object):  # type: ignore[no-untyped-def]
    given = {"prompts": 64, "samples": 8, "prompt_len": 256, "answers": "exp:800,2048", "gpus": 8, "zero": 3}
    return resolve_posttrain(Job(model, task="grpo", gpu="h100-sxm5-80gb", **(given | more)))[0]  # type: ignore[arg-type]


def test_weights_over_the_wire() -> None:
    """70B in 16 bits over 400 Gbit/s: 2.8 s, of which the software's share is taken."""
    run = colocated("llama-3.1-70b", gpus=16, placement="split:8+8", rollout="vllm:tp=8")
    found = transfer(run, "shard to shard")
    bandwidth = found.rate / SHARE
    assert bandwidth == pytest.approx(50e9, rel=0.01)
    assert found.received * run.engine.tp / bandwidth == pytest.approx(PRINTED["sglang-2708"], rel=0.02)


def test_weights_from_shard_to_shard() -> None:
    run = colocated(
        "deepseek-v3", gpus=512, placement="split:256+256", rollout="vllm:tp=32", prompt_len=128, answers="512"
    )
    assert transfer(run, "shard to shard").seconds == pytest.approx(PRINTED["nemo-refit-dsv3"], rel=0.1)


@pytest.mark.parametrize(
    ("phases", "name"),
    [
        ((321, 88, 286), "verl-oneoff-sync"),
        ((45, 108, 337), "verl-oneoff-async"),
        ((348.05, 28.73, 20.86, 86.27), "verl-30b"),
    ],
)
def test_what_lies_outside_of_the_phases(phases: tuple[float, ...], name: str) -> None:
    """verl prints the phases and the step; between them lies what no phase counts."""
    assert sum(phases) * (1 + REST) == pytest.approx(PRINTED[name], rel=0.03)


def test_tokens_a_second_and_gpu_of_a_step() -> None:
    """NeMo-RL's 2,048 sequences of 3,251 tokens in 376 s on 32 H100; it counts 3 % more tokens."""
    time = step_time(colocated("qwen3-32b", gpus=32, rollout="vllm:tp=2"), None)
    found = msgspec.structs.replace(time, step=376.0, tokens=2048 * 3251, gpus=32)
    assert found.tokens_per_second_per_gpu == pytest.approx(553.36, rel=1e-4)
    assert found.tokens_per_second_per_gpu == pytest.approx(PRINTED["nemo-32b-tokens"], rel=0.035)


def test_every_case_is_tested() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in PRINTED if f'"{name}"' not in text] == []
