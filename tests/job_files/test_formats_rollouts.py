"""OpenRLHF, NeMo-RL, slime and prime-rl: what their files say of a step with answers, both ways.

Values are worked out by hand from each tool's own code, which is named beside them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import document, typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.command_line.options.options import parse
from loadgauge.core.definitions.job.job import POSTTRAIN, Job
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.exchange import read, write

OPENRLHF = """python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.num_nodes 1 --actor.num_gpus_per_node 8 --ref.num_nodes 1 --ref.num_gpus_per_node 8 \\
   --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all --vllm.gpu_memory_utilization 0.6 \\
   --algo.advantage.estimator group_norm --algo.kl.init_coef 1e-3 --algo.kl.use_loss \\
   --actor.model_name_or_path meta-llama/Llama-3.1-8B --reward.remote_url reward_func.py \\
   --train.micro_batch_size 8 --train.batch_size 128 --rollout.micro_batch_size 16 --rollout.batch_size 128 \\
   --rollout.n_samples_per_prompt 8 --data.max_len 2048 --rollout.max_new_tokens 1536 --ds.zero_stage 3 \\
   --actor.gradient_checkpointing_enable --ds.packing_samples --vllm.enforce_eager --vllm.enable_sleep --ds.enable_sleep
"""
FLAT = """ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 --ref_num_nodes 1 --ref_num_gpus_per_node 8 \\
   --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models --vllm_gpu_memory_utilization 0.6 \\
   --advantage_estimator group_norm --init_kl_coef 1e-3 --use_kl_loss \\
   --pretrain meta-llama/Llama-3.1-8B --remote_rm_url reward_func.py \\
   --micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 128 \\
   --n_samples_per_prompt 8 --prompt_max_len 512 --generate_max_len 1536 --zero_stage 3 --bf16 \\
   --gradient_checkpointing --packing_samples --enforce_eager --vllm_enable_sleep --deepspeed_enable_sleep
"""
NEMO = """defaults: grpo_math_1B.yaml
grpo:
  num_prompts_per_step: 64
  num_generations_per_prompt: 32
policy:
  model_name: meta-llama/Llama-3.1-8B-Instruct
  train_micro_batch_size: 1
  logprob_batch_size: 4
  max_total_sequence_length: 4096
  dtensor_cfg:
    activation_checkpointing: true
  generation:
    vllm_cfg:
      tensor_parallel_size: 2
      gpu_memory_utilization: 0.7
cluster:
  gpus_per_node: 8
  num_nodes: 2
"""
SLIME = """MODEL=/root/Qwen3-4B
ray job submit -- python3 train.py \\
   --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate ${MODEL_ARGS[@]} \\
   --hf-checkpoint ${MODEL} --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 \\
   --rollout-max-response-len 8192 --use-dynamic-batch-size --max-tokens-per-gpu 9216 \\
   --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform \\
   --recompute-num-layers 1 --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.0 --accumulate-allreduce-grads-in-fp32 \\
   --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
"""
PRIME = """seq_len = 4096
[model]
name = "Qwen/Qwen3-4B"
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[orchestrator]
batch_size = 512
group_size = 16
max_off_policy_steps = 2
[orchestrator.train.sampling]
max_completion_tokens = 1024
[inference.vllm]
tensor_parallel_size = 2
"""
FILES = {
    "openrlhf": ("a.sh", OPENRLHF),
    "flat": ("b.sh", FLAT),
    "nemo-rl": ("c.yaml", NEMO),
    "slime": ("d.sh", SLIME),
    "prime-rl": ("e.toml", PRIME),
}


def run_of(name: str, text: str | None = None) -> Job:
    file, usual = FILES[name]
    found = read(text or usual, file=file)
    assert found.dialect == ("openrlhf" if name == "flat" else name)
    return found.job


def test_both_spellings_of_openrlhf_are_one_job() -> None:
    """`rollout.batch_size` counts prompts and `train.batch_size` sequences (trainer/ppo_trainer.py); vLLM sleeps at level 1
    (trainer/ray/vllm_engine.py), and DeepSpeed's 16-bit weights stay (`offload_deepspeed_states`)."""
    run = run_of("openrlhf")
    assert (run.task, run.prompts, run.samples, run.global_batch, run.micro_batch) == ("grpo", 128, 8, 128, 8)
    assert (run.prompt_len, run.answers, run.logprob_batch) == (512, "1536", 16)
    assert (run.gpus, run.zero, run.recompute, run.loss, run.reference) == (8, 3, "full", "float32", "model")
    assert (run.placement, run.rollout_offload) == ("colocated", "states")
    wanted = "vllm:tp=2,utilization=0.6,sleep=1,graphs=false,prefix=false,context=2048"
    assert Engine.parse(run.rollout or "") == Engine.parse(wanted)
    assert run_of("flat") == run


