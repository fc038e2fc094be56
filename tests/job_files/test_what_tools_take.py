"""Facts that a tool takes from elsewhere than a key: the comment that starts a file, the card, a variable, its own code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_formats_coverage import VERL
from test_formats_rollouts import SLIME

import loadgauge
from command_line import document, typed
from loadgauge.core.definitions.job.job import Job
from loadgauge.job_files.exchange import JobFile, read
from loadgauge.job_files.job_file import from_job_file

AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
model:
  pretrained_model_name_or_path: Qwen/Qwen3-8B
step_scheduler:
  local_batch_size: 1
  global_batch_size: 64
"""


@pytest.mark.parametrize(
    ("head", "gpus"),
    [
        ("#   automodel examples/a.yaml --nproc-per-node 8\n", 8),
        ("# sharded : automodel a.yaml --nproc-per-node 4\n", 4),
        ("# Run: CUDA_VISIBLE_DEVICES=0,1 accelerate launch -m axolotl.cli.train a.yaml\n", 2),
        ("# Run: CUDA_VISIBLE_DEVICES=0,1 python -m axolotl.cli.train a.yaml\n", 1),  # no launcher: one process
        ("# Recipe validated using 256 H100 GPUs (32 nodes x 8)\n#   automodel a.yaml --nproc-per-node 8\n", 256),
        ("# Target launch shape: 2 nodes x 8 GPUs = 16 ranks\n", 16),
        ("# 4 nodes (8xH100 or 8xH200)\n#   automodel a.yaml --nproc-per-node 8\n", 32),
        ("ci:\n  nodes: 32\n", 256),  # the tool's own tests, on whole nodes (`tests/ci_tests`)
        ("slurm:\n  nodes: 2\n  ntasks_per_node: 4\n", 8),
        ("# Use another file (32 GPUs) if this one does not fit.\n", None),
        ("seed: 1 # set up for 8 GPUs\n", 8),
        ("seed: 1 # set up for 8 GPUs\nsteps: 4 # batch size 128 with 4 nodes\n", 32),
        ("# seed: 1 # designed for 8 GPUs\nseed: 1 # designed for 16 GPUs\n", 16),
    ],
)
def test_gpus_of_a_files_comments(head: str, gpus: int | None) -> None:
    assert read(head + AUTOMODEL, "automodel", file="job.yaml").job.gpus == gpus


PIPELINE = "distributed:\n  pp_size: 4\n  pipeline:\n    pp_schedule: 1f1b\n    pp_microbatch_size: 1\n"
TITAN = (
    "torchrun -m torchtitan.train --module llama3 --config llama3_8b --parallelism.pipeline_parallel_degree 4"
    " --training.local_batch_size {} --training.global_batch_size 64\n"
)


@pytest.mark.parametrize(
    ("local", "gpus", "pieces"), [(16, 16, False), (8, 16, True), (64, None, False), (16, None, True)]
)
def test_a_step_that_is_several_runs_of_the_pipeline(local: int, gpus: int | None, pieces: bool) -> None:
    # 64 sequences over 4 copies of 4 stages: one run of 16 sequences a rank, or two of 8.
    given = {} if gpus is None else {"gpus": gpus}
    own = AUTOMODEL.replace("local_batch_size: 1\n", f"local_batch_size: {local}\n") + PIPELINE
    for text, file in ((own, "job.yaml"), (TITAN.format(local), "run.sh")):
        notes = [item for item in read(text, file=file, given=given).uncounted if "local_batch_size" in item.key]
        assert [item.effect for item in notes] == ["saves"] * pieces


@pytest.mark.parametrize(
    ("start", "gpus"),
    [("mpirun -n 32 -npernode 8 python", 32), ("srun --ntasks=16 --nodes 2 python", 16), ("srun --nodes 2 python", None)],
)  # fmt: skip
def test_processes_of_mpirun_and_srun(start: str, gpus: int | None) -> None:
    text = f"{start} main.py --model_name_or_path facebook/opt-1.3b --max_seq_len 512 --zero_stage 2\n"
    assert read(text, file="run.sh").job.gpus == gpus


