"""axolotl's YAML."""

import re
from typing import Any

from loadgauge.job_files.fine_tuning.axolotl_rl import LOGPROBS, completions, length, preference
from loadgauge.job_files.hugging_face import deepspeed
from loadgauge.job_files.hugging_face.huggingface import EXPERTS, INLINE, compiled, dropout, sharding, targets
from loadgauge.job_files.ideas import (
    ATTENTION,
    AXOLOTL_OPTIMIZERS,
    CUT_LOSS,
    STAYS,
    TORCH_OPTIMIZERS,
    Dialect,
    Facts,
    Keys,
    Missing,
    Named,
    adapted_layers,
    asked,
    degree,
    optimizer,
    product,
    quantised,
    reads,
    row,
    saving,
    sayable,
    unfrozen,
    whole_and_dora,
)

NORM, GATED = "liger_rms_norm", ("liger_glu_activation", "liger_swiglu")
FUNCTIONS, TABLE = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), "lora_embedding_kernel"
CUT, LIGER = "CutCrossEntropyPlugin", "LigerPlugin"
OWN = "axolotl.integrations."
RUNS, STEP = "activations loss transient", "weights gradients optimizer gathered activations loss transient"
"""Parts of the memory that a kernel or a loss changes, and all that a plugin can change."""
PLUGINS: dict[str, tuple[str, str, str, str, float]] = {
    CUT: ("cut_cross_entropy", "", "", "", 0), LIGER: ("liger", "", "", "", 0),
    "ExpertParallelPlugin": ("expert_parallel", "", "", "", 0), "SwanLabPlugin": ("swanlab", "", "", "", 0),
    "LMEvalPlugin": ("lm_eval", "", "", "", 0), "NemoGymPlugin": ("nemo_gym", "", "", "", 0), "MoraPlugin": ("mora", "", "", "", 0),
    "KernelsPlugin": ("kernels", "runs layers in kernels from the hub, which keep other tensors", "either", RUNS, 0.5),
    "SpectrumPlugin": ("spectrum", "trains those weights alone that a file on the web lists", "saves", "gradients optimizer", 1),
    "GrokfastPlugin": ("grokfast", "keeps a mean of each gradient", "costs", "gradients", 1),
    "KDPlugin": ("kd", "adds a loss against a teacher's probabilities, which come with the data", "costs", "loss activations", 1),
    "DiffusionPlugin": ("diffusion", "masks tokens and attends to all of them, with a loss of its own", "either", RUNS, 1),
    "DenseMixerPlugin": ("densemixer", "sends each token to every expert", "costs", RUNS, 1),
    "LLMCompressorPlugin": ("llm_compressor", "holds masks of pruned weights", "costs", "weights transient", 1),
}  # fmt: skip
"""Plugins that come with axolotl: their module, and what one does by being listed that is not modelled (`integrations/*`)."""
REMOTE = "HatcheryPlugin"
"""Trains on a service."""
SWITCHES = {"xformers_attention": "fa1", "sage_attention": "flash", "flex_attention": "fa2", "flash_attention": "fa2"}
SWITCHES |= {"sdp_attention": "flash", "eager_attention": "eager"}
"""In the order in which the first that is on counts."""
WORDS = ATTENTION | {"xformers": "fa1", "sage": "flash", "flash_attention_torch": "fa2", "fp8": "fa3"}


def _attention_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    wanted = facts["attention"]
    off: dict[str, Any] = dict.fromkeys(filter(keys.has, SWITCHES))
    switches = {kind: key for key, kind in reversed(SWITCHES.items())} | {
        "fa2": "flash_attention",
        "flash": "sdp_attention",
    }
    if off and wanted in switches and not keys.has(at.word):
        return off | {switches[wanted]: True}
    named = next((theirs for theirs, ours in WORDS.items() if ours == wanted), None)
    return off | {at.word: named} if named else {}


@reads(facts="attention", write=_attention_written, word="attn_implementation", also=(*SWITCHES,))
def _attention(keys: Keys, at: Named) -> Facts:
    kind = next((kind for key, kind in SWITCHES.items() if keys.flag(key)), None)
    name = (keys.word(at.word) or "").partition("@")[0].partition(":")[0]
    keys.refuse(at.word, "contradicts the older switch of attention", when=name and kind is not None)
    if "/" in name and name not in WORDS:
        keys.note(
            at.word,
            "is a kernel of the hub that is not known here; FlashAttention-2 is counted",
            parts=RUNS,
            share=0.2,
        )
        return {"attention": "fa2"}
    keys.note(
        at.word, "attends in 8 bits, in less time than FlashAttention-3, which is counted", "saves", when=name == "fp8"
    )
    if name:
        kind = WORDS[name] if name in WORDS else keys.choice(at.word, WORDS)
    return {"attention": "fa2" if kind is None and keys.flag("gemma4_hybrid_attn_impl") else kind}


