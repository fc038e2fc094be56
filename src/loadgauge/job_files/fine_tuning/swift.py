"""ms-swift (`swift sft`): a command line or YAML with TrainingArguments' keys and words of its own."""

import re
from typing import Any

import msgspec

from loadgauge.job_files.fine_tuning import started
from loadgauge.job_files.fine_tuning.started import HOSTS, PER_NODE, VISIBLE, cards, count, variable, world
from loadgauge.job_files.fine_tuning.swift_answers import GENERATING, answers, generating
from loadgauge.job_files.hugging_face.deepspeed import context_parallel
from loadgauge.job_files.hugging_face.huggingface import (
    DETERMINISM,
    OPTIMIZER,
    SAVING,
    TORCH_COMPILE,
    dropout,
    liger,
    processes,
    sharding,
    targets,
)
from loadgauge.job_files.ideas import (
    ATTENTION,
    IDLE,
    SAYABLE,
    Dialect,
    Fact,
    Facts,
    Idea,
    Keys,
    Named,
    asked,
    degree,
    dora,
    evaluation,
    frozen_share,
    layers,
    names_in,
    product,
    quantised,
    reads,
    row,
    sayable,
    tower,
)
from loadgauge.job_files.pre_training.megatron import launched

ZERO = {
    "zero0": (0, "none"), "zero1": (1, "none"), "zero2": (2, "none"), "zero3": (3, "none"),
    "zero2_offload": (2, "optimizer"), "zero3_offload": (3, "all"),
}  # fmt: skip
"""`deepspeed`: the configurations that come with it, as ZeRO stages and what they offload."""
FSDP = "fsdp2"
"""`fsdp`: the one configuration that comes with it, which shards fully and checkpoints every layer."""
TUNER = ("tuner_type", "train_type", "sft_type")
"""Since version 4, in 3, and in 2."""
MODEL = ("model", "model_id_or_path")
DTYPES = {name: name for name in ("bfloat16", "float16", "float32")}
OLD = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "auto": None}
"""Words of `lora_dtype` before version 3."""
ADAPTERS = (
    "lora",
    "longlora",
    "lora_llm",
    "adalora",
    "vera",
    "boft",
    "ia3",
    "fourierft",
    "adapter",
    "llamapro",
    "reft",
    "bone",
)
ALIKE = {
    "longlora": ("attends within groups, which takes less time than is counted", "saves", ""),
    "llamapro": ("trains whole layers that are put between the others", "costs", "weights gradients optimizer activations"),
    "lora_llm": ("trains the encoder of images whole, which is not counted", "costs", "weights gradients optimizer"),
}  # fmt: skip
"""Tuners that are LoRA with something else, and what that can do."""
BASES = {"bnb": "", "hqq": "hqq", "gptq": "gptq", "awq": "awq", "gptq_v2": "gptq_v2"}
BASES |= dict.fromkeys(("eetq", "fp8", "quanto"), "int8")
"""Libraries of quantisation, and the bases that they make; some keep 8 bits of a weight."""
EMBEDDINGS = {"all-embedding": "embed_tokens", "word_embeddings": "embed_tokens", "output_layer": "lm_head"}
GRADIENTS = 16
"""Sequences that a step has at least, where nothing says how many micro-batches are accumulated."""


def _sharding_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    stage, moved = facts.get("zero") or 0, facts.get("offload") or "none"
    configuration = keys.raw("deepspeed")
    if configuration is not None and configuration not in [*ZERO]:
        return at.inner.write(facts, keys)
    names = {means: name for name, means in ZERO.items()}
    if facts.get("framework") == "deepspeed" or stage == 1 or moved == "optimizer":
        return {"deepspeed": names[stage, moved], "fsdp": None} if (stage, moved) in names else {}
    fits = stage == 3 and moved == "none" and facts.get("recompute") == "full"
    return {"deepspeed": None, "fsdp": FSDP if stage else None} if fits or not stage else {}


