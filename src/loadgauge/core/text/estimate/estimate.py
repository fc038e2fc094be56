"""The plain text of an estimate: the verdict first, then where every byte goes."""

from functools import partial

from loadgauge.core.answers.estimate import Estimated, neither_said
from loadgauge.core.base import count, flops, gib, in_gib, seconds
from loadgauge.core.definitions.training.memory_range import Counter
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import STRETCHES, Estimate, Memory
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.plan.advise.assumptions import assumptions
from loadgauge.core.resolve.setup import Setup, worst_routing
from loadgauge.core.text.estimate import brief as short
from loadgauge.core.text.estimate.padding import padding
from loadgauge.core.text.estimate.setup import batch_words, layout_words, print_assumed, unit
from loadgauge.core.text.estimate.step_time import headline, timing
from loadgauge.core.text.table import (
    Column,
    Paper,
    bar,
    draw,
    first_line,
    heading,
    plain,
    points,
    section,
    show_command,
)
from loadgauge.core.text.verdict import (
    ENDINGS,
    STYLES,
    WORDS,
    host_verdict,
    host_words,
    left_out_words,
    question_words,
    range_words,
    unread_words,
    verdict_words,
)

TITLES = {
    "fits": "Changes that make it fit (each one estimated)",
    "tight": "No change tried makes it fit for certain; the closest",
    "depends": "No change tried makes it fit whatever is unsaid; the closest",
    "does not fit": "No change tried makes it fit; the closest",
}
"""Head of the table of changes, by the verdict of the best."""

UNCAPTURED = (
    "alternatives for which its code has not run yet are not compared; asked for by their flags, they are answered"
)
"""A sentence about the alternatives of a captured model."""


def write(answer: Estimated, target: Paper, *, brief: bool = False) -> None:
    """Write an estimate, whole or in ten lines."""
    if brief:
        short.brief(answer.given, answer.result, answer.counter, target)
    else:
        report(answer.given, answer.result, target, answer.counter)


def report(setup: Setup, result: Estimate, target: Paper, counter: Counter | None = None) -> None:
    """Write the whole estimate. counter: one whose reading is asked for"""
    _verdict(target, setup, result, counter)
    if result.memory.fits is False and not (result.memory.question and result.memory.question.endless):
        _advice(target, setup, result)
    _parts(target, result)
    _moments(target, result)
    _stages(target, result)
    timing(target, setup, result)
    _neither_said(target, setup)
    _work(target, result)
    expected = setup.forecast()
    if expected is not None:
        padding(target, expected)
    section(target, "Your job file", [setup.file] if setup.file else [])
    print_assumed(target, setup.assumed)
    if setup.assumed:
        lines = [assumption.text(result) for assumption in assumptions(setup, result)]
        points(target, lines if setup.model.listed is None else [*lines, UNCAPTURED])
    section(target, "Not counted", [f"{note[:1].lower()}{note[1:]}" for note in result.not_counted])


def _neither_said(target: Paper, setup: Setup) -> None:
    """Write what each micro-batch of a large run takes by recomputation, where neither is said."""
    tried = neither_said(setup)
    rows = [[str(size), *(_tried(row.get(word)) for word in tried.words)] for size, row in tried.rows.items()]
    if rows:
        draw(
            target,
            [Column("micro-batch"), *(Column(f"--recompute {word}", "right") for word in tried.words)],
            rows,
            "Neither micro-batch nor recomputation is said: GiB, verdict, a step",
            [],
        )


def _tried(result: Estimate | None) -> str:
    if result is None:
        return ""
    took = "" if result.time is None else f", {seconds(result.time.step)}"
    return f"{in_gib(result.memory.total, 1)} {WORDS[result.memory.verdict][0].lower()}{took}"


def text(setup: Setup, result: Estimate) -> str:
    """Return what `loadgauge estimate` prints, at its default width and without colours."""
    return plain(partial(report, setup, result))


