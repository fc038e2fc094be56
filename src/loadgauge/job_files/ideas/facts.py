"""Facts of a job file in tool-neutral terms, and the arithmetic between the tools' spellings.

A dialect's table turns the keys of a file into facts: `tp`, or `accumulation`, or `shards`. `solve` makes a `Job` of them
and finds where two of them contradict; `facts_of` is the way back. A fact is named as the field of `Job` that it fills, if any.

letters: N GPUs, t p c tensor, pipeline and context parallel ranks, d data parallel ranks, b sequences of a micro-batch,
a micro-batches of a step on one data parallel rank, B sequences of a step.  N = t p c d, B = d b a.
"""

import math
import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import msgspec

from loadgauge.core.base.errors import ConfigError, refuse
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.axes import DEGREES, FACTORS

NAMES = (
    "model", "head", "tied", "undropped", "config", "framework", "gpus", "gpus_per_node", *DEGREES, "zero", "replicas",
    "sequence_parallel", "schedule", "stage_layers", "layers_per_stage", "recompute", "micro_batch", "global_batch",
    "accumulation", "seq_len", "target_len", "precision", "weights", "optimizer", "attention", "loss", "kernels", "compile",
    "determinism", "adapter", "lora_rank", "virtual_tokens", "lora_targets", "qlora", "base", "lora_dropout", "lora_dtype",
    "kbit_upcast", "use_dora", "modules_to_save", "lora_layers", "train", "tower", "max_pixels", "encoders", "pictures",
    "video", "inputs", "offload", "offload_to", "activation_offload", "pin_memory", "end_units", "gradient_sync", "engine",
    "eval_batch", "eval_batches", "save", "cp_comm", "order", "overlap", "task", "prompts", "samples", "generated",
    "prompt_len", "answers", "epochs", "old_logprobs", "logprob_batch", "logprob_tokens", "rollout", "placement", "staleness",
    "reference", "loss_terms", "on_policy", "teacher", "reward_model", "critic", "critic_batch", "frozen_offload",
    "frozen_weights", "rollout_offload", "mtp",
)  # fmt: skip
"""What a converted job is described by, in this order."""
FIELDS = tuple(name for name in NAMES if name in Job.__struct_fields__)
"""The fields of `Job` that job files have keys for."""
SPLITS = tuple(name for name in DEGREES if name in FACTORS)
"""Degrees whose product is the GPUs of one replica of the model."""
SOLVED = ("gpus", "gpus_per_node", "micro_batch", "global_batch", "replicas")


class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a job file that no flag has.

    config: the model as a Hugging Face `config.json`, where the file has the sizes instead of a name
    accumulation: micro-batches of a step on one data parallel rank, where how many ranks there are is not known
    generated: sequences that one data parallel rank generates for a step
    head: columns of a classifier of every token, in the place of the language model's head
    tied: whether embedding and head are one matrix in this tool, whatever the checkpoint says; None: as it says
    undropped: whether the model's rates of dropout are set to 0, whatever its config says
    layers_per_stage: how a pipeline's stages share out the layers of a model that is not known yet (`virtual_stages`)
    """

    config: dict[str, Any] | None = None
    accumulation: int | None = None
    generated: int | None = None
    head: int | None = None
    tied: bool | None = None
    undropped: bool | None = None
    layers_per_stage: str | None = None


class Fact(msgspec.Struct, frozen=True):
    """A value, the key that says it as the file writes it, and whether it is only the tool's default."""

    value: Any
    key: str
    default: bool = False

    def __str__(self) -> str:
        return f"{self.key} = {self.value}"


def split_of(placement: str | None) -> tuple[int, int] | None:
    """GPUs of the trainer and of the rollout, where each has its own; None where they take turns.

    >>> split_of("split:16+8"), split_of("split:8+8,reward=4"), split_of("colocated")
    ((16, 8), (8, 8), None)
    """
    kind, _, rest = (placement or "").partition(",")[0].partition(":")
    parts = rest.split("+")
    if (
        kind != "split"
        or len(parts) != 2
        or not all(part.isascii() and part.isdecimal() and len(part) < 8 for part in parts)
    ):
        return None
    return int(parts[0]), int(parts[1])


