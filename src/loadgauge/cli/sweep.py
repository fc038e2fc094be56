"""`loadgauge plan --sweep FILE`: a plan for each cell of a file, on the processes of this machine or on a Ray cluster."""

from __future__ import annotations

import hashlib
import os
import shlex
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from click.core import ParameterSource

from loadgauge._version import __version__
from loadgauge.cli.param_types import Positive, Whole
from loadgauge.errors import ConfigError, Error, NothingFits
from loadgauge.spec.axes import DEGREES
from loadgauge.spec.job import Job

if TYPE_CHECKING:
    from loadgauge.estimate.result import Estimate
    from loadgauge.plan.plan import Case, Plan
    from loadgauge.plan.sweep.grid import Cell, Row, Value
    from loadgauge.plan.sweep.results import Kind
    from loadgauge.resolve.setup import Setup

Command = TypeVar("Command", bound=Callable[..., Any])

OWN = ("sweep", "output", "workers", "ray")
"""Flags of `plan` that are about a sweep."""
ALSO = ("objective", "margin", "price")
"""Flags of `plan` that a cell may have, beside those of a run."""
OUTCOMES = {0: "fits", 1: "nothing fits", 2: "cannot tell"}
"""What the exit code of a single plan says."""
AXES = ("dp", *DEGREES, "zero", "replicas", "micro_batch", "num_microbatches")
NUMBERS = (
    *("memory_total", "memory_capacity", "missing", "step", "step_low", "step_high", "mfu", "hfu"),
    *("tokens_per_second_per_gpu", "cost_per_billion_tokens", "inner_bandwidth", "outer_bandwidth"),
)


def sweep_options(command: Command) -> Command:
    """Gives `plan` the flags of a sweep."""
    own = (
        click.option("--sweep", metavar="FILE", help="Plan every cell of a TOML file: lists of models, GPUs, sizes, links."),
        click.option("--output", metavar="FOLDER", help="Where the results of a sweep go, as Parquet (FILE-results)."),
        click.option("--workers", type=Whole(1, 10**5), help="Plans of a sweep at a time (one for each processor)."),
        click.option("--ray", metavar="ADDRESS", help="Plan a sweep on this Ray cluster: auto, or HOST:PORT."),
    )  # fmt: skip
    for option in reversed(own):
        command = option(command)
    return command


