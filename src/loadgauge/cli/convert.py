"""`loadgauge convert`: one tool's job file into another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from loadgauge.cli.options import run_options
from loadgauge.errors import ConfigError
from loadgauge.formats.dialects import FILES
from loadgauge.formats.dialects import dialect as dialect_of
from loadgauge.formats.exchange import JobFile, Written, combine, load, read, write
from loadgauge.formats.run import FIELDS, Run
from loadgauge.resolve.export import FLAGS
from loadgauge.resolve.job_file import alike, flags_of, note
from loadgauge.spec.job import Job


@click.command("convert")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--to", "target", required=True, metavar="DIALECT", help=f"{', '.join(FILES)}, or {FLAGS}.")
@click.option("--from", "source", metavar="DIALECT", help="Whose the file is, where its keys do not tell.")
@click.option("--version", metavar="1.6", help="Of the tool that the file is for; the newest unless given.")
@click.option("--onto", metavar="FILE", help="A file of DIALECT to patch; its comments and all else in it stay.")
@click.option("--model", metavar="MODEL", help="Instead of the one that the file names.")
@click.option("--out", metavar="FILE", help="Write there and not to the terminal.")
@run_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document: the text, and what was not read or written.")
def command(
    files: tuple[str, ...],
    target: str,
    source: str | None,
    version: str | None,
    onto: str | None,
    model: str | None,
    out: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Write the run of a job FILE as a job file of another tool, or as the flags of `loadgauge estimate`.

    Several FILEs are one job, such as accelerate's configuration and the trainer's arguments. Flags change the run. What
    was not read, and what DIALECT cannot say, is listed on stderr: never dropped in silence. Files are data; nothing in
    them is run.

    \b
    loadgauge convert axolotl.yaml --to llamafactory
    loadgauge convert pretrain.sh --to torchtitan --gpus 64
    loadgauge convert ds_config.json --to flags
    """
    asked = Job(model=model or "", **flags)
    found, run, beyond = _read(files, source, version, asked, _patched(files, target, onto))
    dropouts = {job.said["lora_dropout"].value for job in found if run.lora_rank and "lora_dropout" in job.said}
    beside = {"lora_dropout": max(dropouts)} if dropouts else {}
    if target == FLAGS:
        unsaid = tuple(f"{name} = {value}: no flag says it" for name, value in beside.items() if value)
        written, file = Written(dialect=FLAGS, text=_as_flags(run, beyond), left_out=unsaid), ""
    else:
        template, file = _template(files, found, target, onto)
        written = write(run, target, template, file=file, beside=beside)
        rest = tuple(f"--{name.replace('_', '-')} {value}: has no place in it" for name, value in beyond.items())
        written = msgspec.structs.replace(written, left_out=(*written.left_out, *rest))
    if as_json:
        from loadgauge.report.table import document

        document(_plain(found, run, written))
    elif out is None:
        click.echo(written.text, nl=not written.text.endswith("\n"))
    else:
        try:
            Path(out).write_text(written.text, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot be written: {getattr(error, 'strerror', None) or error}", file=out) from None
    if not as_json:
        for job in found:
            click.echo(f"loadgauge: {note(job)}", err=True)
            for line in job.stopped:
                click.echo(f"loadgauge: {job.file}: stays as it is, and there is no estimate with it: {line}", err=True)
        for line in () if file else _lost(found, written.dialect):
            click.echo(f"loadgauge: {written.dialect}: {line}", err=True)
        for line in written.left_out:
            click.echo(f"loadgauge: {written.dialect}: {line}", err=True)


def _read(
    files: tuple[str, ...], source: str | None, version: str | None, asked: Job, keeping: str | None
) -> tuple[list[JobFile], Run, dict[str, Any]]:
    """The files, their run with the flags, and flags that are no part of a run."""
    defaults = Job(model="")
    names = Job.__struct_fields__
    given = {name: value for name in names if (value := getattr(asked, name)) != getattr(defaults, name)}
    inside = {name: value for name, value in given.items() if name in FIELDS}
    found = [read(load(file), source, file=file, given=inside, version=version, keeping=keeping) for file in files]
    beyond = {name: value for name, value in given.items() if name not in FIELDS}
    return found, combine(found, inside), beyond


def _patched(files: tuple[str, ...], target: str, onto: str | None) -> str | None:
    """The dialect of a file that is only patched, so that what there is no estimate with stays in it."""
    return dialect_of(target).name if target != FLAGS and onto is None and len(files) == 1 else None


def _template(files: tuple[str, ...], found: list[JobFile], target: str, onto: str | None) -> tuple[str | None, str]:
    if onto is not None:
        return load(onto), onto
    same = [job.file for job in found if job.dialect == dialect_of(target).name]
    return (load(same[0]), same[0]) if same and len(files) == 1 else (None, "")


def _lost(found: list[JobFile], dialect: str) -> list[str]:
    """What a new file does not have of the files it is made from."""
    return [
        f"the {len(job.unread)} keys of {job.file} that are listed above are not carried over"
        for job in found
        if job.unread
    ]


def _as_flags(run: Run, beyond: dict[str, Any]) -> str:
    said = {name: value for name, value in (flags_of(run, None) | beyond).items() if value is not False}
    name = "MODEL" if run.model is None else alike(run.model) or run.model
    job = Job(model=name, **said)
    if beyond.get("gpu") is None:
        job = msgspec.structs.replace(job, gpus_per_node=None, order=None, overlap=None)
    return job.command()


def _plain(found: list[JobFile], run: Run, written: Written) -> dict[str, Any]:
    return {
        "files": [
            {
                "file": job.file,
                "dialect": job.dialect,
                "not_read": list(job.unread),
                "auto": list(job.auto),
                "not_counted": [item.note for item in job.uncounted],
                "stopped": list(job.stopped),
            }
            for job in found
        ],
        "run": msgspec.to_builtins(run),
        "to": written.dialect,
        "text": written.text,
        "left_out": list(written.left_out),
    }
