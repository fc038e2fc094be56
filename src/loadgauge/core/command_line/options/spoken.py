"""A command line in the words of other tools, in this one's: what is taken for what is said in a line."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import click

from loadgauge.core.base import read_table
from loadgauge.core.base.files import is_command
from loadgauge.core.base.hooks import need, provider
from loadgauge.core.definitions.hardware.cluster import GPUS_PER_NODE
from loadgauge.core.definitions.job.job import Job, fields
from loadgauge.core.definitions.job.spoken import (
    ALONE,
    ALONE_SAID,
    ASKED,
    BESIDE,
    COMMON,
    COUNT,
    COUNTS,
    EACH,
    ELSEWHERE,
    ENGINES,
    ENGINES_OWN,
    FILLERS,
    HARMLESS,
    LENGTHS,
    MODEL,
    NUMBERED,
    OWN_SECTIONS,
    PATTERNS,
    RENAMED,
    ROLLING,
    SERVED,
    SERVING,
    SWITCHES,
    TAKEN,
    TOKENS,
    VALUES,
    WORDED,
)
from loadgauge.core.definitions.layout.axes import REPLICA
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS, OTHER_NAMES
from loadgauge.core.text.language import said
from loadgauge.core.text.table import ABOVE

TRUTH = {"true": 0, "false": 1, "yes": 0, "no": 1, "1": 0, "0": 1}
"""Words after a switch of another tool, and which of its readings each is."""

OTHERS = ("plan", "estimate", "network")
"""Commands that may have an option which another one has not."""

PLAIN = sorted({*OTHER_NAMES, "peft"} - {"trl"})
"""Libraries that train as their framework does, without defaults of their own."""


MODULE = re.compile(r"[a-z_]*(?:proj|fc\d|qkv|dense|query|key|value|lm_head|embed_tokens)")
"""Names of modules, of which several words may follow a flag."""
LISTS = ("--lora-targets", "--modules-to-save")
"""Flags of such names."""
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
            for piece in (shlex.split(word) if _is_line(word) and not is_command(word) else [_typed(word)])
        ]
        args = [piece for word in args for piece in (_hydra(word) if "--micro-batch" in options else [word])]
        counts, args = _counts(args, options)
        args, served = _served(args, options)
        bare = [each.nargs for each in self.params if isinstance(each, click.Argument)]
        later: list[list[str]] = []
        words, notes = translate(args, options, sum(bare) if bare in ([], [1]) else None, later)
        if any(name == "nodes" for name, _ in counts.values()):
            words, notes = _of_each(args, words, notes)
        try:
            rest = super().parse_args(ctx, words)
        except click.NoSuchOption as error:
            raise _unknown(error.option_name, options, ctx) from None
        notes += served
        notes += _task(ctx.params)
        notes += self._together(later, ctx.params, options, {*args})
        notes += [_follows(name, count, flag, ctx.params) for flag, (name, count) in counts.items()]
        notes += self._trainer(ctx.params)
        ABOVE[:] = [said(f"loadgauge: taken: {'; '.join(notes)}")] if notes else []
        for line in ABOVE:
            click.echo(line, err=True)
        return rest

    def _together(
        self, later: list[list[str]], flags: dict[str, Any], options: Mapping[str, click.Option], typed: set[str]
    ) -> list[str]:
        """Put what tools mean by flags beside each other among the flags; return notes on it. Raises `click.UsageError`.

        typed: the words of the command line, whose own flags stay
        """
        from loadgauge.core.base.errors import ConfigError
        from loadgauge.core.plan.request import OPEN_AXES

        lengths = (
            {"prompts": 64, "samples": 8, "prompt_len": 1024, "answers": "3072"} if flags.get("task") in ROLLING else {}
        )
        said_of = [name for name, value in flags.items() if name in fields() and isinstance(value, str | int | float)]
        job = Job(**{"model": "", **lengths, **{name: flags[name] for name in said_of}})
        keys = [(_plain(name).replace("-", "_"), _read(values)) for name, *values in later]
        notes = []
        try:
            for tool, places, changed, remark in need("DIALECTS").together(keys, job) if later else ():
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
                notes.append(f"{named} as {words} (in {tool}){f'; not read: {remark}' if remark else ''}")
        except ConfigError as error:
            name = later[0][0]
            if error.key in dict(keys):
                name = next(each[0] for each in later if _plain(each[0]).replace("-", "_") == error.key)
            known = _plain(name).rpartition(".")[2] in ASKED
            reason = "" if known else str(error).partition(": ")[2] if error.key else str(error)
            if reason:
                raise click.UsageError(f"no flag {name}: {reason}", click.get_current_context(silent=True)) from None
            raise _unknown(name, options, click.get_current_context(silent=True)) from None
        return notes

    def _trainer(self, flags: dict[str, Any]) -> list[str]:
        """Put a trainer's own defaults in the place of its name as a framework, where flags say nothing; return a note on it."""
        name, dialects = flags.get("framework"), provider("DIALECTS")
        if dialects is None or name not in dialects.FILES or name in (*FRAMEWORKS, *PLAIN):
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


