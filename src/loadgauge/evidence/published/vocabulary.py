"""What the text columns of published runs mean: each word is mapped once, here, or is said not to be mapped.

The tables hold every word of `hardware`, `precision`, `sharding`, `recompute` and `optimizer` that occurs in the files of
published runs. A word that is missing here makes a row inexpressible, with the word in the reason. An empty cell means
that the source does not say; what is assumed then is in `expression.py`.
"""

import re

UNNAMED = "-"
"""A word that is understood but names no card of the catalogue: memory can be predicted, time cannot."""

HARDWARE: dict[str, str] = {
    "24GB GPU": UNNAMED,
    "40GB GPU": UNNAMED,
    "80GB GPU": UNNAMED,
    "A100 (size and form not stated)": "a100-sxm4-80gb",
    "A100-40GB-SXM": "a100-sxm4-40gb",
    "A100-80GB": "a100-sxm4-80gb",
    "A100-80GB-SXM": "a100-sxm4-80gb",
    "A100-SXM (DGX A100 Selene; 40/80GB not stated)": "a100-sxm4-80gb",
    "A100-SXM (DGX A100; 40/80GB not stated)": "a100-sxm4-80gb",
    "A10G-24GB": "a10g",
    "A800-80GB": "a800-sxm4-80gb",
    "Ampere GPU (A100-class; model not named in table)": "a100-sxm4-80gb",
    "Ascend 910B (Atlas 900 A2 PODc)": "ascend-910b",
    "Ascend Atlas 900 A3 SuperPoD": "ascend-910c",
    "B200-SXM": "b200-sxm-180gb",
    "B200-SXM (power limited)": "b200-sxm-180gb",  # its limit is not stated: see `LIMITED`
    "B300-SXM": "b300-sxm-288gb",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "Gaudi2-96GB": "gaudi2",
    "H100-80GB-SXM": "h100-sxm5-80gb",
    "H100-80GB-SXM (Grand Teton)": "h100-sxm5-80gb",
    "H100-94GB": "h100-nvl-94gb",
    "H100-96GB-HBM2e (500W, Grand Teton)": "h100-sxm-96gb-500w",
    "H200-141GB-NVL": "h200-sxm-141gb",
    "H200-141GB-SXM": "h200-sxm-141gb",
    "H800-80GB-SXM": "h800-sxm5-80gb",
    "L40S-48GB": "l40s",
    "MI300X-192GB": "mi300x",
    "MI325X-256GB": "mi325x",
    "MI350X-288GB": "mi350x",
    "MI355X-288GB": "mi355x",
    "RTX-A6000-48GB": "rtxa6000",
    "RTX3090-24GB (PCIe)": "rtx3090",
    "RTX4090-24GB": "rtx4090",
    "TPU-v3-256 (cores)": UNNAMED,
    "TPU-v4": "tpu-v4",
    "TPU-v5e": "tpu-v5e",
    "TPU-v5p": "tpu-v5p",
    "TPU-v6e-Trillium": "tpu-v6e",
    "TPU7x-Ironwood (per chip)": "tpu-v7x",
    "Trainium1 (trn1.32xlarge; gpus = NeuronCores)": UNNAMED,
}

LIMITED = re.compile(r"power[- ](limited|capped)|throttled|clocks? (locked|limited)", re.IGNORECASE)
"""Words of a card that runs below what its own power allows, by an amount that they do not state: its speed is no card's."""

PRECISION: dict[str, str] = {
    "bf16": "bf16",
    "bf16 (autocast, fp32 optimizer)": "bf16-autocast",
    "bf16 + NF4": "bf16",
    "bf16-mixed (fp32 weights)": "bf16-autocast",
    "bf16-true": "bf16-pure",
    "bf16/fp16": "bf16",
    "fp16": "fp16",
    "fp16/bf16 mixed (12.55 GB params)": "bf16-mixed-16",
    "fp32": "fp32",
    "fp8": "fp8-tensorwise",
    "fp8 (32x32 blocks)": "mxfp8",
    "fp8 (TE)": "fp8-delayed",
    "fp8 (TE, amp_fp8)": "fp8-delayed",
    "fp8 (float8nocompile)": "fp8-tensorwise",
    "fp8 (no recipe name)": "fp8-tensorwise",
    "fp8 (per config)": "fp8-tensorwise",
    "fp8 e4m3 (tensorwise, fp32 rest)": "fp8-tensorwise",
    "fp8 hybrid (blockwise, bf16 rest)": "fp8-blockwise",
    "fp8 hybrid (tensorwise, bf16 rest)": "fp8-tensorwise",
    "fp8-blockwise mixed": "fp8-blockwise",
    "fp8-current-scaling": "fp8-tensorwise",
    "fp8-mxfp8": "mxfp8",
    "fp8-mxfp8 (cublas)": "mxfp8",
    "fp8-mxfp8 (cublas, rceil)": "mxfp8",
    "fp8-rowwise": "fp8-rowwise",
    "fp8-rowwise (bf16 rest)": "fp8-rowwise",
    "fp8-rowwise_with_gw_hp": "fp8-rowwise_with_gw_hp",
    "fp8-rowwise_with_gw_hp (bf16 rest)": "fp8-rowwise_with_gw_hp",
    "fp8-tensorwise": "fp8-tensorwise",
    "fp8-tensorwise (bf16 rest)": "fp8-tensorwise",
    "mxfp8": "mxfp8",
    "mxfp8 grouped GEMM only": "mxfp8",
    "mxfp8 linears only": "mxfp8",
    "mxfp8 linears+grouped": "mxfp8",
    "nvfp4": "nvfp4",
    "nvfp4 (per config)": "nvfp4",
}
"""A source that does not state its 16-bit format is taken as bf16: both formats take the same bytes and run at the same
rate. MosaicML's and NeMo's plain `fp8` of 2023 and 2024 is Transformer Engine's delayed scaling."""

