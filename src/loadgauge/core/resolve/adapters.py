"""Resolving what a job asks of adapters: LoRA and its relatives on a frozen base."""

import re
from typing import Any

import msgspec

from loadgauge.core.base.errors import ConfigError, NotModelled, refuse, refuse_fields
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.lora import (
    ADAPTER_DTYPES,
    ALL_TARGETS,
    ATTENTION_TARGETS,
    MIXERS,
    SAVED_MODULES,
    Lora,
    base_format,
)
from loadgauge.core.definitions.model.model import ModelSpec, Moe
from loadgauge.core.definitions.model.tuners import TUNERS, Tuner
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS, Framework
from loadgauge.core.definitions.training.stacks import EXPERTS_ADAPTED_UNSLOTH, EXPERTS_QUANTISED, Stack
from loadgauge.core.layers import View, block_layer
from loadgauge.core.resolve.trained import TOWER, adapt_only, modules_of, train_only, words_of

LORA_RANK = 16
TARGETS = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output", "qkv_proj": "qkv", "c_attn": "qkv",
    "query_key_value": "qkv", "out_proj": "output", "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "gate_up_proj": "gate_up", "fc1": "up", "fc2": "down", "c_fc": "up",
    "embed_tokens": "embedding", "wte": "embedding", "lm_head": "head", "embed_out": "head",
    "experts.gate_up_proj": "experts.gate_up", "experts.up_proj": "experts.up", "experts.down_proj": "experts.down",
}  # fmt: skip
"""Linear layers by their names in transformers' modules."""


def adapters(job: Job, model: ModelSpec, framework: str, fill: Any, assumed: dict[str, str]) -> Lora | None:
    """Return the adapters that a job asks for; None where it trains the whole model. Raises `ConfigError`.

    framework: whose modules run them; fill: takes the name of a field, its default and why, and notes a default that is taken
    assumed: takes a note on names that no layer has
    """
    refuse(job.base is not None and not job.qlora, "needs --qlora", key="base")
    if not job.adapts:
        refuse_fields(job, ("lora_targets", "virtual_tokens", *ADAPTERS), "needs --lora-rank or --qlora")
        return None
    stored = base_format(job.base or False)
    if stored is not None and stored.frameworks and framework not in stored.frameworks:
        where = ", ".join(sorted(stored.frameworks))
        raise NotModelled(
            f"--base {job.base} with --framework {framework}: it is in {where}; --no-qlora has it in 16 bits"
        )
    if job.base == "nvfp4" and not FRAMEWORKS[framework].fused_adapters:
        assumed["--base"] = (
            "nvfp4, which ModelOpt's modules keep in 4 bits; a checkpoint of compressed-tensors is in 16 bits from its first pass"
            " on in transformers: --no-qlora"
        )
    if job.adapter in TUNERS:
        return tuner(job, model, framework, fill, assumed)
    refuse(job.virtual_tokens is not None, "needs --adapter prompt or p-tuning", key="virtual_tokens")
    rank = fill("lora_rank", LORA_RANK)
    if not model.own.rewritten:
        return _of_captured(job, framework, fill, rank)
    return _placed(job, model, framework, fill, rank, assumed)


def trained_part(job: Job, model: ModelSpec) -> ModelSpec:
    """The model with what the job does not train frozen. Raises `ConfigError`."""
    refuse(
        job.train is not None and job.adapts,
        "trains weights of the model itself; beside adapters: --modules-to-save",
        key="train",
    )
    refuse(job.lora_layers is not None and not job.adapts, "needs --lora-rank or --qlora", key="lora_layers")
    if not model.own.rewritten:
        return model  # what it does not train was frozen when it was captured
    if job.train is not None:
        if TOWER in words_of(job.train) and (job.pictures or job.video or job.audio) is None:
            raise ConfigError("tower needs --pictures, --video or --audio", key="train")
        return train_only(model, job.train)
    layers = job.lora_layers or (targeted_layers(model, job.lora_targets or "") if job.adapts else "")
    return adapt_only(model, layers) if layers else model


