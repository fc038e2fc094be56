"""NeMo AutoModel's recipes (YAML): Hugging Face models on FSDP2."""

from __future__ import annotations

import math
import os
import re
from typing import Any

import msgspec

from loadgauge.core.families.catalogue import config, find
from loadgauge.core.families.hf import model_types
from loadgauge.core.families.named.listed import changed
from loadgauge.job_files.hugging_face.huggingface import compiled, liger
from loadgauge.job_files.ideas import (
    ATTENTION,
    BITSANDBYTES,
    MISSING,
    Dialect,
    Facts,
    Idea,
    Keys,
    adapters,
    instantiated,
    layers,
    names_in,
    quantised,
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
    f"{LOSSES}masked_ce.MaskedCrossEntropy": "float32", f"{LOSSES}linear_ce.FusedLinearCrossEntropy": "chunked",
    f"{LOSSES}chunked_ce.ChunkedCrossEntropy": "compiled", f"{LOSSES}te_parallel_ce.TEParallelCrossEntropy": "fused",
    "FusedLinearCrossEntropy": "chunked", "TEParallelCrossEntropy": "fused", "MaskedCrossEntropy": "float32",
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
    if str(keys.raw(name)).lower() in ("none", "null"):
        return None
    return keys.whole(name)


def _model() -> Idea:
    """The model by its name, or by the sizes of a configuration whose class is named (`from_config`)."""
    names = ("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path")
    whole, sizes = "model.config", tuple(f"model.config.{name}" for name in SIZES)

    def read(keys: Keys) -> Facts:
        section, name = keys.document.get(whole), keys.agreed(names, keys.word)
        if isinstance(section, str):
            return {"model": _named(section)}
        other = next((key for key in sizes if keys.raw(key) not in (None, [])), None)
        if other is None or not isinstance(section, dict):
            return {"model": None if name is None else _named(name)}
        if name is not None:
            other_sizes = {key: section[key] for key in SIZES if section.get(key) not in (None, [])}
            keys.remarks[f"{keys.document.shown(other)} changes the sizes of {name}"] = None
            return {"config": changed(config(find(_named(name)).spec.name), other_sizes)}
        kind = section.get("model_type") or _model_type(str(section.get("_target_")))
        return {"config": {str(key): value for key, value in section.items()} | {"model_type": kind}}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        present = [name for name in names if keys.document.get(name) is not MISSING]
        return dict.fromkeys(present[1:]) | {(present or names)[0]: facts.get("model")}

    return Idea(keys=(whole, *names, *sizes), facts=("model", "config"), read=read, write=write)


def _named(path: str) -> str:
    """The model that a path names by its last part, where nothing is there."""
    return path.rstrip("/").rpartition("/")[2] if path.startswith("/") and not os.path.exists(path) else path


def _model_type(target: str) -> str:
    """The `model_type` of a configuration class, by its module, else by its name.

    >>> _model_type("transformers.models.qwen3_moe.configuration_qwen3_moe.Qwen3MoeConfig"), _model_type("transformers.LlamaConfig")
    ('qwen3_moe', 'llama')
    """
    module = re.search(r"\bmodels\.(\w+)\.", target)
    if module is not None:
        return module[1]
    name = target.rpartition(".")[2].removesuffix("Config")
    alike = {kind.replace("_", ""): kind for kind in model_types()}
    return alike.get(name.lower(), name.lower())


LEFT = "layers of experts stay gathered after the backward of every micro-batch but the last, counted as gathered throughout"
"""Effect of the switch of `components/moe/fsdp_mixin.py`."""


def _degrees() -> Idea:
    tp, cp = f"{D}tp_size", f"{D}cp_size"
    pp, ep = f"{D}pp_size", f"{D}ep_size"
    whole, copies = f"{D}dp_size", f"{D}dp_replicate_size"
    shared, strategy, offload = f"{D}sequence_parallel", f"{D}strategy", f"{D}offload_policy"
    reshard, later, experts = f"{D}reshard_after_forward", f"{D}defer_fsdp_grad_sync", f"{D}moe.reshard_after_forward"
    policy, stage = f"{offload}._target_", f"{D}zero_dp_strategy"
    kept = "model.backend.enable_fsdp_optimizations"
    owned = (tp, cp, pp, ep, whole, copies, shared, strategy, reshard, later, experts, policy, stage, kept)

    def usual(keys: Keys) -> int:
        """The ZeRO stage where nothing says whether layers stay gathered: with expert or pipeline parallelism they do
        (`components/moe/parallelizer.py`, `components/distributed/parallelizer.py`)."""
        if (_size(keys, ep) or 1) > 1:
            return 3 if keys.flag(experts) else 2
        return 2 if (_size(keys, pp) or 1) > 1 else 3

    def read(keys: Keys) -> Facts:
        kind = keys.choice(strategy, {"fsdp2": 3, "ddp": 0, "megatron_fsdp": 1, "megatronfsdp": 1})
        if kind == 1:
            number = keys.whole(stage, minimum=0)
            kind = 3 if number is None else number
        elif kind is None or kind == 3:
            kind = usual(keys) if keys.flag(reshard) is None else 3 if keys.flag(reshard) else 2
            if kind == 3 and keys.flag(kept):
                kind = 2
                keys.note(kept, LEFT, "saves", "gathered")
        ranks = _size(keys, tp) or 1
        facts: Facts = {
            "offload": "all" if "CPUOffloadPolicy" in (keys.word(policy) or "") else "none",
            "tp": ranks,
            "cp": _size(keys, cp) or 1,
            "pp": _size(keys, pp) or 1,
            "ep": _size(keys, ep) or 1,
            "zero": kind,
            "sequence_parallel": bool(keys.flag(shared)) and ranks > 1,
            # As `FSDP2Config` has it, unless it is told otherwise (`components/distributed/utils.py`, `get_sync_ctx`).
            "gradient_sync": "each" if keys.flag(later) is False else "last",
        }
        if keys.given.get("gpus") == 1:
            facts["zero"] = 0
        replicas, ranks_of_data = _size(keys, copies), _size(keys, whole)
        if replicas is not None:
            facts["replicas"] = replicas
        if ranks_of_data is not None:
            facts["dp"] = ranks_of_data
        elif facts["ep"] > 1 and not keys.given.get("gpus"):
            # As few GPUs as the experts need; how many there are is said to the launcher.
            inner = facts["tp"] * facts["cp"]
            facts["dp"] = (replicas or 1) * math.lcm(inner, facts["ep"]) // inner
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        stage = facts.get("zero") or 0
        if stage == 1:
            return {}
        values: dict[str, Any] = {strategy: "fsdp2" if stage else "ddp"}
        values[later] = False if facts.get("gradient_sync") == "each" else True if keys.has(later) else None
        wide = (facts.get("ep") or 1) > 1 or (facts.get("pp") or 1) > 1
        values[reshard] = stage == 3 if stage and (wide or stage == 2 or keys.has(reshard)) else None
        target = "torch.distributed.fsdp.CPUOffloadPolicy" if facts.get("offload") == "all" else None
        values |= {policy: target} if target or keys.has(policy) else {}
        for key, axis in ((tp, "tp"), (cp, "cp"), (pp, "pp"), (ep, "ep")):
            size = facts.get(axis) or 1
            values[key] = size if size > 1 or keys.document.get(key) not in (None, 1) else None
            if keys.has(key):
                values[key] = size
        replicas = facts.get("replicas") or 1
        values[copies] = replicas if replicas > 1 else 1 if _size(keys, copies) else None
        if _size(keys, whole) is not None:
            values[whole] = facts.get("dp") if "gpus" in facts else None
        values[shared] = (
            bool(facts.get("sequence_parallel")) if keys.has(shared) or facts.get("sequence_parallel") else None
        )
        return values

    return Idea(
        keys=owned,
        facts=names_in("tp cp pp ep zero replicas dp sequence_parallel gradient_sync offload"),
        read=read,
        write=write,
    )


def _pipeline() -> Idea:
    schedule, micro = f"{D}pipeline.pp_schedule", f"{D}pipeline.pp_microbatch_size"
    whole, local = "step_scheduler.global_batch_size", "step_scheduler.local_batch_size"
    layers, rounded = f"{D}pipeline.layers_per_stage", f"{D}pipeline.round_virtual_stages_to_pp_multiple"

    def read(keys: Keys) -> Facts:
        facts: Facts = {"global_batch": keys.whole(whole) or 32, "micro_batch": keys.whole(local) or 1}
        if (_size(keys, f"{D}pp_size") or 1) > 1:
            facts["micro_batch"] = keys.whole(micro) or 1
            facts["schedule"] = keys.choice(schedule, SCHEDULES) or "1f1b"
            many = keys.whole(layers) or (0 if facts["schedule"] == "interleaved" else None)
            how = keys.choice(rounded, {"up": "up", "down": "down"})
            # Without a number an interleaved schedule has two stages a rank (`calculate_virtual_stages`).
            facts["layers_per_stage"] = None if many is None else f"{many},{how or ''}"
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        sequences, stages = facts.get("micro_batch") or 1, facts.get("pp") or 1
        values: dict[str, Any] = {whole: facts["global_batch"]} if facts.get("global_batch") else {}
        if stages == 1:
            return values | {local: sequences, micro: None, schedule: None, layers: None, rounded: None}
        spelled = {ours: theirs for theirs, ours in reversed(SCHEDULES.items())}.get(facts.get("schedule") or "1f1b")
        accumulation = facts.get("accumulation") or 1
        return values | {local: sequences * accumulation, micro: sequences, schedule: spelled}

    owned, facts = (
        (schedule, micro, whole, local, layers, rounded),
        names_in("global_batch micro_batch schedule layers_per_stage"),
    )
    return Idea(keys=owned, facts=facts, read=read, write=write)


def _adapter() -> Idea:
    target, rank, modules, every, dropped = (
        f"peft.{name}" for name in ("_target_", "dim", "target_modules", "match_all_linear", "dropout")
    )
    four, eight, nested, kind = (
        f"quantization.{name}"
        for name in ("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant", "bnb_4bit_quant_type")
    )

    def on(keys: Keys) -> bool:
        there, odd = keys.has(target, rank, modules, every), next(filter(keys.flag, (four, eight)), None)
        if odd and not there:
            raise keys.wrong(odd, "says a quantised base, and no adapter trains on it")
        return there

    def named(keys: Keys) -> Facts:
        chosen, left = keys.words(modules) or [], keys.words("peft.exclude_modules") or []
        # `ModuleMatcher.match`: but for the names that it looks for by itself, the head is a linear layer like any other.
        if "*" in chosen or keys.flag(every) or (left and not chosen and "lm_head" not in " ".join(left)):
            more = "on the head and on experts" if "*" in chosen else "on the head"
            why = f"puts adapters {more} too, which are not counted"
            parts = "weights gradients optimizer activations loss transient"
            keys.note(
                modules if chosen else every if keys.flag(every) else "peft.exclude_modules", why, "costs", parts, 0.3
            )
        if keys.flag(every) or not chosen or set(chosen) & {"*_proj", "*", "all-linear"}:
            return {"lora_targets": "all"}
        names = [name.rpartition(".")[2].lstrip("*") for name in chosen]
        if not any("*" in name for name in names):
            return {"lora_targets": ",".join(names)}
        why = "is a pattern, which is counted as all layers"
        keys.note(modules, why, "saves", "activations gradients optimizer")
        return {"lora_targets": "all"}

    def written(facts: Facts, keys: Keys) -> dict[str, Any]:
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


def _checkpointing() -> Idea:
    """Whole layers; `selective` keeps products of PyTorch's list, as torchtitan's does (`activation_checkpointing.py`)."""
    key, drafted = f"{D}activation_checkpointing", "model.base_activation_checkpointing"

    def read(keys: Keys) -> Facts:
        if keys.raw(key) == "selective":
            return {"recompute": "per-op"}
        on = keys.raw(key) == "full" or (keys.has(key) and keys.flag(key)) or keys.flag(drafted)
        return {"recompute": "full" if on else "none"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = facts.get("recompute") or "none"
        values: dict[str, Any] = {key: "selective" if word == "per-op" else word == "full"}
        values |= {drafted: False} if keys.flag(drafted) and word != "full" else {}
        return values if word in ("none", "full", "per-op") else {}

    return Idea(keys=(key, drafted), facts=("recompute",), read=read, write=write)


def _length() -> Idea:
    """Tokens of a packed sequence (0: not packed), or those that the data set or its collator pads or cuts samples to."""
    packs = ("packed_sequence.packed_sequence_size", "packed_sequence.pack_size")  # the latter in recipes of vision
    sets = tuple(f"dataset.{name}" for name in ("seq_length", "seq_len", "max_seq_len", "max_length"))
    cut = ("packed_sequence.max_length", "dataloader.collate_fn.max_length")

    def used(keys: Keys) -> str | None:
        packed = next((name for name in packs if keys.whole(name, minimum=0)), None)
        return packed or next((name for name in (*sets, *cut) if keys.has(name)), None)

    def read(keys: Keys) -> Facts:
        name = used(keys)
        return {"seq_len": None if name is None else keys.whole(name)}

    return Idea(
        keys=(*packs, *sets, *cut),
        facts=("seq_len",),
        read=read,
        write=lambda facts, keys: {used(keys) or packs[0]: facts["seq_len"]},
    )


def _precision() -> Idea:
    """Return what weights are trained in, and what FSDP2 casts them to as it gathers them (`mp_policy`; else bfloat16)."""
    names, cast = ("model.torch_dtype", "model.dtype"), f"{D}mp_policy.param_dtype"
    narrow = dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), True) | dict.fromkeys(
        ("float32", "fp32", "torch.float32"), False
    )

    def read(keys: Keys) -> Facts:
        name = keys.agreed(names, lambda key: keys.choice(key, DTYPES)) or "bf16-pure"
        if name == "bf16-pure":
            return {"precision": "bf16-mixed-16" if _main_weights(keys) else name}
        return {"precision": "fp32" if keys.choice(cast, narrow) is False else name}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        asked = facts.get("precision")
        if asked not in ("bf16-pure", "bf16-autocast", "fp32") and not (
            asked == "bf16-mixed-16" and _main_weights(keys)
        ):
            return {}
        present = [name for name in names if keys.document.get(name) is not MISSING]
        values: dict[str, Any] = {
            (present or names)[0]: "bf16" if asked in ("bf16-pure", "bf16-mixed-16") else "float32"
        }
        if asked == "fp32" or keys.choice(cast, narrow) is False:
            values[cast] = "float32" if asked == "fp32" else "bfloat16"
        return values | dict.fromkeys(present[1:])

    return Idea(keys=(*names, cast), facts=("precision",), read=read, write=write)


