"""The text of `loadgauge network`: the verdict first, then each axis, every collective, and other clusters."""

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base import GB, MIB, Error, count, seconds
from loadgauge.core.definitions.layout.axes import LANE_OF, RANK_ORDER
from loadgauge.core.estimate.time.bandwidth_needs import Need, Network, NetworkCase, largest_tp, smallest_batch, what_if
from loadgauge.core.estimate.time.traffic import Traffic
from loadgauge.core.resolve.setup import Setup
from loadgauge.core.text.estimate.setup import layout_words, print_assumed
from loadgauge.core.text.table import Column, Paper, draw, first_line, points, section

NAMES = {"inner": "node", "outer": "network"}
"""The links, in a table."""


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write the answer of `loadgauge network`; brief: the verdict, and what each axis needs."""
    planned, setup, network = answer.shown
    if brief:
        _brief(target, planned, setup, network)
        return
    _verdict(target, planned, setup, network)
    if network.traffic:
        _needs(target, setup, network)
        _traffic(target, setup, network)
        _what_if(target, setup, network)
        _limits(target, planned, setup, network)
    print_assumed(target, planned.assumed)
    section(target, "Not counted", answer.not_counted)


def _brief(target: Paper, planned: Setup, setup: NetworkCase, network: Network) -> None:
    word, style, rest = verdict(network)
    first_line(target, f"{word}  {rest}", word, style)
    run = f"{planned.model.name}, {planned.layout.gpus:,} x {planned.gpu.id if planned.gpu else 'GPU'}"
    needs = [
        f"  {need.axis}, {need.what}: {seconds(need.seconds)} over the {NAMES[need.link]}, needs {gigabytes(need.needed)} GB/s,"
        f" reaches {gigabytes(need.reached)}: {_word(need, setup.share)}"
        for need in sorted(network.needs, key=_place)
    ]
    points(target, [f"{run}: {layout_words(planned.layout, ('replicas',))}"], "", "dim")
    points(target, needs, "")
    if network.traffic:
        points(target, [f"These links allow: {'; '.join(_allowed(planned, setup, network))}."], "")


def gigabytes(nbytes: float) -> str:
    """Format bytes or byte/s as GB or GB/s without the unit, to three digits.

    >>> gigabytes(1.2345e9), gigabytes(123.45e9), gigabytes(1.2e6)
    ('1.23', '123', '0.0012')
    """
    value = nbytes / GB
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def percent(share: float) -> str:
    """Format a share as a percentage of at most three digits.

    >>> percent(0.05), percent(0.125)
    ('5%', '12.5%')
    """
    return f"{100 * share:.3g}%"


def verdict(network: Network) -> tuple[str, str, str]:
    """Return the verdict, its colour, and the rest of the first line."""
    if not network.traffic:
        return "NOTHING TO CARRY", "bold", "a single GPU does not communicate"
    cost = f"exposed communication is {network.exposed / network.step:.1%} of the {seconds(network.step)} step"
    if network.enough:
        return "ENOUGH", "bold green", cost
    short = sorted((need for need in network.needs if not need.enough), key=lambda need: -need.shown)
    worst = short[0]
    rest = f" ({', '.join(dict.fromkeys(need.axis for need in short[1:]))} falls short too)" if short[1:] else ""
    return (
        "NOT ENOUGH",
        "bold red",
        f"{worst.axis} needs {gigabytes(worst.needed)} GB/s of the {NAMES[worst.link]}'s links and reaches"
        f" {gigabytes(worst.reached)}{rest}; {cost}",
    )


def _verdict(target: Paper, planned: Setup, setup: NetworkCase, network: Network) -> None:
    word, style, rest = verdict(network)
    first_line(target, f"{word}  {rest}", word, style)
    layout, fabric, efficiencies = planned.layout, setup.fabric, setup.machine.efficiencies
    assert planned.gpu is not None
    shape = layout_words(layout, ("replicas",))
    batches = f"{layout.num_microbatches} micro-batch{'es' if layout.num_microbatches > 1 else ''} on each rank"
    lines = [
        f"{planned.model.name} on {layout.gpus:,} x {planned.gpu.name}: {shape}; {batches} a step.",
    ]
    if network.traffic:
        lines.append(_links(planned, setup))
        how = (
            f"at the {setup.achieved / 1e12:g} TFLOP/s you gave"
            if setup.achieved
            else f"by its kernels, {efficiencies.basis}"
        )
        lines += [
            f"Ranks fill nodes in the order {', '.join(layout.order)}; a node here is the GPUs that the fast link connects.",
            f"Compute takes {seconds(network.compute.total)} of the step ({how}). Budget for exposed"
            f" communication per axis: {percent(setup.share)} of compute (--share),"
            f" {seconds(setup.share * network.compute.total)}.",
        ]
    if fabric.oversubscription > 1:
        beyond = f"a pod of {fabric.pod} GPUs" if fabric.pod else "the node"
        rails = ", except along a rail" if fabric.rails else ""
        lines.append(
            f"Beyond {beyond} the network provides 1/{fabric.oversubscription:g} of its bandwidth when all send{rails}."
        )
    points(target, lines, "")


def _source(planned: Setup, own: str | None) -> str:
    """Who states a bandwidth: the user, the topology, or the datasheet."""
    return "yours" if own else "topology" if planned.job.topology else "datasheet"


def _links(planned: Setup, setup: NetworkCase) -> str:
    """Return the links with their bandwidth, and the share of it that collectives achieve."""
    fabric = setup.fabric
    assert planned.gpu is not None
    parts = []
    if fabric.domain > 1:
        kind = planned.gpu.interconnect.kind or "the fast link"
        source = _source(planned, planned.job.link_bandwidth)
        parts.append(
            f"{kind} connects {fabric.domain} GPUs at {gigabytes(fabric.inner_bandwidth)} GB/s per GPU per direction"
            f" ({source}), of which collectives achieve {fabric.inner_efficiency:.0%}"
        )
    if planned.layout.gpus > fabric.domain:
        source = _source(planned, planned.job.nic_bandwidth)
        parts.append(
            f"the network provides {gigabytes(fabric.outer_bandwidth)} GB/s per GPU per direction ({source}), of which"
            f" collectives achieve {fabric.outer_efficiency:.0%}"
        )
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _place(row: Need | Traffic) -> int:
    """Return the place of a row's axis in a table: tensor parallelism of experts next to ep."""
    return RANK_ORDER.index(LANE_OF[row.axis])


