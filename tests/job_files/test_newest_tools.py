"""The newest dialects: what their tools' own classes make of a file that says little, and of one that says most."""

from __future__ import annotations

import pytest

from loadgauge.job_files.exchange import read

AREAL = """experiment_name: a
trial_name: b
cluster: {n_gpus_per_node: 8}
actor:
  path: Qwen/Qwen3-8B
  gradient_checkpointing: true
  mb_spec: {max_tokens_per_mb: 8192}
train_dataset: {batch_size: 128, max_length: 2048, path: x, type: sft}
"""
AREAL_RL = """actor:
  path: Qwen/Qwen3-30B-A3B
  kl_ctl: 0.1
  megatron: {recompute_granularity: selective}
ref: {path: "${actor.path}"}
gconfig: {n_samples: 4, max_new_tokens: 2048}
train_dataset: {batch_size: 64, max_length: 1024}
"""
SEPARATE = "rollout: {backend: 'sglang:d4t2', max_head_offpolicyness: 2}\n"

PRIMUS = """work_group: ${TEAM:amd}
exp_name: x
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${MODEL:llama3.1_8B}.yaml
    overrides:
      seq_length: ${LENGTH:8192}
      tensor_model_parallel_size: 2
      recompute_granularity: full
      recompute_method: block
      recompute_num_layers: 4
"""
TITAN = """work_group: amd
modules:
  pre_trainer:
    framework: torchtitan
    config: pre_trainer.yaml
    model: llama3.1_70B-fp8.yaml
    overrides: {activation_checkpoint: {mode: full}, parallelism: {tensor_parallel_degree: 8}}
"""

OLMO = """from olmo_core.config import DType
LENGTH = 8192
def build(common):
    model = TransformerConfig.olmo3_7B(vocab_size=common.tokenizer.padded_vocab_size())
    loader = NumpyDataLoaderConfig(global_batch_size=4 * 1024 * 1024, seed=1)
    return TransformerTrainModuleConfig(
        rank_microbatch_size=2 * LENGTH, max_sequence_length=LENGTH, optim=LionConfig(lr=1e-4), compile_model=True,
        dp_config=TransformerDataParallelConfig(name=DataParallelType.hsdp, param_dtype=DType.bfloat16, shard_degree=32),
        ac_config=TransformerActivationCheckpointingConfig(
            mode=TransformerActivationCheckpointingMode.selected_blocks, block_interval=2),
        cp_config=TransformerContextParallelConfig.ulysses(degree=2),
    )
"""