def verdict(result: Estimate, host: str = "") -> str:
    """Return the first line: whether it fits, how much it needs of the capacity, and on which rank. host: `host_verdict`

    >>> from loadgauge import Layout, estimate, model
    >>> verdict(estimate(model("gpt2"), Layout(seq_len=1024))).split(" on the ")[1].split(",")[0]
    'worst rank (stage 0 of 1)'
    """
    memory = result.memory
    where = f" on the worst rank (stage {memory.rank.stage} of {result.layout.pp})"
    head, _, spread = verdict_words(memory, host).partition(", 80 % range ")
    return f"{head}{where}, 80 % range {spread}"


def _verdict(target: Paper, setup: Setup, result: Estimate, counter: Counter | None) -> None:
    memory, layout, stated = result.memory, result.layout, setup.job.host_memory
    first_line(target, verdict(result, host_verdict(setup.on_host(result), stated)), *WORDS[memory.verdict])
    card = "GPU" if setup.gpu is None else setup.gpu.name
    batch = batch_words(result.model, layout.global_batch, layout.seq_len, bool(setup.lengths))
    lines = [
        *left_out_words(result.model, result.training.precision.weight),
        f"{result.model.name}, {count(result.params)} parameters, on {layout.gpus:,} x {card}: {layout_words(layout)}.",
        f"A step of {batch}, micro-batch {layout.micro_batch}. Peak moment: {memory.moment}.",
    ]
    if result.time is not None:
        lines.append(headline(result.time, unit(result.model)))
    points(target, [*unread_words(setup.unread(result)), *lines], "")
    asked = question_words(memory)
    points(target, [*([asked] if asked else []), *range_words(memory)], "", style=STYLES.get(memory.verdict, ""))
    points(target, [_counters(memory, counter)], "")
    if memory.host:
        locked = f", of it {gib(memory.pinned)} page-locked" if memory.pinned else ""
        disk = f"; NVMe: {gib(memory.nvme)}" if memory.nvme else ""
        points(
            target,
            [
                f"Host memory: {gib(memory.host)} per rank of this stage{locked}{disk};"
                f" {host_words(setup.on_host(result), stated)}."
            ],
            "",
        )
    if memory.saving:
        each = setup.training.around.save == "sharded"
        whose = "on each rank, for a copy of its shards" if each else "on the first rank, for the gathered state"
        node = f"; {host_words(setup.on_host(result), stated)}" if each and not memory.host else ""
        points(target, [f"Saving: {gib(memory.saving)} of host memory {whose}{node}."], "")
    _lengths(target, setup)
    _routing(target, setup, result)


def _counters(memory: Memory, counter: Counter | None) -> str:
    """Return what counters show at the peak: the one that is asked for with its range, else each."""
    if counter is not None:
        shown = memory.reading(counter)
        return f"{counter} shows {gib(shown.value)} at the peak (80 % range {in_gib(shown.low)}-{gib(shown.high)})."
    allocated, reserved = (in_gib(memory.reading(name).value, 1) for name in ("allocated", "reserved"))
    card = (
        f"The card shows {gib(memory.total, 1)} (nvidia-smi): PyTorch reserves {reserved} of it (max_memory_reserved)"
    )
    return f"{card}, its tensors take {allocated} (max_memory_allocated)."


def _lengths(target: Paper, setup: Setup) -> None:
    """With ragged sequences: which micro-batch is shown, and the worst case."""
    worst = setup.worst_case()
    if worst is None or setup.lengths is None:
        return
    layout, mean = setup.layout, f"mean length {setup.lengths.mean:,.0f}"
    if layout.tokens is None or layout.fullest is None:
        points(target, [f"Every sequence is padded to the longest, {setup.lengths.longest:,} tokens; {mean}."], "")
        return
    how = "with" if setup.padded else "without"
    full = f"Memory is of the fullest micro-batch of an epoch, {layout.fullest.tokens:,.0f} tokens {how} padding"
    points(target, [f"{full}; time of the expected one, {layout.tokens:,.0f} ({mean})."], "")
    memory = worst.memory
    line = f"Worst micro-batch, {setup.layout.micro_batch} x the longest ({setup.lengths.longest:,} tokens):"
    points(
        target,
        [f"{line} {gib(memory.total, 1)}{ENDINGS[memory.verdict]}"],
        "",
        style=STYLES.get(memory.verdict, ""),
    )


