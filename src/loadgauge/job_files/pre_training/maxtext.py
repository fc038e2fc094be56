"""MaxText's configuration: YAML over its `base.yml`, or `name=value` words on its command line."""

import math
from typing import Any

from loadgauge.core.base.errors import refuse
from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.job_files.ideas import STAYS, Dialect, Facts, Idea, Keys, Named, reads, row

NAMES = {
    "llama2-7b": "llama-2-7b", "llama2-13b": "llama-2-13b", "llama2-70b": "llama-2-70b", "llama3-8b": "llama-3-8b",
    "llama3-70b": "llama-3-70b", "llama3.1-8b": "llama-3.1-8b", "llama3.1-70b": "llama-3.1-70b",
    "llama3.1-405b": "llama-3.1-405b", "llama3.3-70b": "llama-3.3-70b", "mistral-7b": "mistral-7b-v0.1",
    "mixtral-8x7b": "mixtral-8x7b", "mixtral-8x22b": "mixtral-8x22b", "deepseek2-16b": "deepseek-v2-lite",
    "deepseek2-236b": "deepseek-v2", "deepseek3-671b": "deepseek-v3", "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b", "kimi-k2-1t": "kimi-k2", "gpt3-175b": "gpt3-175b", "llama4-17b-16e": "llama-4-scout",
    "llama4-17b-128e": "llama-4-maverick", "gemma-2b": "gemma-2b", "gemma-7b": "gemma-7b", "gemma2-2b": "gemma-2-2b",
    "gemma2-9b": "gemma-2-9b", "gemma2-27b": "gemma-2-27b", "gemma3-4b": "gemma-3-4b", "gemma3-12b": "gemma-3-12b",
    "gemma3-27b": "gemma-3-27b", "qwen3-0.6b": "qwen3-0.6b", "qwen3-4b": "qwen3-4b", "qwen3-8b": "qwen3-8b",
    "qwen3-14b": "qwen3-14b", "qwen3-32b": "qwen3-32b", "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-235b-a22b": "qwen3-235b-a22b", "qwen3-480b-a35b": "qwen3-coder-480b-a35b",
}  # fmt: skip
"""The models of `configs/models`, and the catalogue's names."""
SIZES = {
    "base_emb_dim": 2048, "base_num_query_heads": 16, "base_num_kv_heads": 16, "base_mlp_dim": 7168,
    "base_num_decoder_layers": 16, "head_dim": 128, "vocab_size": 32_000, "num_experts": 1, "num_experts_per_tok": 1,
    "global_parameter_scale": 1,
}  # fmt: skip
"""The sizes of `decoder_block: llama2` in `base.yml`."""
INNER = "base_moe_mlp_dim"
"""The width within an expert, where it is more than -1."""
BLOCKS = ("llama2", "default", "mistral", "mixtral")
AXES = {
    "data": "", "fsdp": "zero", "fsdp_transpose": "zero", "tensor": "tp", "tensor_transpose": "tp", "sequence": "cp",
    "context": "cp", "tensor_sequence": "tp", "pipeline": "pp", "expert": "ep",
}  # fmt: skip
"""Axes of the mesh, within a slice (`ici_`) and between slices (`dcn_`), and what they are here."""
SHARED = tuple(f"{where}_{axis}_parallelism" for where in ("ici", "dcn") for axis in AXES)


def _read(keys: Keys) -> Facts:
    name = keys.word("model_name") or "default"
    if name != "default":
        return {"model": NAMES.get(name, name)}
    if (keys.word("decoder_block") or "llama2") not in BLOCKS:
        return {}
    inner = keys.whole(INNER, -1) or -1
    size = {key: keys.whole(key) or usual for key, usual in SIZES.items()}
    scale = size["global_parameter_scale"]
    doubled = int(math.log2(scale))  # pyconfig: heads, width and layers grow with the powers of two
    keys.refuse("global_parameter_scale", f"{scale} changes the sizes; give the model's own", when=doubled)
    config: dict[str, Any] = {
        "model_type": "mixtral" if size["num_experts"] > 1 else "llama",
        "hidden_size": size["base_emb_dim"],
        "intermediate_size": size["base_mlp_dim"],
        "num_hidden_layers": size["base_num_decoder_layers"],
        "num_attention_heads": size["base_num_query_heads"],
        "num_key_value_heads": size["base_num_kv_heads"],
        "head_dim": size["head_dim"],
        "vocab_size": size["vocab_size"],
        "max_position_embeddings": keys.whole("max_target_length") or 2048,
        "tie_word_embeddings": bool(keys.flag("logits_via_embedding")),
    }
    if size["num_experts"] > 1:
        config |= {"num_local_experts": size["num_experts"], "num_experts_per_tok": size["num_experts_per_tok"]}
        config |= {"intermediate_size": inner} if inner > 0 else {}
    return {"config": config}


