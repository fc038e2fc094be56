"""Reads a job file of any dialect, and writes one: as a patch of the user's own file, or from nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.formats.argv import Argv
from loadgauge.formats.coverage import Uncounted
from loadgauge.formats.dialects import dialect as dialect_of
from loadgauge.formats.dialects import recognise
from loadgauge.formats.nested import json_document, toml_document, yaml_document
from loadgauge.formats.run import FIELDS, Run, Said, facts, merge, solve
from loadgauge.formats.table import Dialect, Document, Keys, Missing
from loadgauge.spec.axes import DEGREES, FACTORS, RANK_ORDER

LARGEST_FILE = 100_000
"""Bytes. A job file has some thousands."""
SYNTAXES = {
    ".json": "json",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".sh": "argv",
    ".txt": "argv",
    ".args": "argv",
}
SYNTAXES |= {".bash": "argv", ".slurm": "argv", ".sbatch": "argv"}
BESIDE = ("deepspeed", "deepspeed_config.deepspeed_config_file")
"""Keys that name a DeepSpeed configuration in a file of its own."""
LAUNCHED_WITH = "config_file"
"""The option of `accelerate launch` that names its configuration."""
ALIKE: dict[str, Any] = {
    "lora_rank": 0, **dict.fromkeys(DEGREES, 1), "zero": 0, "replicas": 1, "sequence_parallel": False,
    "recompute": "none", "loss": "auto", "offload": "none", "qlora": False, "attention": "flash", "micro_batch": 1,
    "order": ",".join(RANK_ORDER), "precision": "bf16", "optimizer": "adamw", "overlap": "cp,pp,prefetch",
}  # fmt: skip
"""What a run that does not say it is estimated with."""


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """A job file that was read.

    unread: its keys that no idea reads; auto: keys that it leaves to another file
    uncounted: what it asks for that is not counted
    stopped: what it asks for that there is no estimate with, where that was allowed
    """

    dialect: str
    syntax: str
    file: str
    run: Run
    said: dict[str, Said]
    unread: tuple[str, ...] = ()
    auto: tuple[str, ...] = ()
    uncounted: tuple[Uncounted, ...] = ()
    stopped: tuple[str, ...] = ()


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A job file that was written. `left_out`: what of the run it does not say, or says differently, a line each."""

    dialect: str
    text: str
    left_out: tuple[str, ...] = ()


def load(path: str | Path) -> str:
    """The text of a regular file of a sensible size."""
    place, file = Path(path), str(path)
    try:
        if not place.is_file():
            raise ConfigError("is not a file" if place.exists() else "no such file", file=file)
        with place.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}", file=file) from None
    if len(content) > LARGEST_FILE:
        raise ConfigError(f"is larger than {LARGEST_FILE // 1000} kB; a job file has some kB", file=file)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError("is not text (UTF-8)", file=file) from None


def _syntax(text: str, file: str) -> str:
    suffix = Path(file).suffix.lower()
    if suffix == ".py":
        raise ConfigError(
            "is a program, which is not run; give the flags or the file that it is started with", file=file
        )
    if suffix in SYNTAXES:
        return SYNTAXES[suffix]
    start = text.lstrip()
    if start.startswith("{"):
        return "json"
    if (
        start.startswith(("#!", "torchrun", "python", "accelerate ", "deepspeed ", "--"))
        or "\n--" in text
        or " --" in text
    ):
        return "argv"
    return "yaml"


def document(text: str, syntax: str, chosen: Dialect | None = None, file: str = "") -> Document:
    """A file's text as keys and values; what cannot be read is a `ConfigError` of one line."""
    if "\0" in text:
        raise ConfigError("holds a zero byte, so it is not text", file=file)
    sections = dict(chosen.sections) if chosen is not None and syntax == "yaml" else None
    try:
        if syntax == "argv":
            style, objects = (chosen.style, chosen.objects) if chosen is not None else ("value", frozenset[str]())
            return Argv(text, style, objects)  # type: ignore[arg-type]
        reader = {"json": json_document, "toml": toml_document, "yaml": yaml_document}[syntax]
        return reader(text, sections)
    except ConfigError as error:
        raise ConfigError(str(error), file="" if str(error).startswith(f"{file}:") else file) from None


