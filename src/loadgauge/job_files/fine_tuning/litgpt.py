"""LitGPT's configurations: YAML, or a command line (`litgpt finetune lora --config`)."""

import re
from typing import Any

from loadgauge.job_files.ideas import (
    BITSANDBYTES,
    IDLE,
    NEAREST,
    Dialect,
    Facts,
    Keys,
    Named,
    fixed,
    reads,
    row,
    short,
)

RECIPES = {
    "bf16-true": "bf16-pure", "bf16-mixed": "bf16-autocast", "32-true": "fp32", "16-mixed": "fp16-autocast",
    "16-true": "fp16-pure",
}  # fmt: skip
"""`precision` of Lightning's Fabric; without one it is bf16-mixed on a GPU that has bfloat16."""
BASES = {"bnb.nf4": "nf4-single", "bnb.nf4-dq": "nf4", "bnb.fp4": "fp4", "bnb.fp4-dq": "nf4"}
BASES |= {"bnb.int8-training": "int8"}
SWITCHES = {
    "lora_query": (("q_proj",), True), "lora_key": (("k_proj",), False), "lora_value": (("v_proj",), True),
    "lora_projection": (("o_proj",), False), "lora_mlp": (("gate_proj", "up_proj", "down_proj"), False),
    "lora_head": (("lm_head",), False),
}  # fmt: skip
"""Linear layers by their switches, and the switches' defaults."""
LORA = ("lora_r", "lora_alpha", "lora_dropout", *SWITCHES)
NAME, SIZES = "model_name", "model_config."
SHAPES = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "kv-heads": "n_query_groups",
    "ffn": "intermediate_size",
}
"""Sizes of `litgpt.Config`, by the words of a shape."""
GATED, PLAIN = ("LLaMAMLP", "GemmaMLP"), "GptNeoxMLP"
EVERY = [name for layers, _ in SWITCHES.values() for name in layers if name != "lm_head"]
COMMAND = re.compile(r"finetune[_ ](full|lora|adapter)")
OPTIMIZERS = {"AdamW": "adamw", "Adam": "adamw", "SGD": "sgd"}
OPTIMIZERS |= {f"torch.optim.{name}": ours for name, ours in OPTIMIZERS.items()}
OPTIMIZERS |= BITSANDBYTES


def _shape(keys: Keys) -> str:
    """The model that is written out, of a family that is like it."""
    kind = keys.word(f"{SIZES}mlp_class_name") or PLAIN
    keys.refuse(
        f"{SIZES}mlp_class_name",
        f"{short(kind)} is not one that is read (read: {', '.join((*GATED, PLAIN))})",
        when=kind not in (*GATED, PLAIN),
    )
    gated = kind in GATED
    keys.note(
        f"{SIZES}mlp_class_name",
        "is of GPT-NeoX, for which GPT-2 is counted",
        parts="activations transient",
        share=0.2,
        when=not gated,
    )
    sizes = {ours: keys.whole(f"{SIZES}{theirs}") for ours, theirs in SHAPES.items() if gated or ours != "kv-heads"}
    width = keys.whole(f"{SIZES}head_size")
    keys.note(
        f"{SIZES}head_size",
        "is not the width over the heads, which is counted",
        parts="weights activations",
        share=0.3,
        when=width is not None and width * (sizes["heads"] or 32) != (sizes["hidden"] or 4096),
    )
    rows = keys.whole(f"{SIZES}padded_vocab_size") or keys.whole(f"{SIZES}vocab_size") or 50254
    sizes |= {"vocab": rows, "positions": keys.whole(f"{SIZES}block_size") or 4096}
    return f"{'llama' if gated else 'gpt'}:" + ",".join(f"{word}={size}" for word, size in sizes.items() if size)


def _model_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    name = facts.get("model")
    if _pretrains(keys):
        return {NAME: name} if name and not keys.has(f"{SIZES}n_layer") else {}
    return {at.key: f"checkpoints/{name}"} if name else {}