def _checkpointing_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    word = facts.get("recompute") or "none"
    where = facts.get("activation_offload") or "none"
    instead = where == "all" and bool(facts.get("lora_rank")) and keys.since(0, 18)
    # It moves nothing without checkpoints, but beside adapters (`check_activation_offloading_wo_gc`).
    if (word != "none" and (word != "full" or instead)) or (word == "none" != where and not instead):
        return {}
    present = [name for name in (at.key, at.own, at.old) if keys.has(name)] or [at.key]
    spelled = {"all": True, "checkpoints": "hidden_states"}.get(where, False if keys.has(at.moved) else None)
    return dict.fromkeys(present, word == "full" or instead) | {at.moved: spelled}


@reads(
    facts="recompute activation_offload",
    write=_checkpointing_written,
    key="gradient_checkpointing",
    own="fsdp_config.activation_checkpointing",
    old="fsdp_config.fsdp_activation_checkpointing",
    part="selective_checkpointing",
    moved="activation_offloading",
)
def _checkpointing(keys: Keys, at: Named) -> Facts:
    word, moves = str(keys.raw(at.key)), keys.raw(at.moved)
    keys.note(
        at.part,
        "keeps what some operations make, which saves making it again",
        "costs",
        "activations",
        when=keys.raw(at.part) not in (None, False),
    )
    asked = word.startswith("offload") or keys.flag(at.key) or keys.flag(at.own) or keys.flag(at.old)
    if word == "offload_disk" or moves in ("disk", "offload_disk"):
        keys.note(
            at.key if word == "offload_disk" else at.moved,
            "may go to a disk, which is slower than host memory",
            "costs",
        )
        moves = "disk"
    # Its older name; beside adapters, the older way, which moves the inputs of layers alone.
    if word == "offload":
        moves = "legacy" if not keys.since(0, 12) and (keys.has("adapter") or not keys.since(0, 10)) else True
    later = "all" if keys.since(0, 18) else "checkpoints"  # another way to copy the same
    places = {"true": "all", "false": "none", "legacy": later, "disk": later, "hidden_states": "checkpoints"}
    where = "none" if moves is None else places.get(str(moves).lower()) or str(keys.choice(at.moved, places) or "none")
    # Beside adapters, moving all that is kept takes the place of making it again (`loaders/model.py` of 0.18).
    instead = where == "all" and keys.has("adapter") and keys.since(0, 18)
    return {"recompute": "full" if asked and not instead else "none", "activation_offload": where}


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    name = facts.get("precision") or "bf16"
    key = {"bf16": "bf16", "fp16": "fp16", "bf16-pure": "bf16", "fp32": "float32", "bf16-autocast-8": "bf16"}.get(name)
    if key is None:
        return {}
    present: dict[str, Any] = {other: None for other in at.switches if keys.has(other) or other in keys.left}
    wide = {"bf16": False} if key == "float32" else {}
    return present | wide | {key: "full" if name == "bf16-pure" else True, "fp8": None, at.recipe: None}


@reads(
    facts="precision weights",
    write=_precision_written,
    switches=("bf16", "fp16", "bfloat16", "float16", "float32"),
    also=("fp8",),
    recipe="fp8_config.recipe",
)
def _precision(keys: Keys, at: Named) -> Facts:
    # `resolve_dtype` (`utils/config/__init__.py`): `auto`, which it is where it is not there, gives way to fp16 alone.
    on = {key: keys.flag(key) for key in at.switches if key != "bf16"}
    auto, full = isinstance(keys.document.get("bf16"), Missing | str), keys.raw("bf16") == "full"
    brain = on["bfloat16"] or (not on["fp16"] if auto else keys.flag("bf16"))
    keys.refuse("fp16", "contradicts another switch: bfloat16", when=on["fp16"] and on["bfloat16"])
    # Weights of 16 bits alone; which 16 changes no byte.
    half = "fp16" if on["fp16"] else "bf16-pure" if on["float16"] else "fp32"
    name = "bf16-pure" if full else "bf16" if brain else half
    if keys.flag("fp8"):
        return {"precision": f"fp8-{keys.word(at.recipe) or 'tensorwise'}", "weights": None}
    # Its own FSDP 2 shards whole weights as they were loaded, where accelerate's makes float32 of them
    # (`monkeypatch/accelerate/fsdp2.py` of 0.12 and later).
    if name == "bf16" and keys.since(0, 12) and not keys.has("adapter") and _fsdp(keys) == 2:
        return {"precision": "bf16-autocast-8", "weights": None}
    # It loads the weights in the dtype that it computes in.
    return {"precision": name, "weights": "bfloat16" if name == "bf16" else None}


