"""Formula, trace and measurement side by side, with every difference over one percent attributed to operations.

What the list of operations keeps and what autograd keeps are matched tensor by tensor: first alike sizes in the same
half of the same block, then sums (a view holds the storage of several), then alike sizes anywhere, then one tensor that is
the sum of others. What is left over on either side is the difference, to the byte.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base import ConfigError, NotModelled, lists, refuse
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.estimate.estimate import estimate
from loadgauge.core.estimate.memory.ledger import kept_by
from loadgauge.core.estimate.memory.phases import Phase
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.families.hf import from_dict
from loadgauge.core.layers import View, block_layer, embedding_layer, head_layer, rotary_layer
from loadgauge.core.layers.embedding_head import mask_bytes
from loadgauge.core.layers.operations.operations import NOTHING, Layer, Recompute
from loadgauge.pytorch.device.untraced import Hidden
from loadgauge.pytorch.measure.train_steps import MeasuredSteps, measure_steps
from loadgauge.pytorch.record.allocations import GRADIENTS, INPUTS, OPTIMIZER, TEMPORARIES, WEIGHTS, Stream, any_layer
from loadgauge.pytorch.record.observe import STEP
from loadgauge.pytorch.trace.child import requested
from loadgauge.pytorch.trace.programs.jobs import ConfigJob
from loadgauge.pytorch.trace.subprocess import Request
from loadgauge.pytorch.trace.torch_run import TorchRun
from loadgauge.pytorch.trace.trace import Recorded, record

STATES = {WEIGHTS: "weights", GRADIENTS: "gradients", OPTIMIZER: "optimizer"}
TOLERANCE = 0.01
HIDDEN = "hidden from tracers"


class Row(msgspec.Struct, frozen=True):
    """One quantity by formula, trace and measurement; None where a source does not have it. `unit`: bytes or FLOP."""

    quantity: str
    unit: str
    formula: float | None
    trace: float | None
    measured: float | None = None


class Cause(msgspec.Struct, frozen=True):
    """How much more (or, negative, less) one operation has in the second source than in the first [bytes or FLOP].

    where: the block or blocks; count: how many operations are summed
    """

    op: str
    where: str
    amount: int
    count: int = 1


class Difference(msgspec.Struct, frozen=True):
    """Two sources that differ by `amount`, second minus first; `causes` and `unexplained` add up to it. `share`: of the first."""

    quantity: str
    ways: tuple[str, str]
    amount: float
    share: float
    causes: tuple[Cause, ...]

    @property
    def unexplained(self) -> float:
        """The part of `amount` that no operation accounts for [the unit of the row]."""
        return self.amount - sum(cause.amount for cause in self.causes)


class Comparison(msgspec.Struct, frozen=True):
    """The table of quantities, and why its columns differ.

    measured_on: the device, or "" without a measurement; hidden: CUDA memory that no tracer sees, line by line
    """

    target: str
    device: str
    measured_on: str
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    not_counted: tuple[str, ...]
    real: MeasuredSteps | None = None
    hidden: tuple[Hidden, ...] = ()


def compare(job: ConfigJob, device: str = "cuda", measure: str = "", timed: int = 0) -> Comparison:
    """Compares the formula of a job with its trace as on `device`, and with two real steps on `measure` ("": none).

    `timed`: how many more real steps to time.

    Raises NotModelled where the formula does not cover the job.
    """
    formula = Formula(job.config, job.run, device)
    traced = record(job, device)
    taken = measure_steps(job, measure, timed) if measure else None
    rows, differences = [], []
    for row, causes, more in _rows(formula, traced, taken):
        rows.append(row)
        for ways, first, second, why in (
            (("formula", "trace"), row.formula, row.trace, causes),
            (("trace", "measured"), row.trace, row.measured, more),
        ):
            if first is None or second is None or abs(second - first) <= TOLERANCE * abs(first):
                continue
            explained = tuple(why()) if why else ()
            differences.append(
                Difference(row.quantity, ways, second - first, (second - first) / max(1, first), explained)
            )
    return Comparison(
        target=job.target,
        device=device,
        measured_on=taken.device if taken else "",
        rows=tuple(rows),
        differences=tuple(differences),
        not_counted=traced.trace.not_counted,
        real=taken,
        hidden=traced.trace.hidden,
    )


def compare_request(request: Request, measure: str = "", timed: int = 0) -> Comparison:
    """Compares the job of a request in this process; see `trace.subprocess.in_child`. Raises ConfigError for a script."""
    job = requested(request)
    if not isinstance(job, ConfigJob):
        raise ConfigError("formulas are known of models, not of scripts: `trace` and `measure` take those")
    return compare(job, request.device, measure, timed)


Causes = Callable[[], list[Cause]]


def _rows(formula: Formula, traced: Recorded, taken: MeasuredSteps | None) -> list[tuple[Row, Causes, Causes | None]]:
    trace, stream = traced.trace, traced.stream
    parts = formula.estimate.memory
    rows: list[tuple[Row, Causes, Causes | None]] = []
    states = {name: _highest(stream, name) for name in STATES}
    for category, part in STATES.items():
        predicted = max(moment.parts[part] for moment in parts.moments)
        row = Row(category, "bytes", predicted, states[category], taken.states.get(category) if taken else None)
        rows.append((row, list, None))
    listed, kept = formula.saved(), saved_lines(traced)
    row = Row("saved for backward", "bytes", sum(line.nbytes for line in listed), sum(line.nbytes for line in kept))
    rows.append((row, lambda: match(listed, kept), None))
    counted, by_module = formula.flops(), trace.flops.by_module
    done = [Line(*place_of(module), module, flops) for module, flops in by_module.items() if flops]
    row = Row(
        "FLOPs of a step",
        "FLOP",
        sum(line.nbytes for line in counted),
        sum(line.nbytes for line in done),
        None if taken is None else taken.flops,
    )
    rows.append((row, lambda: by_part(counted, done), None))
    for name, chosen in (("peak of forward and backward", False), ("peak of the optimizer step", True)):
        moments = [moment for moment in parts.moments if (moment.phase is Phase.STEP) == chosen]
        moment = max(moments, key=lambda moment: moment.total - moment.parts["outside"])
        event = _peak_of(stream, chosen)
        at = stream.moment(event)
        own = {part: moment.parts[part] for part in STATES.values()}
        rest = moment.total - moment.parts["outside"] - sum(own.values())
        measured = None if taken is None else taken.step_peak if chosen else taken.backward_peak
        row = Row(name, "bytes", moment.total - moment.parts["outside"], at.total, measured)
        causes = functools.partial(_at_peak, own, rest, stream, event)
        more = functools.partial(_measured_causes, stream, event, taken) if taken and not chosen else None
        rows.append((row, causes, more))
    predicted = max(moment.total - moment.parts["outside"] for moment in parts.moments)
    peak = Row("peak", "bytes", predicted, trace.peak.total, None if taken is None else taken.peak)
    largest = max(rows[-2:], key=lambda row: row[0].trace or 0)
    lower = int(predicted - (largest[0].formula or 0))

    def of_peak() -> list[Cause]:
        moved = [Cause(f"the formula's peak is not the {largest[0].quantity.removeprefix('peak of the ')}", "", -lower)]
        return [*(moved if lower else []), *largest[1]()]

    rows.append((peak, of_peak, largest[2]))
    if trace.hidden:
        outside = parts.moments[0].parts["outside"] - parts.idle  # a tracer hands out no idle block
        seen = [line for line in trace.hidden if line.where == "allocated"]
        row = Row(HIDDEN, "bytes", outside, sum(line.nbytes for line in trace.hidden))
        rows.append((row, lambda: [Cause(line.name, "", line.nbytes) for line in seen], None))
    return rows


# -- the trace, as lines -----------------------------------------------------------------------------------------------


def place_of(module: str) -> tuple[str, str]:
    """The block that a module belongs to, and which half of it.

    >>> place_of("model.layers.3.self_attn.q_proj"), place_of("model.layers.0.post_attention_layernorm")
    (('block 3', 'attention'), ('block 0', 'norm'))
    >>> place_of("lm_head")
    ('ends', 'head')
    """
    block = re.search(r"(?:^|\.)(\d+)(?:\.(.*))?$", re.sub(r"(\.\d+\..*?)\.\d+(?=\.|$)", r"\1", module))
    if block is None:
        if re.search(r"norm|ln_", module.rpartition(".")[2], re.IGNORECASE):
            return END, "norm"
        return END, "embedding" if re.search(r"emb|wte|wpe", module) else "head"
    rest = block[2] or ""
    last = rest.rpartition(".")[2]
    if re.search(r"norm|^ln_", last, re.IGNORECASE):
        return BLOCK.format(block[1]), "norm"
    return BLOCK.format(block[1]), "attention" if re.search(r"attn|attention|mixer|mamba", rest) else "mlp"


def saved_lines(traced: Recorded) -> list[Line]:
    """The storages that autograd keeps [bytes], inputs included, parameters not, each at the module that saved it first."""
    result, seen = [], set()
    for tensor in traced.trace.saved:
        if tensor.storage not in seen and tensor.owner in ("", "inputs"):
            seen.add(tensor.storage)
            inside = f" in {tensor.module}" if tensor.module else ""
            op = f"{tensor.node} keeps {tensor.field}{inside}"
            result.append(Line(*place_of(tensor.module), op, tensor.storage_nbytes))
    return result


# -- matching ----------------------------------------------------------------------------------------------------------


def match(listed: Sequence[Line], kept: Sequence[Line]) -> list[Cause]:
    """Matches two lists of sizes and returns what is on one side only; the amounts add up to the difference, to the byte.

    >>> a = [Line("block 0", "mlp", "up keeps x", 8), Line("block 0", "mlp", "down keeps y", 4)]
    >>> match(a, [Line("block 0", "mlp", "MmBackward0 keeps self", 8), Line("block 0", "mlp", "SiluBackward0", 6)])
    [Cause(op='SiluBackward0', where='block 0', amount=6, count=1), Cause(op='down keeps y', where='block 0', amount=-4, count=1)]
    """
    left, right = list(listed), list(kept)
    left, right = _alike(left, right, lambda line: (line.place, line.part, line.nbytes))
    left, right = _sums(left, right)
    left, right = _alike(left, right, lambda line: (line.place, line.nbytes))
    left, right = _alike(left, right, lambda line: line.nbytes)
    left, right = _made_of(left, right)
    right, left = _made_of(right, left)
    return _causes([*((line, 1) for line in right), *((line, -1) for line in left)])


def _alike(left: list[Line], right: list[Line], key: Callable[[Line], object]) -> tuple[list[Line], list[Line]]:
    """Both sides without what they share by `key`."""
    common = Counter(map(key, left)) & Counter(map(key, right))

    def rest(lines: list[Line]) -> list[Line]:
        taken = Counter(common)
        kept = []
        for line in lines:
            if taken[key(line)]:
                taken[key(line)] -= 1
            else:
                kept.append(line)
        return kept

    return rest(left), rest(right)


def _sums(left: list[Line], right: list[Line]) -> tuple[list[Line], list[Line]]:
    """Both sides without the halves of blocks that come to the same in all."""
    groups: dict[tuple[str, str], int] = defaultdict(int)
    for lines, sign in ((left, 1), (right, -1)):
        for line in lines:
            groups[line.place, line.part] += sign * line.nbytes
    open_ = {group for group, rest in groups.items() if rest}
    return [line for line in left if line[:2] in open_], [line for line in right if line[:2] in open_]


def _made_of(wholes: list[Line], pieces: list[Line]) -> tuple[list[Line], list[Line]]:
    """Both sides without the wholes that pieces add up to."""
    left = []
    for whole in sorted(wholes, key=lambda line: -line.nbytes):
        rest, chosen = whole.nbytes, []
        for piece in sorted(pieces, key=lambda line: -line.nbytes):
            if piece.nbytes <= rest:
                rest -= piece.nbytes
                chosen.append(piece)
        if rest or not chosen:
            left.append(whole)
        else:
            for piece in chosen:
                pieces.remove(piece)
    return left, pieces


def by_part(listed: Sequence[Line], done: Sequence[Line]) -> list[Cause]:
    """Differences of the sums over each half of a block, named by the operations that differ; similar blocks are merged."""
    left, right = _alike(list(listed), list(done), lambda line: (line.place, line.part, line.nbytes))
    sums: dict[tuple[str, str], int] = defaultdict(int)
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for lines, sign in ((left, -1), (right, 1)):
        for line in lines:
            sums[line[:2]] += sign * line.nbytes
            names[line[:2]] += [line.op] if sign < 0 or not names[line[:2]] else []
    return _causes(
        [
            (Line(layer, part, ", ".join(names[layer, part]), abs(rest)), 1 if rest > 0 else -1)
            for (layer, part), rest in sums.items()
            if rest
        ]
    )


def _causes(lines: Iterable[tuple[Line, int]]) -> list[Cause]:
    """Alike lines of all blocks together, largest first."""
    result = []
    for (op, sign), members in lists(((any_layer(line.op), sign), line) for line, sign in lines).items():
        places = list(dict.fromkeys(line.place for line in members))
        where = places[0] if len(places) == 1 else f"{places[0]} to {places[-1].removeprefix('block ')}"
        result.append(Cause(op, where, sign * sum(line.nbytes for line in members), len(members)))
    return sorted(result, key=lambda cause: -abs(cause.amount))


# -- peaks -------------------------------------------------------------------------------------------------------------


def _peak_of(stream: Stream, step: bool) -> int:
    """The event with most live bytes in (or outside) the optimizer's steps."""
    levels = stream.levels()
    phases = itertools.pairwise([*stream.phases, (len(levels), "")])
    # A phase begins with what it finds.
    inside = [
        range(max(0, first - 1), end)
        for (first, name), (end, _) in phases
        if (name == STEP) == step and first < len(levels)
    ]
    return max(itertools.chain(*inside), key=levels.__getitem__, default=0)


