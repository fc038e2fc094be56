"""NeMo AutoModel's recipes (YAML): Hugging Face models on FSDP2."""

import math
import os
import re
from typing import Any

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.layout.axes import MODEL_PARALLEL
from loadgauge.core.families.catalogue import config, find
from loadgauge.core.families.hf import model_types
from loadgauge.core.families.named.listed import changed
from loadgauge.job_files.hugging_face.huggingface import compiled, liger
from loadgauge.job_files.ideas import (
    ATTENTION,
    BITSANDBYTES,
    CUT_LOSS,
    MISSING,
    SPLITS,
    STAYS,
    Dialect,
    Facts,
    Idea,
    Keys,
    Named,
    adapters,
    in_pieces,
    instantiated,
    layers,
    names_in,
    quantised,
    reads,
    row,
)

DTYPES = {"bf16": "bf16-pure", "bfloat16": "bf16-pure", "torch.bfloat16": "bf16-pure", "auto": "bf16-pure"}
DTYPES |= {"float32": "bf16-autocast", "fp32": "bf16-autocast", "torch.float32": "bf16-autocast"}
"""`model.torch_dtype`: what the weights are trained in; `auto` is the checkpoint's. FSDP2 casts float32 ones to bfloat16."""
OPTIMIZERS = {
    "torch.optim.AdamW": "adamw", "torch.optim.Adam": "adamw", "torch.optim.SGD": "sgd", "dion.Muon": "muon", **BITSANDBYTES,
    "adamw": "adamw", "adam": "adamw", "muon": "muon", "dion.NorMuon": "muon", "normuon": "muon", "fused_adam": "adamw",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam": "adamw", "flashoptim.FlashAdamW": "adamw",
    "transformer_engine.pytorch.optimizers.FusedAdam": "adamw", "flash_adamw": "adamw", "torch.optim.Adafactor": "adafactor",
}  # fmt: skip
"""Classes, and names of `components/optim/optimizer.py`."""
LOSSES = "nemo_automodel.components.loss."
LOSSES_OF = {
    f"{LOSSES}masked_ce.MaskedCrossEntropy": "float32", f"{LOSSES}linear_ce.FusedLinearCrossEntropy": CUT_LOSS,
    f"{LOSSES}chunked_ce.ChunkedCrossEntropy": "compiled", f"{LOSSES}te_parallel_ce.TEParallelCrossEntropy": "fused",
    "FusedLinearCrossEntropy": CUT_LOSS, "TEParallelCrossEntropy": "fused", "MaskedCrossEntropy": "float32",
    "torch.nn.CrossEntropyLoss": "plain", "torch.nn.functional.cross_entropy": "plain", "ChunkedCrossEntropy": "compiled",
    "nemo_automodel.components.models.nemotron_parse.nemotron_parse_loss.NemotronParseLoss": "float32",
}  # fmt: skip
SCHEDULES = {
    "1f1b": "1f1b", "interleaved1f1b": "interleaved", "gpipe": "gpipe", "zbvzerobubble": "zb-v", "dualpipev": "dualpipev",
    "interleaved_1f1b": "interleaved",
}  # fmt: skip
"""`get_schedule_class` of torch.distributed.pipelining takes a name in any case."""
SIZES = names_in(
    """
    architectures vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok
    shared_expert_intermediate_size decoder_sparse_step mlp_only_layers first_k_dense_replace tie_word_embeddings
    max_position_embeddings q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim sliding_window layer_types
    n_layer n_embd n_head n_positions n_inner attention_bias mlp_bias
    """
)
"""Keys of a configuration that decide how large a model is."""
OTHER_RECIPES = {
    "biencoder": "trains embeddings of queries and passages", "bi_encoder": "trains embeddings of queries and passages",
    "crossencoder": "ranks passages", "cross_encoder": "ranks passages", "diffusionrecipe": "denoises images or video",
    "traindiffusion": "denoises images or video", "formultimodal": "makes images beside text", "hardnegatives": "trains nothing",
    "embeddingdistill": "trains embeddings",
    **dict.fromkeys(("eagle", "dflash", "dspark", "domino", "jetspec", "vispec"), "trains a model that drafts for another"),
}  # fmt: skip
"""Parts of the names of recipes that train something else, and what."""
D = "distributed."


