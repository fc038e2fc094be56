"""Writes a job as a job file of another tool."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, Error, is_command, refuse
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.axes import DEGREES
from loadgauge.core.definitions.model.lora import ATTENTION_TARGETS
from loadgauge.core.families.catalogue import config, repositories
from loadgauge.core.resolve.recompute_words import spell_recompute
from loadgauge.core.resolve.setup import Setup
from loadgauge.job_files.dialects import FILES, dialect
from loadgauge.job_files.exchange import JobFile, Written, read, write
from loadgauge.job_files.ideas import FIELDS, Extra, key_lists, suspect
from loadgauge.job_files.job_file import fill_in, is_job_file
from loadgauge.job_files.pre_training.megatron_model import missing_sizes
from loadgauge.job_files.reading.documents import document, load, syntax_of
from loadgauge.job_files.reading.nested import yaml_document

FLAGS = "flags"
"""loadgauge's own flags, as if they were a dialect."""
SIZES = ("zero", "replicas", "gpus", "micro_batch", "global_batch", "seq_len")


def job_of(setup: Setup) -> Job:
    """The job of a setup with every field filled in that a job file may have a key for."""
    job, layout, kind = setup.job, setup.layout, setup.training
    lora, precision = kind.lora, kind.precision.name
    usual = kind.framework.precision
    followed = kind.weights and (kind.lora is None or job.weights is not None)
    whole: dict[str, Any] = {name: int(getattr(layout, name)) for name in (*DEGREES, *SIZES)}
    quantised = lora is not None and bool(lora.quantised)
    targets = None if lora is None else "attention" if lora.targets <= ATTENTION_TARGETS else "all"
    return Job(
        model=job.model or setup.model.name,
        framework=kind.framework.name,
        gpus_per_node=job.gpus_per_node,
        **whole,
        sequence_parallel=layout.sequence_parallel,
        schedule=layout.schedule if layout.pp > 1 else None,
        stage_layers=None if layout.stage_layers is None else ",".join(map(str, layout.stage_layers)),
        recompute=spell_recompute(str(layout.recompute), setup.model, kind),
        precision=precision[:4] if followed or precision in (usual, f"fp16{usual[4:]}") else precision,
        weights=kind.weights if followed else None,
        optimizer=kind.optimizer.name,
        attention=job.attention or kind.kernels.attention,
        loss=job.loss,
        kernels=job.kernels or "native",
        compile=job.compile,
        lora_rank=0 if lora is None else int(lora.rank) or None,
        adapter=job.adapter,
        virtual_tokens=job.virtual_tokens,
        lora_targets=targets and (job.lora_targets or targets),
        qlora=quantised,
        base=(job.base or "nf4") if quantised else None,
        **{
            name: getattr(job, name)
            for name in (
                "lora_dropout",
                "lora_dtype",
                "kbit_upcast",
                "use_dora",
                "modules_to_save",
                "lora_layers",
                "train",
            )
        },
        target_len=job.target_len,
        offload=kind.offload,
        end_units=job.end_units,
        gradient_sync=job.gradient_sync,
        engine=job.engine,
        offload_to="nvme" if kind.host.nvme else None,
        activation_offload=kind.host.activations,
        pin_memory=None if kind.host.pinned else False,
        eval_batch=job.eval_batch,
        eval_batches=job.eval_batches,
        save=job.save,
        cp_comm=layout.cp_comm if layout.cp != 1 else None,
        order=",".join(layout.order),
        overlap=job.overlap,
    )


def name_for_dialect(job: Job, dialect: str, *, patched: bool = False) -> tuple[Job, Extra]:
    """The job with the name that a tool knows a model of the catalogue by: its repository, or where the tool takes no names
    the model's sizes, in the `Extra`.

    patched: the user's own file is written onto, which has the model already

    >>> name_for_dialect(Job(model="qwen3-8b"), "trl")[0].model
    'Qwen/Qwen3-8B'
    """
    name = job.model.lower()
    repository = repositories().get(name)
    if repository is None or dialect == "torchtitan":
        return job, Extra()
    if dialect == "megatron":
        sizes = config(name)
        return (job, Extra()) if patched or missing_sizes(sizes) else (job.replace(model=""), Extra(config=sizes))
    return job.replace(model=repository.partition(" ")[0] or job.model), Extra()