def below_adapters(model: ModelSpec, lora: Lora | None) -> ModelSpec:
    """Return the model with the layers below the first adapter as what no gradient reaches, where named targets leave some out."""
    if lora is None or not model.own.rewritten or lora.virtual or "embedding" in lora.targets | lora.saved:
        return model
    view = View(tokens=1, pairs=1, lora=lora)
    having = {
        kind
        for kind, block in enumerate(model.blocks)
        if any(weight.trainable for weight in block_layer(block, model.hidden_size, view).weights)
    }
    if model.pattern[0] in having or not having:
        return model
    return adapt_only(model, ",".join(str(layer) for layer, kind in enumerate(model.pattern) if kind in having))


def _of_captured(job: Job, framework: str, fill: Any, rank: int) -> Lora:
    """The adapters of a captured model, which PEFT put where they are asked for before it was run."""
    targets = fill("lora_targets", "all-linear", "every linear layer but that of the logits, as PEFT finds them")
    lora = Lora(
        rank=rank,
        targets=frozenset({targets}),
        dropout=job.lora_dropout or 0.0,
        dora=bool(job.use_dora),
        itemsize=None if job.lora_dtype is None else ADAPTER_DTYPES[job.lora_dtype],
        quantised=(job.base or True) if job.qlora else False,  # type: ignore[arg-type]
    )
    return msgspec.structs.replace(lora, upcast=_upcast(job, lora, framework, fill)) if job.qlora else lora


def tuner(job: Job, model: ModelSpec, framework: str, fill: Any, assumed: dict[str, str]) -> Lora:
    """Return the weights that a method beside LoRA trains. Raises `ConfigError` or `NotModelled`."""
    name = job.adapter or ""
    listed = TUNERS[name]
    where = FRAMEWORKS.get(framework)
    refuse(
        where is None or not where.peft or where.fused_adapters,
        f"{listed.title} is PEFT's, and needs --framework huggingface",
        key="adapter",
    )
    _fits(job, listed, model)
    if listed.virtual:
        refuse(job.virtual_tokens is None, f"{listed.title} needs --virtual-tokens: PEFT has no default", key="adapter")
        rank = fill("lora_rank", int(model.hidden_size), "the width of the encoder") if listed.size else 0
        lora = Lora(
            rank=rank,
            quantised=(job.base or True) if job.qlora else False,  # type: ignore[arg-type]
            targets=frozenset(),
            itemsize=4,
            method=name,
            virtual=job.virtual_tokens,
        )
        return msgspec.structs.replace(lora, upcast=_upcast(job, lora, framework, fill))
    rank = fill("lora_rank", listed.default, f"{listed.title}'s {listed.size} in PEFT") if listed.size else 0
    lora = _placed(job, model, framework, fill, rank, assumed, listed)
    return msgspec.structs.replace(lora, method=name, widest=_widest(model, lora) if name == "vera" else (0, 0))


def _fits(job: Job, tuner: Tuner, model: ModelSpec) -> None:
    """Refuses flags of other methods than the one that is asked for."""
    stray = {
        "lora_rank": not tuner.size,
        "lora_dropout": not tuner.dropout,
        "use_dora": True,
        "lora_layers": not tuner.layers,
        "virtual_tokens": not tuner.virtual,
        **dict.fromkeys(("lora_targets", "lora_dtype", "modules_to_save"), tuner.virtual),
    }
    for name, wrong in stray.items():
        refuse(wrong and getattr(job, name), f"is not of {tuner.title}", key=name)
    refuse(job.qlora and not tuner.quantised, f"{tuner.title} on a quantised base is not modelled", NotModelled)
    refuse(
        tuner.virtual and (job.lengths is not None or (job.cp or 1) > 1),
        f"{tuner.title} with --lengths or --cp is not modelled",
        NotModelled,
    )
    refuse((job.tp or 1) > 1, f"{tuner.title} with --tp is not modelled", NotModelled)
    refuse(
        tuner.virtual and model.head.kind != "lm",
        f"{tuner.title} of a model without a language modelling head is not modelled",
        NotModelled,
    )


