"""Models that are captured from their own code: how the page knows them, and what it shows of them.

The server and its processes make no captures themselves: where one is missing they raise `NotYet`, and `web.captures` has it made.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge.core.base import Door, Error, NotModelled, first_line
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.axes import AXES, DEGREES, MODEL_PARALLEL
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.families.catalogue import Found
from loadgauge.page.server.errors import Closed

if TYPE_CHECKING:
    from loadgauge.pytorch.capture.requests.regime import Regime, Tuned
    from loadgauge.pytorch.capture.road import OnDemand

PYTORCH = Door("pytorch")

MOST = 16
"""Captured models that a process keeps at hand."""
PROBED = (2, 3, 4, 5, 8)
"""Degrees of an axis that is closed where none of them is possible: a size that does not divide is not the axis's fault."""
_families: OrderedDict[bytes, OnDemand] = OrderedDict()


class Wanted(msgspec.Struct, frozen=True):
    """A capture that is to be made: the configuration, its name, and in which regime and at which sizes it runs."""

    name: str
    keys: dict[str, Any]
    regime: dict[str, Any]
    sizes: dict[str, int]

    @property
    def key(self) -> Regime:
        """The regime, of a type that is PyTorch's room's."""
        regime: Regime = msgspec.convert(self.regime, PYTORCH.Regime)
        return regime


def family(name: str, keys: dict[str, Any], tuned: Tuned | None = None, job: Job | None = None) -> OnDemand:
    """The captured family of a configuration, the same one each time. name: of its file or of the catalogue

    job: its lengths beside that of the first text are the family's own
    """
    lengths = (None, None) if job is None else (job.target_len, job.audio)
    tuned = tuned or PYTORCH.WHOLE
    key = msgspec.json.encode([name, keys, tuned, lengths], order="deterministic")
    if key not in _families:
        stem = name.removesuffix(".json")
        target = str(keys.get("model_type", "")) if stem in ("config", "") else name
        _families[key] = PYTORCH.OnDemand(target or name, keys=keys, where="nowhere", tuned=tuned)
        _families[key].most = 0
        if len(_families) > MOST:
            _families.popitem(last=False)
    _families.move_to_end(key)
    return _families[key]


def by_road(job: Job, read: Callable[[], Found], config: Callable[[], tuple[str, dict[str, Any]]]) -> Found:
    """The model of a job as its family reads it, or captured where none does or the job asks for that.

    read: by its family; config: its name and its keys. Raises as they do, and `NotYet`.
    """
    why = ""
    if job.road != "captured":
        try:
            return read()
        except NotModelled:
            if job.road == "written":
                raise
            why = "no family here reads it"
    name, keys = config()
    PYTORCH.check_keys(name, keys)
    looked_up: Found = PYTORCH.taken(job, family(name, keys, PYTORCH.Tuned.of(job), job), why)
    beside = {axis: getattr(job, axis) or 1 for axis in DEGREES}
    if any(degree > 1 for degree in beside.values()):
        shut = closed(looked_up.spec)
        if axes := [axis for axis, degree in beside.items() if degree > 1 and axis in shut]:
            raise Closed("; ".join(_problem(looked_up.spec, axis, beside[axis]) or shut[axis] for axis in axes), axes)
    return looked_up


def closed(model: ModelSpec) -> dict[str, str]:
    """The axes that no layout of a model can have, each with what is said of its smallest degree.

    >>> from loadgauge import model
    >>> closed(model("llama-3.1-8b"))
    {'ep': 'ep = 2, etp = 1: the model has no experts', 'etp': 'ep = 1, etp = 2: the model has no experts'}
    """
    problems_of: dict[str, str] = {}
    for axis in MODEL_PARALLEL:
        problems = [_problem(model, axis, degree) for degree in PROBED]
        if all(problems):
            problems_of[axis] = problems[0]
    return problems_of


def _problem(model: ModelSpec, axis: str, degree: int) -> str:
    along = axis == "tp" and model.listed is None  # plans of classes do not state sequence parallelism
    shape: dict[str, Any] = {"dp": degree if AXES[axis].experts else 1, "sequence_parallel": along, axis: degree}
    return next(iter(Layout(micro_batch=1, global_batch=240, seq_len=480, **shape).valid(model)), "")


def facts(model: ModelSpec, how: str) -> dict[str, Any] | None:
    """Return the facts on a captured model for the page: source, closed axes, what is not known; None for a written one."""
    if model.listed is None:
        return None
    return {"how": how, "closed": closed(model), "notes": list(model.listed.notes)}


# -- in the process that captures --------------------------------------------------------------------------------------


def capture(wanted: dict[str, Any], stage: str) -> dict[str, Any]:
    """Capture a model in this process and keep it on disk. stage: a file that has what is being done, while it is done

    Raises `Error`. Nothing is fetched, and code that a configuration names (`auto_map`) is not run.
    """
    asked = msgspec.convert(wanted, Wanted)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    if hasattr(os, "nice"):
        os.nice(5)  # the page goes on meanwhile
    Path(stage).write_text("imports", encoding="utf-8")
    import transformers  # noqa: F401

    Path(stage).write_text("runs", encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="loadgauge-") as folder:
        config_file = Path(folder) / "config.json"
        config_file.write_bytes(msgspec.json.encode(asked.keys))
        target = PYTORCH.OnDemand(str(config_file), where="here", tuned=asked.key.tuned)
        try:
            target.document(asked.key, asked.sizes)
        except Error as error:
            raise type(error)(str(error).replace(str(config_file), asked.name)) from None
        except Exception as error:
            raise NotModelled(f"{asked.name} cannot be run: {type(error).__name__}: {first_line(error)}") from None
        file = target.file(asked.key)
    assert file is not None
    return {"seconds": target.took, "kept": file.is_file(), "folder": str(file.parent)}
