"""Every layout that fits, for the scatter: the whole front, and of the rest some of each structure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import msgspec

from loadgauge.algebra import Size
from loadgauge.cli import plan as command
from loadgauge.cli.plan import OPEN
from loadgauge.errors import Error, NothingFits
from loadgauge.estimate.result import Estimate
from loadgauge.plan.batch.evaluate import Reading
from loadgauge.plan.batch.types import Batch, Wanted
from loadgauge.plan.plan import Case, layout_at, plan
from loadgauge.report.plan import why
from loadgauge.spec.axes import RANK_AXES
from loadgauge.spec.job import Job
from loadgauge.spec.layout import Layout
from loadgauge.web.flags import State, files_of, job_of, model_of, written
from loadgauge.web.uploads import Uploads, handed_in

MOST = 4000
"""Points of the scatter."""
EACH = 6
"""Layouts of one structure that are timed for the scatter, beside those that matter for the answer."""
PLACE = (*RANK_AXES[1:], "dp", "vpp", "zero", "micro_batch")
COLUMNS = (
    "memory", "mfu", "step", *PLACE, "recompute", "schedule", "etp", "replicas", "sequence_parallel", "stage_layers",
)  # fmt: skip
NAMES = ("objective", "margin", "price", "top", "what_next", "find", "exposed", "prices")
"""What `plan` is asked beside the flags of a run."""
DEPENDENT = {"stage_layers": "pp", "cp_comm": "", "measured": ""}
"""Flags that go with an axis that must be locked, or with none of a plan."""


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """Layouts that the search has timed, as rows of numbers."""

    rows: list[tuple[Size, Size, Layout]]


class Sampled(Case, frozen=True, kw_only=True):
    """A case that takes down some of the layouts that fit while the search goes over them."""

    watched: Watched

    def reading(self) -> Reading:
        """The array reading; of each structure a few layouts more are timed."""
        found = super().reading()
        limit = self.cluster.gpu.capacity
        original = found.batches

        def batches(progress: Any = None, wanted: Wanted | None = None) -> Iterator[Batch]:
            for batch in original(progress, also(wanted, limit)):
                self.take(batch, limit)
                yield batch

        found.batches = batches  # type: ignore[method-assign]
        return found

    def take(self, batch: Batch, limit: float) -> None:
        """Some of the layouts of one structure that fit and have a time."""
        import numpy

        there = numpy.flatnonzero((batch.memory <= limit) & (batch.step < numpy.inf))
        for index in spaced(there, EACH):
            layout = layout_at(self.space, batch.structure, batch.grid, int(batch.places[index]))
            self.watched.rows.append((float(batch.memory[index]), float(batch.step[index]), layout))


def also(wanted: Wanted | None, limit: float) -> Wanted | None:
    """Those whose time matters, and some others that fit."""
    if wanted is None:
        return None
    before: Wanted = wanted

    def more(memory: Any, least: Any) -> Any:
        import numpy

        chosen = before(memory, least).copy()
        chosen[spaced(numpy.flatnonzero(memory <= limit), EACH)] = True
        return chosen

    return more


def spaced(places: Any, most: int) -> Any:
    """At most so many of the places, evenly spaced, both ends among them.

    >>> import numpy
    >>> list(map(int, spaced(numpy.arange(10), 4))), len(spaced(numpy.arange(3), 4))
    ([0, 3, 6, 9], 3)
    """
    import numpy

    if len(places) <= most:
        return places
    return places[numpy.unique(numpy.linspace(0, len(places) - 1, most).round().astype(int))]


def planned(flags: State, locks: list[str], uploads: dict[str, list[str]], path: str = "") -> dict[str, Any]:
    """The answer of `loadgauge plan` for the flags, with only the locked axes held, and points to draw.

    uploads: texts and names of what was handed in, by id; path: where the config of an uploaded model lies

    A row of `points` has `COLUMNS`: bytes, a share, seconds, degrees. `pareto` and `best` are indices of points.
    """
    kept = handed_in(uploads)
    try:
        spec = model_of(flags, kept)
        yours = _yours(flags, kept)
        context = context_of(files_of(flags, kept), locks, path or spec.name)
        asked = {name: value for name, value in context.params.items() if name in (*NAMES, *Job.__struct_fields__)}
        model = asked.pop("model")
        _, cases, how = command.cases(model, asked)
    finally:
        kept.close()
    watched = Watched(rows=[])
    sampled = [Sampled(**msgspec.structs.asdict(case), watched=watched) for case in cases]
    framework = cases[0].training.framework.name
    about = {
        "columns": COLUMNS, "capacity": cases[0].cluster.gpu.capacity, "locks": locks, "assumed": how["assumed"],
        "apply": {"framework": framework, "global-batch": str(cases[0].space.global_batch)}, "yours": yours,
    }  # fmt: skip
    try:
        found = plan(sampled, objective=how["objective"], margin=how["margin"], top=10)
    except NothingFits as error:
        return {**about, "points": [], "pareto": [], "best": [], "fitting": 0, "sampled": 0,
                "nearest_miss": _miss(error), "error": str(error)}  # fmt: skip
    exact = {_key(one.layout): one for one in (*found.layouts, *found.pareto)}
    points = [_point(one.memory.total, _step(one), one.layout, found.layouts[0]) for one in exact.values()]
    places = {key: place for place, key in enumerate(exact)}
    rest = [row for row in watched.rows if _key(row[2]) not in places]
    rest = [rest[place] for place in range(0, len(rest), max(1, -(-len(rest) // max(1, MOST - len(points)))))]
    points += [_point(memory, step, layout, found.layouts[0]) for memory, step, layout in rest]
    return {
        **about,
        "points": points,
        "pareto": [places[_key(one.layout)] for one in found.pareto],
        "best": [places[_key(one.layout)] for one in found.layouts],
        "why": why(found),
        "evaluated": found.evaluated,
        "valid": found.valid,
        "fitting": found.fitting,
        "sampled": len(points),
        "seconds": found.seconds,
        "nearest_miss": None,
    }


def context_of(flags: State, locks: list[str], model: str) -> click.Context:
    """The flags as `loadgauge plan` reads them: of the open axes, only those that are locked."""
    known = {
        str(param.name): param
        for param in command.command.params
        if isinstance(param, click.Option) and param.name in (*NAMES, *Job.__struct_fields__)
    }
    held = {name.replace("-", "_") for name in locks}
    words = []
    for key, value in flags.items():
        name, text = key.replace("-", "_"), written(key, value)
        if name == "model" or name not in known or not text or DEPENDENT.get(name, name) not in {*held, name}:
            continue
        if name in OPEN and name not in held:
            continue
        if known[name].is_flag or name == "sequence_parallel":
            words += [f"--{key}"] if text == "true" else [f"--no-{key}"] if name == "sequence_parallel" else []
        else:
            words.append(f"--{key}={text}")
    return command.command.make_context("plan", [*words, "--", model])


def _key(layout: Layout) -> object:
    return tuple(str(getattr(layout, name)) for name in Layout.__struct_fields__ if name not in ("tokens", "pairs"))


def _step(found: Estimate) -> float:
    assert found.time is not None
    return found.time.step


def _point(memory: float, step: float, layout: Layout, best: Estimate) -> list[Any]:
    """One row. Of the same batch on the same GPUs, utilisation is as the inverse of the time."""
    assert best.time is not None
    stages = layout.stage_layers
    return [
        memory, best.time.mfu * best.time.step / step, step, *(int(getattr(layout, name)) for name in PLACE),
        str(layout.recompute), layout.schedule if layout.pp > 1 else "", int(layout.etp), int(layout.replicas),
        layout.sequence_parallel, "" if stages is None else ",".join(map(str, stages)),
    ]  # fmt: skip


def _yours(flags: State, uploads: Uploads) -> dict[str, Any] | None:
    """The run of the flags themselves; None where there is no such layout."""
    try:
        found = job_of(flags, uploads).estimate()
    except Error:
        return None
    time = found.time
    return {
        "memory": found.memory.total,
        "fits": found.memory.fits,
        "mfu": None if time is None else time.mfu,
        "step": None if time is None else time.step,
        "framework": found.training.framework.name,
    }


def _miss(error: NothingFits) -> dict[str, Any]:
    nearest = error.nearest
    assert isinstance(nearest, Estimate)
    return {"missing": error.missing, "point": _point(nearest.memory.total, _step(nearest), nearest.layout, nearest)}
