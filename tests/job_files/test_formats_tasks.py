"""Job files of preference tuning and reward models: answered as tasks, and written."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import document, typed
from loadgauge.job_files.exchange import read

FACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B
stage: dpo
finetuning_type: lora
cutoff_len: 1024
per_device_train_batch_size: 2
bf16: true
template: llama3
"""
AXOLOTL = """base_model: meta-llama/Llama-3.1-8B
adapter: lora
lora_r: 16
lora_target_linear: true
sequence_len: 1024
micro_batch_size: 2
bf16: true
datasets: []
"""


@pytest.mark.parametrize(
    ("text", "task"),
    [
        (FACTORY, "dpo"), (FACTORY + "pref_loss: orpo\n", "orpo"), (FACTORY + "pref_loss: simpo\n", "simpo"),
        (FACTORY.replace("dpo", "kto"), "kto"), (FACTORY.replace("dpo", "rm"), "rm"),
        (AXOLOTL + "rl: ipo\n", "ipo"), (AXOLOTL + "rl: kto\n", "kto"),
    ],
)  # fmt: skip
def test_a_file_s_task_is_estimated(text: str, task: str, tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(text)
    found = document(f"estimate {place} --gpu h100-sxm5-80gb")
    assert found["task"] == task
    flags = typed(f"convert {place} --to flags").out.removeprefix("loadgauge ")
    assert f"--task {task}" in flags
    again = document(f"{flags.strip()} --gpu h100-sxm5-80gb")
    assert again["task"] == task
    assert found["memory"]["phases"][0]["total"] == pytest.approx(again["memory"]["phases"][0]["total"], rel=0.35)


def test_a_command_of_ms_swift_s_sft_is_not_given_a_task(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(FACTORY)
    script = tmp_path / "sft.sh"
    script.write_text("swift sft --model meta-llama/Llama-3.1-8B --attn_impl flash_attn")
    found = typed(f"convert {place} --onto {script} --to ms-swift")
    assert "rlhf" not in found.out
    assert "--task dpo: has no place in it" in found.err
    assert typed(f"convert {place} --to ms-swift").out.startswith("swift rlhf --rlhf_type dpo ")


def test_a_task_goes_from_one_tool_to_another(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(FACTORY)
    assert "rl: dpo" in typed(f"convert {place} --to axolotl").out
    place.write_text(AXOLOTL + "rl: orpo\n")
    made = typed(f"convert {place} --to llamafactory").out
    assert "stage: dpo" in made
    assert "pref_loss: orpo" in made


GROUPS = (
    AXOLOTL
    + """rl: grpo
gradient_accumulation_steps: 4
trl: {max_completion_length: 512, num_generations: 4, use_vllm: true, vllm_mode: colocate, beta: 0.01}
vllm: {gpu_memory_utilization: 0.5, tensor_parallel_size: 1}
"""
)
PPO = (
    FACTORY.replace("dpo", "ppo")
    + """reward_model: meta-llama/Llama-3.2-1B
reward_model_type: full
max_new_tokens: 512
gradient_accumulation_steps: 4
ppo_buffer_size: 2
lora_target: all
"""
)


@pytest.mark.parametrize(
    ("text", "to", "flags"),
    [
        (GROUPS, "axolotl", "--task grpo --prompts 2 --samples 4 --answers 512 --epochs 1"
                            " --rollout vllm:utilization=0.5,max_num_seqs=8,max_batched_tokens=4096"),
        (PPO, "llamafactory", "--task ppo --prompts 16 --samples 1 --prompt-len 1024 --answers 512 --epochs 4 --rollout hf:batch=2"
                              " --reward-model meta-llama/Llama-3.2-1B --critic shared"),
    ],
)  # fmt: skip
def test_files_that_generate_their_answers(text: str, to: str, flags: str, tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(text)
    assert flags in typed(f"convert {place} --to flags").out
    found = document(f"estimate {place} --gpu h100-sxm5-80gb")
    assert found["memory"]["phases"][0]["phase"] == "generate"
    assert not any(part["role"] == "critic" for phase in found["memory"]["phases"] for part in phase["parts"])
    other = tmp_path / "b.yaml"
    other.write_text(typed(f"convert {place} --to {to}").out)
    assert flags in typed(f"convert {other} --to flags").out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (AXOLOTL + "rl: grpo\n", "2 sequences of a generation are no whole groups of 8; give --gpus"),
        (AXOLOTL + "rl: nope\n", "'nope' is not read"),
        (PPO.replace("_type: full", "_type: oft"), "'oft' is not read"),
        (PPO.replace("finetuning_type: lora", "finetuning_type: full").replace("reward_model_type: full\n", ""), "need finetuning"),
        (FACTORY.replace("dpo", "ppo"), "needs a reward model"),
    ],
)  # fmt: skip
def test_what_is_not_counted_of_answers_stops_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(text)
    found = typed(f"estimate {place} --gpu h100-sxm5-80gb")
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert words in found.err


@pytest.mark.parametrize(
    ("text", "key", "effect", "why"),
    [
        (PPO + "reward_model_quantization_bit: 4\n", "reward_model_quantization_bit", "saves", "quantises the reward model"),
        (PPO + "reward_model_adapters: x\n", "reward_model_adapters", "costs", "adds adapters to the reward model"),
        (AXOLOTL + "rl: dpo\ndpo_use_liger_kernel: true\n", "dpo_use_liger_kernel", "saves", "a slice of the sequences at a time"),
        (GROUPS + "batch_flattening: true\n", "batch_flattening", "saves", "trains on answers without padding"),
        (GROUPS.replace("beta: 0.01", "replay_buffer_size: 64"), "trl.replay_buffer_size", "either", "when answers are generated"),
        (GROUPS.replace("beta: 0.01", "vllm_lora_sync: true"), "trl.vllm_lora_sync", "either", "when answers are generated"),
        (GROUPS.replace("beta: 0.01", "reroll_start_fraction: 0.5"), "trl.reroll_start_fraction", "either", "puts prompts in"),
        (GROUPS.replace("beta: 0.01", "async_prefetch: true"), "trl.async_prefetch", "either", "generates while it trains"),
    ],
)  # fmt: skip
def test_what_is_not_counted_of_answers_is_named_and_strict_stops_for_it(
    text: str, key: str, effect: str, why: str, tmp_path: Path
) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(text)
    named = {one["key"]: one for one in document(f"estimate {place} --gpu h100-sxm5-80gb")["unread"]}
    assert (named.keys(), named[key]["effect"]) == ({key}, effect)
    assert why in named[key]["why"]
    strict = typed(f"estimate {place} --gpu h100-sxm5-80gb --strict")
    assert (strict.code, strict.out, strict.err.count("\n")) == (2, "", 1)
    assert key in strict.err


def test_a_server_s_answers_are_generated_beside_the_trainer(tmp_path: Path) -> None:
    """`vllm_mode: server` has a GPU of its own; answers that are fetched early are one step old."""
    place = tmp_path / "a.yaml"
    place.write_text(GROUPS.replace("vllm_mode: colocate, ", "async_prefetch: true, "))
    assert document(f"estimate {place} --gpu h100-sxm5-80gb")["gpus"] == {"trainer": 1, "rollout": 1, "all": 2}
    assert "--placement split:1+1 --staleness 1" in typed(f"convert {place} --to flags").out


def test_a_key_of_answers_that_no_list_has_is_named(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(GROUPS.replace("beta: 0.01", "vllm_importance_sampling_cap: 2.0"))
    assert "not counted:" not in typed(f"estimate {place} --gpu h100-sxm5-80gb").out
    place.write_text(GROUPS.replace("beta: 0.01", "something_new: 2"))
    told = " ".join(typed(f"estimate {place} --gpu h100-sxm5-80gb").out.split())
    assert "not counted: trl.something_new = 2: axolotl has no such key, and drops it" in told


def test_a_reference_of_llamafactory_is_a_second_model_where_it_is_named(tmp_path: Path) -> None:
    """`create_ref_model` of its trainer_utils.py: a model where `ref_model` is there, or nothing is LoRA; 2 bytes a parameter."""
    place = tmp_path / "a.yaml"
    for more, held in (("", 0), ("ref_model: meta-llama/Llama-3.1-8B\n", 2 * 8_030_261_248)):
        place.write_text(FACTORY + more)
        found = document(f"estimate {place} --gpu b200-sxm-180gb")
        weights = [
            one["bytes"] for phase in found["memory"]["phases"] if phase["phase"] == "update" for one in phase["parts"]
            if (one["role"], one["part"]) == ("reference", "weights")
        ]  # fmt: skip
        assert sum(weights) == held
    assert "ref_model: meta-llama/Llama-3.1-8B" in typed(f"convert {place} --to llamafactory --lora-rank 32").out
    place.write_text(FACTORY.replace("finetuning_type: lora", "finetuning_type: oft"))
    assert "--reference model" in typed(f"convert {place} --to flags").out


def test_adapters_that_score_are_those_of_the_policy_once_more(tmp_path: Path) -> None:
    """`load_adapter(reward_model, "reward")`: no second model, and adapters in float32; 8 of each projection of Llama-3.1-8B: its
    shapes are those of its config.json."""
    place = tmp_path / "a.yaml"
    place.write_text(PPO.replace("reward_model_type: full\n", "").replace("meta-llama/Llama-3.2-1B", "saves/reward"))
    assert "--reward-model adapter" in typed(f"convert {place} --to flags").out
    found = document(f"estimate {place} --gpu h100-sxm5-80gb")
    update = next(phase for phase in found["memory"]["phases"] if phase["phase"] == "update")
    scores = {one["part"]: one["bytes"] for one in update["parts"] if one["role"] == "reward model"}
    shapes = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert scores == {"adapters": 4 * 8 * shapes * 32}
    assert any(phase["phase"] == "reward" for phase in found["memory"]["phases"])
    alone = typed("estimate llama-3.1-8b --task ppo --reward-model adapter --critic shared")
    assert (alone.code, alone.err.count("\n")) == (2, 1)
    assert "needs adapters" in alone.err


def test_such_a_file_is_planned_as_its_task(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(FACTORY)
    line = f"plan {place} --gpu h100-sxm5-80gb --gpus 8 --micro-batch 1 --json"
    found, stated = typed(line), typed(f"{line} --task dpo")
    assert (found.code, found.out) == (0, stated.out)


def test_a_reference_of_llamafactory_is_not_widened(tmp_path: Path) -> None:
    """What is trained is made float32; the reference stays in bfloat16: 2 bytes of each of 8.03 billion parameters."""
    place = tmp_path / "a.yaml"
    place.write_text(FACTORY.replace("finetuning_type: lora", "finetuning_type: full"))
    found = document(f"estimate {place} --gpu b200-sxm-180gb")
    held = {
        one["role"]: one["bytes"] for phase in found["memory"]["phases"] if phase["phase"] == "update" for one in phase["parts"]
        if one["part"] == "weights"
    }  # fmt: skip
    assert held["reference"] == 2 * 8_030_261_248
    assert held["policy"] == 4 * 8_030_261_248


# -- TRL -----------------------------------------------------------------------------------------------------------------

TRL = """model_name_or_path: Qwen/Qwen2.5-0.5B
output_dir: out
max_length: 512
per_device_train_batch_size: 2
"""
GRPO = (
    "accelerate launch --num_processes 8 grpo.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct --output_dir out"
    " --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_completion_length 1024"
)


def of_trl(text: str, tmp_path: Path, name: str = "a.yaml", flags: str = "") -> dict[str, str]:
    """The flags of a file of TRL."""
    place = tmp_path / name
    place.write_text(text)
    found = typed(f"convert {place} --to flags")
    assert found.code == 0, found.err
    listed = found.out.split()[2:]
    return {word.removeprefix("--"): value for word, value in zip(listed[1::2], listed[2::2], strict=True)}


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("f_divergence_type: reverse_kl\n", "dpo"), ("loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.1]\n", "dpo"),
        ("loss_type: ipo\nprecompute_ref_log_probs: true\n", "ipo"), ("desirable_weight: 1.0\n", "kto"),
        ("loss_type: simpo\nsimpo_gamma: 0.5\n", "simpo"), ("cpo_alpha: 1.0\n", "cpo"),
        ("center_rewards_coefficient: 0.01\n", "rm"), ("scale_rewards: group\nnum_generations: 2\n", "grpo"),
        ("normalize_advantages: true\n", "rloo"), ("lmbda: 0.0\nteacher_model_name_or_path: gpt2\n", "gkd"),
    ],
)  # fmt: skip
def test_the_keys_of_a_trl_file_say_the_trainer(text: str, task: str, tmp_path: Path) -> None:
    assert of_trl(TRL + text, tmp_path)["task"] == task
    place = tmp_path / "a.yaml"
    assert document(f"estimate {place} --gpu h100-sxm5-80gb")["task"] == task
    again = tmp_path / "b.yaml"
    again.write_text(typed(f"convert {place} --to trl").out)
    assert of_trl(again.read_text(), tmp_path)["task"] == task


@pytest.mark.parametrize("task", ["dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo"])
def test_a_command_line_of_trl_is_read(task: str, tmp_path: Path) -> None:
    text = f"trl {task} --model_name_or_path Qwen/Qwen2.5-0.5B --output_dir out"
    assert of_trl(text, tmp_path, "a.sh")["task"] == {"reward": "rm"}.get(task, task)
    assert of_trl(text.replace(f"trl {task}", f"python run_{task}.py"), tmp_path, "a.sh") == of_trl(
        text, tmp_path, "a.sh"
    )


def test_weights_are_loaded_as_the_trainer_does(tmp_path: Path) -> None:
    """`create_model_from_path` has float32; ORPO's and CPO's trainers call `from_pretrained`, with the checkpoint's dtype."""
    assert of_trl(TRL + "desirable_weight: 1.0\n", tmp_path)["weights"] == "float32"
    assert of_trl(TRL + "cpo_alpha: 1.0\n", tmp_path)["weights"] == "auto"


def test_answers_of_trl_are_counted_as_its_trainer_does(tmp_path: Path) -> None:
    """A generation is per_device_train_batch_size x processes x steps_per_generation sequences; vLLM of each card has as many at
    once as its tensor ranks have together (`GRPOConfig.__post_init__`, `VLLMGeneration`)."""
    plain = of_trl(GRPO, tmp_path, "a.sh")
    assert (plain["prompts"], plain["samples"], plain["answers"], plain["global-batch"]) == ("8", "8", "1024", "64")
    assert (plain["rollout"], plain["reference"], plain["loss"], plain["weights"]) == (
        "hf:batch=8",
        "none",
        "tiled",
        "float32",
    )
    more = (
        GRPO + " --beta 0.04 --steps_per_generation 8 --num_iterations 2 --use_vllm True --vllm_tensor_parallel_size 2"
    )
    found = of_trl(more + " --vllm_enable_sleep_mode True", tmp_path, "a.sh")
    assert (found["prompts"], found["global-batch"], found["epochs"]) == ("32", "64", "2")
    assert found["rollout"] == "vllm:tp=2,utilization=0.3,max_num_seqs=64,max_batched_tokens=4096,sleep=2"
    assert "reference" not in found
    rloo = of_trl(GRPO.replace("grpo.py", "rloo.py"), tmp_path, "a.sh")
    assert (rloo["prompts"], rloo["samples"]) == ("32", "2")
    assert "reference" not in rloo  # beta is 0.05


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TRL + "beta: 0.1\n", "--task (dpo, kto, orpo, cpo, gkd, grpo, rloo)"), (TRL + "loss_type: sigmoid\n", "--task (dpo, cpo)"),
        (TRL + "desirable_weight: 1.0\nnum_generations: 4\n", "another trainer"),
        (TRL + "scale_rewards: group\nuse_vllm: true\nvllm_mode: server\n", "give --gpus"),
        (TRL + "scale_rewards: group\ngeneration_batch_size: 64\n", "give --gpus"),
        (TRL + "scale_rewards: group\nnum_generations: 3\n", "whole groups of 3"),
        (TRL + "scale_rewards: group --version 0.14", "release 0.15"),
        (TRL + "teacher_model_name_or_path: gpt2\nlmbda: 1.5\n", "a share, from 0 to 1"),
        (TRL + "teacher_model_name_or_path: gpt2\nmax_new_tokens: 512\n", "max_new_tokens: leaves nothing"),
    ],
)  # fmt: skip
def test_what_is_not_counted_of_trl_stops_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    body, _, version = text.partition(" --version ")
    place = tmp_path / "a.yaml"
    place.write_text(body + "\n")
    asked = f" --version trl={version}" if version else ""
    found = typed(f"estimate {place} --gpu h100-sxm5-80gb{asked}")
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert words in found.err


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("loss_type: simpo\n", "simpo"), ("loss_type: simpo\ncpo_alpha: 0\n", "simpo --loss-terms no-nll"),
        ("cpo_alpha: 0.5\n", "cpo"), ("loss_type: apo_zero_unpaired\n", "kto --loss-terms no-kl"),
        ("lmbda: 0\nbeta: 1\nteacher_model_name_or_path: gpt2\n", "gkd --teacher gpt2 --loss-terms reverse-kl"),
        ("lmbda: 1\nbeta: 0\nteacher_model_name_or_path: gpt2\n",
         "opd --teacher gpt2 --loss-terms forward-kl --prompts 8 --samples 1 --prompt-len 384 --answers 128 --rollout hf:batch=2"),
    ],
)  # fmt: skip
def test_a_file_of_trl_and_its_flags_have_one_answer(text: str, flags: str, tmp_path: Path) -> None:
    """Under FSDP, where the logits that a loss outside the model takes are not widened, whoever says so."""
    place = tmp_path / "a.yaml"
    place.write_text(TRL + "fsdp: full_shard\nfsdp_config:\n  fsdp_version: 2\n" + text)
    sharded = "--gpu h100-sxm5-80gb --gpus 4"
    found = document(f"estimate {place} {sharded}")
    length = "" if "opd" in flags else " --seq-len 512"
    weights = "" if "simpo" in flags or "cpo" in flags else " --weights float32"
    rows = f"--micro-batch 2 --global-batch 8 --zero 3 --recompute full --framework huggingface{length}{weights}"
    again = document(f"estimate qwen2.5-0.5b --task {flags} {rows} {sharded}")
    assert [(one["phase"], one["total"]) for one in found["memory"]["phases"]] == [
        (one["phase"], one["total"]) for one in again["memory"]["phases"]
    ]
    assert place.read_text() == typed(f"convert {place} --onto {place} --to trl").out