def _main_weights(keys: Keys) -> bool | None:
    """Return whether Transformer Engine's Adam keeps float32 copies of 16-bit weights; None for another optimizer. Its class by the
    short name has them unless it is told otherwise (`FusedAdamConfig`)."""
    name = keys.word("optimizer._target_") or ""
    if not name.endswith(("FusedAdam", "fused_adam")):
        return None
    stated = keys.flag("optimizer.master_weights")
    return name == "fused_adam" if stated is None else stated


def _optimizer() -> Idea:
    """The optimizer by its class; PyTorch's runs as a loop where tensor parallelism is on (`_foreach_for_mesh`)."""
    plain, moments = (
        instantiated("optimizer._target_", OPTIMIZERS),
        ("optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype"),
    )

    def read(keys: Keys) -> Facts:
        facts, main = plain.read(keys), _main_weights(keys)
        if main is not None:
            narrow = all("bf" in str(keys.raw(key)).replace("loat", "") for key in moments)
            half = (keys.word("model.torch_dtype") or "bf16") not in ("float32", "fp32", "torch.float32")
            return {"optimizer": "adamw-anyprecision" if half and not main and not narrow else "adamw-fused"}
        if (
            facts["optimizer"] == "adamw-foreach"
            and (_size(keys, f"{D}tp_size") or 1) > 1
            and not keys.has("optimizer.foreach")
        ):
            return {"optimizer": "adamw-loop"}
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        values = plain.write(facts, keys)
        lists = facts.get("optimizer") == "adamw-foreach" and (facts.get("tp") or 1) > 1
        return values | ({"optimizer.foreach": True} if lists and values else {})

    return msgspec.structs.replace(plain, keys=(*plain.keys, "optimizer.master_weights"), read=read, write=write)


