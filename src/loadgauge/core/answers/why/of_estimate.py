"""Why FLOPs, time, traffic, money and the verdict are what they are: formulas, the run's numbers put in, results, sources.

Every value is the one the estimate keeps (`Workings`); a formula is shown only where the numbers in it give that value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from loadgauge.core.answers.figures.lanes import kind_of as bound_by
from loadgauge.core.answers.why.of_memory import memory_line
from loadgauge.core.answers.why.of_needs import algorithms
from loadgauge.core.answers.why.reason import Reason, line, summed
from loadgauge.core.base import ConfigError, NotStated, Size, refuse
from loadgauge.core.base.sources import cite
from loadgauge.core.definitions.hardware.calibration import of_cluster
from loadgauge.core.definitions.layout.axes import COMMUNICATION
from loadgauge.core.definitions.training.software import bounds, kind_of
from loadgauge.core.estimate.explain import closed_form
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.symbols import letter, symbolic_block, symbolic_ends, symbolic_view
from loadgauge.core.estimate.time.collectives import Fabric, bus_factor
from loadgauge.core.estimate.time.cost import DAY, Budget
from loadgauge.core.estimate.time.flops import on_one_rank
from loadgauge.core.estimate.time.roofline import grouped_parts, in_eight_bits, product_parts
from loadgauge.core.estimate.time.step import LANES, Time
from loadgauge.core.estimate.workings import TimedOperation
from loadgauge.core.layers import block_layer, head_layer

if TYPE_CHECKING:
    from loadgauge.core.estimate.result import Estimate

KINDS = ("matmul", "attention", "memory-bound")
"""Operations by what bounds them: matrix products, fused attention, and all that only reads and writes."""
OF_LANES = {(f"{lane}-time" if lane in PARTS else lane): lane for lane in LANES[:-1]}
"""Lanes of the time by what they are asked for: those that are also a part of the memory have a name of their own."""
TOPICS: tuple[str, ...] = ("flops", "time", "mfu", "network", "money", "energy", "verdict", *OF_LANES, *KINDS)
"""What can be explained beside the parts of the memory: totals, lanes of the time, and kinds of operations."""
ROWS = 12


def reason(result: Estimate, topic: str, budget: Budget | None = None) -> Reason:
    """Explain one of `TOPICS`. budget: of the whole run, for `money`

    Raises `ConfigError` for another topic or one that this run has nothing of, `NotStated` where it has no time.

    >>> from loadgauge import Layout, estimate
    >>> found = reason(estimate("gpt2", Layout(seq_len=1024)), "flops")
    >>> found.value == estimate("gpt2", Layout(seq_len=1024)).flops.hardware
    True
    """
    refuse(topic not in TOPICS, f"unknown part {topic!r} (known: {', '.join(TOPICS)})", key="explain")
    if topic == "flops":
        return _flops(result)
    if topic == "verdict":
        return _verdict(result)
    if result.time is None:
        raise NotStated(f"--explain {topic} is of the time: {result.untimed}")
    if topic in ("money", "energy"):
        if budget is None:
            raise ConfigError(f"{topic} needs --tokens, the length of the whole run", key="explain")
        return _money(result.time, budget, topic)
    if topic in KINDS:
        return _kind(result, result.time, topic)
    if topic in ("time", "mfu"):
        return _time(result, result.time, topic)
    lanes = [lane for lane in COMMUNICATION if result.time.parts.get(lane)]
    lane = OF_LANES.get(topic, "")
    # What replicas send has one of two names: gradients reduced whole, or sharded.
    if lane in ("dp", "zero") and not result.time.parts.get(lane):
        lane = topic = "zero" if lane == "dp" else "dp"
    if lane and not result.time.parts.get(lane):
        raise ConfigError(
            f"this run has no {topic} in its time (it has {', '.join(_lanes(result.time))})", key="explain"
        )
    if not lane or lane in COMMUNICATION:
        return _network(result, result.time, [lane] if lane else lanes, topic)
    own = {"bubble": _bubble, "host": _host, "optimizer": _optimizer}
    return own[lane](result, result.time) if lane in own else _computed(result, result.time, lane)


# -- FLOPs ------------------------------------------------------------------------------------------------------------


def _flops(result: Estimate) -> Reason:
    flops, layout, work = result.flops, result.layout, result.workings
    view = on_one_rank(work.view)
    passes = layout.num_microbatches * layout.dp
    legend: dict[str, tuple[str, Size]] = {
        "m": ("micro-batches of a step on each replica", layout.num_microbatches),
        "d": ("replicas (dp)", layout.dp),
        "F_f": ("FLOPs of the forward of a micro-batch", flops.forward / passes),
        "F_b": ("of its backward", flops.backward / passes),
        "F_r": ("of what runs again in backward", flops.recompute / passes),
    }
    lines = [
        line("model FLOPs of a step", "m*d*(F_f + F_b)", flops.model, "FLOP", legend),
        line("hardware FLOPs of a step", "m*d*(F_f + F_b + F_r)", flops.hardware, "FLOP", legend),
    ]
    letters = symbolic_view(view, ragged=layout.tokens is not None, captured=result.model.own.states_splits)
    for kind, (block, count) in enumerate(zip(result.model.blocks, result.model.layer_counts(), strict=True)):
        named = symbolic_block(block, int(result.model.hidden_size))
        layer = block_layer(block, result.model.hidden_size, view)
        written = block_layer(named.what, letter("h"), letters.what)
        which = f"{count} layers" if len(result.model.blocks) == 1 else f"each of {count} layers of kind {kind}"
        for way in ("forward", "backward"):
            form = closed_form(
                f"FLOPs of the {way} of one of {which}, one micro-batch",
                getattr(written, f"{way}_flops"),
                named.numbers | letters.numbers,
                getattr(layer, f"{way}_flops"),
            )
            lines.append(memory_line(form, "FLOP"))
    ends = symbolic_ends(result.model)
    head = closed_form(
        "FLOPs of the forward of the head",
        head_layer(ends.what, letters.what).forward_flops,
        ends.numbers | letters.numbers,
        head_layer(result.model, view).forward_flops,
    )
    lines.append(memory_line(head, "FLOP"))
    if result.time is not None:
        tokens = result.time.tokens
        ratio = {
            "F": ("hardware FLOPs of a step", flops.hardware),
            "P": ("active parameters", result.active_params),
            "T": ("tokens of a step", tokens),
        }
        lines.append(
            line(
                "FLOPs a parameter and token",
                "F/(P*T)",
                flops.hardware / (result.active_params * tokens),
                "FLOP",
                ratio,
            )
        )
    return Reason(
        topic="flops",
        what="hardware FLOPs of a step, over all GPUs",
        value=float(flops.hardware),
        unit="FLOP",
        basis=result.basis["flops"],
        rule="a multiply-add is 2 FLOPs; attention counts every query-key pair, causal or not",
        lines=tuple(lines),
        sources=(str(cite("narayanan2021")), str(cite("korthikanti2022"))),
        see=("operation by operation: --table flops",),
    )


# -- time -------------------------------------------------------------------------------------------------------------


def _time(result: Estimate, time: Time, topic: str) -> Reason:
    machine = result.workings.step.machine
    form_kind = kind_of(
        stack=result.training.framework.stack, experts=result.model.has_experts, tuning=result.training.tuning
    )
    format_ = "TF32" if time.peak_flops > machine.peak else machine.format
    base = f"{format_} peak of a GPU{'' if machine.low is None else f', also for products in {machine.low.format}'} [FLOP/s]"
    low, high = bounds(form_kind, tables=result.workings.efficiencies.basis == "measured", own_run=time.scale != 1.0)
    legend: dict[str, tuple[str, Size]] = {
        "t": ("seconds of a step", time.step),
        "T": ("tokens of a step", time.tokens),
        "n": ("GPUs", time.gpus),
        "F": ("model FLOPs of a step", time.model_flops),
        "H": ("hardware FLOPs of a step", time.hardware_flops),
        "X": (base, time.peak_flops),
        "r_l": ("lower factor of the range", low),
        "r_h": ("upper factor", high),
        "t_l": ("seconds of a step with all communication hidden", time.low / low),
        "t_h": ("seconds of a step with none hidden", time.high / high),
    }
    fast = "t" if math.isclose(time.low / low, time.step) else "t_l"
    slow = "t" if math.isclose(time.high / high, time.step) else "t_h"
    use = (
        line("MFU", "F/(t*n*X)", time.mfu, "share", legend),
        line("HFU", "H/(t*n*X)", time.hfu, "share", legend),
    )
    sources = (str(cite("chowdhery2022")), str(cite("korthikanti2022")))
    if topic == "mfu":
        return Reason(
            topic=topic,
            what="model FLOPs utilisation",
            value=time.mfu,
            unit="share",
            basis=result.basis["time"],
            rule="model FLOPs of a step over what the GPUs could do in its time",
            lines=use,
            sources=sources,
        )
    lines = (
        summed("seconds of a step", time.parts, time.step, "s"),
        line("lower end of the range", f"{fast}*r_l", time.low, "s", legend),
        line("upper end of the range", f"{slow}*r_h", time.high, "s", legend),
        line("tokens/s of a GPU", "T/(t*n)", time.tokens_per_second_per_gpu, "tokens/s", legend),
        *use,
    )
    return Reason(
        topic=topic,
        what="seconds of a step",
        value=time.step,
        unit="s",
        basis=result.basis["time"],
        rule="the lanes of the slowest pipeline stage add up; communication counts by its exposed part",
        lines=lines,
        sources=sources,
        see=(f"each lane by its name: --explain {' or '.join(_lanes(time))}",),
    )


def _lanes(time: Time) -> list[str]:
    return [topic for topic, lane in OF_LANES.items() if time.parts.get(lane)]


def _moved(time: Time) -> str:
    """How much longer kernels and hosts take than is predicted, by a run of the user's; empty without one."""
    return "" if time.scale == 1 else f" (a run of yours took {time.scale:.3f} x what is predicted)"


