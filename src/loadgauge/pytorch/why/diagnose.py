"""Why memory ran out: what was held at the peak by purpose, and which change would give back the most of it.

A snapshot has stacks, a trace has categories; both become `Parts`. Each cause has what its remedy would free, and they
are ranked by that. What a remedy frees is a bound that the parts themselves give (of the k tensors that a layer keeps, a
checkpoint keeps one), not a measured figure: with a config at hand, the changes are estimated.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge.core.base import ConfigError, gib, refuse
from loadgauge.pytorch.record.allocations import CATEGORIES, GRADIENTS, OPTIMIZER, SAVED, WEIGHTS, any_layer
from loadgauge.pytorch.why.causes import PIECES
from loadgauge.pytorch.why.message import OutOfMemory
from loadgauge.pytorch.why.remedies import Replay
from loadgauge.pytorch.why.snapshot import (
    PYTORCH,
    Block,
    Snapshot,
    check_device,
    line_of,
    load,
    reading,
    replay,
    summary,
)

if TYPE_CHECKING:
    from loadgauge.pytorch.trace.result import Trace

CHUNKS = 8
"""In how many pieces a loss in chunks makes the logits, as `Kernels.loss_chunks`."""

GATHER = re.compile(r"all_gather|allgather|unshard|full_tensor|summon_full|foreach_reduce|/fsdp/|_fsdp_")
STEP = re.compile(r"torch/optim/|/optimizers?/|bitsandbytes/optim|_foreach_(sqrt|div|add)|_multi_tensor_|_fused_adam")
STATES = re.compile(r"^_init_group|^init_state|^_init_state|^state_init")
AGAIN = re.compile(r"^(recompute_fn|unpack_hook) ")
BACKWARD = re.compile(r"::apply|autograd::Engine|run_backward|AccumulateGrad")
LOSS = re.compile(
    r"^(\w*loss\w*|cross_entropy|log_softmax|lm_head) |LogSoftmax|NllLoss|loss_utils\.py|modules/loss\.py",
    re.IGNORECASE,
)
SCORES = re.compile(r"eager_attention|attention_math|(?<!log_)softmax \(|(?<!Log)SoftmaxBackward")
MAKING = re.compile(
    r"^(__init__|convert|from_pretrained|_from_config|from_config|_apply|load_state_dict|reset_parameters|to_empty) "
)
EVALUATION = re.compile(r"^(eval\w*|valid\w*|test|predict\w*|generate\w*|infer\w*) \(")
TRAINING = re.compile(r"^(train\w*|fit\w*) \(")
FORWARD = re.compile(r"^(forward|_call_impl|_wrapped_call_impl) (?!.*modules/loss\.py)")
CHECKPOINT = "torch/utils/checkpoint.py"
STATE_PARTS = {WEIGHTS: "weights", GRADIENTS: "gradients", OPTIMIZER: "optimizer"}


class Parts(msgspec.Struct, kw_only=True):
    """Memory held at the peak, by purpose [bytes].

    `kept`: activations of training forwards, one of them running or waiting for its backward, by the place that made
    each; `older`: those of forwards before it. `evaluated`: the same in a function that evaluates. `working`: what
    backward, the step of the optimizer or a recomputation holds. `gathers`: how many tensors are gathered.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    gathers: int = 0
    loss: int = 0
    scores: int = 0
    kept: Counter[tuple[str, ...]] = msgspec.field(default_factory=Counter)
    older: int = 0
    evaluated: int = 0
    working: int = 0
    other: int = 0
    checkpointed: bool = False
    failed: int = 0
    idle: int = 0
    free: int = 0

    def add(self, purpose: str, nbytes: int, frames: tuple[str, ...] = ()) -> None:
        """Adds bytes to a purpose (a field of this class); `place`: the stack of an activation."""
        if purpose == "kept":
            self.kept[frames] += nbytes
        else:
            setattr(self, purpose, getattr(self, purpose) + nbytes)
        self.gathers += purpose == "gathered"

    @property
    def activations(self) -> int:
        """Activations of the current forward, without loss and attention scores [bytes]."""
        return sum(self.kept.values())

    def table(self) -> dict[str, int]:
        """Bytes by name of the purpose, largest first, without zeros."""
        rows = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer states": self.optimizer,
            "gathered from other ranks": self.gathered,
            "logits and loss": self.loss,
            "attention scores": self.scores,
            "activations": self.activations,
            "activations of earlier steps": self.older,
            "activations of an evaluation": self.evaluated,
            "working set of backward and step": self.working,
            "other": self.other,
        }
        return dict(sorted(((name, size) for name, size in rows.items() if size), key=lambda row: -row[1]))