def _widest(model: ModelSpec, lora: Lora) -> tuple[int, int]:
    """The widest input and output of the matrices that are adapted."""
    view = View(tokens=1, pairs=1, lora=msgspec.structs.replace(lora, rank=1))
    weights = [weight for block in model.blocks for weight in block_layer(block, model.hidden_size, view).weights]
    sides = [
        max((int(weight.numel) for weight in weights if weight.name.endswith(f".lora_{side}.weight")), default=0)
        for side in "ab"
    ]
    return sides[0], sides[1]


def _placed(
    job: Job,
    model: ModelSpec,
    framework: str,
    fill: Any,
    rank: int,
    assumed: dict[str, str],
    tuner: Tuner | None = None,
) -> Lora:
    """The adapters of linear layers, and which layers have them."""
    if (job.lora_dropout or 0) >= 1:
        raise ConfigError(f"must be below 1, got {job.lora_dropout:g}", key="lora_dropout")
    lora = Lora(
        rank=rank,
        quantised=(job.base or True) if job.qlora else False,  # type: ignore[arg-type]
        dropout=job.lora_dropout or 0.0,
        dora=bool(job.use_dora),
        saved=_saved(job, model),
        itemsize=None if job.lora_dtype is None else ADAPTER_DTYPES[job.lora_dtype],
        wide_norms=all(block.norm.kind == "layernorm" and block.norm.arithmetic != "written" for block in model.blocks),
    )
    lora = msgspec.structs.replace(lora, upcast=_upcast(job, lora, framework, fill))
    sorts = _kinds(model, lora)
    others, own = _others(model, framework), _own_experts(job, model, framework)
    targets = frozenset(target for kind in sorts for target in kind.values())
    refused = frozenset({"mamba.output"} if others and model.model_type in NOT_OF_MAMBA else ())
    linear = (targets if others else targets - BESIDE) - refused
    head = frozenset({"head"} if framework in OWN_HEADS and model.head.kind == "lm" else ())
    possible = linear | own | head | (others if tuner is None else frozenset())
    if tuner is None or tuner.targets is None:
        usual, why = "all", f"every linear layer of a block: {', '.join(sorted(linear))}"
    else:
        usual, why = ",".join(sorted(linear & tuner.targets)), f"PEFT's choice for {tuner.title}"
    wanted = fill("lora_targets", usual, why)
    of_modules = model.model_type in CONVERTED and EXPERTS_QUANTISED.at(Stack.parse(job.version)).value == "no"
    renamed = EXPERTS_OF if tuner is None and others and of_modules and model.has_experts else {}
    if wanted == "all-linear" and renamed:
        beside = frozenset(name for name in others if name.startswith("experts.")) | {"router"}
        return msgspec.structs.replace(lora, targets=linear - {"gate", "up", "down"} | beside, parts_in_one=True)
    if refused and wanted in EVERY:
        assumed["--lora-targets"] = f"{', '.join(sorted(linear))} (PEFT refuses out_proj of {model.model_type} models)"
    if wanted in EVERY:
        plain = tuner is None and linear | own <= ALL_TARGETS
        return lora if plain else msgspec.structs.replace(lora, targets=linear | own)
    if (pattern := target_pattern(wanted)) is not None:
        chosen = frozenset(target for target, _ in _matched(pattern, model, sorts))
        refuse(not chosen, f"{wanted!r} fits no linear layer of {model.name}", key="lora_targets")
        for name in re.findall(r"experts\.\w+", BESIDE_PATTERN.findall(wanted)[0]):
            chosen |= _by_name(name, model, sorts, possible, apart=False)
        return msgspec.structs.replace(lora, targets=chosen)
    words = dict.fromkeys(EVERY, linear) | {"attention": linear & ATTENTION_TARGETS}
    names = [re.sub(r"^(\w+\.)*experts\.", "experts.", name.strip()) for name in wanted.split(",")]
    chosen, ignored = frozenset[str](), []
    halves = {name for name in names if renamed.get(name.rpartition(".")[2]) == "experts.gate_up"}
    if len(halves) == 1:
        raise ConfigError(
            f"PEFT adapts no {min(halves)!r} alone: gate and up are one tensor in each expert", key="lora_targets"
        )
    lora = msgspec.structs.replace(lora, parts_in_one=bool(halves))
    for name in names:
        old = frozenset({renamed.get(name.rpartition(".")[2], "")}) & (others | {"router"})
        meant = words.get(name) or old or _by_name(name, model, sorts, possible | refused, apart=framework in APART)
        meant |= {EXPERTS_OF.get(name, "")} & own
        refuse(meant & refused, f"PEFT refuses {name!r} of {model.model_type} models", key="lora_targets")
        chosen |= meant
        ignored += [] if meant else [name]
    refuse(
        not chosen,
        f"no linear layer {names[0]!r} in this model (known: all-linear, attention, {', '.join(sorted(possible))})",
        key="lora_targets",
    )
    if ignored:
        assumed["--lora-targets"] = f"{wanted} (no layer of {model.name} is called {', '.join(ignored)})"
    return msgspec.structs.replace(lora, targets=chosen)