def _computed(result: Estimate, time: Time, lane: str) -> Reason:
    """Forward, backward, recomputation, or embedding and head."""
    work, passes = result.workings, result.workings.passes
    ends = ("embedding", "head")

    def part(operation: TimedOperation) -> Size:
        if (operation.layer in ends) != (lane == "loss"):
            return 0
        if lane == "loss":
            return operation.each
        if lane == "recompute":
            return operation.times * operation.seconds.forward if operation.again else 0
        return operation.times * getattr(operation.seconds, lane)

    timed = [(operation, part(operation)) for operation in work.operations]
    each = sum(seconds for _, seconds in timed)
    legend = {
        "m": ("micro-batches of a step on the stage", passes),
        "t": (f"seconds of its operations in one{_moved(time)}", each),
    }
    rows = sorted(((operation, seconds) for operation, seconds in timed if seconds), key=lambda pair: -pair[1])
    return Reason(
        topic=lane,
        what=f"seconds of {lane}",
        value=time.parts[lane],
        unit="s",
        basis=result.basis["time"],
        rule="the seconds of its operations, one after the other, on the slowest stage",
        lines=(line(f"seconds of {lane}", "m*t", time.parts[lane], "s", legend),),
        columns=("operation", "times", "seconds in a step", "share"),
        rows=tuple(
            (
                f"{operation.layer}: {operation.operation.name}",
                float(operation.times),
                float(passes * seconds),
                seconds / each,
            )
            for operation, seconds in rows[:ROWS]
        ),
        see=("how one takes its time: --explain matmul, attention or memory-bound",),
        sources=_kernels(result),
    )


