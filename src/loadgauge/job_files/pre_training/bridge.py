"""Megatron-Bridge's configuration container: as YAML, or as overrides on its command line (`model.x=...`).

A command names a recipe, whose settings (`data/bridge_recipes.toml`) are beneath what it says itself.
"""

from collections.abc import Iterable
from typing import Any

from loadgauge.core.base.package_data import read_table
from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.job_files.ideas import (
    MISSING,
    TRANSFORMER_ENGINE,
    Dialect,
    Document,
    Facts,
    Keys,
    Named,
    reads,
    row,
    spec_of,
)
from loadgauge.job_files.pre_training.megatron import (
    context,
    experts,
    launched,
    loss,
    offload,
    overlap,
    pipeline,
    recompute,
    tensor_parallel,
    zero,
)

RECIPES = {
    "bf16_mixed": "bf16", "fp16_mixed": "fp16", "bf16_with_fp8_delayed_scaling_mixed": "fp8-delayed",
    "bf16_with_fp8_current_scaling_mixed": "fp8-tensorwise", "bf16_with_fp8_subchannel_scaling_mixed": "fp8-blockwise",
    "bf16_with_mxfp8_mixed": "mxfp8", "bf16_with_nvfp4_mixed": "nvfp4",
}  # fmt: skip
RECIPES |= {"bf16": "bf16", "nanov2_bf16_with_fp8_current_scaling_mixed": "fp8-tensorwise"}
RECIPES |= {"nemotron_h_bf16_with_fp8_current_scaling_mixed": "fp8-tensorwise"}
"""`mixed_precision`, by name."""
BENEATH = {
    "model": "model.hf_model_id", "tp": "model.tensor_model_parallel_size", "pp": "model.pipeline_model_parallel_size",
    "vpp": "model.virtual_pipeline_model_parallel_size", "cp": "model.context_parallel_size",
    "ep": "model.expert_model_parallel_size", "etp": "model.expert_tensor_parallel_size", "sp": "model.sequence_parallel",
    "length": "dataset.seq_length", "micro": "train.micro_batch_size", "batch": "train.global_batch_size",
    "precision": "mixed_precision", "rank": "peft.dim", "targets": "peft.target_modules",
    "recompute": "model.recompute_granularity", "method": "model.recompute_method", "layers": "model.recompute_num_layers",
    "modules": "model.recompute_modules", "shared": "ddp.use_distributed_optimizer", "fsdp": "ddp.use_megatron_fsdp",
    "strategy": "ddp.data_parallel_sharding_strategy", "fusion": "model.cross_entropy_loss_fusion",
    "impl": "model.cross_entropy_fusion_impl", "first": "model.num_layers_in_first_pipeline_stage",
    "last": "model.num_layers_in_last_pipeline_stage", "optimizer": "optimizer.optimizer",
    "frozen": "model.freeze_language_model", "mtp": "model.mtp_num_layers", "aware": "optimizer.use_precision_aware_optimizer",
    "grads": "optimizer.main_grads_dtype", "params": "optimizer.main_params_dtype", "average": "optimizer.exp_avg_dtype",
    "square": "optimizer.exp_avg_sq_dtype", "reduced": "mixed_precision.grad_reduce_in_fp32",
    "grads_beside": "ddp.overlap_grad_reduce", "tp_beside": "comm_overlap.tp_comm_overlap",
    "experts_beside": "comm_overlap.overlap_moe_expert_parallel_comm",
}  # fmt: skip
"""The names of keys in the table of recipes."""
SHORT = {
    "global_batch_size": "batch", "micro_batch_size": "micro", "seq_length": "length", "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp", "virtual_pipeline_model_parallel_size": "vpp",
    "expert_model_parallel_size": "ep", "expert_tensor_parallel_size": "etp",
}  # fmt: skip
"""Options of `run_recipe.py` that set a key."""
NARROW = {
    "optimizer.exp_avg_dtype": "optimizer",
    "optimizer.exp_avg_sq_dtype": "optimizer",
    "optimizer.main_params_dtype": "optimizer",
    "optimizer.main_grads_dtype": "gradients",
    "mixed_precision.grad_reduce_in_fp32": "gradients transient",
}
"""What a recipe may keep in 16 bits by itself, and the parts of the memory that have it."""
CHOSEN = ("recipe", "recipe_name", "model", "mode", "peft_scheme", "peft")
"""Options that say which recipe."""
TARGETS = {"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",)}
TARGETS |= {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}


def grouped(chosen: Iterable[str], *, every: bool = True) -> str:
    """The linear layers of Megatron's, by the names of most models; `every`: whether those that are known are all there are.

    >>> grouped(["linear_proj"]), grouped(TARGETS)
    ('o_proj', 'all')
    """
    named = list(chosen)
    whole = every and set(named) == set(TARGETS)
    return "all" if whole else ",".join(name for word in named for name in TARGETS[word])


