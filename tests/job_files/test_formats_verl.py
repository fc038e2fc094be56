"""verl: what its trainers multiply, which loss they take, and what shares the GPUs with the actor's update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_formats_coverage import VERL

from command_line import document, typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.exchange import read, write

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


def test_gradients_are_reduced_with_every_micro_batch_unless_said(tmp_path: Path) -> None:
    """No `no_sync` in workers/actor/dp_actor.py; 0.9 has `use_no_sync_for_gradient_accumulation: false` in its configuration."""
    once = f"{A}fsdp_config.use_no_sync_for_gradient_accumulation"
    assert (run_of(VERL).gradient_sync, run_of(f"{VERL} {once}=True").gradient_sync) == ("each", "last")
    place = tmp_path / "grpo.sh"
    place.write_text(VERL)
    told = f"estimate {place} --gpu h100-sxm5-80gb --task train"
    each, last = (document(f"{told} --gradient-sync {word}")["memory"]["parts"] for word in ("each", "last"))
    params = document(told)["model"]["params"]
    # Each of 8 ranks has its shards in float32, or all of them, in what they are reduced in (`reduce_dtype`, fp32).
    assert each["gradients"] == pytest.approx(4 * params / 8, rel=1e-3)
    assert last["gradients"] == pytest.approx(4 * params, rel=1e-3)
    place.write_text(VERL.replace("trainer.nnodes", f"{A}strategy=megatron trainer.nnodes"))
    assert typed(f"estimate {place} --task train --gradient-sync each --gpu h100-sxm5-80gb")[0] == 2


def test_the_step_of_a_grpo_script_has_all_its_answers(tmp_path: Path) -> None:
    place = tmp_path / "grpo.sh"
    place.write_text(VERL)
    found = document(f"estimate {place} --gpu h100-sxm5-80gb --task train")
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
    fused = document(f"estimate {place} --gpu h100-sxm5-80gb --task train")["memory"]
    whole = document(f"estimate {place} --gpu h100-sxm5-80gb --task train --loss float32")["memory"]
    # 8 x 2048 tokens of 151,936 words in float32 are 9.96 GB each: the upcast logits, their logarithms, the gradient.
    assert whole["total"] - fused["total"] > 2 * 8 * 2048 * 151_936 * 4
    assert fused["fits"]


def test_the_entropy_is_within_the_range(tmp_path: Path) -> None:
    place = tmp_path / "grpo.sh"
    place.write_text(VERL + f" {A}entropy_coeff=0.001")
    found = document(f"estimate {place} --gpu h100-sxm5-80gb --task train")
    whole = document(f"estimate {place} --gpu h100-sxm5-80gb --task train --loss float32")["memory"]
    assert found["memory"]["widest"]["high"] >= whole["total"]
    assert any("entropy" in line for line in found["not_counted"])


def test_what_shares_the_gpus_is_said(tmp_path: Path) -> None:
    place = tmp_path / "grpo.sh"
    place.write_text(VERL + f" {A}use_kl_loss=True")
    found = document(f"estimate {place} --gpu h100-sxm5-80gb --task train")
    lines = found["not_counted"]
    assert lines[0].startswith("generation, log-probs, reference: this is the actor's update alone")
    assert sum("generation, log-probs" in line for line in lines) == 1
    place.write_text(VERL.replace("=grpo", "=gae"))
    critic = document(f"estimate {place} --gpu h100-sxm5-80gb --task train")
    # Of the size of the actor: 16 bytes a parameter over 8 GPUs.
    more = critic["memory"]["widest"]["high"] - critic["memory"]["total"]
    assert more > 16 * critic["model"]["params"] / 8


def test_offload_between_the_updates_is_no_offload_in_them() -> None:
    offloaded = VERL + f" {A}fsdp_config.param_offload=True {A}fsdp_config.optimizer_offload=True"
    assert run_of(offloaded).offload == "none"
    assert run_of(offloaded).rollout_offload == "idle"
    assert run_of(VERL + f" {A}strategy=fsdp2 {A}fsdp_config.offload_policy=True").offload == "all"


def step(place: Path, text: str, flags: str = "") -> dict[str, Any]:
    place.write_text(text, encoding="utf-8")
    found: dict[str, Any] = document(f"estimate {place} --gpu h100-sxm5-80gb {flags}")
    return found


def phases(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["phase"]: one for one in found["memory"]["phases"]}


def test_the_whole_step_of_a_grpo_script_is_that_of_its_flags(tmp_path: Path) -> None:
    """Every value by hand from verl 0.9's words; else verl's defaults (tp=2, vLLM asleep)."""
    text = VERL + (
        f" {A}use_kl_loss=True {A}fsdp_config.param_offload=True {A}fsdp_config.optimizer_offload=True"
        " actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16"
        " actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32"
    )
    found = step(tmp_path / "grpo.sh", text)
    flags = (
        "qwen3-8b --task grpo --prompts 1024 --samples 5 --prompt-len 1024 --answers 1024 --gpus 8 --zero 3 --recompute full"
        " --micro-batch 8 --global-batch 1280 --loss fused --rollout vllm:tp=2,utilization=0.6,sleep=2 --logprob-batch 32"
        " --reference model --frozen-offload --frozen-weights float32 --rollout-offload idle --framework huggingface"
        " --gradient-sync each --precision bf16-fsdp-16-32"
    )
    same = document(f"estimate {flags} --gpu h100-sxm5-80gb")
    assert phases(found) == phases(same)
    assert found["time"]["step"] == pytest.approx(same["time"]["step"])
    kept = step(tmp_path / "kept.sh", text.replace("offload=True", "offload=False"))
    states = 12 * 8_190_735_360 / 8
    assert phases(kept)["generate"]["total"] - phases(found)["generate"]["total"] == pytest.approx(states, rel=0.01)


def test_an_engine_that_does_not_sleep_stays_through_the_update(tmp_path: Path) -> None:
    awake = VERL + " actor_rollout_ref.rollout.free_cache_engine=False"
    more = (
        phases(step(tmp_path / "a.sh", awake))["update"]["total"]
        - phases(step(tmp_path / "b.sh", VERL))["update"]["total"]
    )
    assert more > 0.5 * 80e9  # gpu_memory_utilization=0.6 of the card
    refused = typed(f"estimate {tmp_path / 'a.sh'} --gpu h100-sxm5-80gb --task train")
    assert refused.code == 2
    assert "through the update" in refused.err


def test_the_engine_s_words() -> None:
    rollout = "actor_rollout_ref.rollout."
    said = run_of(
        VERL.replace("rollout.name=vllm", "rollout.name=sglang")
        + f" {rollout}tensor_model_parallel_size=4 {rollout}max_num_seqs=64 {rollout}enforce_eager=True {rollout}quantization=fp8"
    )
    assert Engine.parse(said.rollout or "") == Engine.parse(
        "sglang:tp=4,mem_fraction_static=0.6,max_num_seqs=64,graphs=false,sleep=2,weights=fp8"
    )
    assert "sleep=1" in (
        run_of(VERL + " actor_rollout_ref.model.lora_rank=32").rollout or ""
    )  # adapters alone are synced


def test_dynamic_batches_count_tokens_of_scores_and_of_the_critic() -> None:
    said = run_of(VERL.replace("=grpo", "=gae") + f" {A}use_dynamic_bsz=True {A}ppo_max_token_len_per_gpu=8192")
    assert (said.task, said.logprob_tokens, said.logprob_batch, said.critic_batch) == (
        "ppo",
        8192,
        None,
        32_768 // 2048,
    )
    assert run_of(VERL.replace("=grpo", "=gae") + " critic.ppo_micro_batch_size_per_gpu=32").critic_batch == 32


def test_a_critic_s_own_micro_batch_is_counted(tmp_path: Path) -> None:
    text = VERL.replace("=grpo", "=gae")
    small, large = (
        phases(step(tmp_path / f"{n}.sh", f"{text} critic.ppo_micro_batch_size_per_gpu={n}")) for n in (2, 32)
    )
    # At the least the layers' inputs, which are kept: 36 layers of 4096 numbers of 2 bytes for each of 30 x 2048 tokens more.
    assert large["critic update"]["total"] - small["critic update"]["total"] > 30 * 2048 * 36 * 4096 * 2
    assert large["update"]["total"] == small["update"]["total"]


def test_a_step_is_written_as_verl_reads_it(tmp_path: Path) -> None:
    patched = write(run_of(VERL).replace(prompts=512, samples=8, global_batch=1024, rollout="vllm:tp=4,utilization=0.7,sleep=2"),
                    "verl", VERL, file="grpo.sh").text  # fmt: skip
    again = run_of(patched)
    assert (again.prompts, again.samples, again.global_batch) == (512, 8, 1024)
    assert again.rollout == "vllm:tp=4,utilization=0.7,sleep=2"
    assert f"{A}ppo_mini_batch_size=128" in patched


def test_micro_batches_of_as_many_tokens_as_fit() -> None:
    """Up to `ppo_max_token_len_per_gpu` tokens, on Ulysses' ranks together (workers/engine/utils.py)."""
    dynamic = VERL + f" {A}use_dynamic_bsz=True {A}ppo_max_token_len_per_gpu="
    assert run_of(f"{dynamic}8192").micro_batch == 4
    assert run_of(VERL + f" {A}use_dynamic_bsz=True").micro_batch == 16_384 // 2048
    ulysses = f" {A}ulysses_sequence_parallel_size=2"
    assert run_of(f"{dynamic}4096{ulysses}").micro_batch == 4
    with pytest.raises(ConfigError, match="fewer than a sequence has"):
        run_of(f"{dynamic}1024")
    # 160 sequences of a rank are shared out over micro-batches of 2, which hold 4096 of the 5000 tokens.
    odd = read(f"{dynamic}5000", file="grpo.sh")
    assert (odd.job.micro_batch, odd.job.global_batch) == (2, 1280)
    (item,) = [item for item in odd.uncounted if item.key.endswith("ppo_max_token_len_per_gpu")]
    assert (item.effect, item.parts) == ("costs", ("activations", "loss", "transient"))
    assert item.share == pytest.approx(5000 / 4096 - 1)
    assert run_of(f"{dynamic}5000", micro_batch=4).micro_batch == 4