def _plugins(keys: Keys) -> list[str]:
    """The plugins that are listed. Raises ConfigError where `plugins` is not a list."""
    listed = keys.raw("plugins") or []
    keys.refuse("plugins", f"must be a list of names, not {listed!r}", when=not isinstance(listed, list))
    return [str(plugin) for plugin in listed]


def _module(name: str) -> str:
    """The plugin as a file names it."""
    return f"{OWN}{PLUGINS[name][0]}.{name}"


def _doubted(keys: Keys) -> None:
    """Notes what plugins do that is not modelled. Raises ConfigError for one that trains elsewhere."""
    for name in _plugins(keys):
        plugin = name.rpartition(".")[2]
        keys.refuse("plugins", f"{name!r} trains on a service, and not on these GPUs", when=plugin == REMOTE)
        if plugin not in PLUGINS:
            keys.note("plugins", f"{name} is a plugin that is not known here", parts=STEP)
        elif PLUGINS[plugin][1]:
            _, remark, effect, parts, share = PLUGINS[plugin]
            keys.note("plugins", f"{plugin} {remark}", effect, parts, share)


def _fsdp(keys: Keys) -> int:
    """The version of FSDP, 0 without it."""
    if keys.raw("fsdp") in (None, False) and not any(name.startswith("fsdp_config.") for name in keys.document.names()):
        return 0
    named = ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
    return next((version for key in named if (version := keys.whole(key)) is not None), 1)


def _plugged(keys: Keys, name: str) -> bool:
    """Return whether a plugin is listed; axolotl drops the keys of one that is not, without a word (`integrations/config.py`)."""
    return any(name in plugin for plugin in _plugins(keys))


def _fuses_adapters(keys: Keys) -> bool:
    """Return whether adapters run in functions of axolotl's own, which it switches on by itself where no key of theirs is given
    (`check_auto_enable_lora_kernels` of 0.19; 0.9 to 0.15 without dropout alone)."""
    if not keys.has("adapter"):
        return False
    if keys.has(*FUNCTIONS, TABLE):
        on = [key for key in FUNCTIONS if keys.flag(key)]
        keys.note(
            (on or FUNCTIONS)[0],
            "runs some of the adapters in one function, which keeps fewer tensors",
            "saves",
            RUNS,
            0.3,
            when=0 < len(on) < len(FUNCTIONS),
        )
        return len(on) == len(FUNCTIONS)
    return (
        keys.since(0, 9)
        and not keys.has("rl")
        and not (keys.word("adapter") == "lora" and keys.flag("load_in_8bit"))
        and not (keys.since(0, 15) and keys.flag("trust_remote_code"))
        and not keys.flag("nvfp4_merge_aware")
        and (keys.since(0, 16) or not keys.real("lora_dropout"))
        and _fsdp(keys) != 1
    )


def _kernels(keys: Keys) -> bool:
    """Return whether norms and MLPs both are Liger's; one of them alone is bounded."""
    return bool(keys.flag(NORM) and any(keys.flag(name) for name in GATED)) and _plugged(keys, LIGER)


def _loss_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    kind, _, number = (facts.get("loss") or "auto").partition(":")
    word = facts.get("kernels") or "native"
    listed = _plugins(keys)
    on, cutting = word.startswith("liger"), facts.get("loss") == CUT_LOSS
    if kind not in ("auto", "chunked", "liger") and not (kind == "float32" and on):
        return {}
    wanted = {CUT: cutting, LIGER: on or kind == "liger"}
    plugins = [plugin for plugin in listed if cutting or CUT not in plugin]
    plugins += [_module(name) for name, needed in wanted.items() if needed and not _plugged(keys, name)]
    # One of them alone, which is bounded, stays.
    gated = (NORM, next(filter(keys.has, GATED), GATED[0])) if on or _kernels(keys) else ()
    fused = kind == "liger" or (kind == "auto" and on)
    pieces = kind == "chunked" and not cutting and not fused
    return {
        at.key: True if pieces else None,
        at.count: int(number) if pieces and number else None,
        at.fused: True if fused else None,
        at.cut: True if cutting else None,
        TABLE: None,
        **dict.fromkeys(FUNCTIONS, word.endswith("lora") if facts.get("lora_rank") else None),
        **dict.fromkeys(gated, True if on else None),
        "plugins": STAYS if plugins == listed else plugins or None,
    }