SHARDING: dict[str, int] = {
    "none": 0,
    "none (ddp)": 0,
    "zero1": 1,
    "zero1 (BF16Optimizer, fp32 grad accum)": 1,
    "zero2": 2,
    "zero2-like": 2,
    "fsdp SHARD_GRAD_OP (zero2)": 2,
    "fsdp (zero2-like: params not resharded for backward)": 2,
    "zero3": 3,
    "fsdp": 3,
    "fsdp2": 3,
    "fsdp (zero3)": 3,
    "fsdp2 (zero3)": 3,
    "fsdp 8": 3,
    "fsdp (8 within node) + dp across nodes": 3,
    "hsdp": 3,
    "megatron-fsdp optim_grads_params": 3,
}
REPLICATED = frozenset({"hsdp", "fsdp (8 within node) + dp across nodes", "fsdp 8"})
"""Sharded within a node and replicated across nodes."""

RECOMPUTE: dict[str, str] = {
    "none": "none",
    "full": "full",
    "full (uniform)": "full",
    "full (uniform 1)": "full",
    "full(block):5 layers": "full:layers=5",
    "selective": "selective",
    "selective (attention)": "selective",
    "selective (every other layer)": "full:every=2",
    "selective (per-op)": "per-op",
}
"""`remat_policy` is MaxText's (`remat:` of `resolve_recompute`), `per-op` torchtitan's; `selective` alone is
Megatron's, or torchtitan's default (`per-op`)."""

OPTIMIZER: dict[str, str] = {
    "": "adamw",
    "AdamW": "adamw",
    "adam": "adamw",
    "adamw": "adamw",
    "torch.optim.AdamW": "adamw",
    "decoupled_adamw": "adamw",
    "bnb PagedAdamW": "adamw",
    "adamw (CPU offload)": "adamw",
    "adamw 8-bit": "adamw-8bit",
    "SGD": "sgd",
    "muon": "muon",
    "dist_muon": "muon",
}
OPTIMIZER_OFFLOADED = frozenset({"adamw (CPU offload)"})

FRAMEWORKS: tuple[tuple[str, str, str], ...] = (
    # whole words of the framework column, whose habits, 16-bit recipe ("" = the framework's own)
    ("NeMo AutoModel", "automodel", ""),
    ("NeMo Automodel", "automodel", ""),
    ("AutoModel", "automodel", ""),
    ("Megatron-Bridge", "megatron", "mixed-16"),
    ("NeMo", "megatron", "mixed-16"),
    ("Megatron-DeepSpeed", "megatron-deepspeed", ""),
    ("Megatron-SWIFT", "megatron", ""),
    ("Megatron-LM", "megatron", ""),
    ("Megatron-Core", "megatron", ""),
    ("Megatron", "megatron", ""),
    ("MegaScale", "megatron", ""),
    ("GPT-NeoX", "megatron", ""),
    ("MindSpeed", "megatron", ""),
    ("MindSpeed-LLM", "megatron", ""),
    ("MindSpeed-MM", "megatron", ""),
    ("Primus", "megatron", ""),
    ("InternEvo", "megatron", "mixed-16"),
    ("neuronx-distributed", "megatron", ""),
    ("torchtitan", "torchtitan", ""),
    ("torchtune", "torchtune", ""),
    ("llm-foundry", "llm-foundry", ""),
    ("LLM Foundry", "llm-foundry", ""),
    ("Composer", "llm-foundry", ""),
    ("fms-fsdp", "fsdp", ""),
    ("FSDP", "fsdp", ""),
    ("FSDP2", "torchtitan", ""),
    ("lightning-thunder", "litgpt", ""),
    ("thunder", "litgpt", ""),
    ("lit-gpt", "fsdp", ""),
    ("TinyLlama", "fsdp", ""),
    ("LitGPT", "litgpt", ""),
    ("MaxText", "maxtext", ""),
    ("Paxml", "maxtext", ""),
    ("PaxML", "maxtext", ""),
    ("Levanter", "maxtext", ""),
    ("EasyLM", "maxtext", ""),
    ("nanoGPT", "nanogpt", ""),
    ("nanochat", "nanogpt", ""),
    ("llm.c", "nanogpt", ""),
    ("modded-nanogpt", "nanogpt", ""),
    ("DeepSpeed", "deepspeed", ""),
    ("unsloth", "unsloth", ""),
    ("ms-swift", "huggingface", ""),
    ("transformers", "huggingface", ""),
    ("Hugging Face", "huggingface", ""),
    ("HuggingFace", "huggingface", ""),
    ("accelerate", "huggingface", ""),
    ("TRL", "huggingface", ""),
    ("axolotl", "huggingface", ""),
    ("LLaMA-Factory", "huggingface", ""),
    ("FlashAttention", "fsdp", ""),
)
"""The first entry that occurs, as whole words and whatever the case, decides whose habits a run has. Where none occurs the layout
decides (`assumptions.framework`). NVIDIA's performance recipes reduce gradients in bf16, as InternEvo does."""