@reads(write=_sharding_written, inner=sharding())
def _sharding(keys: Keys, at: Named) -> Facts:
    named = keys.raw("deepspeed")
    if isinstance(named, str) and named in ZERO:
        stage, moved = ZERO[named]
        return {"framework": "deepspeed", "zero": stage, "offload": moved}
    if keys.raw("fsdp") == FSDP:
        return {"framework": "huggingface", "zero": 3, "offload": "none"}
    return at.inner.read(keys)


def _saving_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    return {} if (isinstance(keys.raw("deepspeed"), str) or keys.raw("fsdp") == FSDP) else SAVING.write(facts, keys)


@reads(*SAVING.keys, facts=SAVING.facts, write=_saving_written)
def _saving(keys: Keys) -> Facts:
    """The configurations that come with it say so themselves: ZeRO 3's gather whole weights, FSDP's does not."""
    named = keys.raw("deepspeed")
    if isinstance(named, str) and named in ZERO:
        return {"save": "full" if ZERO[named][0] == 3 else None}
    return {"save": "sharded"} if keys.raw("fsdp") == FSDP else SAVING.read(keys)


def read_only(idea: Idea) -> Idea:
    """An idea that is written only where the file has it: what starts the program is not its own option."""

    return msgspec.structs.replace(
        idea, write=lambda facts, keys: idea.write(facts, keys) if keys.has(*idea.keys) else {}
    )


ENVIRONMENT_MODE, ENVIRONMENT_SERVERS = "vllm_mode", ("vllm_server_base_url", "vllm_server_host")


@reads(facts="gpus gpus_per_node nodes placement pp", owned=tuple(f"ENV.{name}" for name in (PER_NODE, HOSTS, VISIBLE)))
def environment(keys: Keys, at: Named) -> Facts:
    """GPUs, from the variables that it is started with; those of vLLM's servers (`vllm_mode: server`) come on top. Where a process
    has several cards, transformers shares the layers out over them (`device_map`)."""
    trainer, visible = world(keys), cards(keys)
    if generating(keys) and keys.word(ENVIRONMENT_MODE) == "server" and "placement" not in keys.given:
        if trainer is None or "gpus" in keys.given:
            raise keys.wrong(
                ENVIRONMENT_MODE, "'server' has GPUs of its own, which the file does not say: --placement split:8+1"
            )
        apart = len(next((words for name in ENVIRONMENT_SERVERS if (words := keys.words(name))), ["one"]))
        keys.note(ENVIRONMENT_MODE, f"answers come from GPUs of their own, {apart} here, as --placement says", "either")
        return {"gpus": trainer + apart, "placement": f"split:{trainer}+{apart}"}
    processes, nodes = count(variable(keys, PER_NODE)), count(variable(keys, HOSTS))
    other = "gpus" in keys.given or started.launched(keys) or keys.has("deepspeed", "fsdp")
    if keys.has("config_file") and not other:  # a configuration of accelerate's that is not there
        return {"gpus": started.visible(keys)}
    if processes is None and (other or visible is None):
        return {}
    ranks, seen, name = processes or 1, visible or 1, PER_NODE if processes else VISIBLE
    if not other and seen >= 2 * ranks:
        shared = seen // ranks
        keys.note(
            f"ENV.{VISIBLE}", f"{shared} cards of a process take turns at its layers, without a pipeline", "costs"
        )
        return {"gpus_per_node": Fact(ranks * shared, VISIBLE), "nodes": nodes or 1, "pp": Fact(shared, VISIBLE)}
    return {"gpus_per_node": Fact(ranks, name), "nodes": nodes or 1}


PRUNED = "adalora_init_r"
"""The rank that AdaLoRA begins with, and holds."""


def tuner(keys: Keys, usual: str = "lora") -> str:
    tuners = {name: name for name in ("full", *ADAPTERS)}
    kind = keys.agreed(TUNER, lambda name: keys.choice(name, tuners)) or usual
    if kind in ("lora", "adalora", "full"):
        return str(kind)
    other = "has adapters of another kind, which are counted as LoRA's"
    why, effect, parts = ALIKE.get(kind, (other, "either", "gradients optimizer activations"))
    keys.note(next(filter(keys.has, TUNER), TUNER[0]), why, effect, parts)
    return "lora"