def test_evaluation_and_saving_of_a_task_s_file(tmp_path: Path) -> None:
    """An evaluation keeps less than an update of as many sequences; what it keeps of more is in the range."""
    place = tmp_path / "a.yaml"
    body = TRL + "desirable_weight: 1.0\neval_strategy: steps\n"
    place.write_text(body + "per_device_eval_batch_size: 2\n")
    asked = f"estimate {place} --gpu h100-sxm5-80gb"
    said = typed(asked)
    assert said.code == 0, said.err
    assert "not counted: evaluation" in " ".join(said.out.split())
    place.write_text(body + "per_device_eval_batch_size: 4\n")
    assert "eval_batch = 4: the logits of an evaluation" in " ".join(typed(asked).out.split())
    script = tmp_path / "a.sh"
    script.write_text(SWIFT + " --deepspeed zero3")
    found = typed(f"estimate {script} --gpu h100-sxm5-80gb --gpus 8")
    assert "not counted: saving" in " ".join(found.out.split()), found.err


def test_a_task_says_whose_a_file_of_trl_is(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(TRL + "beta: 0.1\n")
    assert document(f"estimate {place} --gpu h100-sxm5-80gb --task kto")["task"] == "kto"
    assert "is no argument of TRL's reward" in typed(f"estimate {place} --gpu h100-sxm5-80gb --task rm").err


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("desirable_weight: 1.0\nsync_ref_model: true\n", "copies the policy"),
        ("scale_rewards: group\nnum_generations: 2\nentropy_coef: 0.01\n", "keeps the entropy of each token"),
        ("teacher_model_name_or_path: gpt2\nlmbda: 0\nseq_kd: true\n", "generates answers"),
    ],
)
def test_what_may_cost_more_is_named_and_in_the_range(key: str, words: str, tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(TRL + key)
    found = typed(f"estimate {place} --gpu h100-sxm5-80gb")
    assert words in " ".join(found.out.split()), found.err


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("max_length: 512\ntorch_dtype: bfloat16\n", "0.26"), ("max_seq_length: 512\ntorch_dtype: bfloat16\n", "0.19"),
        ("max_length: 512\nbeta: 0.1\nmax_prompt_length: 256\n", "0.28"), ("max_length: 512\ndtype: bfloat16\n", "1.16"),
    ],
)  # fmt: skip
def test_the_keys_say_the_newest_release_that_has_them_all(text: str, release: str, tmp_path: Path) -> None:
    """`ModelConfig` has `torch_dtype` up to 0.26, `SFTConfig` `max_seq_length` up to 0.19, `DPOConfig` `max_prompt_length` up to
    0.28 (fields of the dataclasses of trl's wheels, 0.7 to 1.16)."""
    (tmp_path / "dpo").mkdir()
    place = tmp_path / "dpo" / "a.yaml"
    place.write_text(f"model_name_or_path: gpt2\noutput_dir: out\n{text}")
    found = read(place.read_text(), file=str(place))
    assert found.version == release
    assert (found.job.task == "dpo") == ("beta" in text)
    assert ("trainer is dpo" in " ".join(found.remarks)) == ("beta" in text)


