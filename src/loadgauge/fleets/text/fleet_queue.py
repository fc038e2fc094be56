"""`loadgauge fleet --jobs` and `--sweep`: several runs on one fleet, and one run on many fleets."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from loadgauge._version import __version__
from loadgauge.core.answers.answer import Answer
from loadgauge.core.answers.plan.progress import clear, progress
from loadgauge.core.base import ConfigError, Door, Error, refuse
from loadgauge.core.definitions.job.job import Job, fields
from loadgauge.core.plan.space.grid import Cell, Row, key, run
from loadgauge.core.text.table import Column, Paper, draw, points
from loadgauge.fleets.fleet import Options, fleet
from loadgauge.fleets.layouts import chosen
from loadgauge.fleets.queue import Want, pack, read_jobs

MORE = (1.0, 1.1, 1.25, 1.5)
"""Times the fleet."""


def queue(file: str, model: str | None, flags: dict[str, Any], options: dict[str, Any]) -> Answer:
    """Return when each run of a file has its GPUs, and what more GPUs bring.

    model, flags: what holds for every run that does not say otherwise
    """
    stated, jobs = read_jobs(file)
    common = {name: value for name, value in flags.items() if value is not None and name in fields()}
    size = common.pop("gpus", None) or stated
    if size is None:
        raise ConfigError("is missing: the GPUs of the whole fleet, such as gpus = 1024", key="gpus")
    wants = [_want(number, dict(job), model, common, options, file) for number, job in enumerate(jobs)]
    packed, grown = pack(wants, size), [pack(wants, int(size * factor)) for factor in MORE]
    return Answer(
        form="fleet.jobs",
        writer="loadgauge.fleets.text.fleet_queue:write",
        shown=(packed, grown),
        document={"fleet": msgspec.to_builtins(packed), "more": [msgspec.to_builtins(larger) for larger in grown]},
    )


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write when each run has its GPUs; brief: the whole queue in a line, and what a tenth more GPUs bring"""
    packed, grown = answer.shown
    target.print(
        f"{packed.days:,.1f} DAYS  {len(packed.slots)} runs on {packed.gpus:,} GPUs: {packed.used:.0%} of the GPU-days are used, a"
        f" run waits {packed.waited:,.1f} days",
        style="bold",
        soft_wrap=True,
    )
    tenth = grown[1]
    points(
        target,
        [
            f"A tenth more GPUs: done in {tenth.days:,.1f} days ({tenth.days / packed.days - 1:+.1%}), a run waits"
            f" {tenth.waited:,.1f} days.",
            "By priority, then as they came; a later run goes first where it does not delay an earlier one. None is stopped.",
        ],
        "",
    )
    if not brief:
        draw(
            target,
            [Column("run", wrap=True), *(Column(name, "right") for name in ("GPUs", "from day", "to day", "waits"))],
            [
                [slot.name, f"{slot.gpus:,}", f"{slot.start:,.1f}", f"{slot.end:,.1f}", f"{slot.waited:,.1f}"]
                for slot in packed.slots
            ],
            "Runs",
        )
        draw(
            target,
            [Column(name, "right") for name in ("GPUs", "days", "used", "waits")],
            [
                [f"{larger.gpus:,}", f"{larger.days:,.1f}", f"{larger.used:.0%}", f"{larger.waited:,.1f}"]
                for larger in grown
            ],
            "With more GPUs",
            [0],
        )


def _want(
    number: int, job: dict[str, Any], model: str | None, common: dict[str, Any], options: dict[str, Any], file: str
) -> Want:
    """One run of a queue: days as stated, or simulated."""
    own: dict[str, Any] = {word: job.pop(word) for word in ("name", "priority", "comes") if word in job}
    name = str(own.pop("name", f"run {number + 1}"))
    try:
        if "days" in job:
            return msgspec.convert({"name": name, **own, **job}, Want)
        called = job.pop("model", model)
        refuse(called is None, "needs a model, or days", key="model")
        values = {name: value if isinstance(value, bool) else str(value) for name, value in job.items()}
        asked = Job.of(str(called), {**common, **values})
        if asked.tokens is None or asked.gpus is None:
            raise ConfigError("needs gpus and tokens, or gpus and days", key=name)
        result, _, _ = chosen(asked, options)
        result_of = fleet(result, asked.tokens, Options(**{**options, "runs": options.get("runs", 200)}))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}", file=file) from None
    return Want(name=name, gpus=result_of.gpus, days=result_of.days[1], **own)


# -- sweeps ------------------------------------------------------------------------------------------------------------


