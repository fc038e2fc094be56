"""Reads a job file of any dialect and writes one, as a patch of the user's own file or a new one."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, Untrained, refuse
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.core.definitions.layout.axes import DEGREES, RANK_ORDER
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS
from loadgauge.job_files.dialects import OF_PICTURES, dialect as dialect_of, of_text, recognise
from loadgauge.job_files.ideas import (
    NAMES,
    SMALLER,
    SPLITS,
    UNSAID,
    Dialect,
    Document,
    Extra,
    Fact,
    Keys,
    Missing,
    announced,
    describe,
    divided,
    enough_gpus,
    environment,
    facts_given,
    facts_of,
    merge,
    plainer,
    short,
    solve,
    stored,
)
from loadgauge.job_files.reading.argv import Argv, unread_program
from loadgauge.job_files.reading.calls import untrained
from loadgauge.job_files.reading.configured import launch_options
from loadgauge.job_files.reading.documents import SYNTAXES, document, load, recognise_text, syntax_of
from loadgauge.job_files.reading.held import HEAD
from loadgauge.job_files.reading.known_files import HERE, KnownFile, known_file
from loadgauge.job_files.reading.layered import Without
from loadgauge.job_files.reading.nested import json_document

DERIVED = ("dp", "shards", "nodes", "gpus_per_node", "accumulation")
"""Facts that follow from others, so that a file may leave them out."""
BESIDE = ("deepspeed", "deepspeed_config", "deepspeed_config.deepspeed_config_file")
"""Keys that name a DeepSpeed configuration in a file of its own."""
STAGE = re.compile(r"(?:zero|stage|z)[_-]?([0-3])(?![0-9])|fsdp")
"""Words of a configuration's name that say the stage of ZeRO."""
STATE = ("weights", "gradients", "optimizer", "gathered")
"""Parts of the memory that a stage of ZeRO shares out."""
DYNAMIC = "unsloth-bnb-4bit"  # in the names of Unsloth's checkpoints of dynamic 4 bits
WORLD = ("global_world_size", "world_size", "capabilities.n_gpu")
"""Keys in which a run wrote down how many GPUs it had."""
LAUNCHED_WITH = "config_file"  # the option of `accelerate launch` that names its configuration
ALIKE: dict[str, Any] = {
    "lora_rank": 0, "adapter": "lora", **dict.fromkeys(DEGREES, 1), "zero": 0, "replicas": 1, "sequence_parallel": False,
    "recompute": "none", "loss": "auto", "offload": "none", "offload_to": "cpu",
    "activation_offload": "none", "pin_memory": True, "qlora": False, "attention": "flash", "micro_batch": 1,
    "order": ",".join(RANK_ORDER), "precision": "bf16", "weights": "bfloat16", "optimizer": "adamw",
    "overlap": "cp,pp,prefetch", "kernels": "native", "use_dora": False, "eval_batches": 0, "save": "sharded",
}  # fmt: skip
"""What a job is estimated with where nothing is said."""


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """A job file that was read.

    version: of the tool, whose defaults are taken where the file does not say
    job, extra: what it says; the model is empty where it names none
    facts: the same before GPUs and batches were worked out, with the keys that say it
    unread: its keys that no idea reads; aside: their values, in words; auto: keys that it leaves to another file
    uncounted: what it asks for that is not counted
    ignored: keys that were left out as asked
    stopped: what it asks for that there is no estimate with, where that was allowed
    remarks: what was taken for a file that it names, and cells of a notebook that were skipped, in words
    """

    dialect: str
    syntax: str
    file: str
    version: str = ""
    job: Job
    extra: Extra = Extra()
    facts: dict[str, Fact] = {}
    unread: tuple[str, ...] = ()
    aside: dict[str, str] = {}
    auto: tuple[str, ...] = ()
    uncounted: tuple[Uncounted, ...] = ()
    stopped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A job file that was written; `str` of it is the text. `left_out`: what it does not say as the job does, a line each."""

    dialect: str
    text: str
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


def named_documents(text: str, file: str = "") -> list[str]:
    """The DeepSpeed configurations that a job file names; empty where no dialect knows the file."""
    syntax = syntax_of(text, file)
    chosen = recognise_text(text, syntax, file)
    if chosen is None:
        return []
    keys = Keys(document(text, syntax, chosen, file), file, chosen.auto)
    values = [keys.raw(key) for key in BESIDE]
    return [value for value in values if isinstance(value, str) and value.endswith(".json")]


def read(
    text: str,
    name: str | None = None,
    *,
    file: str = "",
    given: Mapping[str, Any] | None = None,
    version: str | None = None,
    alone: bool = False,
    keeping: str | None = None,
    beside: frozenset[str] = frozenset(),
    strict: bool = False,
    ignore: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> JobFile:
    """Reads a job file. Raises `ConfigError` where it contradicts itself, where no dialect knows it, or where it asks for
    something that an estimate would be wrong about.

    name: of the dialect; None: the one whose keys the file has
    given: facts known from elsewhere, as flags name them, which go before the file's; also `gpu`, where a tool asks the card
    version: of the tool, or releases of libraries as `--version` takes them, of which the tool's counts; None: the newest
        whose defaults are known
    alone: files that it names are not looked for on the disk
    beside: paths of files that are read as well; where there are any, a configuration that is named is one of them or is
        looked for
    strict: what is not counted is an error, whatever is known of its effect
    ignore: keys that are taken out; variables: values of those that a shell script sets nowhere
    keeping: a dialect whose files are only patched: what there is no estimate with stays in them, and is `stopped`

    >>> file = read('{"zero_optimization": {"stage": 3}, "train_batch_size": 64, "gradient_clipping": 1.0,'
    ...              ' "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}')
    >>> file.dialect, file.job.zero, file.job.gpus, file.unread
    ('deepspeed', 3, 8, ('gradient_clipping',))
    """
    syntax = syntax_of(text, file)
    opens = "" if alone else file
    chosen = recognise_text(text, syntax, opens, variables) if name is None else dialect_of(name)
    told_whole = HEAD.match(text)
    if chosen is None and syntax == "python":
        raise ConfigError(untrained(text, Path(file).name or "FILE.py"), file=file)
    program, line = None, Argv(text, outside=variables, file=file) if chosen is None and syntax == "argv" else None
    if line is not None and not line.idle:
        from loadgauge.job_files.hugging_face.programs import started

        program = started(line, file)
        chosen, syntax = (None, syntax) if program is None else (recognise(program), "python")
    if chosen is None:
        if line is not None and line.idle:
            raise Untrained("is no training job", key=line.idle, file=file)
        why = (unread_program(line) if line else "") or "has no keys of a job file that is known"
        raise ConfigError(f"{why}; say whose it is with --from", file=file)
    read_as = program or document(text, syntax, chosen, opens, variables)
    refuse(
        not {syntax, getattr(read_as, "inner", syntax)} & set(chosen.syntaxes),
        f"is {syntax}, and {chosen.title} is {' or '.join(chosen.syntaxes)}",
        file=file,
    )
    release = _version(version, chosen)
    world = next((value for key in WORLD if isinstance(value := read_as.get(key), int)), None)
    whole = Without(read_as if world is None else Without(read_as, WORLD), ignore)
    keys = Keys(whole if whole.dropped else whole.within, file, chosen.auto, release, given)
    keys.alone = alone
    older = chosen.last(keys) if release is None else None
    if older is not None:
        release, key = older
        keys.version = release
        number = ".".join(map(str, release))
        keys.remark(f"{keys.document.shown(key)} is a key of {chosen.title} up to {number}, whose defaults are taken")
    listed = facts_given({name: value for name, value in (given or {}).items() if name in NAMES})
    reading = _read_alone(chosen, keys, frozenset(listed), keeping=keeping == chosen.name, strict=strict)
    facts, unread, uncounted, remarks = reading.facts, reading.unread, reading.uncounted, reading.remarks
    # Whoever has a configuration of DeepSpeed trains with it, whatever the trainer's own file would do.
    facts.setdefault("framework", Fact(chosen.framework, chosen.name, chosen.name != "deepspeed"))
    remarks += () if told_whole is None else (told_whole[2],)
    remarks += (f"left out as asked: {', '.join(map(whole.shown, whole.dropped))}",) if whole.dropped else ()
    if not alone:
        named = _read_named(keys, file, frozenset(listed), beside, strict)
        for other in (*_of_launcher(keys, chosen, frozenset(listed)), *named):
            # What the command line of `accelerate launch` says goes before its configuration.
            stated = {"gpus", "nodes", "gpus_per_node"} if other.dialect == "accelerate" and "gpus" in facts else set()
            facts = merge(facts, {name: fact for name, fact in other.facts.items() if name not in stated}, other.file)
            unread += tuple(f"{other.file}: {key}" for key in other.unread)
            uncounted += other.uncounted
            remarks += other.remarks
    if syntax == "argv" and keys.has("nproc_per_node") and not {"gpus", "gpus_per_node"} & {*facts, *listed}:
        counts = {"gpus_per_node": keys.whole("nproc_per_node"), "nodes": keys.whole("nnodes") or 1}
        facts |= {name: Fact(number, keys.document.shown("nproc_per_node")) for name, number in counts.items()}
    uncounted += environment(text, file) if syntax == "argv" else ()
    told = getattr(keys.document, "processes", None) or world
    if told and not {"gpus", "gpus_per_node", "dp"} & {*facts, *listed}:
        facts["gpus"] = Fact(told, "-n")
    own = syntax != "argv" or told_whole is not None
    if not {"gpus", "gpus_per_node", "dp"} & (facts.keys() | listed.keys()):
        for name, fact in (announced if own else divided)(text).items():
            facts[name] = fact
            remarks = (*remarks, f"its {fact.value} GPUs are those that its comments or its launcher tell")
    if not listed.keys() & {"gpus", "gpus_per_node", *SPLITS}:
        facts, fewer = enough_gpus(facts)
        remarks += (fewer,) if fewer else ()
    job, extra = solve(_with(facts, listed), file)
    return msgspec.structs.replace(
        reading,
        version=chosen.newest if release is None else ".".join(map(str, release)),
        job=job,
        extra=extra,
        facts=facts,
        unread=unread,
        uncounted=uncounted,
        remarks=remarks,
        ignored=tuple(map(whole.shown, whole.dropped)),
    )


def _read_alone(
    chosen: Dialect, keys: Keys, fact_names: frozenset[str], *, keeping: bool = False, strict: bool = False
) -> JobFile:
    """Return what one file says, without the arithmetic of a whole job. `keeping`: what there is no estimate with is no error."""
    stopped = chosen.stopped(keys, strict)
    if stopped and not keeping:
        raise _first(stopped)
    absent: Mapping[str, str] = getattr(keys.document, "absent", {})
    for name, instead in absent.items():
        taken = f"; {instead} of {chosen.title} takes its place" if instead else ""
        keys.add(
            Uncounted(
                f"{name}: is not there, so what it sets is not known{taken}",
                name,
                effect="either",
                parts=(*STATE, "activations", "loss"),
            )
        )
    for name, note in getattr(keys.document, "guessed", {}).items():
        keys.add(Uncounted(note, name, effect="either", parts=(*STATE, "activations", "loss")))
    facts = chosen.read(keys, fact_names)
    model, rank, quantised = (facts.get(name, Fact(None, "")) for name in ("model", "lora_rank", "qlora"))
    if rank.value and not quantised.value and (small := stored(model.value)) is not None:
        name = str(model.key)
        keys.add(
            Uncounted(
                f"{name} = {short(model.value)}: its matrices are in {small}, and counted in 16 bits",
                name,
                effect="saves",
                parts=("weights", "gathered"),
                share=SMALLER[small],
            )
        )
    keys.note(
        str(model.key),
        "is a checkpoint of Unsloth's dynamic 4 bits, which leave some matrices in 16; all are counted in 4",
        "costs",
        "weights",
        0.1,
        when=bool(quantised.value) and DYNAMIC in str(model.value),
    )
    noted = tuple(msgspec.structs.replace(item, file=keys.file) for item in keys.noted.values())
    texts = {keys.document.shown(name): short(keys.plain(name)) for name in keys.document.names()}
    unread = frozenset(chosen.unread(keys.document))
    named = {*texts, *absent, *(item.key for item in noted if keys.document.syntax == "argv")}
    named -= {keys.document.shown(name) for name in UNSAID} - texts.keys()
    doubts = [item for item in noted if item.effect and item.key in named]  # a tool's default stops nothing
    if strict and doubts and not keeping:
        raise ConfigError(f"{doubts[0].note}; without it there is an estimate", file=keys.file)
    stopped += [keys.wrong(item.key, item.note.partition(": ")[2]) for item in doubts if strict]
    return JobFile(
        dialect=chosen.name,
        syntax=keys.document.syntax,
        file=keys.file,
        job=Job(model=""),
        facts=facts,
        unread=tuple(key for key in texts if key in unread),
        aside={key: value for key, value in texts.items() if key in unread},
        uncounted=(*chosen.uncounted(keys), *noted),
        auto=tuple(keys.document.shown(key) for key in keys.left),
        remarks=(*getattr(keys.document, "skipped", ()), *keys.remarks),
        stopped=tuple(f"{error.key}: {str(error).rpartition(f'{error.key}: ')[2]}" for error in stopped),
    )


def _first(errors: list[ConfigError]) -> ConfigError:
    """The first of several, which says how many there are."""
    first, *rest = errors
    if not rest:
        return first
    names = ", ".join(str(error.key) for error in rest[:5]) + ("" if len(rest) <= 5 else ", ...")
    message = str(first).rpartition(f"{first.key}: ")[2]
    return ConfigError(f"{message} (so do {len(rest)} more: {names})", key=first.key, file=first.file)


def _version(text: str | None, chosen: Dialect) -> tuple[int, ...] | None:
    """The release of the dialect's tool in `1.6`, or in `trl=1.6,torch=2.6`."""
    for word in (text or "").split(","):
        library, _, release = word.replace("==", "=").rpartition("=")
        if not word.strip() or (library and library.strip().lower() != chosen.library):
            continue
        parts = release.strip().split(".")
        refuse(
            not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in parts),
            f"must be a version such as 1.6, got {release!r}",
            key="version",
        )
        return tuple(int(part) for part in parts)
    return None


