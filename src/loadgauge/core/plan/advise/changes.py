"""Changes of a job that may make it fit or make it faster: when each applies, the fields of `Job` it sets, and why.

This is the only list. `advice` and the page try its changes with an estimate, `replan` with a search for the best layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base.units import rate
from loadgauge.core.definitions.hardware.hardware import Gpu, Link
from loadgauge.core.definitions.hardware.usual import usual_node
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import ModelSpec, Moe
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.plan.search import Case
from loadgauge.core.resolve.adapters import LORA_RANK
from loadgauge.core.resolve.setup import Setup

EAGER = frozenset(
    [
        "bloom",
        "codegen",
        "cpmant",
        "deepseek_v4",
        "gpt_neox_japanese",
        "hy_v4",
        "inkling2_text",
        "mpt",
        "openai-gpt",
        "trocr",
        "xglm",
        "xlm",
        "xlnet",
    ]
)
"""Models whose class in transformers 5.23 has eager attention alone (`_supports_sdpa`, `_supports_flash_attn`)."""


class Kind(Enum):
    """Fields that a change alters."""

    LOSS = auto()
    ZERO = auto()
    SMALLER_MICRO_BATCH = auto()
    ATTENTION = auto()
    RECOMPUTE_MORE = auto()
    SEQUENCE_PARALLEL = auto()
    MORE_TP = auto()
    MORE_PP = auto()
    OPTIMIZER = auto()
    EVALUATION = auto()
    PURE_16_BIT = auto()
    FROZEN_16_BIT = auto()
    OFFLOAD_OPTIMIZER = auto()
    OFFLOAD_ALL = auto()
    ADAPTERS = auto()
    SEQUENCE_LENGTH = auto()
    MORE_GPUS = auto()
    LINKS = auto()
    LARGER_MICRO_BATCH = auto()
    RECOMPUTE_LESS = auto()
    LESS_TP = auto()
    PIPELINE = auto()
    LESS_ZERO = auto()
    OVERLAP = auto()
    CONTEXT_PARALLEL = auto()
    EXPERT_PARALLEL = auto()
    EIGHT_BIT = auto()
    OTHER_GPUS = auto()
    GLOBAL_BATCH = auto()


FIT = frozenset({
    Kind.EVALUATION, Kind.LOSS, Kind.ZERO, Kind.SMALLER_MICRO_BATCH, Kind.ATTENTION, Kind.RECOMPUTE_MORE, Kind.SEQUENCE_PARALLEL,
    Kind.MORE_TP, Kind.MORE_PP, Kind.OPTIMIZER, Kind.FROZEN_16_BIT, Kind.OFFLOAD_OPTIMIZER,
})  # fmt: skip
"""Changes that leave less in memory in a given layout."""
NEXT = FIT | {
    Kind.LARGER_MICRO_BATCH, Kind.RECOMPUTE_LESS, Kind.LESS_TP, Kind.PIPELINE, Kind.LESS_ZERO, Kind.OVERLAP,
    Kind.CONTEXT_PARALLEL, Kind.EXPERT_PARALLEL, Kind.EIGHT_BIT, Kind.OTHER_GPUS, Kind.GLOBAL_BATCH,
}  # fmt: skip
"""Changes that may be worth making in a given layout."""
_SAME_JOB = {Kind.OPTIMIZER, Kind.PURE_16_BIT, Kind.OFFLOAD_OPTIMIZER, Kind.OFFLOAD_ALL}
REPLAN_FIT = frozenset({*_SAME_JOB, Kind.ADAPTERS, Kind.SEQUENCE_LENGTH, Kind.MORE_GPUS})
"""Changes that leave less in memory whatever the layout, which is searched again."""
REPLAN_NEXT = frozenset({*_SAME_JOB, Kind.LINKS, Kind.OVERLAP, Kind.EIGHT_BIT, Kind.OTHER_GPUS, Kind.GLOBAL_BATCH})
"""Changes of the same job that may make it faster with the layout searched again."""


class Change(NamedTuple):
    """Fields of `Job` that a change sets (None resets one), why it may help, and its name in a few words."""

    kind: Kind
    fields: dict[str, Any]
    why: str
    title: str = ""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the conditions of changes depend on. `layout`: None where a search is to choose it."""

    model: ModelSpec
    training: Training
    gpu: Gpu | None
    gpus: int
    global_batch: int
    seq_len: int
    ragged: bool
    links: tuple[Link, ...] = ()
    layout: Layout | None = None
    job: Job | None = None

    @classmethod
    def of_setup(cls, setup: Setup) -> Run:
        """Return the run of a job with its layout."""
        layout = setup.layout
        return cls(
            model=setup.model,
            training=setup.training,
            gpu=setup.gpu,
            gpus=int(layout.gpus),
            layout=layout,
            global_batch=int(layout.global_batch),
            seq_len=int(layout.seq_len),
            ragged=setup.lengths is not None,
            job=setup.job,
        )

    @classmethod
    def of_case(cls, case: Case) -> Run:
        """Return the run of a job whose layout is searched."""
        space = case.space
        return cls(
            model=space.model,
            training=case.training,
            gpu=case.cluster.gpu,
            gpus=space.gpus,
            global_batch=space.global_batch,
            seq_len=space.seq_len,
            ragged=space.lengths is not None,
            links=() if case.cluster.topology is not None else case.cluster.links,
        )

    @property
    def has_loss(self) -> bool:
        """Return whether the model has a language-model head."""
        return self.model.head.kind == "lm"

    @property
    def node(self) -> int:
        """GPUs joined by a fast link, within which tensor parallelism pays."""
        return usual_node(self.gpu)