APART = ("torchtune", "litgpt")
"""Frameworks whose own models adapt each matrix apart, also where the model's configuration has several in one."""
OWN_HEADS = (*APART, "torchtitan")
"""Frameworks (AutoModel's is torchtitan's) whose own adapters take the head where it is named."""
FUSED_OF = {
    **dict.fromkeys(("query", "key", "value"), "qkv"), **dict.fromkeys(("gate", "up"), "gate_up"),
}  # fmt: skip
"""Matrices that one matrix stands for in some models, by its name."""


def _by_name(
    name: str, model: ModelSpec, targets_of: list[dict[str, str]], possible: frozenset[str], *, apart: bool
) -> frozenset[str]:
    """Return the linear layers that a name means: of loadgauge's own, or of a module in transformers.

    kinds: of each block its operations, with the targets that they are
    apart: a name of a part means the matrix that it is fused in
    """
    if name in possible:
        return frozenset({name})
    ending = f".{name}"
    matched = {
        target
        for block, kind in zip(model.blocks, targets_of, strict=True)
        for operation, target in kind.items()
        if any(f".{module}".endswith(ending) for module in modules_of(operation, block))
    }
    if name.endswith("out_proj") and any(
        target.endswith(".output") and not target.startswith("convolution") for target in matched
    ):
        matched.discard("output")  # which has another name in models with such mixers
    meant = TARGETS.get(name, "")
    others = [each for each in (meant, FUSED_OF.get(meant, "") if apart else "") if each in possible]
    return frozenset(matched or others[:1])