# -- ms-swift ------------------------------------------------------------------------------------------------------------

SWIFT = (
    "swift rlhf --model Qwen/Qwen2.5-0.5B --max_length 512 --tuner_type lora --lora_rank 8 --target_modules all-linear"
)


@pytest.mark.parametrize(
    ("words", "task"),
    [
        ("", "dpo"), ("--rlhf_type dpo --loss_type sigmoid bco_pair --loss_weights 1 0.5 --rpo_alpha 0.1", "dpo"),
        ("--loss_type ipo --beta 0.1", "ipo"), ("--rlhf_type kto --desirable_weight 1.0", "kto"), ("--rlhf_type orpo", "orpo"),
        ("--rlhf_type simpo --simpo_gamma 1.0", "simpo"), ("--rlhf_type cpo --cpo_alpha 1", "cpo"), ("--rlhf_type rm", "rm"),
    ],
)  # fmt: skip
def test_preferences_of_ms_swift_are_estimated(words: str, task: str, tmp_path: Path) -> None:
    place = tmp_path / "a.sh"
    place.write_text(f"{SWIFT} {words}")
    assert document(f"estimate {place} --gpu h100-sxm5-80gb")["task"] == task
    again = typed(f"convert {place} --to ms-swift").out
    assert again.strip() == f"{SWIFT} {words}".strip()  # nothing in it says anything else


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SWIFT + " --rlhf_type grpo --use_vllm true --vllm_mode server", "'server' has GPUs of its own"),
        (SWIFT + " --rlhf_type gkd", "needs the model that is distilled"), (SWIFT + " --rlhf_type ppo", "needs a reward model"),
        (SWIFT.replace("rlhf", "sft") + " --beta 0.1", "beta: belongs to a trainer other than SFT"),
        (SWIFT + " --reward_model gpt2", "reward_model"),
        (SWIFT.replace("rlhf", "sft") + " --rlhf_type dpo", "rlhf_type: belongs to a trainer other than SFT"),
    ],
)  # fmt: skip
def test_what_is_not_counted_of_ms_swift_stops_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    place = tmp_path / "a.sh"
    place.write_text(text)
    found = typed(f"estimate {place} --gpu h100-sxm5-80gb")
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert words in found.err


def test_a_model_with_a_task_is_written_as_a_file(tmp_path: Path) -> None:
    """What is written means the memory of the flags: a pair is one of a batch, a reference is said where it is not usual."""
    flags = "llama-3.1-8b --task dpo --gpus 8 --zero 3 --seq-len 2048 --micro-batch 2"
    place = tmp_path / "a.yaml"
    place.write_text(typed(f"convert {flags} --to trl").out)
    given, read_ = (
        document(f"estimate {one} --gpu h100-sxm5-80gb") for one in (flags, f"{place} --gpus 8")
    )  # fmt: skip
    assert [one["total"] for one in given["memory"]["phases"]] == [one["total"] for one in read_["memory"]["phases"]]
    made = typed("convert llama-3.1-8b --task grpo --gpus 8 --zero 3 --answers 512 --to verl")
    assert (made.code, made.err) == (0, "")
    assert "use_kl_loss=True" in made.out
    assert "data.max_response_length=512" in made.out