@reads(
    facts="loss kernels",
    write=_loss_written,
    key="chunked_cross_entropy",
    count="chunked_cross_entropy_num_chunks",
    fused="liger_fused_linear_cross_entropy",
    cut="cut_cross_entropy",
    also=(
        *FUNCTIONS,
        TABLE,
        "plugins",
    ),
)
def _loss(keys: Keys, at: Named) -> Facts:
    _doubted(keys)
    for plugin, names in ((CUT, (at.cut,)), (LIGER, (NORM, *GATED, at.fused))):
        for name in names:
            keys.note(
                name,
                f"does nothing in axolotl unless plugins lists {_module(plugin)}",
                "",
                when=keys.flag(name) and not _plugged(keys, plugin),
            )
    running = ["liger"] * _kernels(keys) + ["lora"] * _fuses_adapters(keys)
    facts: Facts = {"kernels": "-".join(running) or "native"}
    if keys.flag(at.key):
        number = keys.whole(at.count)
        return facts | {"loss": f"chunked:{number}" if number else "chunked"}
    if _plugged(keys, CUT) and keys.flag(at.cut) is not False:
        return facts | {"loss": CUT_LOSS}
    if keys.flag(at.fused) and _plugged(keys, LIGER):
        return facts | {"loss": "auto" if _kernels(keys) else "liger"}
    # Log-probabilities of TRL 1.9, which axolotl 0.19 needs, are of float32 logits.
    return facts | {"loss": "float32" if _kernels(keys) or keys.word("rl") in LOGPROBS else "auto"}


ADAPTER_INNER = targets("lora_r", "lora_target_modules", ("adapter", None, "lora"), 8, parameters=EXPERTS)
ADAPTER_LINEAR, ADAPTER_FOUR, ADAPTER_MODULES, ADAPTER_MOE, LINEARISED = (
    "lora_target_linear",
    "load_in_4bit",
    "lora_target_modules",
    "quantize_moe_experts",
    "llama4_linearized_experts",
)
ADAPTER_BESIDE = product(
    # What prepare_model_for_kbit_training casts to float32 is cast back (loaders/model.py, `_configure_embedding_dtypes`).
    quantised(
        eight="load_in_8bit",
        on=lambda keys: keys.word("adapter") == "qlora",
        nested="bnb_config_kwargs.bnb_4bit_use_double_quant",
        method=("gptq", {"true": "gptq", "false": ""}),
        upcast="none",
    ),
    whole_and_dora("lora_modules_to_save", "peft_use_dora"),
    dropout("lora_dropout"),
)


def _adapter_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    values = ADAPTER_INNER.write(facts, keys)
    if not facts.get("lora_rank"):
        return values | dict.fromkeys(("adapter", ADAPTER_LINEAR, ADAPTER_FOUR, ADAPTER_MOE, *ADAPTER_BESIDE.keys))
    base = facts.get("base") or "nf4"
    plain = facts | {"base": base.removesuffix("-experts")}
    if not sayable(plain, ("nf4", "nf4-single", "int8", "gptq")):
        return {}
    four_bits = bool(facts.get("qlora")) and plain["base"] not in ("int8", "gptq")
    everything = (facts.get("lora_targets") or "").partition(",")[0] == "all"
    return (
        values
        | ADAPTER_BESIDE.write(plain, keys)
        | {
            "adapter": "qlora" if four_bits else "lora",
            ADAPTER_FOUR: True if four_bits else None,
            ADAPTER_LINEAR: True if everything else None,
            ADAPTER_MODULES: None if everything else values[ADAPTER_MODULES],
            ADAPTER_MOE: True if facts.get("qlora") and base != plain["base"] and not keys.flag(LINEARISED) else None,
        }
    )