def _size(keys: Keys, name: str) -> int | None:
    """A size of `distributed`; `none` is worked out from the number of GPUs."""
    return None if str(keys.raw(name)).lower() in ("none", "null") else keys.whole(name)


def _model_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    present = [name for name in at.names if keys.document.get(name) is not MISSING]
    return dict.fromkeys(present[1:]) | {(present or at.names)[0]: facts.get("model")}


@reads(
    facts="model config",
    write=_model_written,
    whole="model.config",
    names=("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path"),
    sizes=tuple(f"model.config.{name}" for name in SIZES),
)
def _model(keys: Keys, at: Named) -> Facts:
    """The model by its name, or by the sizes of a configuration whose class is named (`from_config`)."""
    section, name = keys.document.get(at.whole), keys.agreed(at.names, keys.word)
    if isinstance(section, str):
        return {"model": _named(section)}
    other = next((key for key in at.sizes if keys.raw(key) not in (None, [])), None)
    if other is None or not isinstance(section, dict):
        return {"model": None if name is None else _named(name)}
    if name is not None:
        other_sizes = {key: section[key] for key in SIZES if section.get(key) not in (None, [])}
        keys.remark(f"{keys.document.shown(other)} changes the sizes of {name}")
        return {"config": changed(config(find(_named(name)).spec.name), other_sizes)}
    kind = section.get("model_type") or _model_type(str(section.get("_target_")))
    return {"config": {str(key): value for key, value in section.items()} | {"model_type": kind}}


def _named(path: str) -> str:
    """The model that a path names by its last part, where nothing is there."""
    return path.rstrip("/").rpartition("/")[2] if path.startswith("/") and not os.path.exists(path) else path


def _model_type(target: str) -> str:
    """The `model_type` of a configuration class, by its module, else by its name.

    >>> _model_type("transformers.models.qwen3_moe.configuration_qwen3_moe.Qwen3MoeConfig"), _model_type("transformers.LlamaConfig")
    ('qwen3_moe', 'llama')
    """
    if (module := re.search(r"\bmodels\.(\w+)\.", target)) is not None:
        return module[1]
    name = target.rpartition(".")[2].removesuffix("Config")
    return {kind.replace("_", ""): kind for kind in model_types()}.get(name.lower(), name.lower())


LEFT = "layers of experts stay gathered after the backward of every micro-batch but the last, counted as gathered throughout"
"""Effect of the switch of `components/moe/fsdp_mixin.py`."""


DEGREES_POLICY = f"{D}offload_policy._target_"


def _usual(keys: Keys, at: Named) -> int:
    """The ZeRO stage where nothing says whether layers stay gathered: with expert or pipeline parallelism they do
    (`components/moe/parallelizer.py`, `components/distributed/parallelizer.py`)."""
    if (_size(keys, at.ep) or 1) > 1:
        return 3 if keys.flag(at.experts) else 2
    return 2 if (_size(keys, at.pp) or 1) > 1 else 3