def test_machines_of_a_ray_cluster_are_not_the_trainer_s() -> None:
    """`#SBATCH` lines start Ray; how many GPUs a model has is said to the trainer."""
    script = "#!/bin/bash\n#SBATCH -N 2\n#SBATCH --ntasks-per-node=1\n" + OPENRLHF
    assert run_of("openrlhf", script) == run_of("openrlhf")


def test_engines_on_gpus_of_their_own() -> None:
    text = OPENRLHF.replace(
        "--train.colocate_all", "--train.colocate_actor_ref --train.async_enable --train.async_queue_size 2"
    )
    run = run_of("openrlhf", text)
    assert (run.gpus, run.placement, run.staleness) == (16, "split:8+8", 2)
    own = Engine.parse(run.rollout or "")
    assert (own.sleep, own.partial) == (0, False)  # a batch ends before weights move
    on = Engine.parse(
        run_of(
            "openrlhf", text.replace("--train.async_enable", "--train.async_enable --train.partial_rollout_enable")
        ).rollout
        or ""
    )
    assert on.partial is True
    fleet = NEMO.replace(
        "  generation:\n", "  generation:\n    colocated: {enabled: false, resources: {num_nodes: 1}}\n"
    )
    assert (run_of("nemo-rl", fleet).gpus, run_of("nemo-rl", fleet).placement) == (16, "split:8+8")
    late = fleet.replace("grpo:\n", "grpo:\n  async_grpo: {enabled: true, in_flight_weight_updates: true}\n", 1)
    nemo = run_of("nemo-rl", late)
    assert (nemo.staleness, Engine.parse(nemo.rollout or "").partial) == (1, True)
    prime = run_of("prime-rl")
    assert Engine.parse(prime.rollout or "").partial is True
    assert (prime.gpus, prime.placement, prime.staleness) == (8, "split:2+6", 2)


def test_kernels_of_attention_that_nemo_rl_gives_megatron() -> None:
    """`attention_backend` of nemo_rl/models/megatron/setup.py; it says nothing of a trainer of another engine."""
    section = "  megatron_cfg: {enabled: %s, attention_backend: unfused}\n  dtensor_cfg:\n    enabled: %s\n"
    found = [
        run_of("nemo-rl", NEMO.replace("  dtensor_cfg:\n", section % switches)).attention
        for switches in (("true", "false"), ("false", "true"))
    ]
    assert found == ["eager", None]


def test_a_recipe_over_nemo_rl_s_own(tmp_path: Path) -> None:
    """What the file does not say is of grpo_math_1B.yaml: 512 sequences an update, FSDP2, packed, KL against a reference."""
    run = run_of("nemo-rl")
    assert (run.prompts, run.samples, run.global_batch, run.micro_batch, run.gpus) == (64, 32, 512, 1, 16)
    assert (run.zero, run.tp, run.recompute, run.reference, run.frozen_offload) == (3, 1, "full", "model", True)
    assert run.logprob_tokens == 4 * 4096  # ${mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}}
    assert (run.rollout_offload, Engine.parse(run.rollout or "").sleep) == ("idle", 1)
    (tmp_path / "base.yaml").write_text(NEMO)
    child = tmp_path / "child.yaml"
    child.write_text(
        "defaults: base.yaml\npolicy:\n  model_name: Qwen/Qwen3-8B\ngrpo:\n  num_generations_per_prompt: 8\n"
    )
    found = read(child.read_text(), file=str(child)).job
    assert (found.model, found.samples, found.prompts) == ("Qwen/Qwen3-8B", 8, 64)
    whole = tmp_path / "whole.yaml"
    whole.write_text(child.read_text() + "cluster: {_override_: true, num_nodes: 1}\n")
    assert read(whole.read_text(), file=str(whole)).job.gpus == 1
    child.write_text("defaults: elsewhere.yaml\npolicy:\n  model_name: Qwen/Qwen3-8B\n")
    assert "elsewhere.yaml" in [item.key for item in read(child.read_text(), file=str(child)).uncounted]
    with pytest.raises(ConfigError, match=r"elsewhere\.yaml: is not there.*; grpo_math_1B"):
        read(child.read_text(), file=str(child), strict=True)
    (tmp_path / "loop.yaml").write_text("defaults: loop.yaml\npolicy:\n  model_name: x\n")
    with pytest.raises(ConfigError, match="are over each other"):
        read((tmp_path / "loop.yaml").read_text(), file=str(tmp_path / "loop.yaml"))


