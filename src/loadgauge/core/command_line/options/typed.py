"""Reads what a command line says beside its flags: counts, engines, tasks, words as a keyboard has them, and what nobody knows."""

import contextlib
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from loadgauge.core.base import read_table
from loadgauge.core.base.files import is_command
from loadgauge.core.definitions.hardware.cluster import GPUS_PER_NODE
from loadgauge.core.definitions.job.job import fields
from loadgauge.core.definitions.job.sentences import NEGATIONS
from loadgauge.core.definitions.job.spoken import (
    ALONE,
    ASKED,
    COMMON,
    COUNTS,
    EACH,
    ENGINES,
    ENGINES_OWN,
    OF_SERVING,
    OWN_SECTIONS,
    RENAMED,
    SERVED,
    SERVING,
    SWITCHES,
    TOKENS,
    WHOLE,
)
from loadgauge.core.definitions.layout.axes import REPLICA

OTHERS = ("plan", "estimate", "network")
"""Commands that may have an option which another one has not."""


def value_of(values: Sequence[str]) -> Any:
    """Return the value of a tool's key as its file has it.

    >>> [value_of(words.split()) for words in ("", "true", "8", "0.5", "full", "core_attn moe_act")]
    [True, True, 8, 0.5, 'full', ['core_attn', 'moe_act']]
    """
    if len(values) > 1:
        return list(values)
    text = values[0] if values else "true"
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return float(text) if re.fullmatch(r"\d*\.\d+|\d+e-?\d+", text) else int(text) if text.isdecimal() else text


def pieces_of(word: str, options: Mapping[str, click.Option]) -> list[str]:
    """Return a key with its value, as tools with sections take them, or degrees with their numbers, as flags.

    >>> tp = {"--tp": click.Option(["--tp"]), "--pp": click.Option(["--pp"])}
    >>> [pieces_of(word, tp) for word in ("+data.train_batch_size=1024", "all_reduce=340GB/s", "--tp8", "tp8pp2", "tp=8,pp=2")]
    [['--data.train_batch_size=1024'], ['all_reduce=340GB/s'], ['--tp=8'], ['--tp=8', '--pp=2'], ['--tp=8', '--pp=2']]
    """
    match = re.fullmatch(r"[+~]*([A-Za-z_]\w*(?:\.\w+)+=.*)", word)
    degrees = re.fullmatch(r"(?:--)?(?:[a-z]{2}[=:]?\d+[-_,x ]*)+", word)
    pairs = re.findall(r"([a-z]{2})[=:]?(\d+)", word)
    if degrees and all(f"--{name}" in options or name == "dp" for name, _ in pairs):
        return [f"--{name}={number}" for name, number in pairs]
    return [f"--{match[1]}"] if match and not Path(word).exists() else [word]


def task_of(flags: dict[str, Any]) -> list[str]:
    """Put the task that flags of serving say among them, or read a batch and a length as those of training; return notes.

    >>> flags = {"task": None, "model": "gpt2", "batch": 4, "micro_batch": None, "weight_format": None}
    >>> task_of(flags), flags["micro_batch"], flags["batch"]
    (['--batch 4 as --micro-batch 4'], 4, None)
    """
    model, prompt = str(flags.get("model") or ""), flags.get("prompt_len")
    if flags.get("task") in ("generate", "forward") and flags.get("qlora") and flags.get("weight_format") is None:
        flags |= {"weight_format": flags.get("base") or "nf4", "qlora": None, "base": None}
        return [f"--qlora as --weight-format {flags['weight_format']}", *task_of(flags)]
    if flags.get("task") in ("generate", "forward"):
        back = {own: name for own, name in OF_SERVING.items() if flags.get(own) is not None and flags.get(name) is None}
        flags |= {name: flags[own] for own, name in back.items()} | dict.fromkeys(back)
        if back:
            pairs = [f"{flag_of(own)} as {flag_of(name)} {flags[name]}" for own, name in back.items()]
            return [*pairs, *task_of(flags)]
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
            *task_of(flags),
            f"{', '.join(flag_of(name) for name in serves)} as of --task generate",
        ]
    notes = [f"{flag_of(name)} as nothing that changes a step" for name in WHOLE if flags.get(name) is not None]
    flags |= {name: None for name in WHOLE if name in flags}
    if flags.get("price") is not None and flags.get("tokens", 0) is None and "objective" not in flags:
        notes.append(
            f"--price {flags['price']} as nothing yet: what it costs follows from --tokens, the length of the whole run"
        )
        flags["price"] = None
    for name, own in ALONE.items():
        if flags.get(name) is not None and flags.get(own, 0) is None:
            notes.append(f"--{name} {flags[name]} as --{own.replace('_', '-')} {flags[name]}")
            flags |= {own: flags[name], name: None}
    return notes


