"""PEFT's `adapter_config.json`, which says what adapters are trained beside which model."""

from typing import Any

from loadgauge.core.definitions.model.tuners import TUNERS
from loadgauge.job_files.ideas import Dialect, Facts, Keys, Named, adapted_layers, reads, row

LORA = "LORA"
TYPES = {LORA: "lora"} | {known.peft_type: name for name, known in TUNERS.items()}
"""`peft_type`: the words of `--adapter`."""
NAMES = {name: peft_type for peft_type, name in TYPES.items()}
SIZES = {"lora": "r", "vera": "r", "loha": "r", "lokr": "r", "adalora": "init_r", "oft": "oft_block_size",
         "p-tuning": "encoder_hidden_size"}  # fmt: skip
"""The key of the rank, of the size of a block, or of an encoder's width."""
USUAL = {"lora": 8, "p-tuning": None} | {name: known.default for name, known in TUNERS.items() if known.default}
DROPOUTS = {"lora": "lora_dropout", "adalora": "lora_dropout", "vera": "vera_dropout"}
UNNAMED = "q_proj,v_proj,c_attn,query_key_value"
"""The layers that PEFT adapts where none are named, of most types of models (peft 0.21, `utils/constants.py`)."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KIND, TARGETS, PARAMETERS, SAVED, DORA = (
    "peft_type",
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "use_dora",
)
TOKENS, FEED, REPARAMETERIZED = "num_virtual_tokens", "feedforward_modules", "encoder_reparameterization_type"
OFT_BLOCKS = "r"


def method_of(keys: Keys) -> str:
    """The word of `--adapter` for a file. Raises `ConfigError` for a method that is not modelled."""
    kind = str(keys.raw(KIND) or LORA).upper()
    keys.refuse(KIND, f"{kind} is not modelled; {', '.join(TYPES)} are", when=kind not in TYPES)
    return TYPES[kind]


def _targets(keys: Keys, method: str) -> str | None:
    """The linear layers that are named, as `--lora-targets` has them."""
    value = keys.raw(TARGETS)
    tuner = TUNERS.get(method)
    if tuner is not None and (tuner.virtual or (value is None and tuner.targets is not None)):
        return None
    experts = keys.words(PARAMETERS) or [] if method == "lora" else []
    if value is None:
        return ",".join(experts) or UNNAMED
    if value == "all-linear":
        return ",".join(["all", *experts])
    keys.refuse(
        TARGETS, "is a pattern, which is not read; a list of names is, and all-linear", when=isinstance(value, str)
    )
    named = [str(name) for name in keys.words(TARGETS) or []]
    why = "is one layer's; layers_to_transform says which layers have adapters"
    for name in named:
        keys.refuse(TARGETS, f"{name!r} {why}", when=any(part.isdecimal() for part in name.split(".")))
    return ",".join(dict.fromkeys([*(name.rpartition(".")[2] for name in named), *experts])) or None


def _method_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    method = facts.get("adapter") or "lora"
    listed = [] if facts.get("lora_targets") is None else facts["lora_targets"].split(",")
    experts, plain = ([name for name in listed if ("experts." in name) == among] for among in (True, False))
    named = plain not in (["all"], ["attention"])
    if (method == "lora" and not facts.get("lora_rank")) or (named and {"all", "attention"} & {*plain}):
        return {}
    chosen = method in TUNERS and (TUNERS[method].virtual or TUNERS[method].targets is not None)
    unnamed, saved = None if chosen or experts else "all-linear", facts.get("modules_to_save")
    return {
        **dict.fromkeys({*SIZES.values()} | {TOKENS}),
        KIND: NAMES[method],
        TARGETS: (plain or unnamed) if named else "all-linear" if plain == ["all"] else ATTENTION,
        PARAMETERS: experts or None,
        TOKENS: facts.get("virtual_tokens"),
        DORA: True if facts.get("use_dora") else None,
        SAVED: saved.split(",") if saved else None,
        **({SIZES[method]: facts.get("lora_rank")} if method in SIZES else {}),
    }


@reads(
    KIND,
    *dict.fromkeys(SIZES.values()),
    TARGETS,
    PARAMETERS,
    SAVED,
    DORA,
    TOKENS,
    FEED,
    REPARAMETERIZED,
    facts="adapter lora_rank lora_targets use_dora modules_to_save virtual_tokens",
    write=_method_written,
)
def _method(keys: Keys) -> Facts:
    method = method_of(keys)
    tuner = TUNERS.get(method)
    size = SIZES.get(method)
    number = None if size is None else keys.whole(size, minimum=0) or None
    keys.note(
        OFT_BLOCKS,
        "says how many blocks there are, whose size is counted as usual",
        parts="gradients optimizer",
        when=method == "oft" and number is None and keys.whole(OFT_BLOCKS, minimum=0),
    )
    facts: Facts = {
        "adapter": None if method == "lora" else method,
        "lora_rank": None if size is None else number or USUAL[method],
        "lora_targets": _targets(keys, method),
        "use_dora": (keys.flag(DORA) or None) if method == "lora" else None,
        "modules_to_save": keys.joined(SAVED),
    }
    if tuner is not None and tuner.virtual:
        keys.note(
            REPARAMETERIZED,
            "has another encoder than an MLP",
            parts="gradients optimizer activations",
            when=str(keys.raw(REPARAMETERIZED) or "MLP").upper() != "MLP",
        )
        facts["virtual_tokens"] = keys.whole(TOKENS)
    if method == "ia3":
        fed = [name.rpartition(".")[2] for name in keys.words(FEED) or []]
        odd = next((name for name in fed if name not in ("down_proj", "fc2", "dense_4h_to_h", "c_proj")), None)
        keys.note(FEED, f"{odd!r} is scaled at its input too", parts="activations", share=0.5, when=odd is not None)
    return facts


def _dropout_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    key = DROPOUTS.get(facts.get("adapter") or "lora")
    return {} if key is None else {key: facts.get("lora_dropout")}


@reads(facts="lora_dropout", write=_dropout_written, names=tuple(dict.fromkeys(DROPOUTS.values())))
def _dropout(keys: Keys, at: Named) -> Facts:
    key = DROPOUTS.get(method_of(keys))
    share = None if key is None else keys.real(key)
    if key is not None and share is not None and not 0 <= share < 1:
        raise keys.wrong(key, f"must be at least 0 and below 1, got {share:g}")
    return {"lora_dropout": share or None}


PEFT = Dialect(
    name="peft",
    title="PEFT adapter configuration",
    versions="PEFT 0.12 - 0.21",
    syntaxes=("json",),
    blank={"json": '{\n  "peft_type": "LORA",\n  "task_type": "CAUSAL_LM",\n  "target_modules": "all-linear"\n}\n'},
    ideas=(
        row("model", "base_model_name_or_path", kind="word"),
        _method,
        _dropout,
        adapted_layers("layers_to_transform"),
    ),
)