def _read(values: Sequence[str]) -> Any:
    """Return the value of a tool's key as its file has it.

    >>> [_read(words.split()) for words in ("", "true", "8", "0.5", "full", "core_attn moe_act")]
    [True, True, 8, 0.5, 'full', ['core_attn', 'moe_act']]
    """
    if len(values) > 1:
        return list(values)
    text = values[0] if values else "true"
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return float(text) if re.fullmatch(r"\d*\.\d+|\d+e-?\d+", text) else int(text) if text.isdecimal() else text


def _hydra(word: str) -> list[str]:
    """Return a key with its value, as tools with sections take them, as a flag.

    >>> _hydra("+data.train_batch_size=1024"), _hydra("all_reduce=340GB/s"), _hydra("./a.b=c")
    (['--data.train_batch_size=1024'], ['all_reduce=340GB/s'], ['./a.b=c'])
    """
    match = re.fullmatch(r"[+~]*([A-Za-z_]\w*(?:\.\w+)+=.*)", word)
    return [f"--{match[1]}"] if match and not Path(word).exists() else [word]


def _task(flags: dict[str, Any]) -> list[str]:
    """Put the task that flags of serving say among them, or read a batch and a length as those of training; return notes.

    >>> flags = {"task": None, "model": "gpt2", "batch": 4, "micro_batch": None, "weight_format": None}
    >>> _task(flags), flags["micro_batch"], flags["batch"]
    (['--batch 4 as --micro-batch 4'], 4, None)
    """
    model, prompt = str(flags.get("model") or ""), flags.get("prompt_len")
    if flags.get("task") == "generate" and (prompt or flags.get("answers")):
        flags["answer"] = int(flags["answers"]) if str(flags.get("answers")).isdecimal() else flags.get("answer")
        flags["context"] = flags.get("context") or (prompt and int(prompt) + (flags["answer"] or 1))
        flags |= {"prompt_len": None, "answers": None}
        return [
            f"prompt and answers as --context {flags['context'] or 'that is usual'} --answer {flags['answer'] or 1}"
        ]
    if "task" not in flags or flags["task"] is not None or (model and Path(model).exists()) or is_command(model):
        return []
    serves = [name for name in (*SERVING, *ALONE) if flags.get(name) is not None]
    if any(flags.get(name) is not None for name in SERVING) and flags.get("micro_batch") is None:
        flags["task"] = "generate"
        return [
            *_task(flags),
            f"{', '.join(f'--{name.replace(chr(95), chr(45))}' for name in serves)} as of --task generate",
        ]
    notes = []
    for name, own in ALONE.items():
        if flags.get(name) is not None and flags.get(own, 0) is None:
            notes.append(f"--{name} {flags[name]} as --{own.replace('_', '-')} {flags[name]}")
            flags |= {own: flags[name], name: None}
    return notes


