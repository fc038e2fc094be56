"""`loadgauge convert`: one tool's job file into another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from loadgauge.cli.options import Request, run_options
from loadgauge.errors import ConfigError
from loadgauge.families.catalogue import config, model_sources
from loadgauge.formats.dialects import FILES
from loadgauge.formats.dialects import dialect as dialect_of
from loadgauge.formats.exchange import JobFile, Written, combine, load, read, write
from loadgauge.formats.megatron_model import unsaid
from loadgauge.formats.recompute import spelled
from loadgauge.formats.run import FIELDS, Run
from loadgauge.resolve.job_file import alike, flags_of, note
from loadgauge.resolve.resolve import Job
from loadgauge.spec.lora import ATTENTION_TARGETS, Lora
from loadgauge.spec.training import FRAMEWORKS

FLAGS = "flags"
"""loadgauge's own, as if it were a dialect."""


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
    asked = Request(model=model or "", **flags)
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
    files: tuple[str, ...], source: str | None, version: str | None, asked: Request, keeping: str | None
) -> tuple[list[JobFile], Run, dict[str, Any]]:
    """The files, their run with the flags, and flags that are no part of a run."""
    defaults = Request(model="")
    names = Request.__struct_fields__
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
    request = Request(model=name, **said)
    if beyond.get("gpu") is None:
        request = msgspec.structs.replace(request, gpus_per_node=None, order=None, overlap=None)
    return request.command()


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


def run_of(given: Job) -> Run:
    """A job with everything unsaid filled in, as a run that any dialect may be asked to say."""
    request, layout, kind = given.request, given.layout, given.training
    lora = kind.lora
    precision = kind.precision.name
    usual = FRAMEWORKS[kind.framework.name].precision
    batch = int(layout.global_batch)
    stages = layout.stage_layers
    names = ("tp", "pp", "vpp", "cp", "ep", "etp", "zero", "replicas")
    degrees: dict[str, Any] = {name: int(getattr(layout, name)) for name in names}
    return Run(
        model=request.model or given.model.name,
        framework=kind.framework.name,
        gpus=int(layout.gpus),
        gpus_per_node=request.gpus_per_node,
        **degrees,
        sequence_parallel=layout.sequence_parallel,
        schedule=layout.schedule if layout.pp > 1 else None,
        stage_layers=None if stages is None else ",".join(str(count) for count in stages),
        recompute=spelled(str(layout.recompute), given.model, kind),
        micro_batch=int(layout.micro_batch),
        global_batch=batch,
        seq_len=int(layout.seq_len),
        precision=precision[:4] if precision == usual or precision == f"fp16{usual[4:]}" else precision,
        optimizer=kind.optimizer.name,
        attention=kind.kernels.attention,
        loss=request.loss,
        lora_rank=0 if lora is None else int(lora.rank),
        lora_targets=None if lora is None else request.lora_targets or _targets(lora),
        qlora=lora is not None and bool(lora.quantised),
        base=None if lora is None or not lora.quantised else request.base or "nf4",
        offload=kind.offload,
        cp_comm=layout.cp_comm if layout.cp != 1 else None,
        order=",".join(layout.order),
        overlap=request.overlap,
    )  # fmt: skip


def _targets(lora: Lora) -> str:
    return "attention" if lora.targets <= ATTENTION_TARGETS else "all"


def known_as(run: Run, dialect: str, *, patched: bool = False) -> Run:
    """With what a tool knows a model of the catalogue by: its repository, or where it takes no names its sizes.

    patched: the user's own file, which has the model already

    >>> known_as(Run(model="qwen3-8b"), "trl").model
    'Qwen/Qwen3-8B'
    """
    name = "" if run.model is None else run.model.lower()
    source = model_sources().get(name)
    if source is None or dialect == "torchtitan":
        return run
    if dialect == "megatron":
        sizes = config(name)
        return run if patched or unsaid(sizes) else msgspec.structs.replace(run, model=None, config=sizes)
    return msgspec.structs.replace(run, model=source.repository or run.model)


def export(given: Job, dialect: str, template: str | None = None, *, file: str = "") -> Written:
    """A job in the words of a dialect; `template`, the user's own file, is patched. `left_out`: what it cannot say.

    >>> from loadgauge.resolve.resolve import job
    >>> written = export(job(Request(model="llama-3.1-8b", gpus=16, tp=8)), "megatron")
    >>> "--tensor-model-parallel-size 8" in written.text
    True
    """
    return write(known_as(run_of(given), dialect, patched=template is not None), dialect, template, file=file)