@reads(*SHARED, facts="gpus tp cp pp ep zero")
def _layout(keys: Keys) -> Facts:
    size: dict[str, int] = {}
    rest = []
    for key in SHARED:
        axis = AXES[key.split("_", 1)[1].removesuffix("_parallelism")]
        usual = -1 if key in ("ici_fsdp_parallelism", "dcn_data_parallelism") else 1
        number = keys.whole(key, -1)
        number = usual if number is None else number
        size[axis] = size.get(axis, 1) * max(1, number)
        rest += [key] if number == -1 and key.startswith("ici") else []
    sharded = size["zero"] > 1 or any("fsdp" in key for key in rest)
    return {
        **{axis: size[axis] for axis in ("tp", "cp", "pp", "ep")},
        "zero": 3 if sharded else 0,
        "gpus": None if rest else math.prod(size.values()),
    }


@reads(
    facts="recompute",
    write=lambda facts, keys, at: {at.key: facts["recompute"]} if facts["recompute"] in ("full", "none") else {},
    key="remat_policy",
)
def _remat(keys: Keys, at: Named) -> Facts:
    policy = keys.word(at.key) or "full"
    if policy in ("full", "none"):
        return {"recompute": policy}
    keys.add(
        Uncounted(
            f"{at.key} = {policy[:40]}: keeps some of what is counted as kept, and makes the rest again or moves it to the host",
            at.key,
            effect="either",
            parts=("activations",),
        )
    )
    return {"recompute": "none"}


def _together(keys: Keys) -> int:
    """The ranks that share a device's sequences: GPUs of a replica see theirs together."""
    return math.prod(
        max(1, keys.whole(key, -1) or 1) for key in SHARED if AXES[key.split("_", 1)[1][:-12]] in ("tp", "cp", "pp")
    )


def _batch_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    each = (facts.get("micro_batch") or 0) / _together(keys)
    return {
        at.count: facts.get("accumulation") or STAYS,
        at.micro: (int(each) if each.is_integer() else each) or STAYS,
    }


@reads(
    facts="micro_batch accumulation",
    write=_batch_written,
    micro="per_device_batch_size",
    count="gradient_accumulation_steps",
)
def _batch(keys: Keys, at: Named) -> Facts:
    number, ranks = keys.real(at.micro) or 12.0, _together(keys)
    whole = number * ranks
    refuse(
        whole < 1 or not float(whole).is_integer(),
        f"{number:g} sequences of a device are no whole number on {ranks}",
        key=at.micro,
        file=keys.file,
    )
    return {"micro_batch": int(whole), "accumulation": keys.whole(at.count) or 1}


@reads("dtype", "weight_dtype", facts="precision")
def _precision(keys: Keys) -> Facts:
    compute = keys.choice("dtype", {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}) or "bf16"
    weights = keys.choice("weight_dtype", {"bfloat16": "bf16", "float32": "fp32"}) or "fp32"
    return {"precision": compute if weights == "fp32" else f"{compute}-pure"}


ATTENTION = {
    "autoselected": "flash",
    "flash": "flash",
    "cudnn_flash_te": "cudnn",
    "cudnn_flash_jax": "cudnn",
    "dot_product": "eager",
}
"""Kernels of a GPU: `autoselected` is Pallas' own flash attention."""
OPTIMIZERS = {"adamw": "adamw", "adam_pax": "adamw", "sgd": "sgd", "muon": "muon"}
MAXTEXT = Dialect(
    name="maxtext",
    title="MaxText's configuration",
    versions="MaxText 0.1 - 0.2",
    syntaxes=("yaml", "argv"),
    framework="maxtext",
    style="hydra",
    blank={"yaml": "", "argv": "python3 -m maxtext.train base.yml\n"},
    ideas=(
        _layout,
        _batch,
        row("seq_len", "max_target_length", default=2048),
        _remat,
        _precision,
        row("attention", "attention", words=ATTENTION),
        row("optimizer", "opt_type", words=OPTIMIZERS, default="adamw"),
        Idea(
            keys=("model_name", "decoder_block", INNER, *SIZES, "logits_via_embedding"),
            facts=("model", "config"),
            read=_read,
            write=lambda facts, keys: {},
        ),
    ),
)