class Cause(msgspec.Struct, frozen=True):
    """A cause, what it holds, what its remedy would free at most [bytes], and the evidence.

    `scale`: what remains of each purpose under the remedy. `leaves`: the peak of the same events with the remedy, replayed
    through a simulated allocator up to the failure [bytes]; `fits`: whether all of them were then served; None where there
    are no events, or no failure.
    """

    name: str
    nbytes: int
    frees: int
    evidence: str
    remedy: str
    scale: dict[str, float] = {}
    leaves: int | None = None
    fits: bool | None = None


class Findings(msgspec.Struct, frozen=True):
    """The causes, the most likely first, and the bytes held by purpose."""

    causes: tuple[Cause, ...]
    parts: dict[str, int]


def causes(parts: Parts) -> tuple[Cause, ...]:
    """The causes that the parts show, largest saving first.

    >>> ranked = causes(Parts(weights=10, optimizer=80, loss=20))
    >>> [(one.name, one.frees) for one in ranked[:2]]
    [('optimizer states', 60), ('logits and loss', 17)]
    """
    result = [*_structural(parts), *_plain(parts)]
    return tuple(sorted((cause for cause in result if cause.frees > 0), key=lambda cause: -cause.frees))


def _structural(parts: Parts) -> Iterable[Cause]:
    """Yield what is wrong with the program rather than large."""
    live = sum(parts.table().values())
    held = max(0, live - parts.failed)
    if OutOfMemory(tried=parts.failed, allocated=held, idle=parts.idle, free=parts.free).cause == PIECES:
        yield Cause(
            "fragmentation",
            parts.idle,
            max(parts.idle, live),
            f"{gib(parts.failed)} did not fit, while {gib(parts.idle)} lay idle in pieces",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
    if parts.older:
        yield Cause(
            "graphs of earlier steps are kept",
            parts.older,
            parts.older,
            f"{gib(parts.older)} are activations of forwards before the last one",
            "keep loss.item() or loss.detach() of a step, not the loss; no retain_graph=True",
            {"older": 0.0},
        )
    if parts.evaluated:
        yield Cause(
            "evaluation without torch.no_grad",
            parts.evaluated,
            parts.evaluated,
            f"{gib(parts.evaluated)} that a forward in an evaluation made are still held",
            "put the evaluation under torch.no_grad() or torch.inference_mode()",
            {"evaluated": 0.0},
        )
    if parts.gathered:
        share = 1 / max(2, parts.gathers)
        yield Cause(
            "weights gathered unsharded",
            parts.gathered,
            parts.gathered - int(parts.gathered * share),
            f"{gib(parts.gathered)} were gathered from other ranks and held at once",
            "shard layer by layer (fully_shard each block), and let go after forward (reshard_after_forward)",
            {"gathered": share},
        )


def _plain(parts: Parts) -> Iterable[Cause]:
    """Yield what is large."""
    yield Cause(
        "logits and loss",
        parts.loss,
        parts.loss * (CHUNKS - 1) // CHUNKS,
        f"{gib(parts.loss)} are logits, their copies and gradients",
        "make the loss in chunks (--loss chunked)",
        {"loss": 1 / CHUNKS},
    )
    ratio = parts.optimizer / parts.weights if parts.weights else 0
    yield Cause(
        "optimizer states",
        parts.optimizer,
        parts.optimizer * 3 // 4,
        f"{gib(parts.optimizer)} are states of the optimizer" + (f", {ratio:.1f} times the weights" if ratio else ""),
        "8-bit states, sharding (ZeRO, FSDP), or offloading; 4 bytes a moment are float32",
        {"optimizer": 0.25},
    )
    yield Cause(
        "attention scores",
        parts.scores,
        parts.scores,
        f"{gib(parts.scores)} grow with the square of the length",
        "fused attention (sdpa, FlashAttention)",
        {"scores": 0.0},
    )
    activations = parts.activations
    per_layer = _kept_per_layer(parts.kept)
    if activations and not parts.checkpointed and per_layer > 1:
        yield Cause(
            "activations, without checkpointing",
            activations,
            activations - activations // per_layer,
            f"{gib(activations)} are activations: {per_layer} tensors of each layer",
            "checkpoint the layers",
            {"kept": 1 / per_layer},
        )
    tokens = activations + parts.loss + parts.scores + parts.working
    yield Cause(
        "too many tokens at once",
        tokens,
        tokens // 2 if activations else 0,
        f"{gib(tokens)} grow with the length of the sequence times the micro-batch"
        + (", and layers are checkpointed already" if parts.checkpointed else ""),
        "half as many: shorter sequences, a smaller micro-batch, or context parallelism",
        {"kept": 0.5, "loss": 0.5, "scores": 0.5, "working": 0.5},
    )
    yield Cause(
        "weights",
        parts.weights + parts.gradients,
        (parts.weights + parts.gradients) // 2,
        f"{gib(parts.weights + parts.gradients)} are weights and gradients",
        "shard them over two GPUs, or train adapters",
        {"weights": 0.5, "gradients": 0.5},
    )


def _kept_per_layer(kept: Counter[tuple[str, ...]]) -> int:
    """How many places hold about as much as the one that holds most: what a layer keeps, over all layers."""
    highest = max(kept.values(), default=0)
    return sum(1 for nbytes in kept.values() if 8 * nbytes >= highest)


# -- snapshots ---------------------------------------------------------------------------------------------------------


def of_file(path: Path, device: int = 0) -> tuple[Snapshot, Findings]:
    """Read a snapshot file and return it with the causes on one device, by index. Raises ConfigError for what is no snapshot.

    Nothing in the file is run.
    """
    content = load(path)
    with reading(path):
        check_device(content, device)
        return summary(content, device), of_snapshot(content, device)


def of_snapshot(content: Mapping[str, Any], device: int = 0) -> Findings:
    """The causes that a snapshot shows (see `snapshot.load`), each with the peak that its remedy would have left [bytes]."""
    events, _, _, at_peak = replay(content, device, failure=True)
    totals = summary(content, device)
    live = list(at_peak)
    failures = [(number, event) for number, event in enumerate(events) if event["action"] == "oom"]
    if failures:  # what did not fit belongs to what was needed
        number, event = failures[-1]
        live.append(Block(event["size"], event.get("frames") or [], number))
    passes = _passes(events)
    parts = Parts(failed=totals.failed, idle=totals.idle, free=totals.free)
    parts.checkpointed = any(CHECKPOINT in frame["filename"] for event in events for frame in event.get("frames") or ())
    last = max((passes[block.event] for block in live if block.event >= 0), default=0)
    recorded = any(block.frames for block in live)
    purposes: dict[int, str] = {}
    for block in live:
        purpose = purpose_of(block, last - passes[block.event] if block.event >= 0 else 0, recorded)
        parts.add(purpose, block.nbytes, tuple(line_of(frame) for frame in (block.frames or [])[:6]))
        if block.event >= 0:
            purposes[block.event] = purpose
    result = causes(parts)
    if events:
        again = Replay(content, device, lambda block: purpose_of(block, 0, recorded), purposes)
        peaks = [again.peak(cause.scale, expandable=not cause.scale) for cause in result]
        result = tuple(
            msgspec.structs.replace(cause, leaves=leaves, fits=fits)
            for cause, (leaves, fits) in zip(result, peaks, strict=True)
        )
    return Findings(result, parts.table())


def _passes(events: Sequence[Any]) -> list[int]:
    """Of each event, how many forwards came before: one begins after every backward or step."""
    result, count, forward = [], 0, True
    for event in events:
        if event["action"] == "alloc":
            kind = _kind([line_of(frame) for frame in event.get("frames") or ()])
            if kind in ("backward", "step") and forward:
                forward = False
            elif kind == "forward" and not forward:
                count, forward = count + 1, True
        result.append(count)
    return result


def _kind(lines: Sequence[str]) -> str:
    if any(STEP.search(line) for line in lines):
        return "step"
    if any(BACKWARD.search(line) or AGAIN.search(line) for line in lines):
        return "backward"
    return "forward" if any(FORWARD.search(line) for line in lines) else "other"


def purpose_of(block: Block, age: int, recorded: bool) -> str:
    """Return what a block is for: a field of `Parts`. `age`: how many forwards have begun since; `recorded`: whether the
    snapshot knows stacks."""
    if block.frames is None:
        return "weights"
    lines = [line_of(frame) for frame in block.frames]
    category = next((name for name in CATEGORIES for line in lines if line.startswith(f"{name} (loadgauge")), "")
    kind = _kind(lines)

    def says(pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(line) for line in lines)

    def inside(pattern: re.Pattern[str]) -> bool:
        """Within the innermost module: a loss may be what calls the whole model."""
        return any(pattern.search(line) for line in itertools.takewhile(lambda line: not FORWARD.search(line), lines))

    if says(GATHER):
        return "gathered"
    if category in STATE_PARTS:
        return STATE_PARTS[category]
    if kind == "step":
        return "optimizer" if says(STATES) else "working"
    if kind == "backward" or (recorded and not lines):
        # A recomputation is what a backward works on; the rest are gradients.
        return "loss" if inside(LOSS) else "working" if says(AGAIN) else "gradients"
    if _evaluates(lines):
        return "evaluated"
    if says(MAKING) and not says(FORWARD):
        return "weights"
    if age and (kind == "forward" or inside(LOSS)):
        return "older"
    if inside(LOSS):
        return "loss"
    if inside(SCORES):
        return "scores"
    return "kept" if kind == "forward" or category == SAVED else "other"


def _evaluates(lines: Sequence[str]) -> bool:
    """Return whether the innermost of the program's functions that is named after training or evaluation evaluates."""
    named = (line for line in lines if not PYTORCH.search(line) and (EVALUATION.search(line) or TRAINING.search(line)))
    return bool(EVALUATION.search(next(named, "")))


# -- traces ------------------------------------------------------------------------------------------------------------


def read_trace(text: str, path: Path) -> Trace:
    """Reads what `loadgauge trace --json` has written. Raises ConfigError for what is no trace, or has bytes that cannot be."""
    from loadgauge.pytorch.trace.result import Trace

    try:
        trace = msgspec.json.decode(text, type=Trace)
    except msgspec.DecodeError as error:
        raise ConfigError(f"is no trace: {error}", file=str(path)) from None
    sizes = [trace.allocated, trace.peak.total, trace.saved_nbytes, *trace.peak.categories.values()]
    sizes += [piece.nbytes for piece in trace.at_peak]
    wrong = next((size for size in sizes if size < 0), None)
    if wrong is not None:
        raise ConfigError(f"is no trace: {wrong:,} bytes", file=str(path))
    refuse(not trace.allocated, "is a trace in which nothing was allocated", file=str(path))
    return trace


def of_trace(trace: Trace) -> Findings:
    """The causes that a trace shows, from its categories, modules and operations."""
    parts = Parts()
    parts.checkpointed = any(tensor.node == "checkpoint" for tensor in trace.saved)
    trained = trace.flops.by_phase.get("backward", 0) > 0
    largest: Counter[tuple[str, ...]] = Counter()
    for piece in trace.at_peak:
        if GATHER.search(piece.op):
            parts.gathered += piece.nbytes
            parts.gathers += piece.count
        elif piece.category in STATE_PARTS:
            parts.add(STATE_PARTS[piece.category], piece.nbytes)
        elif not trained and piece.category == SAVED:
            parts.evaluated += piece.nbytes
        elif re.search(r"log_softmax|nll_loss|cross_entropy", piece.op) or piece.module.endswith("lm_head"):
            parts.loss += piece.nbytes
        elif piece.op.endswith("softmax") or (len(piece.shape) == 4 and piece.shape[-1] == piece.shape[-2] > 512):
            parts.scores += piece.nbytes
        elif piece.category == SAVED:
            module = any_layer(piece.module)
            largest[piece.op, module, "x".join(map(str, piece.shape))] += piece.nbytes
        else:
            parts.working += piece.nbytes
    parts.kept = largest
    beyond = _older(trace, parts)
    if trace.peak.phase == "forward" and not any(
        moment.phase == "backward" for moment in trace.timeline if moment.event > trace.peak.event
    ):
        parts.evaluated += beyond
    else:
        parts.older = beyond
    return Findings(causes(parts), parts.table())


def _older(trace: Trace, parts: Parts) -> int:
    """Of the activations at the peak, what the graph of the last step does not keep: more than one graph is there."""
    saved = trace.peak.categories.get(SAVED, 0)
    beyond = saved - trace.saved_nbytes
    if not trace.saved_nbytes or beyond < trace.saved_nbytes // 2 or parts.evaluated:
        return 0
    of_layers = min(beyond, parts.activations)
    share = of_layers / max(1, parts.activations)
    for frames in parts.kept:
        parts.kept[frames] = round(parts.kept[frames] * (1 - share))
    of_loss = min(beyond - of_layers, parts.loss)
    parts.loss -= of_loss
    return of_layers + of_loss
