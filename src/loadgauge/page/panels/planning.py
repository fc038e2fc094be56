"""The page's plan: the best layouts, the whole Pareto front, and for the scatter some layouts of each structure."""

from typing import Any

from loadgauge.core.answers.plan.layouts import why
from loadgauge.core.base.errors import Error, NothingFits
from loadgauge.core.definitions.job.job_text import stage_words
from loadgauge.core.definitions.layout.axes import RANK_AXES
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.request import JOB_FIELDS, OPEN_AXES, RANKING, PlanRequest, cases
from loadgauge.core.plan.sample import Sampler
from loadgauge.core.plan.search import search, seconds
from loadgauge.core.plan.space.axis_values import out_of_reach
from loadgauge.core.text.plan.plan import tighter
from loadgauge.page.inputs.flags import State, files_of, job_of, model_of, noted, request_of, written
from loadgauge.page.inputs.uploads import Uploads, handed_in

MOST = 4000
"""Points of the scatter."""
EACH = 6
"""Layouts of one structure that are timed for the scatter, besides those that matter for the answer."""
COLUMNS = (
    "memory", "mfu", "step", *RANK_AXES[1:], RANK_AXES[0], "vpp", "zero", "micro_batch", "recompute", "schedule", "etp",
    "replicas", "sequence_parallel", "stage_layers",
)  # fmt: skip
NEEDED = {"stage_layers": "pp", "cp_comm": ""}
"""Fields that go with an axis that must be locked, or with none that a plan has."""
TOP = 10
"""Best layouts that are marked."""


def planned(
    flags: State, locks: list[str], uploads: dict[str, list[str]], path: str = "", more: int = 0
) -> dict[str, Any]:
    """The answer of `loadgauge plan` for the flags, with only the locked axes held, and points to draw.

    uploads: texts and names of what was handed in, by id; path: where the config of an uploaded model is
    more: captures that it may ask for beside those that the flags ask for

    A row of `points` has `COLUMNS`: bytes, a share, seconds, degrees. `pareto` and `best` are indices of points.
    """
    kept = handed_in(uploads)
    try:
        looked_up = model_of(request_of(_open(flags, locks), kept), kept)
        if looked_up.spec.listed is not None:
            looked_up.spec.listed.most = more
        yours = _yours(flags, kept)
        spec = looked_up.spec if looked_up.spec.listed is not None else None
        request = plan_of(files_of(flags, kept), locks, (not spec and path) or looked_up.spec.name)
        setup, searches = cases(request, spec)
        setup = noted(setup, looked_up)
    finally:
        kept.close()
    sampler = Sampler(EACH)
    first = searches[0]
    about = {
        "columns": COLUMNS,
        "capacity": first.cluster.gpu.capacity,
        "locks": locks,
        "assumed": setup.assumed,
        "apply": {"framework": first.training.framework.name, "global-batch": str(first.space.global_batch)},
        "yours": yours,
        "out_of_reach": out_of_reach(searches[-1].space),
    }
    try:
        result = search(searches, objective=request.objective, margin=request.margin_bytes, top=TOP, sampler=sampler)
    except NothingFits as error:
        return {
            **about,
            "points": [],
            "pareto": [],
            "best": [],
            "fitting": 0,
            "sampled": 0,
            "nearest_miss": _miss(error),
            "error": str(error),
        }
    best = result.layouts[0]
    exact = {_key(estimate.layout): estimate for estimate in (*result.layouts, *result.pareto)}
    places = {key: index for index, key in enumerate(exact)}
    points = [_point(estimate.memory.total, seconds(estimate), estimate.layout, best) for estimate in exact.values()]
    rest = [row for row in sampler.rows if _key(row[2]) not in places]
    every = max(1, -(-len(rest) // max(1, MOST - len(points))))
    points += [_point(*row, best) for row in rest[::every]]
    return {
        **about,
        "points": points,
        "pareto": [places[_key(estimate.layout)] for estimate in result.pareto],
        "best": [places[_key(estimate.layout)] for estimate in result.layouts],
        "why": [*tighter(result), *why(result)],
        "evaluated": result.evaluated,
        "valid": result.valid,
        "fitting": result.fitting,
        "sampled": len(points),
        "seconds": result.seconds,
        "nearest_miss": None,
    }


def plan_of(flags: State, locks: list[str], model: str) -> PlanRequest:
    """The request that the page's flags make: of the open axes only those that are locked."""
    locked = {name.replace("-", "_") for name in locks}
    fields: dict[str, Any] = {}
    for key, value in flags.items():
        name, text = key.replace("-", "_"), written(key, value)
        if not text or name not in (*JOB_FIELDS, *RANKING):
            continue
        if name in OPEN_AXES and name not in locked:
            continue
        if NEEDED.get(name, name) in {*locked, name} and (text != "false" or name in OPEN_AXES):
            fields[name] = text
    return PlanRequest.of(model, fields)


def _open(flags: State, locks: list[str]) -> State:
    """The flags without the open axes, which a captured model may not have."""
    return {name: value for name, value in flags.items() if name.replace("-", "_") not in OPEN_AXES or name in locks}


def _key(layout: Layout) -> object:
    return tuple(str(getattr(layout, name)) for name in Layout.__struct_fields__ if name not in ("tokens", "pairs"))


def _point(memory: float, step: float, layout: Layout, best: Estimate) -> list[Any]:
    """One row. Of the same batch on the same GPUs, utilisation is inversely proportional to the time."""
    stages = layout.stage_layers
    texts = {
        "recompute": str(layout.recompute),
        "schedule": layout.schedule if layout.pp > 1 else "",
        "sequence_parallel": layout.sequence_parallel,
        "stage_layers": "" if stages is None else stage_words(stages),
    }
    mfu = best.timing.mfu * best.timing.step / step
    return [memory, mfu, step, *(texts[name] if name in texts else int(getattr(layout, name)) for name in COLUMNS[3:])]


def _yours(flags: State, uploads: Uploads) -> dict[str, Any] | None:
    """The run of the flags themselves; None where there is no such layout."""
    try:
        estimate = job_of(flags, uploads).estimate()
    except Error:
        return None
    time = estimate.time
    return {
        "memory": estimate.memory.total,
        "fits": estimate.memory.fits,
        "mfu": None if time is None else time.mfu,
        "step": None if time is None else time.step,
        "framework": estimate.training.framework.name,
    }


def _miss(error: NothingFits) -> dict[str, Any]:
    nearest = error.nearest
    assert isinstance(nearest, Estimate)
    return {
        "missing": error.missing,
        "verdict": nearest.memory.verdict,
        "point": _point(nearest.memory.total, seconds(nearest), nearest.layout, nearest),
    }