def changes(run: Run, wanted: Collection[Kind]) -> Iterator[Change]:
    """Yield the applicable changes of some kinds: first those that reduce memory, the mildest first."""
    rules = (_between_steps, _of_layout, _of_states, _of_job, _links, _of_layout_for_speed, _for_speed)
    # Groups of ranks by length go with neither (`dynamic_groups`).
    fixed = () if run.layout is None or run.layout.ranks_each is None else ("zero", "micro_batch", "pp", "cp")
    every = (change for rule in rules for change in rule(run) if change.kind in wanted)
    return (change for change in every if not any(name in change.fields for name in fixed))


def _between_steps(run: Run) -> Iterator[Change]:
    around = run.training.around
    if around.eval_batches > 1:
        yield Change(
            Kind.EVALUATION, {"eval_batches": 1}, "moves logits to the host after each batch: eval_accumulation_steps"
        )
    if around.eval_batches:
        yield Change(Kind.EVALUATION, {"eval_batches": 0}, "keeps the loss alone: prediction_loss_only")
    if around.eval_batch > 1:
        yield Change(Kind.EVALUATION, {"eval_batch": 1}, "evaluates one sequence at a time")
        if around.eval_batches:
            both = {"eval_batch": 1, "eval_batches": 0}
            yield Change(Kind.EVALUATION, both, "evaluates one sequence at a time, keeps the loss alone")


