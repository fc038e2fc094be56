"""Converts a job, or the job files of one tool, into the job file of another."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadgauge.core.base import Error
from loadgauge.core.definitions.job.job import POSTTRAIN, Job
from loadgauge.core.resolve.posttrain import resolve_posttrain
from loadgauge.core.resolve.reproduce import completer
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.job_files.dialects import dialect as dialect_of
from loadgauge.job_files.exchange import JobFile, Written, combine, write
from loadgauge.job_files.export import FLAGS, export, job_of, name_for_dialect, told
from loadgauge.job_files.ideas.facts import FIELDS, Extra
from loadgauge.job_files.job_file import (
    READING,
    fill_in,
    find_alike,
    flags_given,
    is_job_file,
    names_beside,
    read_files,
)
from loadgauge.job_files.reading.documents import load


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """Job files that were converted.

    files: as they were read; job, extra: what they describe together, with the flags given alongside them
    onto: the file whose text was patched, empty for a new one
    """

    files: tuple[JobFile, ...]
    job: Job
    extra: Extra
    written: Written
    onto: str = ""


def read(file: str | Path, **fields: Any) -> JobFile:
    """Return what a job file of another tool says: `dialect`, `version`, the `facts`, each with the key or default behind it.

    fields: how it is read, as flags of `loadgauge estimate` have it, such as `version`. Raises `ConfigError`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "job.yaml"
    ...     _ = file.write_text("base_model: Qwen/Qwen3-8B\\nmicro_batch_size: 2\\nsequence_len: 2048\\nadapter: lora")
    ...     read(file).dialect, read(file).facts["micro_batch"].key
    ('axolotl', 'micro_batch_size')
    """
    how = Job(model=str(file)).replace(**fields)
    return read_files([how.model], how, {})[0]


EPOCHS = ("num_epochs", "num_train_epochs", "--num_train_epochs", "--num-train-epochs", "train.epochs", "epochs")
"""Words of tools for the times that the data is gone through, which a new file says too where its tool needs them."""
QUOTES = "'\""


def convert(
    job: Job | str | Path | Sequence[str | Path],
    to: str = "megatron",
    *,
    onto: str | Path | None = None,
    **fields: Any,
) -> Written:
    """Writes a job as the job file of a tool, or as flags of `loadgauge estimate`; nothing is dropped in silence.

    job: a `Job`, a name in the catalogue, or one or more job files of another tool that describe one job together
    to: a dialect (megatron, megatron-bridge, torchtitan, deepspeed, accelerate, transformers, trl, axolotl, llamafactory,
    verl, torchtune, litgpt, ms-swift, automodel, unsloth, openrlhf, nemo-rl, slime, prime-rl) or "flags"
    onto: a file of that dialect to patch; its comments and everything else in it stay
    fields: fields of `Job` that change it, such as `tp=4`, or that say how files are read: `version` of the tool (the newest
    unless given), `dialect` of the first, files `beside` it

    Returns the text (`str` of it too) and, as `left_out`, a line for everything that the dialect cannot say. Raises
    `ConfigError` for files that cannot be read, that contradict each other, or that ask for what is not modelled, and for
    unknown fields.

    >>> written = convert("llama-3.1-8b", to="torchtitan", gpus=16, tp=8)
    >>> "--parallelism.tensor_parallel_degree 8" in str(written)
    True
    >>> convert(Job(model="gpt2", tp=2), to="flags", gpus=4).text.split()[3:7]
    ['--gpus', '4', '--tp', '2']
    """
    changes = Job.of("", fields)
    template = None if onto is None else str(onto)
    if isinstance(job, str | Path):
        job = Job(model=str(job))
    if isinstance(job, Job):
        job = job.replace(**{name: getattr(changes, name) for name in fields})
        if not is_job_file(job.model):
            if job.task is not None:
                return _of_task(job, to, template)
            setup = resolve_job(job)
            if to == FLAGS:
                return Written(dialect=FLAGS, text=completer(setup.job)(setup.estimate()).command())
            return export(setup, dialect_of(to).name, None if template is None else load(template), file=template or "")
        files, changes = [job.model], job.replace(model="")
    else:
        files = [str(file) for file in job]
    return convert_files(files, to, onto=template, flags=changes).written


def _of_task(job: Job, to: str, onto: str | None) -> Written:
    """Writes a job with a task: as resolved, in sequences of the task, of which a pair is one."""
    run, setup = resolve_posttrain(job)
    post_training = {name: value for name in POSTTRAIN if (value := getattr(job, name)) is not None}
    if run.engine is not None:
        sequences = run.sequences
        post_training = {
            "prompts": sequences.prompts,
            "samples": sequences.samples,
            "prompt_len": sequences.prompt,
            "answers": str(sequences.answers.longest),
            "epochs": sequences.epochs,
            "rollout": run.engine.text(),
        } | post_training
    if to == FLAGS:
        return Written(dialect=FLAGS, text=job.replace(**post_training).command())
    if run.engine is not None and dialect_of(to).trainers == "own":  # without a word, these have no reference
        post_training["reference"] = run.reference or "none"
    whole = job_of(setup)
    run_fields = {
        "micro_batch": (whole.micro_batch or 1) // run.task.rows,
        "global_batch": (whole.global_batch or 1) // run.task.rows,
    }
    filled = whole.replace(
        **post_training, **run_fields, loss=job.loss, seq_len=None if run.engine is not None else whole.seq_len
    )
    named, extra = name_for_dialect(filled, dialect_of(to).name, patched=onto is not None)
    return write(named, dialect_of(to).name, None if onto is None else load(onto), extra=extra, file=onto or "")


def words_of_task(job: Job, flags: str) -> str:
    """Return flags that change a run after pre-training as lines of its trainer's file; empty where these cannot say it.

    >>> words_of_task(Job("qwen3-8b", task="grpo", gpus=8, zero=3, dialect="verl"), "--recompute full")
    'verl: actor_rollout_ref.model.enable_gradient_checkpointing=True'
    """
    words = [piece.partition(" ") for piece in re.split(r"(?:^| )--", flags) if piece]
    changed = Job.of("", {name: value or True for name, _, value in words})
    after = job.replace(**{name.replace("-", "_"): getattr(changed, name.replace("-", "_")) for name, _, _ in words})
    try:
        texts = [_of_task(each, job.dialect or "", None) for each in (job, after)]
    except Error:
        return ""
    return told(dialect_of(job.dialect or "").name, *texts, lacking=1)


def convert_files(
    paths: Sequence[str],
    to: str,
    *,
    onto: str | None = None,
    flags: Job | None = None,
) -> Conversion:
    """Reads job files that describe one job, and writes it; a single file of the dialect `to` is patched. See `convert`.

    flags: change the job, also its model where not empty, or say how the files are read (`resolve.job_file.READING`)
    """
    asked = flags or Job(model="")
    model = asked.model or asked.base_model
    flags_set = flags_given(asked) | ({"model": model} if model else {})
    flags_set = {name: value for name, value in flags_set.items() if name not in READING}
    paths = [*paths, *names_beside(asked)]
    inside = {name: value for name, value in flags_set.items() if name in FIELDS}
    beyond = {name: value for name, value in flags_set.items() if name not in FIELDS}
    keeping = dialect_of(to).name if to != FLAGS and onto is None and len(paths) == 1 else None
    files = read_files(paths, asked, inside, keeping=keeping)
    job, extra = combine(files, inside)
    if to == FLAGS:
        written, onto = Written(dialect=FLAGS, text=_flags(job, extra, beyond), left_out=()), None
    else:
        same = [file.file for file in files if file.dialect == dialect_of(to).name]
        if onto is None and len(files) == 1 and same:
            onto = same[0]
        written = write(job, to, None if onto is None else load(onto), extra=extra, file=onto or "")
        epochs = next((file.aside[name] for file in files for name in EPOCHS if name in file.aside), None)
        if onto is None and epochs is not None:
            text = re.sub(r"(?m)^num_epochs: 1$", f"num_epochs: {epochs.strip(QUOTES)}", written.text)
            written = msgspec.structs.replace(written, text=text)
        rest = tuple(f"--{name.replace('_', '-')} {value}: has no place in it" for name, value in beyond.items())
        written = msgspec.structs.replace(written, left_out=(*written.left_out, *rest))
    return Conversion(files=files, job=job, extra=extra, written=written, onto=onto or "")


def _flags(job: Job, extra: Extra, beyond: dict[str, Any]) -> str:
    """The command line of a job that files describe; switches that are off are left out."""
    filled = fill_in(job, extra, None).replace(**beyond)
    off = {name: None for name, value in flags_given(filled).items() if value is False}
    if filled.gpu is None:
        off |= dict.fromkeys(("gpus_per_node", "order", "overlap"))
    model = "MODEL" if not job.model else find_alike(job.model) or job.model
    return filled.replace(**off, model=model).command()