def _word(need: Need, share: float) -> str:
    if need.hidden:
        return "hidden"
    if need.enough:
        return f"within {percent(share)}"
    return "TOO SLOW"


def _needs(target: Paper, setup: NetworkCase, network: Network) -> None:
    columns = [
        Column("axis", wrap=True),
        Column("GPUs", "right", wide=True),
        Column("over"),
        Column("GB", "right"),
        Column("takes", "right"),
        Column("may take", "right", wide=True),
        Column("needs", "right"),
        Column("reaches", "right"),
        Column("of", "right", style="dim", wide=True),
        Column("verdict"),
    ]
    needs = sorted(network.needs, key=_place)
    rows = [
        [
            f"{need.axis}, {need.what}",
            f"{need.ranks:,}",
            NAMES[need.link],
            gigabytes(need.carried),
            seconds(need.seconds),
            seconds(need.window),
            gigabytes(need.needed),
            gigabytes(need.reached),
            gigabytes(need.bandwidth),
            _word(need, setup.share),
        ]
        for need in needs
    ]
    draw(
        target,
        columns,
        rows,
        "What a GPU's links carry in a step, and the GB/s they need for it",
        [number for number, need in enumerate(needs) if not need.enough],
    )
    points(
        target,
        [
            "GB: over the slowest link of the path, in each direction. May take: the compute it overlaps with, and its share"
            " (--share) of all compute. Reaches: including latency and congestion.",
            *_stages(setup, network),
        ],
        "",
        style="dim",
    )


def _stages(setup: NetworkCase, network: Network) -> list[str]:
    """Return the pipeline stages of the GPUs whose links are shown, in a line; empty without stages."""
    if setup.layout.pp == 1:
        return []
    other: dict[int, dict[str, None]] = {}
    for row in network.traffic:
        if row.stage != network.stage:
            other.setdefault(row.stage, {})[f"{row.axis} {row.kind}"] = None
    busier = (f"{' and '.join(axes)} of stage {stage}" for stage, axes in sorted(other.items()))
    more = f"; {', '.join(busier)}, where they take longest" if other else ""
    return [f"Of pipeline stage {network.stage}, the slowest of 0 to {setup.layout.pp - 1}{more}."]


def _traffic(target: Paper, setup: NetworkCase, network: Network) -> None:
    columns = [
        Column("axis"),
        Column("what", wrap=True),
        Column("collective", wide=True),
        Column("calls", "right"),
        Column("MiB a call", "right", wide=True),
        Column("GB sent", "right"),
        Column("takes", "right"),
        Column("exposed", "right"),
    ]
    rows = [
        [
            row.axis,
            row.what,
            row.collective.replace("_", "-"),
            _calls(row),
            f"{row.payload / MIB:,.0f}" if row.payload >= 99.5 * MIB else f"{row.payload / MIB:.3g}",
            gigabytes(row.sent),
            seconds(row.seconds),
            seconds(row.exposed_seconds) if row.exposed_seconds else "-",
        ]
        for row in sorted(network.traffic, key=_place)
    ]
    sent = sum(row.sent for row in network.traffic)
    total, shown = (sum(getattr(row, name) for row in network.traffic) for name in ("seconds", "exposed_seconds"))
    rows.append(["all", "", "", "", "", gigabytes(sent), seconds(total), seconds(shown) if shown else "-"])
    draw(
        target,
        columns,
        rows,
        "Every collective of a step (calls: micro-batches x each)",
        [len(rows) - 1],
    )
    points(target, _stages(setup, network), "", style="dim")