def _unknown(name: str, options: Mapping[str, click.Option], ctx: click.Context | None) -> click.UsageError:
    """Return the error about a flag that nobody knows, with those that it may be meant for: like it, or with a word of it.

    >>> options = {name: click.Option([name]) for name in ("--gpu", "--micro-batch", "--zero", "--max-ttft")}
    >>> [_unknown(name, options, None).message for name in ("--gpo", "--ttft", "--xyzzy")]
    ['no such option --gpo; did you mean --gpu?', 'no such option --ttft; did you mean --max-ttft?', 'no such option --xyzzy']
    """
    if ctx is not None and ctx.parent is not None and isinstance(group := ctx.parent.command, click.Group):
        commands = {other: group.get_command(ctx, other) for other in OTHERS}
        for other, there in commands.items():
            if there is not None and any(name in each.opts for each in there.params):
                layout = ", of the layout that is found" if ctx.command.name == "plan" else ""
                return click.UsageError(f"no such option {name!r} here; `loadgauge {other}` has it{layout}", ctx)
    plain = _plain(name)
    if (last := plain.rpartition(".")[2]) in ASKED:
        return click.UsageError(f"no flag {name}: {ASKED[last]}", ctx)
    known = {each.lstrip("-"): each for each in options} | {
        word: flag.partition(" ")[0] for word, flag in RENAMED.items() if flag in options
    }
    near = get_close_matches(plain, known, 3, 0.8 if len(plain) > 5 else 0.65)
    words = {word for word in re.split(r"[-.]", plain) if len(word) > 2 and word not in COMMON}
    near = near or sorted(
        (each for each in known if words & {*each.split("-")}), key=lambda each: abs(len(each) - len(plain))
    )
    flags = list(dict.fromkeys(known[each] for each in near))[:3]
    like = f"; did you mean {' or '.join(flags)}?" if flags else ""
    return click.UsageError(f"no such option {name}{like}", ctx)


def _typed(word: str) -> str:
    """Return a word as a keyboard has it: without the dashes of text editors, and the wide letters and figures of Chinese input.

    >>> [_typed(word) for word in ("—gpu", "–gpus", "llama‑3.1‑8b", "４０９０", "--gpu", "é.yaml")]
    ['--gpu', '--gpus', 'llama-3.1-8b', '4090', '--gpu', 'é.yaml']
    """
    if word.isascii() or Path(word).exists():
        return word
    return re.sub("[‐‑]", "-", re.sub("^[–—−]-?", "--", unicodedata.normalize("NFKC", word)))


def _is_line(word: str) -> bool:
    """Return whether a word is a model with its flags, in quotes that were meant for none.

    >>> _is_line("llama-3.1-8b --gpu h100"), _is_line("all_reduce=340GB/s --x"), _is_line("an error --of it")
    (True, False, False)
    """
    line = re.match(r"[\w./:@-]*\w +--?[a-z]", word) is not None
    return line and not is_command(word) and not Path(word).exists()


def _of_each(typed: Sequence[str], words: list[str], notes: list[str]) -> tuple[list[str], list[str]]:
    """Return words and notes in which the GPUs of a machine are those of each node, as nodes are counted beside it.

    typed: the words before they were taken, which name a machine, or GPUs by `--gres`

    >>> _of_each(["gpt2", "--gres", "gpu:a100:8"], ["gpt2", "--gpu", "a100", "--gpus", "8"], [])[0]
    ['gpt2', '--gpu', 'a100', '--gpus-per-node', '8']
    """
    cards = [after for word, after in pairwise(words) if word == "--gpu"]
    machine = "gres" in map(_plain, typed) or not set(cards) <= set(typed)
    if not machine or "--gpus" in typed or "--gpus-per-node" in words:
        return words, notes
    each = [note.replace("--gpus ", "--gpus-per-node ") for note in notes]
    return ["--gpus-per-node" if word == "--gpus" else word for word in words], each


def _plain(word: str) -> str:
    """Return a flag's name with dashes inside, without those before it and what it is set to."""
    return word.partition("=")[0].lstrip("-").lower().replace("_", "-")


