"""A command line in the words of other tools, in this one's: what is taken for what is said in a line."""

import re
import shlex
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import click

from loadgauge.core.base.files import is_command
from loadgauge.core.base.hooks import need, provider
from loadgauge.core.command_line.options.names import respelled
from loadgauge.core.command_line.options.phrases import phrased
from loadgauge.core.command_line.options.typed import (
    bare,
    counts_in,
    follows,
    is_line,
    keyed,
    of_each,
    pieces_of,
    served_by,
    task_of,
    unknown,
    value_of,
)
from loadgauge.core.command_line.options.values import as_value, card, value_in
from loadgauge.core.definitions.job.job import Job, fields
from loadgauge.core.definitions.job.spoken import (
    ASKED,
    BESIDE,
    ELSEWHERE,
    HARMLESS,
    LAYOUTS,
    MODEL,
    NUMBERED,
    OWN_SECTIONS,
    RENAMED,
    ROLLING,
    SWITCHES,
    TAKEN,
    VALUES,
    WORDED,
)
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS, OTHER_NAMES
from loadgauge.core.text.language import said
from loadgauge.core.text.table import ABOVE, print_note

TRUTH = {"true": 0, "false": 1, "yes": 0, "no": 1, "1": 0, "0": 1}
"""Words after a switch of another tool, and which of its readings each is."""

PLAIN = sorted({*OTHER_NAMES, "peft"} - {"trl"})
"""Libraries that train as their framework does, without defaults of their own."""


MODULE = re.compile(r"[a-z_]*(?:proj|fc\d|qkv|dense|query|key|value|lm_head|embed_tokens)")
"""Names of modules, of which several words may follow a flag."""
LISTS = ("--lora-targets", "--modules-to-save")
"""Flags of such names."""
OF_DEEPSPEED = r"(?:.*/)?(?:ds_|deepspeed_)(?:config_)?z(?:ero)?_?(?:stage_?)?(\d)(_offload)?(?:_config)?(?:\.json)?"
"""Pattern of names that people give to DeepSpeed's files, which say their stage."""
MONEY = r"[$€£¥] ?\d.*|\d[\d.]* ?(?:[$€£¥]|usd|eur)?/ ?(?:gpu)?-?h(?:ou)?r?"
"""Pattern of a price of an hour."""
FORMATS = ("int8", "8bit", "int4", "4bit", "nf4")
"""Values of other tools' types of numbers that a frozen base has here, or a server."""
LATER = ["\0"]
"""In the place of the words here: what a tool's key means follows from the other flags."""