def groups(wanted: str) -> list[str]:
    """Megatron's names of linear layers that have adapters.

    >>> groups("attention"), groups("o_proj,down_proj")
    (['linear_qkv', 'linear_proj'], ['linear_proj', 'linear_fc2'])
    """
    words = {
        "all": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
        "attention": "q_proj k_proj v_proj o_proj",
    }
    named = set(words.get(wanted, wanted.replace(",", " ")).split())
    return [word for word, names in TARGETS.items() if set(names) <= named]


def recipe(document: Document) -> dict[str, Any]:
    """Return what the recipe that a command names sets, by key, and what its short options do; nothing for another file.

    >>> from loadgauge.job_files.reading.argv import Argv
    >>> found = recipe(Argv("python run_recipe.py --recipe llama3_8b_sft_config --seq_length 8192", "hydra"))
    >>> found["model.hf_model_id"], found["model.tensor_model_parallel_size"], found["dataset.seq_length"]
    ('meta-llama/Meta-Llama-3-8B', '2', '8192')
    """
    if document.syntax != "argv":
        return {}
    values = {key: document.get(key) for key in (*CHOSEN, *SHORT)}
    passed = {
        key: str(value[0] if isinstance(value, list) else value)
        for key, value in values.items()
        if value is not MISSING
    }
    name = passed.get("recipe") or passed.get("recipe_name") or ""
    if not name and "model" in passed:
        mode = passed.get("mode", "pretrain")
        name = f"{passed['model']}_{'peft' if mode in ('lora', 'dora') else mode}_config"
    table = read_table("bridge_recipes.toml")
    words = table["recipes"].get(table["also"].get(name, name), "")
    below = {BENEATH[short]: value for short, _, value in (word.partition("=") for word in words.split())}
    below |= {BENEATH[short]: passed[key] for key, short in SHORT.items() if key in passed}
    if passed.get("peft_scheme", passed.get("peft", "")) in ("lora", "dora"):
        below.setdefault("peft.dim", "32")
    return below


@reads(*CHOSEN, *SHORT, "model.freeze_language_model", "model.freeze_vision_model")
def _recipe(keys: Keys) -> Facts:
    name = keys.raw("recipe")
    if keys.document.syntax == "argv" and keys.has("recipe") and not keys.has("model.hf_model_id"):
        keys.add(
            Uncounted(
                f"{keys.document.shown('recipe')}: {str(name)[:60]} is no recipe that is known, so what it sets is not counted",
                keys.document.shown("recipe"),
                known=False,
                effect="either",
            )
        )
    for narrow, parts in NARROW.items():
        keys.note(
            narrow,
            "its recipe keeps 16 bits of what is counted in 32",
            "saves",
            parts,
            0.5,
            when=keys.document.get(narrow) is not MISSING and narrow not in keys.document.names(),
        )
    for key, tower in (("freeze_language_model", "the language model"), ("freeze_vision_model", "the encoder")):
        keys.note(
            f"model.{key}",
            f"{tower} is not trained, and is counted as if it were",
            "saves",
            "gradients optimizer",
            when=keys.flag(f"model.{key}"),
            bare=True,
        )
    return {}


ZERO_SWITCHES = ("ddp.use_distributed_optimizer", "ddp.use_megatron_fsdp", "optimizer.use_distributed_optimizer")


def _zero_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    values, switch = at.inner.write(facts, keys), ZERO_SWITCHES[0]
    return values | {switch: bool(values[switch])}


@reads(write=_zero_written, inner=zero("ddp.", "optimizer.use_distributed_optimizer", "dist.use_megatron_fsdp"))
def _zero(keys: Keys, at: Named) -> Facts:
    """Megatron's, whose section a recipe that is not known may set."""
    return at.inner.read(keys) if (keys.has(*ZERO_SWITCHES) or keys.flag("dist.use_megatron_fsdp")) else {}


def _lora_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    if not facts.get("lora_rank"):
        return {at.rank: None, at.modules: None, "peft._target_": None}
    return {
        "peft._target_": "megatron.bridge.peft.lora.LoRA",
        at.rank: facts["lora_rank"],
        at.modules: groups(facts.get("lora_targets") or "all"),
    }


