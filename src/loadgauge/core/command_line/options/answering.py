"""`@answering`: a command that returns an answer, with the flags that say how it is printed, the same for every command."""

import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import msgspec

from loadgauge.core.base import load
from loadgauge.core.base.errors import YES, ConfigError
from loadgauge.core.text.show import How, show

ANY = "Any by its key in the JSON document."


class OfFigures(click.Choice[str]):
    """A choice of one of the figures that are registered, or all; they are read where they are listed."""

    case_sensitive = True

    def __init__(self) -> None:
        """Read nothing yet."""

    @property
    def choices(self) -> Sequence[str]:  # type: ignore[override]
        """The names."""
        return ("all", *load("loadgauge.core.answers.figure:plotted")())

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name as it is, or fail with those that there are."""
        return value if value == "all" else super().convert(value, param, ctx)


def refuse(flags: Mapping[str, object], why: str) -> None:
    """Raise `ConfigError` where a flag is given: one that is neither None nor an empty list."""
    for name, value in flags.items():
        if value is not None and value != ():
            raise ConfigError(why, key=name)


def answering(
    lines: str = "its first lines",
    explain: str = "",
    topics: Sequence[str] = (),
    document: str = "bytes, seconds, FLOP and plain counts",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a command print the answer that it returns, and return the exit code.

    An answer that has no command line gets the one that was typed. lines: what the short answer has; explain, topics: what
    `--explain` explains; document: what `--json` prints
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(
            (
                click.option(
                    "--brief/--full",
                    " /--no-brief",
                    default=None,
                    help=f"Ten lines: {lines}, as a terminal shows by itself; or the whole answer, as a pipe gets.",
                ),
                click.option("--json", "json", is_flag=True, help=f"One JSON document: {document}."),
                click.option("--csv", "csv", is_flag=True, help="CSV: its table, or every number with its unit."),
                click.option("--markdown", is_flag=True, help="Markdown, as a comment or a page takes it."),
                click.option(
                    "--explain",
                    "topic",
                    type=click.Choice(topics) if topics else None,
                    metavar="TOPIC",
                    help=f"Explain one number: formula, your numbers, source. {explain or ANY}",
                ),
                click.option("--plot", "plot", type=click.Path(), metavar="FILE", help="Draw it: .svg, .png or .pdf."),
                click.option("--figure", type=OfFigures(), default="all", help="Which figure --plot draws (all)."),
            )
        ):
            command = option(command)

        @functools.wraps(command)
        def printed(*arguments: Any, **flags: Any) -> int:
            how = How(**{name: flags.pop(name) for name in How._fields})
            how.check()
            answer = command(*arguments, **flags)
            if answer is None:  # another process has it
                return YES
            words = click.get_current_context().find_root().obj
            if words and not answer.command:
                answer = msgspec.structs.replace(answer, command=shlex.join(("loadgauge", *words)))
            return show(answer, how)

        return printed

    return decorate