def _calls(row: Traffic) -> str:
    """Micro-batches times calls of each, or the calls of a step."""
    each = row.calls_per_microbatch
    return f"{row.calls_per_step / each:,g} x {each:,g}" if each else f"{row.calls_per_step:,g}"


def _what_if(target: Paper, setup: NetworkCase, network: Network) -> None:
    columns = [
        Column("with"),
        Column("step", "right"),
        Column("change", "right"),
        Column("exposed", "right"),
        Column("of the step", "right"),
        Column("links are"),
        Column("tightest", wrap=True),
    ]

    def row(name: str, result: Network) -> list[str]:
        tightest = result.tightest
        return [
            name,
            seconds(result.step),
            f"{result.step / network.step - 1:+.1%}" if result is not network else "",
            seconds(result.exposed) if result.exposed else "-",
            f"{result.exposed / result.step:.1%}",
            "enough" if result.enough else "NOT ENOUGH",
            "" if tightest is None else f"{tightest.axis}, {tightest.what}",
        ]

    changes = (row(change.name, change.result) for change in what_if(setup, network))
    draw(target, columns, [row("the cluster as it is", network), *changes], "What if the cluster were different", [0])


def compare(sweep: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write networks side by side, a line for each cell of a sweep: what each axis sends, and what the tightest needs."""
    axes, rows = sweep.shown
    target.print(sweep.command, style="bold", soft_wrap=True)
    answers = [answer for _, answer in rows if not isinstance(answer, Error)]
    sent = list(dict.fromkeys(need.axis for answer in answers for need in answer.needs))
    names = [*(name.replace("_", "-") for name in axes), "step", "exposed", *(f"{axis} GB" for axis in sent)]
    columns = [
        *(Column(name, "right") for name in (*names, "needs", "reaches")),
        Column("tightest"),
        Column("links are"),
    ]
    lines = []
    for cell, answer in rows:
        values = ["" if value is None else str(value) for value in cell.values()]
        if isinstance(answer, Error):
            lines.append([*values, *[""] * (len(columns) - len(values) - 1), "cannot tell"])
        else:
            by_axis = {axis: sum(need.carried for need in answer.needs if need.axis == axis) for axis in sent}
            tightest = answer.tightest
            lines.append(
                [
                    *values, seconds(answer.step), f"{answer.exposed / answer.step:.1%}",
                    *(f"{carried / 1e9:.3g}" if carried else "" for carried in by_axis.values()),
                    "" if tightest is None else f"{tightest.needed / 1e9:.3g}",
                    "" if tightest is None else f"{tightest.reached / 1e9:.3g}",
                    "" if tightest is None else f"{tightest.axis}, {tightest.what}", "enough" if answer.enough else "NOT ENOUGH",
                ]
            )  # fmt: skip
    draw(target, columns, lines, "What a GPU sends in a step, and the GB/s that the tightest axis needs and reaches")
    wrong = dict.fromkeys(str(answer) for _, answer in rows if isinstance(answer, Error))
    points(target, [f"cannot tell: {error}" for error in wrong])


def _limits(target: Paper, planned: Setup, setup: NetworkCase, network: Network) -> None:
    section(
        target,
        "What these links allow",
        [
            *_allowed(planned, setup, network),
            f"compute is {network.efficiency:.1%} of compute and exposed communication together"
            " (1/(1 + r), not Amdahl's law: communication is not a serial part of the work)",
        ],
    )


def _allowed(planned: Setup, setup: NetworkCase, network: Network) -> list[str]:
    layout, lines = planned.layout, []
    best = largest_tp(setup)
    yours = f" (yours: {layout.tp})" if layout.tp > 1 else ""
    if best == 1:
        lines.append(
            f"no tp above 1 is sustainable: at 2 its traffic takes more than {percent(setup.share)} of compute{yours}"
        )
    elif best is not None:
        lines.append(f"largest sustainable tp (dp fills the rest): {best}{yours}")
    if any(need.axis == "dp" for need in network.needs):
        lines.append(_batch_line(planned, setup))
    return lines


def _batch_line(planned: Setup, setup: NetworkCase) -> str:
    layout, batch = planned.layout, smallest_batch(setup)
    if batch is None:
        return f"no batch makes data parallelism cost less than {percent(setup.share)} of compute"
    tokens = count(batch.global_batch * layout.seq_len)
    if layout.zero >= 2:
        return (
            f"smallest micro-batch at which data parallelism costs at most {percent(setup.share)}:"
            f" {batch.micro_batch}, memory permitting (yours: {layout.micro_batch})"
        )
    return (
        f"smallest global batch at which data parallelism costs at most {percent(setup.share)}:"
        f" {batch.global_batch:,} sequences, {tokens} tokens (yours: {layout.global_batch:,})"
    )