def _counts(words: list[str], options: Mapping[str, click.Option]) -> tuple[dict[str, tuple[str, int]], list[str]]:
    """Return the counts of a command line that are no flags here, by flag, and the other words."""
    counts: dict[str, tuple[str, int]] = {}
    others, rest = [], list(words)
    many = any(
        COUNTS.get(_plain(word).rpartition(".")[2]) == "nodes" for word in words if not re.search(r"\.n(=|$)", word)
    )
    while rest:
        word = rest.pop(0)
        flag, _, value = word.partition("=")
        section, _, plain = _plain(flag).rpartition(".")
        name = (
            None
            if section and plain in OWN_SECTIONS
            else "per node"
            if many and plain == "devices"
            else None
            if many and plain in EACH
            else COUNTS.get(plain)
            if re.match("--|-dp|-N", flag)
            else None
        )
        number = value or (rest[0] if rest else "")
        tokens = re.fullmatch(TOKENS, number.lower())
        if tokens and RENAMED.get(plain, flag) == "--global-batch" and not number.isdecimal():
            name = "tokens"
        usual = flag in options and name != "tokens"
        if name is None or usual or not (tokens if name == "tokens" else re.fullmatch(r"[1-9]\d{0,6}", number)):
            others.append(word)
            continue
        counts[flag] = name, int(number) if number.isdecimal() or not tokens else _tokens(*tokens.groups())
        del rest[: not value]
        del rest[: name == "tokens" and rest[:1] in (["tokens"], ["tok"])]
    # GPUs first, the batch follows from them
    first = ("per node", "nodes", "dp", "each")
    return dict(sorted(counts.items(), key=lambda each: [*first, each[1][0]].index(each[1][0]))), others


def _tokens(number: str, thousands: str) -> int:
    """Return tokens as they are written of a batch. ``_tokens("4", "m") == 4194304``"""
    return int(float(number) * {"": 1, "k": 1 << 10, "m": 1 << 20}[thousands])


def _served(words: list[str], options: Mapping[str, click.Option]) -> tuple[list[str], list[str]]:
    """Return a command line with an engine's own flags as options of `--server`, or of `--rollout`, and a note on them.

    Raises `click.UsageError` for one that is no single one here.

    >>> server = {"--server": click.Option(["--server"])}
    >>> _served(["--task", "generate", "--enforce-eager", "--gpu-memory-utilization", "0.8"], server)[0]
    ['--task', 'generate', '--server', 'vllm:graphs=0,gpu_memory_utilization=0.8']
    >>> _served(["--task", "generate", "--page-size", "64", "--disable-radix-cache"], server)[0]
    ['--task', 'generate']
    """
    of_server = {_plain(word) for word in words if word[:1] == "-"} & {*ENGINES_OWN}
    if of_server and "--context" in options and not any(re.search(r"task|rollout|grpo|ppo", word) for word in words):
        words = [*words, "--task", "generate"]
    engines = r"vllm|sglang|trt-?llm|tensorrt-llm"
    side = "--rollout" if any(re.search("rollout|grpo|ppo|rloo|gspo|dapo", word) for word in words) else "--server"
    named_by = "--(?:engine|backend|inference-engine|rollout-backend)"
    words = [
        side if re.fullmatch(named_by, word) and re.fullmatch(engines, after) else word
        for word, after in pairwise([*words, ""])
    ]
    words = [
        part for word in words for part in ([side, word[2:]] if re.fullmatch(f"--(?:{engines})", word) else [word])
    ]
    short = (SWITCHES.get(_plain(word), ("",))[0] for word in words if word.startswith("--"))
    line = f"{' '.join([*words, *(each for each in short if each.startswith('--task '))])} "
    task, named = re.search(r"--task[ =](\S+)", line), re.search(r"--(?:server|rollout)[ =](\S+)", line)
    field = "rollout" if "--rollout" in line or (task and task[1] in fields()["task"].choices) else "server"
    if f"--{field}" not in options or not (task or named):
        return words, []
    engine, rest = named[1] if named else "", list(words)
    table = read_table("engine_flags.toml") if field == "server" else {"small": {}, "instead": {}}
    switches, nothing, alone = (table.get(kind, "").split() for kind in ("switches", "nothing", "alone"))
    taken: list[str] = []
    others: list[str] = []
    notes: list[str] = []
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        full = _plain(word)
        plain = full.rpartition(".")[2].removeprefix("vllm-").removeprefix("rollout-")
        own = not flag.startswith("--") or f"--{full}" in options or (plain == full and plain in RENAMED)
        text = value if equals else rest[0] if rest and not rest[0].startswith("-") else "true"
        if flag.startswith("--") and full in table["instead"]:
            raise click.UsageError(f"no flag {flag}: {table['instead'][full]}", click.get_current_context(silent=True))
        if flag.startswith("--") and full in (*table["small"], *switches, *nothing):
            rest = rest[not (equals or full in (*switches, *alone) or text == "true") :]
            notes.append(
                f"{flag} as nothing that is counted: {table['small'].get(full, 'memory and times are the same')}"
            )
        elif trial := "" if own else _engine(engine, field, ENGINES.get(plain) or f"{plain.replace('-', '_')}={text}"):
            engine, beside = trial, not equals and rest[:1] == [text]
            taken.append(f"{word} {text}" if beside else word)
            rest = rest[beside:]
        elif field == "server" and RENAMED.get(full) in SERVED and flag.startswith("--"):
            others.append(f"{SERVED[RENAMED[full]]}{equals}{value}")
            notes.append(f"{flag} as {SERVED[RENAMED[full]]}")
        else:
            others.append(word)
    if taken and named:
        at = next(n for n, word in enumerate(others) if word.partition("=")[0] == f"--{field}")
        del others[at : at + (1 if "=" in others[at] else 2)]
    return (
        [*others, *([f"--{field}", engine] if taken else [])],
        [*notes, *([f"{', '.join(taken)} as --{field} {engine}"] if taken else [])],
    )