@reads(
    *tuple(dict.fromkeys((*ADAPTER_INNER.keys, ADAPTER_LINEAR, ADAPTER_FOUR, *ADAPTER_BESIDE.keys, ADAPTER_MOE))),
    facts=(*ADAPTER_INNER.facts, *ADAPTER_BESIDE.facts),
    write=_adapter_written,
)
def _adapter(keys: Keys) -> Facts:
    kind = keys.choice("adapter", {"lora": "lora", "qlora": "qlora", "mora": "mora"})
    keys.refuse(
        ADAPTER_FOUR,
        "says a base in 4 bits, and no adapter trains on it",
        when=kind is None and keys.flag(ADAPTER_FOUR),
    )
    if kind is None:
        return {"lora_rank": 0, "qlora": False}
    keys.note(
        "adapter",
        "has one square matrix of as many parameters as the two of LoRA, which are counted",
        parts=RUNS,
        share=0.2,
        when=kind == "mora",
    )
    facts, named = ADAPTER_INNER.read(keys) | ADAPTER_BESIDE.read(keys), keys.raw(ADAPTER_MODULES)
    if isinstance(named, str) and named != "all-linear":
        # One regular expression on the whole name, with the matrices of experts beside it.
        facts["lora_targets"] = ",".join([named, *(keys.words(EXPERTS) or [])])
    if keys.flag(ADAPTER_LINEAR):
        ends = [name for name in keys.words(ADAPTER_MODULES) or [] if name in ("embed_tokens", "lm_head")]
        facts["lora_targets"] = ",".join(["all", *ends, *(keys.words(EXPERTS) or [])])
    keys.note(
        ADAPTER_FOUR,
        f"does nothing in axolotl beside adapter: {kind}; the base is loaded in 16 bits",
        "",
        when=keys.flag(ADAPTER_FOUR) and kind != "qlora",
    )  # (`_set_quantization_config`)
    # As linear layers, the experts of Llama 4 are quantised with all others.
    if (keys.flag(ADAPTER_MOE) or keys.flag(LINEARISED)) and facts["base"] in ("nf4", "int8"):
        facts["base"] += "-experts"
    return facts


def _data(keys: Keys, at: Named) -> bool:
    return bool(keys.real(at.share) or keys.raw(at.sets))


def _on(keys: Keys, at: Named) -> bool:
    return _data(keys, at) and (bool(keys.real(at.asks[0]) or keys.real(at.asks[1])) or asked(keys, *at.asks[2:]))


def _evaluation_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    asked_for = {} if _on(keys, at) else {at.asks[2]: "steps"}
    return {at.size: facts["eval_batch"]} | asked_for if _data(keys, at) else {}


@reads(
    facts="eval_batch",
    write=_evaluation_written,
    needs="eval_batch",
    size="eval_batch_size",
    share="val_set_size",
    sets="test_datasets",
    asks=("eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy"),
)
def _evaluation(keys: Keys, at: Named) -> Facts:
    """It evaluates where there is data for it and something says when (`core/builders/base.py`)."""
    return {"eval_batch": (keys.whole(at.size) or keys.whole("micro_batch_size") or 1)} if _on(keys, at) else {}


def _degrees_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    replicas, whole, experts = facts.get("replicas") or 1, facts.get("dp"), facts.get("ep") or 1
    aside = whole is not None and whole // replicas < experts  # they lie on other axes too, which axolotl's do not
    values = at.inner.write(facts, keys) | (dict.fromkeys(at.inner.keys[-1:]) if aside else {})
    if not facts.get("zero"):
        return values | {at.copies: None, at.shards: None}
    split = replicas > 1 or keys.has(at.shards, at.copies) or max(facts.get("cp") or 1, facts.get("tp") or 1) > 1
    shards = None if whole is None else whole // replicas // (1 if aside else experts)
    copies = replicas if replicas > 1 or keys.has(at.copies) else None
    return values | ({at.copies: copies, at.shards: shards} if split else {})


@reads(
    facts="replicas dp",
    write=_degrees_written,
    copies="dp_replicate_size",
    shards="dp_shard_size",
    inner=product(
        degree("tp", "tensor_parallel_size"),
        degree("cp", "context_parallel_size", "sequence_parallel_degree"),
        degree("ep", "expert_parallel_size"),
    ),
)
def _degrees(keys: Keys, at: Named) -> Facts:
    facts, replicas, parts = at.inner.read(keys), keys.whole(at.copies), keys.whole(at.shards)
    split = parts is None or parts * facts["ep"] > 1
    return facts | {
        "replicas": replicas if split or replicas is None else 1,
        "dp": parts and parts * (replicas or 1) * facts["ep"],  # an axis beside the others (`utils/distributed.py`)
    }


