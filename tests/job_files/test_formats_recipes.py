"""torchtune's recipes and LitGPT's configurations: what their own code makes of the keys."""

from __future__ import annotations

from typing import Any

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.job_files.exchange import read

TUNE = """model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj]
  lora_rank: 16
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 2048
batch_size: 2
gradient_accumulation_steps: 4
optimizer:
  _component_: torch.optim.AdamW
  fused: True
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
dtype: bf16
"""
FULL = TUNE.replace("lora_llama3_1_8b\n  lora_attn_modules: [q_proj, v_proj]\n  lora_rank: 16", "llama3_1_8b")
LIT = """checkpoint_dir: checkpoints/meta-llama/Llama-3.1-8B
precision: bf16-true
lora_r: 8
train:
  global_batch_size: 16
  micro_batch_size: 2
  max_seq_length: 512
"""
PRETRAIN = """model_name: pythia-160m
precision: bf16-mixed
devices: 8
num_nodes: 2
data: TinyStories
train:
  max_seq_length: 2048
"""
OWN = """model_name: mine
model_config:
  n_layer: 4
  n_embd: 256
  n_head: 8
  n_query_groups: 2
  head_size: 32
  intermediate_size: 1024
  padded_vocab_size: 32000
  block_size: 1024
  mlp_class_name: LLaMAMLP
  norm_class_name: RMSNorm
train:
  micro_batch_size: 8
"""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (FULL.replace("llama3_1.llama3_1_8b", "qwen3.qwen3_0_6b_instruct"), {"model": "qwen3-0.6b", "lora_rank": 0}),
        (FULL.replace("llama3_1.llama3_1_8b", "smol.smollm2_1_7b"), {"model": "smollm2-1.7b"}),
        (TUNE.replace("TuneLoss", "").replace("torchtune.modules.loss.LinearCrossEntropyLoss", "torchtune.rlhf.loss.DPOLoss"),
         {"task": "dpo", "loss": "float32:1"}),  # of both answers' logits at once
        (TUNE + "teacher_model:\n  _component_: torchtune.models.llama3_1.llama3_1_70b\n"
         "kd_loss:\n  _component_: torchtune.modules.loss.ReverseKLLoss\n",
         {"task": "gkd", "teacher": "llama-3.1-70b", "loss_terms": "reverse-kl"}),
        (FULL + "enable_fp8_training: true\n", {"precision": "fp8-tensorwise"}),
        (FULL + "enable_fp8_training: true\nfp8_recipe_name: rowwise\n", {"precision": "fp8-rowwise"}),
        (FULL + "data_parallel_shard_dim: 4\ndata_parallel_replicate_dim: 2\n", {"replicas": 2, "gpus": 8}),
        (FULL + "data_parallel_shard_dim: -1\ndata_parallel_replicate_dim: 1\n", {"replicas": None, "gpus": None}),
        (FULL + "context_parallel_dim: 2\n", {"cp": 2}),
        (FULL + "compile:\n  model: true\n  loss: false\n", {"compile": True}),
        (FULL.replace("llama3_1.llama3_1_8b", "llama4.llama4_scout_17b_16e") + "tensor_parallel_dim: 2\n"
         "tensor_parallel_plan:\n  _component_: torchtune.models.llama4.decoder_only_tp_plan\n",
         {"model": "llama-4-scout", "tp": 2, "sequence_parallel": True}),
        # LitGPT
        (LIT, {"optimizer": "adamw", "lora_targets": "q_proj,v_proj", "lora_dropout": 0.05}),
        (LIT + "quantize: bnb.nf4\n", {"optimizer": "paged-adamw-32bit", "base": "nf4-single"}),
        (PRETRAIN, {"model": "pythia-160m", "gpus": 16, "replicas": 2, "zero": 3, "recompute": "none", "compile": True,
                    "micro_batch": 4, "global_batch": 512, "optimizer": "adamw-fused", "precision": "bf16-autocast"}),
        (OWN, {"model": "llama:layers=4,hidden=256,heads=8,kv-heads=2,ffn=1024,vocab=32000,positions=1024"}),
    ],
)  # fmt: skip
def test_what_the_keys_mean(text: str, wanted: dict[str, Any]) -> None:
    job = read(text, file="a.yaml").job
    assert {name: getattr(job, name) for name in wanted} == wanted


HEAD = {TUNE: TUNE.replace("  lora_rank", "  apply_lora_to_output: true\n  lora_rank"), LIT: LIT + "lora_head: true\n"}


@pytest.mark.parametrize(("text", "with_head"), HEAD.items())
def test_adapters_of_the_head_are_counted(text: str, with_head: str) -> None:
    """Two matrices more, whose logits are made a piece at a time (litgpt, `LoRALinear`; torchtune, `LinearCrossEntropyLoss`)."""
    jobs = [read(each, file="a.yaml").job.replace(gpus=1, zero=None) for each in (text, with_head)]
    assert jobs[1].lora_targets == f"{jobs[0].lora_targets},lm_head"
    setup = resolve_job(jobs[0])
    without, more = (resolve_job(job).estimate().memory for job in jobs)
    head = resolve_job(jobs[1]).estimate().workings.memory.head
    (made,) = (each.outputs[0].numel for each in head if each.name == "head.logits.lora_b")
    assert made == next(each.outputs[0].numel for each in head if each.name == "head.logits")
    beside = (jobs[0].lora_rank or 0) * (setup.model.hidden_size + setup.model.vocab_size)
    assert more.parts["weights"] - without.parts["weights"] == pytest.approx(2 * beside, rel=1e-6)
    logits = 2 * setup.layout.micro_batch * setup.layout.seq_len * setup.model.vocab_size
    assert 0 < more.parts["loss"] - without.parts["loss"] < logits / 2


@pytest.mark.parametrize(
    ("text", "key", "effect"),
    [
        (TUNE.replace("  lora_rank", "  use_dora: true\n  lora_rank"), "model.use_dora", "costs"),
        (FULL + "quantizer:\n  _component_: torchtune.training.quantization.Int4WeightOnlyQATQuantizer\n",
         "quantizer._component_", "costs"),
        (FULL + "custom_sharded_layers: [decoder.tok_embeddings]\n", "custom_sharded_layers", "either"),
        (OWN.replace("head_size: 32", "head_size: 64"), "model_config.head_size", "either"),
        (OWN.replace("LLaMAMLP", "GptNeoxMLP"), "model_config.mlp_class_name", "either"),
    ],
)  # fmt: skip
def test_what_is_not_counted_is_named(text: str, key: str, effect: str) -> None:
    assert [(one.key, one.effect) for one in read(text, file="a.yaml").uncounted if one.key == key] == [(key, effect)]
    with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
        read(text, file="a.yaml", strict=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OWN.replace("LLaMAMLP", "LLaMAMoE"), "'LLaMAMoE' is not one that is read"),
        (FULL.replace("llama3_1_8b", "llama9_8b"), "'llama9_8b' is no language model that is read"),
        (
            FULL + "policy_model:\n  _component_: torchtune.models.mistral.mistral_7b\n",
            "trains other models beside the first",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(text, file="a.yaml")