def _degrees_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    stage = facts.get("zero") or 0
    replicas = facts.get("replicas") or 1
    if stage == 1:
        return {}
    sizes = {key: facts.get(axis) or 1 for key, axis in ((at.tp, "tp"), (at.cp, "cp"), (at.pp, "pp"), (at.ep, "ep"))}
    wide = sizes[at.ep] > 1 or sizes[at.pp] > 1
    shared = bool(facts.get("sequence_parallel"))
    target = "torch.distributed.fsdp.CPUOffloadPolicy" if facts.get("offload") == "all" else None
    stated = {key: size > 1 or keys.has(key) or keys.document.get(key) not in (None, 1) for key, size in sizes.items()}
    return {
        at.strategy: "fsdp2" if stage else "ddp",
        at.later: False if facts.get("gradient_sync") == "each" else True if keys.has(at.later) else None,
        at.reshard: stage == 3 if stage and (wide or stage == 2 or keys.has(at.reshard)) else None,
        DEGREES_POLICY: target if target or keys.has(DEGREES_POLICY) else STAYS,
        **{key: size if stated[key] else None for key, size in sizes.items()},
        at.copies: replicas if replicas > 1 else 1 if _size(keys, at.copies) else None,
        at.whole: STAYS if _size(keys, at.whole) is None else facts.get("dp") if "gpus" in facts else None,
        at.shared: shared if shared or keys.has(at.shared) else None,
    }


@reads(
    facts="tp cp pp ep zero replicas dp sequence_parallel gradient_sync offload",
    write=_degrees_written,
    tp=f"{D}tp_size",
    cp=f"{D}cp_size",
    pp=f"{D}pp_size",
    ep=f"{D}ep_size",
    whole=f"{D}dp_size",
    copies=f"{D}dp_replicate_size",
    shared=f"{D}sequence_parallel",
    strategy=f"{D}strategy",
    reshard=f"{D}reshard_after_forward",
    later=f"{D}defer_fsdp_grad_sync",
    experts=f"{D}moe.reshard_after_forward",
    also=(DEGREES_POLICY,),
    stage=f"{D}zero_dp_strategy",
    kept="model.backend.enable_fsdp_optimizations",
)
def _degrees(keys: Keys, at: Named) -> Facts:
    kind = keys.choice(at.strategy, {"fsdp2": 3, "ddp": 0, "megatron_fsdp": 1, "megatronfsdp": 1})
    if kind == 1:
        number = keys.whole(at.stage, minimum=0)
        kind = 3 if number is None else number
    elif kind is None or kind == 3:
        kind = _usual(keys, at) if keys.flag(at.reshard) is None else 3 if keys.flag(at.reshard) else 2
        stays = kind == 3 and keys.flag(at.kept)
        keys.note(at.kept, LEFT, "saves", "gathered", when=stays)
        kind = 2 if stays else kind
    size = {axis: _size(keys, getattr(at, axis)) or 1 for axis in MODEL_PARALLEL if axis != "etp"}
    replicas = _size(keys, at.copies)
    ranks_of_data = _size(keys, at.whole)
    inner = size["tp"] * size["cp"]
    if ranks_of_data is None and size["ep"] > 1 and not keys.given.get("gpus") and not _machines.read(keys):
        # As few GPUs as the experts need; how many there are is said to the launcher.
        ranks_of_data = (replicas or 1) * math.lcm(inner, size["ep"]) // inner
    return {
        "offload": "all" if "CPUOffloadPolicy" in (keys.word(DEGREES_POLICY) or "") else "none",
        **size,
        "zero": 0 if keys.given.get("gpus") == 1 else kind,
        "sequence_parallel": bool(keys.flag(at.shared)) and size["tp"] > 1,
        # As `FSDP2Config` has it, unless it is told otherwise (`components/distributed/utils.py`, `get_sync_ctx`).
        "gradient_sync": "each" if keys.flag(at.later) is False else "last",
        "replicas": replicas,
        "dp": ranks_of_data,
    }


def _pipeline_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    sequences, unsplit = facts.get("micro_batch") or 1, (facts.get("pp") or 1) == 1
    spelled = {ours: theirs for theirs, ours in reversed(SCHEDULES.items())}.get(facts.get("schedule") or "1f1b")
    return {
        at.whole: facts.get("global_batch") or STAYS,
        at.local: sequences if unsplit else sequences * (facts.get("accumulation") or 1),
        at.micro: None if unsplit else sequences,
        at.schedule: None if unsplit else spelled,
        at.layers: None if unsplit else STAYS,
        at.rounded: None if unsplit else STAYS,
    }