def test_slime_s_reference_and_weights_are_on_the_host() -> None:
    """`with_ref = kl_coef != 0 or use_kl_loss` (ray/placement_group.py); colocated sets offload (utils/arguments.py)."""
    run = run_of("slime")
    assert (run.model, run.task, run.reference, run.frozen_offload, run.rollout_offload) == (
        "Qwen3-4B",
        "grpo",
        "model",
        True,
        "all",
    )
    assert (run.prompts, run.samples, run.global_batch, run.tp, run.zero) == (32, 8, 256, 2, 1)
    # 9216 tokens are one sequence of 1024 + 8192.
    assert (run.micro_batch, run.logprob_tokens, run.precision) == (1, 9216, "bf16")
    assert Engine.parse(run.rollout or "") == Engine.parse("sglang:tp=2,mem_fraction_static=0.7,sleep=2,suspend=true")
    assert run_of("slime", SLIME.replace("--use-kl-loss", "")).reference == "none"
    assert run_of("slime", SLIME.replace("--colocate", "--colocate --use-rollout-logprobs")).old_logprobs == "none"


def test_prime_rl_trains_on_packed_rows_without_a_reference() -> None:
    run = run_of("prime-rl")
    assert (run.prompts, run.samples, run.global_batch, run.micro_batch) == (32, 16, 512, 1)
    assert (run.prompt_len, run.answers, run.reference, run.old_logprobs) == (3072, "1024", "none", "none")
    assert (run.zero, run.recompute, run.activation_offload, run.compile) == (3, "full", "checkpoints", True)
    # `ConcurrencyConfig` of 0.8 lets 1024 answers be on their way unless a file says how many.
    said = run_of("prime-rl", PRIME + "[orchestrator.concurrency]\nmax_inflight = 96\n")
    assert [Engine.parse(each.rollout or "").inflight for each in (run, said)] == [1024, 96]


def test_recipes_of_modelopt_and_nemo_gym_are_known_by_name() -> None:
    """examples/modelopt/qa_grpo_nano3_megatron.yaml over grpo_math_1B.yaml: 2 prompts of 8 answers, tensor 2, experts over 8."""
    text = "defaults: ../../modelopt/qa_grpo_nano3_megatron.yaml\n"
    text += "policy: {generation: {vllm_cfg: {gpu_memory_utilization: 0.4}}}\n"
    run = run_of("nemo-rl", text)
    assert (run.prompts, run.samples, run.global_batch, run.micro_batch) == (2, 8, 16, 1)
    assert (run.framework, run.tp, run.ep, run.gpus, run.sequence_parallel) == ("megatron", 2, 8, 16, True)
    assert (Engine.parse(run.rollout or "").tp, Engine.parse(run.rollout or "").utilization) == (4, 0.4)


def test_what_slime_is_given_by_path_is_named() -> None:
    """A filter draws prompts again (`dynamic_filter_used`), and a function of one's own may ask the engine several times."""
    given = "--custom-generate-function-path mine.generate --dynamic-sampling-filter-path mine.filter"
    found = read(SLIME.replace("--use-kl-loss", given), file="d.sh")
    named = {item.key for item in found.uncounted}
    assert {"--custom-generate-function-path", "--dynamic-sampling-filter-path"} <= named


