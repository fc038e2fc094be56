"""A job file of another tool in place of a model: its job as flags, and the model that it names."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base import ConfigError, is_command, place_of, read_start, refuse
from loadgauge.core.definitions.job.job import FILES as JOB_FILES, POSTTRAIN, Job
from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.core.definitions.layout.axes import MODEL_PARALLEL
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS, default_framework
from loadgauge.core.definitions.training.tasks import TASKS
from loadgauge.core.definitions.training.training import training
from loadgauge.core.families.catalogue import Found, models, repositories
from loadgauge.core.families.named.derived import derive
from loadgauge.core.resolve.adapters import LORA_RANK
from loadgauge.core.resolve.model import found_model
from loadgauge.core.resolve.posttrain import scalar
from loadgauge.core.resolve.recompute_words import resolve_recompute
from loadgauge.job_files.dialects import dialect as dialect_of
from loadgauge.job_files.exchange import ALIKE, JobFile, combine, read, write
from loadgauge.job_files.ideas import FIELDS, Dialect, Extra, ranks_of_replica, trainer_gpus, virtual_stages
from loadgauge.job_files.reading.configured import Asked, asked_for
from loadgauge.job_files.reading.documents import SYNTAXES, ending, holds_no_model, load, of_folder, read_whole
from loadgauge.job_files.reading.held import held

CALLED = "the command"
"""The name of a command that was typed in the place of a file."""
READING = (*JOB_FILES, "version")
"""Flags about how job files are read, and not about the run."""
OF_ADAPTERS = (
    "base", "lora_targets", "lora_dropout", "lora_dtype", "kbit_upcast", "use_dora", "modules_to_save", "lora_layers",
    "virtual_tokens",
)  # fmt: skip
"""Flags that say nothing without adapters, as a file's own keys do where it has none."""
WITH_GPU = ("gpus_per_node", "order", "overlap")
"""Flags that say nothing without --gpu."""
RATES = ("dropout", "embedding_dropout")
"""Fields of a model and its parts that are rates of dropout."""
NO_TEXTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".pickle")
"""Endings of files that hold weights or memory."""
CONFIG_KEYS = ("model_type", "architectures", "hidden_size", "text_config", "_class_name")
"""Keys of which a Hugging Face `config.json` has at least one."""


def is_job_file(text: str) -> bool:
    """Return whether a model's name is the path of a job file, by its ending; JSON is one where it is no `config.json`.

    >>> is_job_file("llama-3.1-8b"), is_job_file("./no-such-file.yaml")
    (False, True)
    """
    if is_command(text):
        return True
    file, part = place_of(text)
    suffix = ending(file)
    if text.lower() in models() or suffix in NO_TEXTS:
        return False
    if os.path.isdir(text):
        return holds_no_model(text)
    if suffix not in SYNTAXES:
        return os.path.isfile(file) and (bool(part) or not read_start(file, 1).startswith(b"{"))
    if suffix != ".json" or part:
        return os.sep in text or os.path.exists(text)
    if not os.path.isfile(text):
        return False
    try:
        start = read_whole(text)
    except ConfigError:
        return False
    if held(start, text):
        return True
    trains = re.search(r'"(?:per_device_train_batch_size|model_family)"', start) is not None
    return trains or not any(f'"{key}"' in start for key in CONFIG_KEYS)


class FromFile(NamedTuple):
    """A job with the flags of its job file, its model, a line on how the file was read, what it asks for that is not counted, and
    whose trainers of preferences run it (`Dialect.trainers`)."""

    job: Job
    model: ModelSpec
    note: str
    uncounted: tuple[Uncounted, ...]
    trainers: str