def adapters(usual: str = "lora") -> Idea:
    """Adapters, or all weights; `usual`: which of them where a file does not say."""
    inner = targets("lora_rank", "target_modules", (TUNER[0], "full", "lora"), 8)
    bits, saved, listed = ("quant_bits", "quantization_bit"), "modules_to_save", "target_modules"
    beside = product(
        # It does not call prepare_model_for_kbit_training (pipelines/train/tuner.py).
        quantised(
            bits=bits,
            kind="bnb_4bit_quant_type",
            nested="bnb_4bit_use_double_quant",
            method=("quant_method", BASES),
            model=MODEL,
            upcast="none",
        ),
        dora("use_dora"),
        row("lora_dtype", "lora_dtype", words=DTYPES | OLD),
        row("lora_rank", "lora_rank", default=8),
        layers(listed, ["all-linear"], "ALL"),
    )

    def read(keys: Keys) -> Facts:
        kind = tuner(keys, usual)
        keys.refuse(
            bits[0],
            "needs tuner_type lora, not full",
            when=kind == "full" and any(keys.whole(name, minimum=0) for name in bits),
        )
        if kind == "full":
            return {"lora_rank": 0, "qlora": False}
        save = [EMBEDDINGS.get(name, name) for name in keys.words(saved) or []]
        if "all-norm" in save:
            keys.note(saved, "trains the norms too, which are not counted", "costs", "gradients optimizer", 0.1)
            save.remove("all-norm")
        pruned = {"adapter": "adalora", "lora_rank": keys.whole(PRUNED) or 12} if kind == "adalora" else {}
        return beside.read(keys) | {"modules_to_save": ",".join(save) or None} | pruned

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        kind, rank, save = facts.get("adapter") or "lora", facts.get("lora_rank"), facts.get("modules_to_save")
        if kind not in ("lora", "adalora") or not sayable(facts, (*SAYABLE, "hqq", "gptq", "awq")):
            return {}
        name = next(filter(keys.has, TUNER), TUNER[0])
        whole = inner.write(facts, keys)
        pruned = {name: "adalora", PRUNED: rank, "lora_rank": None} if facts.get("adapter") and rank else {PRUNED: None}
        own = {name: whole.pop(TUNER[0]), saved: save.split(",") if save and rank else None}
        return beside.write(facts, keys) | whole | own | pruned

    return Idea(
        keys=tuple(dict.fromkeys((*TUNER, *inner.keys, *beside.keys, saved, PRUNED))),
        facts=("adapter", *beside.facts, "modules_to_save"),
        read=read,
        write=write,
    )


OWN_OPTIMIZERS = {"galore": "galore", "muon": "muon", "muonclip": "muon", "default": "", "multimodal": "", "lorap": ""}
"""`optimizer`; MuonClip has Muon's state, and scales queries and keys after the step (`optimizers/muonclip.py`)."""


def _optimizer_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    off: dict[str, Any] = dict.fromkeys((at.own, at.switch, at.rank, at.gap, at.each, *at.more))
    if facts["optimizer"] == "muon":
        return off | dict.fromkeys(OPTIMIZER.keys) | {at.own: "muon"}
    return off | OPTIMIZER.write(facts, keys)