def _read_named(
    keys: Keys, file: str, fact_names: frozenset[str], beside: frozenset[str], strict: bool = False
) -> list[JobFile]:
    """The files that a job file names: DeepSpeed's configuration, and that of `accelerate launch`, which may name the former."""
    named: list[tuple[str, str, tuple[str, ...]]] = [(key, "deepspeed", (".json", ".conf")) for key in BESIDE]
    if keys.document.syntax in ("argv", "python"):
        named.append((LAUNCHED_WITH, "accelerate", (".yaml", ".yml", ".json")))
    files: list[JobFile] = []
    for key, dialect, endings in named:
        name = keys.raw(key)
        name = name[0] if isinstance(name, list) and name else name
        inside = name == getattr(keys.document, "path", None)  # its own arguments
        outside = key == LAUNCHED_WITH and "$" in str(name)
        if inside or not isinstance(name, str) or not (outside or name.endswith(endings)):
            continue
        name = HERE.sub("", " ".join(name.split()))
        written: dict[str, str] = getattr(getattr(keys.document, "shell", None), "documents", {})
        if name in written:
            own = dialect_of(dialect)
            inner = Keys(document(written[name], SYNTAXES[Path(name).suffix], own, name), name, own.auto)
            files.append(_read_alone(own, inner, fact_names))
            continue
        places = [Path(file).parent / name, Path(name)] if file else [Path(name)]
        position = next((position for position in places if os.path.isfile(position)), None)
        if Path(name).name in {Path(path).name for path in beside}:
            continue
        if position is None and (told := known_file(name)) is not None:
            files.append(_of_tool(name, told, fact_names))
            continue
        if position is None:
            unsaid, shown = "zero" not in fact_names and not beside, keys.document.shown(key)
            refuse(
                unsaid and strict,
                f"names {name}, which is not there, and only it says the ZeRO stage; give --zero",
                key=shown,
                file=file,
            )
            files += [_unseen(name, dialect, shown, file)] if unsaid else []
            continue
        chosen = dialect_of(dialect)
        syntax = SYNTAXES.get(position.suffix.lower(), "json")
        other = Keys(document(load(position), syntax, chosen, str(position)), str(position), chosen.auto)
        files.append(_read_alone(chosen, other, fact_names))
        files += _read_named(other, str(position), fact_names, beside, strict) if dialect == "accelerate" else []
    return files