LIT = """checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B
precision: bf16-true
train:
  global_batch_size: 8
  micro_batch_size: 1
  max_seq_length: 512
"""


@pytest.mark.parametrize(
    ("text", "tied", "parameters"),
    [
        # 2048 columns of 128,256 rows more than the 1,235,814,400 parameters of the checkpoint.
        (LIT, False, 1_235_814_400 + 2048 * 128_256),
        (LIT.replace("checkpoint_dir: checkpoints/meta-llama/", "model_name: ") + "  tie_embeddings: true\n", True, 1_235_814_400),
    ],
)  # fmt: skip
def test_litgpt_ties_no_embedding_to_a_head(text: str, tied: bool, parameters: int, tmp_path: Path) -> None:
    """`GPT.lm_head` has its own weight; `pretrain.py` alone ties it, where `tie_embeddings` says so."""
    place = tmp_path / "full.yaml"
    place.write_text(text)
    model = from_job_file(Job(model=str(place), gpus=1)).model
    assert (model.tie_word_embeddings, loadgauge.parameters(model).total) == (tied, parameters)


PREFERENCES = """model_name_or_path: Qwen/Qwen3-8B
beta: 0.1
max_length: 1024
bf16: true
per_device_train_batch_size: 1
"""


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ("torch_dtype: null\n", "float32"),  # of TRL up to 0.26, with transformers 4
        ("torch_dtype: bfloat16\n", "bfloat16"),
        ("max_prompt_length: 512\n", "float32"),  # whose `ModelConfig.dtype` is empty
        ("dtype: null\n", "auto"),  # transformers 5
        ("", "float32"),  # TRL 1.16
    ],
)
def test_an_empty_dtype_is_the_librarys_own(more: str, weights: str) -> None:
    assert read(PREFERENCES + more, "trl", file="dpo/config.yaml").job.weights == weights


PIPED = VERL.replace("main_ppo", "main_ppo --config-name=ppo_megatron_trainer.yaml")
M = "actor_rollout_ref.actor.megatron."


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("pipeline_model_parallel_layout='Et*9|t*9|t*9|t*9L'", (1, "9,9,9,9", None)),
        ("pipeline_model_parallel_layout='E|(tt|)*6,ttL'", (2, "2,4,4,4", None)),  # eight stages, two on each rank
        ("num_layers_in_first_pipeline_stage=8", (1, None, "ends,8,")),
    ],
)  # fmt: skip
def test_layers_of_a_pipeline(more: str, wanted: tuple[int, str | None, str | None]) -> None:
    text = f"{PIPED} {M}pipeline_model_parallel_size=4 +{M}override_transformer_config.{more}"
    file = read(text, file="grpo.sh")
    assert (file.job.vpp, file.job.stage_layers, file.extra.layers_per_stage) == wanted
    assert not any("pipeline" in item.key for item in file.uncounted)


def test_stages_go_round_the_ranks() -> None:
    layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout").PipelineParallelLayerLayout
    for text, stages in (("E|(tt|)*14,ttL", 4), ("Et*3|(tt|)*29,m|L", 16), ("Et|t*2|(t|tt|)*3tL", 3)):
        theirs = layout(text, stages)
        line = f"torchrun pretrain_gpt.py --pipeline-model-parallel-size {stages} --pipeline-model-parallel-layout {text!r}"
        job = read(
            f"{line} --num-layers 60 --hidden-size 1024 --num-attention-heads 16 --seq-length 512", file="a.sh"
        ).job
        decoders = [sum(kind.name == "decoder" for stage in rank for kind in stage) for rank in theirs.layout]
        assert job.stage_layers == ",".join(map(str, decoders))


@pytest.mark.parametrize(
    ("base", "section"), [("grpo_math_1B", "megatron_cfg"), ("grpo_math_8B_megatron", "dtensor_cfg")]
)
def test_a_section_that_is_off_is_no_doubt(base: str, section: str) -> None:
    """One worker reads its own section, where `enabled` says so (`models/policy/lm_policy.py`)."""
    other = {"megatron_cfg": "dtensor_cfg", "dtensor_cfg": "megatron_cfg"}[section]
    said = {"megatron_cfg": "bias_activation_fusion: false", "dtensor_cfg": "custom_parallel_plan: plan.py"}
    text = "defaults: %s.yaml\npolicy:\n  model_name: Qwen/Qwen3-8B\n  %s:\n    %s\n"
    for chosen in (section, other):
        file = read(text % (base, chosen, said[chosen]), "nemo-rl", file="a.yaml")
        assert any(chosen in item.key for item in file.uncounted) == (chosen == other)