@reads(
    facts="model",
    write=_model_written,
    key="checkpoint_dir",
    also=(
        NAME,
        *(
            f"{SIZES}{name}"
            for name in (
                *SHAPES.values(),
                "mlp_class_name",
                "padded_vocab_size",
                "vocab_size",
                "block_size",
                "head_size",
            )
        ),
    ),
)
def _model(keys: Keys, at: Named) -> Facts:
    name = keys.word(at.key)
    if name is None and keys.document.syntax == "argv":
        program = getattr(keys.document, "program", ())
        at_script = next((index for index, word in enumerate(program) if word.startswith("finetune")), None)
        rest = [] if at_script is None else [word for word in program[at_script + 1 :] if "/" in word]
        name = rest[0] if rest else None
    if _pretrains(keys):
        return {
            "model": _shape(keys) if keys.has(f"{SIZES}n_layer") else (keys.word(NAME) or "").replace("tiny-l", "tinyl")
        }
    return {"model": None if name is None else name.strip("/").removeprefix("checkpoints/")}


def _pretrains(keys: Keys) -> bool:
    """Return whether the file is of `litgpt pretrain`, which compiles the model and shards it within a node (`pretrain.py`)."""
    return keys.has(NAME) or "pretrain" in keys.program


def _trains_adapters(keys: Keys) -> bool:
    """Return whether LoRA is trained: `litgpt finetune lora`, or a file with LoRA's keys."""
    if (asked := COMMAND.search(keys.program)) is not None:
        return asked[1] == "lora"
    return keys.has("quantize") or any(keys.raw(name) is not None for name in LORA)


def _adapter_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    if not facts.get("lora_rank"):
        return dict.fromkeys((at.rank, at.quantised, at.dropped, *SWITCHES))
    groups = {"all": EVERY, "attention": EVERY[:4]}
    chosen = (facts.get("lora_targets") or "all").split(",")
    wanted = {name for word in chosen for name in groups.get(word, [word])}
    switches = {switch: set(layers) <= wanted for switch, (layers, _) in SWITCHES.items()}
    spelled = next((theirs for theirs, ours in BASES.items() if ours == (facts.get("base") or "nf4")), None)
    sayable = wanted == {name for switch, on in switches.items() if on for name in SWITCHES[switch][0]}
    if not sayable or (facts.get("qlora") and spelled is None):
        return {}
    return {
        at.rank: facts["lora_rank"],
        at.quantised: spelled if facts.get("qlora") else None,
        **switches,
        at.dropped: facts.get("lora_dropout", 0.0 if keys.raw(at.dropped) is None else None) or 0.0,
    }


@reads(
    facts="lora_rank lora_targets qlora base lora_dropout",
    write=_adapter_written,
    rank="lora_r",
    quantised="quantize",
    dropped="lora_dropout",
    also=(*SWITCHES,),
)
def _adapter(keys: Keys, at: Named) -> Facts:
    adapter = COMMAND.findall(keys.program)[:1] == ["adapter"]
    keys.refuse(at.rank, "LLaMA-Adapter is not read; lora and full are", when=adapter)
    if not _trains_adapters(keys):
        return {"lora_rank": 0, "qlora": False}
    on = [layers for switch, (layers, usual) in SWITCHES.items() if keys.flag(switch, usual)]
    names = [name for layers in on for name in layers]
    base = keys.choice(at.quantised, BASES)
    return {
        "lora_rank": keys.whole(at.rank) or 8,
        "lora_targets": "all" if names == EVERY else ",".join(names),
        "qlora": base is not None,
        "base": base,
        "lora_dropout": keys.real(at.dropped, 0.05),
    }