def _task() -> Idea:
    """Distillation where a teacher is beside the model; recipes of other models than those that write text are not read."""
    teacher, labels = "teacher_model.pretrained_model_name_or_path", "model.num_labels"

    def read(keys: Keys) -> Facts:
        recipe, name = str(keys.raw("recipe") or keys.raw("recipe._target_")).lower(), keys.word(teacher)
        other = next((what for part, what in OTHER_RECIPES.items() if part in recipe), None)
        if other is not None:
            raise keys.wrong("recipe", f"{keys.raw('recipe')} {other}, which is not modelled")
        if "diffusionlm" in recipe or "diffusiongemma" in recipe:
            keys.note(
                "recipe",
                "fills in masked tokens, all of which see each other; counted as SFT",
                parts="activations loss",
            )
        facts: Facts = {"task": "gkd" if name else None, "teacher": name}
        return facts | ({"head": keys.whole(labels) or 2} if "sequenceclassification" in recipe else {})

    return Idea(
        keys=(teacher, labels),
        facts=("task", "teacher", "head"),
        read=read,
        write=lambda facts, keys: {teacher: facts.get("teacher")} if keys.has(teacher) else {},
    )


AUTOMODEL = Dialect(
    name="automodel",
    title="NeMo AutoModel recipe",
    versions="NeMo AutoModel 0.3 - 0.7",
    syntaxes=("yaml",),
    framework="torchtitan",
    blank={"yaml": "recipe: TrainFinetuneRecipeForNextTokenPrediction\n"},
    ideas=(
        _model(),
        _task(),
        _degrees(),
        _pipeline(),
        _length(),
        _adapter(),
        _checkpointing(),
        _precision(),
        _optimizer(),
        liger("model.use_liger_kernel"),
        row("loss", "loss_fn._target_", words=LOSSES_OF, default="float32"),
        row(
            "attention", "model.attn_implementation", words={**ATTENTION, "te": "flash", "flex": "fa2", "ffpa": "flash"}
        ),
        compiled("compile.enabled"),
    ),
)