def work(cell: Cell, files: dict[str, bytes]) -> Row:
    """Simulate one cell; its words are the JSON of a job and of options. Raises nothing."""
    asked = json.loads(cell.words[0])
    row: Row = {"key": cell.key, "loadgauge": __version__, **asked["axes"]}
    try:
        job = Job.of(asked["model"], asked["job"])
        result, _, _ = chosen(job, asked["options"])
        simulated = fleet(result, job.tokens or "", Options(**asked["options"]), price=job.price)
    except Error as error:
        return {**row, "error": str(error)}
    low, middle, high = simulated.days
    return {
        **row,
        "days_p10": low,
        "days": middle,
        "days_p90": high,
        "goodput": simulated.goodput[1],
        "gpu_hours": simulated.gpu_hours,
        "tokens_per_second": simulated.tokens_per_second,
        "step": simulated.step,
    }


def sweep(job: Job, flags: dict[str, Any], more: dict[str, Any]) -> Answer:
    """Simulate every combination of values, those that the output has already left out."""
    axes: dict[str, list[str]] = {}
    for text in more["sweep"]:
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        refuse(
            name not in Options.__struct_fields__ and name not in fields(),
            f"no flag of a fleet is called {name!r}",
            key="sweep",
        )
        refuse(not values, f"must be like spares=0,1%,2%, got {text!r}", key="sweep")
        axes[name] = [value.strip() for value in values.split(",")]
    base = {name: getattr(job, name) for name in Job.__struct_fields__[1:] if getattr(job, name) is not None}
    cells = []
    for combination in itertools.product(*axes.values()):
        swept = dict(zip(axes, combination, strict=True))
        options = {**flags, **{name: value for name, value in swept.items() if name in Options.__struct_fields__}}
        for name in ("runs", "seed"):
            if name in options:
                options[name] = int(options[name])
        values = {**base, **{name: value for name, value in swept.items() if name not in Options.__struct_fields__}}
        content = {"model": job.model, "job": values, "options": options, "axes": swept}
        cells.append(Cell(key=key(content, __version__), words=(json.dumps(content, sort_keys=True),)))
    kept = _kept(more["output"])
    rows: dict[str, Row] = {cell.key: kept[cell.key] for cell in cells if cell.key in kept}
    missing = [cell for cell in cells if cell.key not in rows]
    try:
        if more["ray"] is not None:
            _through(
                Door("sheets").OnRay(work, more["ray"], more["workers"], {}), missing, rows, more["output"], len(cells)
            )
        elif (more["workers"] or 1) > 1 and len(missing) > 1:
            _through(Door("sheets").Processes(work, more["workers"]), missing, rows, more["output"], len(cells))
        else:
            for cell in missing:
                rows[cell.key] = work(cell, {})
                _write(more["output"], [rows[cell.key]])
                progress(len(rows), len(cells))
    finally:
        clear()
    listed = [rows[cell.key] for cell in cells]
    return Answer(
        form="fleet.sweep",
        writer="loadgauge.fleets.text.fleet_queue:write_sweep",
        shown=(list(axes), len(missing)),
        document={"cells": listed},
        table=listed,
        command=job.command("fleet"),
    )


def write_sweep(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write fleets side by side."""
    axes, missing = answer.shown
    columns = [
        *(Column(name.replace("_", "-")) for name in axes),
        *(Column(name, "right") for name in ("days", "80 %", "goodput", "GPU-hours")),
    ]
    title = f"{len(answer.table)} fleets, {missing} simulated now"
    draw(target, columns, [_row(row, axes) for row in answer.table], title, [])


def _through(workers: Any, missing: list[Cell], rows: dict[str, Row], output: str | None, whole: int) -> None:
    lost = {"loadgauge": __version__, "error": "its worker died"}
    for row in run(
        missing, workers, lambda done: _write(output, done), lambda cell: {"key": cell.key, **lost}, __version__
    ):
        rows[row["key"]] = row
        progress(len(rows), whole)


def _row(row: Mapping[str, Any], axes: list[str]) -> list[str]:
    values = [str(row.get(name, "")) for name in axes]
    if "error" in row:
        return [*values, row["error"][:60], "", "", ""]
    return [
        *values,
        f"{row['days']:,.1f}",
        f"{row['days_p10']:,.1f}-{row['days_p90']:,.1f}",
        f"{row['goodput']:.1%}",
        f"{row['gpu_hours']:,.0f}",
    ]


def _kept(output: str | None) -> dict[str, Row]:
    if output is None or not Path(output).exists():
        return {}
    by_key: dict[str, Row] = {}
    for number, text in enumerate(Path(output).read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(text)
            by_key[row["key"]] = row
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"line {number} is no answer of a sweep", file=output) from None
    return by_key


def _write(output: str | None, rows: list[Row]) -> None:
    if output is not None:
        with Path(output).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
