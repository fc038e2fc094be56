"""The man page: every command, its own options, and once the options of a job. `make docs` writes it to docs/loadgauge.1."""

from __future__ import annotations

import click

from loadgauge.core.command_line.main import COMMANDS, FIRST, commands
from loadgauge.core.command_line.options.grouped import TITLES, group_of
from loadgauge.core.definitions.job.job import WHOLE_RUN, fields

EXITS = {
    "0": "yes: it fits; the command did what was asked",
    "1": "no: it does not fit, or is TIGHT (0 with --allow-tight); nothing fits; over the budget",
    "2": "cannot tell: bad input, or not modelled; one line on standard error says why",
}


LONGEST = 60
"""Letters of what an option takes, beside its name."""


def escaped(text: str) -> str:
    r"""Text as roff reads it.

    >>> escaped("a-b\\c")
    'a\\-b\\ec'
    >>> escaped(".dot")
    '\\&.dot'
    """
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def option(parameter: click.Parameter) -> list[str]:
    """An option with its help."""
    names, value = ", ".join([*parameter.opts, *parameter.secondary_opts]), ""
    assert isinstance(parameter, click.Option)
    if not parameter.is_flag:
        choices = getattr(parameter.type, "choices", None)
        value = parameter.metavar or ("|".join(map(str, choices)) if choices else parameter.type.name.upper())
    text = parameter.help or ""
    if len(value) > LONGEST:  # which no line can hold
        value, text = "WHAT", f"{text} WHAT: {value.replace('|', ', ')}."
    return [".TP", f'.BI "{escaped(names)} " "{escaped(value)}"', escaped(text)]


def summary(command: click.Command) -> list[str]:
    """The description of a command; what is to be typed stands in lines of its own."""
    lines, typed = [], False
    for line in (command.help or "").splitlines():
        if line.strip() == "\b":
            lines.append(".nf")
            typed = True
        elif typed and not line.strip():
            lines += [".fi", ".PP"]
            typed = False
        else:
            lines.append(escaped(line.strip()) if line.strip() else ".PP")
    return [*lines, ".fi"] if typed else lines


def page() -> str:
    """The whole page. It has no date: it changes where the commands do."""
    job = {name for name in fields() if name != "model"}
    context = click.Context(commands, info_name="loadgauge")
    lines = [
        '.TH LOADGAUGE 1 "" "loadgauge" "User Commands"',
        ".SH NAME",
        "loadgauge \\- memory, time, traffic and cost of training large language models",
        ".SH SYNOPSIS",
        ".B loadgauge",
        ".I COMMAND [OPTION]... [ARGUMENT]...",
        ".SH DESCRIPTION",
        *summary(commands),
        ".SH EXAMPLES",
    ]
    for words, question in FIRST.items():
        lines += [".TP", f".B loadgauge {escaped(words)}", escaped(question)]
    lines += [".SH COMMANDS"]
    described: dict[str, click.Parameter] = {}
    for name in COMMANDS:
        command = commands.get_command(context, name)
        assert command is not None
        usage = [part for part in command.collect_usage_pieces(click.Context(command)) if part != "[OPTIONS]"]
        lines += [f'.SS "{escaped(" ".join(["loadgauge", name, "[OPTION]...", *usage]))}"', *summary(command)]
        own = [each for each in command.params if isinstance(each, click.Option)]
        of_job = [each for each in own if each.name in job]
        described |= {str(each.name): each for each in of_job if each.name not in described}
        if len(of_job) > 20:  # The whole job; of a few, each is told here.
            own = [each for each in own if each not in of_job]
            lines += [".PP", "Takes the options of a job (below)."]
        for each in own:
            lines += option(each)
    lines += [".SH OPTIONS OF A JOB"]
    for group, title in TITLES.items():
        mine = [described[name] for name in fields() if name in described and group_of(described[name]) == group]
        lines += [f'.SS "{escaped(title)}"', *(line for each in mine for line in option(each))] if mine else []
    assert set(WHOLE_RUN) <= set(described)
    lines += [".SH EXIT STATUS"]
    for code, meaning in EXITS.items():
        lines += [".TP", f".B {code}", escaped(meaning)]
    lines += [
        ".SH ENVIRONMENT",
        ".TP",
        ".B LOADGAUGE_DEBUG",
        escaped("A defect shows its traceback instead of one line."),
    ]
    return "\n".join(line for line in lines if line) + "\n"