def test_a_variable_that_ray_hands_on() -> None:
    name = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"
    handed = f"--runtime-env-json='{json.dumps({'env_vars': {name: '1'}})}' -- python3"
    assert name in {item.key for item in read(SLIME.replace("-- python3", handed), file="run.sh").uncounted}
    assert name in {item.key for item in read(f"export {name}=1\n{SLIME}", file="run.sh").uncounted}
    assert name not in {item.key for item in read(SLIME, file="run.sh").uncounted}


PRIME = (
    'max_steps = 5\n[model]\nname = "Qwen/Qwen3-0.6B"\n%s[data]\nbatch_size = 4\nseq_len = 1024\n[optim]\nlr = 1e-5\n'
)


@pytest.mark.parametrize(
    ("more", "version", "card", "attention", "optimizer"),
    [
        # `resolve_auto_attn`, and `_create_optimizer`: AdamW is fused where its states stay on the card.
        ("", None, "h100-sxm5-80gb", "fa3", "adamw-loop"),
        ("", None, "b200-sxm-180gb", "fa4", "adamw-loop"),
        ("", None, "b300-sxm-288gb", "fa2", "adamw-loop"),
        ("", None, None, None, "adamw-loop"),
        ("", "0.7", "h100-sxm5-80gb", "fa2", "adamw-foreach"),
        ("optim_cpu_offload = false\n", None, "a100-sxm4-80gb", "fa2", "adamw-fused"),
    ],
)
def test_what_prime_rl_takes_by_itself(
    more: str, version: str | None, card: str | None, attention: str | None, optimizer: str
) -> None:
    job = read(PRIME % more, "prime-rl", file="sft.toml", version=version, given={"gpu": card} if card else None).job
    assert (job.attention, job.optimizer) == (attention, optimizer)


@pytest.mark.parametrize(("more", "columns"), [("", 2), ("--num_labels 5", 5)])
def test_labels_of_a_classifier_of_pictures(more: str, columns: int) -> None:
    """`CLSArguments.num_labels` is 2, and nothing reads `max_seq_length`, whose default is 32,768."""
    text = f"deepspeed src/train/train_cls.py --model_id Qwen/Qwen2.5-VL-3B-Instruct --bf16 True {more}\n"
    file = read(text, file="cls.sh", given={"gpus": 8})
    assert (file.extra.head, file.job.seq_len) == (columns, None)


def test_a_recipe_of_open_instruct_leaves_its_launcher_unsaid() -> None:
    """`docs/tulu3.md`, `docs/olmo2.md`: `accelerate launch --mixed_precision bf16 --use_deepspeed` with ZeRO 3's file."""
    text = "model_name_or_path: Qwen/Qwen3-8B\nmax_seq_length: 2048\nuse_slow_tokenizer: false\nwith_tracking: true\n"
    file = read(text, "open-instruct", file="sft.yaml", given={"gpus": 8})
    assert (file.job.framework, file.job.zero, file.job.precision) == ("deepspeed", 3, "bf16")
    assert any("DeepSpeed" in line for line in file.remarks)
    line = read("torchrun open_instruct/finetune.py --model_name_or_path Qwen/Qwen3-8B\n", "open-instruct", file="a.sh")
    assert (line.job.framework, line.job.zero) == ("huggingface", None)


def test_experts_of_nanotron_lie_beside_the_data() -> None:
    """`ParallelContext._init_parallel_groups`: `ep` is an axis of its own, and data are read by `dp_pg`."""
    text = "tokens:\n  sequence_length: 128\n  micro_batch_size: 2\nparallelism:\n  dp: 2\n  tp: 1\n  expert_parallel_size: %d\n"
    text += "model:\n  model_config:\n    is_llamoe_config: true\n    moe_num_experts: 8\n"
    assert not any("same sequences" in line for line in read(text % 1, "nanotron", file="a.yaml").remarks)
    assert any("one in 4" in line for line in read(text % 4, "nanotron", file="a.yaml").remarks)