def test_weights_of_float32_are_the_default() -> None:
    explicit = VERL + f" {A}fsdp_config.model_dtype=fp32"
    assert run_of(explicit).precision == run_of(VERL).precision == "bf16-fsdp-16-32"  # gradients are reduced in float32
    assert run_of(VERL + f" {A}fsdp_config.model_dtype=bf16").precision == "bf16-pure-32"
    narrow = VERL + f" {A}fsdp_config.model_dtype=bf16 +{A}fsdp_config.mixed_precision.reduce_dtype=bf16"
    assert run_of(narrow).precision == "bf16-pure"


def test_adapters_are_on_weights_as_wide_as_those_that_are_trained() -> None:
    adapters = VERL + " actor_rollout_ref.model.lora_rank=32"
    assert (run_of(adapters).precision, run_of(adapters).weights) == ("bf16", "float32")
    narrow = run_of(f"{adapters} {A}fsdp_config.model_dtype=bf16")
    assert (narrow.precision, narrow.weights) == ("bf16-pure", None)


def test_a_reward_model_without_a_name_is_not_passed_over() -> None:
    with pytest.raises(ConfigError, match="does not say which model scores"):
        run_of(VERL + " reward_model.enable=True")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("critic.ppo_micro_batch_size=8 algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size: '8' is the micro-batch of all"),
        ("data.micro_batch_size=4", "data.micro_batch_size: '4' is the micro-batch of all GPUs"),
    ],
)  # fmt: skip
def test_older_keys_that_are_not_read_stop_in_one_line(more: str, words: str, tmp_path: Path) -> None:
    place = tmp_path / "grpo.sh"
    place.write_text(f"{VERL} {more}")
    found = typed(f"estimate {place} --gpu h100-sxm5-80gb")
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert words in found.err


