"""Two training steps on fake tensors, as PyTorch itself would run them: nothing is allocated and no GPU is needed."""

import itertools
from collections.abc import Mapping, Sequence, Set

import msgspec
import torch

from loadgauge.core.base import gib, lists
from loadgauge.core.base.by_key import largest_first
from loadgauge.pytorch.device.kernels import cuda_kernels
from loadgauge.pytorch.device.read import branches
from loadgauge.pytorch.device.simulated import TESTED
from loadgauge.pytorch.device.untraced import NOT_COUNTED, hidden
from loadgauge.pytorch.record.allocations import SAVED, Record, Stream, op_name
from loadgauge.pytorch.record.collectives import sum_by_kind
from loadgauge.pytorch.record.observe import FORWARD, STEP, Observer, kept_bytes
from loadgauge.pytorch.record.recording import STEPS, Recording, recording
from loadgauge.pytorch.trace.programs.training import Traceable
from loadgauge.pytorch.trace.result import Advice, Flops, Trace

MUCH_ELSEWHERE = 0.05
"""Share of the peak from which tensors of the CPU are mentioned."""
BLOCK = 512
"""Granularity of CUDA's allocator [bytes]."""


class Recorded(msgspec.Struct, frozen=True):
    """A trace, and the stream of allocations from which it was made."""

    trace: Trace
    stream: Stream


def trace(job: Traceable, device: str = "cuda", steps: int = STEPS, gpus: int | None = None, rank: int = 0) -> Trace:
    """Traces the training steps of a job as on `device` (cuda or cpu). See `record` for the stream of events.

    >>> import torch
    >>> from loadgauge.pytorch.trace.programs.jobs import of_module
    >>> result = trace(of_module(torch.nn.Linear(1024, 1024), torch.empty(64, 1024), optimizer="sgd"))
    >>> weights = 4 * (1024 * 1024 + 1024)
    >>> result.peak.categories["weights"] == result.peak.categories["gradients"] == weights
    True
    >>> result.flops.total == 2 * 2 * 64 * 1024 * 1024  # the input needs no gradient
    True
    """
    return record(job, device, steps, gpus, rank).trace


def record(
    job: Traceable,
    device: str = "cuda",
    steps: int = STEPS,
    gpus: int | None = None,
    rank: int = 0,
    stacks: bool = False,
) -> Recorded:
    """Trace with the stream of allocations that the allocator's simulation and the memory viewer read.

    gpus, rank: this process simulates `rank` of `gpus` ranks (FSDP, DDP, tensor, sequence and pipeline parallel code);
        None: there is no process group
    stacks: record the lines of the program with each allocation, for the memory viewer and for `why`
    """
    with recording(job, device, steps, gpus=gpus, rank=rank, stacks=stacks) as run:
        return _read(job, device, run)


def _read(job: Traceable, device: str, run: Recording) -> Recorded:
    observer, seconds, facts = run.observer, run.seconds, run.mode.facts.assumed
    read = {"values": ", ".join(run.mode.read.values), "branches": ", ".join(branches(run.mode.read.branches))}
    read |= {f"assumed at {line}": assumption for line, assumption in facts.items()}
    observer.finish()
    stream = observer.stream
    peak = stream.peak()
    live = list(stream.live(peak.event)) if stream.ids else []
    rounded = BLOCK if device == "cuda" else 1
    last = max(0, observer.steps - 1)
    sent = [call for call in observer.collectives if call.step == last]
    groups = len({call.ranks for call in sent if call.ranks > 1})
    result = Trace(
        target=job.target,
        device=device,
        torch=str(torch.__version__),
        steps=observer.steps,
        peak=peak,
        allocated=max(stream.levels(rounded), default=0),
        step_peaks=_step_peaks(stream, observer),
        phases=stream.by_phase(),
        at_peak=tuple(stream.pieces(peak.event)) if stream.ids else (),
        timeline=tuple(stream.timeline()),
        saved=tuple(observer.saved),
        saved_nbytes=kept_bytes(observer.saved),
        flops=_flops(observer, last),
        collectives=sum_by_kind(sent),
        attention=dict(cuda_kernels.ATTENTION),
        hidden=hidden(stream.records, groups) if device == "cuda" else (),
        advice=advise(stream, observer.kinds, live, observer.multiplied),
        assumed=job.assumed | {name: assumption for name, assumption in read.items() if assumption},
        not_counted=_not_counted(device, observer),
        events=len(stream.ids),
        seconds=seconds,
        elsewhere=observer.tracker.elsewhere[1],
    )
    return Recorded(result, stream)


