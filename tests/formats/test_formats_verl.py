"""verl: what its trainers multiply, which loss they take, and what shares the GPUs with the actor's update."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_formats_coverage import VERL

from command_line import document, typed
from loadgauge.errors import ConfigError
from loadgauge.formats.exchange import read, write
from loadgauge.spec.job import Job

A = "actor_rollout_ref.actor."


def run_of(text: str, **given: object) -> Job:
    return read(text, file="grpo.sh", given=given).job


def test_a_mini_batch_counts_prompts_each_with_its_answers() -> None:
    """`ppo_mini_batch_size * rollout.n`: trainer/ppo/ray_trainer.py of 0.9.1, workers/fsdp_workers.py of 0.4.0."""
    run = run_of(VERL)
    assert (run.global_batch, run.micro_batch, run.seq_len, run.gpus) == (256 * 5, 8, 2048, 8)
    assert run_of(VERL.replace("rollout.n=5", "rollout.n=1")).global_batch == 256
    patched = write(Job(model="", global_batch=640, gpus=8, micro_batch=8), "verl", VERL, file="grpo.sh").text
    assert f"{A}ppo_mini_batch_size=128" in patched
    odd = write(Job(model="", global_batch=64, gpus=8, micro_batch=8), "verl", VERL, file="grpo.sh").text
    assert run_of(odd).global_batch == 64


def test_the_step_of_a_grpo_script_has_all_its_answers(tmp_path: Path) -> None:
    place = tmp_path / "grpo.sh"
    place.write_text(VERL)
    found = document(f"estimate {place} --gpu h100-sxm5-80gb")
    assert found["layout"]["global_batch"] == 1280
    assert found["time"]["tokens_per_step"] == 1280 * 2048


def test_the_actors_loss_writes_over_its_logits(tmp_path: Path) -> None:
    """flash-attention's cross-entropy with `inplace_backward`; the entropy needs the logits, so then it does not."""
    assert run_of(VERL).loss == "fused"
    assert run_of(VERL + f" {A}entropy_coeff=0").loss == "fused"
    assert run_of(VERL + f" {A}entropy_coeff=0.001").loss == "compiled"
    assert run_of(VERL + " actor_rollout_ref.model.use_fused_kernels=True").loss == "chunked"
    megatron = VERL.replace("trainer.nnodes", f"{A}strategy=megatron trainer.nnodes")
    assert run_of(megatron).loss is None
    place = tmp_path / "grpo.sh"
    place.write_text(VERL)
    fused = document(f"estimate {place} --gpu h100-sxm5-80gb")["memory"]
    whole = document(f"estimate {place} --gpu h100-sxm5-80gb --loss float32")["memory"]
    # 8 x 2048 tokens of 151,936 words in float32 are 9.96 GB each: the upcast logits, their logarithms, the gradient.
    assert whole["total"] - fused["total"] > 2 * 8 * 2048 * 151_936 * 4
    assert fused["fits"]


def test_the_entropy_is_within_the_range(tmp_path: Path) -> None:
    place = tmp_path / "grpo.sh"
    place.write_text(VERL + f" {A}entropy_coeff=0.001")
    found = document(f"estimate {place} --gpu h100-sxm5-80gb")
    whole = document(f"estimate {place} --gpu h100-sxm5-80gb --loss float32")["memory"]
    assert found["memory"]["high"] >= whole["total"]
    assert any("entropy" in line for line in found["not_counted"])


def test_what_shares_the_gpus_is_said(tmp_path: Path) -> None:
    place = tmp_path / "grpo.sh"
    place.write_text(VERL + f" {A}use_kl_loss=True")
    found = document(f"estimate {place} --gpu h100-sxm5-80gb")
    lines = found["not_counted"]
    assert lines[0].startswith("actor_rollout_ref.rollout.*: generation between the updates")
    assert sum(line.startswith("actor_rollout_ref.rollout.") for line in lines) == 1
    assert any("use_kl_loss" in line for line in lines)
    place.write_text(VERL.replace("=grpo", "=gae"))
    critic = document(f"estimate {place} --gpu h100-sxm5-80gb")
    # Of the size of the actor: 16 bytes a parameter over 8 GPUs.
    more = critic["memory"]["high"] - document(f"estimate {place} --gpu h100-sxm5-80gb")["memory"]["total"]
    assert more > 16 * critic["model"]["params"] / 8


def test_offload_between_the_updates_is_no_offload_in_them() -> None:
    offloaded = VERL + f" {A}fsdp_config.param_offload=True {A}fsdp_config.optimizer_offload=True"
    assert run_of(offloaded).offload == "none"
    assert any("on the GPU" in item.note for item in read(offloaded, file="a.sh").uncounted)
    assert run_of(VERL + f" {A}strategy=fsdp2 {A}fsdp_config.offload_policy=True").offload == "all"


def test_micro_batches_of_as_many_tokens_as_fit() -> None:
    """Up to `ppo_max_token_len_per_gpu` tokens, on Ulysses' ranks together (workers/engine/utils.py)."""
    dynamic = VERL + f" {A}use_dynamic_bsz=True {A}ppo_max_token_len_per_gpu="
    assert run_of(f"{dynamic}8192").micro_batch == 4
    assert run_of(VERL + f" {A}use_dynamic_bsz=True").micro_batch == 16_384 // 2048
    ulysses = f" {A}ulysses_sequence_parallel_size=2"
    assert run_of(f"{dynamic}4096{ulysses}").micro_batch == 4
    with pytest.raises(ConfigError, match="fewer than a sequence has"):
        run_of(f"{dynamic}1024")
    with pytest.raises(ConfigError, match=r"no whole number of sequences of 2048; give --micro-batch"):
        run_of(f"{dynamic}5000")
    assert run_of(f"{dynamic}5000", micro_batch=2).micro_batch == 2
    assert run_of(f"{dynamic}5000", micro_batch=2).global_batch == 1280


def test_weights_of_float32_are_the_default() -> None:
    explicit = VERL + f" {A}fsdp_config.model_dtype=fp32"
    assert run_of(explicit).precision == "bf16"
    assert run_of(VERL + f" {A}fsdp_config.model_dtype=bf16").precision == "bf16-pure"


def test_sft(tmp_path: Path) -> None:
    text = "trainer: {n_gpus_per_node: 8, nnodes: 1}\nmodel: {path: Qwen/Qwen3-8B}\ndata: {train_batch_size: 64,"
    text += " max_length: 1024, use_dynamic_bsz: true, max_token_len_per_gpu: 8192}\n"
    run = read(text, "verl", file="sft.yaml").job
    assert (run.micro_batch, run.global_batch, run.loss, run.recompute) == (8, 64, "fused", "full")
    assert read(text, "verl", file="sft.yaml", version="0.4").job.loss is None
    place = tmp_path / "sft.yaml"
    place.write_text(text)
    assert typed(f"convert {place} --from verl --to flags").code == 0