def read(
    text: str,
    name: str | None = None,
    *,
    file: str = "",
    given: Mapping[str, Any] | None = None,
    version: str | None = None,
    alone: bool = False,
    keeping: str | None = None,
) -> JobFile:
    """The run that a job file says. A file that contradicts itself, that no dialect knows, or that asks for something
    that an estimate would be wrong about, raises `ConfigError`.

    name: of the dialect; None: the one whose keys the file has
    given: facts known from elsewhere, as flags name them, which go before the file's
    version: of the tool; None: the newest whose defaults are known
    alone: a DeepSpeed configuration that it names is not looked for on the disk
    keeping: a dialect whose files are only patched: what there is no estimate with stays in them, and is `stopped`

    >>> found = read('{"zero_optimization": {"stage": 3}, "train_batch_size": 64, "gradient_clipping": 1.0,'
    ...              ' "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}')
    >>> found.dialect, found.run.zero, found.run.gpus, found.unread
    ('deepspeed', 3, 8, ('gradient_clipping',))
    """
    syntax = _syntax(text, file)
    chosen = None if name is None else dialect_of(name)
    if chosen is None:
        chosen = recognise(document(text, syntax, None, file))
        if chosen is None and syntax == "yaml":
            flat = dialect_of("megatron")
            chosen = recognise(document(text, syntax, flat, file))
        if chosen is None:
            raise ConfigError("has no keys of a job file that is known; say whose it is with --from", file=file)
    elif syntax not in chosen.syntaxes:
        raise ConfigError(f"is {syntax}, and {chosen.title} is {' or '.join(chosen.syntaxes)}", file=file)
    keys = Keys(document(text, syntax, chosen, file), file, chosen.auto, _version(version))
    stopped = chosen.stopped(keys)
    if stopped and keeping != chosen.name:
        raise _first(stopped)
    known = {name: Said(value, f"--{name.replace('_', '-')}") for name, value in (given or {}).items()}
    found = chosen.read(keys, frozenset(known))
    found.setdefault("framework", Said(chosen.framework, chosen.name, True))
    unread, uncounted = chosen.unread(keys.document), chosen.uncounted(keys)
    if not alone:
        for place, other in _beside(keys, file, frozenset(known)):
            found = merge(found, other.said, place)
            unread += other.unread
            uncounted += other.uncounted
    return JobFile(
        dialect=chosen.name, syntax=syntax, file=file, run=solve(_with(found, known), file), said=found,
        unread=unread, auto=tuple(keys.document.shown(key) for key in keys.left), uncounted=uncounted,
        stopped=tuple(f"{error.key}: {str(error).rpartition(f'{error.key}: ')[2]}" for error in stopped),
    )  # fmt: skip


def _first(errors: list[ConfigError]) -> ConfigError:
    """The first of several, which says how many there are."""
    first, *rest = errors
    if not rest:
        return first
    names = ", ".join(str(error.key) for error in rest[:5]) + ("" if len(rest) <= 5 else ", ...")
    message = str(first).rpartition(f"{first.key}: ")[2]
    return ConfigError(f"{message} (so do {len(rest)} more: {names})", key=first.key, file=first.file)


def _version(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(".")
    if not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in parts):
        raise ConfigError(f"must be a version such as 1.6, got {text!r}", key="version")
    return tuple(int(part) for part in parts)


def _part(text: str, name: str, file: str, known: frozenset[str]) -> JobFile:
    """A file that another one names: what it says, without the arithmetic of a whole run."""
    chosen = dialect_of(name)
    keys = Keys(document(text, chosen.syntaxes[0], chosen, file), file, chosen.auto)
    stopped = chosen.stopped(keys)
    if stopped:
        raise _first(stopped)
    unread = tuple(f"{file}: {key}" for key in chosen.unread(keys.document))
    uncounted = chosen.uncounted(keys)
    said = chosen.read(keys, known)
    return JobFile(
        dialect=name, syntax=chosen.syntaxes[0], file=file, run=Run(), said=said, unread=unread, uncounted=uncounted
    )


def _beside(keys: Keys, file: str, known: frozenset[str]) -> list[tuple[str, JobFile]]:
    """The files that a job file names: DeepSpeed's configuration, and that of `accelerate launch`."""
    named: list[tuple[str, str, tuple[str, ...]]] = [(key, "deepspeed", (".json",)) for key in BESIDE]
    if keys.document.syntax == "argv":
        named.append((LAUNCHED_WITH, "accelerate", (".yaml", ".yml")))
    found: list[tuple[str, JobFile]] = []
    for key, dialect, endings in named:
        name = keys.raw(key)
        name = name[0] if isinstance(name, list) and name else name
        if not isinstance(name, str) or not name.endswith(endings):
            continue
        places = [Path(file).parent / name, Path(name)] if file else [Path(name)]
        place = next((place for place in places if place.is_file()), None)
        if place is None:
            if "zero" in known:
                continue
            raise ConfigError(f"names {name}, which is not there, and only it says the ZeRO stage; give --zero",
                              key=keys.document.shown(key), file=file)  # fmt: skip
        found.append((str(place), _part(load(place), dialect, str(place), known)))
    return found


def _with(found: Mapping[str, Said], known: Mapping[str, Said]) -> dict[str, Said]:
    """The facts of a file with those given beside them, which go first; what followed from what they replace goes."""
    facts = {**found, **known}
    stale: set[str] = set()
    if "gpus" in known:
        stale |= {"nodes", "gpus_per_node", "dp", "shards"}
    if known.keys() & (set(FACTORS) - {"dp"}):
        stale |= {"dp", "shards"}
    if "global_batch" in known or (
        "global_batch" in found and known.keys() & {"gpus", *FACTORS, "micro_batch"} - {"dp"}
    ):
        stale |= {"accumulation"}
    if "replicas" in known:
        stale |= {"shards", "dp"}
    return {name: said for name, said in facts.items() if name not in stale or name in known}