@pytest.mark.parametrize(
    ("name", "value"), [("gather_16bit_weights_on_model_save", True), ("prefetch_bucket_size", 1000)]
)
def test_fields_of_zero_have_two_names(name: str, value: object) -> None:
    """`DeepSpeedZeroConfig`: each is taken by its field's name and by its alias."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, name: value}}
    other = json.dumps(config).replace(f'"{name}"', f'"stage3_{name}"')
    one, two = (read(text, "deepspeed", file="ds.json").job for text in (json.dumps(config), other))
    assert (one, one.save or one.engine) == (two, two.save or two.engine)
    assert one.save == "full" or one.engine == "stage3_prefetch_bucket_size=1000"


def test_gpus_of_neox_are_its_launchers() -> None:
    """`deepspeed_args.py`: `num_gpus` of each of `num_nodes`."""
    text = (
        "num_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 128\ntrain_micro_batch_size_per_gpu: 4\n"
    )
    job = read(f"{text}num_gpus: 4\nnum_nodes: 2\n", "gpt-neox", file="a.yml").job
    assert (job.gpus, job.gpus_per_node) == (8, 4)


def test_a_file_is_of_the_tool_that_has_all_its_keys() -> None:
    """`with_tracking` and `num_epochs` are open-instruct's, and the others TRL's too."""
    text = "model_name_or_path: a/b\ngradient_checkpointing: true\nmax_seq_length: 4096\nlearning_rate: 5.0e-7\nbeta: 0.1\n"
    text += "lr_scheduler_type: linear\nwarmup_ratio: 0.1\nnum_epochs: 3\nwith_tracking: true\nadd_bos: true\n"
    assert read(text, file="dpo.yaml").dialect == "open-instruct"


@pytest.mark.parametrize(
    ("backend", "more", "version", "precision", "weights"),
    [
        ("fsdp:d4", "", None, "bf16", "float32"),
        ("fsdp:d4", "  optimizer_dtype: bf16\n", None, "bf16-pure", None),
        ("fsdp:d4", "", "1.0", "bf16-pure", None),
        ("megatron:d4", "", None, "bf16", None),
    ],
)
def test_weights_of_areal(backend: str, more: str, version: str | None, precision: str, weights: str | None) -> None:
    """`TrainEngineConfig.optimizer_dtype` of the package 1.0.4, which FSDP loads in; products are in `dtype`."""
    text = f"cluster:\n  n_gpus_per_node: 4\nactor:\n  path: Qwen/Qwen3-0.6B\n  backend: {backend}\n{more}"
    job = read(text, "areal", file="sft.yaml", version=version).job
    assert (job.precision, job.weights) == (precision, weights)


@pytest.mark.parametrize(
    ("name", "said", "wanted"),
    [
        # `models/*/config_registry.py` of torchtitan 0.3.
        ("llama3_8b", "", ("llama-3.1-8b", 1, 8192, 1, 1, "per-op", "adamw")),
        ("qwen3_14b", "", ("qwen3-14b", 4, 4096, 1, 1, "full", "adamw")),
        ("qwen35_35b_a3b", "", ("qwen3.5-35b-a3b", 4, 4096, 2, 8, "full", "adamw")),
        ("moonlight_16b_a3b", "", ("moonlight-16b-a3b", 4, 4096, 1, 8, "full", "muon")),
        ("qwen3_14b", "--training.local-batch-size 1 activation-checkpoint:none", ("qwen3-14b", 1, 4096, 1, 1, "none", "adamw")),
    ],
)  # fmt: skip
def test_configurations_of_torchtitans_registries(name: str, said: str, wanted: tuple[object, ...]) -> None:
    job = read(f"torchrun -m torchtitan.train --module m --config {name} {said}\n", file="a.sh", given={"gpus": 64}).job
    assert (job.model, job.micro_batch, job.seq_len, job.tp, job.ep, job.recompute, job.optimizer) == wanted


TAUGHT = """defaults: grpo_math_8B_megatron.yaml
policy: {model_name: Qwen/Qwen3-8B%s}
cluster: {gpus_per_node: 8, num_nodes: 4}
%s"""


def _nemo(policy: str = "", rest: str = "") -> JobFile:
    return read(TAUGHT % (policy, rest), "nemo-rl", file="job.yaml")


def test_nemo_rl_makes_log_probabilities_in_pieces() -> None:
    """`distributed/model_utils.py`, `ChunkedDistributedLogprob`: logits stay in 16 bits, and so does their gradient."""
    pieces = ", logprob_chunk_size: 1024, megatron_cfg: {defer_fp32_logits: true}"
    assert (_nemo().job.loss, _nemo(pieces).job.loss) == (None, "compiled")


def test_nemo_rl_skips_a_pass_where_the_ratio_is_forced() -> None:
    """`algorithms/opd.py`, `_skip_prev_logprobs`: unless a threshold compares them."""
    forced = "loss_fn: {force_on_policy_ratio: true}\n"
    assert _nemo().job.old_logprobs is None
    assert _nemo("", forced).job.old_logprobs == "none"
    assert _nemo("", forced + "grpo: {seq_logprob_error_threshold: 2.0}\n").job.old_logprobs is None


def test_nemo_rl_gives_teachers_nodes_of_their_own() -> None:
    """`policy/teacher_worker_group.py`: two agents that share a teacher have one, a third its own two nodes; one trains."""
    teachers = """on_policy_distillation:
  enabled: true
  teacher_model_by_agent_name: {first: Qwen/Qwen3-8B, second: Qwen/Qwen3-8B, third: Qwen/Qwen3-14B}
  non_colocated_teachers:
    enabled: true
    default_teacher_cfg: {num_nodes: 1, gpus_per_node: 8}
    teacher_overrides: {third: {num_nodes: 2}}