def _of_launcher(keys: Keys, chosen: Dialect, fact_names: frozenset[str]) -> list[JobFile]:
    """Options of `accelerate launch` that say what its configuration else does, and are none of the tool's own."""
    values = launch_options(keys, lambda name: name in chosen.known or bool(chosen.coverage.kinds(name)))
    if not values:
        return []
    accelerate = dialect_of("accelerate")
    inner = json_document("{}")
    for key, value in values.items():
        inner.put(key, value)
    options = Keys(inner, keys.file, accelerate.auto)
    return [_read_alone(accelerate, options, fact_names), *_read_named(options, keys.file, fact_names, frozenset())]


def _unseen(name: str, dialect: str, key: str, of: str) -> JobFile:
    """A configuration that is not there: the ZeRO stage that its name says, else DeepSpeed's own, with all that it may say."""
    match = STAGE.search(Path(name).stem.lower())
    stage = 0 if match is None else 3 if "fsdp" in match[0] else int(match[1])
    why = "as its name says" if match is not None else "as DeepSpeed itself has it"
    return JobFile(
        dialect=dialect,
        syntax=SYNTAXES.get(Path(name).suffix, "json"),
        file=name,
        job=Job(model=""),
        facts={"zero": Fact(stage, key)},
        uncounted=(
            Uncounted(
                f"{key}: names {name}, which is not there, and only it says the ZeRO stage: {stage} is taken, {why} (--zero)",
                key,
                effect="either",
                parts=STATE,
                file=of,
            ),
        ),
    )