def export(setup: Setup, dialect: str, template: str | None = None, *, file: str = "") -> Written:
    """Writes the job of a setup as a job file of a dialect; `template`, the user's own file, is patched.

    >>> from loadgauge.core.resolve.resolve import resolve_job
    >>> from loadgauge.core.definitions.job.job import Job
    >>> written = export(resolve_job(Job(model="llama-3.1-8b", gpus=16, tp=8)), "megatron")
    >>> "--tensor-model-parallel-size 8" in written.text
    True
    """
    job, extra = name_for_dialect(job_of(setup), dialect, patched=template is not None)
    return write(job, dialect, template, extra=extra, file=file)


PIECES = re.compile(r"\n|\s+(?=--)")
"""Bounds of what a job file says at a time: lines, and flags."""

LONG = 40
"""Letters of a flag's meaning that a first screen has no room for."""
MEANS = re.compile(r" [^ ]*: it means ")
"""Pattern of that between a flag and the value that a file gives it."""


def words(before: Setup, after: Setup, *, lacking: int = 0) -> str:
    """Return a change of a run as lines of its job file, or of its framework's, to paste; empty where these cannot say it.

    lacking: how many flags they may have no key for, which are named

    >>> from loadgauge.core.resolve.resolve import resolve_job
    >>> runs = [resolve_job(Job("qwen3-8b", qlora=True, lora_rank=8, loss="auto", recompute=how)) for how in ("none", "full")]
    >>> words(*runs)
    'trl: gradient_checkpointing: true'
    """
    kind, file = before.training.framework, before.job.model if is_job_file(before.job.model) else ""
    names = {setup.training.framework.name for setup in (before, after)}
    try:
        template = load(file) if file else None
        usual = before.job.dialect or ("trl" if kind.is_default else kind.name)
        dialect = read(load(file), before.job.dialect, file=file).dialect if file else usual
        if len(names) > 1 or dialect not in FILES:
            return ""
        texts = [export(setup, dialect, template, file=file) for setup in (before, after)]
    except Error:
        return ""
    return told("the command" if is_command(file) else file or dialect, *texts, lacking=lacking)


def told(whose: str, before: Written, after: Written, *, lacking: int = 0) -> str:
    """Return what a job file says more than the one before it, and where it does not say the same; empty where it cannot."""
    added = _added(before.text, after.text)
    lost = sorted(set(after.left_out) - set(before.left_out))
    means = [line for line in lost if "it means" in line and not line.endswith(" none")]  # which is not to have it
    none = [line.partition(":")[0] for line in lost if line not in means]
    if not added or len(none) > lacking:
        return ""
    there = [
        line if len(line) < LONG else f"another {line.split()[0]}" for line in (MEANS.sub(" ", each) for each in means)
    ]
    notes = [f"there it is {', '.join(there)}"] * bool(there) + [f"no key for {', '.join(none)}"] * bool(none)
    remarks = f" ({'; '.join(notes)})" if notes else ""
    return f"{whose}: {'; '.join(added)}{remarks}"


def _added(old: str, new: str) -> list[str]:
    """What the second text says and the first does not: keys of YAML with their values on a line, or lines and flags.

    >>> _added("a: 1\\nd: {e: 2}", "a: 1\\nb: {c: true}\\nd: {e: 2, f: 3}")
    ['b: {c: true}', 'd: {f: 3}']
    >>> _added("run.sh --tp 2", "run.sh --tp 2 --pp 4")
    ['--pp 4']
    """
    try:
        before, after = (yaml_document(text).root for text in (old, new))
    except Error:
        was, now = ([piece.strip().rstrip(" ,\\") for piece in PIECES.split(text)] for text in (old, new))
        return [piece for piece in now if piece not in was and piece.strip("{}[]")]
    return [f"{key}: {_on_a_line(value)}" for key, value in _changed(before, after).items()]


def _changed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The mapping of the second alone that the first has not, or otherwise; what one has as a mapping is compared inside."""
    own = {key: (old.get(key), value) for key, value in new.items() if key not in old or old[key] != value}
    both = {key: isinstance(was, dict) and isinstance(value, dict) for key, (was, value) in own.items()}
    return {key: _changed(was or {}, value) if both[key] else value for key, (was, value) in own.items()}


def _on_a_line(value: Any) -> str:
    """A value of YAML on one line.

    >>> _on_a_line({"stage": 3, "offload": {"pin": True}, "targets": ["q", "v"]})
    '{stage: 3, offload: {pin: true}, targets: [q, v]}'
    """
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_on_a_line(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_on_a_line, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


TYPED = ("trl", "llamafactory", "axolotl", "megatron", "torchtune")
"""Dialects in whose words flags are looked up, in this order."""
RL = "num_generations: "
"""A key of files whose run generates: changes of a key there follow from other keys too."""
BESIDE = "launch"
"""Their launchers' list of keys."""