class Spoken(click.Command):
    """A command that takes the words of other tools for its flags, and says so in a line on standard error."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments, in whose tool's words they may be."""
        options = {
            name: each
            for each in self.params
            if isinstance(each, click.Option)
            for name in (*each.opts, *each.secondary_opts)
        }
        args = [
            piece
            for word in args
            for piece in (shlex.split(word) if is_line(word) and not is_command(word) else [keyed(word)])
        ]
        args, typed = respelled(args, options)
        valued = {name for name, option in options.items() if not option.is_flag}  # what follows these is theirs
        places = [each.nargs for each in self.params if isinstance(each, click.Argument)]
        sentence = "--micro-batch" in options and "--gpu" in options and places == [1]
        args, phrases = phrased(args, options) if sentence else (args, {})
        apart = {
            word: pieces_of(word, options) if "--micro-batch" in options and before not in valued else [word]
            for before, word in pairwise(["", *args])
        }
        args = [piece for word in args for piece in apart[word]]
        args = [word for word in args if bare(word) not in LAYOUTS or word.startswith("--strategy")]
        counts, args = counts_in(args, options)
        args, served = served_by(args, options)
        later: list[list[str]] = []
        words, notes = translate(args, options, sum(places) if places in ([], [1]) else None, later)
        if any(name == "nodes" for name, _ in counts.values()):
            words, notes = of_each(args, words, notes)
        try:
            rest = super().parse_args(ctx, words)
        except click.NoSuchOption as error:
            raise unknown(error.option_name, options, ctx) from None
        except click.BadOptionUsage as error:
            error.ctx = ctx  # by whose flags the message says what is lacking
            raise
        degrees = [word for word, pieces in apart.items() if pieces != [word] and "." not in word]
        notes = [*notes, *(f"{word} as {' '.join(apart[word])}" for word in degrees), *served]
        notes += task_of(ctx.params)
        notes += self._together(later, ctx.params, options, {*args})
        notes += [follows(name, count, flag, ctx.params) for flag, (name, count) in counts.items()]
        notes += self._trainer(ctx.params)
        for new, old in (phrases | typed).items():
            same = [n for n, note in enumerate(notes) if f"{note} ".startswith(f"{new} ")]
            notes = [f"{old}{note[len(new) :]}" if n in same else note for n, note in enumerate(notes)]
            notes += [] if same else [f"{old} as {new}"]
        ABOVE[:] = [said(f"loadgauge: taken: {'; '.join(notes)}")] if notes else []
        for line in ABOVE:
            print_note(line)
        return rest

    def _together(
        self, later: list[list[str]], flags: dict[str, Any], options: Mapping[str, click.Option], typed: set[str]
    ) -> list[str]:
        """Put what tools mean by flags beside each other among the flags; return notes on it. Raises `click.UsageError`.

        typed: the words of the command line, whose own flags stay
        """
        from loadgauge.core.base.errors import ConfigError

        if not later:
            return []
        from loadgauge.core.plan.request import OPEN_AXES

        lengths = (
            {"prompts": 64, "samples": 8, "prompt_len": 1024, "answers": "3072"} if flags.get("task") in ROLLING else {}
        )
        said_of = [name for name, value in flags.items() if name in fields() and isinstance(value, str | int | float)]
        job = Job(**{"model": "", **lengths, **{name: flags[name] for name in said_of}})
        keys = [(bare(name).replace("-", "_"), value_of(values)) for name, *values in later]
        notes = []
        try:
            for tool, places, changed, remark in need("DIALECTS").together(keys, job):
                named = ", ".join(" ".join(later[at]) for at in places)
                new = {name: value for name, value in changed.items() if name in flags and flags[name] != value}
                own = {name for name in new if f"--{name.replace('_', '-')}" in typed}
                for name in own if "task" not in new else ():
                    text = f"{named}: in {tool} it is --{name.replace('_', '-')} {new[name]}, and the flag says {flags[name]}"
                    raise click.UsageError(text, click.get_current_context(silent=True))
                new = {name: value for name, value in new.items() if name not in own}
                flags |= {
                    name: str(value) if self.name == "plan" and name in (*OPEN_AXES, "gpus") else value
                    for name, value in new.items()
                }
                words = Job(model="", **new).flags() or "nothing that changes the answer"
                if not new:
                    _no_amount(named, value_of(later[places[0]][1:]) or "")
                notes.append(f"{named} as {words} (in {tool}){f'; not read: {remark}' if remark else ''}")
        except ConfigError as error:
            name = later[0][0]
            if error.key in dict(keys):
                name = next(each[0] for each in later if bare(each[0]).replace("-", "_") == error.key)
            asked = bare(name).rpartition(".")[2] in ASKED
            reason = "" if asked else str(error).partition(": ")[2] if error.key else str(error)
            if reason:
                raise click.UsageError(f"no flag {name}: {reason}", click.get_current_context(silent=True)) from None
            raise unknown(name, options, click.get_current_context(silent=True)) from None
        return notes

    def _trainer(self, flags: dict[str, Any]) -> list[str]:
        """Put a trainer's own defaults in the place of its name as a framework, where flags say nothing; return a note on it."""
        name = flags.get("framework")
        if (
            name in (None, *FRAMEWORKS, *PLAIN)
            or (dialects := provider("DIALECTS")) is None
            or name not in dialects.FILES
        ):
            return []
        from loadgauge.core.plan.request import OPEN_AXES

        locked = (*OPEN_AXES, "gpus") if self.name == "plan" else ()
        open_to = {key: value for key, value in flags.items() if key in fields() and key not in ("model", *locked)}
        own = dialects.usual(name, Job(model=str(flags.get("model") or ""), **open_to))
        flags |= {key: value for key, value in own.items() if key in open_to}
        if "dialect" in flags and flags["dialect"] is None:
            flags["dialect"] = name  # in whose words remedies are told
        words = Job(model="", **{key: value for key, value in own.items() if key in open_to}).flags()
        return [f"--framework {name} as {words} (its defaults; batch and length are yours)"]