def _of_layout(run: Run) -> Iterator[Change]:
    layout, kernels = run.layout, run.training.kernels
    if layout is None:
        return
    if run.has_loss and kernels.loss != "chunked":
        yield Change(Kind.LOSS, {"loss": "chunked"}, "the loss in chunks")
    for stage in range(layout.zero + 1, 4):
        if layout.zero_ranks > 1:
            yield Change(Kind.ZERO, {"zero": stage}, "shards more of the model states")
    size = int(layout.micro_batch)
    while size > 1:
        size = max(part for part in range(1, size // 2 + 1) if layout.micro_batch % part == 0)
        yield Change(Kind.SMALLER_MICRO_BATCH, {"micro_batch": size}, "more, smaller micro-batches")
    if kernels.attention == "eager":
        if run.model.model_type not in EAGER:
            yield Change(Kind.ATTENTION, {"attention": "flash"}, "never keeps the scores")
        if layout.recompute.mode == "none":
            yield Change(Kind.RECOMPUTE_MORE, {"recompute": "selective"}, "attention runs again in backward")
    if layout.recompute.mode != "full":
        yield Change(Kind.RECOMPUTE_MORE, {"recompute": "full"}, "layers run again in backward")
    if layout.tp > 1 and not layout.sequence_parallel:
        yield Change(Kind.SEQUENCE_PARALLEL, {"sequence_parallel": True}, "shares norms and dropouts too")
    for factor in tp_factors(run):
        if factor <= 8:
            yield Change(Kind.MORE_TP, {"tp": layout.tp * factor}, "splits every layer")
    if layout.dp % 2 == 0 and layout.stage_layers is None and layout.vpp == 1:
        yield Change(Kind.MORE_PP, {"pp": layout.pp * 2}, "fewer layers on each GPU")


def tp_factors(run: Run) -> list[int]:
    """Return the factors by which tensor parallelism can grow inside a node, at the expense of data parallelism."""
    layout = run.layout
    assert layout is not None
    return [factor for factor in (2, 4, 8, 16) if layout.dp % factor == 0 and layout.tp * factor <= run.node]


def _of_states(run: Run) -> Iterator[Change]:
    training = run.training
    smaller = training.optimizer.eight_bit
    if smaller:
        yield Change(Kind.OPTIMIZER, {"optimizer": smaller}, "8-bit optimizer states", "an 8-bit optimizer")
    if training.precision.master and training.precision.products is None and training.lora is None:
        title = "all in bf16, without float32 weights"
        yield Change(Kind.PURE_16_BIT, {"precision": "bf16-pure"}, "no float32 weights", title)
    if training.weights == "float32" and training.precision.name == "bf16-autocast" and training.lora is None:
        fields: dict[str, Any] = {"precision": "bf16-autocast-8", "weights": None}
        yield Change(Kind.PURE_16_BIT, fields, "weights loaded in bf16, no float32 copy", "weights loaded in bf16")
    if training.weights == "float32" and training.lora is not None and not training.lora.quantised:
        why = "the frozen weights loaded in 16 bits"
        yield Change(Kind.FROZEN_16_BIT, {"weights": "bfloat16"}, why, why)
    if training.offloaded_share < 1:
        why = "optimizer states in host memory; slower"
        yield Change(Kind.OFFLOAD_OPTIMIZER, {"offload": "optimizer"}, why, "the optimizer on the host")
        why = "optimizer states and weights in host memory; slower"
        yield Change(Kind.OFFLOAD_ALL, {"offload": "all"}, why, "optimizer and weights on the host")


def _of_job(run: Run) -> Iterator[Change]:
    """Changes that make another job of it."""
    training = run.training
    # Without the framework's name, adapters mean transformers', and so does one GPU.
    framework = {} if training.framework.is_default else {"framework": training.framework.name}
    whole = run.has_loss and not run.model.partly
    if whole and training.lora is None:
        why = "trains adapters only"
        yield Change(Kind.ADAPTERS, {"lora_rank": LORA_RANK, **framework}, why, "adapters on a frozen base")
    if whole and (training.lora is None or not training.lora.quantised):
        why = "trains adapters on a 4-bit base only"
        yield Change(Kind.ADAPTERS, {"qlora": True, **framework}, why, "adapters on a frozen base in 4 bits")
    if not run.ragged and run.seq_len >= 1024:
        title = "half the sequence length"
        yield Change(Kind.SEQUENCE_LENGTH, {"seq_len": run.seq_len // 2}, "fewer tokens at once", title)
    for factor in (2, 4, 8):
        yield Change(
            Kind.MORE_GPUS, _times_the_gpus(run, factor), f"{factor} times the GPUs", f"{factor} times the GPUs"
        )


def _times_the_gpus(run: Run, factor: int) -> dict[str, Any]:
    """More GPUs, each with at least one sequence."""
    gpus, name = factor * run.gpus, run.training.framework.name
    batch = {"global_batch": gpus} if gpus > run.global_batch else {}
    framework = {"framework": name} if run.gpus == 1 and run.training.lora is None else {}
    return {"gpus": gpus, **batch, **framework}


def _links(run: Run) -> Iterator[Change]:
    for link, field, name in zip(
        run.links, ("link_bandwidth", "nic_bandwidth"), ("link inside a node", "network adapter"), strict=False
    ):
        if link.domain > 1:
            title = f"twice the {name}"
            yield Change(Kind.LINKS, {field: rate(2 * link.bandwidth)}, "faster communication", title)


def _of_layout_for_speed(run: Run) -> Iterator[Change]:
    layout = run.layout
    if layout is None:
        return
    if layout.num_microbatches % 2 == 0:
        why = "larger matrix products, fewer micro-batches"
        yield Change(Kind.LARGER_MICRO_BATCH, {"micro_batch": 2 * layout.micro_batch}, why)
    if layout.recompute.mode == "full":
        yield Change(Kind.RECOMPUTE_LESS, {"recompute": "selective"}, "only attention runs again")
    if layout.recompute.mode != "none":
        yield Change(Kind.RECOMPUTE_LESS, {"recompute": "none"}, "nothing runs again in backward")
    if layout.tp > 1 and layout.tp % 2 == 0:
        spread = {"sequence_parallel": False} if layout.tp == 2 and layout.sequence_parallel else {}
        yield Change(Kind.LESS_TP, {"tp": layout.tp // 2, **spread}, "less communication inside the layers")
    yield from _pipelines(run, layout)
    if layout.zero == 3:
        yield Change(Kind.LESS_ZERO, {"zero": 1}, "weights are not gathered with every micro-batch")


def _pipelines(run: Run, layout: Layout) -> Iterator[Change]:
    if layout.pp == 1:
        return
    if layout.pp % 2 == 0:
        plain = {"stage_layers": None} if layout.stage_layers else {}
        alone = {"schedule": None, "vpp": None} if layout.pp == 2 else {}
        why = "a smaller bubble, more layers on each GPU"
        yield Change(Kind.PIPELINE, {"pp": layout.pp // 2, **plain, **alone}, why)
    if layout.schedule == "1f1b":
        layers = layout.layers_of(run.model)[0]
        for chunks in (2, 3, 4, 5, 8):
            if layers % chunks == 0 and not layout.stage_layers:
                why = "interleaved: a smaller bubble, more sends"
                yield Change(Kind.PIPELINE, {"vpp": chunks, "schedule": "interleaved"}, why)
    elif layout.schedule == "interleaved":
        why = "fewer micro-batches in flight, a larger bubble"
        yield Change(Kind.PIPELINE, {"vpp": None, "schedule": "1f1b"}, why)
    if not run.training.framework.only_own_schedules:
        yield Change(Kind.PIPELINE, {"vpp": None, "schedule": "zb-h1"}, "zero-bubble schedule of the same memory")


def _for_speed(run: Run) -> Iterator[Change]:
    layout, training, job = run.layout, run.training, run.job
    if run.gpu is not None and (layout is None or layout.gpus > 1) and (job is None or job.overlap != "all"):
        why = "all communication beside compute, where it can be"
        yield Change(Kind.OVERLAP, {"overlap": "all"}, why, "all communication beside compute")
    if layout is not None and layout.cp == 1 and layout.dp % 2 == 0 and layout.seq_len >= 16384:
        yield Change(Kind.CONTEXT_PARALLEL, {"cp": 2}, "shares each sequence over two ranks")
    if layout is not None and any(isinstance(block.mlp, Moe) for block in run.model.blocks):
        for factor in (0.5, 2):
            ep = int(layout.ep * factor)
            if 1 <= ep <= layout.gpus and ep != layout.ep:
                yield Change(Kind.EXPERT_PARALLEL, {"ep": ep}, "other groups of experts")
    # A search tries Transformer Engine's recipes alone.
    modelled = layout is not None or training.framework.transformer_engine
    if modelled and training.precision.products is None and training.lora is None:
        yield Change(Kind.EIGHT_BIT, {"precision": "fp8"}, "8-bit matrix products", "8-bit matrix products")
    if layout is None:
        yield Change(Kind.OTHER_GPUS, _times_the_gpus(run, 2), "twice the GPUs", "twice the GPUs")
    else:
        batch = {"global_batch": run.global_batch} if job is None or job.global_batch is None else {}
        for factor, word in ((2, "twice"), (0.5, "half")):
            gpus = int(run.gpus * factor)
            if gpus >= 1:
                yield Change(Kind.OTHER_GPUS, {"gpus": gpus, **batch}, f"{word} the GPUs, the same batch")
    why = "twice the batch: fewer steps, a smaller bubble"
    yield Change(Kind.GLOBAL_BATCH, {"global_batch": 2 * run.global_batch}, why, "twice the global batch")
