"""The command line: one command per question. A command's file is imported when the command is used."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NoReturn

import click

from loadgauge._version import __version__
from loadgauge.core.base import hooks
from loadgauge.core.base.errors import CANNOT_TELL, NO, YES, Error, NothingFits, NotModelled, suggest
from loadgauge.core.base.files import as_one, is_command, place_of
from loadgauge.core.text.language import CHOSEN, choose, said

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_HERE = "loadgauge.core.command_line"
OWN = {
    "estimate": (1, "does it fit, where does every byte go, how long, what does it cost", f"{_HERE}.estimate"),
    "plan": (2, "the best of all valid layouts, or the nearest miss", f"{_HERE}.plan"),
    "network": (3, "what the network must carry, how fast, and whether it can", f"{_HERE}.network"),
    "equation": (5, "the closed form of a quantity, with its source", f"{_HERE}.equation"),
    "gpus": (18, "the catalogue of GPUs", f"{_HERE}.gpus"),
    "models": (19, "the catalogue of models", f"{_HERE}.models"),
    "runs": (22, "famous training runs, typed as their sources write them", f"{_HERE}.runs"),
    "schema": (20, "the shape of every JSON document, as JSON Schema", f"{_HERE}.schema"),
    "completion": (
        21, "completion of commands, flags, models and GPUs in bash, zsh and fish", f"{_HERE}.options.completion",
    ),
}  # fmt: skip
"""The core's own commands: the place in the list, what each answers, and the module whose `command` it is."""
_ALL = sorted({**OWN, **hooks.commands()}.items(), key=lambda entry: entry[1][0])
COMMANDS = {name: answers for name, (_, answers, _) in _ALL}
"""Commands of all rooms, in order of importance, and what they answer."""
_MODULES = {name: module for name, (_, _, module) in _ALL}

FIRST = {
    "llama-3.1-8b --gpu h100 --gpus 8 --zero 3": "does it fit, where does every byte go, how long does it take?",
    "plan llama-3.1-8b --gpu h100 --gpus 8 --global-batch 64": "which layout is best, and why not another?",
    "why oom.txt": "why did it run out of memory?",
}
"""The three commands that greet whoever types none."""
COMPLETE_VARIABLE = "_LOADGAUGE_COMPLETE"
"""The environment variable by which a shell's completion script asks (click's convention)."""

BROKEN_PIPE = 141
"""Exit code if the reader of the output has closed it (128 + SIGPIPE, as in a shell)."""


class Help(click.HelpFormatter):
    """Help in the language that is asked for: headings, paragraphs and what each flag says, where it has words for them."""

    def write_heading(self, heading: str) -> None:
        """Write the heading of a section."""
        super().write_heading(said(heading))

    def write_text(self, text: str) -> None:
        """Write paragraphs; one without a translation as click writes it."""
        for number, paragraph in enumerate(text.split("\n\n")):
            told = said(line := " ".join(paragraph.split()))
            if number:
                self.write_paragraph()
            if told == line:
                super().write_text(paragraph)
                continue
            from loadgauge.core.text.table import folded  # only for words of another language

            indent = " " * self.current_indent
            self.write("\n".join([*folded(indent + told, self.width, indent), ""]))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write names, and what each is."""
        super().write_dl([(name, said(text)) for name, text in rows], col_max, col_spacing)


class Context(click.Context):
    """A command line that is read, with such help."""

    formatter_class = Help


class Commands(click.Group):
    """A group of commands that imports a command's file when the command is used."""

    context_class = Context

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, in order of importance."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command of that name; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(_MODULES[cmd_name]).command
        command.context_class = Context
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name. Raises `click.UsageError` with the known names."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            hint = suggest(name, COMMANDS) or f" (commands: {', '.join(COMMANDS)})"
            raise click.UsageError(f"no command {name!r}{hint}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command without importing any."""
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=summary) for name, summary in COMMANDS.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="loadgauge", message="%(prog)s %(version)s")
@click.pass_context
def commands(ctx: click.Context) -> None:
    """Before you rent a GPU: does the training of a large language model fit, and where does every byte go?

    \b
    loadgauge estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3
    loadgauge estimate path/to/config.json --gpu rtx4090 --qlora --explain activations
    loadgauge equation activations --layer gpt --tp --sequence-parallel

    A MODEL is a name in the catalogue, a Hugging Face config.json, its folder, or another tool's job file; without a command
    it is estimated (`loadgauge qwen3-8b --gpu 4090`). Exit codes: 0 yes, 1 no, 2 cannot tell. Chinese: --lang zh.
    """
    if ctx.invoked_subcommand is None:
        click.echo(greeting())


