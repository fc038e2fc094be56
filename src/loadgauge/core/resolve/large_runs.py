"""Tells what a layout needs, and what runs of many GPUs have, where a job says nothing of it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec

from loadgauge.core.base.errors import ConfigError, LayoutError, NotModelled, refuse
from loadgauge.core.base.lengths import Lengths, RankGroups
from loadgauge.core.definitions.hardware.hardware import Cluster, Gpu
from loadgauge.core.definitions.hardware.usual import usual_network, usual_node
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.job.job_text import stage_counts, stage_words
from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.core.definitions.layout.axes import MODEL_PARALLEL, REPLICA
from loadgauge.core.definitions.layout.layout import FULL_PIPE, V_SHAPED, Filled, Layout, of_lengths, shared_out
from loadgauge.core.definitions.layout.overlap import Overlap
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS, Framework
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.resolve.recompute_words import light_modules
from loadgauge.core.resolve.setup import Setup

MANY = 64
"""GPUs from which on a run is no first try: what such runs have is assumed where nothing is said of it."""
BOTH_DIRECTIONS = ("dualpipe", "dualpipev")
"""Schedules that run the two directions of a pipeline beside each other."""
BY_ZERO = {0: "megatron", 1: "megatron", 2: "deepspeed", 3: "torchtitan"}
"""Frameworks of so many GPUs that share out no layers, by the stage of ZeRO."""


def dynamic_groups(
    job: Job, lengths: Lengths | None, ranks: int, stages: int, assumed: dict[str, str]
) -> RankGroups | None:
    """Return the groups of ranks that sequences are shared over by length (`--dynamic-cp`); None: as many for all of them.

    ranks: those of data and context together; stages: of the pipeline
    """
    if job.dynamic_cp is None:
        return None
    if lengths is None or job.padding not in (None, "free"):
        raise ConfigError("needs --lengths, without padding", key="dynamic_cp")
    refuse(
        job.cp_comm == "all_to_all" or stages > 1 or (job.micro_batch or 1) > 1,
        "--dynamic-cp with --pp, --cp-comm all_to_all or --micro-batch above 1",
        NotModelled,
    )
    groups = lengths.over_ranks(job.dynamic_cp)
    refuse(
        ranks % groups.largest,
        f"a sequence of {lengths.longest:,} tokens takes {groups.largest} ranks of at most {job.dynamic_cp:,} each, and"
        f" there are {ranks}",
        key="dynamic_cp",
    )
    return groups


def _dynamic_batches(
    lengths: Lengths, groups: RankGroups, dp: int, batch: int, assumed: dict[str, str]
) -> dict[str, Any]:
    """Return the fields of `Layout` where each sequence runs alone, on its group of ranks.

    All ranks get the same part of the step's tokens and pairs, as the scheduler aims at (`BalancedCPScheduler`).
    """
    ranks = dp * groups.largest
    many, alone = max(1, round(batch * groups.mean / ranks)), groups.pairs / (batch * lengths.mean_square / ranks)
    assumed["--dynamic-cp"] = (
        f"groups of up to {groups.largest} ranks, {groups.mean:.3g} in the mean; each rank runs {many} parts of sequences a"
        f" step, and all ranks as long (within 5 %, but the longest part alone is {100 * alone:.2g} % of a rank's attention)"
    )
    tokens, pairs = (batch * moment / (dp * many) for moment in (lengths.mean, lengths.mean_square))
    return {
        "tokens": tokens,
        "pairs": pairs,
        "fullest": Filled(groups.largest * groups.held, groups.largest * groups.pairs),
        "ranks_each": groups.mean,
        "exchanged": groups.passed / max(groups.largest - 1, 1),
    }


def ragged(
    job: Job,
    lengths: Lengths | None,
    groups: RankGroups | None,
    batch: tuple[int, int, int],
    kind: Training,
    assumed: dict[str, str],
) -> dict[str, Any]:
    """Tokens and query-key pairs of the expected micro-batch, which decides the time, and of the fullest, which makes the peak.

    groups: of ranks that share a sequence; batch: replicas, sequences of a micro-batch, and of a step

    A micro-batch that pads holds at some point of an epoch the longest sequence of all. Without padding it is the fullest of
    the epoch's micro-batches; its pairs are an upper bound, on which flash attention's memory does not depend.
    """
    flash, (dp, micro_batch, whole) = kind.kernels.attention == "flash", batch
    if lengths is not None and groups is not None:
        return _dynamic_batches(lengths, groups, dp, whole, assumed)
    if lengths is None:
        refuse(job.padding not in (None, "max-length"), "needs --lengths", key="padding")
        return {}
    refuse(job.padding == "free" and not flash, "free needs --attention flash: eager attention pads", key="padding")
    how = job.padding or ("free" if flash else "dynamic")
    if job.padding is None:
        assumed["--padding"] = f"{how} (--attention {kind.kernels.attention})"
    if how == "max-length":
        return {}
    return of_lengths(lengths, micro_batch, how != "free")


def overlapped(job: Job, kind: Training, gpus: int, card: Gpu | None, assumed: dict[str, str]) -> Training:
    """The training with the communication that is hidden: what is said, and what the schedule or scripts of such runs hide."""
    own, hidden = kind.overlap, []
    if job.schedule in BOTH_DIRECTIONS:
        hidden.append(("ep", f"{job.schedule} runs dispatch and combine beside the other direction, by DeepEP"))
        # DeepSeek-V3, 3.2.2 and 3.3.3: tokens travel in the 8 bits of the products, sums in 16.
        how = "quantised" if kind.kernels.products is not None else "deduplicated"
        kind = msgspec.structs.replace(kind, kernels=msgspec.structs.replace(kind.kernels, dispatch=how))
    elif kind.framework.scripts_dispatch and card is not None and card.blackwell:
        # Of every layout that a plan tries; without ep nothing is sent.
        kind = msgspec.structs.replace(kind, kernels=msgspec.structs.replace(kind.kernels, dispatch="deduplicated"))
        if (job.ep or 1) > 1:
            assumed["dispatch of tokens"] = f"by HybridEP ({kind.framework.name}'s scripts for Blackwell)"
    if job.overlap is None and kind.framework.scripts_overlap and gpus >= MANY and not own.dp:
        hidden.append(("dp", f"{kind.framework.name}'s scripts switch it on; its own default is none"))
        if card is not None and card.data_center_hopper_or_later:
            hidden.append(("tp", "so do those for Hopper and later"))
    if job.overlap is None and gpus >= MANY and card is not None and not own.ep and _exchanges_beside(job, kind, card):
        hidden.append(
            ("ep", "Megatron's guide hides the exchange of experts between nodes, in pipelines that interleave")
        )
    # A layout that the planner tries may have an axis that the job does not name: what is hidden is so of every layout.
    own = msgspec.structs.replace(own, **dict.fromkeys((name for name, _ in hidden), True))
    told = [f"{name}: {why}" for name, why in hidden if name == "dp" or (getattr(job, name) or 1) > 1]
    if told and job.gpu is not None:
        assumed["--overlap"] = f"{own.text()} ({'; '.join(told)})"
    return msgspec.structs.replace(kind, overlap=own if job.overlap is None else Overlap.parse(job.overlap, own))


def _running(job: Job, card: Gpu | None, schedule: Any, kind: Training, gpus: int) -> Training:
    """Return the training of a run under a schedule."""
    return overlapped(job.replace(schedule=schedule), kind, gpus, card, {})


def _exchanges_beside(job: Job, kind: Training, card: Gpu) -> bool:
    """Return whether Megatron's guide has dispatch and combine beside another micro-batch's compute (megatron-bridge,
    docs/training/communication-overlap.md, which refuses it in a pipeline of one chunk and beside full recomputation)."""
    domain = 1 if card.interconnect.domain is None else card.interconnect.domain.value
    several = (job.pp or 1) == 1 or (job.vpp or 1) > 1
    return kind.framework.transformer_engine and (job.ep or 1) > domain and several and job.recompute != "full"


def with_alternatives(setup: Setup, resolve: Callable[[Job, ModelSpec], Setup]) -> Setup:
    """Return a run with what is tried of it where nothing is said: see `instead` and `larger`."""
    layout, job = setup.layout, setup.job
    if setup.training.lora is None and layout.gpus >= MANY:
        setup = msgspec.structs.replace(
            setup, instead=partial(instead, setup, resolve), open_layout=says_no_layout(job)
        )
    setup = msgspec.structs.replace(setup, running=partial(_running, job, setup.gpu))
    several = layout.global_batch > layout.dp and layout.global_batch % layout.dp == 0
    if layout.gpus >= MANY and job.micro_batch is None and layout.pp == 1 and several:
        setup = msgspec.structs.replace(setup, larger=partial(larger, setup))
    return setup


Assumption: TypeAlias = "tuple[str, Any, str, str]"
"""A field of which nothing is said: its name, the value assumed, that value in words, and the one assumed else."""


GOES_WITH = {"tp": ("sequence_parallel",)}
"""Fields that mean nothing without another."""


def says_no_layout(job: Job) -> bool:
    """Return whether nothing is said of how many GPUs share the work."""
    return all(getattr(job, name) is None for name in (*MODEL_PARALLEL, "zero"))


class Instead(NamedTuple):
    """A run with what layouts of many GPUs have, where nothing is said of it.

    flags: what was changed: the flag, its value, the one that was assumed, and the run with all changes but this one
    """

    setup: Setup
    flags: tuple[tuple[str, str, str, Callable[[], Setup]], ...]


def instead(setup: Setup, resolve: Callable[[Job, ModelSpec], Setup], *, failed: bool = True) -> Iterator[Instead]:
    """The run with what layouts of many GPUs have where nothing is said of it, the mildest first: sequence parallelism, a
    sharded optimizer (of a run that says nothing of its layout: sharded weights), recomputation of parts that run again for
    little, of everything; then layers and experts shared out within a node, and stages.

    failed: whether it does not fit as assumed; else it fits and is slow, and only recomputation is tried
    """
    job, layout, framework = setup.job, setup.layout, setup.training.framework
    changes: list[Assumption] = []
    if failed and job.sequence_parallel is None and not layout.sequence_parallel and layout.tp > 1:
        changes.append(("sequence_parallel", True, "on", "off"))
    if failed and job.zero is None and not layout.zero and layout.zero_ranks > 1:
        changes.append(("zero", 1, "1", "0"))
    if failed and job.etp is None and layout.etp == 1 < min(layout.tp, layout.ep):
        # Megatron's own default, which its recipes for small experts set to 1 (megatron-core, `ModelParallelConfig`).
        changes.append(("etp", layout.tp, str(layout.tp), "1"))
    tried = [changes[:count] for count in range(1, len(changes) + 1)]
    unsaid = failed and says_no_layout(job)
    whole: list[Assumption] = [("zero", 3, "3", "0")]
    # A step that was measured is that of the layout as it stands.
    sharded = failed and job.zero is None and job.framework is None and layout.pp == 1
    sharded = sharded and (unsaid or job.measured is None)
    again = [[*changes, more] for more in _recomputed(setup, framework)]
    tried += [whole] * (unsaid and sharded) + again + [whole] * (sharded and not unsaid)
    if sharded:
        tried += [[*whole, more] for more in _recomputed(setup, FRAMEWORKS[BY_ZERO[3]])]
    tried += _within_nodes(setup) if unsaid else ()

    def changed(fields: dict[str, Any]) -> Setup:
        return resolve(job.replace(**fields), setup.model)

    for each in tried:
        fields = {name: value for name, value, _, _ in each}
        try:
            other = changed(fields)
            other.layout.check(other.model)
        except (ConfigError, LayoutError, NotModelled):
            continue
        flags = tuple(
            (
                f"--{name.replace('_', '-')}",
                word,
                usual,
                partial(changed, {n: v for n, v in fields.items() if n not in (name, *GOES_WITH.get(name, ()))}),
            )
            for name, _, word, usual in each
        )
        fault = "it does not fit" if failed else "larger micro-batches do not fit, and each gathers the weights"
        why = {
            flag: f"{word} (with {usual} {fault})" if last else f"{word} (runs of {MANY} and more GPUs have it)"
            for last, (flag, word, usual, _) in zip((*[False] * (len(flags) - 1), True), flags, strict=True)
        }
        there = msgspec.structs.replace(other, job=job, assumed=other.assumed | why, instead=None)
        yield Instead(msgspec.structs.replace(there, larger=other.larger and partial(larger, there)), flags)


def _recomputed(setup: Setup, framework: Framework) -> Iterator[Assumption]:
    """The recomputation of a run that says nothing of it, the least first."""
    parts = ("selective",) * framework.recomputes_parts
    light = (light_modules(setup.model, setup.training),) * framework.transformer_engine
    for word in (*parts, *light, "full") if setup.job.recompute is None else ():
        yield "recompute", word, word, "none"


def _within_nodes(setup: Setup) -> Iterator[list[Assumption]]:
    """Layouts of a run that says nothing of its own: experts, else layers, shared out over a node's links, then stages."""
    node = usual_node(setup.gpu)
    if setup.gpu is None or setup.gpu.interconnect.bandwidth is None:
        return  # nothing that is known of joins the GPUs of a node
    axis = "ep" if setup.model.has_experts else "tp"
    for width in (node, node // 2, node // 4):  # as many as the heads or the experts divide by
        if not Layout(dp=width, global_batch=width, seq_len=width, **{axis: width}).valid(setup.model):  # type: ignore[arg-type]
            break
    spread: list[Assumption] = [(axis, width, str(width), "1")]
    spread += [("sequence_parallel", True, "on", "off")] * (axis == "tp")
    spread.append(("zero", 1, "1", "0"))
    yield spread
    full: list[Assumption] = [("recompute", "full", "full", "none")] if setup.job.recompute is None else []
    yield [*spread, *full]
    for stages in (2, 4, 8, 16):
        yield [*spread, ("pp", stages, str(stages), "1"), *full]


def larger(setup: Setup) -> Iterator[Setup]:
    """The run with larger micro-batches, the largest first: nobody accumulates gradients of what fits at once."""
    layout, job = setup.layout, setup.job
    for size in (2**power for power in range(int(layout.num_microbatches).bit_length() - 1, 0, -1)):
        if layout.num_microbatches % size == 0:
            other = msgspec.structs.replace(layout, micro_batch=size)
            why = f"{size} (the largest of the {layout.num_microbatches} sequences of a rank that fits)"
            assumed = setup.assumed | {"--micro-batch": why}
            yield msgspec.structs.replace(setup, layout=other, assumed=assumed, larger=None, instead=None, job=job)


def chunks(layers: int, pp: int) -> int:
    """The fewest chunks of a stage that share layers out evenly, embedding and loss counted or not; else two."""
    several = range(2, max(2, layers // pp) + 1)
    return next((vpp for vpp in several if 0 in (layers % (pp * vpp), (layers + 2) % (pp * vpp))), 2)


def by_batch(job: Job) -> int:
    """Return the tensor-parallel ranks of a job with fewer sequences than GPUs; 1 where the layout is stated."""
    gpus, batch = job.gpus or 1, job.global_batch
    if batch is None or batch >= gpus or any(getattr(job, name) is not None for name in REPLICA):
        return 1
    sizes = (size for size in (2, 4, 8) if gpus % size == 0 and gpus // size * (job.micro_batch or 1) <= batch)
    return next(sizes, 1)


def whole_batches(batch: int, dp: int, micro_batch: int) -> tuple[int, tuple[Uncounted, ...]]:
    """The batch as its ranks can share it out: the nearest whole number of micro-batches each, and what to say of it."""
    each = dp * micro_batch
    if each < 1 or batch < 1 or batch % each == 0:
        return batch, ()
    nearest = max(1, round(batch / each)) * each
    ranks = f"{dp:,} data-parallel ranks with micro-batches of {micro_batch}"
    return nearest, (Uncounted(f"a batch of {batch:,} sequences: {ranks} share out {nearest:,}", "global_batch"),)


def sequence_parallel(job: Job, model: ModelSpec, tp: int, fill: Any) -> bool:
    """Return whether activations are sharded between tensor-parallel regions too: experts need it, so there it is assumed."""
    if tp > 1 and model.has_experts and job.sequence_parallel is None:
        return bool(fill("sequence_parallel", True, "experts with tp above 1 need it"))
    return job.sequence_parallel or False


def full_batch(dp: int, micro_batch: int, stages: int) -> tuple[int, str]:
    """The batch where none is stated: of a pipeline one that keeps it full, as with a micro-batch each it would stand still."""
    batches = 1 if stages == 1 else FULL_PIPE * stages
    why = "dp x micro-batch" if stages == 1 else f"a full pipe: dp x micro-batch x {batches} micro-batches"
    return dp * micro_batch * batches, why


def schedule_of(job: Job, assumed: dict[str, str]) -> Any:
    """The schedule of a pipeline, as stated or as chunks have it. Raises `ConfigError` without a pipeline."""
    if job.schedule is not None:
        refuse((job.pp or 1) == 1, f"{job.schedule} is a pipeline schedule and needs pp above 1", key="schedule")
        return job.schedule
    name = "interleaved" if (job.pp or 1) > 1 and (job.vpp or 1) > 1 else "1f1b"
    assumed |= {"--schedule": name} if (job.pp or 1) > 1 else {}
    return name


def stage_layers(
    job: Job, model: ModelSpec, degrees: dict[str, int], assumed: dict[str, str]
) -> tuple[int, ...] | None:
    """The layers of each stage, where they are given or do not divide."""
    text, layers, pp = job.stage_layers, model.num_hidden_layers, degrees["pp"]
    parts = 2 if job.schedule in V_SHAPED else degrees["vpp"]
    if text is None and pp > 1 and layers % (pp * parts) and layers + 2 >= pp * parts:
        split = shared_out(layers, pp, parts, model.mtp_layers if (layers + 2) % (pp * parts) else 0)
        assumed["--stage-layers"] = f"{stage_words(split)} (embedding and loss each count as a layer)"
        return split
    return None if text is None else stage_counts(text)


def usual_line(job: Job, card: Gpu, machines: Cluster) -> str:
    """Return the remark on a network that no source states; empty where one does, or the job."""
    usual = usual_network(card)
    if job.nic_bandwidth or job.topology or usual is None or len(machines.links) < 2:
        return ""
    return f"{usual[0] * 8 / 1e9:g}Gbit/s ({usual[1]})"
