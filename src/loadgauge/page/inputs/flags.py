"""The state of the page: the flags of `loadgauge estimate` as texts, read as a `Job`."""

import re
from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, Door, is_script, refuse
from loadgauge.core.definitions.job.job import Job, fields
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.families.catalogue import Found, find, keys as keys_of, model as catalogued, names_file
from loadgauge.core.resolve.reproduce import completer
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup
from loadgauge.page.inputs.uploads import PREFIX, Uploads
from loadgauge.page.panels.captured import by_road

JOB_FILES = Door("job_files")

LONGEST = 2000
"""Characters of a flag's value."""
UNIFORM = re.compile(r"uniform:[0-9]{1,8}")
"""Lengths that need no file."""
CHOSEN = ("road",)
"""Fields about files that name none."""
State = dict[str, Any]


def written(name: str, value: Any) -> str:
    """A value of the state as text, empty if not given. Raises `ConfigError` for what no control of the page can give."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if not isinstance(value, str):
        raise ConfigError("must be a text or a number", key=name)
    refuse(len(value) > LONGEST, f"is longer than {LONGEST} characters", key=name)
    refuse("\0" in value, "has a zero byte in it", key=name)
    return value.strip()


def model_of(job: Job, uploads: Uploads) -> Found:
    """The model of a job: from the catalogue or handed in, never from a path or a script, by the road that the job asks for.

    Raises `ConfigError`, `NotModelled`, or `NotYet` where it is to be captured.
    """
    name = job.model
    refuse(is_script(name), "the page runs no script; `loadgauge estimate` takes one", key="model")
    if not name.startswith(PREFIX):
        if names_file(name):
            catalogued(name)  # which says that there is none of that name
        return by_road(job, lambda: find(name), lambda: (name, keys_of(name)))
    return by_road(job, lambda: Found(uploads.model(name)), lambda: uploads.keys(name))


def files_of(state: State, uploads: Uploads) -> State:
    """The state with ids of uploads replaced by the paths where they are kept. Raises `ConfigError` for any other file."""
    for name, field in fields().items():
        refuse(
            field.group == "file" and name not in CHOSEN and written(name, state.get(name, "")),
            "a file cannot be named here; drop it onto the page",
            key=name,
        )
    gpu, topology, measured, lengths = (
        written(name, state.get(name, "")) for name in ("gpu", "topology", "measured", "lengths")
    )
    for name, value in (("gpu", gpu), ("topology", topology)):
        refuse(value.endswith(".toml"), "a file cannot be named here; a size can, as memory", key=name)
    refuse(measured.endswith(".toml"), "a file cannot be named here; step=2.1s and its flags can", key="measured")
    refuse("lengths" in measured, "a file of lengths cannot be named here", key="measured")
    if not lengths or UNIFORM.fullmatch(lengths):
        return state
    return {**state, "lengths": uploads.path(lengths, "lengths")}


def request_of(state: State, uploads: Uploads) -> Job:
    """The job that a state asks for. Files are those that were handed in, and no others.

    A switch that is off is not given, as the page has no third position; nor is what goes with a GPU (the file that was
    dropped says it) before one is chosen. Raises `ConfigError`.
    """
    texts = {name: written(name, value) for name, value in files_of(state, uploads).items()}
    if not texts.get("gpu"):
        texts = {name: text for name, text in texts.items() if name.replace("-", "_") not in JOB_FILES.WITH_GPU}
    model = texts.pop("model", "")
    refuse(not model, "none is chosen", key="model")
    off = {name for name, text in texts.items() if text == "false" and _is_switch(name)}
    return Job.of(model, {name: text or None for name, text in texts.items() if name not in off})


def _is_switch(name: str) -> bool:
    field = fields().get(name.replace("-", "_"))
    return field is not None and field.kind == "switch"


def job_of(state: State, uploads: Uploads) -> Setup:
    """Resolve the run that a state asks for, as `loadgauge estimate` does. Raises an `Error` where it cannot be run."""
    job = request_of(state, uploads)
    looked_up = model_of(job, uploads)
    return noted(resolve_job(job, looked_up.spec), looked_up)


def noted(setup: Setup, looked_up: Found) -> Setup:
    """The run with how its model was read among its assumptions, where that is not by its own name."""
    if looked_up.spec.listed is None:
        return setup
    return msgspec.structs.replace(
        setup, assumed={"model": f"{looked_up.spec.name} ({looked_up.how})", **setup.assumed}
    )


def command_line(setup: Setup, result: Estimate, uploads: Uploads) -> str:
    """The command line that prints the same numbers, with the original names of uploaded files."""
    return named(completer(setup.job)(result), uploads).command()


def named(job: Job, uploads: Uploads) -> Job:
    """The job with the original names of uploaded files instead of where they are kept."""
    changes: dict[str, Any] = {}
    if job.model.startswith(PREFIX):
        changes["model"] = uploads.name(job.model)
    if job.lengths is not None and not UNIFORM.fullmatch(job.lengths):
        changes["lengths"] = uploads.name_of_path(job.lengths)
    return msgspec.structs.replace(job, **changes) if changes else job