def write(
    run: Run,
    name: str,
    template: str | None = None,
    *,
    file: str = "",
    syntax: str | None = None,
    beside: Mapping[str, Any] | None = None,
) -> Written:
    """A job file of a dialect that says a run; `template` is the user's own, patched where it says something else.

    beside: facts that are no part of a run, such as `lora_dropout`

    >>> print(write(Run(tp=8, gpus=16, precision="bf16"), "megatron", "torchrun --nproc-per-node 8 x.py --fp16  # mine").text)
    torchrun --nproc-per-node 8 --nnodes 2 x.py --tensor-model-parallel-size 8 --bf16  # mine
    """
    chosen = dialect_of(name)
    if template is not None:
        kind = _syntax(template, file) if syntax is None else syntax
    else:
        kind = syntax or chosen.syntaxes[0]
    if kind not in chosen.syntaxes:
        raise ConfigError(f"{chosen.title} is {' or '.join(chosen.syntaxes)}, not {kind}")
    target = document(chosen.blank[kind] if template is None else template, kind, chosen, file)
    keys = Keys(target, file, chosen.auto)
    wanted, changed = facts(run) | dict(beside or {}), False
    if template is None and run.micro_batch is None and run.global_batch is None:
        wanted["micro_batch"] = 1  # without a batch a file may be anyone's
    for idea in chosen.ideas:
        if not wanted.keys() & set(idea.facts):
            continue
        if template is None or _stale(idea.read(keys), idea.facts, wanted):
            for key, value in idea.write(wanted, keys).items():
                changed |= _put(target, key, value)
    text = target.text() if changed or template is None else template
    said = {fact for idea in chosen.ideas for fact in idea.facts}
    unsaid = tuple(
        f"{fact} = {value}: has no place in it" for fact, value in (beside or {}).items() if fact not in said
    )
    return Written(dialect=chosen.name, text=text, left_out=_left_out(run, text, chosen.name, kind) + unsaid)


def _put(target: Document, key: str, value: Any) -> bool:
    """Makes a document say a value; whether it did not before."""
    before = target.get(key)
    if value is None:
        target.drop(key)
        return not isinstance(before, Missing)
    if before == value and isinstance(before, bool) == isinstance(value, bool):
        return False
    if target.syntax == "argv" and str(before) == str(value):
        return False
    target.put(key, value)
    return True


def _stale(said: Mapping[str, Any], names: tuple[str, ...], wanted: Mapping[str, Any]) -> bool:
    """Whether what an idea says of a file is not what is wanted."""
    for name in names:
        if name not in wanted or (name == "framework" and wanted[name] == "torchtitan"):
            continue
        have = said.get(name)
        if have is None:
            if wanted[name] != ALIKE.get(name) and name not in (
                "dp",
                "shards",
                "nodes",
                "gpus_per_node",
                "accumulation",
            ):
                return True
        elif have != wanted[name]:
            return True
    return False


def _left_out(run: Run, text: str, name: str, syntax: str) -> tuple[str, ...]:
    """Reads what was written, and lists what it does not say as the run does."""
    keys = Keys(document(text, syntax, dialect_of(name)), "", dialect_of(name).auto)
    said = dialect_of(name).read(keys)
    beyond = {} if run.gpus is None or "gpus" in said or "nodes" in said else {"gpus": run.gpus}
    known = {key: Said(value, f"--{key}") for key, value in beyond.items()}
    found = solve(_with(said, known))
    lines = [f"--gpus {run.gpus}: is said to the launcher"] if beyond and solve(said).gpus != run.gpus else []
    for field in FIELDS:
        asked, got = getattr(run, field), getattr(found, field)
        if field in ("framework", "config", "accumulation", "gpus_per_node", "gpus") or asked is None:
            continue
        if field in ("lora_targets", "base", "schedule", "cp_comm") and got is None and _alike(field, asked, run):
            continue
        if (ALIKE.get(field) if got is None else got) != asked:
            flag = f"--{field.replace('_', '-')}" + ("" if asked is True else f" {asked}")
            rest = "has no place in it" if got is None else f"it means {got}"
            lines.append(f"{flag}: {rest}")
    return tuple(lines)


def _alike(field: str, asked: Any, run: Run) -> bool:
    if field == "schedule":
        return (run.pp or 1) == 1 or asked == ("interleaved" if (run.vpp or 1) > 1 else "1f1b")
    return bool(asked == {"lora_targets": "all", "base": "nf4", "cp_comm": "ring"}[field])


def combine(files: Sequence[JobFile], given: Mapping[str, Any] | None = None) -> Run:
    """The run that several files of one job say together; two that contradict raise `ConfigError`."""
    found: dict[str, Said] = {}
    for job in files:
        named = {
            name: said if said.default or len(files) == 1 else Said(said.value, f"{job.file}: {said.key}")
            for name, said in job.said.items()
        }
        found = merge(found, named)
    known = {name: Said(value, f"--{name.replace('_', '-')}") for name, value in (given or {}).items()}
    return solve(_with(found, known), files[0].file if len(files) == 1 else "")