def _kernels(result: Estimate) -> tuple[str, ...]:
    efficiencies = result.workings.efficiencies
    named = sorted({source for figure in efficiencies.figures.values() for source in figure.sources})
    return (
        (f"measured kernels: {', '.join(named)}",)
        if named
        else (f"kernels: {efficiencies.basis} {efficiencies.how}".strip(),)
    )


def _kind(result: Estimate, time: Time, kind: str) -> Reason:
    """Operations that are bound alike, with what the roofline says of the largest."""
    work, passes, machine = result.workings, result.workings.passes, result.workings.step.machine

    bound = sorted(
        (timed for timed in work.operations if bound_by(timed) == kind and timed.each), key=lambda timed: -timed.each
    )
    refuse(not bound, f"this run has no {kind} operations", key="explain")
    each = sum(timed.each for timed in bound)
    legend = {
        "m": ("micro-batches of a step on the stage", passes),
        "t": (f"seconds of these operations in one{_moved(time)}", each),
    }
    total = passes * each
    lines = [line(f"seconds of {kind} in a step", "m*t", total, "s", legend)]
    first = bound[0].operation
    if kind == "matmul" and first.weights:
        gemm = first.gemms[0]
        few_bits = in_eight_bits(first) and machine.low is not None
        if any(weight.expert for weight in first.weights):
            computing, moving, launch = grouped_parts(gemm, machine, fp8=few_bits)
        else:
            computing, moving = product_parts(gemm, machine, fp8=few_bits)
            launch = machine.launch
        sizes: dict[str, tuple[str, Size]] = {
            "m": ("rows", gemm.m),
            "k": ("inner width", gemm.k),
            "n": ("columns", gemm.n),
            "g": ("products", gemm.batch),
            "t_x": ("seconds of its FLOPs at the rate that tiles of this size reach", computing),
            "t_w": ("seconds of its bytes at the achieved bandwidth", moving),
            "l": ("launch", launch),
        }
        both = (computing**3 + moving**3) ** (1 / 3) + launch
        format, peak = machine.format, machine.peak
        if few_bits and machine.low is not None and machine.fp8_peak is not None:
            format, peak = machine.low.format, machine.fp8_peak
        lines += [
            line(f"FLOPs of the largest, {first.name}, forward", "2*m*k*n*g", gemm.flops, "FLOP", sizes),
            line("seconds of it", "(t_x**3 + t_w**3)**(1/3) + l", both, "s", sizes),
            line(
                "share of the peak that it reaches",
                "F/(t*X)",
                gemm.flops / (both * peak),
                "share",
                {"F": ("its FLOPs", gemm.flops), "t": ("its seconds", both), "X": (f"{format} peak [FLOP/s]", peak)},
            ),
        ]
    return Reason(
        topic=kind,
        what=f"seconds of {kind} in a step",
        value=float(total),
        unit="s",
        basis=result.basis["time"],
        rule="t = (arithmetic^3 + traffic^3)^(1/3) + launch, each at what measured kernels achieve",
        lines=tuple(lines),
        columns=("operation", "times", "seconds in a step", "FLOPs of one forward", "bytes of one forward"),
        rows=tuple(
            (
                f"{timed.layer}: {timed.operation.name}",
                float(timed.times),
                float(passes * timed.each),
                float(timed.operation.forward_flops),
                float(timed.operation.hbm_bytes()),
            )
            for timed in bound[:ROWS]
        ),
        sources=_kernels(result),
    )


