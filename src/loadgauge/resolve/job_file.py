"""A job file of another tool in place of a model: its job as flags, and the model that it names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from loadgauge.errors import ConfigError
from loadgauge.families.catalogue import find_model, model_sources, models
from loadgauge.formats.exchange import SYNTAXES, JobFile, load, read
from loadgauge.formats.facts import FIELDS, Extra, ranks_of_replica
from loadgauge.formats.recompute import resolve_recompute
from loadgauge.formats.uncounted import Uncounted
from loadgauge.spec.axes import MODEL_PARALLEL
from loadgauge.spec.frameworks import default_framework
from loadgauge.spec.job import Job
from loadgauge.spec.model import ModelSpec
from loadgauge.spec.training import training

WITH_GPU = ("gpus_per_node", "order", "overlap")
"""Flags that say nothing without --gpu."""
CONFIG_KEYS = ("model_type", "architectures", "hidden_size", "text_config")
"""Keys of which a Hugging Face `config.json` has at least one."""
VARIANTS = re.compile(r"^(meta-|unsloth-)|-(hf|instruct|chat|it|base|v\d+(\.\d+)?|bnb|4bit|unsloth|bf16|sft)\b")


def is_job_file(text: str) -> bool:
    """Whether a model's name is the path of a job file, by its ending; JSON is one where it is no `config.json`.

    >>> is_job_file("llama-3.1-8b"), is_job_file("./no-such-file.yaml")
    (False, True)
    """
    suffix = Path(text).suffix.lower()
    if suffix not in SYNTAXES or text.lower() in models():
        return False
    if suffix != ".json":
        return os.sep in text or os.path.exists(text)
    if not os.path.isfile(text):
        return False
    try:
        start = load(text)
    except ConfigError:
        return False
    return not any(f'"{key}"' in start for key in CONFIG_KEYS)


def from_job_file(job: Job) -> tuple[Job, ModelSpec, str, tuple[Uncounted, ...], float]:
    """Reads the job file that a job names in place of a model; flags of the job go before those of the file.

    Returns the job with the file's flags, its model, a line on how the file was read, what it asks for that is not
    counted, and the dropout of its adapters, which no flag says. Raises `ConfigError`.
    """
    given = flags_given(job)
    file = read(load(job.model), file=job.model, given={name: given[name] for name in FIELDS if name in given})
    model, remark = model_of(file)
    filled = fill_in(file.job, file.extra, model)
    needless = {
        *given,
        "model",
        *(WITH_GPU if job.gpu is None else ()),
        *(["seq_len"] if job.lengths is not None else []),
    }
    flags = {name: getattr(filled, name) for name in FIELDS if name not in needless}
    return job.replace(**flags), model, f"{note(file)}{remark}", file.uncounted, file.extra.lora_dropout or 0.0


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
    parts = [f"{file.file} is read as {file.dialect}"]
    if unknown:
        parts.append(f"{_count(unknown, 'is', 'are')} not known here, and not counted: {', '.join(unknown)}")
    parts += [f"not counted: {item.note}" for item in bounded]
    if harmless:
        parts.append(
            f"{_count(harmless, 'changes', 'change')} neither memory nor the time of a step: {', '.join(harmless)}"
        )
    return "; ".join(parts)


def _count(keys: list[str], one: str, several: str) -> str:
    return f"{len(keys)} of its keys {one if len(keys) == 1 else several}"


def fill_in(job: Job, extra: Extra, model: ModelSpec | None) -> Job:
    """The job of a file as flags: with its batch and its recompute policy worked out, without flags that mean nothing.

    >>> fill_in(Job(model="", gpus=8, tp=2, micro_batch=3, cp_comm="ring"), Extra(accumulation=2), None).flags()
    '--gpus 8 --tp 2 --micro-batch 3 --global-batch 24'
    """
    changes: dict[str, Any] = {}
    if job.global_batch is None and extra.accumulation is not None:
        ranks = 1 if job.gpus is None else job.gpus // ranks_of_replica(job)
        changes["global_batch"] = (job.micro_batch or 1) * extra.accumulation * ranks
    if job.recompute is not None and model is not None:
        framework = job.framework or default_framework({axis: (getattr(job, axis) or 1,) for axis in MODEL_PARALLEL})
        changes["recompute"] = resolve_recompute(job.recompute, model, training(framework))
    meaningless = {
        "cp_comm": (job.cp or 1) == 1, "schedule": (job.pp or 1) == 1, "base": job.qlora is not True,
        "loss": job.loss == "auto" or (model is not None and model.head.kind != "lm"), "lora_rank": not job.lora_rank,
    }  # fmt: skip
    return job.replace(**changes, **{name: None for name, drop in meaningless.items() if drop})


def model_of(file: JobFile) -> tuple[ModelSpec, str]:
    """The model that a job file has the sizes or the name of, and a remark where only a similar name is known.

    Raises `ConfigError` where it has neither.
    """
    if file.extra.config is not None:
        from loadgauge.families.hf import from_dict

        return from_dict(file.extra.config, file.file, Path(file.file).stem), ""
    name = file.job.model
    if not name:
        raise ConfigError(
            "says how a model is trained, and not which in a way that is read; `loadgauge convert FILE --to flags`"
            " prints the flags to give with a MODEL",
            file=file.file,
        )
    next_to_it = Path(file.file).parent / name
    if not os.path.exists(name) and next_to_it.exists():
        return find_model(str(next_to_it)), ""
    try:
        return find_model(name), ""
    except ConfigError as error:
        similar = find_alike(name)
        if similar is None:
            raise ConfigError(str(error), file=file.file) from None
        return find_model(similar), f"; its model {name} is taken for {similar}"


def find_alike(name: str) -> str | None:
    """The model of the catalogue whose name differs only by its publisher and its fine-tuning; None where there is none.

    >>> find_alike("NousResearch/Meta-Llama-3.1-8B-Instruct"), find_alike("someone/something")
    ('llama-3.1-8b', None)
    """
    wanted = _plain(name)
    for candidate in models():
        if wanted in (_plain(candidate), _plain(model_sources()[candidate].repository)):
            return candidate
    return None


def _plain(name: str) -> str:
    words = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    before = ""
    while before != words:
        before, words = words, VARIANTS.sub("", words)
    return words
