"""Help on one screen, and what people type."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import click
import pytest

from command_line import document, typed
from loadgauge.core.base import read_table
from loadgauge.core.command_line.estimate import command as estimate
from loadgauge.core.command_line.main import COMMANDS, VERBS, commands, run, with_verb
from loadgauge.core.command_line.options.grouped import FIRST, TITLES, USUAL, WORDS, Grouped, groups
from loadgauge.core.command_line.plan import command as plan
from loadgauge.core.definitions.hardware.hardware import gpu_ids
from loadgauge.core.definitions.job import spoken
from loadgauge.core.definitions.serving.rollout import Engine

LARGE = 40
"""Flags from which on help has headings."""


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> click.Command:
    found = commands.get_command(click.Context(commands), request.param)
    assert found is not None
    return found


def test_help_of_a_large_command_is_one_screen_and_all_of_it_has_headings(command: click.Command) -> None:
    if len(command.params) < LARGE:
        return
    assert isinstance(command, Grouped)
    short, whole = typed(f"{command.name} --help").out, typed(f"{command.name} --help-all").out
    assert len(short.splitlines()) <= 24
    assert f"loadgauge {command.name} --help-all" in short
    listed = [option for options in groups(command).values() for option in options]
    assert sorted(id(each) for each in listed) == sorted(
        id(each) for each in command.params if isinstance(each, click.Option) and not each.hidden
    )
    for title, options in groups(command).items():
        section = whole.partition(f"{title}:\n")[2].partition("\n\n")[0]
        assert all(option.opts[0] in section for option in options), title
    for name in FIRST.get(str(command.name), USUAL):
        option = command.flag(name)
        assert option is not None, name
        assert any(
            line.split()[:1] == [option.opts[-1]] or f"  {option.opts[0]}" in line for line in short.splitlines()
        )


def test_the_first_screen_of_estimate_has_the_ten_flags_and_no_line_is_broken() -> None:
    lines = typed("estimate --help").out.splitlines()
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert len(flags) == 10
    assert all(len(line) <= 80 for line in lines)
    assert set(USUAL) <= set(WORDS)
    assert [title for title in TITLES.values() if title in groups(estimate)] == list(groups(estimate))


def params(command: click.Command, line: str) -> dict[str, object]:
    """What a command makes of a line."""
    with contextlib.redirect_stderr(io.StringIO()):
        context = command.make_context(str(command.name), shlex.split(line))
    return dict(context.params)


SAID = {
    "--batch-size 4": "--micro-batch 4", "-b 4": "--micro-batch 4", "--per_device_train_batch_size 2": "--micro-batch 2",
    "--micro-batch-size 2": "--micro-batch 2", "--mbs 2": "--micro-batch 2", "--global-batch-size 64": "--global-batch 64",
    "--gbs 64": "--global-batch 64", "--max-seq-len 2048": "--seq-len 2048", "--max_seq_length 2048": "--seq-len 2048",
    "--seq-length 2048": "--seq-len 2048", "--context-length 8k": "--seq-len 8192", "--cutoff_len 2048": "--seq-len 2048",
    "--seq-len 8k": "--seq-len 8192", "--seq_len=32K": "--seq-len 32768", "--block-size 1024": "--seq-len 1024",
    "--fsdp": "--zero 3", "--zero3": "--zero 3", "--zero-stage 2": "--zero 2", "--zero stage3": "--zero 3", "--ddp": "--zero 0",
    "--gradient-checkpointing": "--recompute full", "--gradient_checkpointing True": "--recompute full",
    "--gradient_checkpointing false": "--recompute none", "--activation-checkpointing": "--recompute full",
    "--load-in-4bit": "--qlora", "--load_in_4bit=True": "--qlora", "--4bit": "--qlora", "--lora": "--adapter lora",
    "--lora-r 8": "--lora-rank 8", "--target-modules q_proj": "--lora-targets q_proj", "--bf16": "--precision bf16",
    "--precision bfloat16": "--precision bf16", "--dtype float16": "--precision fp16", "--mixed-precision bf16": "--precision bf16",
    "--torch-dtype bfloat16": "--weights bfloat16", "--weights bf16": "--weights bfloat16", "--fp8": "--precision fp8",
    "--gpu p5.48xlarge": "--gpu h100-sxm5-80gb --gpus 8", "2xg5.12xlarge": "--gpu a10g --gpus 8 --gpus-per-node 4",
    "--gpu Standard_NC48ads_A100_v4": "--gpu a100-pcie-80gb --gpus 2",
    "--gpu 8xh100": "--gpu h100 --gpus 8", "--gpu 4090x2": "--gpu 4090 --gpus 2", "--gpu h100:8": "--gpu h100 --gpus 8",
    "--gpu '2 x 4090'": "--gpu 4090 --gpus 2", "--gpu 24GB": "--memory 24GB", "--memory 24": "--memory 24GB",
    "--vram 24GB": "--memory 24GB", "--num-gpus 8": "--gpus 8", "--world-size 8": "--gpus 8",
    "--price '$2' --tokens 1B": "--price 2 --tokens 1B",
    "--price 2.50USD --tokens 1B": "--price 2.50 --tokens 1B", "--tensor-parallel-size 2": "--tp 2",
    "--pipeline-model-parallel-size 2": "--pp 2",
    "--flash-attn": "--attention fa2", "--attn_implementation sdpa": "--attention flash",
    "--optim adamw_8bit": "--optimizer adamw-8bit",
    "--optimizer paged_adamw_8bit": "--optimizer paged-adamw-8bit", "--use_liger_kernel": "--kernels liger",
    "--unsloth": "--framework unsloth", "--dora": "--adapter lora --use-dora", "--grpo": "--task grpo", "--learning_rate 1e-4": "",
    "--full-finetune": "", "--framework mcore": "--framework megatron", "--dp 4 --tp 2 --pp 3": "--gpus 24 --tp 2 --pp 3",
    "--nnodes=2 --gpus-per-node 4": "--gpus 8 --gpus-per-node 4", "--num-nodes 2": "--gpus 16",
    "--deepspeed zero3 --lora 32": "--zero 3 --lora-rank 32", "--zero3-offload": "--zero 3 --offload all",
    "--strategy=fsdp --num-generations 8 --save-steps 10": "--zero 3 --samples 8", "--finetuning-type qlora": "--qlora",
    "--gpus 8xh100": "--gpus 8 --gpu h100", "on 2x4090 --fft": "--gpu 4090 --gpus 2", "h100": "--gpu h100",
    "--gradient_accumulation_steps 4 --num-gpus 16 --tp 2 --mbs 3": "--global-batch 96 --gpus 16 --tp 2 --micro-batch 3",
    "--quantization_bit 4": "--qlora --base nf4 --kbit-upcast none", "--stage sft --num_machines 2": "--gpus 16",
    "--fp16_full_eval --master_port 29500 --rdzv-backend c10d": "", "--flash_attn fa2": "--attention fa2",
    "--torch_compile True": "--torch-compile", "--offload_optimizer cpu": "--offload optimizer", "--adapter qlora": "--qlora",
    "--recompute-granularity full --fp8-format hybrid": "--recompute full --precision fp8",
    "--use_gradient_checkpointing unsloth": "--recompute full --framework unsloth", "--stage3": "--zero 3",
    "--bnb_4bit_use_double_quant False --qlora": "--base nf4-single --qlora", "--transformer-impl transformer_engine": "",
    "--nproc_per_node 8": "--gpus 8 --gpus-per-node 8", "--nnodes 2 --nproc-per-node=4": "--gpus 8 --gpus-per-node 4",
    "--nproc_per_node gpu -N 2": "--gpus 16", "--gres gpu:h100:8": "--gpu h100 --gpus 8", "--gres=gpu:4": "--gpus 4",
    "--nodes 4 --gres gpu:a100:8": "--gpus 32 --gpu a100 --gpus-per-node 8",
    "--nodes 2 p5.48xlarge": "--gpus 16 --gpu h100-sxm5-80gb --gpus-per-node 8",
    "--partition_activations": "--recompute full:partitioned", "--cpu_checkpointing true": "--activation-offload checkpoints",
    "--gpu 4xl40s --nnodes 2": "--gpus 8 --gpu l40s --gpus-per-node 4",
    "--gpus a100:8": "--gpu a100 --gpus 8", "--mem 512G": "--host-memory 512GB", "--fsdp_sharding_strategy FULL_SHARD": "--zero 3",
    "--fsdp_sharding_strategy SHARD_GRAD_OP": "--zero 2", "--fsdp_offload_params true": "--offload all",
    "--fsdp_reshard_after_forward false": "--zero 2", "--contiguous_gradients true": "",
    "--dynamo_backend inductor": "--torch-compile",
    "--per_device_eval_batch_size 8": "--eval-batch 8", "--precompute_ref_log_probs": "--reference precomputed",
    "--task generate --enforce-eager --max-num-batched-tokens 512":
        "--task generate --server vllm:graphs=0,max_num_batched_tokens=512",
    "--task generate --server sglang --chunked-prefill-size 4096": "--task generate --server sglang:chunked_prefill_size=4096",
    "--task generate --context-length 8k": "--task generate --context 8k",
    "--task generate --block-size 16 --disable-radix-cache --served-model-name x --page-size=64": "--task generate",
    "--task generate --cuda-graph-max-bs 64": "--task generate --server vllm:cuda_graph_max_bs=64",
    "--block-size 512": "--seq-len 512",
    "--seq-len 4,096": "--seq-len 4096", "—gpu ４０９０ –gpus 2": "--gpu 4090 --gpus 2", "--zero‑stage 2": "--zero 2",
    "--price 2,50 --tokens '1 000 000'": "--price 2.50 --tokens 1000000", "--tokens 1,000,000,000": "--tokens 1000000000",
    "--pure_bf16": "--precision bf16-pure", "--dtype None": "", "--per-gpu-batch 2": "--micro-batch 2",
    "--cut_cross_entropy": "--loss chunked",
    "--grpo --actor_rollout_ref.rollout.gpu_memory_utilization 0.5": "--task grpo --rollout vllm:gpu_memory_utilization=0.5",
    "--task dpo --loss_type sigmoid --val_set_size 0.1 --dataset.packed true": "--task dpo",
    "--use_liger_loss --lora --lora_dropout 0": "--loss fused --adapter lora", "--packing true": "", "--devices 8": "--gpus 8",
    "--strategy deepspeed_stage_3_offload": "--zero 3 --offload all", "--accumulate_grad_batches 4": "--global-batch 4",
    "--compile true": "--compile", "--qlora false": "--no-qlora", "--sp 2": "--cp 2",
    "--ulysses_sequence_parallel_size 2": "--cp 2",
    "--training.seq_len 8192 --training.local_batch_size 2": "--seq-len 8192 --micro-batch 2",
    "--parallelism.tensor_parallel_degree 2": "--tp 2", "--task grpo --data.max_response_length 2048": "--task grpo --answers 2048",
    "--optimizer_in_bwd": "--optimizer adamw:in-backward", "--enable_activation_offloading": "--activation-offload all",
    "--grpo --vllm_gpu_memory_utilization 0.3": "--task grpo --rollout vllm:gpu_memory_utilization=0.3",
    "--total_batch_size 64 --max_len 2048": "--global-batch 64 --seq-len 2048", "--ulysses 4": "--cp 4",
    "--ring-attention 2": "--cp 2",
    "--load_in_8bit": "--qlora --base int8", "--activation_offloading": "--activation-offload all", "--a100": "--gpu a100",
    "--lora --lora_target_modules q_proj v_proj": "--adapter lora --lora-targets q_proj,v_proj", "--bf16 auto": "--precision bf16",
    "--bnb_4bit_quant_type fp4": "--qlora --base fp4", "--activation_checkpoint.mode selective": "--recompute per-op",
    "--num_train_epochs 3 --task grpo --epsilon 0.2 --swiglu": "--task grpo", "--overlap-grad-reduce": "",
    "--task ppo --adam_offload --prompt_max_len 512 --generate_max_len 1024 --rollout_batch_size 64":
        "--task ppo --offload optimizer --prompt-len 512 --answers 1024 --prompts 64",
    "--task generate --enable-prefix-caching": "--task generate",
    "--task grpo --vllm_tensor_parallel_size 2": "--task grpo --rollout vllm:tensor_parallel_size=2",
    "--tp8 --pp2": "--tp 8 --pp 2", "--layout tp8pp2": "--tp 8 --pp 2", "--sweep tp=2": "--sweep=tp=2",
    "--galore": "--optimizer galore", "--dualpipe --pp 2": "--schedule dualpipe --pp 2", "--float8": "--precision fp8",
    "--offload-experts --task generate": "--offload experts --task generate", "--batch 4": "--micro-batch 4",
    "-c 8k": "--seq-len 8192",
    "--lora r=16": "--lora-rank 16", "--gpu '4 nodes of 8 h100'": "--gpu h100 --gpus 32 --gpus-per-node 8",
    "--global-batch 64k tokens --seq-len 1024": "--global-batch 64 --seq-len 1024", "--ib 400g": "--nic-bandwidth 400g",
    "--tokens-per-step 64k --seq-len 1024 --gpus 8": "--global-batch 64 --seq-len 1024 --gpus 8",
    "--quant q4_k_m --num_ctx 8192": "--task generate --weight-format q4_k_m --context 8192",
    "--serve --input-len 500 --output-len 100": "--task generate --context 600 --answer 100",
    "--serve --engine sglang --mem-fraction-static 0.8": "--task generate --server sglang:mem_fraction_static=0.8",
    "--trainer.num_nodes 2 --trainer.devices 4": "--gpus 8 --gpus-per-node 4", "--gpu 24gb": "--memory 24GB",
    "--zero_optimization.stage 3 --zero_optimization.offload_optimizer.device cpu": "--zero 3 --offload optimizer",
    "--recompute-granularity selective --recompute-modules core_attn mlp": "--recompute modules:core_attn,mlp",
    "--gpus 64 --data_parallel_shard_degree 8 --data_parallel_replicate_degree 8": "--gpus 64 --zero 3 --replicas 8",
    "--cp-comm-type a2a --cp 2": "--cp-comm all_to_all --cp 2",
    "--prefill 500 --decode 100": "--task generate --context 600 --answer 100",
    "algorithm.adv_estimator=grpo data.train_batch_size=128 actor_rollout_ref.rollout.n=4": "--task grpo --prompts 128 --samples 4",
    "--task grpo --use_kl_loss false": "--task grpo --reference none",
    # names by their parts
    "--gpuType h100 --numGpus 8": "--gpu h100 --gpus 8", "--maxSeqLen 2k --microBatchSize=3": "--seq-len 2048 --micro-batch 3",
    "--batch_size_per_gpu 2 --n_gpu 4": "--micro-batch 2 --gpus 4", "--use_qlora": "--qlora", "--opt sgd": "--optimizer sgd",
    "--no-gradient-checkpointing": "--recompute none", "--accum 4": "--global-batch 4", "--grad-clip 1 --wd 0.1": "",
    "--rate '$3.5/hour' --tokens 1B": "--price 3.5 --tokens 1B", "--hourly-cost 2.5/hr --tokens 1B": "--price 2.5 --tokens 1B",
    # values in any spelling
    "--optimizer Muon": "--optimizer muon", "--optimizer 8bit-adam": "--optimizer adamw-8bit", "--framework TRL": "--framework trl",
    "--attn FlashAttention2": "--attention fa2", "--deadline 3weeks --tokens 1B": "--days 21 --tokens 1B",
    "--deepspeed ds_z3_offload_config.json": "--zero 3 --offload all",
    "--gpu '2x dgx h100'": "--gpu h100-sxm5-80gb --gpus 16 --gpus-per-node 8",
    "--gpus 16 p5.48xlarge": "--gpus 16 --gpu h100-sxm5-80gb",
    "--data_parallel_shard_degree 8 --gpus 16": "--zero 3 --replicas 2 --gpus 16", "--gpu '2 x 80gb'": "--memory 80GB --gpus 2",
    # sentences
    "on 2 4090 with lora": "--gpu 4090 --gpus 2 --adapter lora", "64 nodes of 8 h100": "--gpu h100 --gpus 512 --gpus-per-node 8",
    "8 a100 80gb": "--gpu 'a100 80gb' --gpus 8", "two h100s": "--gpu h100 --gpus 2",
    "h100 64 8k": "--gpu h100 --gpus 64 --seq-len 8192",
    "lora r=16 seq 2048 bs 2 ga 8 4090":
        "--adapter lora --lora-rank 16 --seq-len 2048 --micro-batch 2 --global-batch 16 --gpu 4090",
    "batch size of 4, sequence length of 512": "--micro-batch 4 --seq-len 512", "gpus=8 gpu=h100": "--gpus 8 --gpu h100",
    "bs=4,seq=2k": "--micro-batch 4 --seq-len 2048", "8-bit adam 4090": "--optimizer adamw-8bit --gpu 4090",
    "1T tokens at $2 per hour on h100": "--tokens 1T --price 2 --gpu h100", "lora 4090": "--adapter lora --gpu 4090",
    "h100 100 users 8k context": "--gpu h100 --task generate --batch 100 --context 8192",
    "without gradient checkpointing": "--recompute none", "deepspeed zero3": "--zero 3",
    "--gradient-checkpointing selective": "--recompute selective", "--fsdp-offload": "--offload all",
    "--use-flash-attention-3": "--attention fa3", "--no-flash-attn": "--attention eager", "--bnb-4bit": "--qlora",
    "--disable-flash-attn": "--attention eager",
    "--tokens-per-sample 2048": "--seq-len 2048", "--hourly-rate 2.99 --tokens 1B": "--price 2.99 --tokens 1B",
}  # fmt: skip
"""Words of other tools, and the flags here."""


@pytest.mark.parametrize("line", SAID)
def test_what_people_type_is_taken(line: str) -> None:
    assert params(estimate, f"gpt2 {line}") == params(estimate, f"gpt2 {SAID[line]}")


def test_a_whole_line_in_quotes_is_taken_apart() -> None:
    found = typed(["estimate", "gpt2 --gpu h100 --gpus 8", "--zero", "3", "--json"])
    assert found.out == typed("estimate gpt2 --gpu h100 --gpus 8 --zero 3 --json").out


def test_what_was_taken_is_said_on_one_line_and_only_there() -> None:
    found = typed("estimate gpt2 --gpu 8xh100 --fsdp --json")
    assert found.err == "loadgauge: taken: --gpu 8xh100 as --gpu h100 --gpus 8; --fsdp as --zero 3\n"
    assert found.out == typed("estimate gpt2 --gpu h100 --gpus 8 --zero 3 --json").out
    assert not typed("estimate gpt2 --gpu h100").err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--int8", "--base"), ("--moe-grouped-gemm", "--version"), ("--gpus 8 --dp 3", "--gpus 3"), ("--dp many", "--dp"),
        ("--gpu-memory-utilization 0.9", "--server"), ("-ngl 20", "--offload experts"), ("--label_smoothing_factor 0.1", "in trl"),
        ("--decoder-first-pipeline-num-layers 5 --pp 3", "in megatron"), ("--dataset_size 10000", "--tokens"),
        ("--actor_num_gpus_per_node 4 --task ppo", "--placement"), ("--hsdp", "--replicas"), ("--throughput 100", "--max-tpot"),
        ("--fsdp_sharding_strategy FOO", "FULL_SHARD"), ("--zero_quantized_weights true", "in deepspeed"),
        ("--steps_per_generation 4", "--prompts"), ("--ttft 1s --task generate", "`loadgauge plan` has it"),
        ("--mciro-batch 4", "no such option --mciro-batch; did you mean --micro-batch?"),
        ("--task generate --max-prefill-tokens 4096", "--prefill-tokens"),
        ("--server sglang --task generate --enable-dp-attention", "--ep"), ("--overhead 2GiB", "--margin GiB"),
        ("--requests 20", "`loadgauge plan` has it"), ("--deepspeed none-such.json", "no such file"),
        ("--busbw 340GB/s", "`loadgauge network`"), ("--gpu 8xh100 --gpus 4", "--gpus 8"), ("--gpu-count 4 --gpus 8", "--gpus 4"),
        ("--dtype int8", "--base"), ("--nvlink --gpus 8", "--link-bandwidth"),
        ("--model-parallel 2", "--pp"), ("4090 nonsense", "nonsense"), ("not nonsense", "not"), ("cpu offload", "--offload"),
        ("--gpu blackwell", "b200"), ("--dp_shard 8 --gpus 12", "--gpus 8"),
    ],
)  # fmt: skip
def test_where_no_one_flag_says_it_the_right_one_is_named(line: str, named: str) -> None:
    found = typed(f"estimate gpt2 {line}")
    assert found.code == 2
    assert named in found.err


def test_flags_of_engines_are_no_flags_here_and_each_is_in_one_list() -> None:
    table = read_table("engine_flags.toml")
    own = {name.removeprefix("--") for option in estimate.params for name in (*option.opts, *option.secondary_opts)}
    lists = [table["nothing"].split(), table["switches"].split(), list(table["small"]), list(table["instead"])]
    every = [name for names in lists for name in names]
    assert len(every) == len(set(every))
    assert not set(every) & own
    assert not set(every) & set(Engine.__struct_fields__)


def test_a_model_may_stand_in_a_flag() -> None:
    for line in ("--model gpt2 --gpu h100", "--gpu h100 --model gpt2", "--gpu h100 --model-name gpt2"):
        assert typed(f"estimate {line} --json").out == typed("estimate gpt2 --gpu h100 --json").out
    assert typed("estimate gpt2 medium").code == 2


def test_no_word_of_another_tool_is_a_flag_here_and_each_is_one_of_a_command() -> None:
    own = {
        name for each in (estimate, plan) for option in each.params for name in (*option.opts, *option.secondary_opts)
    }
    told = {**spoken.RENAMED, **{name: words[0].split()[0] for name, words in spoken.SWITCHES.items() if words[0]}}
    assert not {f"--{name}" for name in (*told, *spoken.ASKED, *spoken.HARMLESS)} & own
    assert set(told.values()) <= own
    words = {flag: one for flag, words in spoken.WORDED.items() for one in words.values()} | spoken.NUMBERED
    assert {each for one in words.values() for each in one.split() if each.startswith("--")} <= own
    assert not {f"--{name}" for name in (*spoken.WORDED, *spoken.MODEL, *spoken.NUMBERED)} & own
    fields = {option.name for each in (estimate, plan) for option in each.params}
    assert {*spoken.VALUES, *spoken.LENGTHS, *(name for name, _, _ in spoken.PATTERNS)} <= fields


@pytest.mark.parametrize(
    ("trainer", "config"),
    [
        ("axolotl", "base_model: Qwen/Qwen3-8B\nbf16: true\nadapter: qlora\nload_in_4bit: true\nsequence_len: 2048\n"
         "micro_batch_size: 1\ngradient_accumulation_steps: 1\nlora_r: 16\nlora_target_linear: true\n"),
        ("llamafactory", "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\ndo_train: true\nbf16: true\nfinetuning_type: lora\n"
         "quantization_bit: 4\nquantization_method: bnb\ncutoff_len: 2048\nper_device_train_batch_size: 1\nlora_rank: 16\n"
         "lora_target: all\n"),
    ],
)  # fmt: skip
def test_a_trainer_as_a_framework_is_an_empty_file_of_its_own(trainer: str, config: str, tmp_path: Path) -> None:
    """What is said is said in both, and all else is the trainer's default in both."""
    path = tmp_path / "job.yaml"
    path.write_text(config)
    file = document(f"estimate {shlex.quote(str(path))} --gpu 4090 --gpus 1")
    found = typed(f"estimate qwen3-8b --gpu 4090 --framework {trainer} --qlora --seq-len 2048 --lora-rank 16 --json")
    assert json.loads(found.out)["memory"]["parts"] == file["memory"]["parts"]
    assert found.err.startswith(f"loadgauge: taken: --framework {trainer} as ")
    assert "--framework huggingface" in found.err
    assert typed(f"plan qwen3-8b --gpu 4090 --gpus 1 --framework {trainer} --qlora --json").code in (0, 1)