def flag_of(field: str) -> str:
    """Return the flag of a field. ``flag_of("micro_batch") == "--micro-batch"``"""
    return f"--{field.replace('_', '-')}"


def unknown(name: str, options: Mapping[str, click.Option], ctx: click.Context | None) -> click.UsageError:
    """Return the error about a flag that nobody knows, with those that it may be meant for: like it, or with a word of it.

    >>> options = {name: click.Option([name]) for name in ("--gpu", "--micro-batch", "--zero", "--max-ttft")}
    >>> [unknown(name, options, None).message for name in ("--gpo", "--ttft", "--xyzzy")]
    ['no such option --gpo; did you mean --gpu?', 'no such option --ttft; did you mean --max-ttft?', 'no such option --xyzzy']
    """
    if ctx is not None and ctx.parent is not None and isinstance(group := ctx.parent.command, click.Group):
        commands = {other: group.get_command(ctx, other) for other in OTHERS}
        for other, there in commands.items():
            if there is not None and any(name in each.opts for each in there.params):
                layout = ", of the layout that is found" if ctx.command.name == "plan" else ""
                return click.UsageError(f"no such option {name!r} here; `loadgauge {other}` has it{layout}", ctx)
    plain = re.sub(f"^{NEGATIONS}", "", bare(name))
    if (last := plain.rpartition(".")[2]) in ASKED:
        return click.UsageError(f"no flag {name}: {ASKED[last]}", ctx)
    names = {each.lstrip("-"): each for each in options} | {
        word: flag.partition(" ")[0]
        for word, flag in (*RENAMED.items(), *((word, flags[0]) for word, flags in SWITCHES.items()))
        if flag.partition(" ")[0] in options
    }
    own = {each.lstrip("-") for each in options}
    near = get_close_matches(plain, names if len(plain) > 5 else own, 3, 0.8 if len(plain) > 5 else 0.65)
    words = {word for word in re.split(r"[-.]", plain) if len(word) > 2 and word not in COMMON}
    near = near or sorted(
        (each for each in own if words & {*each.split("-")}), key=lambda each: abs(len(each) - len(plain))
    )
    flags = list(dict.fromkeys(names[each] for each in near))[:3]
    like = f"; did you mean {' or '.join(flags)}?" if flags else ""
    return click.UsageError(f"no such option {name}{like}", ctx)


def keyed(word: str) -> str:
    """Return a word as a keyboard has it: without the dashes of text editors, and the wide letters and figures of Chinese input.

    >>> [keyed(word) for word in ("—gpu", "–gpus", "llama‑3.1‑8b", "４０９０", "--gpu", "é.yaml")]
    ['--gpu', '--gpus', 'llama-3.1-8b', '4090', '--gpu', 'é.yaml']
    """
    if word.isascii() or Path(word).exists():
        return word
    return re.sub("[‐‑]", "-", re.sub("^[–—−]-?", "--", unicodedata.normalize("NFKC", word)))


def is_line(word: str) -> bool:
    """Return whether a word is a model with its flags, in quotes that were meant for none.

    >>> is_line("llama-3.1-8b --gpu h100"), is_line("all_reduce=340GB/s --x"), is_line("an error --of it")
    (True, False, False)
    """
    line = re.match(r"[\w./:@-]*\w +--?[a-z]", word) is not None
    return line and not is_command(word) and not Path(word).exists()


