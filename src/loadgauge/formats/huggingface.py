"""transformers' TrainingArguments, and TRL's SFT on top of them: YAML, JSON or a command line."""

from __future__ import annotations

from typing import Any

from loadgauge.formats import deepspeed
from loadgauge.formats.coverage import words
from loadgauge.formats.megatron import launched
from loadgauge.formats.table import Dialect, Facts, Idea, Keys, row
from loadgauge.formats.words import ATTENTION, SHARDING, TORCH_OPTIMIZERS

FILLED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
INLINE = "deepspeed."
OTHER_TRAINERS = {
    r"\btrl (dpo|kto|grpo|rloo|reward|orpo|cpo|ppo|gkd|online_dpo|nash_md|xpo|bco|prm)\b": "starts another trainer than SFT",
    r"(?i)(?:^|[\s/])\w*(?:dpo|kto|grpo|rloo|orpo|ppo|gkd|reward)\w*\.py\b": "starts another trainer than SFT",
}
"""Command lines of other trainers."""


def checkpointing(default: Any = None, *, new: str = "activation_checkpointing") -> Idea:
    """The idea of recomputed layers; with `every_n_layers`, every n-th. FSDP has its own switch.

    default: the tool's own, or a function of the keys; new: the key that is written
    """
    names = tuple(dict.fromkeys((new, "gradient_checkpointing", "activation_checkpointing")))
    every = tuple(f"{name}_kwargs.every_n_layers" for name in names)
    own = ("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing")

    def read(keys: Keys) -> Facts:
        values = [flag for key in (*names, *own) if (flag := keys.flag(key)) is not None]
        usual = default(keys) if callable(default) else default
        if not (any(values) if values else usual):
            return {"recompute": "none"}
        number = next((facts for key in every if (facts := keys.whole(key)) is not None), 1)
        return {"recompute": "full" if number == 1 else f"full:every={number}"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        kind, _, option = (facts.get("recompute") or "none").partition(":")
        number = option.removeprefix("every=") or "1"
        if kind not in ("none", "full") or not number.isdecimal():
            return {}
        present = [key for key in (*names, *own) if keys.has(key)] or [names[1] if keys.has(every[1]) else names[0]]
        values: dict[str, Any] = dict.fromkeys(present, kind == "full")
        if int(number) > 1:
            values[every[1] if names[1] in present else every[0]] = int(number)
        else:
            values |= {key: 1 for key in every if keys.has(key)}
        return values

    return Idea(keys=(*names, *every, *own), facts=("recompute",), read=read, write=write)


def sharding(switched: bool = True) -> Idea:
    """The idea of sharding: FSDP, or a DeepSpeed configuration inside the file (a separate one is read as well).

    switched: whether `fsdp` must be on for `fsdp_config` to count; in axolotl it counts by being there
    """
    inner = deepspeed.zero(INLINE)
    names = ("reshard_after_forward", "version", "sharding_strategy", "cpu_offload", "offload_params")
    keyed = {name: (f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}") for name in names}
    owned = ("fsdp", "deepspeed", *inner.keys, *(key for pair in keyed.values() for key in pair), "fsdp_version")

    def first(keys: Keys, name: str) -> str | None:
        return next((key for key in keyed[name] if keys.has(key)), None)

    def of_fsdp(keys: Keys) -> Facts:
        words = [] if isinstance(keys.raw("fsdp"), bool) else keys.words("fsdp") or []
        switch = keys.flag("fsdp") if (words and words[0].lower() in ("true", "false")) or not words else True
        if switch is False:
            return {"framework": "huggingface", "zero": 0}
        version = keys.whole(first(keys, "version") or keyed["version"][0]) or keys.whole("fsdp_version")
        zero, facts = 3, None
        for word in words:
            if word.upper() in SHARDING:
                zero = SHARDING[word.upper()]
        strategy, reshard = first(keys, "sharding_strategy"), first(keys, "reshard_after_forward")
        if strategy is not None:
            facts = keys.choice(strategy, SHARDING)
        elif reshard is not None:
            raw = str(keys.raw(reshard)).lower()
            if raw in ("true", "false"):
                facts = 3 if raw == "true" else 2
            else:
                facts = keys.choice(reshard, SHARDING)
        if strategy is not None and version == 2:
            raise keys.wrong(strategy, "goes with version 1 of FSDP, not with 2")
        moved = "offload" in words or any(
            keys.flag(key) for name in ("cpu_offload", "offload_params") if (key := first(keys, name)) is not None
        )
        return {
            "framework": "huggingface", "zero": zero if facts is None else facts, "offload": "all" if moved else "none",
        }  # fmt: skip

    def read(keys: Keys) -> Facts:
        configuration = keys.raw("deepspeed")
        if configuration is not None and keys.has("fsdp") and keys.raw("fsdp") is not False:
            raise keys.wrong("deepspeed", f"contradicts {keys.document.shown('fsdp')}")
        if isinstance(configuration, dict):
            return {"framework": "deepspeed"} | inner.read(keys)
        if configuration is not None and configuration is not False:
            return {"framework": "deepspeed"}
        if keys.has("fsdp") or (not switched and any(keys.has(*pair) for pair in keyed.values())):
            return of_fsdp(keys)
        return {"framework": "huggingface", "zero": 0, "offload": "none"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        zero, moved = facts.get("zero") or 0, facts.get("offload") or "none"
        configuration = keys.raw("deepspeed")
        if isinstance(configuration, str) and configuration:
            return {}
        values: dict[str, Any] = dict.fromkeys(owned)
        engine = facts.get("framework")
        inside = isinstance(configuration, dict) and engine != "huggingface"
        if engine == "deepspeed" or zero == 1 or moved == "optimizer" or inside:
            values.pop("deepspeed")
            auto = {f"{INLINE}{name}": "auto" for name in FILLED if not keys.has(f"{INLINE}{name}")}
            if isinstance(configuration, dict):
                auto = {}
            return values | auto | inner.write(facts, keys)
        if not zero:
            return values
        present = {name: first(keys, name) or pair[0] for name, pair in keyed.items()}
        legacy_words = isinstance(keys.raw("fsdp"), str | list) and str(keys.raw("fsdp")).lower() not in (
            "true",
            "false",
        )
        if legacy_words:
            word = {3: "full_shard", 2: "shard_grad_op"}[zero]
            text = [word, "auto_wrap", *(["offload"] if moved == "all" else [])]
            return values | {"fsdp": text if isinstance(keys.raw("fsdp"), list) else " ".join(text)}
        if not switched:
            old = keys.has("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params")
            moves = present["offload_params"]
            return values | {
                "fsdp_version": 2, present["reshard_after_forward"]: zero == 3,
                moves: moved == "all" if moved == "all" or old else None,
            }  # fmt: skip
        return values | {
            "fsdp": True, present["version"]: 2, present["reshard_after_forward"]: zero == 3,
            present["cpu_offload"]: True if moved == "all" else None,
        }  # fmt: skip

    return Idea(keys=owned, facts=("framework", "zero", "offload"), read=read, write=write)


def half(default: Any = None, pure: str = "") -> Idea:
    """The idea of the precision: `bf16` or `fp16`; `pure`: a switch for 16 bits throughout; `default`: the tool's own."""
    owned = ("bf16", "fp16", *([pure] if pure else []))

    def read(keys: Keys) -> Facts:
        if pure and keys.flag(pure):
            return {"precision": "bf16-pure"}
        bf16, fp16 = keys.flag("bf16"), keys.flag("fp16")
        if bf16 and fp16:
            raise keys.wrong("fp16", f"contradicts {keys.document.shown('bf16')}")
        if bf16 is None and not fp16 and "bf16" in keys.left:
            return {"precision": "bf16"}
        usual = default(keys) if callable(default) else default
        if bf16 is None and fp16 is None and usual is not None:
            return {"precision": usual}
        return {"precision": "bf16" if bf16 else "fp16" if fp16 else "fp32"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        name = facts["precision"]
        if name not in ("bf16", "fp16", "fp32") and not (pure and name == "bf16-pure"):
            return {}
        usual = default(keys) if callable(default) else default
        values: dict[str, Any] = {pure: True if name == "bf16-pure" else None} if pure else {}
        for word in ("bf16", "fp16"):
            off = False if keys.has(word) or word in keys.left or (usual == word and name == "fp32") else None
            values[word] = True if name == word else off
        return values

    return Idea(keys=owned, facts=("precision",), read=read, write=write)


DTYPES = {
    "bfloat16": "bf16", "bf16": "bf16", "torch.bfloat16": "bf16", "float32": "fp32", "fp32": "fp32",
    "torch.float32": "fp32", "float16": "fp16", "fp16": "fp16", "torch.float16": "fp16", "half": "fp16", "auto": "auto",
}  # fmt: skip
"""`torch_dtype` of `from_pretrained`."""


def weights(*names: str) -> Idea:
    """The idea of the format that weights are loaded in: bf16, fp16, fp32, or auto, which is the checkpoint's (`solve`)."""

    def read(keys: Keys) -> Facts:
        return {"weights": keys.agreed(names, lambda name: _dtype(keys, name))}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        return {}

    return Idea(keys=names, facts=("weights",), read=read, write=write)


def _dtype(keys: Keys, name: str) -> str | None:
    # `auto` is a value of its own here, and not one that another file has.
    value = keys.document.get(name)
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    word: str | None = keys.choice(name, DTYPES)
    return word


def targets(rank: str, modules: str, switch: Any, usual: int, everything: str = "all-linear") -> Idea:
    """The idea of LoRA: its rank and the linear layers that get adapters.

    rank, modules: keys; switch: a key with its values for off and on; usual: the tool's default rank
    everything: the word for all linear layers
    """
    key, off, on = switch

    def read(keys: Keys) -> Facts:
        values = keys.raw(key)
        spelled = str(values).lower() if isinstance(values, bool) else values
        active = spelled not in (None, off) and not (off is False and str(spelled).lower() == "false")
        if not active:
            return {"lora_rank": 0}
        chosen = keys.words(modules)
        words = None if chosen is None else "all" if chosen in ([everything], ["all"]) else ",".join(chosen)
        return {"lora_rank": keys.whole(rank) or usual, "lora_targets": words}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if not facts.get("lora_rank"):
            return {key: None if off is False or off is None else off, rank: None, modules: None}
        words = facts.get("lora_targets")
        spelled = None if words is None else everything if words == "all" else words.split(",")
        if words == "attention":
            spelled = ["q_proj", "k_proj", "v_proj", "o_proj"]
        if isinstance(spelled, str) and keys.document.syntax == "argv":
            spelled = [spelled]  # in the place of all the words of a list
        return {key: on, rank: facts["lora_rank"], modules: spelled}

    return Idea(keys=(rank, modules, key), facts=("lora_rank", "lora_targets"), read=read, write=write)


def processes(*, argv: bool = True) -> Idea:
    """The idea of the number of GPUs, as given to accelerate (in all) and, on a command line, to `deepspeed` (of a node).

    argv: of a command line alone; else of accelerate's own file, which always has them
    """
    count, machines, per_node, nodes = "num_processes", "num_machines", "num_gpus", "num_nodes"

    def read(keys: Keys) -> Facts:
        if argv and keys.document.syntax != "argv":
            return {}
        if argv and keys.has(per_node):
            return {"gpus_per_node": keys.whole(per_node), "nodes": keys.whole(nodes) or 1}
        gpus, hosts = keys.whole(count, minimum=1 if argv else -1), keys.whole(machines) or 1
        if gpus is None or gpus < 1:
            return {}
        if gpus % hosts:
            raise keys.wrong(count, f"{gpus} cannot be split over {hosts} machines")
        return {"gpus": gpus} if hosts == 1 else {"gpus": gpus, "nodes": hosts, "gpus_per_node": gpus // hosts}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if (argv and keys.document.syntax != "argv") or "gpus" not in facts:
            return {}
        gpus, hosts = facts["gpus"], facts.get("nodes")
        if not argv:
            return {count: gpus, machines: hosts or keys.whole(machines) or 1}
        if keys.has(per_node):
            return {per_node: facts.get("gpus_per_node"), nodes: hosts} if hosts else {per_node: gpus, nodes: None}
        return {count: gpus, machines: hosts if keys.has(machines) else None} if keys.has(count) else {}

    keys = (count, machines, per_node, nodes) if argv else (count, machines)
    return Idea(keys=keys, facts=("gpus", "gpus_per_node", "nodes"), read=read, write=write)


def attention(*switches: str) -> Idea:
    """The idea of the attention kernel, `attn_implementation`; `switches`: older keys that switch flash attention on."""
    key = "attn_implementation"

    def read(keys: Keys) -> Facts:
        old = any(keys.flag(name) for name in switches)
        named = keys.choice(key, ATTENTION)
        if old and named == "eager":
            raise keys.wrong(key, "contradicts the switch for flash attention")
        return {"attention": named or ("flash" if old else None)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        off: dict[str, Any] = {name: None for name in switches if keys.has(name)}
        return off | {key: "eager" if facts["attention"] == "eager" else "flash_attention_2"}

    return Idea(keys=(key, *switches), facts=("attention",), read=read, write=write)


def dropout(key: str, switch: str = "", default: float | None = None) -> Idea:
    """The idea of the dropout of adapters' inputs; `default`: its value where `switch` is on and none is given."""

    def read(keys: Keys) -> Facts:
        share = keys.real(key)
        if share is not None and not 0 <= share < 1:
            raise keys.wrong(key, f"must be at least 0 and below 1, got {share:g}")
        return {"lora_dropout": default if share is None and switch and keys.flag(switch) else share}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        return {key: facts["lora_dropout"]}

    return Idea(keys=(key,), facts=("lora_dropout",), read=read, write=write)


def _quantised() -> Idea:
    four, eight, kind, nested = "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"

    def read(keys: Keys) -> Facts:
        if keys.flag(eight):
            raise keys.wrong(eight, "a base in 8 bits is not read; 4 bits are")
        if not keys.flag(four):
            return {"qlora": False}
        keys.choice(kind, {"nf4": True})
        return {"qlora": True, "base": "nf4" if keys.flag(nested) else "nf4-single"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        base = facts.get("base") or "nf4"
        if not facts.get("qlora"):
            return {four: False if keys.has(four) else None, nested: None}
        if base not in ("nf4", "nf4-single"):
            return {}
        return {four: True, nested: True if base == "nf4" else None}

    return Idea(keys=(four, eight, kind, nested), facts=("qlora", "base"), read=read, write=write)


def _trl_loss() -> Idea:
    key, liger, old = "loss_type", "use_liger_kernel", "use_liger"

    def read(keys: Keys) -> Facts:
        # Since 1.6 the logits are never whole, with a plain `nll` too from 1.16 on.
        words = {"nll": keys.since(1, 16), "chunked_nll": True, "dft": False}
        values = keys.choice(key, words)
        chunked = keys.flag(liger) or keys.flag(old) or (keys.since(1, 6) if values is None else values)
        return {"loss": "chunked" if chunked else "auto"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        chunked = (facts.get("loss") or "auto").startswith("chunked")
        return {key: "nll" if chunked else None, liger: False if keys.has(liger) else None} if chunked else {}

    return Idea(keys=(key, liger, old), facts=("loss",), read=read, write=write)


def liger(*names: str) -> Idea:
    """The idea of Liger's kernels, whose loss is chunked; the first name is written."""

    def read(keys: Keys) -> Facts:
        return {"loss": "chunked" if any(keys.flag(name) for name in names) else "auto"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        chunked = facts.get("loss") == "chunked"
        off: dict[str, Any] = {name: None for name in names[1:] if keys.has(name) and not chunked}
        return off | {names[0]: True if chunked else False if keys.has(names[0]) else None}

    return Idea(keys=names, facts=("loss",), read=read, write=write)


def _trl_precision(keys: Keys) -> str | None:
    return "bf16" if keys.since(0, 19) else None


def _trl_checkpointing(keys: Keys) -> bool:
    return keys.since(0, 22)


OWN = frozenset({"fsdp_config", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "deepspeed"})
SHARED = (
    launched(),
    processes(),
    row("model", "model_name_or_path", kind="word"),
    sharding(),
)
BATCH = (
    row("micro_batch", "per_device_train_batch_size", default=8),
    row("accumulation", "gradient_accumulation_steps", default=1),
)
OPTIMIZER = row("optimizer", "optim", words=TORCH_OPTIMIZERS, default="adamw")
METHOD = (OPTIMIZER, attention("use_flash_attention_2"))

BLANK = {
    "yaml": "output_dir: output\n",
    "json": '{\n  "output_dir": "output"\n}\n',
    "argv": "torchrun train.py --output_dir output\n",
}
TRANSFORMERS = Dialect(
    name="transformers",
    title="transformers TrainingArguments",
    versions="transformers 4.40 - 5.23",
    syntaxes=("yaml", "json", "argv"),
    auto=True,
    objects=OWN,
    marks=words("per_device_train_batch_size output_dir per_device_eval_batch_size save_strategy fsdp"),
    blank=BLANK,
    ideas=(
        *SHARED,
        *BATCH,
        *METHOD,
        row("seq_len", "block_size", "max_seq_length", "model_max_length", "max_length", add=False),
        checkpointing(),
        half(),
        weights("dtype", "torch_dtype"),
        liger("use_liger_kernel"),
    ),
    programs=OTHER_TRAINERS,
)

TRL = Dialect(
    name="trl",
    title="TRL SFT",
    versions="TRL 0.12 - 1.16",
    syntaxes=("yaml", "json", "argv"),
    auto=True,
    objects=OWN,
    marks=words(
        """
        max_length max_seq_length packing use_peft padding_free lora_r lora_target_modules dataset_text_field dataset_name
        load_in_4bit per_device_train_batch_size loss_type
        """
    ),
    # What is a key of its trainer alone, at its default.
    blank={
        "yaml": "output_dir: output\npacking: false\n",
        "json": '{\n  "output_dir": "output",\n  "packing": false\n}\n',
        "argv": "torchrun train.py --output_dir output --packing False\n",
    },
    ideas=(
        *SHARED,
        *BATCH,
        *METHOD,
        row("seq_len", "max_length", "max_seq_length", default=1024),
        checkpointing(_trl_checkpointing, new="gradient_checkpointing"),
        half(_trl_precision),
        weights("dtype", "torch_dtype"),
        _trl_loss(),
        _quantised(),
        targets("lora_r", "lora_target_modules", ("use_peft", False, True), 16),
        dropout("lora_dropout", "use_peft", 0.05),
    ),
    programs=OTHER_TRAINERS,
)