ERROR = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def test_a_model_a_file_and_an_error_need_no_command(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("base_model: gpt2\nmicro_batch_size: 1\nnote: CUDA out of memory\n")
    (tmp_path / "run.log").write_text(f"step 3\n{ERROR}\n")
    (tmp_path / "snapshot").write_bytes(b"\x80\x04")
    for words, verb in (
        (["qwen3-8b", "--gpu", "4090"], "estimate"), (["gpt:1B"], "estimate"), (["--gpu", "4090", "qwen3-8b"], "estimate"),
        (["no-such-model", "--gpu", "4090"], "estimate"), ([str(tmp_path / "job.yaml")], "estimate"),
        ([str(tmp_path / "run.log")], "why"), ([str(tmp_path / "snapshot")], "why"), ([ERROR], "why"),
    ):  # fmt: skip
        assert with_verb(words) == [verb, *words]
    for words in (["estimat", "gpt2"], ["plna"], ["nonsense"], ["--help"], ["estimate"], []):
        assert with_verb(words) == words
    assert with_verb(["fit", "gpt2"]) == ["estimate", "gpt2"]
    assert not set(VERBS) & set(COMMANDS)
    assert set(VERBS.values()) <= set(COMMANDS)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("can i train llama 3.1 8b on a 4090?", "estimate llama-3.1-8b --gpu 4090"),
        ("best layout for gpt2 on 8 h100", "plan gpt2 --gpu h100 --gpus 8"),
        ("serve gpt2 --max-model-len 512 --gpu l4", "estimate gpt2 --task generate --context 512 --gpu l4"),
        ("vllm gpt2 l4", "estimate gpt2 --server vllm --task generate --gpu l4"),
        ("grpo qwen3-0.6b --num_generations 4 --gpu l4", "estimate qwen3-0.6b --task grpo --samples 4 --gpu l4"),
        ("help gpt2", "estimate gpt2"), ("cost gpt2 1B tokens l4", "estimate gpt2 --tokens 1B --gpu l4"),
        ("explain tensor parallel", "equation traffic"), ("how many h100 for gpt2", "plan gpt2 --gpu h100 --find gpus"),
    ],
)  # fmt: skip
def test_a_sentence_is_the_command_that_it_means(line: str, meant: str) -> None:
    said, plain = typed(f"{line} --json"), typed(f"{meant} --json")
    assert said.code == plain.code
    assert plain.out
    texts = [re.sub(r'"seconds": [^,}]*', "", each.out) for each in (said, plain)]  # that the search took
    assert texts[0] == texts[1]