@reads(
    facts=names_in("global_batch micro_batch schedule layers_per_stage"),
    write=_pipeline_written,
    schedule=f"{D}pipeline.pp_schedule",
    micro=f"{D}pipeline.pp_microbatch_size",
    whole="step_scheduler.global_batch_size",
    local="step_scheduler.local_batch_size",
    layers=f"{D}pipeline.layers_per_stage",
    rounded=f"{D}pipeline.round_virtual_stages_to_pp_multiple",
)
def _pipeline(keys: Keys, at: Named) -> Facts:
    facts: Facts = {"global_batch": keys.whole(at.whole) or 32, "micro_batch": keys.whole(at.local) or 1}
    if (_size(keys, f"{D}pp_size") or 1) > 1:
        degrees = math.prod(_size(keys, f"{D}{axis}_size") or 1 for axis in SPLITS)
        in_pieces(keys, at.local, facts["global_batch"], degrees, _machines.read(keys))
        facts["micro_batch"] = keys.whole(at.micro) or 1
        facts["schedule"] = keys.choice(at.schedule, SCHEDULES) or "1f1b"
        many = keys.whole(at.layers) or (0 if facts["schedule"] == "interleaved" else None)
        how = keys.choice(at.rounded, {"up": "up", "down": "down"})
        # Without a number an interleaved schedule has two stages a rank (`calculate_virtual_stages`).
        facts["layers_per_stage"] = None if many is None else f"{many},{how or ''}"
    return facts


HEADED = "all,lm_head"
"""Every linear layer, the head's as well."""


def _adapter() -> Idea:
    target, rank, modules, every, dropped = (
        f"peft.{name}" for name in ("_target_", "dim", "target_modules", "match_all_linear", "dropout")
    )
    four, eight, nested, kind = (
        f"quantization.{name}"
        for name in ("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant", "bnb_4bit_quant_type")
    )

    def on(keys: Keys) -> bool:
        there, odd = keys.has(target, rank, modules, every), next(filter(keys.flag, (four, eight)), "")
        keys.refuse(odd, "says a quantised base, and no adapter trains on it", when=odd and not there)
        return there

    def named(keys: Keys) -> Facts:
        chosen, left = keys.words(modules) or [], keys.words("peft.exclude_modules") or []
        # `ModuleMatcher.match`: but for the names that it looks for by itself, the head is a linear layer like any other.
        if "*" in chosen or keys.flag(every) or (left and not chosen and "lm_head" not in " ".join(left)):
            key = modules if chosen else every if keys.flag(every) else "peft.exclude_modules"
            fused = "Linear" in str(keys.raw("loss_fn._target_"))
            for more, there in (("on the head", fused), ("on experts", "*" in chosen)):
                why = f"puts adapters {more} too, which are not counted"
                keys.note(key, why, "costs", "weights gradients optimizer activations loss transient", 0.3, when=there)
            return {"lora_targets": "all" if fused else HEADED}
        if keys.flag(every) or not chosen or set(chosen) & {"*_proj", "*", "all-linear"}:
            return {"lora_targets": "all"}
        names = ",".join(name.rpartition(".")[2].lstrip("*") for name in chosen)
        keys.note(
            modules,
            "is a pattern, which is counted as all layers",
            "saves",
            "activations gradients optimizer",
            when="*" in names,
        )
        return {"lora_targets": "all" if "*" in names else names}

    def written(facts: Facts, keys: Keys) -> dict[str, Any]:
        if facts.get("lora_targets") == HEADED:
            stays = keys.has("peft.exclude_modules") or "*" in (keys.words(modules) or [])
            return {} if stays else {every: True, modules: None}
        values = layers(modules, "*_proj").write(facts, keys)
        return {every: None} | {
            key: [f"*{name}" for name in value] if isinstance(value, list) else value for key, value in values.items()
        }

    return adapters(
        on,
        row("lora_rank", rank, default=8),
        Idea(keys=(modules, every), facts=("lora_targets",), read=named, write=written),
        row("lora_dropout", dropped, kind="real", default=0.0, quiet=0.0),
        quantised(four=four, eight=eight, kind=kind, nested=nested, double=False),
        switch={target: "nemo_automodel.components._peft.lora.PeftConfig"},
    )