"""
    whole = [_nemo("", text).job.gpus for text in ("", teachers, teachers.replace("enabled: true", "enabled: false"))]
    assert whole == [32, 8, 32]


def test_nemo_rl_says_that_gradients_beside_8_bits_have_16() -> None:
    eight = ", megatron_cfg: {fp8_cfg: {enabled: true, fp8: e4m3, fp8_recipe: blockwise, fp8_param: false}%s}"
    key = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32"
    wide = ", distributed_data_parallel_config: {grad_reduce_in_fp32: true}"
    asked = [{item.key for item in _nemo(eight % more).uncounted} for more in ("", wide)]
    assert [key in keys for keys in asked] == [True, False]


def test_nemo_rl_s_evaluation_generates(tmp_path: Path) -> None:
    place = tmp_path / "eval.yaml"
    place.write_text(
        "eval: {metric: pass@k, num_tests_per_prompt: 1}\n"
        "generation: {backend: vllm, model_name: Qwen/Qwen2.5-7B-Instruct, max_new_tokens: 1024,"
        " vllm_cfg: {tensor_parallel_size: 2, max_model_len: 4096}}\ncluster: {gpus_per_node: 2, num_nodes: 1}\n"
    )
    assert "counted as --task generate" in typed(f"estimate {place} --gpu h100-sxm5-80gb").err
    answer = document(f"estimate {place} --task generate --gpu h100-sxm5-80gb")
    assert (answer["layout"]["tp"], answer["model"]["params"]) == (2, 7_615_616_512)


@pytest.mark.parametrize(
    ("model", "more", "kernels", "said"),
    [
        ("google/gemma-7b", "", "native", "is on by default where liger-kernel is there"),
        ("google/gemma-7b", "  use_liger_kernel: true\n", "liger", ""),
        ("google/gemma-7b", "  use_liger_kernel: false\n", "native", ""),
        ("google/gemma-7b", "distributed:\n  tp_size: 2\n", "native", ""),
        ("Qwen/Qwen3-8B", "", "native", ""),
        (
            "Qwen/Qwen3-8B",
            "  use_liger_kernel: true\n",
            "native",
            "does nothing beside AutoModel's own code of a model",
        ),
        ("Qwen/Qwen3-8B", "  force_hf: true\n", "native", "is on by default where liger-kernel is there"),
    ],
)
def test_automodel_gives_ligers_kernels_to_transformers_own_code(
    model: str, more: str, kernels: str, said: str
) -> None:
    """`_transformers/auto_model.py` and `registry.py` of nemo-automodel 0.7; liger-kernel 0.8, `monkey_patch.py`."""
    found = read(AUTOMODEL.replace("Qwen/Qwen3-8B\n", f"{model}\n{more}"), file="a.yaml", given={"gpus": 8})
    assert found.job.kernels == kernels
    notes = [item.note for item in found.uncounted if "liger" in item.note]
    assert [said in note for note in notes] == [True] * bool(said)


def test_trainers_alike_of_trl_keep_the_newest_release() -> None:
    """trl.experimental's have `max_prompt_length` still, which GRPO lost (`experimental/sdpo/sdpo_config.py` of trl 1.16)."""
    text = """from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
args = SDPOConfig(max_prompt_length=512, per_device_train_batch_size=8, num_generations=8)
SDPOTrainer(model="Qwen/Qwen3-0.6B", args=args).train()
"""
    alike = read(text, file="a.py", given={"gpus": 1})
    assert alike.version == read(text.replace("max_prompt_length=512, ", ""), file="a.py", given={"gpus": 1}).version
    assert read(text.replace("SDPO", "GRPO").replace(".sdpo", ""), file="a.py", given={"gpus": 1}).version == "0.27"


