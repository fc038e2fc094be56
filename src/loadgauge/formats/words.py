"""Words that several tools share: optimizers, attention, linear layers."""

from __future__ import annotations

TORCH_OPTIMIZERS = {
    "adamw_torch_fused": "adamw", "adamw_torch": "adamw", "adamw_hf": "adamw", "adamw_anyprecision": "adamw",
    "paged_adamw_32bit": "adamw", "paged_adamw": "adamw", "adamw_apex_fused": "adamw", "adamw_torch_xla": "adamw",
    "adamw_bnb_8bit": "adamw-8bit", "adamw_8bit": "adamw-8bit", "paged_adamw_8bit": "adamw-8bit",
    "adamw_torch_8bit": "adamw-8bit", "adafactor": "adafactor", "lion_32bit": "lion", "paged_lion_32bit": "lion",
    "sgd": "sgd",
}  # fmt: skip
"""`TrainingArguments.optim`. Paged optimizers move to the host only when memory runs out."""

ATTENTION = {
    "flash_attention_2": "flash", "sdpa": "flash", "flash_attention_3": "flash", "flex_attention": "flash",
    "flash_attention": "flash", "kernels-community/flash-attn": "flash", "kernels-community/flash-attn2": "flash",
    "kernels-community/flash-attn3": "flash", "kernels-community/vllm-flash-attn3": "flash", "eager": "eager",
}  # fmt: skip
"""`attn_implementation` of transformers."""

SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
SHARDING |= {str(number): stage for number, stage in enumerate(list(SHARDING.values()), 1)}
"""FSDP1's strategies, by name and by number, as ZeRO stages."""

CPU, NOWHERE = ("cpu", "nvme"), ("none",)
