"""One measured run predicts another of its kind: step time from one node to many, and what a card shows.

    python -m accuracy.anchors       both tables; that of time is in docs/accuracy.md; --each prints every pair of time, too

A pair is two published runs of one source, model and hardware, and nothing is fitted. Time: the anchor fills at most one node, and
of several is the one whose layout and micro-batch are most alike; the other has more nodes. Memory: two reports of users of one
source, by the driver's counter.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from accuracy.memory_range import ON_CARD, QUALITIES, REPORTS, as_typed
from loadgauge.core.base.errors import Error
from loadgauge.core.base.units import GIB
from loadgauge.core.definitions.hardware.calibration import slowed
from loadgauge.core.estimate.estimate import estimate
from loadgauge.core.resolve.rescale import slower
from loadgauge.evidence.published.source_rows import SourceRow
from loadgauge.evidence.validate.runs import Run, published, setup_of
from loadgauge.evidence.validate.summary import grouped
from loadgauge.evidence.validate.validate import Record, machine, validate
from published_runs.tables import published as source_rows

NODE, NODES = 8, 128
"""GPUs of a node, and those up to which pairs are counted apart."""
RECIPE = ("tp", "pp", "cp", "vpp", "ep", "micro_batch")
"""Flags that an anchor shares with the run it is for, as far as one was published."""


class Pair(NamedTuple):
    """A run that was predicted, alone and after its anchor: predicted over measured - 1 is `plain` and `anchored`.

    unlike: flags of the recipe in which the two differ; stack: whether the two are `one_stack`, the anchor on one node
    inside: whether what was measured lies in the range of the answer after its anchor
    """

    source: str
    anchor: str
    run: str
    gpus: tuple[int, int]
    plain: float
    anchored: float
    unlike: int = 0
    stack: bool = False
    inside: bool = False


def time_pairs(records: Sequence[Record], runs: Sequence[Run]) -> list[Pair]:
    """Return the pairs of step time: from a node to several. A run is moved by its anchor as `--anchor` moves it."""
    by_id = {run.id: run for run in runs if run.quality in QUALITIES and run.job is not None}
    rows = {row.id: row for row in source_rows()}
    predicted = [
        one for one in records if one.quantity == "time" and one.id in by_id and one.predicted and one.measured
    ]
    pairs = []
    for group in grouped(predicted, lambda record: _stack(by_id[record.id])).values():
        anchors = [record for record in group if _gpus(by_id[record.id]) <= NODE]
        for record in group if anchors else ():
            run = by_id[record.id]
            few = min(anchors, key=lambda anchor: _unlike(by_id[anchor.id], run))
            first = by_id[few.id]
            if _gpus(run) <= NODE or not (record.predicted and record.measured and few.predicted and few.measured):
                continue
            there, setup = setup_of(first), setup_of(run)
            moved = slowed(machine(setup), slower(there, few.measured / few.predicted))
            time = estimate(setup.model, setup.layout, setup.training, setup.gpu, moved).timing
            one = one_stack(first, rows[few.id]) == one_stack(run, rows[record.id]) and on_one_node(first, rows[few.id])
            pairs.append(
                Pair(
                    record.source, few.id, record.id, (_gpus(first), _gpus(run)), record.predicted / record.measured - 1,
                    time.step / record.measured - 1, _unlike(first, run)[0], one, time.low <= record.measured <= time.high,
                )
            )  # fmt: skip
    return pairs


def _stack(run: Run) -> str:
    """What the runs of a pair share: source, model, card, framework and its settings, precision, length, recomputation."""
    assert run.job is not None
    same = (
        "gpu",
        "framework",
        "precision",
        "seq_len",
        "recompute",
        "attention",
        "zero",
        "optimizer",
        "lora_rank",
        "qlora",
    )
    return repr((run.series, run.model, *(getattr(run.job, name) for name in same)))


def one_stack(run: Run, row: SourceRow) -> str:
    """What two runs share that are of the same stack, as a user has who measures one node and asks about more.

    Who measured, the document and the release of the framework that it names (the year, where it names none), the GPU, the recipe
    of precision, the family of the model, the kernels that the framework's settings choose, and what is trained.
    """
    setup = setup_of(run)
    training, document = setup.training, row.source.partition(" ")[0]
    release = (run.series, document, row.framework, row.year, training.framework.name)
    chosen = (
        training.precision.name,
        training.kernels,
        training.lora,
        training.overlap.launch,
        run.job and run.job.version,
    )
    return repr((release, run.job and run.job.gpu, setup.model.model_type, chosen))


def on_one_node(run: Run, row: SourceRow) -> bool:
    """Return whether a run fills at most one node: as many GPUs as its source says one has, else 8."""
    return _gpus(run) <= (row.gpus_per_node or NODE)


def _unlike(one: Run, other: Run) -> tuple[int, int]:
    """Return in how many flags of a recipe two runs differ, and the GPUs of the first."""
    assert one.job is not None
    return sum((getattr(one.job, name) or 1) != (getattr(other.job, name) or 1) for name in RECIPE), _gpus(one)


def _gpus(run: Run) -> int:
    assert run.job is not None
    return run.job.gpus or 1


class Shown(NamedTuple):
    """A card of a report: bytes shown, of these outside the allocator by assumption, and bytes handed out by prediction."""

    id: str
    gpus: int
    shown: float
    outside: float
    allocated: float
    total: float


def memory_pairs() -> list[Pair]:
    """Return the pairs of what cards show, within a source and a kind of card."""
    groups: dict[tuple[str, str], list[Shown]] = {}
    with REPORTS.open(newline="", encoding="utf-8") as rows:
        for row in csv.DictReader(rows):
            if row["counter"] not in ON_CARD:
                continue
            try:
                estimate = as_typed(row["flags"])
            except Error:
                continue
            memory = estimate.memory
            card = Shown(
                row["id"],
                estimate.layout.gpus,
                float(row["gib"]) * GIB,
                memory.margins.outside.value,
                memory.allocated,
                memory.total,
            )
            own, layout = estimate.training, estimate.layout
            stack = (
                estimate.model.name,
                own.framework.name,
                own.precision.name,
                own.lora,
                layout.recompute.mode,
                layout.zero,
            )
            groups.setdefault((row["source"], repr((estimate.gpu, *stack))), []).append(card)
    pairs = []
    for (source, _), cards in groups.items():
        first = min(cards, key=lambda card: card.gpus)
        held = (first.shown - first.outside) / first.allocated
        for card in cards:
            if card is not first:
                anchored = (card.allocated * held + card.outside) / card.shown - 1
                pairs.append(
                    Pair(source, first.id, card.id, (first.gpus, card.gpus), card.total / card.shown - 1, anchored)
                )
    return pairs


def table(pairs: Sequence[Pair]) -> str:
    """Return a table in Markdown: by source and by what the two of a pair share, the errors alone and after the anchor."""
    lines = [
        "|  | pairs | median alone | p90 | median anchored | p90 | in its range |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    groups = {name: [pair for pair in pairs if pair.source == name] for name in sorted({pair.source for pair in pairs})}
    stack = [pair for pair in pairs if pair.stack]
    groups |= {
        "one stack, measured on one node": stack,
        f"of these, to {NODES} GPUs": [pair for pair in stack if pair.gpus[1] <= NODES],
        f"of these, to {NODES} GPUs, one recipe": [pair for pair in stack if pair.gpus[1] <= NODES and not pair.unlike],
        f"of these, to {NODES} GPUs, another": [pair for pair in stack if pair.gpus[1] <= NODES and pair.unlike],
        f"of these, beyond {NODES}": [pair for pair in stack if pair.gpus[1] > NODES],
        "another stack": [pair for pair in pairs if not pair.stack],
        "all": list(pairs),
    }
    for name, own in groups.items():
        if not own:
            continue
        cells = [
            f"{value:.1%}"
            for errors in ([abs(pair.plain) for pair in own], [abs(pair.anchored) for pair in own])
            for value in (median(errors), sorted(errors)[math.ceil(0.9 * len(errors)) - 1])
        ]
        lines.append(
            f"| {name} | {len(own)} | {' | '.join(cells)} | {sum(pair.inside for pair in own) / len(own):.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    every = published().runs
    pairs = time_pairs(validate(every, ("time",)), every)
    for pair in sorted(pairs, key=lambda pair: -abs(pair.anchored)) if "--each" in sys.argv else ():
        sizes = f"{pair.gpus[0]} to {pair.gpus[1]} GPUs, {pair.unlike} flags differ{'' if pair.stack else ', another stack'}"
        print(f"{pair.anchored:+7.1%} ({pair.plain:+.1%} alone)  {pair.anchor} to {pair.run}: {sizes}")
    print(table(pairs), table(memory_pairs()), sep="\n\n")