def test_only_a_configuration_that_is_not_there_says_the_optimizer() -> None:
    text = "deepspeed deepspeed_train.py --cf bert_large.json --max_seq_length 128 --deepspeed --deepspeed_config lamb.json\n"
    found = read(text, file="a.sh", given={"gpus": 8})
    noted = next(item for item in found.uncounted if "only it says the optimizer" in item.note)
    assert (noted.effect, noted.parts, noted.share) == ("either", ("optimizer",), 0.67)
    assert not any(
        "optimizer" in item.note for item in read(text, file="a.sh", given={"gpus": 8, "optimizer": "adamw"}).uncounted
    )


SWIFT = "CUDA_VISIBLE_DEVICES=0,1 {} --model Qwen/Qwen2.5-VL-7B-Instruct --tuner_type lora --torch_dtype bfloat16\n"


def test_a_launcher_whose_configuration_is_not_there_starts_a_process_on_each_card() -> None:
    """accelerate 1.15, `utils/launch.py`; a process of `swift sft` by itself shares the layers out over its cards."""
    started = SWIFT.format("accelerate launch --config_file fsdp.json swift/cli/sft.py")
    found = read(started, file="a.sh").job
    assert (found.gpus, found.pp) == (2, None)
    assert read(SWIFT.format("swift sft"), file="a.sh").job.pp == 2


def test_towers_of_swift_are_frozen_where_pictures_are_told_of() -> None:
    """`freeze_vit` is true by default (`arguments/tuner_args.py` of ms-swift 4.6); pixels have three places."""
    plain = SWIFT.format("swift sft")
    assert read(plain, file="a.sh").job.tower is None
    assert read(plain, file="a.sh", given={"pictures": "1x1024x768"}).job.tower == "frozen"
    for told in (f"MAX_PIXELS=50176 {plain}", plain[:-1] + """ --model_kwargs '{"max_pixels": 50176}'\n"""):
        found = read(told, file="a.sh").job
        assert (found.max_pixels, found.tower) == (50176, "frozen")


@pytest.mark.parametrize(
    ("more", "tower"),
    [
        ("", None),
        ("freeze_config: {freeze_language_model: false}\n", "frozen"),
        ("freeze_config: {freeze_vision_tower: false}\n", "trained"),
    ],
)
def test_towers_of_automodel_are_frozen_by_its_section(more: str, tower: str | None) -> None:
    """`apply_parameter_freezing` (nemo-automodel 0.7, `components/utils/model_utils.py`)."""
    text = AUTOMODEL.replace("Qwen/Qwen3-8B", "Qwen/Qwen2.5-VL-7B-Instruct") + "processor: {max_pixels: 50176}\n" + more
    found = read(text, file="a.yaml", given={"gpus": 8}).job
    assert (found.tower, found.max_pixels) == (tower, 50176)