def _network(result: Estimate, time: Time, lanes: list[str], topic: str) -> Reason:
    """Return what one axis sends, or all; what of it is exposed."""
    rows = [row for row in result.network if row.lane in lanes]
    shown = sum(time.parts[lane] for lane in lanes)
    lines = []
    if topic == "network":
        lines.append(summed("exposed seconds of a step", {lane: time.parts[lane] for lane in lanes}, shown, "s"))
    for row in rows:
        legend: dict[str, tuple[str, Size]] = {
            "n": ("ranks", row.ranks),
            "V": ("bytes of the whole tensor", row.payload),
            "c": ("calls of a step", row.calls_per_step),
            "w": ("bytes that one sends in a call", row.wire),
        }
        name = f"{row.axis}, {row.what}: {str(row.collective).replace('_', '-')}"
        passes = bus_factor(row.collective, row.ranks)
        letters = {"all_reduce": "2*(n - 1)/n*V", "send_recv": "V"}.get(row.collective, "(n - 1)/n*V")
        if passes and topic != "network":
            lines.append(line(f"bytes sent in a call ({name})", letters, row.wire, "byte", legend))
        lines.append(line(f"bytes sent in a step ({name})", "c*w", row.sent, "byte", legend))
        if topic != "network":
            pace = {"s": ("bytes sent in a step", row.sent), "t": ("seconds of all calls", row.seconds)}
            if row.seconds:
                lines.append(line(f"bandwidth reached ({name})", "s/t", row.sent / row.seconds, "byte/s", pace))
    links = ", ".join(sorted({f"{row.axis} {row.link}" for row in rows}))
    fabric = None if result.cluster is None else Fabric.of(result.cluster, of_cluster(result.cluster))
    taken = () if fabric is None else algorithms(rows, result.layout, fabric)
    return Reason(
        topic=topic,
        what=f"exposed seconds of {topic} in a step",
        value=float(shown),
        unit="s",
        basis=result.basis["network"],
        rule="bytes over what the link achieves, and latency; hidden parts of overlapped communication do not count",
        lines=tuple(lines),
        columns=("collective", "calls", "bytes sent", "seconds", "exposed"),
        rows=tuple(
            (
                f"{row.axis} {row.what}, {row.collective}",
                float(row.calls_per_step),
                float(row.sent),
                float(row.seconds),
                float(row.exposed_seconds),
            )
            for row in rows
        ),
        notes=(f"slowest link: {links}", *taken),
        see=("what the links would have to be: loadgauge network --explain",),
        sources=(str(cite("narayanan2021")), str(cite("nccl-tests"))),
    )