CORRECTS = "and what corrects the weights"
LIKE = {
    "adopt_adamw": ("adamw_torch", ""),
    "adamc": ("adamw_torch", ""),
    "came_pytorch": ("lion_32bit", "and rows and columns of two more"),
    "dion": ("muon", "and the factors of each matrix"),
    "sinkgd": ("sgd", "and the matrices that it scales"),
    "polora": ("sgd", "and the small matrices of each adapter"),
    "q_galore_adamw8bit": ("galore_adamw_8bit", "with projections of 4 bits"),
    **{f"flash_{name}": ("adamw_torch_8bit", CORRECTS) for name in ("adamw", "adam")},
    **{f"flash_{name}": ("sgd", CORRECTS) for name in ("sgd", "sgdw")},
    "flash_lion": ("lion_8bit", CORRECTS),
}
"""Optimizers of axolotl's own (`core/builders/base.py`): one that holds as much, and what they have beside it."""


OPTIMIZER_KEY = "optimizer"
OPTIMIZER_MEANINGS = TORCH_OPTIMIZERS | AXOLOTL_OPTIMIZERS


@reads(
    inner=optimizer(
        OPTIMIZER_KEY,
        OPTIMIZER_MEANINGS
        | {name: (OPTIMIZER_MEANINGS | {"lion_32bit": "lion"})[other] for name, (other, _) in LIKE.items()},
    )
)
def _optimizer(keys: Keys, at: Named) -> Facts:
    other, beside = LIKE.get(keys.word(OPTIMIZER_KEY) or "", ("", ""))
    keys.note(
        OPTIMIZER_KEY,
        f"holds what {other} does, which is counted, {beside}",
        parts="optimizer transient",
        share=0.5,
        when=beside,
    )
    return at.inner.read(keys)


def _accumulation_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    number = facts.get("accumulation")  # where it follows from GPUs that nobody says, the file's own stays
    return {
        at.each: facts.get("micro_batch"),
        at.rounds: number or STAYS,
        at.whole: None if number else STAYS,
        at.workers: facts.get("gpus") if keys.flag(at.ray) else STAYS,
    }


@reads(
    facts="micro_batch accumulation gpus",
    write=_accumulation_written,
    rounds="gradient_accumulation_steps",
    each="micro_batch_size",
    whole="batch_size",
    ray="use_ray",
    workers="ray_num_workers",
)
def _accumulation(keys: Keys, at: Named) -> Facts:
    """Both have a default, so that `batch_size` counts where the other is there without a value (`normalize_config`)."""
    micro, number = keys.whole(at.each) or 1, keys.whole(at.rounds)
    if number is None and not isinstance(keys.document.get(at.rounds), Missing):
        number = max(1, (keys.whole(at.whole) or micro) // micro)
    workers = (keys.whole(at.workers) or 1) if keys.flag(at.ray) else None
    return {"micro_batch": micro * completions(keys), "accumulation": number or 1, "gpus": workers}


@reads(inner=unfrozen("unfrozen_parameters"))
def _partly(keys: Keys, at: Named) -> Facts:
    if keys.has("adapter") and keys.has(*at.inner.keys):
        keys.note(
            at.inner.keys[0],
            "freezes adapters that it does not name; they are counted",
            "saves",
            "gradients optimizer",
        )
        return {}
    facts = at.inner.read(keys)
    # Older classes have their layers at other names, such as DBRX's and GPT-2's.
    return {
        name: value and re.sub(r"transformer\.(blocks|h)\.", "model.layers.", value) for name, value in facts.items()
    }


AXOLOTL = Dialect(
    name="axolotl",
    trainers="trl",
    title="axolotl",
    versions="axolotl 0.8 - 0.19",
    syntaxes=("yaml",),
    closed=True,
    auto=True,
    blank={"yaml": "num_epochs: 1\nval_set_size: 0.0\n"},
    ideas=(
        row("model", "base_model", kind="word"),
        preference,
        length,
        _accumulation,
        _optimizer,
        sharding(switched=False),
        _degrees,
        _adapter,
        _partly,
        adapted_layers("peft_layers_to_transform"),
        _checkpointing,
        _precision,
        _attention,
        _loss,
        _evaluation,
        saving(
            "fsdp_config.state_dict_type",
            "fsdp_config.fsdp_state_dict_type",
            "fsdp_config.final_state_dict_type",
            switches=tuple(f"{INLINE}zero_optimization.{name}" for name in deepspeed.GATHERS),
        ),
        compiled("torch_compile"),
    ),
)