EVERY = ("all", "all-linear")
"""Words for every linear layer of the blocks."""
BESIDE = frozenset({"shared_gate", "per_layer_gate", "per_layer_project"})
"""Linear layers that PEFT finds beside those of attention and MLP, and other libraries leave alone."""
NOT_OF_MAMBA = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Types of models whose `out_proj` PEFT refuses, since their kernel reads its matrix without calling it (peft 0.17 to 0.21,
`_check_lora_target_modules_mamba`)."""
CONVERTED = frozenset({
    "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe",
    "longcat_flash", "mellum", "minimax", "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_next",
    "qwen3_omni_moe", "solar_open",
})  # fmt: skip
"""Types of models whose experts and router PEFT adapts under the names they had in transformers 4, and not the dense layers and
shared experts of those names (peft 0.21, `_convert_peft_config_moe`; transformers 5.23, `conversion_mapping`)."""
EXPERTS_OF = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "experts.gate_up"),
    **dict.fromkeys(("down_proj", "w2"), "experts.down"),
}
"""Parameters of experts by the names of the modules that held them (peft 0.21, `_MOE_TARGET_MODULE_MAPPING`)."""
REPEATED = 4
"""Repetitions in a regular expression on names beyond which it is not tried, since it may take very long."""


BESIDE_PATTERN = re.compile(r"(?:,(?:\w+\.)*experts\.\w+)*$")
"""Matrices of experts that are named after a regular expression (`target_parameters` of PEFT beside its `target_modules`)."""


def target_pattern(text: str) -> re.Pattern[str] | None:
    """Return the regular expression that targets are, as PEFT reads a text, without the experts' matrices named after it; None
    where they are names. Raises `ConfigError`.

    >>> target_pattern("q_proj,v_proj"), target_pattern(r".*\\.(q|v)_proj").pattern
    (None, '.*\\\\.(q|v)_proj')
    """
    text = BESIDE_PATTERN.sub("", text)
    if not re.search(r"[\\()|*+?^$\[\]]", text):
        return None
    refuse(
        len(text) > 1000 or re.search(r"\)\s*[*+{]", text) or len(re.findall(r"[*+}]", text)) > REPEATED,
        "is a regular expression with many repetitions, which is not tried; names are",
        key="lora_targets",
    )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{text!r} is no regular expression: {error}", key="lora_targets") from None


PREFIXES = (
    "model.layers",
    "model.language_model.layers",
    "language_model.model.layers",
    "model.encoder.language_model.layers",
    "model.text_model.layers",
    "thinker.model.layers",
    "model.decoder.layers",
    "gpt_neox.layers",
    "transformer.h",
    "backbone.layers",
)
"""Where transformers' models have their layers, those with towers too."""


def _matched(pattern: re.Pattern[str], model: ModelSpec, targets_of: list[dict[str, str]]) -> set[tuple[str, int]]:
    """Return targets and the places of layers whose modules a regular expression fits from beginning to end."""
    return {
        (target, layer)
        for layer, kind in enumerate(model.pattern)
        for operation, target in targets_of[kind].items()
        for module in modules_of(operation, model.blocks[kind])
        for prefix in PREFIXES
        if pattern.fullmatch(f"{prefix}.{layer}.{module}")
    }


def targeted_layers(model: ModelSpec, text: str) -> str:
    """Return the layers in which a regular expression on names puts adapters, as `--lora-layers` has them; empty for all."""
    pattern = target_pattern(text)
    if pattern is None or BESIDE_PATTERN.findall(text)[0]:
        return ""
    places = {layer for _, layer in _matched(pattern, model, _kinds(model, Lora(rank=1)))}
    return "" if len(places) in (0, len(model.pattern)) else ",".join(map(str, sorted(places)))


ADAPTERS = ("lora_dropout", "lora_dtype", "kbit_upcast", "use_dora", "modules_to_save")
"""Fields of a job that say how PEFT runs its adapters."""


def usual_upcast(lora: Lora, framework: Framework, precision: str | None, zero: Any) -> str:
    """Return the weights that a framework casts to float32 before training by default: all that is not quantised, or none.

    precision: the recipe; zero: the stage. Shards of 16 bits throughout are gathered as one tensor, of one dtype (source: pytorch,
    FlatParameter; trl 0.24 and axolotl leave the preparation out there)

    >>> [usual_upcast(Lora(rank=16, quantised=base), FRAMEWORKS["huggingface"], "bf16", 3) for base in (True, False)]
    ['all', 'none']
    """
    stored = lora.stored
    flat = (precision or "").endswith("-pure") and (zero or 0) >= framework.weights_stage
    prepared = (
        framework.peft and framework.prepares and stored is not None and stored.upcast and not stored.experts_only
    )
    return "all" if prepared and not flat else "none"