def _routing(target: Paper, setup: Setup, result: Estimate) -> None:
    """With experts over several ranks: which routing is assumed, and the worst case."""
    worst = worst_routing(setup, result)
    if worst is None:
        return
    memory, layout = worst.memory, worst.layout
    step = "" if worst.time is None else f", a step {seconds(worst.time.step)}"
    line = (
        f"Experts: the busiest rank gets {setup.layout.expert_imbalance:g} x the mean (assumed). Worst case,"
        f" {layout.expert_imbalance:g} x: {gib(memory.total, 1)}{step}{ENDINGS[memory.verdict]}"
    )
    points(target, [line], "", style=STYLES.get(memory.verdict, ""))


def _advice(target: Paper, setup: Setup, result: Estimate) -> None:
    memory = result.memory
    from loadgauge.core.plan.advise.advice import advice  # only where it does not fit
    from loadgauge.core.plan.advise.try_ import effort

    assert memory.capacity is not None
    name, nbytes = max(memory.parts.items(), key=lambda item: item[1])
    over = memory.total - memory.capacity
    line = f"{gib(abs(over), 1)} {'over' if over > 0 else 'below'} capacity; the largest part is {name},"
    points(target, [f"{line} {gib(nbytes, 1)} ({nbytes / memory.total:.0%})."], "")
    changes = advice(setup)
    if not changes:
        points(target, ["None of the flag changes tried here makes it smaller."], "")
        return
    title = TITLES[changes[0].result.memory.verdict]
    columns = [
        Column("change", wrap=True),
        Column("GiB", "right"),
        Column("verdict", rank=1),
        Column("time" if result.time is not None else "FLOPs", "right"),
        Column("why", style="dim", wrap=True),
    ]
    rows = []
    for change in changes:
        other = change.result
        more = effort(other, result) - 1
        work = f"{more:+.0%}" if abs(more) >= 0.005 else "same"
        rows.append([change.flags, in_gib(other.memory.total, 1), other.memory.verdict, work, change.note])
    draw(target, columns, rows, title)
    target.print()
    show_command(target, changes[0].command, "The first change, as a command:")


def _parts(target: Paper, result: Estimate) -> None:
    """Every part at the peak moment, and at the moment at which it is itself largest."""
    memory = result.memory
    meanings = _meaning(result)
    columns = [
        Column("part"),
        Column("at peak", "right"),
        Column("share", "right", rank=2),
        Column("", style="cyan", wide=True),
        Column("largest", "right"),
        Column("when"),
        Column("what", wrap=True, rank=1),
    ]
    rows = []
    for part in PARTS:
        nbytes, (largest, when) = memory.parts[part], _largest(memory, part)
        if largest:
            share = nbytes / memory.total
            rows.append(
                [part, in_gib(nbytes), f"{share:.1%}", bar(target, share), in_gib(largest), when, meanings[part]]
            )
    phase = STRETCHES.get(memory.moments[memory.peak].phase, "backward")
    total = in_gib(memory.total)
    rows.append(["total", total, "100.0%", "", total, phase, f"at the peak: {memory.moment}"])
    strong = [len(rows) - 1]
    if memory.capacity is not None:
        left = memory.capacity - memory.total
        rest = f"{gib(abs(left))} {'left' if left >= 0 else 'missing'}"
        rows.append(["capacity", in_gib(memory.capacity), "", "", "", "", rest])
    draw(target, columns, rows, "Where every byte goes, in GiB", strong)
    others = [f"{row[0]} ({basis})" for row in rows if (basis := result.basis.get(row[0], "derived")) != "derived"]
    points(target, [f"Basis: derived from the model and the layout, except {' and '.join(others)}."], "", "dim")


def _largest(memory: Memory, part: str) -> tuple[float, str]:
    """The most that a part is at any moment of the step, and in which phase that is."""
    if len({moment.parts[part] for moment in memory.moments}) == 1:
        return memory.parts[part], "always"
    moment = memory.largest(part)
    return moment.parts[part], STRETCHES.get(moment.phase, "backward")