def greeting() -> str:
    """Return what `loadgauge` prints where no command is given: three to begin with.

    >>> greeting().splitlines()[2]
    '  # does it fit, where does every byte go, how long does it take?'
    """
    lines = [f"loadgauge {__version__}: what training a large language model takes, before a GPU is rented", ""]
    for words, question in FIRST.items():
        lines += [f"  # {question}", f"  loadgauge {words}", ""]
    return "\n".join([*lines, "All commands: loadgauge --help. In a browser: loadgauge serve."])


VERBS = {
    **dict.fromkeys(
        ("fit", "fits", "calc", "calculate", "predict", "vram", "memory", "size", "train", "pretrain", "finetune", "fine-tune",
         "cost", "price", "time", "speed", "run", "estimate-memory", "mem", "requirements", "throughput"), "estimate"),
    **dict.fromkeys(("search", "optimize", "optimise", "tune", "best", "layout"), "plan"),
    **dict.fromkeys(("explain", "formula"), "equation"), **dict.fromkeys(("oom", "debug"), "why"),
    "simulate": "fleet", "bench": "measure", "list": "models", "cards": "gpus", "ui": "serve", "web": "serve", "export": "convert",
}  # fmt: skip
"""Words that people type for commands."""
FINDS = {"how many": "gpus"} | dict.fromkeys(("which gpu", "what gpu", "which card", "cheapest gpu", "best gpu"), "gpu")
"""Beginnings of questions, and what a plan finds for them."""
TOOLS = {
    **dict.fromkeys(("vllm", "sglang", "trtllm"), "--server"),
    **dict.fromkeys(
        ("axolotl", "trl", "llamafactory", "unsloth", "verl", "torchtune", "torchtitan", "megatron", "deepspeed"),
        "--framework",
    ),
}
"""Names of tools that are typed before a model, and the flag that takes each."""
ERROR = re.compile(
    r"(?i)out of memory|OutOfMemory|RESOURCE_EXHAUSTED|no available memory|SIGKILL|exit(?:code| code:?) -9"
    r"|more system memory|larger than the available KV cache|increase --mem-fraction-static"
)
"""Texts of errors that `why` reads."""
START_OF_FILE = 1 << 20
"""Bytes of a file in which such a text is looked for."""


def with_verb(words: list[str]) -> list[str]:
    """Return a command line with its command: `estimate` before a model or a file, `plan` where it has `--find`, `why`
    before the text of an error.

    >>> with_verb(["gpt2", "--gpu", "l4"])[0], with_verb(["CUDA out of memory."])[0], with_verb(["estimat"])[0]
    ('estimate', 'why', 'estimat')
    >>> with_verb(["gpt2", "--gpu", "l4", "--find", "seq-len"])[0]
    'plan'
    """
    if words[:1] and words[0] in TOOLS and (at := _modelled(words[1:])) is not None and not at:
        return ["estimate", *words[1:], TOOLS[words[0]], words[0]]
    answers = "plan" if any(word.partition("=")[0] == "--find" for word in words) else "estimate"
    verb, others = (
        (words[:1], words[1:]) if words[:1] in (["estimate"], ["plan"], ["lint"], ["convert"]) else ([], words)
    )
    if is_command(" ".join(others)):
        import shlex

        return [
            *(verb or [answers]),
            *as_one(shlex.split(others[0]) + others[1:] if is_command(others[0]) else others),
        ]
    first = words[0] if words else ""
    if first == "serve" and _modelled(words[1:]) is not None:
        return ["estimate", *words[1:], "--task", "generate"]
    if not words or first in COMMANDS or first in ("-h", "--help", "--version"):
        return words
    if first == "help":
        return [*words[1:2], "--help"] if not words[1:] or words[1] in COMMANDS else with_verb(words[1:])
    if first in VERBS:
        run = list(takewhile(lambda word: re.fullmatch("[a-z]+", word), words[1:]))
        joined = ["-".join(run)] if VERBS[first] == "equation" and run else run  # of explain tensor parallel
        return [VERBS[first], *joined, *words[1 + len(run) :]]
    target = place_of(first)[0]
    if os.path.isdir(target):
        return ["estimate", *words]
    if os.path.isfile(target):
        with open(target, "rb") as file:
            start = file.read(START_OF_FILE)
        is_job = first.endswith((".yaml", ".yml", ".json", ".toml", ".py", ".sh", ".ipynb"))
        error = start[:1] == b"\x80" or (not is_job and ERROR.search(start.decode(errors="replace")))
        return ["why" if error else answers, *words]
    if ERROR.search(first):
        return ["why", *words]
    from loadgauge.core.command_line.options.phrases import is_model

    if " " in first and not words[1:] and _modelled(first.split()) is not None:  # a sentence in quotes
        return with_verb(first.split())
    before = None if first.startswith("-") or is_model(first) else _modelled(words)
    if (sought := FINDS.get(" ".join(words[:2]).lower())) and before is not None:
        return ["plan", *words[2:], "--find", sought]
    if first.startswith("-") or is_model(first) or ((before or words[1:]) and not suggest(first, COMMANDS)):
        return [next((VERBS[word] for word in before or () if VERBS.get(word) == "plan"), answers), *words]
    return words