@pytest.mark.parametrize(
    ("name", "old", "new", "key"),
    [
        (
            "prime-rl",
            "[inference.vllm]",
            "[[orchestrator.train.source]]\nname = 'a'\n[orchestrator.train.source.env.taskset]\nmax_turns = {}\n[inference.vllm]",
            "orchestrator.train.source",
        ),
        ("nemo-rl", "cluster:", "data_plane: {{enabled: {}}}\ncluster:", "data_plane.enabled"),
    ],
)
def test_turns_and_stores_are_named_where_there_are_some(name: str, old: str, new: str, key: str) -> None:
    """One turn is what is counted, and a store that is off holds nothing."""
    file, usual = FILES[name]
    some, none = ("3", "1") if name == "prime-rl" else ("true", "false")
    for value, there in ((some, True), (none, False)):
        found = read(usual.replace(old, new.format(value)), file=file)
        assert (key in {item.key for item in found.uncounted}) is there


@pytest.mark.parametrize("name", FILES)
def test_a_step_comes_back_from_a_new_file(name: str) -> None:
    run = run_of(name)
    dialect = "openrlhf" if name == "flat" else name
    written = write(run, dialect)
    again = read(written.text, file=FILES[name][0]).job
    assert {field: getattr(again, field) for field in POSTTRAIN} == {field: getattr(run, field) for field in POSTTRAIN}
    assert again == run
    assert written.left_out == ()


@pytest.mark.parametrize("name", FILES)
def test_a_changed_step_is_patched_into_the_file(name: str) -> None:
    file, text = FILES[name]
    run = run_of(name).replace(samples=4, prompts=256, global_batch=256)
    if name == "prime-rl":
        run = run.replace(global_batch=1024)  # one update a step
    patched = write(run, "openrlhf" if name == "flat" else name, text, file=file)
    assert read(patched.text, file=file).job == run
    same = write(run_of(name), "openrlhf" if name == "flat" else name, text, file=file)
    assert same.text == text


@pytest.mark.parametrize("name", FILES)
def test_the_command_answers(name: str, tmp_path: Path) -> None:
    place = tmp_path / FILES[name][0]
    place.write_text(FILES[name][1])
    found = document(f"estimate {place} --gpu h100-sxm5-80gb")
    phases = [one["phase"] for one in found["memory"]["phases"]]
    assert phases[0] == "generate"
    assert "update" in phases
    assert ("old log-probs" in phases) == (name != "prime-rl")


def test_pairs_and_teachers_of_openrlhf() -> None:
    line = (
        "deepspeed --num_gpus 8 --module openrlhf.cli.{} --pretrain meta-llama/Llama-3.1-8B --micro_train_batch_size 1 "
    )
    line += "--train_batch_size 64 --max_len 4096 --zero_stage 3 {}"
    for program, more, task in (
        ("train_dpo", "", "dpo"), ("train_dpo", "--ipo", "ipo"), ("train_rm", "", "rm"), ("train_kto", "", "kto"),
        ("train_kd", "--teacher_model meta-llama/Llama-3.1-70B", "gkd"), ("train_sft", "", None),
    ):  # fmt: skip
        run = read(line.format(program, more), file="a.sh").job
        assert (run.task, run.seq_len, run.gpus, run.global_batch) == (task, 4096, 8, 64)


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("openrlhf", "--vllm.num_engines 4", "--vllm.num_engines 3", "6 GPUs of the engines are not the 8 of the actor"),
        ("openrlhf", "--vllm.enable_sleep", "--vllm.max_seqs_x 3", "--vllm.max_seqs_x"),
        ("openrlhf", "--data.max_len 2048", "--data.max_len 1024", "1536 tokens of an answer"),
        ("openrlhf", "--ds.zero_stage 3", "--ds.zero_stage 3 --ds.zpg 8", "--ds.zpg"),
        ("flat", "train_ppo_ray", "train_prm", "train_prm is not read"),
        ("nemo-rl", "tensor_parallel_size: 2", "tensor_parallel_size: 3", "16 GPUs of the rollout are not whole replicas"),
        ("nemo-rl", "num_nodes: 2", "num_nodes: 2\n  fancy_sharding: 3", "cluster.fancy_sharding"),
        ("nemo-rl", "  generation:\n", "  generation:\n    backend: hf\n", "policy.generation.backend: 'hf'"),
        ("nemo-rl", "  generation:\n", "  generation:\n    max_new_tokens: 5000\n", "5000 tokens of an answer are more than"),
        ("nemo-rl", "  generation:\n", "  generation:\n    colocated: {enabled: false, resources: {num_nodes: 2}}\n", "leaves"),
        ("slime", "--colocate", "", "--rollout-num-gpus: says how many GPUs generate"),
        ("slime", "--n-samples-per-prompt 8", "--n-samples-per-prompt 8 --num-steps-per-rollout 3", "3 updates of 32 x 8"),
        ("slime", "--colocate", "--colocate --use-opd", "--use-opd: makes log-probabilities with a teacher"),
        ("prime-rl", "batch_size = 512", "batch_size = 500", "500 answers are no whole groups of 16"),
        ("prime-rl", "tensor_parallel_size = 2", "tensor_parallel_size = 4", "6 GPUs of the rollout are not whole replicas"),
        ("prime-rl", "seq_len = 4096", "seq_len = 4096\nmy_lora_thing = 3", "my_lora_thing"),
    ],
)  # fmt: skip
def test_what_is_not_counted_stops_in_one_line(name: str, old: str, new: str, words: str, tmp_path: Path) -> None:
    file, text = FILES[name]
    assert old in text
    place = tmp_path / file
    place.write_text(text.replace(old, new))
    found = typed(f"estimate {place} --gpu h100-sxm5-80gb --strict")
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1), found
    assert words in found.err