def handed_over(model: str | None, flags: dict[str, Any], *, as_json: bool) -> int | None:
    """The exit code where a sweep was asked for; None for one plan. Takes the flags of a sweep out of the others."""
    file, output, workers, ray = (flags.pop(name) for name in OWN)
    if file is None:
        for name, value in (("output", output), ("workers", workers), ("ray", ray)):
            if value is not None:
                raise ConfigError("goes with --sweep", key=name)
        if model is None:
            raise click.UsageError("Missing argument 'MODEL'.", click.get_current_context())
        return None
    context = click.get_current_context()
    for name in (*flags, "model"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError("stands in the sweep's file, not beside --sweep", key=name.replace("_", "-"))
    return _sweep(file, output or f"{Path(file).stem}-results", workers, ray, as_json=as_json)


def _sweep(file: str, output: str, workers: int | None, ray: str | None, *, as_json: bool) -> int:
    """Plans what is not there yet, and tells of all."""
    from loadgauge.plan.sweep.grid import DEATHS, run
    from loadgauge.plan.sweep.results import Results
    from loadgauge.plan.sweep.workers import Interrupt, OnRay, Processes, processors
    from loadgauge.report.sweep import Progress, told

    started = time.perf_counter()
    wanted, files = cells(file)
    with Results(output, columns()) as results:
        there = results.rows()
        left = [cell for cell in wanted if cell.key not in there]
        found = {cell.key: there[cell.key] for cell in wanted if cell.key in there}
        resumed = len(found)
        if left:
            where = (
                Processes(work, min(workers or processors(), len(left)))
                if ray is None
                else OnRay(work, ray, workers, files)
            )
            with Interrupt() as interrupt, Progress(len(wanted), found.values()) as progress:
                try:
                    for row in run(left, where, results.add, lost, __version__):
                        found[row["cell"]] = row
                        progress.add(row)
                        interrupt.check()
                except KeyboardInterrupt:
                    done = f"{len(found):,} of {len(wanted):,} cells are done"
                    raise Error(f"interrupted: {done}; the same command goes on from there") from None
    rows = [found[cell.key] for cell in wanted]
    others = sum(1 for key in there if key not in found)
    given_up = sum(row["code"] == 2 and row["deaths"] >= DEATHS for row in rows)
    seconds = time.perf_counter() - started
    told(rows, output=output, resumed=resumed, others=others, lost=given_up, seconds=seconds, as_json=as_json)
    return 2 if given_up else min(int(row["code"]) for row in rows)


# -- the cells ----------------------------------------------------------------------------------------------------------


@cache
def _parameters() -> dict[str, click.Option]:
    """The flags of `plan` that a cell may have, by name."""
    from loadgauge.cli.plan import command

    known = {*Job.__struct_fields__, *ALSO}
    return {
        str(parameter.name): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name in known
    }


def cells(file: str) -> tuple[list[Cell], dict[str, bytes]]:
    """The cells of a sweep's file, and the files that they name. Raises `ConfigError` for what no `plan` would take."""
    from loadgauge.plan.sweep.grid import LONGEST_FILE, Cell, key, read

    if os.path.exists(file) and not os.path.isfile(file):
        raise ConfigError("is not a regular file", file=file)
    try:
        with open(file, "rb") as opened:
            text = opened.read(4 * LONGEST_FILE).decode()
    except (UnicodeDecodeError, ValueError):
        raise ConfigError("is no text in UTF-8", file=file) from None
    checks: dict[str, Callable[[Any], Value]] = {
        "model": _text,
        **{name: _check(name) for name in _parameters()},
    }
    spans = read(text, checks, file)
    for name in ("model", "gpu"):
        if any(name not in span for span in spans):
            raise ConfigError("is missing: every cell needs one", key=name, file=file)
    files: dict[str, bytes] = {}
    hashes: dict[str, str] = {}
    found = []
    for span in spans:
        for name in ("model", "lengths"):
            path = span.get(name)
            if isinstance(path, str) and path not in hashes:
                content = _content(path, name)
                hashes[path] = "" if content is None else hashlib.sha256(content[1]).hexdigest()
                files |= {} if content is None else dict([content])
        read_from = {name: hashes[path] for name in ("model", "lengths") if isinstance(path := span.get(name), str)}
        said = {name: value for name, value in span.items() if name == "model" or value != _unsaid()[name]}
        found.append(Cell(key(__version__, said, read_from), _words(said)))
    return list({cell.key: cell for cell in found}.values()), files


def _text(value: Any) -> Value:
    if not isinstance(value, str) or not value.isprintable() or value[:1] in ("", "-"):
        raise ConfigError(f"must be text, got {value!r}"[:80])
    return value


def _check(name: str) -> Callable[[Any], Value]:
    """Reads a value as the command line would."""
    parameter = _parameters()[name]

    def check(value: Any) -> Value:
        if parameter.is_flag:
            if not isinstance(value, bool):
                raise ConfigError(f"must be true or false, got {value!r}"[:80])
            return value
        if isinstance(value, bool):
            raise ConfigError(f"takes a value, got {str(value).lower()}")
        try:
            read = parameter.type.convert(str(value), None, None)
        except click.UsageError as error:
            raise ConfigError(error.message) from None
        if name == "gpus" and (len(read) > 1 or read[0] < 1):
            raise ConfigError(f"must be one number of GPUs from 1, or a list of them, got {value!r}"[:120])
        return ",".join(map(str, read)) if isinstance(read, tuple) else str(read)

    return check


@cache
def _unsaid() -> dict[str, Any]:
    """What every flag is where nobody says it."""
    return _flags(["no-model"])


def _words(said: dict[str, Value]) -> tuple[str, ...]:
    """A cell as one types it."""
    words = []
    for name, value in said.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is False and _parameters()[name].secondary_opts:
            words.append(_parameters()[name].secondary_opts[0])
        elif isinstance(value, str) and name != "model":
            words.append(f"{flag}={value}")
    return str(said["model"]), *words


def _content(path: str, name: str) -> tuple[str, bytes] | None:
    """The file that a model or a list of lengths is read from, and what is in it; None where it is none."""
    from loadgauge.families.catalogue import models

    if name == "model" and path.lower() in models():
        return None
    inside = os.path.join(path, "config.json") if os.path.isdir(path) else path
    try:
        return inside, Path(inside).read_bytes()
    except (OSError, ValueError):
        return None  # The cell itself says what is wrong with it.


# -- one cell, in a worker ----------------------------------------------------------------------------------------------


@cache
def columns() -> dict[str, Kind]:
    """The columns of the results: what was asked, the best layout, what it takes, and how it went."""
    from loadgauge.cli.plan import OPEN

    asked: dict[str, Kind] = {"model": "text"}
    for name, parameter in _parameters().items():
        kind: Kind = "text"
        if name == "gpus" or isinstance(parameter.type, Whole):
            kind = "whole"
        elif isinstance(parameter.type, Positive):
            kind = "number"
        elif parameter.is_flag:
            kind = "truth"
        asked[f"only_{name}" if name in OPEN else name] = kind
    return {
        "cell": "text", "code": "whole", "outcome": "text", "error": "text", **asked, "assumed": "text", "params": "whole",
        "layout": "text", **dict.fromkeys(AXES, "whole"), "sequence_parallel": "truth", "recompute": "text",
        "schedule": "text", **dict.fromkeys(NUMBERS, "number"), "evaluated": "whole", "valid": "whole",
        "fitting": "whole", "seconds": "number", "deaths": "whole", "command": "text", "estimate": "text",
        "loadgauge": "text",
    }  # fmt: skip


def work(cell: Cell, files: dict[str, bytes]) -> Row:
    """The result of a cell, whatever becomes of it. files: what cells name, where this machine may not have it."""
    from loadgauge.cli.plan import cases
    from loadgauge.plan.plan import plan

    started = time.perf_counter()
    row = _inputs(cell)
    with tempfile.TemporaryDirectory(prefix="loadgauge-") as folder:
        try:
            flags = _flags([_at_hand(word, files, folder) for word in cell.words])
            given, found, asked = cases(flags.pop("model"), flags)
            best = plan(found, objective=asked["objective"], margin=asked["margin"], top=1)
            row |= {
                "code": 0,
                "assumed": _assumed(asked["assumed"]),
                **_best(best, found[0]),
                "estimate": _estimate(cell, given, best),
            }
        except NothingFits as error:
            row |= {"code": 1, "error": str(error), "missing": float(error.missing)}
        except (Error, OSError) as error:
            row |= {"code": 2, "error": str(error)}
        except click.ClickException as error:
            row |= {"code": 2, "error": error.format_message()}
        except Exception as error:
            row |= {"code": 2, "error": f"unexpected {type(error).__name__}: {error}; this is a defect"}
        if row.get("error"):
            row["error"] = " ".join(str(row["error"]).replace(f"{folder}{os.sep}", "").split())[:1000]
    return {**row, "outcome": OUTCOMES[row["code"]], "seconds": time.perf_counter() - started}


def lost(cell: Cell) -> Row:
    """What is told of a cell under which several workers died. It is not kept as a result."""
    error = "its worker died each time, as where memory runs out; the same command tries it again"
    return {**_inputs(cell), "code": 2, "outcome": OUTCOMES[2], "error": error}


def _flags(words: list[str]) -> dict[str, Any]:
    """What `plan` would be given by a command line."""
    from loadgauge.cli.plan import command

    flags = dict(command.make_context("plan", words).params)
    for name in (*OWN, "as_json"):
        flags.pop(name)
    return flags


def _inputs(cell: Cell) -> Row:
    """What a cell asks, as columns."""
    kinds, row = columns(), {}
    for name, value in _flags(list(cell.words)).items():
        column = next((column for column in (f"only_{name}", name) if column in kinds), None)
        if column is None:
            continue
        if name == "gpus":
            value = None if value is None else value[0]
        row[column] = ",".join(map(str, value)) if isinstance(value, tuple) else value
    command = shlex.join(["loadgauge", "plan", *cell.words])
    return {"cell": cell.key, "loadgauge": __version__, "command": command, **row}


def _at_hand(word: str, files: dict[str, bytes], folder: str) -> str:
    """A word of the command line, with a file that this machine has not (or has another of) put at hand."""
    path = word.removeprefix("--lengths=")
    inside = next((name for name in (path, os.path.join(path, "config.json")) if name in files), None)
    if inside is None:
        return word
    try:
        if Path(inside).read_bytes() == files[inside]:
            return word
    except OSError:
        pass
    copy = Path(folder, Path(inside).absolute().parent.name, Path(inside).name)
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes(files[inside])
    return word.replace(path, str(copy))


def _assumed(flags: dict[str, str]) -> str:
    return ", ".join(f"{flag} {value}" for flag, value in flags.items())


def _estimate(cell: Cell, given: Setup, found: Plan) -> str:
    """The command line that gives the best layout. Files have the names that the cell gives them."""
    from loadgauge.resolve.reproduce import completer

    typed, complete = _flags(list(cell.words)), completer(given.job)(found.layouts[0])
    return msgspec.structs.replace(complete, model=typed["model"], lengths=typed["lengths"]).command()


def _best(found: Plan, case: Case) -> Row:
    """The best layout, as columns."""
    from loadgauge.resolve.reproduce import layout_flags

    best: Estimate = found.layouts[0]
    layout, memory, time_ = best.layout, best.memory, best.time
    links = case.cluster.links
    assert time_ is not None
    cost = None
    if case.price is not None:
        cost = case.price * layout.gpus * time_.step / 3600 / time_.tokens * 1e9
    return {
        "gpus": layout.gpus, "params": best.params, "layout": layout_flags(best),
        **{name: int(getattr(layout, name)) for name in AXES},
        "sequence_parallel": layout.sequence_parallel, "recompute": str(layout.recompute),
        "schedule": layout.schedule if layout.pp > 1 else None, "memory_total": float(memory.total),
        "memory_capacity": memory.capacity, "step": time_.step, "step_low": time_.low, "step_high": time_.high,
        "mfu": time_.mfu, "hfu": time_.hfu, "tokens_per_second_per_gpu": time_.tokens_per_second_per_gpu,
        "cost_per_billion_tokens": cost,
        "inner_bandwidth": links[0].bandwidth if links[0].domain > 1 else None,
        "outer_bandwidth": links[-1].bandwidth if len(links) > 1 else None,
        "evaluated": found.evaluated, "valid": found.valid, "fitting": found.fitting,
    }  # fmt: skip