def translate(
    words: Sequence[str],
    options: Mapping[str, click.Option],
    room: int | None = None,
    later: list[list[str]] | None = None,
) -> tuple[list[str], list[str]]:
    """Return the words of a command line in flags that the command has, and a note for each that was taken for another.

    options: by each of their names; room: words without a flag that the command takes, after which one is a card (None: any)
    later: where keys of tools go, with their values, that count beside other flags (None: they are errors)
    Raises `click.UsageError` for a flag that no single one here stands for.

    >>> zero = click.Option(["--zero"])
    >>> translate(["gpt2", "--fsdp", "--zero=stage2"], {"--zero": zero})
    (['gpt2', '--zero', '3', '--zero', '2'], ['--fsdp as --zero 3', '--zero stage2 as --zero 2'])
    """
    result: list[str] = []
    notes: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word == "--" or not re.fullmatch(r"--?[A-Za-z0-9].*", name):
            room = max(0, room - 1) if room else room
            result += [word, *(rest if word == "--" else [])]
            rest = rest if word != "--" else []
            continue
        typed = [name, *([value] if equals else [])]
        taken = _flag(name, equals, typed, rest, options)
        if taken == LATER and later is not None:
            values = [] if equals else list(takewhile(lambda each: not each.startswith("-"), rest))
            del rest[: len(values)]
            later.append([*typed, *values])
            continue
        option = options.get(taken[0]) if taken else None
        if option is not None and not option.is_flag and name == "--train" and rest[:1] and rest[0] in options:
            notes.append(f"{name} as nothing that changes the answer")
            continue
        room = 0 if room and taken and len(taken) == 1 and not taken[0].startswith("-") and typed != taken else room
        if option is not None and not option.is_flag:
            switched = VALUES.get(str(option.name), {}).get("true")
            if len(taken) == 1 and switched and (not rest or rest[0].startswith("--")):
                taken = [taken[0], switched]
            elif len(taken) == 1 and rest:
                typed, taken = [*typed, rest[0]], [taken[0], rest.pop(0)]
            taken = [*value_in(str(option.name), taken), *taken[2:]] if len(taken) > 1 else taken
            taken = _agreed(typed, taken, words)
        if taken != typed:
            notes.append(f"{' '.join(typed)} as {' '.join(taken) or 'nothing that changes the answer'}")
            result += taken
        else:
            result += [word, *typed[2 if equals else 1 :]]
    if room and "--model" in result[:-1]:  # a model in a job file's place
        at = result.index("--model")
        result = [result[at + 1], *result[:at], *result[at + 2 :]]
    return result, notes


def _agreed(typed: Sequence[str], taken: list[str], words: Sequence[str]) -> list[str]:
    """Return the words here of a flag, without GPUs that another flag of the line counts, of whole machines of them.

    typed, words: of the flag and of the line. Raises `click.UsageError` where another says another number.

    >>> _agreed(["p5.48xlarge"], ["--gpu", "h100", "--gpus", "8"], ["--gpus", "16"]), _agreed([], ["--tp", "2"], ["--tp=2"])
    (['--gpu', 'h100'], ['--tp', '2'])
    """
    for at, flag in enumerate(taken[:-1]):
        pairs = [*pairwise(words), *(word.split("=", 1) for word in words if "=" in word)]
        given = next((value for name, value in pairs if name == flag and value.isdecimal()), "")
        if taken == typed or not given or "".join(typed[:1]).partition("=")[0] == flag or not taken[at + 1].isdecimal():
            continue
        if int(given) % int(taken[at + 1]) or (at == 0 and given != taken[1]):
            text = f"{' '.join(typed)} makes it {flag} {taken[at + 1]}, and the flag says {given}"
            raise click.UsageError(text, click.get_current_context(silent=True))
        return [*taken[:at], *taken[at + 2 :]] if at else taken
    return taken


