"""The state of the page, the flags of `loadgauge estimate` as texts, read by the command's own parser."""

from __future__ import annotations

import re
from typing import Any

import click
import msgspec

from loadgauge.cli import estimate
from loadgauge.cli.options import parse
from loadgauge.errors import ConfigError
from loadgauge.estimate.result import Estimate
from loadgauge.families.catalogue import model as catalogued
from loadgauge.resolve.reproduce import completer
from loadgauge.resolve.resolve import resolve_job
from loadgauge.resolve.setup import Setup
from loadgauge.spec.job import Job
from loadgauge.spec.model import ModelSpec
from loadgauge.web.uploads import PREFIX, Uploads

LONGEST = 2000
"""Characters of a flag's value."""
FLAGS = Job.__struct_fields__[1:]
"""Parameters of the command that say what is trained; others say what is printed, and where a file is written."""
UNIFORM = re.compile(r"uniform:[0-9]{1,8}")
"""Lengths that need no file."""
State = dict[str, Any]


def options() -> dict[str, click.Option]:
    """The options of `estimate` that the page knows, by the name it has for them.

    >>> options()["seq-len"].name
    'seq_len'
    """
    return {
        str(param.name).replace("_", "-"): param
        for param in estimate.command.params
        if isinstance(param, click.Option) and param.name in FLAGS
    }


def arguments(state: State) -> list[str]:
    """The words of a command line, without the model; a key that is no flag raises `ConfigError`.

    >>> arguments({"model": "gpt2", "tp": "2", "sequence-parallel": "true", "mtp": "false", "zero": ""})
    ['--tp=2', '--sequence-parallel']
    """
    known, words = options(), []
    for name, value in state.items():
        if name == "model":
            continue
        if name not in known:
            raise ConfigError(f"no flag of this name{_close(name, list(known))}", key=str(name)[:60])
        text = written(name, value)
        if known[name].is_flag:
            if text not in ("true", "false", ""):
                raise ConfigError(f"must be true or false, got {text[:40]!r}", key=name)
            words += [f"--{name}"] if text == "true" else []
        elif text:
            words.append(f"--{name}={text}")
    return words


def written(name: str, value: Any) -> str:
    """A value of the state as a text; empty where it is not given."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if not isinstance(value, str):
        raise ConfigError("must be a text or a number", key=name)
    if len(value) > LONGEST:
        raise ConfigError(f"is longer than {LONGEST} characters", key=name)
    if "\0" in value:
        raise ConfigError("has a zero byte in it", key=name)
    return value.strip()


def _close(name: str, known: list[str]) -> str:
    from difflib import get_close_matches  # only on the way to an error

    close = get_close_matches(str(name)[:60], known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def model_of(state: State, uploads: Uploads) -> ModelSpec:
    """The model of a state: of the catalogue, or one that was handed in. Never a path, whatever lies there."""
    name = written("model", state.get("model", ""))
    if not name:
        raise ConfigError("none is chosen", key="model")
    if name.startswith(PREFIX):
        return uploads.model(name)
    return catalogued(name)


def files_of(state: State, uploads: Uploads) -> State:
    """The state with where its files are kept in place of their ids. Any other file, wherever it is named, is refused."""
    measured, lengths = (written(name, state.get(name, "")) for name in ("measured", "lengths"))
    if "lengths" in measured:
        raise ConfigError("a file of lengths cannot be named here", key="measured")
    if not lengths or UNIFORM.fullmatch(lengths):
        return state
    return {**state, "lengths": uploads.path(lengths, "lengths")}


def request_of(state: State, uploads: Uploads) -> Job:
    """The flags as the command reads them. Files are those that were handed in, and no others."""
    words = arguments(files_of(state, uploads))
    return parse([*words, "--", written("model", state["model"])])


def job_of(state: State, uploads: Uploads) -> Setup:
    """The run that a state means, as `loadgauge estimate` understands it."""
    spec = model_of(state, uploads)
    return resolve_job(request_of(state, uploads), spec)


def command_line(given: Setup, result: Estimate, uploads: Uploads) -> str:
    """The command that prints the same numbers; what was handed in goes by the name that its file had."""
    return named(completer(given.job)(result), uploads).command()


def named(job: Job, uploads: Uploads) -> Job:
    """The job with the names of files instead of where they are kept."""
    changes: dict[str, Any] = {}
    if job.model.startswith(PREFIX):
        changes["model"] = uploads.name(job.model)
    if job.lengths is not None and not UNIFORM.fullmatch(job.lengths):
        changes["lengths"] = uploads.name_of_path(job.lengths)
    return msgspec.structs.replace(job, **changes) if changes else job
