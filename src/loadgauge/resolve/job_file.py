"""A job file of another tool in the place of a MODEL: its run as flags, and the model that it names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.families.catalogue import find_model, model_sources, models
from loadgauge.formats.coverage import Uncounted
from loadgauge.formats.exchange import SYNTAXES, JobFile, load, read
from loadgauge.formats.recompute import resolved
from loadgauge.formats.run import FIELDS, Run
from loadgauge.spec.axes import MODEL_PARALLEL
from loadgauge.spec.frameworks import default_framework
from loadgauge.spec.job import Job
from loadgauge.spec.model import ModelSpec
from loadgauge.spec.training import training

WITH_GPU = ("gpus_per_node", "order", "overlap")
"""Flags that say nothing without --gpu."""
VARIANTS = re.compile(r"^(meta-|unsloth-)|-(hf|instruct|chat|it|base|v\d+(\.\d+)?|bnb|4bit|unsloth|bf16|sft)\b")


def is_job_file(text: str) -> bool:
    """Whether a MODEL is a job file: by its ending; JSON that is no `config.json` too.

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
    return not any(f'"{key}"' in start for key in ("model_type", "architectures", "hidden_size", "text_config"))


def from_job_file(job: Job) -> tuple[Job, ModelSpec, str, tuple[Uncounted, ...], float]:
    """The flags of a job file with those given beside it, which go first; its model; a line on how it was read; what it
    asks for that is not counted; and the dropout of its adapters, which no flag says."""
    given = _given(job)
    found = read(load(job.model), file=job.model, given={name: given[name] for name in FIELDS if name in given})
    model, name = model_of(found)
    flags = {key: value for key, value in flags_of(found.run, model).items() if key not in given}
    if job.gpu is None:
        flags = {key: value for key, value in flags.items() if key not in WITH_GPU}
    if job.lengths is not None:
        flags.pop("seq_len", None)
    dropout = found.said["lora_dropout"].value if "lora_dropout" in found.said and found.run.lora_rank else 0.0
    return msgspec.structs.replace(job, **flags), model, f"{note(found)}{name}", found.uncounted, dropout


def _given(job: Job) -> dict[str, Any]:
    defaults = Job(model="")
    values = {name: getattr(job, name) for name in Job.__struct_fields__ if name != "model"}
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


def note(found: JobFile) -> str:
    """How a job file was read: what is not counted goes first.

    >>> note(JobFile(dialect="trl", syntax="yaml", file="job.yaml", run=Run(), said={}, unread=("lr", "seed")))
    'job.yaml is read as trl; 2 of its keys change neither memory nor the time of a step: lr, seed'
    """
    unknown = [item.key for item in found.uncounted if not item.known]
    bounded = [item for item in found.uncounted if item.known]
    named = {*unknown, *(item.key for item in bounded)}
    whole = tuple(item.key.removesuffix("*") for item in bounded if item.key.endswith("*"))
    harmless = [key for key in found.unread if key not in named]
    harmless = [key for key in harmless if not (whole and key.lstrip("+-").startswith(whole))]
    parts = [f"{found.file} is read as {found.dialect}"]
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


def flags_of(run: Run, model: ModelSpec | None) -> dict[str, Any]:
    """A run as values of flags, without those that say nothing."""
    flags: dict[str, Any] = {}
    for name in Job.__struct_fields__:
        value = getattr(run, name, None) if name in FIELDS else None
        if name != "model" and value is not None:
            flags[name] = value
    if run.global_batch is None and run.accumulation is not None:
        ranks = 1 if run.gpus is None else run.gpus // run.within
        flags["global_batch"] = (run.micro_batch or 1) * run.accumulation * ranks
    if "recompute" in flags and model is not None:
        flags["recompute"] = resolved(flags["recompute"], model, training(run.framework or _framework(run)))
    if (run.cp or 1) == 1:
        flags.pop("cp_comm", None)
    if (run.pp or 1) == 1:
        flags.pop("schedule", None)
    if flags.get("loss") == "auto" or (model is not None and model.head.kind != "lm"):
        flags.pop("loss", None)
    if flags.get("qlora") is not True:
        flags.pop("base", None)
    if not flags.get("lora_rank"):
        flags.pop("lora_rank", None)
    return flags


def _framework(run: Run) -> str:
    return default_framework({axis: (getattr(run, axis) or 1,) for axis in MODEL_PARALLEL})


def model_of(found: JobFile) -> tuple[ModelSpec, str]:
    """The model that a job file has the sizes or the name of, and a remark where the name is only alike."""
    if found.run.config is not None:
        from loadgauge.families.hf import from_dict

        return from_dict(found.run.config, found.file, Path(found.file).stem), ""
    name = found.run.model
    if name is None:
        raise ConfigError(
            "says how a model is trained, and not which in a way that is read; `loadgauge convert FILE --to flags`"
            " prints the flags to give beside a MODEL",
            file=found.file,
        )
    beside = Path(found.file).parent / name
    if not os.path.exists(name) and beside.exists():
        return find_model(str(beside)), ""
    try:
        return find_model(name), ""
    except ConfigError as error:
        known = alike(name)
        if known is None:
            raise ConfigError(str(error), file=found.file) from None
        return find_model(known), f"; its model {name} is taken for {known}"


def alike(name: str) -> str | None:
    """The model of the catalogue that differs from a name by its publisher and its fine-tuning only.

    >>> alike("NousResearch/Meta-Llama-3.1-8B-Instruct"), alike("someone/something")
    ('llama-3.1-8b', None)
    """
    wanted = _plain(name)
    for known in models():
        if wanted in (_plain(known), _plain(model_sources()[known].repository)):
            return known
    return None


def _plain(name: str) -> str:
    words = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    before = ""
    while before != words:
        before, words = words, VARIANTS.sub("", words)
    return words