def _checkpointing_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    word = facts.get("recompute") or "none"
    values: dict[str, Any] = {at.key: "selective" if word == "per-op" else word == "full"}
    values |= {at.drafted: False} if keys.flag(at.drafted) and word != "full" else {}
    return values if word in ("none", "full", "per-op") else {}


@reads(
    facts="recompute",
    write=_checkpointing_written,
    key=f"{D}activation_checkpointing",
    drafted="model.base_activation_checkpointing",
)
def _checkpointing(keys: Keys, at: Named) -> Facts:
    """Whole layers; `selective` keeps products of PyTorch's list, as torchtitan's does (`activation_checkpointing.py`)."""
    if keys.raw(at.key) == "selective":
        return {"recompute": "per-op"}
    on = keys.raw(at.key) == "full" or (keys.has(at.key) and keys.flag(at.key)) or keys.flag(at.drafted)
    return {"recompute": "full" if on else "none"}


def _used(keys: Keys, at: Named) -> str | None:
    packed = next((name for name in at.packs if keys.whole(name, minimum=0)), None)
    return packed or next((name for name in (*at.sets, *at.cut) if keys.has(name)), None)


@reads(
    facts="seq_len",
    write=lambda facts, keys, at: {_used(keys, at) or at.packs[0]: facts["seq_len"]},
    packs=("packed_sequence.packed_sequence_size", "packed_sequence.pack_size"),
    sets=tuple(f"dataset.{name}" for name in ("seq_length", "seq_len", "max_seq_len", "max_length")),
    cut=("packed_sequence.max_length", "dataloader.collate_fn.max_length"),
)
def _length(keys: Keys, at: Named) -> Facts:
    """Tokens of a packed sequence (0: not packed), or those that the data set or its collator pads or cuts samples to."""
    name = _used(keys, at)
    return {"seq_len": None if name is None else keys.whole(name)}


PRECISION_NARROW = dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), True) | dict.fromkeys(
    ("float32", "fp32", "torch.float32"), False
)


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    asked = facts.get("precision")
    narrow = asked == "bf16-pure" or (asked == "bf16-mixed-16" and _main_weights(keys))
    if not narrow and asked not in ("bf16-autocast", "fp32"):
        return {}
    first, *others = [name for name in at.names if keys.document.get(name) is not MISSING] or at.names[:1]
    cast = asked == "fp32" or keys.choice(at.cast, PRECISION_NARROW) is False
    return {
        first: "bf16" if narrow else "float32",
        at.cast: ("float32" if asked == "fp32" else "bfloat16") if cast else STAYS,
        **dict.fromkeys(others),
    }


@reads(
    facts="precision",
    write=_precision_written,
    names=("model.torch_dtype", "model.dtype"),
    cast=f"{D}mp_policy.param_dtype",
)
def _precision(keys: Keys, at: Named) -> Facts:
    """Return what weights are trained in, and what FSDP2 casts them to as it gathers them (`mp_policy`; else bfloat16); it reduces
    gradients in float32, and sums them so over micro-batches."""
    name = keys.agreed(at.names, lambda key: keys.choice(key, DTYPES)) or "bf16-pure"
    if name == "bf16-pure":
        wide, whole = keys.word(f"{D}strategy") in (None, "fsdp2"), _main_weights(keys)
        keys.note(
            "optimizer._target_",
            "keeps copies of its own of the weights, and sums of gradients in float32 beside 16 bits are not counted",
            "costs",
            "gradients transient",
            when=whole and wide,
        )
        return {"precision": "bf16-mixed-16" if whole else f"{name}-32" if wide else name}
    return {"precision": "fp32" if keys.choice(at.cast, PRECISION_NARROW) is False else name}


