"""axolotl's YAML."""

from __future__ import annotations

from typing import Any

from loadgauge.job_files.fine_tuning.axolotl_rl import LOGPROBS, preference
from loadgauge.job_files.hugging_face import deepspeed
from loadgauge.job_files.hugging_face.huggingface import INLINE, compiled, dropout, sharding, targets
from loadgauge.job_files.ideas.evaluation import asked, saving
from loadgauge.job_files.ideas.optimizers import optimizer
from loadgauge.job_files.ideas.partial import adapted_layers, unfrozen
from loadgauge.job_files.ideas.table import Dialect, Facts, Idea, Keys, row
from loadgauge.job_files.ideas.words import ATTENTION, AXOLOTL_OPTIMIZERS, TORCH_OPTIMIZERS

NORM, GATED = "liger_rms_norm", ("liger_glu_activation", "liger_swiglu")
FUNCTIONS, TABLE = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), "lora_embedding_kernel"
CUT, LIGER = "CutCrossEntropyPlugin", "LigerPlugin"
OWN, KNOWN = "axolotl.integrations.", (CUT, LIGER, "ExpertParallelPlugin", "SwanLabPlugin")
PLUGINS = {CUT: f"axolotl.integrations.cut_cross_entropy.{CUT}", LIGER: f"axolotl.integrations.liger.{LIGER}"}
SWITCHES = {"flash_attention": "fa2", "sdp_attention": "flash", "flex_attention": "fa2", "eager_attention": "eager"}
SWITCHES |= {"xformers_attention": "fa1", "sage_attention": "flash"}
WORDS = ATTENTION | {"xformers": "fa1", "sage": "flash"}