def test_positions_beyond_the_model_are_taken_and_said(tmp_path: Path) -> None:
    """Engines and trainers stretch positions by a setting of their own; the length is the file's, and the answer says so."""
    place = tmp_path / FILES["nemo-rl"][0]
    place.write_text(FILES["nemo-rl"][1].replace("length: 4096", "length: 1000000"))
    found = typed(f"estimate {place} --gpu h100-sxm5-80gb")
    assert found.code == 1
    assert "positions up to 1,000,000, as the file asks; llama-3.1-8b has 131,072" in " ".join(found.out.split())


def test_old_log_probs_of_trl_are_made_where_its_code_makes_them() -> None:
    """`gradient_accumulation_steps % (steps_per_generation * num_iterations) != 0`, or vLLM's are corrected (trl 1.16,
    trainer/grpo_trainer.py); RLOO always makes them."""
    text = "model_name_or_path: Qwen/Qwen3-4B\noutput_dir: x\nnum_generations: 4\nscale_rewards: group\n"
    text += "gradient_accumulation_steps: 4\nmax_completion_length: 256\n"
    for more, wanted in (
        ("", "none"), ("steps_per_generation: 2\n", "none"), ("num_iterations: 2\n", None), ("steps_per_generation: 8\n", None),
        ("use_vllm: true\n", None), ("use_vllm: true\nvllm_importance_sampling_correction: false\n", "none"),
    ):  # fmt: skip
        assert read(text + more, file="a.yaml").job.old_logprobs == wanted, more
    rloo = text.replace("scale_rewards: group", "normalize_advantages: true")
    assert read(rloo, file="a.yaml").job.old_logprobs is None


def test_a_step_without_old_log_probs_has_no_such_phase() -> None:
    line = "estimate qwen2.5-7b --task grpo --gpu h100-sxm5-80gb --gpus 8 --zero 3 --prompts 64 --samples 8"
    whole, less = document(line), document(f"{line} --old-logprobs none")
    gone = [one for one in whole["time"]["phases"] if one["name"] == "old log-probs"]
    assert len(gone) == 1
    assert not any(one["name"] == "old log-probs" for one in less["time"]["phases"])
    assert not any(one["phase"] == "old log-probs" for one in less["memory"]["phases"])
    # The rest is a share of the other phases.
    assert whole["time"]["step"] - less["time"]["step"] == pytest.approx(1.05 * gone[0]["seconds"])