def _of_tool(name: str, told: KnownFile, fact_names: frozenset[str]) -> JobFile:
    """A configuration that is not there, as the tool that comes with it has it."""
    chosen = dialect_of(told.dialect)
    keys = Keys(document(told.content, "json", chosen, name), name, chosen.auto)
    remark = f"{name} is not there, and is taken to be {told.tool}'s ({told.source})"
    return msgspec.structs.replace(_read_alone(chosen, keys, fact_names), unread=(), remarks=(remark,))


def _with(of_file: Mapping[str, Fact], of_flags: Mapping[str, Fact]) -> dict[str, Fact]:
    """The facts of a file with those that are given, which go first; facts that followed from replaced ones are dropped."""
    flags = of_flags.keys()
    batch = "global_batch" in flags or ("global_batch" in of_file and flags & {"gpus", *SPLITS, "micro_batch"})
    rules = (
        ("gpus" in flags, ("nodes", "gpus_per_node")),
        (flags & {"gpus", "replicas", *SPLITS}, ("dp", "shards")),
        (batch, ("accumulation",)),
    )
    stale = {name for stated, names in rules if stated for name in names} - flags
    return {name: fact for name, fact in {**of_file, **of_flags}.items() if name not in stale}


def write(
    job: Job,
    name: str,
    template: str | None = None,
    *,
    extra: Extra | None = None,
    file: str = "",
    syntax: str | None = None,
    before: tuple[Job, Extra] | None = None,
) -> Written:
    """Writes a job as a job file of a dialect; `template` is the user's own, patched where it says something else.

    before: the job as the template and flags beside it have it; only what differs from that is written

    >>> job = Job(model="", tp=8, gpus=16, precision="bf16")
    >>> print(write(job, "megatron", "torchrun --nproc-per-node 8 x.py --fp16  # mine"))
    torchrun --nproc-per-node 8 --nnodes 2 x.py --tensor-model-parallel-size 8 --bf16  # mine
    """
    chosen = dialect_of(name)
    kind = syntax or (chosen.syntaxes[0] if template is None else syntax_of(template, file))
    refuse(kind not in chosen.syntaxes, f"{chosen.title} is {' or '.join(chosen.syntaxes)}, not {kind}")
    refuse(
        chosen.name in OF_PICTURES and of_text(job.model),
        f"{chosen.title}: trains diffusion models, and {job.model} is none",
        key="to",
    )
    target = document(chosen.begun(kind, job.task) if template is None else template, kind, chosen, file)
    keys = Keys(target, file, chosen.auto)
    wanted, changed = facts_of(job, extra), False
    had = None if before is None else facts_of(*before)
    if template is None and job.micro_batch is None and job.global_batch is None:
        wanted["micro_batch"] = 1  # without a batch the file could be any tool's
    if "lora_rank" in wanted or "adapter" in wanted:
        without = dict.fromkeys(("modules_to_save", "lora_layers", "adapter", "virtual_tokens")) | {"use_dora": False}
        wanted, had = without | wanted, None if had is None else without | had
    for idea in chosen.ideas:
        if not wanted.keys() & set(idea.facts):
            continue
        if template is None or _stale(idea.read(keys), idea.facts, wanted):
            same = idea.write(had, keys) if had is not None and had.keys() >= wanted.keys() & set(idea.facts) else {}
            for key, value in (idea.write(wanted, keys) or idea.write(plainer(wanted), keys)).items():
                if key not in same or same[key] != value:
                    changed |= _put(target, key, value)
    text = target.text() if changed or template is None else template
    return Written(dialect=chosen.name, text=text, left_out=_left_out(job, text, chosen, kind, file))