def _main_weights(keys: Keys) -> bool | None:
    """Return whether Transformer Engine's Adam keeps float32 copies of 16-bit weights; None for another optimizer. Its class by the
    short name has them unless it is told otherwise (`FusedAdamConfig`)."""
    name = keys.word("optimizer._target_") or ""
    if not name.endswith(("FusedAdam", "fused_adam")):
        return None
    stated = keys.flag("optimizer.master_weights")
    return name == "fused_adam" if stated is None else stated


OPTIMIZER_PLAIN, OPTIMIZER_MOMENTS = (
    instantiated("optimizer._target_", OPTIMIZERS),
    ("optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype"),
)


def _optimizer_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    values = OPTIMIZER_PLAIN.write(facts, keys)
    lists = facts.get("optimizer") == "adamw-foreach" and (facts.get("tp") or 1) > 1
    return values | ({"optimizer.foreach": True} if lists and values else {})


@reads(*OPTIMIZER_PLAIN.keys, "optimizer.master_weights", facts=OPTIMIZER_PLAIN.facts, write=_optimizer_written)
def _optimizer(keys: Keys) -> Facts:
    """The optimizer by its class; PyTorch's runs as a loop where tensor parallelism is on (`_foreach_for_mesh`)."""
    facts, main = OPTIMIZER_PLAIN.read(keys), _main_weights(keys)
    if main is not None:
        narrow = all("bf" in str(keys.raw(key)).replace("loat", "") for key in OPTIMIZER_MOMENTS)
        half = (keys.word("model.torch_dtype") or "bf16") not in ("float32", "fp32", "torch.float32")
        return {"optimizer": "adamw-anyprecision" if half and not main and not narrow else "adamw-fused"}
    if (
        facts["optimizer"] == "adamw-foreach"
        and (_size(keys, f"{D}tp_size") or 1) > 1
        and not keys.has("optimizer.foreach")
    ):
        return {"optimizer": "adamw-loop"}
    return facts


@reads(
    facts="task teacher head",
    write=lambda facts, keys, at: {at.teacher: facts.get("teacher")} if keys.has(at.teacher) else {},
    teacher="teacher_model.pretrained_model_name_or_path",
    labels="model.num_labels",
)
def _task(keys: Keys, at: Named) -> Facts:
    """Distillation where a teacher is beside the model; recipes of other models than those that write text are not read."""
    recipe, name = str(keys.raw("recipe") or keys.raw("recipe._target_")).lower(), keys.word(at.teacher)
    other = next((task for part, task in OTHER_RECIPES.items() if part in recipe), None)
    keys.refuse("recipe", f"{keys.raw('recipe')} {other}, which is not modelled", when=other is not None)
    keys.note(
        "recipe",
        "fills in masked tokens, all of which see each other; counted as SFT",
        parts="activations loss",
        when="diffusionlm" in recipe or "diffusiongemma" in recipe,
    )
    head = (keys.whole(at.labels) or 2) if "sequenceclassification" in recipe else None
    return {"task": "gkd" if name else None, "teacher": name, "head": head}


STARTED = {"slurm": ("nodes", "ntasks_per_node"), "ci": ("nodes", "nproc_per_node")}
"""Sections that say the machines: those of the tool's own launcher, and of the tests that it runs a recipe in."""


@reads(*(f"{section}.{name}" for section, names in STARTED.items() for name in names), facts="gpus_per_node nodes")
def _machines(keys: Keys) -> Facts:
    for section, names in STARTED.items():
        nodes, each = (keys.whole(f"{section}.{name}") for name in names)
        if nodes or each:
            return {"gpus_per_node": each or 8, "nodes": nodes or 1}
    return {}