def _attention() -> Idea:
    word = "attn_implementation"

    def read(keys: Keys) -> Facts:
        values = {kind for key, kind in SWITCHES.items() if keys.flag(key)}
        named = keys.choice(word, WORDS)
        values |= {named} if named else set()
        if len(values) > 1:
            raise keys.wrong(
                "eager_attention" if keys.has("eager_attention") else word, "contradicts the other kind of attention"
            )
        return {"attention": values.pop() if values else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wanted = facts["attention"]
        off: dict[str, Any] = {key: None for key in SWITCHES if keys.has(key)}
        switch = next((key for key, kind in SWITCHES.items() if kind == wanted), None)
        if off and switch and not keys.has(word):
            return off | {switch: True}
        named = next((theirs for theirs, ours in WORDS.items() if ours == wanted), None)
        return off | {word: named} if named else {}

    return Idea(keys=(word, *SWITCHES), facts=("attention",), read=read, write=write)


def _checkpointing() -> Idea:
    key, own, part = "gradient_checkpointing", "fsdp_config.activation_checkpointing", "selective_checkpointing"
    old, moved = "fsdp_config.fsdp_activation_checkpointing", "activation_offloading"

    def read(keys: Keys) -> Facts:
        word, moves = keys.raw(key), keys.raw(moved)
        if "offload_disk" in (word, moves) or moves == "disk":
            raise keys.wrong(key if word == "offload_disk" else moved, "activations on the disk are not read; true is")
        if keys.raw(part) not in (None, False):
            raise keys.wrong(part, "operations that are kept are not read")
        asked = word == "offload" or keys.flag(key) or keys.flag(own) or keys.flag(old)
        # Its older name; beside adapters, the older way, which moves the inputs of layers alone.
        where = keys.choice(moved, {"true": "all", "false": "none", "legacy": "checkpoints"}) or "none"
        if word == "offload":
            where = "checkpoints" if keys.has("adapter") or not keys.since(0, 10) else "all"
        return {"recompute": "full" if asked else "none", "activation_offload": where}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = facts.get("recompute") or "none"
        if word not in ("none", "full"):
            return {}
        where = facts.get("activation_offload") or "none"
        present = [name for name in (key, own, old) if keys.has(name)] or [key]
        off = False if keys.has(moved) else None
        spelled = {"all": True, "checkpoints": "legacy"}.get(where, off)
        return dict.fromkeys(present, word == "full") | {moved: spelled}

    return Idea(keys=(key, own, old, part, moved), facts=("recompute", "activation_offload"), read=read, write=write)


def _precision() -> Idea:
    switches = {"bf16": "bf16", "fp16": "fp16", "bfloat16": "bf16-pure", "float16": "fp16", "float32": "fp32"}

    def read(keys: Keys) -> Facts:
        values = {kind for key, kind in switches.items() if keys.raw(key) not in (None, "full") and keys.flag(key)}
        if keys.raw("bf16") == "full":
            values |= {"bf16-pure"}
        if "bf16" in keys.left and not values:
            values = {"bf16"}
        if len(values) > 1:
            raise keys.wrong("bf16", f"contradicts another switch: {', '.join(sorted(values))}")
        if keys.flag("fp8"):
            raise keys.wrong("fp8", "8-bit products through torchao in accelerate are not read")
        name = values.pop() if values else "bf16" if not keys.has(*switches) else "fp32"
        # It loads the weights in the dtype that it computes in.
        return {"precision": name, "weights": "bfloat16" if name == "bf16" else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        name = facts.get("precision") or "bf16"
        key = {"bf16": "bf16", "fp16": "fp16", "bf16-pure": "bfloat16", "fp32": "float32"}.get(name)
        if key is None:
            return {}
        return {other: None for other in switches if keys.has(other) or other in keys.left} | {key: True}

    return Idea(keys=(*switches, "fp8"), facts=("precision", "weights"), read=read, write=write)


def _plugins(keys: Keys) -> list[str]:
    """The plugins that are listed. Raises ConfigError where `plugins` is not a list."""
    listed = keys.raw("plugins") or []
    if not isinstance(listed, list):
        raise keys.wrong("plugins", f"must be a list of names, not {listed!r}")
    return [str(plugin) for plugin in listed]


def _other_plugin(keys: Keys) -> str | None:
    """The first plugin whose effect is not known."""
    return next(
        (name for name in _plugins(keys) if not name.startswith(OWN) or name.rpartition(".")[2] not in KNOWN), None
    )


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
            odd = next(key for key in FUNCTIONS if keys.has(key))
            raise keys.wrong(
                odd, f"runs some of the adapters in one function; read where {', '.join(FUNCTIONS)} are alike"
            )
        return on.pop()
    sharded = [name for name in keys.document.names() if name.startswith("fsdp_config.")]
    return (
        keys.since(0, 9)
        and not keys.has("rl")
        and not (keys.word("adapter") == "lora" and keys.flag("load_in_8bit"))
        and not (keys.since(0, 15) and keys.flag("trust_remote_code"))
        and (keys.since(0, 16) or not keys.real("lora_dropout"))
        and (not sharded or 2 in (keys.whole("fsdp_version"), keys.whole("fsdp_config.fsdp_version")))
    )


def _loss() -> Idea:
    key, count = "chunked_cross_entropy", "chunked_cross_entropy_num_chunks"
    fused, cut = "liger_fused_linear_cross_entropy", "cut_cross_entropy"

    def kernels(keys: Keys) -> bool:
        """Return whether norms and MLPs both are Liger's; one of them alone is bounded."""
        return bool(keys.flag(NORM) and any(keys.flag(name) for name in GATED))

    def cuts(keys: Keys) -> bool:
        """Whether cut cross-entropy is on, as it is where its plugin is listed and nothing else said (`CutCrossEntropyArgs`)."""
        return _plugged(keys, CUT) and keys.flag(cut) is not False

    def read(keys: Keys) -> Facts:
        other = _other_plugin(keys)
        if other is not None:
            raise keys.wrong("plugins", f"{other!r} is a plugin that is not read; without it there is an estimate")
        for plugin, names in ((CUT, (cut,)), (LIGER, (NORM, *GATED, fused))):
            off = next((name for name in names if keys.flag(name) and not _plugged(keys, plugin)), None)
            if off is not None:
                raise keys.wrong(off, f"does nothing in axolotl unless plugins lists {PLUGINS[plugin]}")
        running = ["liger"] * kernels(keys) + ["lora"] * _fuses_adapters(keys)
        facts: Facts = {"kernels": "-".join(running) or "native"}
        if keys.flag(key):
            number = keys.whole(count)
            return facts | {"loss": f"chunked:{number}" if number else "chunked"}
        if cuts(keys):
            return facts | {"loss": "chunked"}
        if keys.flag(fused):
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
            plugins.append(PLUGINS[LIGER])
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
    linear, four, eight = "lora_target_linear", "load_in_4bit", "load_in_8bit"
    nested, packed = "bnb_config_kwargs.bnb_4bit_use_double_quant", "gptq"

    def read(keys: Keys) -> Facts:
        kind = keys.choice("adapter", {"lora": "lora", "qlora": "qlora"})
        if kind is None:
            if keys.flag(four):
                raise keys.wrong(four, "says a base in 4 bits, and no adapter trains on it")
            return {"lora_rank": 0, "qlora": False}
        facts = inner.read(keys)
        if keys.flag(linear):
            facts["lora_targets"] = ",".join(["all", *(keys.words("lora_target_parameters") or [])])
        quantised = kind == "qlora" or bool(keys.flag(four))
        base = "nf4-single" if keys.flag(nested) is False else "nf4"
        if keys.flag(eight):
            quantised, base = True, "int8"
        if keys.flag(packed):
            if keys.raw("gptq_groupsize") not in (None, 128, "128"):
                raise keys.wrong("gptq_groupsize", "is read where it is 128")
            quantised, base = True, "gptq"
        # What prepare_model_for_kbit_training casts to float32 is cast back (loaders/model.py, `_configure_embedding_dtypes`).
        upcast = "none" if quantised else None
        save = keys.words("lora_modules_to_save")
        return facts | {
            "qlora": quantised,
            "base": base if quantised else None,
            "kbit_upcast": upcast,
            "use_dora": keys.flag("peft_use_dora") or None,
            "modules_to_save": ",".join(save) if save else None,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        values = inner.write(facts, keys)
        if not facts.get("lora_rank"):
            return values | {"adapter": None, linear: None, four: None, eight: None, packed: None}
        base = facts.get("base") or "nf4"
        quantised = bool(facts.get("qlora"))
        if quantised and base not in ("nf4", "nf4-single", "int8", "gptq"):
            return {}
        four_bits, save = quantised and base not in ("int8", "gptq"), facts.get("modules_to_save")
        everything = (facts.get("lora_targets") or "").partition(",")[0] == "all"
        return values | {
            "adapter": "qlora" if four_bits else "lora",
            four: True if four_bits else None,
            eight: True if quantised and base == "int8" else None,
            packed: True if quantised and base == "gptq" else None,
            "peft_use_dora": True if facts.get("use_dora") else None,
            "lora_modules_to_save": save.split(",") if save else None,
            linear: True if everything else None,
            "lora_target_modules": None if everything else values["lora_target_modules"],
            nested: False if quantised and base == "nf4-single" else None,
        }

    return Idea(
        keys=(
            *inner.keys,
            linear,
            four,
            eight,
            nested,
            packed,
            "gptq_groupsize",
            "peft_use_dora",
            "lora_modules_to_save",
        ),
        facts=("lora_rank", "lora_targets", "qlora", "base", "kbit_upcast", "use_dora", "modules_to_save"),
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
    copies, shards, tp = "dp_replicate_size", "dp_shard_size", "tensor_parallel_size"
    cp = ("context_parallel_size", "sequence_parallel_degree")

    def read(keys: Keys) -> Facts:
        replicas, parts = keys.whole(copies), keys.whole(shards)
        facts: Facts = {"tp": keys.whole(tp) or 1, "cp": keys.agreed(cp, keys.whole) or 1}
        if replicas is not None:
            facts["replicas"] = replicas if parts is None or parts > 1 else 1
        if parts is not None:
            facts["dp"] = parts * (replicas or 1)
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        replicas, ranks, tensor = facts.get("replicas") or 1, facts.get("cp") or 1, facts.get("tp") or 1
        values: dict[str, Any] = {
            tp: tensor if tensor > 1 or keys.has(tp) else None,
            cp[0]: ranks if ranks > 1 or keys.has(cp[0]) else None,
            cp[1]: None,
        }
        whole = facts.get("dp")
        if not facts.get("zero"):
            return values | {copies: None, shards: None}
        if replicas > 1 or keys.has(shards, copies) or ranks > 1 or tensor > 1:
            values[copies] = replicas if replicas > 1 or keys.has(copies) else None
            values[shards] = whole // replicas if whole is not None else None
        return values

    return Idea(keys=(copies, shards, tp, *cp), facts=("tp", "cp", "replicas", "dp"), read=read, write=write)


AXOLOTL = Dialect(
    name="axolotl",
    trainers="trl",
    title="axolotl",
    versions="axolotl 0.8 - 0.19",
    syntaxes=("yaml",),
    auto=True,
    blank={"yaml": "num_epochs: 1\nval_set_size: 0.0\n"},
    ideas=(
        row("model", "base_model", kind="word"),
        preference(),
        row("seq_len", "sequence_len", default=512),
        row("micro_batch", "micro_batch_size", default=1),
        row("accumulation", "gradient_accumulation_steps", default=1),
        optimizer("optimizer", TORCH_OPTIMIZERS | AXOLOTL_OPTIMIZERS),
        row("ep", "expert_parallel_size", default=1, off=1),
        sharding(switched=False),
        _degrees(),
        _adapter(),
        unfrozen("unfrozen_parameters"),
        adapted_layers("peft_layers_to_transform"),
        _checkpointing(),
        _precision(),
        _attention(),
        _loss(),
        dropout("lora_dropout"),
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