@reads(
    facts="lora_rank lora_targets",
    write=_lora_written,
    rank="peft.dim",
    modules="peft.target_modules",
    also=("peft._target_",),
)
def _lora(keys: Keys, at: Named) -> Facts:
    if not keys.has(at.rank, at.modules, "peft._target_"):
        return {"lora_rank": 0}
    keys.note(
        "peft._target_",
        "has adapters of another kind, counted as LoRA's",
        parts="gradients optimizer activations",
        when=(kind := keys.word("peft._target_")) is not None and not kind.endswith(".LoRA"),
    )
    chosen = keys.words(at.modules) or list(TARGETS)
    mixers = [name for name in chosen if name in ("in_proj", "out_proj")]  # of Mamba's layers
    keys.note(
        at.modules,
        "adapters of Mamba's layers are not counted",
        "costs",
        "gradients optimizer activations",
        bare=True,
        when=mixers,
    )
    chosen = [name for name in chosen if name not in mixers] or list(TARGETS)
    keys.refuse(at.modules, f"read: {', '.join(TARGETS)}", when=any(name not in TARGETS for name in chosen))
    return {"lora_rank": keys.whole(at.rank) or 32, "lora_targets": grouped(chosen, every=not mixers)}


@reads(inner=row("seq_len", "dataset.sequence_length", "dataset.seq_length", "model.seq_length"))
def _length(keys: Keys, at: Named) -> Facts:
    """The sequence: the dataset's, else the model's, which a recipe's dataset follows."""
    own = [key for key in at.inner.keys if keys.document.get(key) is not MISSING and key in keys.document.names()]
    return {
        "seq_len": keys.whole((own or [next((key for key in at.inner.keys if keys.has(key)), at.inner.keys[0])])[0])
    }


@reads(inner=row("model", "model.hf_model_id", "model.hf_path", "hf_path", "hf_model_path", kind="word", add=False))
def _model(keys: Keys, at: Named) -> Facts:
    return {"model": next((keys.word(key) for key in at.inner.keys if keys.has(key)), None)}


@reads(
    facts="mtp",
    write=lambda facts, keys, at: {at.key: 1 if facts.get("mtp") else 0 if keys.has(at.key) else None},
    key="model.mtp_num_layers",
)
def _next_tokens(keys: Keys, at: Named) -> Facts:
    """Return whether heads of the next tokens are trained: the model's, where it has as many as the recipe says."""
    many = keys.whole(at.key, minimum=0)
    spec = spec_of(keys, "model.hf_model_id") if many else None
    own = spec is not None and spec.num_nextn_predict_layers == many
    keys.note(
        at.key,
        f"{many} heads of the next tokens are trained too, whose sizes are not known",
        "costs",
        "weights gradients optimizer activations loss transient",
        0.25,
        when=many and not own,
    )
    return {"mtp": True} if own else {}


BRIDGE = Dialect(
    name="megatron-bridge",
    title="Megatron-Bridge configuration",
    versions="Megatron-Bridge 0.2 - 0.3",
    syntaxes=("yaml", "argv"),
    framework="megatron",
    style="hydra",
    blank={"yaml": "", "argv": "torchrun --nproc_per_node=1 pretrain.py\n"},
    beneath=recipe,
    ideas=(
        launched(),
        _recipe,
        tensor_parallel("model.tensor_model_parallel_size", "model.sequence_parallel"),
        pipeline(
            {
                "pp": "model.pipeline_model_parallel_size", "chunks": "model.virtual_pipeline_model_parallel_size",
                "chunk_layers": "model.num_layers_per_virtual_pipeline_stage", "layers": "model.num_layers",
                "first": "model.num_layers_in_first_pipeline_stage", "last": "model.num_layers_in_last_pipeline_stage",
                "accounted": "model.account_for_embedding_in_pipeline_split model.account_for_loss_in_pipeline_split",
            }
        ),
        context("model.context_parallel_size", "model.cp_comm_type"),
        experts(
            "model.expert_model_parallel_size", "model.expert_tensor_parallel_size",
            "model.tensor_model_parallel_size", "model.num_moe_experts",
        ),
        _zero,
        recompute("model."),
        row("micro_batch", "train.micro_batch_size"),
        row("global_batch", "train.global_batch_size"),
        _length,
        row("precision", "mixed_precision", words=RECIPES),
        row("optimizer", "optimizer.optimizer", words={"adam": "adamw", "sgd": "sgd-momentum", "muon": "muon", "dist_muon": "muon",
                                                    "lion": "lion"}),
        row("attention", "model.attention_backend", words=TRANSFORMER_ENGINE),
        offload("optimizer.", share=1.0),
        _lora,
        loss("model."),
        overlap(
            {
                "overlap_grad_reduce": "ddp.", "overlap_param_gather": "ddp.", "tp_comm_overlap": "comm_overlap.",
                "overlap_moe_expert_parallel_comm": "comm_overlap.", "overlap_p2p_comm": "comm_overlap.",
            }
        ),
        _next_tokens,
        _model,
    ),
)  # fmt: skip