@reads(
    facts="optimizer",
    write=_optimizer_written,
    own="optimizer",
    switch="use_galore",
    rank="galore_rank",
    gap="galore_update_proj_gap",
    each="galore_optim_per_parameter",
    more=("galore_target_modules", "galore_with_embedding", "galore_quantization"),
    also=OPTIMIZER.keys,
)
def _optimizer(keys: Keys, at: Named) -> Facts:
    """`optim`, or one that it builds itself: GaLore on all linear layers of the blocks, and Muon (`optimizers/mapping.py`)."""
    kind = keys.choice(at.own, OWN_OPTIMIZERS)
    if kind == "muon":
        keys.note(
            at.own,
            "has one moment of what is no matrix too, where two are counted",
            "saves",
            "optimizer",
            0.5,
            when=keys.word(at.own) == "muonclip",
        )
        return {"optimizer": "muon"}
    inner = OPTIMIZER.read(keys)
    if kind != "galore" and (kind is not None or not keys.flag(at.switch)):
        return inner
    for name in at.more:
        keys.note(
            name,
            "has GaLore project other gradients, or keep them in fewer bits",
            parts="optimizer",
            when=keys.raw(name) not in (None, False, "false"),
        )
    suffixes = {"adamw": "", "adamw-8bit": "-8bit", "paged-adamw-8bit": "-8bit", "adafactor": "-adafactor"}
    name = inner["optimizer"]
    base = suffixes.get("adamw" if name.startswith(("adamw-fused", "adamw-foreach", "adamw-loop")) else name)
    layerwise = bool(keys.flag(at.each))
    if base is None or (layerwise and base == "-adafactor"):
        keys.note("optim", f"GaLore over {name} is counted as over AdamW", parts="optimizer")
        base = ""
    options = f"rank={keys.whole(at.rank) or 128},every={keys.whole(at.gap) or 50}"
    return {"optimizer": f"galore{base}{'-layerwise' if layerwise else ''}:{options}"}


def _evaluated(keys: Keys) -> bool:
    """Return whether it has data to evaluate on; until 3.5 it took 1 % of the training's. Without a word it then evaluates where
    it saves."""
    if HEADS.get(keys.word("task_type") or "causal_lm") is not None:
        return False  # a classifier keeps less without a backward
    share = keys.real("split_dataset_ratio")
    usual = 0.0 if keys.since(3, 6) else 0.01
    there = keys.raw("val_dataset") or keys.raw("cached_val_dataset") or (usual if share is None else share)
    return bool(there) and (keys.has("eval_strategy") or not keys.has("save_strategy") or asked(keys, "save_strategy"))


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    name, loaded = facts.get("precision") or "bf16", facts.get("weights")
    if loaded in (None, "auto"):
        loaded = "bfloat16" if name == "bf16" else "float32"
    return {at.dtype: loaded, at.bf16: name == "bf16", at.fp16: name == "fp16"}


@reads(
    facts="precision weights",
    write=_precision_written,
    can={"precision": ("bf16", "fp16", "fp32")},
    dtype="torch_dtype",
    bf16="bf16",
    fp16="fp16",
)
def _precision(keys: Keys, at: Named) -> Facts:
    """16 bits by the format the weights are loaded in, which is the checkpoint's unless it is given: nearly always bfloat16."""
    loaded = keys.choice(at.dtype, DTYPES) or "bfloat16"
    half = {at.bf16: keys.flag(at.bf16), at.fp16: keys.flag(at.fp16)}
    keys.refuse(at.fp16, f"contradicts {keys.document.shown(at.bf16)}", when=all(half.values()))
    # Without a word on it, weights of float32 are trained with float16's products.
    usual = at.bf16 if loaded == "bfloat16" else at.fp16
    on = {name: (usual == name if flag is None else flag) for name, flag in half.items()}
    return {"precision": "bf16" if on[at.bf16] else "fp16" if on[at.fp16] else "fp32", "weights": loaded}


@reads(
    inner=row(
        "recompute",
        "gradient_checkpointing",
        "activation_checkpointing",
        words={"true": "full", "false": "none"},
        default="full",
    )
)
def _checkpointing(keys: Keys, at: Named) -> Facts:
    return {"recompute": "full"} if keys.raw("fsdp") == FSDP else at.inner.read(keys)


PREFERENCES = {name: name for name in ("dpo", "orpo", "simpo", "kto", "cpo", "rm")}
"""`rlhf_type`: those that generate nothing."""
OF_ONE = ("kto", *GENERATING, "gkd")
"""`rlhf_type`: those whose rows have one answer."""
OF_PREFERENCES = names_in(
    "beta label_smoothing loss_weights rpo_alpha ld_alpha discopop_tau cpo_alpha simpo_gamma desirable_weight undesirable_weight"
    " center_rewards_coefficient ref_model ref_model_type ref_model_revision"
)
"""Keys of `swift rlhf` that weigh the loss, or say the reference."""


