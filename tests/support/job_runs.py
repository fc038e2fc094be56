"""Runs that each dialect can say, for property tests: what is listed here is what its tool's documentation has keys for."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from loadgauge.core.definitions.job.job import Job

FEW, SOME = st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 3, 5, 8, 16))
LENGTHS = st.sampled_from((512, 1024, 2048, 4096, 8192, 131072))
FULL = ("none", "full")
MEGATRON_RECOMPUTE = (*FULL, "selective", "full:layers=2", "full:group=4", "modules:layernorm,moe_act", "modules:mlp")
HF_OPTIMIZERS = (
    "adamw", "adamw-8bit", "adafactor", "paged-lion-8bit", "galore:rank=64", "apollo:rank=256,every=50,head", "lomo", "sgd",
)  # fmt: skip
TORCH_CLASSES = (
    "adamw-foreach", "adamw-fused", "adamw-loop", "adamw-fused:in-backward", "adamw-8bit", "paged-adamw-8bit",
    "paged-adamw-32bit", "adamw-torchao-8bit", "adamw-4bit", "sgd", "sgd-momentum",
)  # fmt: skip
CAN: dict[str, dict[str, Any]] = {
    "megatron": {
        "framework": ("megatron",), "tp": (1, 2, 8), "pp": (1, 2, 4), "vpp": (1, 3), "cp": (1, 2), "ep": (1, 4),
        "etp": (1, 2), "zero": (0, 1, 2, 3), "replicas": (1, 2), "sequence_parallel": (False, True),
        "recompute": MEGATRON_RECOMPUTE, "attention": ("flash", "eager"), "offload": ("none", "optimizer"),
        "precision": (
            *("fp32", "bf16", "fp16", "bf16-mixed-16", "fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "mxfp8", "nvfp4"),
            *("fp8-delayed-primary", "mxfp8-primary", "nvfp4-primary"),
        ),
        "optimizer": ("adamw", "sgd", "sgd-momentum", "muon", "lion"), "cp_comm": ("ring", "all_to_all", "all_gather"),
        "seq_len": LENGTHS, "overlap": ("cp,pp,prefetch", "cp,dp,pp,prefetch", "cp,ep,prefetch,tp"),
        "gpus_per_node": (8,), "order": ("tp,cp,ep,dp,pp", "tp,cp,ep,pp,dp"),
    },
    "megatron-bridge": {
        "framework": ("megatron",), "tp": (1, 2, 8), "pp": (1, 2, 4), "vpp": (1, 3), "cp": (1, 2), "ep": (1, 4),
        "etp": (1, 2), "zero": (0, 1, 2, 3), "replicas": (1, 2), "sequence_parallel": (False, True),
        "recompute": MEGATRON_RECOMPUTE, "attention": ("flash", "eager"), "offload": ("none", "optimizer"),
        "precision": ("bf16", "fp16", "fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "mxfp8", "nvfp4"),
        "optimizer": ("adamw", "sgd-momentum", "muon", "lion"), "cp_comm": ("ring", "all_to_all", "all_gather"),
        "seq_len": LENGTHS, "lora_rank": (0, 16), "lora_targets": ("all", "q_proj,k_proj,v_proj,o_proj"),
    },
    "torchtitan": {
        "framework": ("torchtitan",), "model": (None, "llama-3.1-8b", "llama-3.1-405b", "qwen3-8b", "deepseek-v3"),
        "tp": (1, 2, 8), "pp": (1, 4), "cp": (1, 2), "ep": (1, 2), "zero": (0, 2, 3), "replicas": (1, 2),
        "sequence_parallel": (False, True), "schedule": ("1f1b", "gpipe", "zb-v", "dualpipev"),
        "recompute": (*FULL, "per-op"), "precision": ("bf16", "fp32", "bf16-pure"), "offload": ("none", "all"),
        "seq_len": LENGTHS, "gpus_per_node": (8,), "optimizer": ("adamw",),
    },
    "deepspeed": {
        "framework": ("deepspeed",), "tp": (1, 2), "cp": (1, 4), "zero": (0, 1, 2, 3),
        "offload": ("none", "optimizer", "all"), "precision": ("fp32", "bf16", "fp16", "bf16-mixed-16", "bf16-mixed-18"),
        "optimizer": ("adamw", "lion", "muon", "sgd", "sgd-momentum"), "save": (None, "full", "sharded"),
    },
    "accelerate": {
        "framework": ("huggingface", "deepspeed", "megatron"), "tp": (1, 2), "pp": (1, 2), "cp": (1, 2),
        "zero": (0, 1, 2, 3), "replicas": (1, 2), "offload": ("none", "optimizer", "all"), "recompute": FULL,
        "precision": ("fp32", "bf16", "fp16"), "sequence_parallel": (False, True), "save": (None, "full", "sharded"),
    },
    "transformers": {
        "framework": ("huggingface", "deepspeed"), "model": (None, "meta-llama/Llama-3.1-8B"), "zero": (0, 1, 2, 3),
        "offload": ("none", "optimizer", "all"), "recompute": (*FULL, "full:every=2"),
        "precision": ("fp32", "bf16", "fp16"), "optimizer": HF_OPTIMIZERS, "kernels": ("native", "liger"),
        "eval_batch": (None, 1, 8), "eval_batches": (None, 4), "save": (None, "full", "sharded"),
    },
    "trl": {
        "framework": ("huggingface", "deepspeed"), "model": (None, "meta-llama/Llama-3.1-8B"), "zero": (0, 1, 2, 3),
        "offload": ("none", "optimizer", "all"), "recompute": (*FULL, "full:every=2"),
        "precision": ("fp32", "bf16", "fp16"), "optimizer": HF_OPTIMIZERS, "loss": ("tiled",), "seq_len": LENGTHS,
        "kernels": ("native", "liger"), "activation_offload": ("none", "all"), "attention": ("flash", "eager"),
        "lora_rank": (0, 8), "lora_targets": ("all", "q_proj,v_proj"),
        "qlora": (False, True), "base": ("nf4", "nf4-single", "fp4", "int8"),
        "use_dora": (None, True), "modules_to_save": (None, "lm_head", "embed_tokens,lm_head"), "lora_dropout": (None, 0.1),
        "eval_batch": (None, 1, 8), "eval_batches": (None, 4), "save": (None, "full", "sharded"),
    },
    "axolotl": {
        "framework": ("huggingface", "deepspeed"), "model": ("NousResearch/Meta-Llama-3.1-8B",), "zero": (0, 1, 2, 3),
        "offload": ("none", "optimizer", "all"), "recompute": FULL, "precision": ("fp32", "bf16", "fp16", "bf16-pure"),
        "optimizer": (*HF_OPTIMIZERS, "muon"), "loss": ("auto", "chunked", "chunked:4", "float32", "liger"),
        "kernels": ("native", "liger", "lora", "liger-lora"), "seq_len": LENGTHS,
        "attention": ("flash", "eager"), "lora_rank": (0, 8), "lora_targets": ("all", "q_proj,v_proj"),
        "qlora": (False, True), "base": ("nf4", "nf4-single", "int8", "gptq"), "tp": (1, 2), "cp": (1, 2),
        "replicas": (1, 2), "ep": (1, 2),
        "activation_offload": ("none", "all", "checkpoints"), "save": (None, "full", "sharded"),
        "use_dora": (None, True), "modules_to_save": (None, "lm_head", "embed_tokens,lm_head"), "lora_dropout": (None, 0.1),
    },
    "llamafactory": {
        "framework": ("huggingface", "deepspeed"), "model": (None, "meta-llama/Llama-3.1-8B"), "zero": (0, 1, 2, 3),
        "offload": ("none", "optimizer", "all"), "recompute": FULL, "precision": ("fp32", "bf16", "fp16", "bf16-pure"),
        "optimizer": (*HF_OPTIMIZERS, "muon"), "kernels": ("native", "liger"), "seq_len": LENGTHS,
        "attention": ("flash", "eager"), "adapter": (None, "oft"), "lora_rank": (0, 8), "lora_targets": ("all", "q_proj,v_proj"),
        "qlora": (False, True), "base": ("nf4", "nf4-single", "fp4", "int8", "hqq"),
        "activation_offload": ("none", "checkpoints"),
        "use_dora": (None, True), "modules_to_save": (None, "lm_head", "embed_tokens,lm_head"), "lora_dropout": (None, 0.1),
        "eval_batch": (None, 1, 8), "eval_batches": (None, 4), "save": (None, "full", "sharded"),
    },
    "peft": {
        "framework": ("huggingface",), "model": (None, "meta-llama/Llama-3.1-8B"), "lora_rank": (8, 16),
        "adapter": (None, "vera", "adalora", "loha", "lokr", "oft"), "lora_targets": ("all", "q_proj,v_proj"),
        "use_dora": (None, True), "modules_to_save": (None, "lm_head", "embed_tokens,lm_head"), "lora_dropout": (None, 0.1),
        "lora_layers": (None, "0,1"),
    },
    "verl": {
        "framework": ("huggingface", "megatron"), "model": ("Qwen/Qwen3-8B",), "tp": (1, 2), "pp": (1, 2), "vpp": (1, 2),
        "cp": (1, 2), "ep": (1, 2), "etp": (1, 2), "zero": (0, 1, 2, 3), "replicas": (1, 2),
        "sequence_parallel": (False, True), "recompute": MEGATRON_RECOMPUTE, "offload": ("none", "all"),
        "precision": (None, "bf16", "bf16-pure"), "seq_len": LENGTHS, "gpus_per_node": (8,),
        "kernels": ("native", "liger"), "lora_rank": (0, 8), "lora_targets": ("all", "q_proj,v_proj"),
        "gradient_sync": (None, "each", "last"),
    },
    "torchtune": {
        "framework": ("torchtune",), "model": ("llama-3.1-8b", "qwen2.5-7b"), "tp": (1, 2), "zero": (2, 3),
        "recompute": (*FULL, "per-op", "full:every=2"), "precision": ("bf16-pure", "fp32"),
        "optimizer": TORCH_CLASSES, "activation_offload": ("none", "all"), "seq_len": LENGTHS,
        "lora_rank": (0, 8), "lora_targets": ("all", "q_proj,v_proj"), "qlora": (False, True), "base": ("nf4",),
        "offload": ("none", "all"),
    },
    "litgpt": {
        "framework": ("litgpt",), "model": ("meta-llama/Llama-3.1-8B",), "zero": (3,), "recompute": ("full",),
        "precision": ("bf16-pure", "bf16-autocast", "fp32"), "optimizer": ("adamw", "adamw-8bit", "paged-adamw-8bit", "sgd"),
        "seq_len": LENGTHS, "lora_rank": (0, 8), "lora_targets": ("all", "q_proj,v_proj"),
    },
    "ms-swift": {
        "framework": ("huggingface", "deepspeed"), "model": ("Qwen/Qwen2.5-7B-Instruct",), "zero": (0, 1, 2, 3), "cp": (1, 2),
        "offload": ("none", "optimizer", "all"), "recompute": FULL, "precision": ("fp32", "bf16", "fp16"),
        "optimizer": (*HF_OPTIMIZERS, "muon"), "kernels": ("native", "liger"), "seq_len": LENGTHS,
        "attention": ("flash", "eager"),
        "adapter": (None, "adalora"), "lora_rank": (0, 8), "lora_targets": ("all", "q_proj,v_proj"), "qlora": (False, True),
        "base": ("nf4", "nf4-single", "fp4", "int8", "hqq", "gptq", "awq"), "lora_dtype": (None, "bfloat16"),
        "use_dora": (None, True), "modules_to_save": (None, "lm_head", "embed_tokens,lm_head"), "lora_dropout": (None, 0.1),
    },
    "automodel": {
        "framework": ("torchtitan",), "model": ("meta-llama/Llama-3.1-8B",), "tp": (1, 2), "cp": (1, 2), "pp": (1, 2),
        "ep": (1, 2), "zero": (0, 2, 3), "replicas": (1, 2), "sequence_parallel": (False, True), "recompute": FULL,
        "gradient_sync": (None, "each", "last"), "schedule": ("1f1b", "gpipe"), "precision": ("bf16-pure", "bf16-autocast"),
        "optimizer": ("adamw-foreach", "adamw-fused", "adamw-loop", "muon", "paged-adamw-8bit", "sgd"),
        "kernels": ("native",),  # Liger's are for models that it has no code of its own for
        "loss": ("float32", "chunked:256", "fused"), "seq_len": LENGTHS, "attention": ("flash", "eager"),
        "lora_rank": (0, 8), "lora_targets": ("all", "q_proj,v_proj"), "qlora": (False, True),
        "base": ("nf4", "nf4-single", "fp4", "int8"),
    },
    "unsloth": {
        "framework": ("unsloth",), "model": ("unsloth/Meta-Llama-3.1-8B",), "recompute": FULL,
        "precision": ("bf16", "fp16"), "optimizer": HF_OPTIMIZERS[1:], "loss": ("chunked",), "seq_len": LENGTHS,
        "lora_rank": (8, 16), "lora_targets": ("all", "q_proj,v_proj"), "qlora": (False, True), "base": ("nf4", "int8"),
        "activation_offload": ("none", "checkpoints"),
        "use_dora": (None, True), "modules_to_save": (None, "lm_head", "embed_tokens,lm_head"), "lora_dropout": (None, 0.1),
        "eval_batch": (None, 1, 8), "eval_batches": (None, 4),
    },
    "openrlhf": {
        "framework": ("deepspeed",), "model": ("meta-llama/Llama-3.1-8B",), "tp": (1, 2), "cp": (1, 2), "zero": (0, 1, 2, 3),
        "offload": ("none", "optimizer"), "recompute": FULL, "precision": ("bf16", "fp16"), "optimizer": ("adamw", "muon"),
        "kernels": ("native", "liger"), "seq_len": LENGTHS, "attention": ("fa2", "fa3", "eager"), "lora_rank": (0, 8),
        "lora_targets": ("all", "q_proj,v_proj"), "qlora": (False, True), "base": ("nf4",), "lora_dropout": (None, 0.1),
        "gpus_per_node": (8,),
    },
    "nemo-rl": {
        "framework": ("torchtitan", "megatron"), "model": ("meta-llama/Llama-3.1-8B",), "tp": (1, 2), "pp": (1, 2), "cp": (1, 2),
        "ep": (1, 2), "etp": (1, 2), "zero": (0, 1, 3), "sequence_parallel": (False, True),
        "recompute": (*FULL, "selective", "modules:layernorm,moe_act"), "offload": ("none", "optimizer", "all"),
        "precision": ("bf16", "fp32", "bf16-mixed-16"), "seq_len": LENGTHS, "gpus_per_node": (8,),
        "optimizer": ("adamw-foreach", "adamw-fused", "adamw-loop"), "lora_rank": (0, 8), "lora_targets": ("all", "q_proj,v_proj"),
        "lora_dropout": (None, 0.1),
    },
    "slime": {
        "framework": ("megatron",), "model": ("Qwen/Qwen3-8B",), "tp": (1, 2, 8), "pp": (1, 2), "cp": (1, 2), "ep": (1, 4),
        "etp": (1, 2), "zero": (1,), "sequence_parallel": (False, True), "recompute": MEGATRON_RECOMPUTE,
        "offload": ("none", "optimizer"), "precision": ("bf16", "fp16"), "optimizer": ("adamw", "sgd-momentum", "muon"),
        "attention": ("flash", "eager"), "cp_comm": ("ring", "all_to_all"), "seq_len": LENGTHS, "gpus_per_node": (8,),
    },
    "prime-rl": {
        "framework": ("torchtitan",), "model": ("Qwen/Qwen3-8B",), "cp": (1, 2), "ep": (1, 2), "zero": (2, 3),
        "replicas": (1, 2), "recompute": (*FULL, "full:every=2"), "offload": ("none", "all"),
        "activation_offload": ("none", "checkpoints"), "precision": ("bf16", "bf16-pure"), "compile": (True, False),
        "optimizer": ("adamw-fused", "muon", "sgd-momentum"), "seq_len": LENGTHS, "gpus_per_node": (8,), "lora_rank": (0, 8),
        "lora_targets": ("all", "q_proj,v_proj"), "lora_dropout": (None, 0.1), "modules_to_save": (None, "lm_head"),
        "attention": ("flash", "eager"),
    },
    "nanotron": {
        "framework": ("megatron",), "tp": (1, 2, 8), "pp": (1, 2), "cp": (1, 2), "zero": (0, 1), "recompute": FULL,
        "sequence_parallel": (False, True), "precision": ("fp32", "bf16-mixed-18", "bf16-pure"), "seq_len": LENGTHS,
        "optimizer": ("adamw", "sgd"),
    },
    "gpt-neox": {
        "framework": ("megatron-deepspeed",), "tp": (1, 2, 8), "pp": (1, 2), "zero": (0, 1), "seq_len": LENGTHS,
        "recompute": (*FULL, "full:group=4"), "precision": ("fp32", "bf16-mixed-18", "fp16"), "optimizer": ("adamw", "sgd"),
    },
    "llm-foundry": {
        "framework": ("llm-foundry",), "zero": (0, 2, 3), "recompute": FULL, "precision": ("fp32", "bf16"),
        "optimizer": ("adamw",), "seq_len": LENGTHS,
    },
    "maxtext": {"framework": ("maxtext",), "zero": (3,), "recompute": FULL, "optimizer": ("adamw", "muon"), "seq_len": LENGTHS},
    "roll": {
        "framework": ("megatron",), "model": ("Qwen/Qwen3-8B",), "tp": (1, 2), "pp": (1, 2), "zero": (0, 1),
        "recompute": FULL, "attention": ("flash", "eager"), "gpus_per_node": (8,),
    },
    "megatron-swift": {
        "framework": ("megatron",), "model": ("Qwen/Qwen2.5-7B-Instruct",), "tp": (1, 2), "pp": (1, 2), "vpp": (1, 2),
        "cp": (1, 2), "ep": (1, 2), "etp": (1, 2), "zero": (0, 1), "sequence_parallel": (False, True),
        "recompute": MEGATRON_RECOMPUTE, "offload": ("none", "optimizer"), "optimizer": ("adamw",),
        "seq_len": LENGTHS, "attention": ("fa2", "eager"), "cp_comm": ("ring", "all_to_all"),
    },
    "llamafactory-megatron": {
        "framework": ("megatron",), "model": ("Qwen/Qwen2.5-7B-Instruct",), "tp": (1, 2), "pp": (1, 2), "vpp": (1, 2),
        "cp": (1, 2), "ep": (1, 2), "etp": (1, 2), "zero": (0, 1), "sequence_parallel": (False, True),
        "recompute": MEGATRON_RECOMPUTE, "offload": ("none", "optimizer"), "precision": ("bf16", "fp16"),
        "optimizer": ("adamw", "sgd-momentum"), "seq_len": LENGTHS, "attention": ("flash", "eager"),
        "cp_comm": ("ring", "all_to_all"), "lora_rank": (0,),
    },
    "llamafactory-v1": {
        "framework": ("huggingface",), "model": ("Qwen/Qwen3-8B",), "zero": (3,), "recompute": FULL,
        "seq_len": LENGTHS, "attention": ("flash", "eager"), "lora_rank": (0, 8), "lora_targets": ("all",),
    },
    "open-instruct": {
        "framework": ("huggingface",), "model": ("Qwen/Qwen3-8B",), "recompute": FULL, "optimizer": ("adamw-fused", "adamw-loop"),
        "attention": ("fa2", "eager"), "kernels": ("native", "liger"), "seq_len": LENGTHS,
    },
    "lmflow": {
        "framework": ("huggingface", "deepspeed"), "model": ("Qwen/Qwen3-8B",), "recompute": FULL, "zero": (2, 3),
        "offload": ("none",), "precision": ("fp32", "bf16"), "seq_len": LENGTHS, "lora_rank": (0, 8),
        "lora_targets": ("all", "q_proj,v_proj"),
    },
    "qwen-vl-finetune": {
        "framework": ("huggingface", "deepspeed"), "model": ("Qwen/Qwen2.5-VL-7B-Instruct",), "zero": (2, 3),
        "offload": ("none", "all"), "recompute": FULL, "precision": ("fp32", "bf16", "fp16"), "optimizer": ("adamw-fused", "sgd"),
        "attention": ("fa2", "flash"), "seq_len": LENGTHS,
    },
    "deepspeed-chat": {
        "framework": ("deepspeed",), "model": ("facebook/opt-1.3b",), "zero": (0, 2, 3), "offload": ("none", "all"),
        "recompute": FULL, "precision": ("bf16", "fp16"), "seq_len": LENGTHS,
    },
}  # fmt: skip
SYNTAXES = [
    *(("megatron", "argv"), ("megatron", "yaml"), ("megatron-bridge", "yaml"), ("megatron-bridge", "argv")),
    *(("torchtitan", "argv"), ("torchtitan", "toml"), ("deepspeed", "json"), ("accelerate", "yaml")),
    *(("transformers", "yaml"), ("transformers", "json"), ("transformers", "argv")),
    *(("trl", "yaml"), ("trl", "json"), ("trl", "argv"), ("axolotl", "yaml")),
    *(("llamafactory", "yaml"), ("llamafactory", "json"), ("llamafactory", "argv"), ("verl", "argv"), ("verl", "yaml")),
    *(("torchtune", "yaml"), ("litgpt", "yaml"), ("litgpt", "argv"), ("ms-swift", "argv"), ("ms-swift", "yaml")),
    *(("automodel", "yaml"), ("unsloth", "python"), ("peft", "json"), ("openrlhf", "argv"), ("nemo-rl", "yaml")),
    *(("slime", "argv"), ("prime-rl", "toml"), ("nanotron", "yaml"), ("gpt-neox", "yaml"), ("llm-foundry", "yaml")),
    *(("maxtext", "yaml"), ("roll", "yaml"), ("megatron-swift", "argv")),
    ("llamafactory-megatron", "argv"),
    *(("llamafactory-v1", syntax) for syntax in ("yaml", "json", "argv")),
    *(("open-instruct", "yaml"), ("open-instruct", "argv"), ("lmflow", "argv"), ("qwen-vl-finetune", "argv")),
    ("deepspeed-chat", "argv"),
]
SUFFIXES = {"argv": "sh", "python": "py"}
"""Endings of files by their syntax, where they differ."""
LAUNCHED = {("megatron", "yaml"), ("torchtitan", "toml"), ("megatron-bridge", "yaml"), ("axolotl", "yaml")}
LAUNCHED |= {
    ("torchtune", "yaml"),
    ("ms-swift", "argv"),
    ("ms-swift", "yaml"),
    ("automodel", "yaml"),
    ("unsloth", "python"),
    ("peft", "json"),
}
LAUNCHED |= {
    (name, syntax) for name in ("transformers", "trl", "llamafactory", "llamafactory-v1") for syntax in ("yaml", "json")
}
LAUNCHED |= {("gpt-neox", "yaml"), ("llm-foundry", "yaml"), ("maxtext", "yaml")}
LAUNCHED |= {("megatron-swift", "argv"), ("open-instruct", "yaml")}
"""Files that cannot say how many GPUs there are: whoever starts the job does."""


@st.composite
def runs(draw: st.DrawFn, name: str, syntax: str) -> Job:
    """A job that the dialect has words for, all of it; without a model it is empty."""
    can = CAN[name]
    values: dict[str, Any] = {
        field: draw(choices if isinstance(choices, st.SearchStrategy) else st.sampled_from(choices))
        for field, choices in can.items()
    }
    values |= {"micro_batch": draw(SOME)}
    _agree(values, name, syntax)
    within = values.get("tp", 1) * values.get("pp", 1) * values.get("cp", 1)
    dp = (values.get("replicas") or 1) * draw(st.sampled_from((2, 4, 8)))
    if values.get("gpus_per_node"):
        dp *= 8
    dp = max(dp, (values.get("ep") or 1) * (values.get("etp") or 1))  # what shares the experts are ranks too
    values["gpus"] = within * dp
    if name not in ("accelerate", "peft"):
        # verl's micro-batches on stages that are interleaved go around in whole groups.
        groups = values["pp"] if name == "verl" and values["vpp"] > 1 else 1
        values["global_batch"] = dp * values["micro_batch"] * groups * draw(SOME)
    else:
        values["micro_batch"] = None
    return Job(**{"model": "", **{field: value for field, value in values.items() if value is not None}})


def _agree(values: dict[str, Any], name: str, syntax: str) -> None:
    """What contradicts itself in any tool's words gives way."""
    framework = values["framework"]
    if values.get("tp", 1) == 1 and "sequence_parallel" in values:
        values["sequence_parallel"] = False
    if values.get("pp", 1) == 1:
        values |= {key: one for key, one in (("vpp", 1), ("schedule", None)) if key in values}
    elif name in ("megatron", "megatron-bridge"):
        values["schedule"] = "interleaved" if values["vpp"] > 1 else "1f1b"
    if values.get("ep", 1) == 1 and "etp" in values:
        values["etp"] = 1
    if values.get("cp", 1) == 1:
        values.pop("cp_comm", None)
    if not values.get("lora_rank"):
        adapters = ("adapter", "lora_targets", "use_dora", "modules_to_save", "lora_dropout", "lora_dtype")
        values |= {key: None for key in adapters if key in values} | ({"qlora": False} if "qlora" in values else {})
    if values.get("adapter"):
        values["use_dora"] = None
        if values["adapter"] not in ("vera", "adalora"):
            values["lora_dropout"] = None
    if not values.get("qlora"):
        values.pop("base", None)
    if values.get("recompute") == "none" and values.get("activation_offload") == "checkpoints":
        values["activation_offload"] = "none"
    if not values.get("eval_batch"):
        values.pop("eval_batches", None)
    if name == "trl" and values["kernels"] == "liger":
        values["loss"] = "auto"  # Liger's own
    if name == "llamafactory" and values.get("lora_rank") and values["precision"] == "fp32":
        values["precision"] = "bf16"  # beside adapters its base stays in the checkpoint's dtype
    if name == "axolotl":
        # What one of them alone says, and what it says with the other.
        if not values["lora_rank"]:
            values["kernels"] = values["kernels"].removesuffix("lora").rstrip("-") or "native"
        elif values["activation_offload"] == "all":
            values["recompute"] = "none"  # beside adapters, the one takes the place of the other
        if not values["lora_rank"] and values["recompute"] == "none":
            values["activation_offload"] = "none"  # `check_activation_offloading_wo_gc`
        liger = values["kernels"].startswith("liger")
        values["loss"] = {"liger": "auto"}.get(values["loss"], values["loss"]) if liger else values["loss"]
        values["loss"] = "auto" if not liger and values["loss"] == "float32" else values["loss"]
        if (framework, values["precision"]) == ("huggingface", "bf16") and values["zero"] and not values["lora_rank"]:
            values["precision"] = "bf16-autocast-8"  # whole weights under its own FSDP 2 stay as they were loaded
    if name == "torchtune" and (values["lora_rank"] or "llama" not in values["model"]):
        values["tp"] = 1  # the recipes of adapters refuse it, and Llama has a plan
    if name == "verl":
        _agree_verl(values, framework)
    if name == "nemo-rl":
        _agree_nemo(values, framework)
    if name in ("openrlhf", "prime-rl") and values["cp"] > 1:
        values["cp_comm"] = "ring" if name == "openrlhf" else "all_to_all"
    if name == "slime":
        values["micro_batch"] = 1  # sequences are packed to a number of tokens
        values["schedule"] = None if values["pp"] == 1 else "1f1b"
    if "model" in values and name == "torchtitan" and syntax == "argv":
        values["loss"] = "chunked" if values["model"] else None
    if name == "torchtitan" and values["cp"] > 1:
        values["zero"] = values["zero"] or 3  # it shards over the ranks of context parallelism too
    if name == "deepspeed" and values["cp"] > 1:
        values["cp_comm"] = "all_to_all"
    if name == "megatron" and syntax == "yaml":
        values["gpus_per_node"] = None
    if name == "torchtitan" and syntax == "toml":
        values["gpus_per_node"] = None
    if name == "accelerate" and framework == "megatron":
        values |= {"cp": 1, "zero": min(values["zero"], 1), "offload": "none", "replicas": 1, "recompute": "none"}
    elif name == "accelerate":
        values |= {"pp": 1, "sequence_parallel": False}
        if framework == "deepspeed":
            values["tp"] = 1
        elif values["tp"] * values["cp"] > 1:
            values["zero"] = max(values["zero"], 2)  # its other sizes go with FSDP only
    if framework in ("huggingface", "deepspeed") and name != "verl" and name != "deepspeed":
        if framework == "huggingface":
            if "zero" in values:
                values["zero"] = {1: 3}.get(values["zero"], values["zero"])
            if "offload" in values:
                values["offload"] = "all" if values["offload"] != "none" and values["zero"] else "none"
        if name == "accelerate" and (framework == "deepspeed" or not values["zero"]):
            values["recompute"] = "none"
    if name == "ms-swift":
        _agree_swift(values, framework)
    if framework == "deepspeed":
        if values["zero"] == 0 or (values["offload"] == "all" and values["zero"] != 3):
            values["offload"] = "none"
        if name in ("axolotl", "accelerate"):
            values |= {"replicas": 1, "cp": 1 if name == "accelerate" else values["cp"]}
    if not values.get("zero") and "replicas" in values:
        values["replicas"] = 1
    if values.get("save") and (
        not values["zero"] or framework == "megatron" or (framework == "deepspeed" and values["zero"] != 3)
    ):
        values["save"] = None  # nothing is sharded