def _highest(stream: Stream, category: str) -> int:
    changes = zip(stream.ids, stream.changes, strict=True)
    own = (change for number, change in changes if stream.category(number) == category)
    return max(itertools.accumulate(own, initial=0))


def _at_peak(own: dict[str, float], rest: float, stream: Stream, event: int) -> list[Cause]:
    """States that one side has more of; beyond them, the operations whose temporaries and inputs the trace holds."""
    moment = stream.moment(event)
    causes = []
    for category, part in STATES.items():
        more = moment.categories.get(category, 0) - own[part]
        if more:
            causes.append(Cause(category, "model states", int(more)))
    others = [piece for piece in stream.pieces(event) if piece.category not in STATES]
    more = sum(piece.nbytes for piece in others) - rest
    # Of what is held at the moment, temporaries first: the rest is among `saved for backward`.
    for piece in sorted(others, key=lambda piece: (piece.category != TEMPORARIES, -piece.nbytes)):
        if more <= 0:
            break
        share = min(int(more), piece.nbytes)
        causes.append(Cause(f"{piece.op} ({piece.category})", piece.module, share, piece.count))
        more -= share
    if more < 0:
        causes.append(Cause("formula's moment holds more", moment.phase, int(more)))
    return _merged(causes)


def _merged(causes: list[Cause]) -> list[Cause]:
    result = [
        Cause(op, where, sum(line.amount for line in members), sum(line.count for line in members))
        for (op, where), members in lists(((cause.op, any_layer(cause.where)), cause) for cause in causes).items()
    ]
    return sorted(result, key=lambda cause: -abs(cause.amount))