def trainer_gpus(gpus: int, placement: str | None) -> int:
    """GPUs of all that the trainer has.

    >>> trainer_gpus(20, "split:8+8,reward=4"), trainer_gpus(12, "colocated,reward=4")
    (8, 8)
    """
    split, (_, *others) = split_of(placement), (placement or "").split(",")
    own = gpus - sum(int(word) for word in (other.rpartition("=")[2] for other in others) if word.isdecimal())
    return own if split is None or sum(split) != own else split[0]


def answered(facts: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the tokens of the longest answer by a tool's key for them, where they are a number; nothing else is said of answers.

    >>> answered({"answers": "512"}, "max_new_tokens"), answered({"answers": "data.jsonl"}, "max_new_tokens")
    ({'max_new_tokens': 512}, {})
    """
    longest = str(facts.get("answers") or "")
    return {key: int(longest)} if longest.isdecimal() else {}


STARTS = re.compile(
    r"^#[# \t$]*(?:[A-Za-z][\w ]*: *)?((?:\w+=\S+ +)*)(?:uv run (?:--\S+ +)*)?"
    r"(?:tune run|torchrun|accelerate launch|deepspeed|automodel|axolotl train|python3? -m (?:axolotl\.cli\.train"
    r"|torch\.distributed\.(?:run|launch))) .*",
    re.MULTILINE,
)
"""A command that starts a file, in a comment, with the variables before it."""
MEANT = re.compile(r"^[^#\n].*?#.*?\b(?:set up|designed) for (\d{1,5}) GPUs\b", re.MULTILINE)
RAN = re.compile(r"^#.*\bvalidated (?:using|on|with) (\d{1,5}) (?:\w+ )?GPUs\b", re.MULTILINE)
SPREAD = re.compile(r"^[^#\n].*?#.*?\bwith (\d{1,5}) nodes?\b", re.MULTILINE)
NODES = re.compile(r"^#.*?\b(\d{1,5}) nodes? ?(?:x|\() ?(\d{1,2}) ?x? ?(?:GPUs|[A-Z]+\d+)", re.MULTILINE)
"""GPUs in words: beside a value that goes with their number, and at the head of a file."""


RESERVED = re.compile(
    r"\bgpu ?= ?f?[\"'][A-Za-z0-9-]+:(\d{1,2})[\"']|\bScalingConfig\((?=[^)]*use_gpu ?= ?True)[^)]*num_workers ?= ?(\d{1,5})\b"
)
"""GPUs that a program reserves for itself, of Modal and of Ray Train."""


SHARED_OUT = re.compile(
    r"^(?:export +)?((?:\w+_)?(?:DEVICES|GPUS|WORLD_SIZE))=(\d{1,5})\b(?=[\s\S]*\$\(\([^)\n]*/[^\n]*\b\1\b)",
    re.MULTILINE | re.IGNORECASE,
)
"""The number of GPUs by which a shell script divides its batch."""


def divided(text: str) -> dict[str, Fact]:
    """The GPUs by which a shell script divides its batch, so that its passes are those of so many.

    >>> divided("GPUS=8\\nB_PER_GPU=4\\nPASSES=$((128 / (B_PER_GPU * GPUS)))\\n")["gpus"].value, divided("GPUS=8\\n")
    (8, {})
    """
    number = SHARED_OUT.search(text)
    return {"gpus": Fact(int(number[2]), " ".join(number[0].split())[:60], True)} if number else {}


def announced(text: str) -> dict[str, Fact]:
    """The GPUs that the comments of a file tell: in words, else those of the first command at its head.

    >>> announced("# On two nodes:\\n#   tune run --nnodes 2 --nproc_per_node 4 full_finetune\\nseed: 1\\n")["gpus"].value
    8
    >>> announced("# Run: CUDA_VISIBLE_DEVICES=0,1 axolotl train x.yaml\\nseed: 1\\n")["gpus"].value
    2
    >>> announced("# batch: 2 # designed for 8 GPUs\\nbatch: 1 # designed for 16 GPUs\\n")["gpus"].value
    16
    >>> announced("batch: 1 # set up for 8 GPUs\\nsteps: 4 # batch size 128 with 4 nodes\\n")["gpus"].value
    32
    """
    head = "\n".join(takewhile(lambda line: not line.strip() or line.startswith("#"), text.split("\n")))
    if (words := MEANT.search(text) or RAN.search(head)) is not None:
        of_nodes = SPREAD.search(text)  # each of so many GPUs
        number = int(words[1]) * (int(of_nodes[1]) if of_nodes else 1)
        return {"gpus": Fact(number, " ".join(words[0].partition("#")[2].split())[:60], True)}
    if (words := NODES.search(head)) is not None:
        return {"gpus": Fact(int(words[1]) * int(words[2]), words[0].strip("# ")[:60], True)}
    if (asked := RESERVED.search(text)) is not None:
        return {"gpus": Fact(int(asked[1] or asked[2]), " ".join(asked[0].split())[:60], True)}
    if (command := STARTS.search(re.sub(r"\\[ \t]*\n#+", "", head))) is None:
        return {}
    each, nodes, cards = (
        re.search(rf"{names}[ =](\d{{1,5}}(?:,\d+)*)\b", command[0])
        for names in (
            "--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)",
            "--(?:nnodes|num[-_]nodes)",
            "CUDA_VISIBLE_DEVICES",
        )
    )
    # A program that no launcher starts is one process, however many cards it sees.
    alone = "_single_device" in command[0] or re.search(r"python3? -m axolotl", command[0]) is not None
    number = int(each[1]) * int(nodes[1] if nodes else 1) if each else int(alone)
    number = number or (cards[1].count(",") + 1 if cards else 0)
    return {"gpus": Fact(number, " ".join(command[0].split())[:60], True)} if number else {}


def facts_given(flags: Mapping[str, Any]) -> dict[str, Fact]:
    """The facts of flags that are given alongside a file, by their names in `Job`.

    >>> str(facts_given({"micro_batch": 2})["micro_batch"])
    '--micro-batch = 2'
    """
    return {name: Fact(value, f"--{name.replace('_', '-')}") for name, value in flags.items()}


SWITCHED = {"recompute": "none", "precision": "fp32"}
"""What two files have a switch of their own for, either of which is enough, and what it is where both are off: checkpoints of
FSDP's and of the trainer's, autocast of the launcher's and of the trainer's (source: transformers 5.23, `training_args.py`;
accelerate 1.15, `accelerator.py`)."""


def merge(first: Mapping[str, Fact], second: Mapping[str, Fact], file: str = "") -> dict[str, Fact]:
    """Merges the facts of two files of one job; a tool's default gives way, and of two switches of one thing the one that is
    off. Raises `ConfigError` where two values differ."""
    merged = dict(first)
    for name, fact in second.items():
        other = merged.get(name)
        if other is not None and name in SWITCHED and SWITCHED[name] in (fact.value, other.value):
            merged[name] = other if fact.value == SWITCHED[name] else fact
        elif other is None or (other.default and not fact.default):
            merged[name] = fact
        elif not fact.default and other.value != fact.value:
            raise ConfigError(f"{fact} contradicts {other}", file=file)
    return merged


def ranks_of_replica(job: Job) -> int:
    """GPUs of one replica of the model: tp * pp * cp."""
    return math.prod(getattr(job, name) or 1 for name in SPLITS)


def solve(facts: Mapping[str, Fact], file: str = "") -> tuple[Job, Extra]:
    """Works out the job that facts describe, and what no flag says of it. Raises `ConfigError` where two facts contradict.

    The model is empty where no fact names one. Recomputation is as on the command line, or `per-op` (torchtitan), or
    `modules:...` (Megatron), which depend on the model (`formats.recompute`).

    >>> facts = {"global_batch": Fact(64, "train_batch_size"), "micro_batch": Fact(2, "micro"),
    ...          "accumulation": Fact(4, "accumulation"), "tp": Fact(2, "autotp_size")}
    >>> solve(facts)[0].gpus
    16
    """
    values = {name: fact.value for name, fact in facts.items() if name in FIELDS and name not in SOLVED}
    if "weights" in facts:
        values |= _precision_of_weights(facts["weights"], values, facts, file)
    job = Job(**{"model": "", **values})
    gpus = _gpus(facts, file)
    own = None if gpus is None else trainer_gpus(gpus, job.placement)
    replicas, dp = _data_parallel(facts, job, own, file)
    micro, accumulation, batch = (_value(facts, name) for name in ("micro_batch", "accumulation", "global_batch"))
    if batch is not None and micro is not None and accumulation is not None and not facts["accumulation"].default:
        ranks, left = divmod(batch, micro * accumulation)
        if left or ranks == 0 or (dp is not None and dp != ranks):
            ranks_too = "" if dp is None else f" x {dp} data-parallel ranks"
            raise ConfigError(
                f"{facts['global_batch']} contradicts {facts['micro_batch']} x {facts['accumulation']}{ranks_too}",
                file=file,
            )
        dp = ranks
    elif batch is None and micro is not None and accumulation is not None and dp is not None:
        batch = micro * accumulation * dp
    elif batch is not None and micro is None and accumulation is not None and dp is not None:
        micro, left = divmod(batch, accumulation * dp)
        refuse(
            left or not micro,
            f"{facts['global_batch']} contradicts {facts['accumulation']} x {dp} data-parallel ranks",
            file=file,
        )
    if gpus is None and dp is not None:
        gpus = ranks_of_replica(job) * dp
    job = job.replace(
        gpus=gpus,
        gpus_per_node=_value(facts, "gpus_per_node"),
        replicas=replicas,
        micro_batch=micro,
        global_batch=batch,
    )
    return job, Extra(
        config=_value(facts, "config"),
        head=_value(facts, "head"),
        tied=_value(facts, "tied"),
        undropped=_value(facts, "undropped"),
        accumulation=accumulation if batch is None else None,
        generated=_value(facts, "generated") if "prompts" not in facts else None,
        layers_per_stage=_value(facts, "layers_per_stage"),
    )


def _precision_of_weights(
    loaded: Fact, values: Mapping[str, Any], facts: Mapping[str, Fact], file: str
) -> dict[str, Any]:
    """The dtype that weights are loaded in, where it has a say: DeepSpeed keeps its own float32 copy whatever it is, and a
    recipe that is given by its name says what the weights are."""
    name, framework = values.get("precision"), values.get("framework", "huggingface")
    if framework != "huggingface" or loaded.value is None:
        return {"weights": None}
    if name == "fp32" and not values.get("qlora"):
        # No autocast: everything is in the dtype of the weights, sharded or not (`fsdp2_prepare_model` of accelerate 1.15), but
        # adapters, which are float32 (`cast_adapter_dtype` of PEFT 0.21).
        narrow = loaded.value in ("auto", "bfloat16", "float16") and not facts["precision"].key.startswith("--")
        apart = {"lora_dtype": "float32"} if values.get("lora_rank") and not values.get("lora_dtype") else {}
        return {"precision": "bf16-pure", "weights": None, **apart} if narrow else {"precision": name, "weights": None}
    if name not in ("bf16", "fp16"):
        return {"weights": None}
    halves = {"bf16": "bfloat16", "fp16": "float16"}
    refuse(
        not values.get("lora_rank") and loaded.value in halves.values() and loaded.value != halves[name],
        f"{loaded.value} contradicts {facts['precision']}",
        key=loaded.key,
        file=file,
    )
    return {"weights": None if name == "fp16" and loaded.default else loaded.value}


def _value(facts: Mapping[str, Fact], name: str) -> Any:
    fact = facts.get(name)
    return None if fact is None else fact.value


def _gpus(facts: Mapping[str, Fact], file: str) -> int | None:
    gpus, nodes, per_node = (facts.get(name) for name in ("gpus", "nodes", "gpus_per_node"))
    if nodes is None or per_node is None:
        return None if gpus is None else int(gpus.value)
    product = int(nodes.value * per_node.value)
    refuse(gpus is not None and gpus.value != product, f"{gpus} contradicts {nodes} x {per_node}", file=file)
    return product


def enough_gpus(facts: Mapping[str, Fact]) -> tuple[dict[str, Fact], str]:
    """The facts of a file that starts fewer GPUs than its layout has ranks (an example that is to be started on more nodes), with
    the nodes that it needs at least, and a remark on that.

    >>> facts = {"gpus_per_node": Fact(8, "nproc"), "nodes": Fact(1, "nnodes"), "tp": Fact(8, "tp"), "pp": Fact(4, "pp")}
    >>> enough_gpus(facts)[0]["nodes"].value, enough_gpus({**facts, "pp": Fact(1, "pp")})[1]
    (4, '')
    """
    sizes = {name: int(_value(facts, name) or 1) for name in (*SPLITS, "ep", "etp")}
    counted = [facts[name] for name in ("gpus", "nodes", "gpus_per_node") if name in facts]
    started = _gpus(facts, "")
    ranks = sizes["pp"] * math.lcm(sizes["tp"] * sizes["cp"], sizes["ep"] * sizes["etp"])
    if started is None or started >= ranks or split_of(_value(facts, "placement")):
        return dict(facts), ""
    node = int(_value(facts, "gpus_per_node") or started)
    nodes = -(-ranks // node)
    return {
        **{name: fact for name, fact in facts.items() if name not in ("gpus", "dp", "shards")},
        "nodes": Fact(nodes, counted[0].key, True),
        "gpus_per_node": Fact(node, counted[0].key, True),
    }, f"starts {started} GPUs, and its layout has {ranks} ranks at least: {nodes * node} are taken"


def _data_parallel(facts: Mapping[str, Fact], job: Job, gpus: int | None, file: str) -> tuple[int | None, int | None]:
    """Replicas of ZeRO's shards, and data-parallel ranks, where they are known."""
    replicas, shards, dp = (facts.get(name) for name in ("replicas", "shards", "dp"))
    ranks = _value(facts, "dp")
    if replicas is not None and shards is not None:
        ranks = replicas.value * shards.value
        refuse(dp is not None and dp.value != ranks, f"{dp} contradicts {replicas} x {shards}", file=file)
    if gpus is not None:
        whole, left = divmod(gpus, ranks_of_replica(job))
        sized = [facts[name] for name in ("gpus", "nodes", "gpus_per_node", *SPLITS) if name in facts]
        refuse(
            left or whole == 0,
            f"{_joined(sized)}: {gpus} GPUs cannot be split over {ranks_of_replica(job)}; give --gpus",
            file=file,
        )
        if ranks is not None and ranks != whole:
            sized += [fact for fact in (dp, replicas, shards) if fact is not None]
            raise ConfigError(f"{_joined(sized)}: {ranks_of_replica(job)} x {ranks} GPUs are not {gpus}", file=file)
        ranks = whole
    if shards is not None and replicas is None and ranks is not None:
        refuse(ranks % shards.value, f"{shards} does not divide the {ranks} data-parallel ranks", file=file)
        return ranks // shards.value, ranks
    refuse(
        replicas is not None and ranks is not None and ranks % replicas.value,
        f"{replicas} does not divide the {ranks} data-parallel ranks",
        file=file,
    )
    return _value(facts, "replicas"), ranks


def _joined(facts: list[Fact]) -> str:
    return ", ".join(str(fact) for fact in facts if not fact.default)


def describe(job: Job, extra: Extra) -> dict[str, Any]:
    """Return what is known of a job, by name: fields of `Job` that files have keys for, the model's config and the accumulation."""
    values = {name: getattr(job if name in FIELDS else extra, name) for name in NAMES}
    return {name: value for name, value in values.items() if value is not None and (name, value) != ("model", "")}


PLAINER = {"bf16-fsdp-16-32": "bf16", "bf16-pure-32": "bf16-pure"}


def plainer(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts without the wider reduction of gradients, for an idea that has no word for it.

    >>> plainer({"precision": "bf16-pure-32", "tp": 2})
    {'precision': 'bf16-pure', 'tp': 2}
    """
    return {name: PLAINER.get(value, value) if name == "precision" else value for name, value in facts.items()}


def facts_of(job: Job, extra: Extra | None = None) -> dict[str, Any]:
    """Works out the facts of a job that a dialect may write; without a number of GPUs, those of one replica.

    Raises `ConfigError` where GPUs, replicas or sequences do not divide.

    >>> values = facts_of(Job(model="", gpus=16, tp=2, micro_batch=2, global_batch=64, replicas=2))
    >>> values["dp"], values["shards"], values["accumulation"]
    (8, 4, 4)
    """
    extra = extra or Extra()
    values = describe(job, extra)
    dp = 1
    if job.gpus is not None:
        own = trainer_gpus(job.gpus, job.placement)
        dp, left = divmod(own, ranks_of_replica(job))
        refuse(left, f"{own} GPUs cannot be split over tp x pp x cp = {ranks_of_replica(job)}", key="gpus")
        refuse(
            dp % (job.replicas or 1), f"{job.replicas} replicas do not divide {dp} data-parallel ranks", key="replicas"
        )
        values |= {"dp": dp, "shards": dp // (job.replicas or 1)}
        if job.gpus_per_node is not None:
            values["gpus_per_node"] = min(job.gpus_per_node, job.gpus)
            values["nodes"] = max(1, job.gpus // job.gpus_per_node)
    micro = job.micro_batch or 1
    if job.global_batch is not None:
        accumulation, left = divmod(job.global_batch, micro * dp)
        refuse(
            left or not accumulation,
            f"{job.global_batch} sequences cannot be split over {dp} data-parallel ranks x {micro}",
            key="global_batch",
        )
        values["accumulation"] = accumulation
    return values


def virtual_stages(counts: str, layers: int, pp: int, schedule: str | None) -> dict[str, Any]:
    """The virtual stages of a rank and, where ranks differ, the layers of each, as flags. Raises `ConfigError`.

    counts: layers of a virtual stage and how their number is made a multiple of the ranks (`2,down`; 0 layers: two stages a rank),
        or those of the first and the last stage (`ends,14,16`), of which one may be empty

    The first stages have one layer more where they cannot have the same (`calculate_virtual_stages` and
    `generate_hf_model_fqn_per_model_part` of NeMo AutoModel).

    >>> virtual_stages("2,down", 61, 4, "interleaved")
    {'vpp': 7, 'stage_layers': '16,15,15,15'}
    >>> virtual_stages("ends,14,", 78, 5, "1f1b")
    {'stage_layers': '14,16,16,16,16'}
    """
    each, *rest = counts.split(",")
    if each == "ends":
        first, last = ([int(word)] if word else [] for word in rest)
        middle, left = divmod(layers - sum(first + last), max(1, pp - len(first + last)))
        refuse(
            left or middle < 0,
            f"{layers} layers less {sum(first + last)} of the ends cannot be split evenly over the rest",
        )
        return {"stage_layers": ",".join(map(str, first + [middle] * (pp - len(first + last)) + last))}
    count = -(-layers // int(each)) if int(each) else 2 * pp
    left = count % pp
    refuse(
        left and not rest[0], f"{count} stages of {each} layers are no multiple of {pp} ranks", key="layers_per_stage"
    )
    count += 0 if not left else pp - left if rest[0] == "up" else -left
    deep = count // pp
    refuse(
        count < pp or count > layers or (deep > 1) != (schedule not in (None, "1f1b", "gpipe")),
        f"{layers} layers in {count} stages on {pp} ranks are not for the schedule {schedule}",
        key="layers_per_stage",
    )
    sizes = [layers // count + (stage < layers % count) for stage in range(count)]
    ranks = [sum(sizes[rank::pp]) for rank in range(pp)]
    uneven = {"stage_layers": ",".join(map(str, ranks))} if layers % count else {}
    return {"vpp": deep if deep > 1 and schedule == "interleaved" else None, **uneven}