def _host(result: Estimate, time: Time) -> Reason:
    work, passes = result.workings, result.workings.passes
    waiting = [(name, times, waits) for name, times, waits in work.waits if waits]
    each = sum(times * waits for _, times, waits in waiting)
    legend = {
        "m": ("micro-batches of a step on the stage", passes),
        "t": (f"seconds that the layers wait in one{_moved(time)}", each),
    }
    return Reason(
        topic="host",
        what="seconds that the GPU waits for its host",
        value=time.parts["host"],
        unit="s",
        basis=result.basis["time"],
        rule="a layer's launches at the host's seconds for each, beyond what the GPU computes of the layer meanwhile",
        lines=(line("seconds of waiting for the host", "m*t", time.parts["host"], "s", legend),),
        columns=("layer", "times", "seconds in a step"),
        rows=tuple((name, float(times), float(passes * times * waits)) for name, times, waits in waiting),
        notes=("larger micro-batches, torch.compile and CUDA graphs shorten it",),
    )


def _bubble(result: Estimate, time: Time) -> Reason:
    layout = result.layout
    work = sum(value for lane, value in time.parts.items() if lane not in ("bubble", "dp", "optimizer"))
    even = (layout.pp - 1) / (layout.vpp * layout.num_microbatches)
    legend: dict[str, tuple[str, Size]] = {
        "p": ("pipeline stages", layout.pp),
        "v": ("chunks of a stage", layout.vpp),
        "m": ("micro-batches", layout.num_microbatches),
        "W": ("seconds of the stage's own work", work),
    }
    return Reason(
        topic="bubble",
        what="seconds that the slowest stage waits",
        value=time.parts["bubble"],
        unit="s",
        basis=result.basis["time"],
        rule=f"the schedule ({layout.schedule}) is played through with the stages' own times",
        lines=(
            line("idle time over work, stages equally long", "(p - 1)/(v*m)", even, "share", legend),
            line("seconds that this would be", "(p - 1)/(v*m)*W", even * work, "s", legend),
            line(
                "as it is played: idle time over work",
                "b/W",
                time.parts["bubble"] / work,
                "share",
                {"b": ("seconds of the bubble", time.parts["bubble"]), "W": legend["W"]},
            ),
        ),
        notes=("stages differ (embedding, head, layers that do not divide), which the even form does not see",),
        see=("the schedule as a picture: --plot FILE --figure schedule",),
        sources=(str(cite("narayanan2021")),),
    )


def _optimizer(result: Estimate, time: Time) -> Reason:
    model, training = result.workings.step, result.training
    stage = model.stages[time.stage]
    elements = model.updated(stage)
    legend: dict[str, tuple[str, Size]] = {
        "B": ("bytes read and written an element", training.optimizer.moved(training.precision)),
        "E": ("elements that the rank updates", elements),
        "A": ("bytes moved to add up gradients of micro-batches", model.summed(stage)),
        "W": (f"achieved memory bandwidth [byte/s]{_moved(time)}", model.machine.memory("elementwise").forward),
    }
    return Reason(
        topic="optimizer",
        what="seconds of the optimizer step",
        value=time.parts["optimizer"],
        unit="s",
        basis=result.basis["time"],
        rule="gradients are read twice, master weights and moments read and written; offloaded, host and PCIe bound it",
        lines=(line("seconds of the update", "(B*E + A)/W", time.parts["optimizer"], "s", legend),),
        sources=_kernels(result),
    )