def from_job_file(job: Job) -> FromFile:
    """Reads the job file that a job names in place of a model; flags of the job go before those of the file.

    Raises `ConfigError`.
    """
    main, others = _in_folder(job.model)
    job = job.replace(model=main, beside=job.beside or ",".join(others) or None)
    flags_set = {name: value for name, value in flags_given(job).items() if name not in READING}
    inside = {name: flags_set[name] for name in FIELDS if name in flags_set}
    first = is_job_file(job.model) or (job.dialect is not None and os.path.isfile(job.model))
    for name in ("dialect", "base_model"):
        refuse(
            getattr(job, name) is not None and not first,
            "is about a job file, and MODEL is none; give the file",
            key=name.replace("base_", ""),
        )
    if job.base_model is not None:
        inside["model"] = job.base_model
    paths = ([job.model] if first else []) + names_beside(job)
    cards = gpus_asked(paths) if job.gpu is None else None
    if cards is not None:
        job = job.replace(gpu=cards.gpu)
    files = read_files(paths, job, inside)
    silent = not any(file.facts.keys() & {"gpus", "nodes", "dp", "shards"} for file in files)
    if cards is not None and cards.cards and silent and job.gpus is None:
        job, inside = job.replace(gpus=cards.cards), inside | {"gpus": cards.cards}
        files = read_files(paths, job, inside)
    if first:
        whole, extra = combine(files, inside)
        if job.base_model is not None:
            extra = msgspec.structs.replace(extra, config=None)
        asked = whole.replace(road=job.road, lora_rank=whole.lora_rank or None)
        looked_up, remark = model_of(msgspec.structs.replace(files[0], job=asked, extra=extra))
    else:
        whole, extra = combine(files, inside | {"model": job.model})
        looked_up, remark = found_model(whole.replace(model=job.model, road=job.road, hub=False)), ""
    model, whole = looked_up.spec, whole.replace(**dict(looked_up.usual))
    if extra.tied is not None and extra.tied != model.tie_word_embeddings:
        model = msgspec.structs.replace(model, tie_word_embeddings=extra.tied)
        remark += f"; its embedding and head are {'one matrix' if extra.tied else 'two matrices'} in this tool"
    if extra.undropped:
        model = undropped(model)
        remark += "; its model drops nothing, as the file says"
    if extra.head is not None:
        whole = whole.replace(eval_batch=None, eval_batches=None)  # of labels alone, which is less than the update
        model, remark = scalar(model, extra.head), f"{remark}; its head is a classifier of {extra.head} columns"
    filled = fill_in(whole, extra, model)
    if silent:
        filled, shared = _shared_out(filled, flags_set)
        remark += shared
    version = job.version
    for file in files:
        version = with_tool(version or of_keys(file), file.dialect)
    needless = {
        *flags_set,
        "model",
        *(WITH_GPU if job.gpu is None else ()),
        *(["seq_len"] if job.lengths is not None else []),
    }
    flags = {name: getattr(filled, name) for name in FIELDS if name not in needless} | {"version": version}
    uncounted = tuple(item for file in files for item in file.uncounted)
    notes = "; ".join(note(file) for file in files)
    notes += f"; its GPUs are {cards.gpu} ({cards.words})" if cards is not None else ""
    for role in ("reward_model", "critic", "teacher"):
        other = flags.get(role)
        if other is not None and (alike := find_alike(other)) is not None:
            remark += (
                "" if other.lower().endswith(alike) else f"; its {role.replace('_', ' ')} {other} is taken for {alike}"
            )
            flags[role] = alike
    if filled.task is not None:
        flags, left, around = _less_around(flags)
        remark, uncounted = f"{remark}{left}", uncounted + around
    trainers = dialect_of(files[0].dialect).trainers if first else "trl"
    return FromFile(job.replace(**flags), model, f"{notes}{remark}", uncounted, trainers)


def _in_folder(path: str) -> tuple[str, list[str]]:
    """The file of a folder that says a run, with those beside it; any other path alone."""
    return of_folder(path) if os.path.isdir(path) else (path, [])


def gpus_asked(paths: Sequence[str]) -> Asked | None:
    """The GPUs that one of a job's files asks its cluster for."""
    return next(
        (
            asked
            for path in paths
            if (asked := asked_for(path if is_command(path) else read_whole(place_of(_in_folder(path)[0])[0])))
            is not None
        ),
        None,
    )


def with_tool(version: str | None, dialect: str) -> str | None:
    """Releases of libraries with the tool's name before a number that stands alone.

    >>> with_tool("0.24,torch=2.6", "trl"), with_tool("0.3", "megatron-bridge")
    ('trl=0.24,torch=2.6', None)
    """
    library = dialect_of(dialect).library
    words = [word.strip() for word in (version or "").split(",") if word.strip()]
    named = [word if "=" in word else f"{library}={word}" if library else "" for word in words]
    return ",".join(filter(None, named)) or None


def of_keys(file: JobFile) -> str | None:
    """The release that a file's keys are of, where the newest has some of them no more."""
    return file.version if file.version != dialect_of(file.dialect).newest else None