def _flag(name: str, equals: str, typed: list[str], rest: list[str], options: Mapping[str, click.Option]) -> list[str]:
    """Return the words here of a flag and what it has with it, as many as are sure; those of `rest` that it takes go to `typed`."""
    plain = bare(name)
    if name in ("-h", "--help", "--help-all"):
        return list(typed)
    section, _, last = plain.removeprefix("actor-rollout-ref.").rpartition(".")
    if section and not OWN_SECTIONS & {*re.split("[.-]", section), last}:
        plain = last if any(last in table for table in TAKEN) or f"--{last}" in options else plain
    spelling = name if name in options or len(name) == 2 else f"--{plain}"
    truth = not equals and bool(rest) and rest[0].lower() in TRUTH
    after = typed[1] if equals else rest[0] if rest else ""
    if re.fullmatch(MONEY, after) and "--price" in options and spelling not in options and plain not in ASKED:
        typed += [] if equals else [rest.pop(0)]
        return ["--price", after]
    if after.lower().startswith("hybrid_shard"):
        raise click.UsageError(f"no {name} {after}: {ASKED['hsdp']}", click.get_current_context(silent=True))
    if RENAMED.get(plain, spelling) in ("--precision", "--weights") and after.lower() in FORMATS:
        raise click.UsageError(f"no {name} {after}: {ASKED['int8']}", click.get_current_context(silent=True))
    if (own := options.get(spelling)) is not None:
        if own.is_flag and truth:
            typed.append(rest.pop(0))
            return ([spelling], own.secondary_opts[:1])[TRUTH[typed[1].lower()]]
        return [spelling, *typed[1:]]
    word = after.lower().partition(" ")[0].replace("-", "_")
    if (named := re.fullmatch(OF_DEEPSPEED, word)) and not Path(after).exists():
        word = f"zero{named[1]}{named[2] or ''}"
    worded = WORDED.get(plain, {}).get(word)
    rank = re.fullmatch(r"(?:r(?:ank)?[=:]?)?(\d+)", after)
    if worded is not None or (plain in NUMBERED and rank):
        typed += [] if equals else [rest.pop(0)]
        return worded.split() if worded is not None else [NUMBERED[plain], rank[1] if rank else ""]
    if plain == "deepspeed" and after.endswith(".json") and "--with" in options:
        typed += [] if equals else [rest.pop(0)]
        return ["--with", after]
    alone = (plain in SWITCHES or plain in ASKED) and (not after or after.startswith("-"))
    if RENAMED.get(plain) in (*options, *ELSEWHERE) and not alone:
        names = list(takewhile(MODULE.fullmatch, rest)) if RENAMED[plain] in LISTS else []
        if len(names) > 1:
            del rest[: len(names)]
            typed.append(",".join(names))
        return [RENAMED[plain], *typed[1:]]
    if plain in MODEL and after:
        typed += [] if equals else [rest.pop(0)]
        return [after]
    if plain in SWITCHES:
        typed += [rest.pop(0)] if truth else []
        readings = (*SWITCHES[plain], "")
        words = readings[TRUTH.get(typed[1].lower(), 0) if len(typed) > 1 else 0].split()
        if not words or words[0] in options:
            return words
    if plain in HARMLESS:
        _no_amount(name, after)
        typed += [] if equals or not rest or re.match("--?[A-Za-z]", rest[0]) else [rest.pop(0)]
        return []
    if plain in ASKED:
        raise click.UsageError(f"no flag {name}: {ASKED[plain]}", click.get_current_context(silent=True))
    if not typed[1:] and (meant := (card(plain) if "--gpu" in options else []) or as_value(plain, options)):
        return meant
    return _of_a_tool(name, plain, typed, rest, options) if name.startswith("--") and len(name) > 4 else list(typed)


def _no_amount(name: str, value: Any) -> None:
    """Refuse an amount of tokens (10BT, 1T) or of memory after a flag that changes nothing: it may be meant for the run's."""
    if tokens := re.fullmatch(r"(\d[\d.]*[bt])t?", str(value), re.IGNORECASE):
        text = f"no flag {name.split()[0]} with {value}: the tokens of the whole run are --tokens {tokens[1]}"
        raise click.UsageError(text, click.get_current_context(silent=True))
    if re.fullmatch(r"\d[\d.]*gi?b", str(value), re.IGNORECASE) and "size" not in name:  # of shards, of shared memory
        text = f"no flag {name.split()[0]} with {value}: a card's memory is --memory {value}"
        raise click.UsageError(text, click.get_current_context(silent=True))


def _of_a_tool(
    name: str, plain: str, typed: list[str], rest: list[str], options: Mapping[str, click.Option]
) -> list[str]:
    """Return the words here of a key of a trainer's own files, as its reader has it. Raises `click.UsageError`."""
    dialects = provider("DIALECTS")
    if (
        dialects is None
        or "--micro-batch" not in options
        or ("." not in plain and any(get_close_matches(name, options, 1, 0.85)))
    ):
        return list(typed)
    beside = not typed[1:] and bool(rest) and not rest[0].startswith("-")
    value = typed[1] if typed[1:] else rest[0] if beside else "true"
    if "." in plain:
        return LATER
    meant = dialects.heard(plain.replace("-", "_"), value, adapts="lora" in plain)
    if meant is None or (isinstance(meant, str) and BESIDE in meant):
        return LATER
    if isinstance(meant, str):
        raise click.UsageError(f"no flag {name}: {meant}", click.get_current_context(silent=True))
    typed += [rest.pop(0)] if beside else []
    own = {field: value for field, value in meant[1].items() if f"--{field.replace('_', '-')}" in options}
    own = {field: value for field, value in own.items() if (field, value) != ("lora_rank", 0)}
    if not own:
        _no_amount(name, value)
    return shlex.split(Job(model="", **own).flags())
