"""axolotl's YAML."""

from __future__ import annotations

import re
from typing import Any

from loadgauge.job_files.fine_tuning.axolotl_rl import LOGPROBS, completions, length, preference
from loadgauge.job_files.hugging_face import deepspeed
from loadgauge.job_files.hugging_face.huggingface import INLINE, compiled, dropout, sharding, targets
from loadgauge.job_files.ideas import (
    ATTENTION,
    AXOLOTL_OPTIMIZERS,
    TORCH_OPTIMIZERS,
    Dialect,
    Facts,
    Idea,
    Keys,
    Missing,
    adapted_layers,
    asked,
    degree,
    optimizer,
    product,
    quantised,
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


def _attention() -> Idea:
    word, hybrid = "attn_implementation", "gemma4_hybrid_attn_impl"

    def read(keys: Keys) -> Facts:
        kind = next((kind for key, kind in SWITCHES.items() if keys.flag(key)), None)
        name = (keys.word(word) or "").partition("@")[0].partition(":")[0]
        if name and kind is not None:
            raise keys.wrong(word, "contradicts the older switch of attention")
        if "/" in name and name not in WORDS:
            keys.note(
                word,
                "is a kernel of the hub that is not known here; FlashAttention-2 is counted",
                parts=RUNS,
                share=0.2,
            )
            return {"attention": "fa2"}
        if name == "fp8":
            keys.note(word, "attends in 8 bits, in less time than FlashAttention-3, which is counted", "saves")
        if name:
            kind = WORDS[name] if name in WORDS else keys.choice(word, WORDS)
        return {"attention": "fa2" if kind is None and keys.flag(hybrid) else kind}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wanted = facts["attention"]
        off: dict[str, Any] = {key: None for key in SWITCHES if keys.has(key)}
        switch = next((key for key, kind in SWITCHES.items() if kind == wanted), None)
        switch = "flash_attention" if wanted == "fa2" else "sdp_attention" if wanted == "flash" else switch
        if off and switch and not keys.has(word):
            return off | {switch: True}
        named = next((theirs for theirs, ours in WORDS.items() if ours == wanted), None)
        return off | {word: named} if named else {}

    return Idea(keys=(word, *SWITCHES), facts=("attention",), read=read, write=write)


def _checkpointing() -> Idea:
    key, own, part = "gradient_checkpointing", "fsdp_config.activation_checkpointing", "selective_checkpointing"
    old, moved = "fsdp_config.fsdp_activation_checkpointing", "activation_offloading"

    def read(keys: Keys) -> Facts:
        word, moves = str(keys.raw(key)), keys.raw(moved)
        if keys.raw(part) not in (None, False):
            keys.note(part, "keeps what some operations make, which saves making it again", "costs", "activations")
        asked = word.startswith("offload") or keys.flag(key) or keys.flag(own) or keys.flag(old)
        if word == "offload_disk" or moves in ("disk", "offload_disk"):
            keys.note(
                key if word == "offload_disk" else moved, "may go to a disk, which is slower than host memory", "costs"
            )
            moves = "disk"
        # Its older name; beside adapters, the older way, which moves the inputs of layers alone.
        if word == "offload":
            moves = "legacy" if not keys.since(0, 12) and (keys.has("adapter") or not keys.since(0, 10)) else True
        later = "all" if keys.since(0, 18) else "checkpoints"  # another way to copy the same
        places = {"true": "all", "false": "none", "legacy": later, "disk": later, "hidden_states": "checkpoints"}
        where = "none" if moves is None else places.get(str(moves).lower()) or str(keys.choice(moved, places) or "none")
        # Beside adapters, moving all that is kept takes the place of making it again (`loaders/model.py` of 0.18).
        instead = where == "all" and keys.has("adapter") and keys.since(0, 18)
        return {"recompute": "full" if asked and not instead else "none", "activation_offload": where}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = facts.get("recompute") or "none"
        where = facts.get("activation_offload") or "none"
        instead = where == "all" and bool(facts.get("lora_rank")) and keys.since(0, 18)
        if word != "none" and (word != "full" or instead):
            return {}
        present = [name for name in (key, own, old) if keys.has(name)] or [key]
        off = False if keys.has(moved) else None
        spelled = {"all": True, "checkpoints": "hidden_states"}.get(where, off)
        return dict.fromkeys(present, word == "full" or instead) | {moved: spelled}

    return Idea(keys=(key, own, old, part, moved), facts=("recompute", "activation_offload"), read=read, write=write)


def _precision() -> Idea:
    switches = ("bf16", "fp16", "bfloat16", "float16", "float32")
    recipe = "fp8_config.recipe"

    def read(keys: Keys) -> Facts:
        # `resolve_dtype` (`utils/config/__init__.py`): `auto`, which it is where it is not there, gives way to fp16 alone.
        on = {key: keys.flag(key) for key in switches if key != "bf16"}
        auto, full = isinstance(keys.document.get("bf16"), Missing | str), keys.raw("bf16") == "full"
        brain = on["bfloat16"] or (not on["fp16"] if auto else keys.flag("bf16"))
        if on["fp16"] and on["bfloat16"]:
            raise keys.wrong("fp16", "contradicts another switch: bfloat16")
        # Weights of 16 bits alone; which 16 changes no byte.
        half = "fp16" if on["fp16"] else "bf16-pure" if on["float16"] else "fp32"
        name = "bf16-pure" if full else "bf16" if brain else half
        if keys.flag("fp8"):
            return {"precision": f"fp8-{keys.word(recipe) or 'tensorwise'}", "weights": None}
        # Its own FSDP 2 shards whole weights as they were loaded, where accelerate's makes float32 of them
        # (`monkeypatch/accelerate/fsdp2.py` of 0.12 and later).
        if name == "bf16" and keys.since(0, 12) and not keys.has("adapter") and _fsdp(keys) == 2:
            return {"precision": "bf16-autocast-8", "weights": None}
        # It loads the weights in the dtype that it computes in.
        return {"precision": name, "weights": "bfloat16" if name == "bf16" else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        name = facts.get("precision") or "bf16"
        key = {"bf16": "bf16", "fp16": "fp16", "bf16-pure": "bf16", "fp32": "float32", "bf16-autocast-8": "bf16"}.get(
            name
        )
        if key is None:
            return {}
        values: dict[str, Any] = {other: None for other in switches if keys.has(other) or other in keys.left}
        values |= {"bf16": False} if key == "float32" else {}
        return values | {key: "full" if name == "bf16-pure" else True, "fp8": None, recipe: None}

    return Idea(keys=(*switches, "fp8", recipe), facts=("precision", "weights"), read=read, write=write)


def _plugins(keys: Keys) -> list[str]:
    """The plugins that are listed. Raises ConfigError where `plugins` is not a list."""
    listed = keys.raw("plugins") or []
    if not isinstance(listed, list):
        raise keys.wrong("plugins", f"must be a list of names, not {listed!r}")
    return [str(plugin) for plugin in listed]


def _module(name: str) -> str:
    """The plugin as a file names it."""
    return f"{OWN}{PLUGINS[name][0]}.{name}"


def _doubted(keys: Keys) -> None:
    """Notes what plugins do that is not modelled. Raises ConfigError for one that trains elsewhere."""
    for name in _plugins(keys):
        plugin = name.rpartition(".")[2]
        if plugin == REMOTE:
            raise keys.wrong("plugins", f"{name!r} trains on a service, and not on these GPUs")
        if plugin not in PLUGINS:
            keys.note("plugins", f"{name} is a plugin that is not known here", parts=STEP)
        elif PLUGINS[plugin][1]:
            _, what, effect, parts, share = PLUGINS[plugin]
            keys.note("plugins", f"{plugin} {what}", effect, parts, share)


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
        on = {bool(keys.flag(key)) for key in FUNCTIONS}
        if len(on) > 1:
            odd = next(key for key in FUNCTIONS if keys.flag(key))
            keys.note(odd, "runs some of the adapters in one function, which keeps fewer tensors", "saves", RUNS, 0.3)
        return all(on)
    return (
        keys.since(0, 9)
        and not keys.has("rl")
        and not (keys.word("adapter") == "lora" and keys.flag("load_in_8bit"))
        and not (keys.since(0, 15) and keys.flag("trust_remote_code"))
        and not keys.flag("nvfp4_merge_aware")
        and (keys.since(0, 16) or not keys.real("lora_dropout"))
        and _fsdp(keys) != 1
    )


def _loss() -> Idea:
    key, count = "chunked_cross_entropy", "chunked_cross_entropy_num_chunks"
    fused, cut = "liger_fused_linear_cross_entropy", "cut_cross_entropy"

    def kernels(keys: Keys) -> bool:
        """Return whether norms and MLPs both are Liger's; one of them alone is bounded."""
        return bool(keys.flag(NORM) and any(keys.flag(name) for name in GATED)) and _plugged(keys, LIGER)

    def cuts(keys: Keys) -> bool:
        """Whether cut cross-entropy is on, as it is where its plugin is listed and nothing else said (`CutCrossEntropyArgs`)."""
        return _plugged(keys, CUT) and keys.flag(cut) is not False

    def read(keys: Keys) -> Facts:
        _doubted(keys)
        for plugin, names in ((CUT, (cut,)), (LIGER, (NORM, *GATED, fused))):
            for name in names:
                if keys.flag(name) and not _plugged(keys, plugin):
                    keys.note(name, f"does nothing in axolotl unless plugins lists {_module(plugin)}", "")
        running = ["liger"] * kernels(keys) + ["lora"] * _fuses_adapters(keys)
        facts: Facts = {"kernels": "-".join(running) or "native"}
        if keys.flag(key):
            number = keys.whole(count)
            return facts | {"loss": f"chunked:{number}" if number else "chunked"}
        if cuts(keys):
            return facts | {"loss": "chunked"}
        if keys.flag(fused) and _plugged(keys, LIGER):
            return facts | {"loss": "auto" if kernels(keys) else "liger"}
        # Log-probabilities of TRL 1.9, which axolotl 0.19 needs, are of float32 logits.
        return facts | {"loss": "float32" if kernels(keys) or keys.word("rl") in LOGPROBS else "auto"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        kind, _, number = (facts.get("loss") or "auto").partition(":")
        word = facts.get("kernels") or "native"
        on, cutting = word.startswith("liger"), kind == "chunked" and not number and _plugged(keys, CUT)
        if kind not in ("auto", "chunked", "liger") and not (kind == "float32" and on):
            return {}
        functions = word.endswith("lora") if facts.get("lora_rank") else None
        values: dict[str, Any] = {key: None, count: None, fused: None, cut: True if cutting else None, TABLE: None}
        values |= dict.fromkeys(FUNCTIONS, functions)
        # One of them alone, which is bounded, stays.
        if on or kernels(keys):
            gated = next((name for name in GATED if keys.has(name)), GATED[0])
            values |= {NORM: True if on else None, gated: True if on else None}
        listed = _plugins(keys)
        plugins = [plugin for plugin in listed if cutting or CUT not in plugin]
        if (on or kind == "liger") and not _plugged(keys, LIGER):
            plugins.append(_module(LIGER))
        if plugins != listed:
            values["plugins"] = plugins or None
        if kind == "liger" or (kind == "auto" and on):
            return values | {fused: True}
        return values | (
            {key: True, count: int(number) if number else None} if kind == "chunked" and not cutting else {}
        )

    return Idea(
        keys=(key, count, fused, cut, *FUNCTIONS, TABLE, "plugins"),
        facts=("loss", "kernels"),
        read=read,
        write=write,
    )


def _adapter() -> Idea:
    inner = targets("lora_r", "lora_target_modules", ("adapter", None, "lora"), 8, parameters="lora_target_parameters")
    linear, four, modules, moe = "lora_target_linear", "load_in_4bit", "lora_target_modules", "quantize_moe_experts"
    beside = product(
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

    def read(keys: Keys) -> Facts:
        kind = keys.choice("adapter", {"lora": "lora", "qlora": "qlora", "mora": "mora"})
        if kind is None and keys.flag(four):
            raise keys.wrong(four, "says a base in 4 bits, and no adapter trains on it")
        if kind is None:
            return {"lora_rank": 0, "qlora": False}
        if kind == "mora":
            why = "has one square matrix of as many parameters as the two of LoRA, which are counted"
            keys.note("adapter", why, parts=RUNS, share=0.2)
        facts, named = inner.read(keys) | beside.read(keys), keys.raw(modules)
        if isinstance(named, str) and named != "all-linear":
            facts["lora_targets"] = named  # one regular expression on the whole name
        if keys.flag(linear):
            ends = [name for name in keys.words(modules) or [] if name in ("embed_tokens", "lm_head")]
            facts["lora_targets"] = ",".join(["all", *ends, *(keys.words("lora_target_parameters") or [])])
        if keys.flag(four) and kind != "qlora":  # (`_set_quantization_config`)
            keys.note(four, f"does nothing in axolotl beside adapter: {kind}; the base is loaded in 16 bits", "")
        if keys.flag(moe) and facts["base"] in ("nf4", "int8"):
            facts["base"] += "-experts"
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        values = inner.write(facts, keys)
        if not facts.get("lora_rank"):
            return values | dict.fromkeys(("adapter", linear, four, moe, *beside.keys))
        base = facts.get("base") or "nf4"
        plain = facts | {"base": base.removesuffix("-experts")}
        if not sayable(plain, ("nf4", "nf4-single", "int8", "gptq")):
            return {}
        four_bits = bool(facts.get("qlora")) and plain["base"] not in ("int8", "gptq")
        everything = (facts.get("lora_targets") or "").partition(",")[0] == "all"
        return (
            values
            | beside.write(plain, keys)
            | {
                "adapter": "qlora" if four_bits else "lora",
                four: True if four_bits else None,
                linear: True if everything else None,
                modules: None if everything else values[modules],
                moe: True if facts.get("qlora") and base != plain["base"] else None,
            }
        )

    return Idea(
        keys=tuple(dict.fromkeys((*inner.keys, linear, four, *beside.keys, moe))),
        facts=(*inner.facts, *beside.facts),
        read=read,
        write=write,
    )


def _evaluation() -> Idea:
    """It evaluates where there is data for it and something says when (`core/builders/base.py`)."""
    size, share, sets = "eval_batch_size", "val_set_size", "test_datasets"
    when = ("eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy")

    def data(keys: Keys) -> bool:
        return bool(keys.real(share) or keys.raw(sets))

    def on(keys: Keys) -> bool:
        return data(keys) and (bool(keys.real(when[0]) or keys.real(when[1])) or asked(keys, *when[2:]))

    def read(keys: Keys) -> Facts:
        number = keys.whole(size) or keys.whole("micro_batch_size") or 1
        return {"eval_batch": number} if on(keys) else {}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if facts.get("eval_batch") is None or not data(keys):
            return {}
        return {size: facts["eval_batch"]} | ({} if on(keys) else {when[2]: "steps"})

    return Idea(keys=(size, share, sets, *when), facts=("eval_batch",), read=read, write=write)


def _degrees() -> Idea:
    copies, shards = "dp_replicate_size", "dp_shard_size"
    inner = product(
        degree("tp", "tensor_parallel_size"),
        degree("cp", "context_parallel_size", "sequence_parallel_degree"),
        degree("ep", "expert_parallel_size"),
    )

    def read(keys: Keys) -> Facts:
        facts, replicas, parts = inner.read(keys), keys.whole(copies), keys.whole(shards)
        if replicas is not None:
            facts["replicas"] = replicas if parts is None or parts * facts["ep"] > 1 else 1
        if parts is not None:
            facts["dp"] = parts * (replicas or 1) * facts["ep"]  # an axis beside the others (`utils/distributed.py`)
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        values, replicas, whole = inner.write(facts, keys), facts.get("replicas") or 1, facts.get("dp")
        if not facts.get("zero"):
            return values | {copies: None, shards: None}
        if replicas > 1 or keys.has(shards, copies) or max(facts.get("cp") or 1, facts.get("tp") or 1) > 1:
            values[copies] = replicas if replicas > 1 or keys.has(copies) else None
            values[shards] = whole // replicas // (facts.get("ep") or 1) if whole is not None else None
        return values

    return Idea(keys=(copies, shards, *inner.keys), facts=(*inner.facts, "replicas", "dp"), read=read, write=write)


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


def _optimizer() -> Idea:
    key = "optimizer"
    meanings = TORCH_OPTIMIZERS | AXOLOTL_OPTIMIZERS
    like = {name: (meanings | {"lion_32bit": "lion"})[other] for name, (other, _) in LIKE.items()}
    inner = optimizer(key, meanings | like)

    def read(keys: Keys) -> Facts:
        beside = LIKE.get(keys.word(key) or "", ("", ""))[1]
        if beside:
            keys.note(
                key,
                f"holds what {LIKE[str(keys.word(key))][0]} does, which is counted, {beside}",
                parts="optimizer transient",
                share=0.5,
            )
        return inner.read(keys)

    return Idea(keys=inner.keys, facts=inner.facts, read=read, write=inner.write)


def _accumulation() -> Idea:
    """Both have a default, so that `batch_size` counts where the other is there without a value (`normalize_config`)."""
    rounds, each, whole = "gradient_accumulation_steps", "micro_batch_size", "batch_size"
    ray, workers = "use_ray", "ray_num_workers"

    def read(keys: Keys) -> Facts:
        micro, number = keys.whole(each) or 1, keys.whole(rounds)
        if number is None and not isinstance(keys.document.get(rounds), Missing):
            number = max(1, (keys.whole(whole) or micro) // micro)
        facts: Facts = {"micro_batch": micro * completions(keys), "accumulation": number or 1}
        return facts | ({"gpus": keys.whole(workers) or 1} if keys.flag(ray) else {})

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        values = {each: facts.get("micro_batch")}
        if facts.get("accumulation") is not None:  # where it follows from GPUs that nobody says, the file's own stays
            values |= {rounds: facts["accumulation"], whole: None}
        return values | ({workers: facts.get("gpus")} if keys.flag(ray) else {})

    return Idea(
        keys=(rounds, each, whole, ray, workers), facts=("micro_batch", "accumulation", "gpus"), read=read, write=write
    )


def _partly() -> Idea:
    inner = unfrozen("unfrozen_parameters")

    def read(keys: Keys) -> Facts:
        if keys.has("adapter") and keys.has(*inner.keys):
            keys.note(
                inner.keys[0],
                "freezes adapters that it does not name; they are counted",
                "saves",
                "gradients optimizer",
            )
            return {}
        facts = inner.read(keys)
        # Older classes have their layers at other names, such as DBRX's and GPT-2's.
        return {
            name: value and re.sub(r"transformer\.(blocks|h)\.", "model.layers.", value)
            for name, value in facts.items()
        }

    return Idea(keys=inner.keys, facts=inner.facts, read=read, write=inner.write)


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
        preference(),
        length("sequence_len"),
        _accumulation(),
        _optimizer(),
        sharding(switched=False),
        _degrees(),
        _adapter(),
        _partly(),
        adapted_layers("peft_layers_to_transform"),
        _checkpointing(),
        _precision(),
        _attention(),
        _loss(),
        _evaluation(),
        saving(
            "fsdp_config.state_dict_type",
            "fsdp_config.fsdp_state_dict_type",
            "fsdp_config.final_state_dict_type",
            switches=tuple(f"{INLINE}zero_optimization.{name}" for name in deepspeed.GATHERS),
        ),
        compiled("torch_compile"),
    ),
)