def _step_peaks(stream: Stream, observer: Observer) -> tuple[int, ...]:
    """The highest live bytes in each step; a step ends with the optimizer's."""
    ends = [
        first
        for (first, name), (_, before) in zip(stream.phases[1:], stream.phases, strict=False)
        if before == STEP and name == FORWARD
    ]
    levels = [0, *stream.levels()]
    # From the level that the step before left.
    peaks = [max(levels[first : end + 1]) for first, end in itertools.pairwise((0, *ends, len(stream.ids)))]
    return tuple(peaks[: max(1, observer.steps)])


def _flops(observer: Observer, step: int) -> Flops:
    works = [work for work in observer.work if work.step == step]
    return Flops(
        total=sum(work.flops for work in works),
        by_phase=largest_first((work.phase, work.flops) for work in works),
        by_module=largest_first((work.module, work.flops) for work in works),
        by_op=largest_first((work.op, work.flops) for work in works),
        uncounted=dict(observer.uncounted),
    )


def _not_counted(device: str, observer: Observer) -> tuple[str, ...]:
    cuda, elsewhere = device == "cuda", observer.tracker.elsewhere[1]
    tested = torch.__version__.startswith(tuple(f"{release}." for release in TESTED))
    more = " (see the table of hidden memory)" if cuda else ""
    notes = {
        f"scratch that a kernel takes and gives back inside one operation{more}": True,
        "fragmentation: what the caching allocator reserves beyond what is allocated": cuda,
        f"tensors that were not put on cuda: {gib(elsewhere)} of CPU memory at most": (
            cuda and elsewhere > MUCH_ELSEWHERE * max(observer.stream.levels(), default=0)
        ),
        f"differences of PyTorch {torch.__version__}: private parts were tested with {', '.join(TESTED)}": not tested,
        f"later steps: {observer.steps} optimizer steps were seen, and its states come with the first": (
            observer.steps < STEPS
        ),
        NOT_COUNTED: any(work.op == "aten._cudnn_rnn" for work in observer.work),
        f"FLOPs of {', '.join(sorted(observer.uncounted))}: no formula is known": bool(observer.uncounted),
    }
    return tuple(note for note, holds in notes.items() if holds)


def advise(stream: Stream, classes: Mapping[str, str], live: Sequence[int], multiplied: Set[int]) -> tuple[Advice, ...]:
    """Finds operators that would save fewer activations, largest saving first.

    live: numbers of the storages that are live at the peak. `kinds`: class of each module; `multiplied`: storages
    that a multiplication keeps."""
    kept = [stream.records[number] for number in live if stream.category(number) == SAVED]
    norms = [record for record in kept if "rmsnorm" in classes.get(record.module, "").lower()]
    factors = (stream.records[number] for number in live if number in multiplied)
    gates = [record for record in factors if op_name(record.op) == "aten::silu"]
    losses = [record for record in kept if op_name(record.op) in ("aten::_log_softmax", "aten::log_softmax")]
    sigmoids = [record for record in kept if op_name(record.op) == "aten::sigmoid"]
    result = (
        _of_norms([norm for norm in norms if op_name(norm.op) != "external"]),
        _advice("swiglu", gates, "silu(gate), which is cheap to work out again"),
        _advice("linear_cross_entropy", losses, "log-softmax of all logits"),
        _advice("sigmoid_chain", sigmoids[:-1], "every output but the last"),
    )
    return tuple(sorted((advice for advice in result if advice is not None), key=lambda advice: -advice.saves))


def _advice(operator: str, records: Sequence[Record], why: str) -> Advice | None:
    saves = sum(record.nbytes for record in records)
    modules = tuple(dict.fromkeys(record.module for record in records))
    return Advice(operator, modules, saves, f"keeps no {why}") if saves else None


def _of_norms(records: Sequence[Record]) -> Advice | None:
    """A norm keeps its result for the next operation, and a number per row; a fused one keeps x besides, which a plain
    one does not where it keeps a wider copy of it."""
    groups = lists(
        ((record.module, record.phase), record) for record in records if record.shape and record.shape[-1] > 1
    )
    modules, saves = [], 0
    for (module, _), results in groups.items():
        *inner, result = results
        wider = any(record.nbytes > result.nbytes for record in inner)
        less = sum(record.nbytes for record in inner) - (result.nbytes if wider else 0)
        if less > 0:
            saves += less
            modules.append(module)
    names = tuple(dict.fromkeys(modules))
    return Advice("rms_norm", names, saves, "keeps no wide copy of x and no normalised x") if saves else None