def test_sft(tmp_path: Path) -> None:
    text = "trainer: {n_gpus_per_node: 8, nnodes: 1}\nmodel: {path: Qwen/Qwen3-8B}\ndata: {train_batch_size: 64,"
    text += " max_length: 1024, use_dynamic_bsz: true, max_token_len_per_gpu: 8192}\n"
    run = read(text, "verl", file="sft.yaml").job
    assert (run.micro_batch, run.global_batch, run.loss, run.recompute) == (8, 64, "fused", "full")
    assert read(text, "verl", file="sft.yaml", version="0.4").job.loss is None
    place = tmp_path / "sft.yaml"
    place.write_text(text)
    assert typed(f"convert {place} --from verl --to flags").code == 0


SECTIONS = {
    "veomni": ("veomni.ulysses_parallel_size=2", "veomni.expert_parallel_size=4"),
    "torchtitan": ("torchtitan.context_parallel_size=2", "torchtitan.tensor_parallel_size=4"),
    "megatron": ("megatron.context_parallel_size=2", "megatron.tensor_model_parallel_size=4"),
}


@pytest.mark.parametrize("engine", SECTIONS)
def test_each_engine_has_a_section_of_its_own(engine: str) -> None:
    """`model_engine` chooses `actor`, `ref` and `critic` (trainer/config/ppo_trainer.yaml)."""
    first, second = SECTIONS[engine]
    run = run_of(f"{VERL} model_engine={engine} {A}{first} {A}{second}")
    assert run.cp == 2
    assert (run.ep if engine == "veomni" else run.tp) == 4
    assert run.framework == ("megatron" if engine == "megatron" else "torchtitan")