def heard(key: str, value: str, *, adapts: bool) -> tuple[str, dict[str, Any]] | str | None:
    """Return whose word a flag is and what it changes there, by field; why it cannot be said here; None for nobody's.

    It is read twice by the tool's own reader, in a job file without it and in one with it. One that changes nothing there, and is
    not known to change nothing anywhere, may change something beside others.
    adapts: whether the run has adapters, without which keys of theirs change nothing

    >>> [heard(key, "512", adapts=False) for key in ("cutoff_len", "rdzv_id", "mciro_batch")]
    [('llamafactory', {'seq_len': 512}), ('launch', {}), None]
    >>> heard("label_smoothing_factor", "0.1", adapts=False)
    'in trl: keeps the log-probabilities of all words once more; not counted, leave it out'
    """
    reasons = []
    for name, old, new in _beside(key, value, adapts):
        coverage = dialect(name).coverage
        try:
            before, after = (read(text, name, alone=True, given={"gpus": 8}) for text in (old, new))
        except Error as error:
            if name == "accelerate":
                return f"in {name}: {error}"
            continue
        unread = [each.lstrip("-").replace("-", "_") for each in after.unread]
        full = next((each for each in unread if each.rpartition(".")[2] == key), "")
        both = {each: [getattr(file.job, each) for file in (before, after)] for each in FIELDS}
        fields = {each: new for each, (old, new) in both.items() if new != old and (each, old) != ("offload", None)}
        (_, bound), rule = coverage.bound(full or key, value) or ("", None), coverage.stop(full or key, value)
        listed, cause = bool(full and coverage.kinds(full)), rule or bound
        if (fields and not full and RL not in old) or (listed and cause is None):
            return name, fields
        if not full:
            file = "DeepSpeed's own file: --with ds_config.json" if name == "deepspeed" else "a job file"
            reasons.append(f"in {name} it counts beside other keys: say it in {file}")
        elif listed and cause is not None:
            reasons.append(f"in {name}: {cause.why}; not counted, leave it out")
    return (BESIDE, {}) if key_lists(BESIDE).kinds(key) else next(iter(reasons), None)


def together(typed: Sequence[tuple[str, Any]], job: Job) -> Iterator[tuple[str, list[int], dict[str, Any], str]]:
    """Yield tools that know flags beside each other: the tool, the places of those that it knows, what they change of the
    job, by field, and a remark on those that can only save memory. The tool that knows most of them comes first.

    typed: keys and their values; job: what the other flags say, in whose file of the tool the keys are read
    Raises `ConfigError` for one that is known and not counted.

    >>> beside = [("use_precision_aware_optimizer", True), ("exp_avg_dtype", "bf16"), ("exp_avg_sq_dtype", "bf16")]
    >>> next(together(beside, Job("qwen3-8b", gpus=8)))[:3]
    ('megatron', [0, 1, 2], {'optimizer': 'adamw:moments=bf16'})
    """
    left, why = dict(enumerate(typed)), ""
    job = job.replace(precision=job.precision or "bf16")
    tools = dict.fromkeys(("deepspeed", *TYPED, "torchtitan", "verl", *FILES))
    while left and tools:
        theirs = {name: {at: full for at, (key, _) in left.items() if (full := _full(name, key))} for name in tools}
        name = max(theirs, key=lambda each: len(theirs[each]))
        del tools[name]
        if not theirs[name]:
            break
        reads: list[JobFile] = []
        for model in filter(None, (job.model, "qwen3-8b")):  # where a tool has no such model, of one that all have
            try:
                reads = _read_beside(
                    job.replace(model=model), name, {full: left[at][1] for at, full in theirs[name].items()}
                )
            except Error as error:
                why = why or f"in {name}: {error}"
            else:
                break
        if not reads:
            continue
        before, after, other = (fill_in(file.job, file.extra, None) for file in (*reads, reads[1])[:3])
        sizes, others = (msgspec.structs.replace(file.extra, accumulation=None, generated=None) for file in reads[:2])
        if sizes != others:
            why = why or f"in {name}, of the model itself: say it in a job file"
            continue
        new = {item.key: item for item in reads[1].uncounted if item not in reads[0].uncounted}
        if costs := next((item for item in new.values() if item.effect != "saves"), None):
            why = why or f"in {name}: {costs.note}; not counted, leave it out"
            continue
        keys = {*theirs[name].values()}
        own = {fact for fact, each in reads[1].facts.items() if _plain(each.key) in keys}
        differs = {each for each in FIELDS if {getattr(before, each), getattr(other, each)} != {getattr(after, each)}}
        changed = {
            each: value for each in FIELDS if each in own | differs and (value := getattr(after, each)) is not None
        }
        if (
            why and not changed and not new
        ):  # another tool's, which could not be read beside these flags, changes something
            continue
        yield name, list(theirs[name]), changed, "; ".join(f"{item.note}: can only save" for item in new.values())
        left = {at: each for at, each in left.items() if at not in theirs[name]}
    if left:
        raise ConfigError(why, key=next(iter(left.values()))[0])


