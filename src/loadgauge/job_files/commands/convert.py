"""`loadgauge convert`: one tool's job file into another's."""

from pathlib import Path
from typing import Any

import click

from loadgauge.core.base.files import write_text
from loadgauge.core.command_line.options.grouped import Grouped
from loadgauge.core.command_line.options.options import Command, options, run_options
from loadgauge.core.definitions.job.job import POSTTRAIN, Job
from loadgauge.core.text.language import said
from loadgauge.core.text.table import print_note
from loadgauge.job_files.convert import Conversion, convert, convert_files
from loadgauge.job_files.dialects import FILES
from loadgauge.job_files.export import FLAGS
from loadgauge.job_files.ideas.facts import Extra, describe
from loadgauge.job_files.job_file import is_job_file, note


def of_task(command: Command) -> Command:
    """Add the options of a task."""
    return options(command, POSTTRAIN)


@click.command("convert", cls=Grouped)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--to", "target", metavar="DIALECT", help=f"{', '.join(FILES)}, or {FLAGS}.")
@click.option("--onto", metavar="FILE", help="A file of DIALECT to patch; its comments and all else in it stay.")
@click.option("--out", metavar="FILE", help="File to write, instead of to the terminal.")
@run_options
@of_task
@click.option("--json", "as_json", is_flag=True, help="One JSON document: the text, and what was not read or written.")
def command(
    files: tuple[str, ...],
    target: str | None,
    onto: str | None,
    out: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Write the run of a job FILE as a job file of another tool, or as the flags of `loadgauge estimate`.

    Several FILEs are one job, such as accelerate's configuration and the trainer's arguments. Flags change the run. What
    was not read, and what DIALECT cannot express, is listed on stderr; nothing is dropped silently. Files are data;
    nothing in them is run. In their place a MODEL may be, whose job the flags say.

    \b
    loadgauge convert axolotl.yaml --to llamafactory
    loadgauge convert pretrain.sh --to torchtitan --gpus 64
    loadgauge convert ds_config.json --to flags
    loadgauge convert llama-3.1-8b --task dpo --gpus 8 --zero 3 --seq-len 2048 --to trl
    """
    if target is None:
        raise click.UsageError(f"needs --to, one of: {', '.join(FILES)}, {FLAGS}")
    asked = Job(model="", **flags)
    if len(files) == 1 and not is_job_file(files[0]) and not Path(files[0]).exists() and asked.base_model is None:
        named = convert(asked.replace(model=files[0]), target, onto=onto)
        result = Conversion(files=(), job=asked.replace(model=files[0]), extra=Extra(), written=named)
    else:
        result = convert_files(files, target, onto=onto, flags=asked)
    written = result.written
    if as_json:
        from loadgauge.core.text.table import document

        document(_plain(result))
        return
    if out is None:
        click.echo(written.text, nl=not written.text.endswith("\n"))
    else:
        write_text(out, written.text)
    stays = "stays as it is, and there is no estimate with it"
    stopped = {file.file: [f"{file.file}: {stays}: {line}" for line in file.stopped] for file in result.files}
    lines = [line for file in result.files for line in (note(file), *stopped[file.file])]
    dropped = [] if result.onto else [file for file in result.files if file.unread or file.uncounted]
    lines += [
        f"{written.dialect}: the {len({*file.unread, *(item.key for item in file.uncounted)})} keys of {file.file} that are"
        " listed above are not carried over"
        for file in dropped
    ]
    lines += [f"{written.dialect}: {line}" for line in written.left_out]
    for line in lines:
        print_note(said(f"loadgauge: {line}"))


def _plain(result: Conversion) -> dict[str, Any]:
    return {
        "files": [
            {
                "file": file.file,
                "dialect": file.dialect,
                "version": file.version,
                "not_read": list(file.unread),
                "auto": list(file.auto),
                "not_counted": [item.note for item in file.uncounted],
                "stopped": list(file.stopped),
            }
            for file in result.files
        ],
        "run": describe(result.job, result.extra),
        "to": result.written.dialect,
        "text": result.written.text,
        "left_out": list(result.written.left_out),
    }