def _gpus_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    gpus = facts.get("gpus") or 1
    hosts = facts.get("nodes") or 1
    if (facts.get("zero") or 0) != (3 if gpus > 1 else 0):
        return {}
    return {at.devices: gpus // hosts, at.nodes: hosts if hosts > 1 or keys.has(at.nodes) else None}


@reads(
    facts="gpus gpus_per_node nodes zero recompute compile replicas",
    write=_gpus_written,
    devices="devices",
    nodes="num_nodes",
)
def _gpus(keys: Keys, at: Named) -> Facts:
    """Several GPUs run FSDP with every layer checkpointed; one runs the model as it is."""
    auto = str(keys.raw(at.devices)).lower() == "auto"
    whole = _pretrains(keys)
    per_node = keys.given.get("gpus", 1) if auto else keys.whole(at.devices) or 1
    hosts = keys.whole(at.nodes) or 1
    several = keys.given.get("gpus", per_node * hosts) > 1
    keys.refuse("quantize", "needs one GPU; LitGPT does not run it on several", when=several and keys.has("quantize"))
    unsaid = auto and "gpus" not in keys.given  # as many as a node has
    return {
        "gpus": None if unsaid and hosts == 1 else per_node * hosts,
        "zero": 3 if several else 0,
        "recompute": "full" if several and not whole else "none",
        "compile": True if whole else None,
        "replicas": hosts if whole and hosts > 1 else None,
        "gpus_per_node": per_node if hosts > 1 else None,
        "nodes": hosts if hosts > 1 else None,
    }


def _optimizer_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    name = facts["optimizer"]
    usual = name in ("adamw-fused", "paged-adamw-32bit") and name == _optimizer.read(keys)["optimizer"]
    own = {ours: theirs for theirs, ours in reversed(BITSANDBYTES.items())}
    spelled = {"adamw": "AdamW", "sgd": "SGD"}.get("adamw" if usual else name)
    if not usual and name in own:
        return {at.path: own[name]}
    by_path = {at.path: f"torch.optim.{spelled}", at.momentum: None}
    return {} if spelled is None else by_path if keys.has(at.path) else {at.plain: spelled}


@reads(
    facts="optimizer",
    write=_optimizer_written,
    plain="optimizer",
    path="optimizer.class_path",
    momentum="optimizer.init_args.momentum",
)
def _optimizer(keys: Keys, at: Named) -> Facts:
    named = keys.raw(at.path)
    key = at.path if named is not None else at.plain
    name = "adamw" if isinstance(keys.raw(key), dict) else keys.choice(key, OPTIMIZERS, NEAREST["optimizer"]) or "adamw"
    if keys.has("quantize") and name == "adamw":
        # Beside a base of bitsandbytes it takes bitsandbytes' own (`utils.py`, `instantiate_bnb_optimizer`).
        return {"optimizer": "paged-adamw-32bit"}
    if _pretrains(keys) and name == "adamw":
        return {"optimizer": "adamw-fused"}
    return {"optimizer": "sgd-momentum" if name == "sgd" and keys.real(at.momentum) else name}


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    spelled = next((theirs for theirs, ours in RECIPES.items() if ours == facts["precision"]), None)
    return {} if spelled is None else {at.key: spelled}


@reads(facts="precision", write=_precision_written, key="precision")
def _precision(keys: Keys, at: Named) -> Facts:
    name = keys.word(at.key)
    if name is None:
        keys.refuse(
            "quantize", "needs a precision such as bf16-true; the usual bf16-mixed cannot", when=keys.has("quantize")
        )
        return {"precision": "bf16-autocast"}
    keys.refuse(at.key, f"{short(name)} is not one that is read (read: {', '.join(RECIPES)})", when=name not in RECIPES)
    return {"precision": RECIPES[name]}


LITGPT = Dialect(
    name="litgpt",
    title="LitGPT configuration",
    versions="LitGPT 0.4 - 0.5",
    framework="litgpt",
    syntaxes=("yaml", "argv"),
    blank={"yaml": "out_dir: out/finetune\ntrain:\n  epochs: 1\n", "argv": "litgpt finetune --train.epochs 1\n"},
    ideas=(
        _model,
        fixed("train.tie_embeddings", tied=lambda keys: bool(_pretrains(keys) and keys.flag("train.tie_embeddings"))),
        _adapter,
        _gpus,
        row("global_batch", "train.global_batch_size", default=lambda keys: 512 if _pretrains(keys) else 16),
        row("micro_batch", "train.micro_batch_size", default=lambda keys: 4 if _pretrains(keys) else 1),
        row("seq_len", "train.max_seq_length"),
        _precision,
        _optimizer,
    ),
    programs={r"\blitgpt (evaluate|generate|chat|serve|convert\w*|merge_lora|download)\b": IDLE},
)  # fmt: skip