LIGER_TAKES = frozenset(
    names_in(
        """
        deepseek_v2 gemma gemma2 gemma3 gemma3_text glm4 glm4v glm4v_moe internvl llama4 llama4_text llava granite mllama
        mistral mixtral nemotron olmo2 olmo3 pixtral qwen2_vl qwen2_5_vl smollm3 smolvlm phi3 paligemma falcon_h1
        hunyuan_v1_dense exaone4
        """
    )
)
"""Models of transformers' own code that Liger patches (liger-kernel 0.8, `monkey_patch.py`)."""
LIGER_FORCED = LIGER_TAKES | {
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "gemma4",
    "gpt_oss",
    "qwen3_vl",
    "deepseek_v3",
}
"""The same with those that AutoModel has code of its own for (`_transformers/registry.py`), under `model.force_hf`."""


@reads(
    inner=liger("model.use_liger_kernel"),
    names=tuple(f"model.{section}pretrained_model_name_or_path" for section in ("", "config.")),
    degrees=(f"{D}tp_size", f"{D}cp_size"),
)
def _liger(keys: Keys, at: Named) -> Facts:
    """Liger's kernels, which AutoModel gives to transformers' own code alone, on one tensor and context parallel rank, unless it is
    told not to (`_transformers/auto_model.py`)."""
    key, name = at.inner.keys[0], keys.agreed(at.names, keys.word)
    try:
        kind = find(_named(name)).spec.model_type if name else ""
    except ConfigError:
        return at.inner.read(keys)
    split = any((_size(keys, degree) or 1) > 1 for degree in at.degrees)
    taken = kind in (LIGER_FORCED if keys.flag("model.force_hf") else LIGER_TAKES) and not split
    if keys.flag(key) and name and not taken:
        keys.note(
            key, "does nothing beside AutoModel's own code of a model, nor with tensor or context parallelism", ""
        )
        return {"kernels": "native"}
    keys.note(
        key,
        "is on by default where liger-kernel is there, as in NVIDIA's container: kernels that keep fewer tensors",
        "saves",
        "activations transient",
        0.3,
        when=taken and not keys.has(key),
    )
    return at.inner.read(keys)


def _tower_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    how = facts.get("tower")
    return {at.still: how == "frozen" if how in ("frozen", "trained") else None, at.pixels: facts.get("max_pixels")}


@reads(
    facts="tower max_pixels",
    write=_tower_written,
    still="freeze_config.freeze_vision_tower",
    pixels="processor.max_pixels",
)
def _tower(keys: Keys, at: Named) -> Facts:
    """A tower of pictures stays as it is where a section freezes anything, unless it says otherwise
    (`apply_parameter_freezing` of `components/utils/model_utils.py`); with adapters their patterns say what of it has any."""
    facts: Facts = {"max_pixels": keys.whole(at.pixels)}
    if keys.has("peft.dim", "peft._target_") or not any(
        name.startswith("freeze_config.") for name in keys.document.names()
    ):
        return facts
    return facts | {"tower": "trained" if keys.flag(at.still) is False else "frozen"}


AUTOMODEL = Dialect(
    name="automodel",
    title="NeMo AutoModel recipe",
    versions="NeMo AutoModel 0.3 - 0.7",
    syntaxes=("yaml",),
    framework="torchtitan",
    blank={"yaml": "recipe: TrainFinetuneRecipeForNextTokenPrediction\n"},
    ideas=(
        _model,
        _task,
        _degrees,
        _machines,
        _pipeline,
        _length,
        _adapter(),
        _checkpointing,
        _precision,
        _optimizer,
        _liger,
        _tower,
        row("loss", "loss_fn._target_", words=LOSSES_OF, default="float32"),
        row(
            "attention", "model.attn_implementation", words={**ATTENTION, "te": "flash", "flex": "fa2", "ffpa": "flash"}
        ),
        compiled("compile.enabled"),
    ),
)