def _meaning(result: Estimate) -> dict[str, str]:
    """Return what each part is, in a few words."""
    layout, training = result.layout, result.training
    precision, optimizer = training.precision, training.optimizer

    def sharded(stage: int) -> str:
        return f", sharded over {layout.zero_ranks} ranks" if layout.zero >= stage and layout.zero_ranks > 1 else ""

    stored = f"{precision.weight} B per parameter"
    stage = result.workings.stages[result.memory.rank.stage]
    trained = count(result.workings.memory.weighed(stage)[1].all.trainable)
    if result.model.trained is not None:
        stored += f", {trained} of them trained"
    if (lora := training.lora) is not None:
        base = "" if lora.stored is None else f" in {lora.stored.words}"
        stays = lora.experts_stay and result.model.has_experts
        stored = f"frozen base{base}{' but for routed experts' if stays else ''} and {lora.words}, {trained} trained"
    if (
        (low := precision.products) is not None
        and low.weights != "within"
        and layout.zero < training.framework.weights_stage
    ):
        stored += f", and {2 * low.weight_element:g} B {low.weights} for the blocks' matrices"
    states = [f"{optimizer.name} states"]
    if precision.main_gradient:
        states.append("float32 gradients")
    if precision.master:
        states.append("float32 master weights")
    flight = layout.in_flight(result.memory.rank.stage)
    kept = f"kept for backward, recompute {layout.recompute}"
    return {
        "weights": f"{stored}{sharded(training.framework.weights_stage)}",
        "gradients": f"{precision.gradient} B per trainable parameter{sharded(2)}",
        "optimizer": f"{' and '.join(states)}{sharded(1)}",
        "gathered": "whole layers in use, buckets and 16-bit copies",
        "activations": kept if flight == 1 else f"{kept}, {flight:g} micro-batches in flight",
        "loss": f"logits and their copies, {training.kernels.loss} loss",
        "transient": "temporaries of one layer or of the optimizer step",
        "evaluation": "a batch without gradients, logits kept of others, keys and values in generation",
        "outside": "CUDA context, NCCL and cuBLAS buffers, blocks that lie idle"
        + (", frozen encoders" if result.model.own.resident else ""),
    }


def _moments(target: Paper, result: Estimate) -> None:
    """Every moment of the worst rank; parts that never change are left to the table above."""
    memory = result.memory
    moving = [part for part in PARTS if len({moment.parts[part] for moment in memory.moments}) > 1]
    by_size = sorted(moving, key=lambda part: -max(moment.parts[part] for moment in memory.moments))
    draw(
        target,
        [
            Column("moment", wrap=True),
            Column("total", "right"),
            *(Column(part, "right", style="dim", rank=1 + by_size.index(part)) for part in moving),
        ],
        [
            [
                moment.name + ("  <- peak" if index == memory.peak else ""),
                in_gib(moment.total),
                *(in_gib(moment.parts[part]) for part in moving),
            ]
            for index, moment in enumerate(memory.moments)
        ],
        "Through one step, in GiB",
        [memory.peak],
    )


def _stages(target: Paper, result: Estimate) -> None:
    stages = result.memory.stages
    if len(stages) < 2:
        return
    heading(target, "Peak of each pipeline stage, in GiB")
    shown = [in_gib(nbytes, 1) for nbytes in stages]
    if len(shown) > 16:
        shown = [*shown[:8], "...", *shown[-4:]]
    points(target, ["  ".join(shown)], "")


def _work(target: Paper, result: Estimate) -> None:
    layout, work = result.layout, result.flops
    parts = parameters(result.model)
    tokens = layout.global_batch * layout.seq_len
    if layout.tokens is not None:
        tokens = layout.tokens * layout.num_microbatches * layout.dp
    section(
        target,
        "Work of one step, all GPUs together",
        [
            f"{unit(result.model)}: {tokens:,.0f}; micro-batches per rank: {layout.num_microbatches:,}",
            f"model FLOPs: {flops(work.model)} (forward {flops(work.forward)}, backward {flops(work.backward)})",
            f"hardware FLOPs: {flops(work.hardware)}, of which {flops(work.recompute)} recomputed"
            f" ({work.recompute / work.model if work.model else 0:.1%})",
            f"parameters: {count(result.params)} = {result.params:,} (embedding {count(parts.embedding)},"
            f" layers {count(parts.layers)}, head {count(parts.head)})",
        ],
    )