def _agree_swift(values: dict[str, Any], framework: str) -> None:
    """The configurations that come with it: FSDP2 shards fully and checkpoints, DeepSpeed's are six."""
    values["cp_comm"] = "all_to_all" if values["cp"] > 1 else None
    if framework == "huggingface":
        values |= {"zero": 3 if values["zero"] else 0, "offload": "none"}
        values["recompute"] = "full" if values["zero"] else values["recompute"]
    elif (values["zero"], values["offload"]) not in {(2, "optimizer"), (3, "all")}:
        values["offload"] = "none"


def _agree_verl(values: dict[str, Any], framework: str) -> None:
    if framework == "megatron":
        values |= {
            "zero": min(values["zero"], 1),
            "offload": "none",
            "replicas": 1,
            "precision": None,
            "kernels": "native",
            "gradient_sync": None,
            # Megatron-Bridge's adapters are on the three projections at once.
            "lora_targets": values["lora_targets"]
            and values["lora_targets"].replace("q_proj,v_proj", "q_proj,k_proj,v_proj"),
        }
        values["schedule"] = None if values["pp"] == 1 else "interleaved" if values["vpp"] > 1 else "1f1b"
    else:
        values |= {
            "tp": 1,
            "pp": 1,
            "vpp": 1,
            "ep": 1,
            "etp": 1,
            "sequence_parallel": False,
            "zero": max(values["zero"], 2),
        }
        values["recompute"] = values["recompute"] if values["recompute"] in FULL else "full"
        values["cp_comm"] = "all_to_all" if values["cp"] > 1 else None


def _agree_nemo(values: dict[str, Any], framework: str) -> None:
    if framework == "megatron":
        values |= {
            "zero": min(values["zero"], 1), "offload": "none" if values["offload"] == "all" else values["offload"],
            "optimizer": "adamw", "cp_comm": None, "schedule": None if values["pp"] == 1 else "1f1b",
        }  # fmt: skip
        return
    values |= {
        "zero": 3, "pp": 1, "etp": 1, "offload": "none" if values["offload"] == "optimizer" else values["offload"],
        "recompute": values["recompute"] if values["recompute"] in FULL else "full", "schedule": None,
        "precision": "bf16" if values["precision"] == "bf16-mixed-16" else values["precision"],
        "cp_comm": "ring" if values["cp"] > 1 else None,
    }  # fmt: skip