def _upcast(job: Job, lora: Lora, name: str, fill: Any) -> Any:
    """Return the weights that are cast to float32 before training: those of PEFT's preparation, unless the job states others."""
    framework = FRAMEWORKS.get(name)
    peft = framework is not None and framework.peft
    # DeepSpeed's engine casts the whole model to 16 bits: DoRA runs in these, and nothing is left of what PEFT cast.
    beside: tuple[str, ...] = ("use_dora", "lora_dtype", "kbit_upcast")
    if framework is None or not framework.splits_model:
        beside = ("use_dora",) if framework is None or framework.engine is None else ()
    for name in beside:
        refuse(not peft and getattr(job, name), "is PEFT's, and needs --framework huggingface", key=name)
    if not peft:
        return "none"
    if framework is None or usual_upcast(lora, framework, job.precision, job.zero) == "none":
        return job.kbit_upcast or "none"
    return fill("kbit_upcast", "all", "PEFT's prepare_model_for_kbit_training; TRL since 1.0 and axolotl: none")


def _saved(job: Job, model: ModelSpec) -> frozenset[str]:
    names = [] if job.modules_to_save is None else [name.strip() for name in job.modules_to_save.split(",")]
    for name in names:
        refuse(
            name not in SAVED_MODULES or model.head.kind != "lm",
            f"{name!r} is not modelled (known: {', '.join(SAVED_MODULES)})",
            key="modules_to_save",
        )
    return frozenset(SAVED_MODULES[name] for name in names)


def _others(model: ModelSpec, framework: str) -> frozenset[str]:
    """Return the modules that PEFT adapts where they are named: embedding, head, the matrices of experts."""
    record = FRAMEWORKS.get(framework)
    if record is None or not record.peft or record.fused_adapters or model.head.kind != "lm":
        return frozenset()
    return frozenset({"embedding", "head"}) | _experts(model)


def _experts(model: ModelSpec) -> frozenset[str]:
    mixtures = [block.mlp for block in model.blocks if isinstance(block.mlp, Moe)]
    return frozenset(f"experts.{name}" for spec in mixtures for name in ("gate_up" if spec.gated else "up", "down"))


def _own_experts(job: Job, model: ModelSpec, framework: str) -> frozenset[str]:
    """Return the matrices of experts that a framework's own adapters of the MLP have too, without being named."""
    fused = framework in FRAMEWORKS and FRAMEWORKS[framework].fused_adapters
    adapted = fused and EXPERTS_ADAPTED_UNSLOTH.at(Stack.parse(job.version)).value == "yes"
    return _experts(model) if adapted else frozenset()


def _kinds(model: ModelSpec, lora: Lora) -> list[dict[str, str]]:
    """Return the operations of each block that can have adapters, with the targets that they are."""
    by_block = []
    for block in model.blocks:
        bare = msgspec.structs.replace(lora, targets=frozenset())
        names = block_layer(block, model.hidden_size, View(tokens=1, pairs=1, lora=bare)).names
        mixed = frozenset(name for name in names if name.partition(".")[0] in MIXERS)
        view = View(tokens=1, pairs=1, lora=msgspec.structs.replace(lora, targets=ALL_TARGETS | BESIDE | mixed))
        adapted = block_layer(msgspec.structs.replace(block, adapted=True), model.hidden_size, view).names
        operations = [name.removesuffix(".lora_a") for name in adapted if name.endswith(".lora_a")]
        whole = {name: name for name in mixed} | {
            name: flat for name in operations if (flat := name.replace(".", "_")) in BESIDE
        }
        by_block.append({name: whole.get(name) or name.rpartition(".")[2] for name in operations})
    return by_block