def of_each(typed: Sequence[str], words: list[str], notes: list[str]) -> tuple[list[str], list[str]]:
    """Return words and notes in which the GPUs of a machine are those of each node, as nodes are counted beside it.

    typed: the words before they were taken, which name a machine, or GPUs by `--gres`

    >>> of_each(["gpt2", "--gres", "gpu:a100:8"], ["gpt2", "--gpu", "a100", "--gpus", "8"], [])[0]
    ['gpt2', '--gpu', 'a100', '--gpus-per-node', '8']
    """
    cards = [after for word, after in pairwise(words) if word == "--gpu"]
    machine = "gres" in map(bare, typed) or not set(cards) <= set(typed)
    if not machine or "--gpus" in typed or "--gpus-per-node" in words:
        return words, notes
    each = [note.replace("--gpus ", "--gpus-per-node ") for note in notes]
    return ["--gpus-per-node" if word == "--gpus" else word for word in words], each


def bare(word: str) -> str:
    """Return a flag's name with dashes inside, without those before it and what it is set to."""
    return word.partition("=")[0].lstrip("-").lower().replace("_", "-")


def counts_in(words: list[str], options: Mapping[str, click.Option]) -> tuple[dict[str, tuple[str, int]], list[str]]:
    """Return the counts of a command line that are no flags here, by flag, and the other words."""
    counts: dict[str, tuple[str, int]] = {}
    others, rest = [], list(words)
    many = any(
        COUNTS.get(bare(word).rpartition(".")[2]) == "nodes" for word in words if not re.search(r"\.n(=|$)", word)
    )
    while rest:
        word = rest.pop(0)
        flag, _, value = word.partition("=")
        section, _, plain = bare(flag).rpartition(".")
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
        if tokens and RENAMED.get(plain, flag) in ("--global-batch", "--micro-batch") and not number.isdecimal():
            name = "tokens"
        usual = flag in options and name != "tokens"
        if name is None or usual or not (tokens if name == "tokens" else re.fullmatch(r"[1-9]\d{0,6}", number)):
            others.append(word)
            continue
        counts[flag] = name, int(number) if number.isdecimal() or not tokens else tokens_of(*tokens.groups())
        del rest[: not value]
        del rest[: name == "tokens" and rest[:1] in (["tokens"], ["tok"])]
    # GPUs first, the batch follows from them
    first = ("per node", "nodes", "dp", "each", "shards")
    return dict(sorted(counts.items(), key=lambda each: [*first, each[1][0]].index(each[1][0]))), others


def tokens_of(number: str, thousands: str) -> int:
    """Return tokens as they are written of a batch. ``tokens_of("4", "m") == 4194304``"""
    return int(float(number) * {"": 1, "k": 1 << 10, "m": 1 << 20}[thousands])