# -- money and the verdict --------------------------------------------------------------------------------------------


def _money(time: Time, budget: Budget, topic: str) -> Reason:
    legend: dict[str, tuple[str, Size]] = {
        "N": ("tokens of the run", budget.tokens),
        "T": ("tokens of a step", time.tokens),
        "t": ("seconds of a step", time.step),
        "g": ("share of the time that is progress", budget.goodput),
        "n": ("GPUs", budget.gpus),
        "D": ("days", budget.days),
        "S": ("seconds of a day", DAY),
        "H": ("GPU-hours", budget.gpu_hours),
    }
    lines = [
        line("steps", "N/T", budget.steps, "steps", legend),
        line("days", "N/T*t/(S*g)", budget.days, "days", legend),
        line("GPU-hours", "D*24*n", budget.gpu_hours, "GPU-hours", legend),
    ]
    if budget.cost is not None and budget.price is not None:
        legend["p"] = ("price of a GPU-hour", budget.price)
        lines.append(line("cost", "H*p", budget.cost, "money", legend))
    if budget.kilowatt_hours is not None and budget.watts is not None:
        legend["w"] = ("thermal design power of a GPU [W]", budget.watts)
        lines.append(line("energy at most", "H*w/1000", budget.kilowatt_hours, "kWh", legend))
        legend["E"] = ("energy of the run [kWh]", budget.kilowatt_hours)
        for lane, each in time.parts.items():
            if topic == "energy" and each:
                phase = legend | {"s": (f"seconds of it: {lane}", each)}
                lines.append(line(f"of it in {lane}", "E*s/t", budget.kilowatt_hours * each / time.step, "kWh", phase))
    if budget.wanted_days is not None:
        legend["d"] = ("days that are wanted", budget.wanted_days)
        lines.append(
            line(
                "GPUs for the date, before rounding up",
                "n*D/d",
                budget.gpus * budget.days / budget.wanted_days,
                "GPUs",
                legend,
            )
        )
    value, unit = (budget.days, "days") if budget.cost is None else (budget.cost, "money")
    if topic == "energy" and budget.kilowatt_hours is not None:
        value, unit = budget.kilowatt_hours, "kWh"
    return Reason(
        topic=topic,
        what="the whole run",
        value=value,
        unit=unit,
        basis="derived from the time of a step",
        rule="steps x seconds of a step x GPUs x price; failures divide by the share of the time that is progress",
        lines=tuple(lines),
        sources=(str(cite("young1974")), str(cite("daly2006"))) if budget.checkpoint_every else (),
        notes=("in your currency; a day has 86,400 seconds",),
    )


def _verdict(result: Estimate) -> Reason:
    memory = result.memory
    lines = [summed("bytes of the worst rank at its peak", memory.parts, memory.total, "byte")]
    legend: dict[str, tuple[str, Size]] = {
        "C": ("memory of the card", memory.capacity or 0),
        "L": ("lower end", memory.low),
        "U": ("upper end", memory.high),
    }
    if memory.capacity is not None:
        lines += [
            line(
                "room above the upper end (FITS where positive)", "C - U", memory.capacity - memory.high, "byte", legend
            ),
            line(
                "room above the lower end (DOES NOT FIT where negative)",
                "C - L",
                memory.capacity - memory.low,
                "byte",
                legend,
            ),
        ]
    return Reason(
        topic="verdict",
        what=memory.verdict,
        value=float(memory.total),
        unit="byte",
        basis="derived",
        rule="FITS where the card holds the upper end of the 80 % range, DOES NOT FIT where it does not hold the lower one,"
        " TIGHT between",
        lines=tuple(lines),
        columns=("part", "bytes"),
        rows=tuple((part, float(nbytes)) for part, nbytes in memory.parts.items() if nbytes),
        notes=(f"peak moment: {memory.moment}",),
        see=("each part by its name: --explain weights, activations, ...",),
    )
