"""The cells of a sweep: read from its file, planned one by one, and written as rows of one table."""

import hashlib
import os
import shlex
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from loadgauge._version import __version__
from loadgauge.core.base import ConfigError, Error, NothingFits, read_text, refuse
from loadgauge.core.definitions.job.job import Field, fields
from loadgauge.core.families.catalogue import models
from loadgauge.core.plan.answer import Plan, answer
from loadgauge.core.plan.request import JOB_FIELDS, OPEN_AXES, RANKING, PlanRequest, cases, questions, read_values
from loadgauge.core.plan.search import cost_per_billion_tokens
from loadgauge.core.plan.space.grid import KINDS, LONGEST_FILE, Cell, Kind, Row, Value, key, read
from loadgauge.core.resolve.reproduce import layout_flags

OUTCOMES = {0: "fits", 1: "nothing fits", 2: "cannot tell"}
"""Outcome of a single plan by its exit code."""
SIZES = ("dp", *(name for name in OPEN_AXES if fields()[name].kind == "whole"), "num_microbatches")
"""Sizes of the best layout."""
NUMBERS = (
    *("memory_total", "memory_capacity", "missing", "step", "step_low", "step_high", "mfu", "hfu"),
    *("tokens_per_second_per_gpu", "cost_per_billion_tokens", "inner_bandwidth", "outer_bandwidth"),
)
"""Results that are numbers: bytes, seconds, shares, money, bytes/s."""


@cache
def _asked() -> dict[str, Field]:
    """The fields that a cell may have besides its model, by name."""
    own = {name: fields()[name] for name in JOB_FIELDS if fields()[name].group not in ("file", "posttrain")}
    return own | {name: questions()[name] for name in RANKING}


def cells(file: str) -> tuple[list[Cell], dict[str, bytes]]:
    """The cells of a sweep's file, and the files that they name. Raises `ConfigError` for what no `plan` would take."""
    text = read_text(file, 4 * LONGEST_FILE)
    spans = read(text, {"model": _model, **{name: _check(name) for name in _asked()}}, file)
    for name in ("model", "gpu"):
        refuse(any(name not in span for span in spans), "is missing: every cell needs one", key=name, file=file)
    files: dict[str, bytes] = {}
    hashes: dict[str, str] = {}
    unique: dict[str, Cell] = {}
    for span in spans:
        for name in ("model", "lengths"):
            path = span.get(name)
            if isinstance(path, str) and path not in hashes:
                content = _content(path, name)
                hashes[path] = "" if content is None else hashlib.sha256(content[1]).hexdigest()
                files |= {} if content is None else dict([content])
        read_from = {name: hashes[path] for name in ("model", "lengths") if isinstance(path := span.get(name), str)}
        stated = {name: value for name, value in span.items() if (name, value) != ("objective", "time")}
        cell = Cell(key(__version__, stated, read_from), _words(stated))
        unique.setdefault(cell.key, cell)
    return list(unique.values()), files


def _model(value: Any) -> Value:
    if not isinstance(value, str) or not value.isprintable() or value[:1] in ("", "-"):
        raise ConfigError(f"must be text, got {value!r}"[:80])
    return value


def _check(name: str) -> Callable[[Any], Value]:
    """Reads a value of a field as `plan` would, and writes it as it is typed."""
    field = _asked()[name]

    def check(value: Any) -> Value:
        if field.kind == "switch":
            if not isinstance(value, bool):
                raise ConfigError(f"must be true or false, got {value!r}"[:80])
            return value
        if isinstance(value, bool):
            raise ConfigError(f"takes a value, got {str(value).lower()}")
        text = str(value)
        try:
            if name != "gpus" and name not in OPEN_AXES:
                return str(field.read(text))
            values = read_values(name, text)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix(f"{name}: ")) from None
        if name == "gpus" and len(values) > 1:
            raise ConfigError(f"must be one number of GPUs, or a list of them, got {value!r}"[:120])
        return text if name == "recompute" else ",".join(map(str, values))

    return check


def _words(stated: dict[str, Value]) -> tuple[str, ...]:
    """A cell as it is typed after `loadgauge plan`: the model, then `--name=value`, `--name` or `--no-name`."""
    words = [str(stated["model"])]
    for name, value in stated.items():
        flag = name.replace("_", "-")
        if name != "model":
            words.append(f"--{flag}={value}" if isinstance(value, str) else f"--{flag}" if value else f"--no-{flag}")
    return tuple(words)


def _given(words: tuple[str, ...]) -> dict[str, Value]:
    """The fields of a cell by name; the other direction of `_words`.

    >>> _given(("gpt2", "--seq-len=1024", "--no-qlora"))
    {'model': 'gpt2', 'seq_len': '1024', 'qlora': False}
    """
    flags: dict[str, Value] = dict(zip(("model",), words, strict=False))
    for word in words[1:]:
        flag, equals, value = word.removeprefix("--").partition("=")
        flags[flag.removeprefix("no-").replace("-", "_")] = value if equals else not flag.startswith("no-")
    return flags


