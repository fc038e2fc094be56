"""`loadgauge lint`: what wastes memory, time or money in job files, or will fail, each with its saving and its patch."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from loadgauge._version import __version__
from loadgauge.core.base import CANNOT_TELL, NO, YES, ConfigError, Error, is_command, read_start, refuse
from loadgauge.core.command_line.options.grouped import Grouped
from loadgauge.core.command_line.options.options import parse, run_options, whole_run_options
from loadgauge.core.text.language import said
from loadgauge.job_files.commands.convert import of_task

if TYPE_CHECKING:
    from loadgauge.job_files.commands.findings import Linted

WIDE = 120
"""Letters of a line that is shown whole."""
SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


@click.command("lint", cls=Grouped)
@click.argument("files", nargs=-1, metavar="FILE...")
@run_options
@whole_run_options
@of_task
@click.option("--rule", "rules", multiple=True, metavar="NAME", help="Only these rules (see `--rules`).")
@click.option("--rules", "list_rules", is_flag=True, help="List the rules.")
@click.option("--diff", "as_diff", is_flag=True, help="The files as they would be with all of it mended, as a patch.")
@click.option("--fix", is_flag=True, help="Write that into the files.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document: bytes, seconds and plain numbers.")
@click.option("--sarif", is_flag=True, help="SARIF 2.1.0, for code hosts.")
def command(
    files: tuple[str, ...],
    rules: tuple[str, ...],
    list_rules: bool,
    as_diff: bool,
    fix: bool,
    as_json: bool,
    sarif: bool,
    **flags: Any,
) -> int:
    """Say what wastes memory, time or money in job FILEs, or will fail, with what each change saves on this job and card.

    Every figure is that of `loadgauge estimate` before and after; the change is shown in the file's own lines.

    Exit code: 0 nothing found, 1 something found, 2 a file cannot be told.

    \b
    loadgauge lint job.yaml --gpu 4090
    loadgauge lint train.sh --gpu h100 --gpus 8 --diff
    """
    from loadgauge.core.command_line.main import say
    from loadgauge.core.text.table import document
    from loadgauge.job_files.commands.findings import OWN, RULES, fixed, lint
    from loadgauge.job_files.commands.merged import difference, of_file
    from loadgauge.job_files.commands.own_words import rules as rules_of_words
    from loadgauge.job_files.reading.documents import load

    names = {rule.name: rule.says for rule in (*RULES.values(), *OWN.values())} | rules_of_words()
    if list_rules:
        click.echo("\n".join(f"{name:<30}{says}" for name, says in sorted(names.items())))
        return YES
    if not files:
        raise click.UsageError("Missing argument 'FILE...': a job file, script or notebook")
    if unknown := [name for name in rules if name not in names]:
        raise ConfigError(f"{unknown[0]!r} is no rule (rules: {', '.join(sorted(names))})", key="rule")
    code, every, wrong = YES, [], []
    for file in files:
        try:
            job = parse([file]).replace(**{flag: value for flag, value in flags.items() if value is not None})
            text = load(file)
            linted = lint(job, text)
        except Error as error:
            wrong.append(str(error) if str(error).startswith(file) else f"{file}: {error}")
            code = CANNOT_TELL
            continue
        shown = tuple(each for each in linted.findings if not rules or each.rule in rules)
        every.append((linted, shown))
        if code == YES and any(each.level != "note" for each in shown):
            code = NO
        if as_diff or fix:
            refuse(is_command(file), "--diff and --fix are for files; without them the command is shown as it would be")
            new, _ = fixed(linted, job, text, frozenset(rules))
            # A byte-order mark stays.
            mark = "\ufeff" * read_start(file, 3).startswith(BOM_UTF8)
            was, now = (mark + of_file(file, text, each) for each in (text, new))
            click.echo(difference(was, now, file), nl=False)
            if fix and new != text:
                with open(file, "w", encoding="utf-8", newline="") as target:
                    target.write(now)
        elif not (as_json or sarif):
            _report(linted, shown)
    if wrong:
        say("; ".join(dict.fromkeys(wrong)), CANNOT_TELL)
    if as_json:
        document({"files": [_document(linted, shown) for linted, shown in every]})
    elif sarif:
        click.echo(
            json.dumps(_sarif([(linted.file, each) for linted, shown in every for each in shown], names), indent=2)
        )
    return code


def _report(linted: Linted, shown: tuple[Any, ...]) -> None:
    from loadgauge.core.base.units import gib, seconds
    from loadgauge.core.text.table import console

    target, memory, time = console(), linted.result.memory, linted.result.time
    has = "" if memory.capacity is None else f" of {gib(memory.capacity, 1)}"
    step = "" if time is None else f", {seconds(time.step)} a step"
    verdict = "NEEDS" if memory.capacity is None else f"{memory.verdict.upper()},"
    count = sum(each.level != "note" for each in shown)
    rows = [f"{linted.file} ({linted.tool}): {count or 'nothing'} found; {verdict} {gib(memory.total, 1)}{has}{step}"]
    for each in shown:
        gains = ["; ".join(filter(None, (gain, each.flags))) for gain in [each.gain()] if gain]
        inner = [*gains, *shown_lines(each.patch), *(f"no patch: {line}" for line in each.left_out)]
        rows += [f"{each.level:<7} {each.rule}: {each.says}", *(f"        {row}" for row in inner)]
    for row in rows:
        target.print(said(row), markup=False, highlight=False, soft_wrap=True)


def shown_lines(patch: str) -> list[str]:
    r"""Return the lines of a patch that go and come; of long ones the words that differ, with one before and one after.

    >>> shown_lines("--- a\n+++ a\n@@ -1 +1 @@\n-" + "x " * 80 + "--tp 4 --bf16\n+" + "x " * 80 + "--tp 2 --bf16\n")
    ['-... --tp 4 --bf16', '+... --tp 2 --bf16']
    """
    rows = [row for row in patch.splitlines()[2:] if row[:1] in "+-"]
    was, now = ([row[1:] for row in rows if row[:1] == sign] for sign in "-+")
    if len(was) != len(now) or max(map(len, rows), default=0) <= WIDE:
        return rows
    pairs = [_apart(line.split(" "), new.split(" ")) for line, new in zip(was, now, strict=True)]
    return [f"{sign}{pair[number]}" for number, sign in enumerate("-+") for pair in pairs]


def _apart(was: list[str], now: list[str]) -> list[str]:
    """Return where two lists of words differ, with a word before and after."""
    alike = (
        [a == b for a, b in zip(was, now, strict=False)],
        [a == b for a, b in zip(was[::-1], now[::-1], strict=False)],
    )
    first, last = (max(0, next((at for at, same in enumerate(each) if not same), len(each)) - 1) for each in alike)
    cut = (" ".join(words[first : len(words) - min(last, len(words) - first)]) for words in (was, now))
    return [f"{'... ' * (first > 0)}{words}{' ...' * (last > 0)}" for words in cut]


def _document(linted: Linted, shown: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "file": linted.file,
        "tool": linted.tool,
        "verdict": linted.result.memory.verdict,
        "findings": [
            {name: getattr(each, name) for name in ("rule", "level", "says", "line", "cost", "flags", "patch")}
            | {"memory_bytes": each.memory, "step_seconds": each.step}
            for each in shown
        ],
    }


def uri(file: str) -> str:
    """Return the reference to a file, relative where its path is.

    >>> uri("my jobs/a.yaml")
    'my%20jobs/a.yaml'
    """
    path = Path(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())


def _sarif(results: list[tuple[str, Any]], names: dict[str, str]) -> dict[str, Any]:
    """Return the document that code hosts read (source: OASIS, SARIF 2.1.0)."""
    levels = {"fails": "error", "note": "note"}
    order = sorted(names)
    rows = [
        {
            "ruleId": each.rule,
            "ruleIndex": order.index(each.rule),
            "level": levels.get(each.level, "warning"),
            "message": {"text": "; ".join(filter(None, (each.says, each.gain(), each.flags)))},
            "locations": [
                {"physicalLocation": {"artifactLocation": {"uri": uri(file)}, "region": {"startLine": each.line}}}
            ],
        }
        for file, each in results
    ]
    rules = [{"id": name, "shortDescription": {"text": names[name]}} for name in order]
    tool = {"driver": {"name": "loadgauge", "version": __version__, "rules": rules}}
    return {"$schema": SARIF, "version": "2.1.0", "runs": [{"tool": tool, "results": rows}]}