def _modelled(words: list[str]) -> list[str] | None:
    """Return the words before a model; None where there is none."""
    from loadgauge.core.command_line.options.phrases import model_in

    return model_in(words)


def spelled_out(words: list[str]) -> list[str]:
    """Return a command line with the flags of a famous run in the place of `run:NAME`; flags that follow go before them."""
    if not any(word.startswith("run:") for word in words):
        return words
    from loadgauge.core.command_line.runs import flags_of

    return [flag for word in words for flag in (flags_of(word[4:]) if word.startswith("run:") else [word])]


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. Every error is one line on stderr; nothing is raised.

    arguments: without the program's name; None: those of this process
    """
    try:
        if sys.stdout is None:
            return say("standard output is closed", CANNOT_TELL)
        words = choose(sys.argv[1:] if arguments is None else arguments)
        words = with_verb(spelled_out(words))
        result = commands.main(args=list(words), prog_name="loadgauge", standalone_mode=False, obj=words)
        sys.stdout.flush()
        return result if isinstance(result, int) else YES
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "loadgauge"
        return say(f"{_plain(error)} (see `{where} --help`)", CANNOT_TELL)
    except click.ClickException as error:
        return say(error.format_message(), CANNOT_TELL)
    except (click.Abort, KeyboardInterrupt) as error:
        return say("; ".join(map(str, ("interrupted", *(error.__cause__ or error).args))), CANNOT_TELL)
    except NothingFits as error:
        return say(str(error), NO)
    except NotModelled as error:
        text = str(error)
        return say(text if "modelled" in text else f"not modelled: {text}", CANNOT_TELL)
    except Error as error:
        return say(str(error), CANNOT_TELL)
    except BrokenPipeError:
        return BROKEN_PIPE
    except ModuleNotFoundError as error:
        room = (error.name or "").split(".")[:2]
        if room[0] != "loadgauge":
            raise
        return say(f"this needs {'.'.join(room)}, which is not installed here", CANNOT_TELL)
    except OSError as error:
        return say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", CANNOT_TELL)
    except Exception as error:
        if os.environ.get("LOADGAUGE_DEBUG"):
            raise
        kind = type(error).__name__
        return say(
            f"unexpected {kind}: {error}; this is a defect, please report it (LOADGAUGE_DEBUG=1 shows where)",
            CANNOT_TELL,
        )
    finally:
        CHOSEN.clear()


def _plain(error: click.UsageError) -> str:
    text = error.format_message()
    if isinstance(error, click.BadOptionUsage) and "requires an argument" in text and error.ctx is not None:
        own = (
            each
            for each in error.ctx.command.params
            if isinstance(each, click.Option) and error.option_name in each.opts
        )
        text = f"{text.rstrip('.')}: {' '.join(str(getattr(next(own, None), 'help', '')).split()).partition('. ')[0]}"
    return text[:1].lower() + text[1:].rstrip(".")


def say(text: str, code: int) -> int:
    """Print the text as one line on stderr and return the exit code."""
    from loadgauge.core.text.table import print_note, printable  # only on the way to an error

    shown = said(printable(" ".join(text.split())), "errors")
    if len(shown) > 2000:
        shown = f"{shown[:1000]} ... {shown[-900:]}"
    with contextlib.suppress(OSError):  # There is nowhere to print it; the exit code still holds.
        print_note(f"loadgauge: {shown}")
    return code


def main() -> NoReturn:
    """The entry point of the command `loadgauge`."""
    gc.set_threshold(
        100_000, 50, 50
    )  # many objects are made and few are thrown away: a search looks for garbage for long
    streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "reconfigure")]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    code = run()
    for stream in streams:
        try:
            stream.flush()
        except (
            OSError
        ):  # closed by its reader, or full: Python would complain once more at exit, with a code of its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