def _engine(engine: str, field: str, option: str) -> str:
    """Return an engine with one more option, or the first that has such a one; nothing where none has."""
    from loadgauge.core.base.errors import ConfigError
    from loadgauge.core.definitions.serving.rollout import ROLLOUTS, SERVERS, Engine

    for name in (engine,) if engine else SERVERS if field == "server" else ROLLOUTS:
        trial = f"{name}{',' if ':' in name else ':'}{option}"
        with contextlib.suppress(ConfigError):
            Engine.parse(trial, field)
            return trial
    return ""


def _follows(name: str, count: int, flag: str, flags: dict[str, Any]) -> str:
    """Put the GPUs or the batch that follow from a count among the flags; return a note on it.

    Raises `click.UsageError` where a flag says another number, or a degree is a list.
    """
    degrees = [flags.get(axis) or 1 for axis in REPLICA]
    if not all(isinstance(degree, int) for degree in degrees) or "gpus" not in flags:
        raise click.UsageError(f"no flag {flag} here: give --gpus", click.get_current_context(silent=True))
    within = math.prod(degrees)
    if name == "each":  # of the one node
        flags |= {"gpus": flags["gpus"] or count} | ({"gpus_per_node": count} if "gpus_per_node" in flags else {})
        return f"{flag} {count} as --gpus {flags['gpus']}"
    if name == "per node":
        field, number = "gpus_per_node", count
    elif name == "tokens":
        each = (flags.get("micro_batch") or 1) * ((flags["gpus"] or within) // within)
        field, number = "global_batch", each * max(1, round(count / (flags.get("seq_len") or 4096) / each))
    elif name == "accumulation":
        field, number = "global_batch", count * (flags.get("micro_batch") or 1) * ((flags["gpus"] or within) // within)
    else:
        field, number = "gpus", count * (within if name == "dp" else flags.get("gpus_per_node") or GPUS_PER_NODE)
    if field not in flags or flags[field] not in (None, number):
        text = f"{flag} {count} makes it --{field.replace('_', '-')} {number}, and the flag says {flags.get(field)}"
        raise click.UsageError(text, click.get_current_context(silent=True))
    flags[field] = number
    return f"{flag} {count} as --{field.replace('_', '-')} {number}"


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
            card = _card(word) if room == 0 and "--gpu" in options else None
            room = max(0, room - 1) if room else room
            if card is not None:
                notes += [f"{word} as {' '.join(card)}"] if card else []
                result += card
                continue
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
        room = 0 if room and taken and len(taken) == 1 and not taken[0].startswith("-") and typed != taken else room
        if option is not None and not option.is_flag:
            if len(taken) == 1 and rest:
                typed, taken = [*typed, rest[0]], [taken[0], rest.pop(0)]
            taken = [*_value(str(option.name), taken), *taken[2:]] if len(taken) > 1 else taken
        if taken != typed:
            notes.append(f"{' '.join(typed)} as {' '.join(taken) or 'nothing that changes the answer'}")
            result += taken
        else:
            result += [word, *typed[2 if equals else 1 :]]
    if room and "--model" in result[:-1]:  # a model in a job file's place
        at = result.index("--model")
        result = [result[at + 1], *result[:at], *result[at + 2 :]]
    return result, notes


def _card(word: str) -> list[str] | None:
    """Return the flags for a word after the model: of a card, of several, none for a filler; None where it is none of these."""
    from loadgauge.core.base.errors import ConfigError
    from loadgauge.core.definitions.hardware.hardware import gpu

    if word.lower() in FILLERS:
        return []
    if word.lower() in (*SWITCHES, "qlora"):
        return SWITCHES.get(word.lower(), ("--qlora",))[0].split()
    flags = _value("gpu", ["--gpu", word])
    try:
        if flags[0] == "--gpu":
            gpu(flags[1])
    except ConfigError:
        return None
    return flags


def _flag(name: str, equals: str, typed: list[str], rest: list[str], options: Mapping[str, click.Option]) -> list[str]:
    """Return the words here of a flag and what it has with it, as many as are sure; those of `rest` that it takes go to `typed`."""
    plain = _plain(name)
    if (own := options.get(name)) is not None and own.is_flag and not equals and rest and rest[0].lower() in TRUTH:
        typed.append(rest.pop(0))
        return [[name], own.secondary_opts[:1]][TRUTH[typed[1].lower()]]
    if name in options or name in ("-h", "--help", "--help-all"):
        return list(typed)
    section, _, last = plain.removeprefix("actor-rollout-ref.").rpartition(".")
    if section and not OWN_SECTIONS & {*re.split("[.-]", section), last}:
        plain = last if any(last in table for table in TAKEN) or f"--{last}" in options else plain
    if f"--{plain}" in options and len(name) > 2:
        switch = options[f"--{plain}"]
        if switch.secondary_opts and not equals and rest and rest[0].lower() in TRUTH:
            typed.append(rest.pop(0))
            return [(f"--{plain}", switch.secondary_opts[0])[TRUTH[typed[1].lower()]]]
        return [f"--{plain}", *typed[1:]]
    after = typed[1] if equals else rest[0] if rest else ""
    worded = WORDED.get(plain, {}).get(after.lower().partition(" ")[0].replace("-", "_"))
    rank = re.fullmatch(r"(?:r(?:ank)?[=:]?)?(\d+)", after)
    if worded is not None or (plain in NUMBERED and rank):
        typed += [] if equals else [rest.pop(0)]
        return worded.split() if worded is not None else [NUMBERED[plain], rank[1] if rank else ""]
    if plain == "deepspeed" and after.endswith(".json") and "--with" in options:
        typed += [] if equals else [rest.pop(0)]
        return ["--with", after]
    if RENAMED.get(plain) in (*options, *ELSEWHERE):
        names = list(takewhile(MODULE.fullmatch, rest)) if RENAMED[plain] in LISTS else []
        if len(names) > 1:
            del rest[: len(names)]
            typed.append(",".join(names))
        return [RENAMED[plain], *typed[1:]]
    if plain in MODEL and after:
        typed += [] if equals else [rest.pop(0)]
        return [after]
    if plain in SWITCHES:
        if not equals and rest and rest[0].lower() in TRUTH:
            typed.append(rest.pop(0))
        readings = (*SWITCHES[plain], "")
        words = readings[TRUTH.get(typed[1].lower(), 0) if len(typed) > 1 else 0].split()
        if not words or words[0] in options:
            return words
    if plain in HARMLESS:
        typed += [] if equals or not rest or re.match("--?[A-Za-z]", rest[0]) else [rest.pop(0)]
        return []
    if plain in ASKED:
        raise click.UsageError(f"no flag {name}: {ASKED[plain]}", click.get_current_context(silent=True))
    if not typed[1:]:
        card = _card(plain) if "--gpu" in options else None
        if card or (meant := _as_value(plain, options)):
            return card or meant
    return _of_a_tool(name, plain, typed, rest, options) if name.startswith("--") and len(name) > 4 else list(typed)


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
    return shlex.split(Job(model="", **own).flags())


def _as_value(plain: str, options: Mapping[str, click.Option]) -> list[str]:
    """Return the words here of a flag that is the value of another, or another with its value; nothing where it is none.

    >>> options = {f"--{name}": click.Option([f"--{name}"]) for name in ("optimizer", "offload", "schedule")}
    >>> [_as_value(word, options) for word in ("galore", "offload-experts", "dualpipe", "expert")]
    [['--optimizer', 'galore'], ['--offload', 'experts'], ['--schedule', 'dualpipe'], []]
    """
    for field in ALONE_SAID:
        flag, values = (
            field.replace("_", "-"),
            {*fields()[field].choices, *fields()[field].values, *VALUES.get(field, ())},
        )
        for start in ("", f"{flag}-"):
            value = plain.removeprefix(start)
            found = value in values or value.replace("-", "_") in values
            if f"--{flag}" in options and plain.startswith(start) and found and (start or len(value) > 3):
                return [f"--{flag}", value]
    return ["--context", plain] if re.fullmatch(r"\d+[km]", plain) and "--context" in options else []


def _value(field: str, taken: list[str]) -> list[str]:
    """Return a flag and its value in the words here."""
    flag, value = taken[:2]
    if value.lower() in VALUES.get(field, {}):
        return [flag, VALUES[field][value.lower()]]
    if field in LENGTHS and (length := re.fullmatch(r"(\d+)([km])", value.lower())):
        return [flag, str(int(length[1]) << (10 if length[2] == "k" else 20))]
    if field == "gpu" and (machine := _machine(value)):
        return [flag, *machine]
    for name, pattern, words in PATTERNS:
        if name == field and (match := re.fullmatch(pattern, value, re.IGNORECASE)):
            return match.expand(words.replace(" ", "\0")).split("\0") if words else []
    return [flag, value]


def _machine(name: str) -> list[str]:
    """Return the cards of machines that a cloud rents by a name, as `--gpu` and more flags; nothing for another name.

    >>> _machine("p5.48xlarge"), _machine("2x g5.12xlarge"), _machine("h100")
    (['h100-sxm5-80gb', '--gpus', '8'], ['a10g', '--gpus', '8', '--gpus-per-node', '4'], [])
    """
    if fleet := re.fullmatch(
        rf"({COUNT}) ?(?:nodes?|machines?|hosts?|[x*×])(?: (?:of|with|x))? ?({COUNT}) ?[x*×]? ?(.*[a-z].*)",
        name.lower(),
    ):
        return [fleet[3], "--gpus", str(int(fleet[1]) * int(fleet[2])), "--gpus-per-node", fleet[2]]
    machines = re.fullmatch(rf"(?:({COUNT}) ?[x*×] ?)?(?:standard_)?(.*)", name.lower())
    assert machines is not None
    count, _, card = read_table("instances.toml").get(machines[2], "").partition(" ")
    if not card:
        return []
    several = ["--gpus-per-node", count] if int(machines[1] or 1) > 1 else []
    return [card, "--gpus", str(int(machines[1] or 1) * int(count)), *several]