T = f"+{A}megatron.override_transformer_config."
LITE = f"actor@actor_rollout_ref.actor=mlite_actor {A}engine.tp=2 +{A}engine.impl_cfg."


@pytest.mark.parametrize(
    ("more", "key", "effect"),
    [
        (f"{LITE}optimizer=fsdp2", "engine.impl_cfg.optimizer", "either"),
        (f"{LITE}offload=[moe]", "engine.impl_cfg.offload", "saves"),
        (f"model_engine=megatron {T}use_ascend_gdn=True", "use_ascend_gdn", "either"),
        (f"model_engine=megatron {T}swiglu=False", "swiglu", "either"),
        (f"model_engine=veomni {A}veomni.moe_implementation=eager", "moe_implementation", "either"),
        (f"model_engine=automodel {A}automodel.moe_config.lm_head_precision=float32", "lm_head_precision", "costs"),
    ],
)
def test_keys_of_other_engines_that_change_the_answer_are_named(more: str, key: str, effect: str) -> None:
    found = read(f"{VERL} {more}", file="grpo.sh").uncounted
    assert [item.effect for item in found if item.key.endswith(key)] == [effect]


def test_megatron_lite_shards_weights_by_fsdp2_where_it_says_so() -> None:
    """`impl_cfg.optimizer` of megatron/lite/model/qwen3_moe/lite/protocol.py, whose default is the distributed optimizer."""
    assert [run_of(f"{VERL} {LITE}optimizer={word}").zero for word in ("fsdp2", "dist_opt")] == [3, 1]


def test_what_is_said_a_second_time_of_megatron_is_the_same() -> None:
    """Overrides reach the model after its own section (`provider_overrides` of workers/engine/megatron)."""
    run = f"{VERL} model_engine=megatron {A}megatron.tensor_model_parallel_size=2 {T}"
    assert run_of(f"{run}tensor_model_parallel_size=2").sequence_parallel is True
    assert run_of(f"{run}sequence_parallel=False").sequence_parallel is False
    with pytest.raises(ConfigError, match="contradicts"):
        run_of(f"{run}tensor_model_parallel_size=4")


def test_experts_of_automodel_stay_gathered_unless_it_says_otherwise() -> None:
    """`MoEParallelizerConfig.reshard_after_forward`; `enable_fsdp_optimizations` leaves them so after the backward too."""
    section = f"{VERL} model_engine=automodel {A}automodel.ep_size=4"
    again = f"{section} {A}automodel.moe_config.reshard_after_forward=True"
    assert [run_of(text).zero for text in (section, again)] == [2, 3]
    assert run_of(f"{again} {A}automodel.backend_config.enable_fsdp_optimizations=True").zero == 2


def test_ulysses_ranks_by_either_name() -> None:
    """`FSDPActorConfig`: the older one where it is more than 1."""
    older, newer = f"{A}ulysses_sequence_parallel_size", f"{A}fsdp_config.ulysses_sequence_parallel_size"
    assert run_of(f"{VERL} {newer}=4").cp == 4
    assert run_of(f"{VERL} {older}=2 {newer}=4").cp == 2
    assert run_of(f"{VERL} {older}=1 {newer}=4").cp == 4