def _plain(key: str) -> str:
    """Return a key as keys are listed. ``_plain("--tp-comm-overlap") == "tp_comm_overlap"``"""
    return key.lstrip("-+").replace("-", "_")


def _read_beside(job: Job, name: str, keys: Mapping[str, Any]) -> list[JobFile]:
    """Return a tool's file of a job as it is read without keys, with them, and with switches turned. Raises `ConfigError`."""
    refuse(
        job.task is not None and any(re.search("gpus|nodes|engines|devices", key) for key in keys),
        "shares out GPUs: give --gpus, and --placement split:A+B where trainer and rollout have their own",
    )
    own, extra = name_for_dialect(job, name)
    text = write(own, name, extra=extra).text
    turned = {key: not value if isinstance(value, bool) else value for key, value in keys.items()}
    cards = {"gpus": job.gpus} if job.gpus else {}
    files = []
    for values in ({}, keys, turned):
        whole = document(text, syntax_of(text, ""), dialect(name))
        for key, value in values.items():
            whole.put(key, value)
        with contextlib.suppress(*[Error] if values is turned else ()):  # what is on cannot be off everywhere
            files.append(read(whole.text() if values else text, name, alone=True, given=cards))
    return files


@cache
def _keys(name: str) -> frozenset[str]:
    """Return all keys of a dialect that are known by their whole name."""
    lists = dialect(name).coverage
    return frozenset((*dialect(name).known, *lists.harmless, *lists.stops, *lists.bounded))


def _full(name: str, key: str) -> str:
    """Return a key of a dialect with its sections, or as it is where it is one; empty where none or several end so.

    >>> _full("verl", "use_kl_loss"), _full("megatron", "tp_comm_overlap"), _full("verl", "path")
    ('actor_rollout_ref.actor.use_kl_loss', 'tp_comm_overlap', '')
    """
    ends = [each for each in _keys(name) if each.endswith(f".{key}")]
    ends = [each for each in ends if ".actor." in each] if len(ends) > 1 else ends
    return (
        key
        if key in _keys(name)
        else ends[0]
        if len(ends) == 1
        else key
        if dialect(name).kinds(key) and not suspect(key)
        else ""
    )


def _beside(key: str, value: str, adapts: bool) -> Iterator[tuple[str, str, str]]:
    """Yield a dialect, a job file of it without a flag, and the same with it."""
    if key.startswith("fsdp_"):  # what accelerate's launcher hands to its configuration
        text = "mixed_precision: bf16\nnum_processes: 8\ndistributed_type: "
        sharded = f"{text}FSDP\nfsdp_config:\n  fsdp_version: {2 if 'reshard' in key and not value.isupper() else 1}\n"
        yield "accelerate", sharded, f"{sharded}  {key}: {value}\n"
        yield "accelerate", f"{text}MULTI_GPU\n", f"{sharded}  {key}: {value}\n"
    for name in TYPED:
        job, extra = name_for_dialect(Job("qwen3-8b", gpus=8, precision="bf16", lora_rank=16 if adapts else None), name)
        file = write(job, name, extra=extra).text.rstrip()
        line = f" --{key.replace('_', '-')} {value}" if file.startswith("torchrun ") else f"\n{key}: {value}"
        yield name, file, file + line
    job = Job("qwen3-8b", gpus=8, task="grpo", prompts=8, samples=8, prompt_len=512, answers="1024", rollout="vllm")
    file = write(job, "trl", extra=name_for_dialect(job, "trl")[1]).text
    if f"\n{key}: " not in file:
        yield "trl", file, f"{file.rstrip()}\n{key}: {value}\n"
    inner = value if re.fullmatch(r"true|false|[\d.]+(e\d+)?", value) else f'"{value}"'
    text = '{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": 3{}}}}}'
    yield "deepspeed", text.format(""), text.format(f', "{key}": {inner}')