XTUNER = """from xtuner.v1.config import FSDPConfig
trainer = TrainerConfig(load_from="Qwen/Qwen3-8B", fsdp_cfg=FSDPConfig(torch_compile=False, recompute_ratio=0), sp_size=2,
    dataloader_cfg=DataloaderConfig(pack_max_length=16 * 1024), loss_cfg=CELossConfig(mode="chunk"), global_batch_size=16)
"""
OLDER = """from xtuner.engine.runner import TrainLoop
pretrained_model_name_or_path = 'internlm/internlm2-chat-7b'
max_length, batch_size, accumulative_counts = 2048, 2, 16
model = dict(
    type=SupervisedFinetune,
    llm=dict(type=AutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path=pretrained_model_name_or_path,
             torch_dtype=torch.float16, quantization_config=dict(type=BitsAndBytesConfig, load_in_4bit=True)),
    lora=dict(type=LoraConfig, r=64, lora_alpha=16))
optim_wrapper = dict(type=AmpOptimWrapper, optimizer=dict(type=AdamW, lr=2e-4), dtype='float16')
"""
LINE = "torchrun --nproc_per_node 8 xtuner/v1/train/cli/sft.py --load-from Qwen/Qwen3-8B --chat-template qwen3 --dataset a.jsonl"


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("a.yaml", AREAL.replace("actor:", "actor:\n  backend: fsdp:d4c2"),
         {"framework": "huggingface", "gpus": 8, "cp": 2, "zero": 3, "precision": "bf16", "recompute": "full",
          "micro_batch": 4, "global_batch": 128, "seq_len": 2048, "optimizer": "adamw", "attention": "fa2",
          "cp_comm": "all_to_all"}),
        ("a.yaml", AREAL + "allocation_mode: megatron:d4t2p2\n",
         {"framework": "megatron", "gpus": 16, "tp": 2, "pp": 2, "zero": 1, "precision": "bf16", "sequence_parallel": True}),
        ("a.yaml", AREAL.replace("actor:", "actor:\n  backend: archon:d8\n  use_lora: true"),
         {"framework": "torchtitan", "recompute": "per-op", "lora_rank": 32, "lora_targets": "all"}),
        ("a.yaml", AREAL_RL.replace("actor:", "actor:\n  backend: megatron:(attn:d4t2|ffn:e8t1)") + SEPARATE,
         {"task": "grpo", "gpus": 16, "placement": "split:8+8", "tp": 2, "ep": 8, "etp": 1, "staleness": 2, "reference": "model",
          "prompts": 64, "samples": 4, "global_batch": 64, "prompt_len": 1024, "answers": "2048", "recompute": "none",
          "model": "Qwen/Qwen3-30B-A3B", "old_logprobs": "none",
          "rollout": "sglang:tp=2,static_fraction=0.9,context=32768,prefix=false,partial=true,inflight=256"}),
        ("a.yaml", AREAL_RL + "allocation_mode: vllm:d8|fsdp:d8\n",
         {"gpus": 8, "placement": None, "rollout": "vllm:context=32768,prefix=false"}),
        # What its presets say: primus/configs/modules/*/{trainer_base,pre_trainer,sft_trainer}.yaml.
        ("a.yaml", PRIMUS, {"framework": "megatron", "model": "llama3.1-8B", "seq_len": 8192, "micro_batch": 2,
                            "global_batch": 16,
                            "zero": 1, "precision": "bf16", "tp": 2, "recompute": "full:layers=4"}),
        ("a.yaml", PRIMUS.replace("pre_trainer", "post_trainer").replace("config: post_", "config: sft_")
         .replace("seq_length", "lr"),
         {"micro_batch": 1, "global_batch": 128, "seq_len": 2048, "zero": 1}),
        ("a.yaml", PRIMUS + "      lora: {enabled: true, dim: 16}\n", {"lora_rank": 16, "lora_targets": "all"}),
        ("a.yaml", TITAN, {"framework": "torchtitan", "model": "llama3.1-70B", "tp": 8, "seq_len": 2048, "micro_batch": 8,
                           "recompute": "full", "compile": True, "precision": "bf16"}),
        ("a.py", OLMO, {"model": "olmo-3-7b", "seq_len": 8192, "micro_batch": 2, "global_batch": 512, "zero": 3,
                        "precision": "bf16", "recompute": "full:every=2", "cp": 2, "cp_comm": "all_to_all", "optimizer": "lion",
                        "compile": True}),
        ("a.py", OLMO.replace("hsdp", "ddp"), {"zero": 0}),
        ("a.py", XTUNER, {"model": "Qwen/Qwen3-8B", "seq_len": 16384, "global_batch": 16, "micro_batch": 1, "cp": 2, "zero": 3,
                          "recompute": "none", "loss": "chunked", "compile": False, "precision": "bf16",
                          "framework": "torchtitan"}),
        ("a.py", OLDER, {"model": "internlm/internlm2-chat-7b", "seq_len": 2048, "micro_batch": 2, "lora_rank": 64, "base": "nf4",
                         "precision": "fp16", "recompute": "full", "framework": "huggingface", "zero": 0}),
        ("a.sh", f"{LINE} --fsdp-config.ep-size 4 --optim Muon --pack-max-length 8192 --global-batch-size 32",
         {"gpus": 8, "seq_len": 8192, "ep": 4, "optimizer": "muon", "global_batch": 32, "loss": "chunked", "compile": True}),
        ("a.sh", LINE, {"seq_len": 4096, "recompute": "full", "optimizer": "adamw"}),
    ],
)  # fmt: skip
def test_files_of_the_newest_tools(name: str, text: str, facts: dict[str, object]) -> None:
    file = read(text, file=name, alone=True)
    assert {fact: getattr(file.job, fact) for fact in facts} == facts
    assert not [item for item in file.uncounted if "not known here" in item.note]