def _shared_out(job: Job, flags: Mapping[str, Any]) -> tuple[Job, str]:
    """The job of a file that says no number of GPUs, with the batch nearest to the file's that those which are given can share,
    and a remark on that. flags: as given, which stay

    >>> job = Job(model="", gpus=12, micro_batch=1, global_batch=512)
    >>> _shared_out(job, {})[0].global_batch, _shared_out(job.replace(gpus=8), {})[1]
    (516, '')
    """
    if job.gpus is None or job.global_batch is None or "global_batch" in flags:
        return job, ""
    each = (job.micro_batch or 1) * max(1, trainer_gpus(job.gpus, job.placement) // ranks_of_replica(job))
    nearest = each * max(1, round(job.global_batch / each))
    if job.global_batch % each == 0:
        return job, ""
    words = f"; its batch of {job.global_batch} is taken for {nearest}, the nearest that {job.gpus} GPUs can share"
    return job.replace(global_batch=nearest), words


def _less_around(flags: dict[str, Any]) -> tuple[dict[str, Any], str, tuple[Uncounted, ...]]:
    """The flags of a task's file without what no phase of it counts, and a remark on that: layers gathered one by one to save them,
    and an evaluation, which keeps less than the update unless its batch is larger; that is in the range."""
    dropped = {"save": "saving"} if flags.get("save") is not None else {}
    asked, own = flags.get("eval_batch") or 0, flags.get("micro_batch") or 1
    dropped |= {name: "evaluation" for name in ("eval_batch", "eval_batches") if flags.get(name) is not None}
    line = f"eval_batch = {asked}: the logits of an evaluation, of more sequences than the update's {own}"
    larger = Uncounted(line, "eval_batch", effect="costs", parts=("loss", "transient"), share=asked / own)
    dropped_values = ", ".join(dict.fromkeys(dropped.values()))
    return (
        flags | dict.fromkeys(dropped),
        f"; not counted: {dropped_values}" if dropped_values else "",
        (larger,) if asked > own else (),
    )


def update_alone(job: Job) -> tuple[Job, tuple[Uncounted, ...]]:
    """The training of the actor alone, of a job file whose step generates answers too, and what that leaves out; other jobs are
    given back as they are. Raises `ConfigError` where the engine keeps its memory through the update.

    >>> update_alone(Job("gpt2", task="grpo", prompt_len=512, answers="512"))[0].flags()
    '--seq-len 1024'
    """
    task = TASKS[job.task or ""]
    if not task.rollout:
        return job, ()
    engine = Engine.parse(job.rollout or "hf")
    refuse(
        engine.kind != "hf" and not engine.sleep,
        f"{engine.kind} keeps its memory through the update; `loadgauge estimate FILE` counts it",
        key="task",
    )
    scores = [role.name for role in task.roles[1:] if role.name != "reference" or job.reference == "model"]
    scores = [name for name in scores if name != "reward model" or job.reward_model is not None]
    scores = [name for name in scores if name != "critic" or job.critic != "shared"]
    # A reference has 16 bits of each parameter, a critic what the actor has.
    parameter = 2.0 * ("reference" in scores and not job.frozen_offload) + 16.0 * ("critic" in scores)
    beside = ", ".join(["generation", "log-probs", *scores])
    line = f"{beside}: this is the actor's update alone; `loadgauge estimate FILE` counts the step"
    answers = job.answers if job.answers is not None and job.answers.isdecimal() else "0"
    alone = job.replace(**dict.fromkeys(POSTTRAIN), seq_len=(job.prompt_len or 0) + int(answers) or None)
    return alone, (Uncounted(line, f"--task {task.name}", parameter=parameter),)


OF_METHOD = (
    "zero", "recompute", "weights", "optimizer", "attention", "loss", "kernels", "compile", "gradient_sync", "offload",
    "activation_offload", "kbit_upcast", "lora_dtype", "lora_targets", "lora_dropout",
)  # fmt: skip
"""Flags that a trainer's own defaults answer, without its batch and length, which are nobody's choice."""


def usual(name: str, job: Job) -> dict[str, Any]:
    """Return what a trainer does by itself, by flag, where a job says nothing: by a job file of its own with what is said.

    >>> own = usual("axolotl", Job("qwen3-8b", qlora=True, lora_rank=8))
    >>> own["framework"], own["weights"], own["kernels"]
    ('huggingface', 'bfloat16', 'lora')
    """
    chosen = dialect_of(name)
    stated = {
        "precision": "bf16",
        **({"lora_rank": LORA_RANK} if job.adapts else {}),
        **flags_given(job.replace(framework=None)),
    }
    facts = {field: value for field, value in stated.items() if field in FIELDS}
    try:
        text = write(Job(model=job.model, **facts), chosen.name).text
        file = read(text, chosen.name, version=job.version, alone=True, given={"gpus": job.gpus or 1})
        filled = fill_in(file.job, file.extra, None)
    except ConfigError:  # its files cannot do without some key, or its batch of one GPU is no whole group of answers
        alone = usual(name, job.replace(**dict.fromkeys(POSTTRAIN))) if job.task else {"framework": chosen.framework}
        return {field: value for field, value in alone.items() if field != "loss"}
    fields = [each for each in OF_METHOD if getattr(job, each) is None and (job.adapts or each not in OF_ADAPTERS)]
    own = {field: getattr(filled, field) for field in fields}
    # Under adapters and on many GPUs other recomputation and weights may be assumed than a file's default.
    kept = [field for field, value in own.items() if field in ("recompute", "weights") or value != ALIKE.get(field)]
    own = {field: own[field] for field in kept if own[field] not in (None, False)}
    return {"framework": chosen.framework} | own | ({} if job.rollout else _engine_left_alone(text, chosen, job))


def _engine_left_alone(text: str, chosen: Dialect, job: Job) -> dict[str, Any]:
    """Return the engine of a tool whose job file says nothing of it; nothing where its keys are read together with others.

    >>> usual("verl", Job("qwen3-8b", gpus=8, task="grpo"))["rollout"]
    'vllm:tp=2,utilization=0.5,sleep=2'
    """
    apart = [idea for idea in chosen.ideas if "rollout" in idea.facts and "task" not in idea.facts]
    keys = [key for idea in apart for key in idea.keys]
    if job.task is None or not TASKS[job.task].rollout or not keys:
        return {}
    rollout = read(
        text, chosen.name, version=job.version, alone=True, given={"gpus": job.gpus or 1}, ignore=keys
    ).job.rollout
    engine = Engine.parse(rollout or "hf")
    if engine.kind == "hf" or (job.gpus or 1) % (engine.tp * engine.pp):
        return {}
    return {"rollout": msgspec.structs.replace(engine, context=None).text()}  # the lengths are the user's


def undropped(part: Any) -> Any:
    """Return a model, or a part of one, with no dropout anywhere.

    >>> from loadgauge.core.families.catalogue import model
    >>> model("gpt2").embedding_dropout, undropped(model("gpt2")).embedding_dropout
    (0.1, 0.0)
    """
    if isinstance(part, tuple):
        return tuple(map(undropped, part))
    if not isinstance(part, msgspec.Struct):
        return part
    inner = {name: undropped(getattr(part, name)) for name in part.__struct_fields__}
    return msgspec.structs.replace(part, **inner | {name: 0.0 for name in inner if name in RATES})


def names_beside(job: Job) -> list[str]:
    """The job files beside the model's that a job names."""
    return [name.strip() for name in (job.beside or "").split(",") if name.strip()]


def read_files(
    paths: Sequence[str], how: Job, given: Mapping[str, Any], *, keeping: str | None = None, strict: bool = False
) -> tuple[JobFile, ...]:
    """Reads job files of one job. Raises `ConfigError`, also for a key to leave out that none of them has.

    A configuration that another of the files names is not read a second time.
    how: the fields that say how files are read (`READING`); its dialect is that of the first file
    """
    files = tuple(
        read_one(
            path, how if path == paths[0] else how.replace(dialect=None), given, paths, keeping=keeping, strict=strict
        )
        for path in paths
    )
    for key in _ignored(how):
        refuse(not any(_has(file, key) for file in files), f"{key!r} is no key of {', '.join(paths)}", key="ignore")
    return files


def read_one(
    path: str,
    how: Job,
    flags: Mapping[str, Any],
    paths: Sequence[str] = (),
    text: str | None = None,
    *,
    keeping: str | None = None,
    strict: bool = False,
) -> JobFile:
    """Read one of the job files of a job. text: of the file, where it is not to be opened. Raises `ConfigError`."""
    return read(
        load(path, how.dialect) if text is None else text,
        how.dialect,
        file=CALLED if is_command(path) else path,
        given={**flags, "gpu": how.gpu} if how.gpu else flags,
        version=how.version,
        keeping=keeping,
        beside=frozenset(paths) - {path},
        strict=bool(how.strict) or (strict and how.strict is None),
        ignore=_ignored(how),
        variables=variables_of(how.variables),
    )


def _ignored(how: Job) -> list[str]:
    return [key.strip() for key in (how.ignore or "").split(",") if key.strip()]


def _has(file: JobFile, key: str) -> bool:
    """Return whether a key, or one of a section, was left out of a file."""
    plain = key.lstrip("-").replace("-", "_")
    names = [name.lstrip("-").replace("-", "_") for name in file.ignored]
    return any(name == plain or name.startswith(f"{plain}.") or name.endswith(f".{plain}") for name in names)


def variables_of(text: str | None) -> dict[str, str]:
    """Return the variables of shell scripts: those of the environment, and before them those of `NAME=VALUE,...`.

    Raises `ConfigError`.

    >>> said = variables_of("TP=2,LIST=a,b,1=llama")
    >>> said["LIST"], said["1"]
    ('a,b', 'llama')
    """
    values: dict[str, str] = {}
    for word in re.split(r",(?=(?:[A-Za-z_]\w*|\d{1,2})=)", text or ""):
        name, sign, value = word.partition("=")
        refuse(
            text and not (sign and (name.isidentifier() or name.isdecimal())),
            f"must be NAME=VALUE, got {word!r}",
            key="set",
        )
        if sign:
            values[name.strip()] = value
    return {**os.environ, **values}


def flags_given(job: Job) -> dict[str, Any]:
    """The flags of a job that are given, by name, without the model.

    >>> flags_given(Job(model="gpt2", tp=2, qlora=False))
    {'tp': 2, 'qlora': False}
    """
    names = Job.__struct_fields__
    return {name: value for name in names if name != "model" and (value := getattr(job, name)) is not None}


def note(file: JobFile) -> str:
    """Says in one line how a job file was read; what is not counted goes first.

    >>> note(JobFile(dialect="trl", syntax="yaml", file="job.yaml", job=Job(model=""), unread=("lr", "seed")))
    'job.yaml is read as trl; 2 of its keys change neither memory nor the time of a step: lr, seed'
    """
    unknown = [item.key for item in file.uncounted if not item.known]
    bounded = [item for item in file.uncounted if item.known]
    named = {*unknown, *(item.key for item in bounded)}
    whole = tuple(item.key.removesuffix("*") for item in bounded if item.key.endswith("*"))
    harmless = [key for key in file.unread if key not in named]
    harmless = [key for key in harmless if not (whole and key.lstrip("+-").startswith(whole))]
    parts = [f"{file.file} is read as {f'{file.dialect} {file.version}'.strip()}"]
    parts += file.remarks
    if unknown:
        parts.append(f"{_count(unknown, 'is', 'are')} not known here, and not counted: {', '.join(unknown)}")
    parts += [f"not counted: {item.note}" for item in bounded]
    if harmless:
        parts.append(
            f"{_count(harmless, 'changes', 'change')} neither memory nor the time of a step: {', '.join(harmless)}"
        )
    return "; ".join(parts)


def _count(keys: list[str], single: str, several: str) -> str:
    return f"{len(keys)} of its keys {single if len(keys) == 1 else several}"


def fill_in(job: Job, extra: Extra, model: ModelSpec | None) -> Job:
    """Return the job of a file with its batch and recompute policy worked out, and without flags that mean nothing.

    extra: what the file states beside fields of `Job`, such as accumulation; model: whose layers `recompute` names, if known

    >>> fill_in(Job(model="", gpus=8, tp=2, micro_batch=3, cp_comm="ring"), Extra(accumulation=2), None).flags()
    '--gpus 8 --tp 2 --micro-batch 3 --global-batch 24'
    """
    changes: dict[str, Any] = {}
    ranks = 1 if job.gpus is None else trainer_gpus(job.gpus, job.placement) // ranks_of_replica(job)
    if job.global_batch is None and extra.accumulation is not None:
        changes["global_batch"] = (job.micro_batch or 1) * extra.accumulation * ranks
    if extra.generated is not None:
        samples = job.samples or 1
        changes["prompts"], left = divmod(extra.generated * ranks, samples)
        refuse(
            left,
            f"{extra.generated * ranks} sequences of a generation are no whole groups of {samples}"
            + ("; give --gpus" if job.gpus is None else ""),
            key="samples",
        )
    if job.recompute is not None and model is not None:
        framework = job.framework or default_framework({axis: (getattr(job, axis) or 1,) for axis in MODEL_PARALLEL})
        changes["recompute"] = resolve_recompute(job.recompute, model, training(framework))
    if extra.layers_per_stage is not None and model is not None and job.stage_layers is None and (job.vpp or 1) == 1:
        changes |= virtual_stages(extra.layers_per_stage, model.num_hidden_layers, job.pp or 1, job.schedule)
    own = FRAMEWORKS.get(job.framework or "")
    # Where an unsaid loss may be one of several, the usual one says which.
    usual = job.loss == "auto" and (own is None or not own.peft or (job.kernels or "").startswith("liger"))
    meaningless = {
        "cp_comm": (job.cp or 1) == 1,
        "schedule": (job.pp or 1) == 1,
        "base": job.qlora is not True,
        "seq_len": job.task in TASKS and TASKS[job.task].rollout,  # a prompt and its answer
        "loss": usual or (model is not None and model.head.kind != "lm"),
        "lora_rank": not job.lora_rank,
    }
    if not (job.lora_rank or job.qlora or job.adapter):
        meaningless |= dict.fromkeys(OF_ADAPTERS, True)
    return job.replace(**changes, **{name: None for name, drop in meaningless.items() if drop})


def model_of(file: JobFile) -> tuple[Found, str]:
    """The model that a job file has the sizes or the name of, and a remark where only a similar name is known.

    Raises `ConfigError` where it has neither.
    """
    if file.extra.config is not None:
        from loadgauge.core.families.hf import from_dict

        return Found(from_dict(file.extra.config, file.file, Path(file.file).stem)), ""
    name = file.job.model
    if not name:
        refuse(
            file.job.gpus is None,
            "names neither a model nor the number of GPUs: add --model NAME --gpus N",
            file=file.file,
        )
        lines = (*file.remarks, *(item.note for item in file.uncounted))
        hint = next((f" ({line})" for line in lines if "add --set" in line or "no recipe that is known" in line), "")
        raise ConfigError(f"names no model that is read: add --model NAME{hint}", file=file.file)
    next_to_it = str(Path(file.file).parent / name)
    name = next_to_it if os.path.exists(next_to_it) and not os.path.exists(name) else name
    try:
        looked_up = found_model(file.job.replace(model=name, hub=False))
    except ConfigError as error:
        missing = str(error).endswith("no such file")
        named = _named_in(f"{name} {Path(file.file).stem}") if missing or " " in name else None
        if named is not None:
            remark = f"; its model {name!r} is no model's name, and {named}, as its words say, is taken"
            return found_model(file.job.replace(model=named, hub=False)), remark
        text = f"its model {name} is a folder that is not here: add --model NAME" if missing else str(error)
        raise ConfigError(text, file=file.file) from None
    if looked_up.spec.listed is not None:
        return looked_up, f"; {looked_up.spec.name} is {looked_up.how}"
    # Behind the name: where its sizes are from, and what of the model is left out.
    sizes = ", ".join(looked_up.how.split("; ")[1:])
    alike = f"{looked_up.spec.name}{sizes and f' ({sizes})'}"
    return looked_up, f"; its model {name} is taken for {alike}" if looked_up.how else ""


def _named_in(text: str) -> str | None:
    """Return the longest name of the catalogue that a text has as words of its own.

    >>> _named_in("/path/to/Qwen3-8B-source grpo"), _named_in("Follow the guide grpo-deepseek-v3-64n8g"), _named_in("a path")
    ('qwen3-8b', 'deepseek-v3', None)
    """
    plain = f"-{re.sub(r'[^a-z0-9.]+', '-', text.lower())}-"
    return max((name for name in models() if f"-{name}-" in plain), key=len, default=None)


def find_alike(name: str) -> str | None:
    """The model of the catalogue whose sizes a name on the hub has; None where its name does not say.

    >>> find_alike("NousResearch/Meta-Llama-3.1-8B-Instruct"), find_alike("someone/something")
    ('llama-3.1-8b', None)
    """
    alike = derive(name, repositories())
    return None if alike is None or alike.changes else alike.base