def test_a_rollout_on_gpus_of_its_own() -> None:
    """experimental/fully_async_policy/config: mini-batches as prompts; v1: `rollout.nnodes` of trainer_separate_async.py."""
    late = VERL.replace("trainer.main_ppo", "experimental.fully_async_policy.fully_async_main")
    run = run_of(f"{late} rollout.nnodes=1 rollout.n_gpus_per_node=4 data.train_batch_size=0")
    assert (run.gpus, run.placement, run.staleness, run.prompts) == (12, "split:8+4", 4, 256)
    # 1.1 x 4 steps' answers between two hand-overs, 16 prompts for each of two servers, which go on at a hand-over.
    own = Engine.parse(run.rollout or "")
    assert (own.partial, own.every, own.inflight) == (True, 4, 16 * 2 * run.samples)
    turns = run_of(f"{late} rollout.nnodes=1 async_training.staleness_threshold=0.5 async_training.partial_rollout=False"
                   " async_training.trigger_parameter_sync_step=1")  # fmt: skip
    assert (turns.staleness, Engine.parse(turns.rollout or "").partial) == (1, False)
    v1 = f"{VERL} actor_rollout_ref.rollout.nnodes=2 trainer.v1.trainer_mode=separate_async"
    assert (run_of(v1).gpus, run_of(v1).placement) == (24, "split:8+16")


def test_a_teacher_on_gpus_of_its_own_is_named() -> None:
    found = read(
        f"{VERL} distillation.enabled=True distillation.distillation_loss.loss_mode=forward_kl_topk", file="opd.sh"
    )
    assert found.job.task == "grpo"
    assert {item.key for item in found.uncounted} >= {
        "distillation.enabled",
        "distillation.distillation_loss.loss_mode",
    }


def test_megatron_s_optimizer_on_the_host() -> None:
    part = f"+{A}optim.override_optimizer_config.optimizer_offload_fraction"
    host = f"{VERL} model_engine=megatron +{A}optim.override_optimizer_config.optimizer_cpu_offload=True {part}="
    assert run_of(f"{host}1").offload == "optimizer"
    half = read(f"{host}0.5", file="grpo.sh")
    assert half.job.offload == "optimizer:0.5"
    assert not [item for item in half.uncounted if item.key.endswith("optimizer_offload_fraction")]


def test_the_sft_trainer_s_sections_are_those_of_the_actor() -> None:
    """trainer/config/sft_trainer_engine.yaml; model.path and engine of a command line."""
    text = (
        "torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=$HOME/models/Qwen3-8B engine=megatron"
        " engine.tensor_model_parallel_size=2 engine.virtual_pipeline_model_parallel_size=null data.train_batch_size=64"
    )
    run = read(text, file="sft.sh").job
    assert (run.model, run.framework, run.tp, run.gpus, run.seq_len) == ("Qwen3-8B", "megatron", 2, 8, 1024)
    assert (run.micro_batch, run.global_batch) == (8192 // 1024, 64)
    sharded = text.replace("megatron", "fsdp").replace("tensor_model", "ulysses_sequence")
    asked = read(sharded, file="sft.sh").job
    assert (asked.framework, asked.cp) == ("huggingface", 2)


def test_adapters_of_the_bridge_are_those_of_the_reference_and_the_engine() -> None:
    """`ref_in_actor` and `lora_as_adapter`: Megatron-Bridge's adapters stand for a second model, and the engine keeps its weights
    on the host meanwhile, unless they are merged into them."""
    text = VERL.replace("fsdp_config", "megatron") + f" model_engine=megatron {A}use_kl_loss=True"
    text += " actor_rollout_ref.model.lora.rank=16"
    run, merged = run_of(text), run_of(f"{text} actor_rollout_ref.model.lora.merge=True")
    assert (run.lora_rank, run.reference, merged.reference) == (16, "adapter-off", "adapter-off")
    assert [Engine.parse(each.rollout or "").sleep for each in (run, merged)] == [1, 2]