def test_kto_runs_forward_over_other_answers_too() -> None:
    """Policy once, and reference twice, for each row (trl, trainer/kto_trainer.py, `_compute_kl_logps`)."""
    line = "estimate qwen2.5-7b --task {} --gpu h100-sxm5-80gb --gpus 8 --zero 3 --seq-len 2048 --micro-batch 1"
    kto = {one["name"]: one["seconds"] for one in document(line.format("kto"))["time"]["phases"]}
    assert kto["reference"] == pytest.approx(2 * kto["KL log-probs"])


SWIFT = "swift rlhf --rlhf_type {} --model Qwen/Qwen2.5-7B --max_length 1024 --per_device_train_batch_size 4 --nproc_per_node 8"
SWIFT += " --gradient_accumulation_steps 4 --deepspeed zero3 --max_completion_length 2048 {}"


def test_the_divergence_of_ms_swift_s_distillation_is_its_beta() -> None:
    """`jsd_loss` of rlhf_trainers/gkd_loss.py: one divergence at 0 and 1, a mixture between; `to_topk` keeps a few tokens."""
    for more, task, form in (
        ("", "opd", "jsd"), ("--beta 0", "opd", "forward-kl"), ("--lmbda 0 --beta 1", "gkd", "reverse-kl"),
        ("--lmbda 0", "gkd", None),
        ("--gkd_logits_topk 32", "opd", "top-k"),
    ):  # fmt: skip
        job = read(SWIFT.format("gkd", f"--teacher_model gpt2 {more}"), file="a.sh").job
        assert (job.task, job.loss_terms) == (task, form)
        again = read(write(job, "ms-swift").text, file="a.sh", given={"gpus": 8}).job
        assert (again.task, again.loss_terms) == (task, form)
    for more, key, effect in (
        ("--seq_kd true", "--seq_kd", "costs"),
        ("--lmbda 0 --gkd_logits_topk 8", "--gkd_logits_topk", "saves"),
    ):
        file = read(SWIFT.format("gkd", f"--teacher_model gpt2 {more}"), file="a.sh")
        assert {item.key: item.effect for item in file.uncounted}[key] == effect


def test_answers_of_ms_swift(tmp_path: Path) -> None:
    """A generation is `per_device_train_batch_size` x `steps_per_generation` sequences of a process; old log-probs are made where
    `old_policy` says (rlhf_trainers/grpo_trainer.py); a value model is a copy of the reward model."""
    place = tmp_path / "a.sh"
    vllm = "--use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.5 --vllm_tensor_parallel_size 2 --sleep_level 1"
    for kind, more, wanted in (
        ("grpo", vllm + " --num_generations 16 --offload_model true --offload_optimizer true",
         ("grpo", 8, 16, "none", "all", "vllm:tp=2,utilization=0.5,max_num_seqs=32,sleep=1", None)),
        ("grpo", "--num_iterations 2 --beta 0", ("grpo", 16, 8, None, None, "hf:batch=16", None)),
        ("ppo", "--reward_model Qwen/Qwen2.5-1.5B", ("ppo", 128, 1, None, None, "hf:batch=16", None)),
        ("gkd", "--teacher_model Qwen/Qwen2.5-14B --lmbda 1", ("opd", 128, 1, None, None, "hf:batch=4", "Qwen/Qwen2.5-14B")),
        ("gkd", "--teacher_model Qwen/Qwen2.5-14B --lmbda 0", ("gkd", None, None, None, None, None, "Qwen/Qwen2.5-14B")),
    ):  # fmt: skip
        text = SWIFT.format(kind, more)
        place.write_text(text)
        found = typed(f"convert {place} --to flags")
        assert found.code == 0, found.err
        run = parse(found.out.split()[2:])
        told = (run.task, run.prompts, run.samples, run.old_logprobs, run.rollout_offload, run.rollout, run.teacher)
        assert told == wanted
        assert document(f"estimate {place} --gpu h100-sxm5-80gb")["task"] == wanted[0]
        job = read(text, file="a.sh").job
        again = read(write(job.replace(prompts=run.prompts), "ms-swift").text, file="a.sh", given={"gpus": 8})
        assert {name: getattr(again.job, name) for name in POSTTRAIN if name != "prompts"} == {
            name: getattr(job, name) for name in POSTTRAIN if name != "prompts"
        }
