"""transformers' TrainingArguments, and TRL's SFT on top of them: YAML, JSON or a command line."""

from collections.abc import Callable
from typing import Any

import msgspec

from loadgauge.core.definitions.training.stacks import LOADED_DTYPE, LOADED_DTYPE_SFT, Stack
from loadgauge.job_files.fine_tuning.started import visible
from loadgauge.job_files.hugging_face import deepspeed, trl_tasks
from loadgauge.job_files.hugging_face.peft import UNNAMED
from loadgauge.job_files.ideas import (
    ATTENTION,
    NEAREST,
    RESHARDED,
    SHARDING,
    TORCH_OPTIMIZERS,
    Dialect,
    Facts,
    Idea,
    Keys,
    Named,
    evaluation,
    optimizer,
    product,
    quantised,
    reads,
    row,
    saving,
    whole_and_dora,
)
from loadgauge.job_files.pre_training.megatron import launched

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
        nth = (
            dict.fromkeys(filter(keys.has, every), 1) if int(number) == 1 else {every[names[1] in present]: int(number)}
        )
        return dict.fromkeys(present, kind == "full") | nth

    return Idea(keys=(*names, *every, *own), facts=("recompute",), read=read, write=write)


def sharding(switched: bool = True) -> Idea:
    """The idea of sharding: FSDP, or a DeepSpeed configuration inside the file (a separate one is read as well).

    switched: whether `fsdp` must be on for `fsdp_config` to count; in axolotl it counts by being there, and has no strategy
    """
    inner, sizes = deepspeed.zero(INLINE), deepspeed.engine(INLINE)
    names = ("reshard_after_forward", "version", "cpu_offload", "offload_params", *["sharding_strategy"] * switched)
    keyed = {name: (f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}") for name in names}
    owned = (
        "fsdp",
        "deepspeed",
        *inner.keys,
        *sizes.keys,
        *(key for pair in keyed.values() for key in pair),
        "fsdp_version",
    )

    def first(keys: Keys, name: str) -> str | None:
        return next((key for key in keyed.get(name, ()) if keys.has(key)), None)

    def of_fsdp(keys: Keys) -> Facts:
        words = [] if isinstance(keys.raw("fsdp"), bool) else keys.words("fsdp") or []
        switch = keys.flag("fsdp") if (words and words[0].lower() in ("true", "false")) or not words else True
        if switch is False:
            return {"framework": "huggingface", "zero": 0}
        version = keys.whole(first(keys, "version") or keyed["version"][0]) or keys.whole("fsdp_version")
        zero = next((SHARDING[word.upper()] for word in reversed(words) if word.upper() in SHARDING), 3)
        strategy, reshard = first(keys, "sharding_strategy"), first(keys, "reshard_after_forward")
        if (key := strategy or reshard) is not None:
            zero = keys.choice(key, SHARDING | RESHARDED)
        keys.refuse(strategy or "", "needs version 1 of FSDP, not 2", when=strategy is not None and version == 2)
        moved = "offload" in words or any(
            keys.flag(key) for name in ("cpu_offload", "offload_params") if (key := first(keys, name)) is not None
        )
        return {"framework": "huggingface", "zero": zero, "offload": "all" if moved else "none"}

    def read(keys: Keys) -> Facts:
        configuration = keys.raw("deepspeed")
        keys.refuse(
            "deepspeed",
            f"contradicts {keys.document.shown('fsdp')}",
            when=configuration is not None and keys.has("fsdp") and keys.raw("fsdp") is not False,
        )
        if isinstance(configuration, dict):
            return {"framework": "deepspeed"} | inner.read(keys) | sizes.read(keys)
        if configuration is not None and configuration is not False:
            return {"framework": "deepspeed"}
        if keys.has("fsdp") or (not switched and any(keys.has(*pair) for pair in keyed.values())):
            return of_fsdp(keys)
        return {"framework": "huggingface", "zero": 0, "offload": "none"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        zero = facts.get("zero") or 0
        moved = facts.get("offload") or "none"
        engine = facts.get("framework")
        configuration = keys.raw("deepspeed")
        spelled = keys.raw("fsdp")
        if isinstance(configuration, str) and configuration:
            return {}
        values: dict[str, Any] = dict.fromkeys(owned)
        mapped = isinstance(configuration, dict)
        if engine == "deepspeed" or zero == 1 or moved == "optimizer" or (mapped and engine != "huggingface"):
            auto = {} if mapped else {f"{INLINE}{name}": "auto" for name in FILLED if not keys.has(f"{INLINE}{name}")}
            values = {key: None for key in owned if key != "deepspeed"} | auto
            return values | inner.write(facts, keys) | sizes.write(facts, keys)
        if not zero:
            return values
        present = {name: first(keys, name) or pair[0] for name, pair in keyed.items()}
        reshard = {present["reshard_after_forward"]: zero == 3}
        if isinstance(spelled, str | list) and str(spelled).lower() not in ("true", "false"):
            text = [{3: "full_shard", 2: "shard_grad_op"}[zero], "auto_wrap", *(["offload"] if moved == "all" else [])]
            return values | {"fsdp": text if isinstance(spelled, list) else " ".join(text)}
        if not switched:
            old = moved == "all" or keys.has("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params")
            return values | {"fsdp_version": 2} | reshard | {present["offload_params"]: moved == "all" if old else None}
        moves = {present["cpu_offload"]: True if moved == "all" else None}
        return values | {"fsdp": True, present["version"]: 2} | reshard | moves

    return Idea(
        keys=owned,
        facts=("framework", "zero", "offload", "offload_to", "pin_memory", "overlap"),
        read=read,
        write=write,
    )


def half(default: Any = None, pure: str = "") -> Idea:
    """The idea of the precision: `bf16` or `fp16`; `pure`: a switch for 16 bits throughout; `default`: the tool's own."""
    owned = ("bf16", "fp16", *([pure] if pure else []))

    def read(keys: Keys) -> Facts:
        if pure and keys.flag(pure):
            return {"precision": "bf16-pure"}
        bf16, fp16 = keys.flag("bf16"), keys.flag("fp16")
        keys.refuse("fp16", f"contradicts {keys.document.shown('bf16')}", when=bf16 and fp16)
        if bf16 is None and not fp16 and "bf16" in keys.left:
            return {"precision": "bf16"}
        usual = default(keys) if callable(default) else default
        if bf16 is None and fp16 is None and usual is not None:
            return {"precision": usual}
        return {"precision": "bf16" if bf16 else "fp16" if fp16 else "fp32"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        name = facts["precision"]
        if pure and name == "bf16" and facts.get("weights") == "bfloat16":
            name = "bf16-pure"
        if name not in ("bf16", "fp16", "fp32") and not (pure and name == "bf16-pure"):
            return {}
        usual = default(keys) if callable(default) else default
        stated = {word: keys.has(word) or word in keys.left or (usual == word and name == "fp32") for word in owned[:2]}
        switches = {word: True if name == word else False if stated[word] else None for word in stated}
        return ({pure: True if name == "bf16-pure" else None} if pure else {}) | switches

    return Idea(keys=owned, facts=("precision",), read=read, write=write)


DTYPES = {
    "bfloat16": "bfloat16", "bf16": "bfloat16", "torch.bfloat16": "bfloat16", "float32": "float32", "fp32": "float32",
    "torch.float32": "float32", "float16": "float16", "fp16": "float16", "torch.float16": "float16", "half": "float16",
    "auto": "auto",
}  # fmt: skip
"""`dtype` (`torch_dtype`) of `from_pretrained`."""


def weights(*names: str, default: Any = None, decides: bool = False) -> Idea:
    """The idea of the dtype that weights are loaded in; `auto` is the checkpoint's.

    default: a function of the keys; decides: whether float32 throughout is said here alone, without a switch for it
    """

    def read(keys: Keys) -> Facts:
        stated = keys.agreed(names, lambda name: _dtype(keys, name))
        return {"weights": default(keys) if stated is None and default is not None else stated}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        first = next(filter(keys.has, names), names[0])
        if "weights" not in facts:
            return {first: "float32"} if facts.get("precision") == "fp32" else {}
        return dict.fromkeys(names) | {first: facts["weights"]}

    return Idea(keys=names, facts=("weights", "precision") if decides else ("weights",), read=read, write=write)


def _without_autocast(keys: Keys) -> str | None:
    """Return what a script loads where the file says neither bf16 nor fp16: nothing else then says what is trained."""
    return None if keys.flag("bf16") or keys.flag("fp16") or "bf16" in keys.left else LOADED_DTYPE.at(Stack()).value


def _dtype(keys: Keys, name: str) -> Any:
    # `auto` is a value of its own here, and not one that another file has.
    return "auto" if str(keys.document.get(name)).lower() == "auto" else keys.choice(name, DTYPES)


def targets(
    rank: str,
    modules: str,
    switch: Any,
    usual: int,
    everything: str = "all-linear",
    parameters: str = "",
    unnamed: str | None = None,
) -> Idea:
    """The idea of LoRA: its rank and the linear layers that get adapters.

    rank, modules: keys; switch: a key with its values for off and on; usual: the tool's default rank
    everything: the word for all linear layers; parameters: a key for the matrices of experts (PEFT's `target_parameters`)
    unnamed: the layers where none are named; None: all
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
        if parameters and (experts := keys.words(parameters)):
            words = ",".join([*([words] if words else []), *experts])
        return {"lora_rank": keys.whole(rank) or usual, "lora_targets": words or unnamed}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if not facts.get("lora_rank"):
            # Of an option with several words only the first is known to be its own, and goes with it.
            several = keys.document.syntax == "argv" and len(keys.words(modules) or ()) > 1
            return {key: off or None, rank: None, modules: [everything] if several else None}
        words = facts.get("lora_targets") or ("all" if unnamed else None)
        words = None if words == unnamed and not keys.has(modules) else words
        listed = (
            []
            if words is None
            else ["q_proj", "k_proj", "v_proj", "o_proj"]
            if words == "attention"
            else words.split(",")
        )
        experts = [word for word in listed if parameters and "experts." in word]
        listed = [word for word in listed if word not in experts]
        # In the place of all the words of a list.
        whole = [everything] if keys.document.syntax == "argv" else everything
        more = {parameters: experts or None} if parameters else {}
        return {key: on, rank: facts["lora_rank"], modules: whole if listed == ["all"] else listed or None} | more

    return Idea(
        keys=(rank, modules, key, parameters) if parameters else (rank, modules, key),
        facts=("lora_rank", "lora_targets"),
        read=read,
        write=write,
    )


def processes(*, argv: bool = True) -> Idea:
    """The idea of the number of GPUs, as given to accelerate (in all) and, on a command line, to `deepspeed` (of a node).

    argv: of a command line alone; else of accelerate's own file, which always has them
    """
    count, machines, per_node, nodes = "num_processes", "num_machines", "num_gpus", "num_nodes"

    def read(keys: Keys) -> Facts:
        if argv and keys.document.syntax not in ("argv", "python"):
            return {}
        if argv and keys.has(per_node):
            return {"gpus_per_node": keys.whole(per_node), "nodes": keys.whole(nodes) or 1}
        gpus, hosts = keys.whole(count, minimum=1 if argv else -1), keys.whole(machines) or 1
        if gpus is None or gpus < 1:
            return {"gpus": visible(keys)} if argv and "gpus" not in keys.given else {}
        keys.refuse(count, f"{gpus} cannot be split over {hosts} machines", when=gpus % hosts)
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

    return Idea(
        keys=(count, machines, per_node, nodes) if argv else (count, machines),
        facts=("gpus", "gpus_per_node", "nodes"),
        read=read,
        write=write,
    )


def attention(*switches: str) -> Idea:
    """The idea of the attention kernel, `attn_implementation`; `switches`: older keys that switch flash attention on."""
    key = "attn_implementation"

    def read(keys: Keys) -> Facts:
        old = any(keys.flag(name) for name in switches)
        named = keys.choice(key, ATTENTION, NEAREST["attention"])
        keys.refuse(key, "contradicts the switch for flash attention", when=old and named == "eager")
        return {"attention": named or ("fa2" if old else None)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        off: dict[str, Any] = {name: None for name in switches if keys.has(name)}
        named = next((theirs for theirs, ours in ATTENTION.items() if ours == facts["attention"]), None)
        return off | {key: named} if named else {}

    return Idea(keys=(key, *switches), facts=("attention",), read=read, write=write)


def dropout(key: str, default: Callable[[Keys], float | None] = lambda keys: None) -> Idea:
    """The idea of the dropout of adapters' inputs; `default`: its value where none is given."""

    def read(keys: Keys) -> Facts:
        share = keys.real(key)
        if share is not None and not 0 <= share < 1:
            raise keys.wrong(key, f"must be at least 0 and below 1, got {share:g}")
        return {"lora_dropout": (default(keys) if share is None else share) or None}

    return Idea(
        keys=(key,), facts=("lora_dropout",), read=read, write=lambda facts, keys: {key: facts.get("lora_dropout")}
    )


@reads(
    facts="lora_dtype",
    inner=product(
        quantised(
            four="load_in_4bit",
            eight="load_in_8bit",
            kind="bnb_4bit_quant_type",
            nested="use_bnb_nested_quant",
            double=False,
        ),
        whole_and_dora("lora_modules_to_save", "use_dora"),
    ),
)
def _quantised(keys: Keys, at: Named) -> Facts:
    facts = at.inner.read(keys)
    return facts | (_trl_run(keys, eight=facts["base"] == "int8") if facts["qlora"] else {})


def _trl_run(keys: Keys, *, eight: bool = False) -> Facts:
    """How the adapters of a quantised model run.

    Since TRL 1.0 they are made bfloat16, and nothing float32. Before, `prepare_model_for_kbit_training` cast all that is not
    quantised to float32, of which with bf16 and 4 bits `peft_module_casting_to_bf16` left the norms.
    """
    if (prepared := getattr(keys.document, "prepared", None)) or getattr(keys.document, "trainer", None) == "":
        return {"kbit_upcast": "all" if prepared else "none"}  # by the program itself, or not at all
    if keys.since(1, 0):
        return {"kbit_upcast": "none", "lora_dtype": "bfloat16"}
    bf16 = keys.flag("bf16")
    half = bf16 if bf16 is not None else _trl_precision(keys) == "bf16" and not keys.flag("fp16")
    return {"kbit_upcast": "all"} if eight or not half else {"kbit_upcast": "norms", "lora_dtype": "bfloat16"}


def _of_task(keys: Keys, trainer: str, at: Named) -> Facts:
    """Log-probabilities of the trainers with a fused head; the others have the whole logits."""
    fused = bool(keys.flag(at.liger) or keys.flag(at.old))
    pieces = trainer in ("orpo", "cpo", "reward", "gkd")
    own = f"takes TRL's {trainer} loss in pieces, or not at all"
    why = own if pieces else "takes the loss in pieces, with the head"
    keys.note(at.liger, why, "saves", "loss transient", when=fused and (pieces or not keys.since(1, 16)))
    loss = "auto" if pieces else "tiled" if keys.since(1, 16) else "float32"
    return {"loss": loss, "kernels": "liger" if fused else "native"}


def _trl_loss_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    if facts.get("task") in trl_tasks.TASKS:
        return {at.liger: True if facts.get("kernels") == "liger" else None}
    if facts.get("kernels") == "liger":
        return {at.key: None, at.liger: True}
    chunked = (facts.get("loss") or "auto").startswith(("chunked", "tiled"))
    return {at.key: "nll" if chunked else None, at.liger: False if keys.has(at.liger) else None} if chunked else {}


@reads(facts="loss kernels", write=_trl_loss_written, key="loss_type", liger="use_liger_kernel", old="use_liger")
def _trl_loss(keys: Keys, at: Named) -> Facts:
    trainer = trl_tasks.trainer_of(keys)
    if trainer is not None:
        return _of_task(keys, trainer, at)
    # Since 1.6 the logits are never whole, with a plain `nll` too from 1.16 on.
    words = {"nll": keys.since(1, 16), "chunked_nll": True, "dft": False}
    values = keys.choice(at.key, words)
    if keys.flag(at.liger) or keys.flag(at.old):
        return {"loss": "auto", "kernels": "liger"}
    chunked = keys.since(1, 6) if values is None else values
    whole = keys.since(1, 16)  # of one kernel, with tiles of the logits; before, of the model's head in chunks
    return {"loss": ("tiled" if whole else "chunked") if chunked else "auto", "kernels": "native"}


def liger(*names: str) -> Idea:
    """The idea of Liger's kernels; the first name is written."""

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        on = facts.get("kernels") == "liger"
        off: dict[str, Any] = {name: None for name in names[1:] if keys.has(name) and not on}
        return off | {names[0]: True if on else False if keys.has(names[0]) else None}

    return Idea(
        keys=names,
        facts=("kernels",),
        read=lambda keys: {"kernels": "liger" if any(keys.flag(name) for name in names) else "native"},
        write=write,
    )


def compiled(*names: str, default: Any = False) -> Idea:
    """The idea of torch.compile."""
    return row("compile", *names, kind="flag", default=default, off=False, add=False)


TORCH_COMPILE = compiled("torch_compile", default=lambda keys: keys.has("torch_compile_backend", "torch_compile_mode"))
"""TrainingArguments: a backend or a mode switches it on."""


def _trl_precision(keys: Keys) -> str | None:
    return "bf16" if keys.since(0, 19) else None


LOADED_AS = ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")


def _sft_loads(keys: Keys) -> str | None:
    """The trainer loads the model by its name. An empty value goes to `from_pretrained` as it stands, as did the default of TRL's
    own scripts up to 0.26 (`ModelConfig.dtype`)."""
    if keys.flag("load_in_4bit") or keys.flag("load_in_8bit"):
        return None
    typed = getattr(keys.document, "typed", False)  # `ModelConfig.dtype` went with the trainer's own default
    if (
        trl_tasks.trainer_of(keys) in ("orpo", "cpo") and not typed
    ):  # which take the model as `from_pretrained` loads it
        return LOADED_DTYPE.at(Stack()).value
    release = next((number for number in ((0, 27), (0, 26)) if keys.since(*number)), None)
    empty = any(keys.document.get(name) is None for name in LOADED_AS)
    scripts = release != (0, 27) and keys.document.syntax != "python"
    # Older ones went with transformers 4.
    before = release is None or (scripts and keys.version is not None)
    stack = Stack((("trl", release or (0, 25)), *((("transformers", (4, 57)),) if before else ())))
    loaded = empty or scripts or (getattr(keys.document, "loaded", False) and not typed)
    return (LOADED_DTYPE if loaded else LOADED_DTYPE_SFT).at(stack).value


DETERMINISM = row("determinism", "full_determinism", words={"true": "blocking", "false": None}, add=False)
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
ACTIVATIONS = row(
    "activation_offload", "activation_offloading", words={"true": "all", "false": "none"}, default="none", off="none",
)  # fmt: skip
"""TRL's and axolotl's switch, under which all that is kept for backward goes to host memory."""
SAVING = saving(
    "fsdp_config.state_dict_type", "fsdp_config.fsdp_state_dict_type",
    switches=tuple(f"{INLINE}zero_optimization.{name}" for name in deepspeed.GATHERS),
)  # fmt: skip
OPTIMIZER = optimizer("optim", TORCH_OPTIMIZERS)
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
    syntaxes=("yaml", "json", "argv", "python"),
    auto=True,
    objects=OWN,
    blank=BLANK,
    ideas=(
        *SHARED,
        *BATCH,
        *METHOD,
        row(
            "seq_len",
            "block_size",
            "max_seq_length",
            "model_max_length",
            "max_source_length",
            "max_length",
            add=False,
            default=trl_tasks.cut_by_program,
        ),
        row("target_len", "max_target_length", add=False),
        row("head", "model_init_kwargs.num_labels", add=False),
        checkpointing(lambda keys: getattr(keys.document, "recomputes", False)),
        half(),
        weights("dtype", "torch_dtype", default=_without_autocast, decides=True),
        trl_tasks.own_sizes,
        liger("use_liger_kernel"),
        evaluation(),
        SAVING,
        TORCH_COMPILE,
        DETERMINISM,
    ),
    programs=OTHER_TRAINERS,
)

EXPERTS = "lora_target_parameters"
ADAPTERS = (
    _quantised,
    targets("lora_r", "lora_target_modules", ("use_peft", False, True), 16, parameters=EXPERTS, unnamed=UNNAMED),
    dropout("lora_dropout", lambda keys: 0.05 if keys.flag("use_peft") else None),
)
TRL = Dialect(
    name="trl",
    trainers="trl",
    title="TRL",
    versions="TRL 0.12 - 1.16",
    syntaxes=("yaml", "json", "argv", "python"),
    auto=True,
    objects=OWN,
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
        row("seq_len", "max_length", "max_seq_length", default=trl_tasks.longest),
        checkpointing(lambda keys: keys.since(0, 22), new="gradient_checkpointing"),
        half(_trl_precision),
        weights(*LOADED_AS, default=_sft_loads),
        trl_tasks.own_sizes,
        _trl_loss,
        trl_tasks.task,
        TORCH_COMPILE,
        DETERMINISM,
        ACTIVATIONS,
        *ADAPTERS,
        evaluation(),
        SAVING,
    ),
    last=trl_tasks.last,
    programs=trl_tasks.OTHERS,
)
TRAINED = msgspec.structs.replace(TRANSFORMERS, ideas=(*TRANSFORMERS.ideas, *ADAPTERS), lists="trl")
"""Programs that train adapters with transformers' own trainer."""