def _content(path: str, name: str) -> tuple[str, bytes] | None:
    """The file that a model or a list of lengths is read from, and its bytes; None where it is none."""
    if name == "model" and path.lower() in models():
        return None
    inside = os.path.join(path, "config.json") if os.path.isdir(path) else path
    try:
        return inside, Path(inside).read_bytes()
    except (OSError, ValueError):
        return None  # The cell itself says what is wrong with it.


@cache
def columns() -> dict[str, Kind]:
    """The columns of the results: what was asked, the best layout, what it takes, and how it went."""
    asked: dict[str, Kind] = {"model": "text"}
    for name, field in _asked().items():
        kind = KINDS.get(field.kind, "text")
        if name in OPEN_AXES:
            asked[f"only_{name}"] = "truth" if kind == "truth" else "text"
        else:
            asked[name] = kind
    return {
        "cell": "text",
        "code": "whole",
        "outcome": "text",
        "error": "text",
        **asked,
        "assumed": "text",
        "params": "whole",
        "layout": "text",
        **dict.fromkeys(SIZES, "whole"),
        "sequence_parallel": "truth",
        "recompute": "text",
        "schedule": "text",
        **dict.fromkeys(NUMBERS, "number"),
        "evaluated": "whole",
        "valid": "whole",
        "fitting": "whole",
        "seconds": "number",
        "deaths": "whole",
        "command": "text",
        "estimate": "text",
        "loadgauge": "text",
    }


def work(cell: Cell, files: dict[str, bytes]) -> Row:
    """The result of a cell, whatever becomes of it. files: what cells name, where this machine may not have it."""
    started = time.perf_counter()
    row = _inputs(cell)
    with tempfile.TemporaryDirectory(prefix="loadgauge-") as folder:
        try:
            flags = _given(tuple(_at_hand(word, files, folder) for word in cell.words))
            request = PlanRequest.of(str(flags.pop("model")), flags)
            row |= {"code": 0, **_best(cell, answer(request, *cases(request)))}
        except NothingFits as error:
            row |= {"code": 1, "error": str(error), "missing": float(error.missing)}
        except (Error, OSError) as error:
            row |= {"code": 2, "error": str(error)}
        except Exception as error:
            row |= {"code": 2, "error": f"unexpected {type(error).__name__}: {error}; this is a defect"}
        if row.get("error"):
            row["error"] = " ".join(str(row["error"]).replace(f"{folder}{os.sep}", "").split())[:1000]
    return {**row, "outcome": OUTCOMES[row["code"]], "seconds": time.perf_counter() - started}


def lost(cell: Cell) -> Row:
    """The row of a cell under which several workers died. It is not kept as a result."""
    error = "its worker died each time, as where memory runs out; the same command tries it again"
    return {**_inputs(cell), "code": 2, "outcome": OUTCOMES[2], "error": error}


def _inputs(cell: Cell) -> Row:
    """Return the questions of a cell, as columns."""
    row: Row = {"cell": cell.key, "loadgauge": __version__, "objective": "time"}
    for name, value in _given(cell.words).items():
        field = _asked().get(name)
        if name in OPEN_AXES:
            row[f"only_{name}"] = value
        elif name == "gpus":
            row[name] = read_values(name, value)[0]
        else:
            row[name] = value if field is None else field.read(value)
    return {**row, "command": shlex.join(["loadgauge", "plan", *cell.words])}


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


def _best(cell: Cell, plan: Plan) -> Row:
    """The best layout, as columns. Files have the names that the cell gives them."""
    best, case, flags = plan.best.estimate, plan.case, _given(cell.words)
    layout, memory, time_, links = best.layout, best.memory, best.time, case.cluster.links
    assert time_ is not None
    cost = None if case.price is None else cost_per_billion_tokens(case.price, best)
    command = plan.best.job.replace(model=flags["model"], lengths=flags.get("lengths")).command()
    return {
        "assumed": ", ".join(f"{flag} {value}" for flag, value in plan.setup.assumed.items()),
        "estimate": command,
        "gpus": layout.gpus,
        "params": best.params,
        "layout": layout_flags(best),
        **{name: int(getattr(layout, name)) for name in SIZES},
        "sequence_parallel": layout.sequence_parallel,
        "recompute": str(layout.recompute),
        "schedule": layout.schedule if layout.pp > 1 else None,
        "memory_total": float(memory.total),
        "memory_capacity": memory.capacity,
        "step": time_.step,
        "step_low": time_.low,
        "step_high": time_.high,
        "mfu": time_.mfu,
        "hfu": time_.hfu,
        "tokens_per_second_per_gpu": time_.tokens_per_second_per_gpu,
        "cost_per_billion_tokens": cost,
        "inner_bandwidth": links[0].bandwidth if links[0].domain > 1 else None,
        "outer_bandwidth": links[-1].bandwidth if len(links) > 1 else None,
        "evaluated": plan.result.evaluated,
        "valid": plan.result.valid,
        "fitting": plan.result.fitting,
    }