def _started(keys: Keys, at: Named) -> bool:
    """Return whether a command line is one of `swift rlhf`; a file with `rlhf_type` is."""
    if keys.document.syntax != "argv":
        return keys.has(at.kind)
    return re.search(r"\b(?:swift|megatron) rlhf\b|\brlhf\.py\b", keys.program) is not None


def _rlhf_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    task = facts.get("task")
    if keys.document.syntax == "argv" and not _started(keys, at):
        return {}
    loss = None if keys.words(at.loss) == ["ipo"] else keys.raw(at.loss)
    if task in PREFERENCES:
        return {at.kind: task, at.loss: loss}
    words = {"opd": "gkd", **{name: name for name in GENERATING}}
    return {at.kind: "dpo", at.loss: "ipo"} if task == "ipo" else {at.kind: words[task]} if task in words else {}


@reads(facts="task loss", write=_rlhf_written, kind="rlhf_type", loss="loss_type", also=OF_PREFERENCES)
def rlhf(keys: Keys, at: Named) -> Facts:
    """Return what `swift rlhf` trains for. A reference is the model itself, with adapters the model without them."""
    present = next((key for key in (at.kind, at.loss, *OF_PREFERENCES) if keys.has(key)), None)
    if not _started(keys, at):
        keys.refuse(
            present or at.kind,
            "belongs to a trainer other than SFT; start that with swift rlhf and rlhf_type",
            when=present and not (present == at.loss and keys.has("task_type")),
        )
        return {}
    word = keys.word(at.kind) or "dpo"
    own = keys.agreed(MODEL, keys.word)
    keys.note(
        "ref_model",
        "is counted as a copy of the model that is trained",
        "either",
        "weights gathered",
        0.5,
        when=keys.has("ref_model") and keys.word("ref_model") != own,
    )
    keys.note(
        "use_liger_kernel",
        "may have a loss of its own, where whole logits are counted",
        "saves",
        "loss transient",
        when=keys.flag("use_liger_kernel"),
    )
    if word in GENERATING:
        return {}  # `swift_answers`
    task = keys.choice(at.kind, PREFERENCES) or "dpo"
    ipo = task == "dpo" and keys.words(at.loss) == ["ipo"]
    return {"task": "ipo" if ipo else task, "loss": "float32" if keys.flag("use_liger_kernel") else None}


HEADLESS = ("generative_reranker", "embedding")
HEADS = {"causal_lm": None, "seq_cls": 0, "reranker": 1, **dict.fromkeys(HEADLESS, 1)}
"""`task_type`: columns of a classifier in the place of the language model's head, 0: as many as there are labels. Those that keep
the head make no logits with it: the last state is the answer, or two rows of the head are taken (`model/patcher.py`)."""


def _labels_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    columns = facts.get("head")
    if columns is None or (columns == 1 and keys.word(at.kind) in HEADLESS):
        return {at.kind: None if columns is None else keys.raw(at.kind), at.number: None}
    return {at.kind: "seq_cls", at.number: columns}


@reads(facts="head", write=_labels_written, kind="task_type", number="num_labels")
def labels(keys: Keys, at: Named) -> Facts:
    """Return the idea of `task_type`: labels or a rank, by a classifier of every token (`model/register.py`)."""
    columns = keys.choice(at.kind, HEADS)
    keys.note(
        at.kind,
        "holds the language model's head, which makes no logits",
        "costs",
        "weights",
        0.2,
        when=keys.word(at.kind) in HEADLESS,
    )
    return {"head": columns if columns is None or columns else keys.whole(at.number) or 2}


def sequences(keys: Keys) -> int:
    """Sequences of one sample: of a reranker each positive with the negatives that `MAX_NEGATIVE_SAMPLES` lets in, of an
    embedding the anchor and the positive (`template/base.py`); packed, a row is as long as `max_length` whatever is in it."""
    kind = keys.word("task_type") or ""
    if keys.flag("packing"):
        return 1
    if "reranker" not in kind:
        return 2 if kind == "embedding" else 1
    most = [count(variable(keys, f"MAX_{name}_SAMPLES")) for name in ("POSITIVE", "NEGATIVE")]
    return (most[0] or 1) * (1 + (most[1] or 7))