def served_by(words: list[str], options: Mapping[str, click.Option]) -> tuple[list[str], list[str]]:
    """Return a command line with an engine's own flags as options of `--server`, or of `--rollout`, and a note on them.

    Raises `click.UsageError` for one that is no single one here.

    >>> server = {"--server": click.Option(["--server"])}
    >>> served_by(["--task", "generate", "--enforce-eager", "--gpu-memory-utilization", "0.8"], server)[0]
    ['--task', 'generate', '--server', 'vllm:graphs=0,gpu_memory_utilization=0.8']
    >>> served_by(["--task", "generate", "--page-size", "64", "--disable-radix-cache"], server)[0]
    ['--task', 'generate']
    """
    of_server = {bare(word) for word in words if word[:1] == "-"} & {*ENGINES_OWN}
    if of_server and "--context" in options and not any(re.search(r"task|rollout|grpo|ppo", word) for word in words):
        words = [*words, "--task", "generate"]
    engines = r"vllm|sglang|trt-?llm|tensorrt-llm"
    side = "--rollout" if any(re.search("rollout|grpo|ppo|rloo|gspo|dapo", word) for word in words) else "--server"
    typed = words
    named_by = "--(?:engine|backend|inference-engine|rollout-backend)"
    words = [
        side if re.fullmatch(named_by, word) and re.fullmatch(engines, after) else word
        for word, after in pairwise([*words, ""])
    ]
    words = [
        part for word in words for part in ([side, word[2:]] if re.fullmatch(f"--(?:{engines})", word) else [word])
    ]
    engine_said = [f"{word} as {side} {word[2:]}" for word in typed if re.fullmatch(f"--(?:{engines})", word)]
    short = (SWITCHES.get(bare(word), ("",))[0] for word in words if word.startswith("--"))
    line = f"{' '.join([*words, *(each for each in short if each.startswith('--task '))])} "
    task, named = re.search(r"--task[ =](\S+)", line), re.search(r"--(?:server|rollout)[ =](\S+)", line)
    field = "rollout" if "--rollout" in line or (task and task[1] in fields()["task"].choices) else "server"
    if f"--{field}" not in options or not (task or named):
        return words, engine_said
    engine, rest = named[1] if named else "", list(words)
    table = read_table("engine_flags.toml") if field == "server" else {"small": {}, "instead": {}}
    switches, nothing, alone = (table.get(kind, "").split() for kind in ("switches", "nothing", "alone"))
    taken: list[str] = []
    others: list[str] = []
    notes = engine_said
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        full = bare(word)
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
        elif (
            trial := ""
            if own
            else with_option(engine, field, ENGINES.get(plain) or f"{plain.replace('-', '_')}={text}")
        ):
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


def with_option(engine: str, field: str, option: str) -> str:
    """Return an engine with one more option, or the first that has such a one; nothing where none has."""
    from loadgauge.core.base.errors import ConfigError
    from loadgauge.core.definitions.serving.rollout import ROLLOUTS, SERVERS, Engine

    for name in (engine,) if engine else SERVERS if field == "server" else ROLLOUTS:
        trial = f"{name}{',' if ':' in name else ':'}{option}"
        with contextlib.suppress(ConfigError):
            Engine.parse(trial, field)
            return trial
    return ""


def follows(name: str, count: int, flag: str, flags: dict[str, Any]) -> str:
    """Put the GPUs or the batch that follow from a count among the flags; return a note on it.

    Raises `click.UsageError` where a flag says another number, or a degree is a list.
    """
    degrees = [flags.get(axis) or 1 for axis in REPLICA]
    if not all(isinstance(degree, int) for degree in degrees) or "gpus" not in flags:
        raise click.UsageError(f"no flag {flag} here: give --gpus", click.get_current_context(silent=True))
    within = math.prod(degrees)
    if name == "shards" and (flags["gpus"] or count * within) % (count * within) == 0:
        flags["zero"] = 3 if flags.get("zero") is None else flags["zero"]
        flags["gpus"] = flags["gpus"] or count * within * (flags.get("replicas") or 1)
        field, number = "replicas", flags["gpus"] // within // count
    elif name == "each":  # of the one node
        flags |= {"gpus": flags["gpus"] or count} | ({"gpus_per_node": count} if "gpus_per_node" in flags else {})
        return f"{flag} {count} as --gpus {flags['gpus']}"
    elif name == "per node":
        field, number = "gpus_per_node", count
    elif name == "tokens":
        each = (flags.get("micro_batch") or 1) * ((flags["gpus"] or within) // within)
        field, number = "global_batch", each * max(1, round(count / (flags.get("seq_len") or 4096) / each))
    elif name == "accumulation":
        field, number = "global_batch", count * (flags.get("micro_batch") or 1) * ((flags["gpus"] or within) // within)
    else:
        field, number = (
            "gpus",
            count * (within if name in ("dp", "shards") else flags.get("gpus_per_node") or GPUS_PER_NODE),
        )
    if field not in flags or flags[field] not in (None, number):
        text = f"{flag} {count} makes it --{field.replace('_', '-')} {number}, and the flag says {flags.get(field)}"
        raise click.UsageError(text, click.get_current_context(silent=True))
    flags[field] = number
    return f"{flag} {count} as {'--zero 3 ' if name == 'shards' else ''}--{field.replace('_', '-')} {number}"