def _measured_causes(stream: Stream, event: int, taken: MeasuredSteps) -> list[Cause]:
    """Allocations that only one of the two peaks has, where the measurement tells them."""
    if not taken.held:
        return []
    mine = []
    for piece in stream.pieces(event):
        if piece.category not in (WEIGHTS, INPUTS):
            name = f"{piece.op} ({piece.category}), traced"
            mine += [Line(*place_of(piece.module), name, piece.nbytes // piece.count)] * piece.count
    theirs = [Line(*place_of(block.module), f"{block.op}, measured", block.nbytes) for block in taken.held]
    return match(mine, theirs)


BLOCK, END = "block {}", "ends"


class Line(NamedTuple):
    """A tensor [bytes] or an operation [FLOP]. `place`: the block, or the ends of the model; `part`: the half of the block."""

    place: str
    part: str
    op: str
    nbytes: int


class Formula:
    """The estimate of a traced job, and its layers. Raises NotModelled for what has no formula.

    device: that it is traced as on. A CPU's fused attention takes float32 with fewer key heads than heads (source: pytorch 2.13,
    `native/transformers/attention.cpp`).
    """

    def __init__(self, config: Any, run: TorchRun, device: str = "cuda") -> None:
        refuse(run.keep, "selective checkpointing by a policy over operations of PyTorch has no formula", NotModelled)
        self.spec: ModelSpec = from_dict(config.to_dict())
        self.run, self.layout, self.training = run, run.layout, run.training
        if device == "cpu":
            kernels = msgspec.structs.replace(run.training.kernels, writes_groups=False)
            self.training = msgspec.structs.replace(run.training, kernels=kernels)
        self.policy = self.layout.recompute
        self.view = View.of(run.layout.seq_len, run.layout.micro_batch, kernels=self.training.kernels)

    @functools.cached_property
    def estimate(self) -> Estimate:
        """The estimate of the job. Raises NotModelled."""
        return estimate(self.spec, self.layout, self.training)

    def layers(self) -> Iterator[tuple[str, Layer, Recompute]]:
        """Every layer of the model in order, and the operations of it that are recomputed: (place, layer, operations)."""
        blocks = [block_layer(block, self.spec.hidden_size, self.view) for block in self.spec.blocks]
        again = [applied(self.policy, layer) if self.policy.mode != "none" else NOTHING for layer in blocks]
        yield END, embedding_layer(self.spec, self.view), NOTHING
        yield END, rotary_layer(self.spec, self.view), NOTHING
        for number, kind in enumerate(self.spec.pattern):
            yield BLOCK.format(number), blocks[kind], again[kind]
        yield END, head_layer(self.spec, self.view), NOTHING

    def saved(self) -> list[Line]:
        """The tensors kept for backward [bytes], each at the operation that keeps it first."""
        result = []
        for layer_index, layer, again in self.layers():
            for op, tensor in kept_by(layer, again):
                result.append(Line(layer_index, _part(op), f"{op} keeps {tensor.name}", int(tensor.nbytes)))
        masks = int(mask_bytes(self.spec, self.view)) if self.policy.mode == "full" else 0
        if masks:
            result.append(Line(END, "attention", "checkpoints keep the mask", masks))
        return result

    def flops(self) -> list[Line]:
        """FLOPs of a step by operation, recomputation included."""
        result = []
        for layer_index, layer, again in self.layers():
            for operation in layer:
                runs = 2 if operation.name in again else 1
                flops = operation.forward_flops * runs + operation.backward_flops + operation.rerun_flops
                if flops:
                    result.append(
                        Line(layer_index, _part(operation.name), operation.name, int(flops * self.run.accumulate))
                    )
        return result


def _part(operation: str) -> str:
    half, _, rest = operation.partition(".")
    return "norm" if rest.split(".")[0].endswith("norm") else half