def batch(fact: str, key: str, usual: int, *also: str) -> Idea:
    """The idea of a batch, which counts samples."""
    inner = row(fact, key, *also, default=usual)

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        number, left = divmod(facts.get(fact) or 1, sequences(keys))
        return {} if left else inner.write(facts | {fact: number}, keys)

    return msgspec.structs.replace(
        inner, read=lambda keys: {fact: inner.read(keys)[fact] * sequences(keys)}, write=write
    )


def _in_a_pack(keys: Keys) -> int:
    """Answers to a prompt that share a packed row of `max_length` (`dataset/packing.py` adds up what `_rlhf_encode` returns)."""
    kind = Named(kind="rlhf_type")
    return 2 if keys.flag("packing") and _started(keys, kind) and keys.word(kind.kind) not in OF_ONE else 1


def _length_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    length = facts.get("seq_len")
    return at.inner.write(facts | {"seq_len": length and length * _in_a_pack(keys)}, keys)


@reads(inner=row("seq_len", "max_length"), packed="packing_length", write=_length_written)
def length(keys: Keys, at: Named) -> Facts:
    """`max_length`, or that of packs, shared by the two answers of a pair."""
    whole = keys.whole(at.packed) or at.inner.read(keys)["seq_len"]
    return {"seq_len": whole and whole // _in_a_pack(keys)}


@reads(
    facts="accumulation",
    write=lambda facts, keys, at: {at.key: facts.get("accumulation") or 1},
    key="gradient_accumulation_steps",
)
def _accumulation(keys: Keys, at: Named) -> Facts:
    number = keys.whole(at.key)
    if number is None:
        sequences = (keys.whole("per_device_train_batch_size") or 1) * (world(keys) or 1)
        number = 1 if generating(keys) == "grpo" else max(1, -(-GRADIENTS // sequences))
    return {"accumulation": number}


SWIFT = Dialect(
    name="ms-swift",
    title="ms-swift",
    versions="ms-swift 2.5 - 4.6",
    syntaxes=("argv", "yaml"),
    objects=frozenset({"model_kwargs", "deepspeed"}),
    blank={"argv": "swift sft --attn_impl flash_attn --output_dir output\n", "yaml": "attn_impl: flash_attn\noutput_dir: output\n"},
    blanks={
        task: f"swift rlhf --rlhf_type {word} --attn_impl flash_attn --output_dir output\n"
        for word, tasks in {"dpo": ("dpo", "ipo"), "gkd": ("gkd", "opd")}.items() for task in tasks
    } | {
        task: f"swift rlhf --rlhf_type {task} --attn_impl flash_attn --output_dir output\n"
        for task in ("kto", "orpo", "simpo", "cpo", "rm", "grpo", "ppo")
    },
    ideas=(
        read_only(launched()),
        read_only(processes()),
        environment,
        row("model", *MODEL, kind="word"),
        labels,
        _sharding,
        length,
        batch("micro_batch", "per_device_train_batch_size", 1, "batch_size"),
        _accumulation,
        _optimizer,
        adapters(),
        frozen_share,
        tower("freeze_vit", "freeze_aligner", "max_pixels", "model_kwargs.max_pixels"),
        _checkpointing,
        _precision,
        row("attention", "attn_impl", words=ATTENTION | {"flash_attn": "fa2"}),
        liger("use_liger_kernel"),
        rlhf,
        answers(),
        degree("tp", "deepspeed_autotp_size"),
        context_parallel("sequence_parallel_size"),
        dropout("lora_dropout", lambda keys: None if tuner(keys) == "full" else 0.05),
        evaluation(
            batch=1, data=_evaluated, usual=True, own=("split_dataset_ratio", "val_dataset", "cached_val_dataset"),
        ),
        _saving,
        TORCH_COMPILE,
        DETERMINISM,
    ),
    programs={
        r"\bswift (infer|deploy|rollout|sample|eval|app|export|merge-lora)\b": IDLE,
    },
)  # fmt: skip