def _put(target: Document, key: str, value: Any) -> bool:
    """Makes a document say a value; whether it did not before."""
    before = target.get(key)
    if value is None:
        target.drop(key)
        return not isinstance(before, Missing)
    alike = target.syntax == "argv" and str(before).lower() == str(value).lower()
    if alike or (before == value and isinstance(before, bool) == isinstance(value, bool)):
        return False
    target.put(key, value)
    return True


def _stale(have: Mapping[str, Any], names: tuple[str, ...], wanted: Mapping[str, Any]) -> bool:
    """Return whether what an idea reads in a file is not what is wanted."""
    for name in names:
        if name not in wanted or (name == "framework" and wanted[name] == "torchtitan"):
            continue
        usual = wanted[name] if name in DERIVED else ALIKE.get(name)
        if wanted[name] != (usual if have.get(name) is None else have[name]):
            return True
    return False


def _left_out(job: Job, text: str, chosen: Dialect, syntax: str, file: str) -> tuple[str, ...]:
    """Reads what was written, and lists what it does not say as the job does."""
    keys = Keys(document(text, syntax, chosen, file), file, chosen.auto)
    keys.alone = True
    facts = chosen.read(keys)
    beyond = {} if job.gpus is None or "gpus" in facts or "nodes" in facts else facts_given({"gpus": job.gpus})
    written = describe(*solve(_with(facts, beyond)))
    lines = [f"--gpus {job.gpus}: is said to the launcher"] if beyond and solve(facts)[0].gpus != job.gpus else []
    for field, asked in describe(job, Extra()).items():
        got = written.get(field)
        same = _runs(asked, got) if field == "optimizer" else plainer({field: got})[field] == asked
        unsaid = field in ("lora_targets", "base", "schedule", "cp_comm") and got is None
        if field in ("framework", "gpus_per_node", "gpus") or same or (unsaid and _alike(field, asked, job)):
            continue
        if (ALIKE.get(field) if got is None else got) != asked:
            flag = f"--{field.replace('_', '-')}" + ("" if asked is True else f" {asked}")
            rest = "has no place in it" if got is None else f"it means {got}"
            lines.append(f"{flag}: {rest}")
    return tuple(lines)


def _runs(asked: str, got: str | None) -> bool:
    """Return whether an optimizer is one way to run the one that was asked for."""
    name, _, options = (got or "").partition(":")
    return name in OPTIMIZERS and ":".join(filter(None, (OPTIMIZERS[name].variant_of, options))) == asked


def _alike(field: str, asked: Any, job: Job) -> bool:
    if field == "schedule":
        return (job.pp or 1) == 1 or asked == ("interleaved" if (job.vpp or 1) > 1 else "1f1b")
    return bool(asked == {"lora_targets": "all", "base": "nf4", "cp_comm": "ring"}[field])


def combine(files: Sequence[JobFile], given: Mapping[str, Any] | None = None) -> tuple[Job, Extra]:
    """Works out the job that several files describe together. Raises `ConfigError` where two contradict."""
    facts: dict[str, Fact] = {}
    for file in files:
        named = {
            name: fact if fact.default or len(files) == 1 else Fact(fact.value, f"{file.file}: {fact.key}")
            for name, fact in file.facts.items()
        }
        facts = merge(facts, named)
    return solve(_with(facts, facts_given(given or {})), files[0].file if len(files) == 1 else "")