FLASH: tuple[tuple[str, str], ...] = (
    ("FA4", "fa4"),
    ("FA3", "fa3"),
    ("flash_attention_3", "fa3"),
    ("flash attention 3", "fa3"),
    ("FlashAttention-3", "fa3"),
    ("FlashAttention-2", "fa2"),
    ("flash attention 2", "fa2"),
    ("FlashAttention-1", "fa1"),
    ("cudnn attention", "cudnn"),
)
"""Phrases of `other_flags` that name the kernel of attention."""

FLASH_1 = (("InternEvo", 2023),)
"""Frameworks that asked for FlashAttention 1 in their instructions until the end of a year, by whole words (InternLM's
doc/en/install.md names v1.0.5)."""

JOINED: dict[str, tuple[int, str]] = {"H100-94GB": (2, "h100-sxm5-80gb")}
"""A card that comes in two forms: how many GPUs the link of the one that `HARDWARE` names joins, and the other, which a
tensor-parallel group larger than that must be on (the bridge of H100 NVL joins two)."""

MACHINES: dict[str, tuple[int, int]] = {"Jean Zay": (4, 100)}
"""Adapters of a node, and Gbit/s of each, of machines that notes name: Jean Zay's nodes of eight A100 have four Omni-Path links
(BLOOM, arXiv:2211.05100, section 3.4)."""

RELEASES: dict[str, dict[int, str]] = {
    "torch": {2022: "1.13", 2023: "2.1", 2024: "2.5", 2025: "2.9"},
    "flash-attn": {2023: "1.0"},
}
"""The newest release of a library at the end of a year, as far as a default hangs on it; a later year has the newest of all.
LLM Foundry asked for FlashAttention 1 until its release 0.4, of the end of 2023."""

LOSS_COMPILED = 2025
"""The year from which torchtitan compiles the loss with the layers: from April, its release 0.1 (`components/loss.py`). For eight
weeks of 2024 it did too (commits e10cb9494 to e8977b007), which its benchmarks of that December do not say."""
LOSS_PLAIN = ("training.md float8 e2e / NVIDIA H100",)
"""Sources of that year whose own text names an older release: torchtitan 0.0.2."""
CUDNN_RUNS_AGAIN = 2025
"""The last year in which torchtitan's list of what selective checkpointing keeps had no cuDNN attention (commit b39377f9f)."""

FILES: dict[str, dict[str, str | int]] = {
    "models/gpu/llama2_7b.yml": {"seq_len": 4096, "micro_batch": 4, "recompute": "remat_policy minimal_flash"},
}
"""What the files of a framework say that a row names in place of its columns (MaxText's `configs`)."""

SCHEDULES: tuple[tuple[str, str], ...] = (
    ("schedule Interleaved 1F1B", "interleaved"),
    ("schedule 1F1B-I", "interleaved"),
    ("schedule V-Half", "v-half"),
    ("schedule ZB-1p", "zb-h1"),
    ("schedule ZB-2p", "zb-2p"),
    ("schedule ZB-V", "zb-v"),
    ("schedule DualPipeV", "dualpipev"),
    ("schedule DualPipe", "dualpipe"),
    ("schedule GPipe", "gpipe"),
    ("schedule 1F1B", "1f1b"),
)
"""Phrases of `other_flags`; the first that occurs."""

CAUSAL_FLOPS = ("Megatron-Bridge",)
"""Frameworks whose model FLOPs count half of the query-key pairs; the others count all, as the papers do. Rows that print
tokens/s and TFLOP/s agree with this: attention's share is 0.50 there, and 1.00 in NeMo 24 and llm-foundry."""
CAUSAL_WORDS = re.compile(r"(?<!non-)(?<!not )\bcausal(?!ly)\b(?! mask)", re.IGNORECASE)
"""A row whose notes or flags count its FLOPs with causal attention says so in these words, but for `FULL_WORDS`."""
FULL_WORDS = re.compile(r"non-causal|not causal|full attention|before the causal correction", re.IGNORECASE)