def test_a_price_without_a_length_leaves_the_answer_and_says_what_it_needs() -> None:
    found = typed("estimate gpt2 --gpu l4 --price 2 --json")
    assert found.out == typed("estimate gpt2 --gpu l4 --json").out
    assert "--tokens" in found.err


def test_a_file_that_is_not_there_is_said_to_be_no_file() -> None:
    for line in ("estimate none.yaml", "lint none.yaml"):
        assert "no such file" in typed(line).err, line
    assert "neither a file nor an out-of-memory error" in typed("why none.txt").err
    assert typed("check none.yaml").err.count("none.yaml") == 1


def test_a_script_that_is_not_there_is_said_to_be_no_file() -> None:
    pytest.importorskip("torch")
    for line in ("trace none.py", "capture none.py:model"):
        assert "no such file" in typed(line).err, line


def test_why_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(ERROR))
    piped = typed("why")
    assert (piped.out, piped.code) == (typed(["why", ERROR]).out, 0)
    assert piped.out


class Terminal(io.StringIO):
    """A stream that is one."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_brief_and_a_pipe_all() -> None:
    line = ["estimate", "gpt2", "--gpu", "l4", "--tokens", "1B", "--price", "2"]
    with contextlib.redirect_stdout(Terminal()) as terminal:
        run(line)
    with contextlib.redirect_stdout(Terminal()) as full:
        run([*line, "--full"])
    brief, whole = typed([*line, "--brief"]).out, typed(line).out
    assert re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).split() == brief.split()
    assert len(full.getvalue().splitlines()) > 40
    assert len(whole.splitlines()) > 40
    assert len(brief.splitlines()) <= 12
    hours = 1e9 / document(" ".join(line))["time"]["tokens_per_second_per_gpu"] / 3600
    told = re.search(r"The run: .*, ([\d,]+) GPU-hours, ([\d,]+) at 2 per GPU-hour", brief)
    assert told is not None
    assert [int(text.replace(",", "")) for text in told.groups()] == pytest.approx([hours, 2 * hours], abs=1)


def test_the_remedy_is_in_the_words_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pasted into the file, it is the remedy: the same memory as the flags that were named."""
    monkeypatch.chdir(tmp_path)  # so that no line breaks in its name
    path = Path("job.yaml")
    path.write_text(
        "base_model: Qwen/Qwen3-8B\nbf16: true\nadapter: lora\nsequence_len: 4096\nmicro_batch_size: 4\n"
        "gradient_accumulation_steps: 1\nlora_r: 16\nlora_target_linear: true\n"
    )
    said = typed(["estimate", str(path), "--gpu", "h100", "--gpus", "1", "--brief"]).out
    flags = said.partition("\nTry ")[2].partition(":")[0]
    pieces = " ".join(said.partition(f"In {path}: ")[2].split()).split("; ")
    with_flags = document(f"estimate {shlex.quote(str(path))} --gpu h100 --gpus 1 {flags}")
    changed = {piece.partition(":")[0] for piece in pieces}
    kept = [line for line in path.read_text().splitlines() if line.partition(":")[0] not in changed]
    path.write_text("\n".join([*kept, *pieces]) + "\n")
    there = document(f"estimate {shlex.quote(str(path))} --gpu h100 --gpus 1")
    assert there["memory"]["total"] == pytest.approx(
        with_flags["memory"]["total"], rel=0.01
    )  # axolotl's own number of pieces


def test_no_name_of_a_card_is_read_as_several() -> None:
    for name in gpu_ids():
        assert params(estimate, f"gpt2 --gpu {name}")["gpu"] == name


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--dataset 10BT", "--tokens 10B"),
        ("--data 1T", "--tokens 1T"),
        ("--limit 24GB", "--memory 24GB"),
    ],
)
def test_an_amount_after_what_changes_nothing_is_not_read_over(words: str, says: str) -> None:
    said = typed(f"estimate llama-3.1-8b --gpu h100 {words}")
    assert said.code == 2
    assert says in said.err


@pytest.mark.parametrize("words", ["--recompute", "--checkpointing", "--recompute --zero 0"])
def test_a_flag_that_is_typed_as_a_switch_is_switched_on(words: str) -> None:
    full = words.replace("--checkpointing", "--recompute").replace("--recompute", "--recompute full")
    bare, said = (typed(f"estimate llama-3.1-8b --gpu h100 {flags}") for flags in (words, full))
    assert "as --recompute full" in bare.err
    assert bare.out == said.out
