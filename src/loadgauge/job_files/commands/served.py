"""A job file that trains nothing, as a request to run its model forward: servers, generation, evaluation, and what merges adapters
or writes weights in another form, which holds them once."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loadgauge.core.base.errors import ConfigError, Untrained
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.resolve.model import found_model
from loadgauge.core.serving.passes import AXES_OF
from loadgauge.job_files.dialects import dialect as dialect_of
from loadgauge.job_files.ideas.coverage import Coverage
from loadgauge.job_files.ideas.table import Dialect, Document, Keys, names_in
from loadgauge.job_files.job_file import READING, variables_of
from loadgauge.job_files.reading.documents import document, load, recognise_text, syntax_of

MODELS = names_in(
    "model_name_or_path model_id model hf_model hf_model_path pretrained_model_name_or_path lm_model_name_or_path model_path"
    " model_base base_model base_model_name_or_path pretrained_model_path checkpoint_dir model_name"
)
NAMES = {
    "answer": names_in("max_new_tokens response_length max_response_length osl num_tokens_to_generate out_seq_length max_gen_len"),
    "prompt": names_in("prompt_length max_prompt_length num_input_tokens"),
    "context": names_in(
        "max_model_len max_length vllm_max_model_len cutoff_len max_seq_length max_seq_len seq_length max_len block_size"
    ),
    "batch": names_in(
        "per_device_eval_batch_size inference_batch_size_per_device inference_batch_size max_num_seqs max_batch_size batch_size"
        " micro_batch_size"
    ),
    "tp": names_in("tensor_model_parallel_size tensor_parallel_size vllm_tensor_parallel_size tp_size tp"),
    "pp": names_in("pipeline_model_parallel_size pipeline_parallel_size"),
    "ep": names_in("expert_model_parallel_size"),
    "bits": names_in("load_in_4bit load_in_8bit quantization_bit quant_bits"),
}  # fmt: skip
"""Names that tools give to what a forward pass is asked for, without their sections; the first that a file has counts."""
BITS, STORED = {"load_in_4bit": 4, "load_in_8bit": 8}, {4: "nf4", 8: "int8"}
WRITES = re.compile(r"merge|export|convert|combine")
"""Programs that only load weights and write them."""
PROMPT = 1024


class Served(NamedTuple):
    """A request: its job, the fields of `Inference`, the model, what was assumed, and keys that no part of it reads."""

    job: Job
    given: dict[str, Any]
    model: ModelSpec
    assumed: dict[str, str]
    unread: list[dict[str, Any]]


def served(job: Job, why: Untrained) -> Served:
    """Read a file that trains nothing. why: the error that says so. Raises `ConfigError` where its model is not known."""
    text, variables = load(job.model, job.dialect), variables_of(job.variables)
    syntax = syntax_of(text, job.model)
    chosen = dialect_of(job.dialect) if job.dialect else recognise_text(text, syntax, job.model, variables)
    keys = Keys(document(text, syntax, chosen, job.model, variables), job.model)
    sized = {field: _sized(keys, names) for field, names in NAMES.items()}
    facts = _facts(chosen, keys) | {field: number for field, (_, number) in sized.items() if number}
    model, how, key = _model(job, facts, keys, why)
    degrees = {
        axis: getattr(job, axis) or _whole(facts.get(axis)) or 1
        for axis in AXES_OF
        if axis != "ep" or model.has_experts
    }
    gpus = _whole(facts.get("gpus")) or (_whole(facts.get("gpus_per_node")) or 0) * (_whole(facts.get("nodes")) or 1)
    whole = gpus % (degrees["pp"] * max(degrees["tp"], degrees.get("ep", 1))) == 0
    asked = job.replace(
        **dict.fromkeys(READING), model=model.name, gpus=job.gpus or (gpus if gpus and whole else None), **degrees
    )
    assumed = {"--task": f"generate ({why})", **({"model": how} if how else {})}
    used = {key, *(key for key, _ in sized.values())}
    return Served(asked, _given(facts, str(why.key), assumed), model, assumed, _unread(chosen, keys, used))


def _sized(keys: Keys, names: Sequence[str]) -> tuple[str, int | None]:
    """Return the first key of these names that has a number, or is a switch that is on, with the number."""
    every = ((key, keys.plain(key)) for name in names for key in _named(keys.document, name))
    numbers = (
        (key, BITS.get(key.rpartition(".")[2]) if str(value).lower() == "true" else _whole(value))
        for key, value in every
    )
    return next(((key, number) for key, number in numbers if number), ("", None))


def _facts(chosen: Dialect | None, keys: Keys) -> dict[str, Any]:
    """Return what the dialect's ideas read, without those that the file contradicts: it was written for no training."""
    facts: dict[str, Any] = {}
    for idea in () if chosen is None else chosen.ideas:
        if {"model", "config"} & set(idea.facts) and not keys.has(*idea.keys):
            continue  # A tool's default is of its training.
        try:
            read = idea.read(keys).items()
            facts |= {name: getattr(value, "value", value) for name, value in read if value is not None}
        except ConfigError:
            continue
    return facts


def _named(whole: Document, name: str) -> list[str]:
    """Return the keys of a document that end in a name."""
    return [key for key in whole.names() if _last(key) == name]


def _last(key: str) -> str:
    """Return a key without its sections. ``_last("--ds.param-dtype") == "param_dtype"``"""
    return key.rpartition(".")[2].lstrip("-+").replace("-", "_")


def _whole(value: Any) -> int | None:
    """Return a whole number from 1 to a billion, or None.

    >>> _whole("8"), _whole(True), _whole("$N"), _whole(0)
    (8, None, None, None)
    """
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if 0 < number <= 10**9 else None


def _model(job: Job, facts: Mapping[str, Any], keys: Keys, why: Untrained) -> tuple[ModelSpec, str, str]:
    """Return the model, how it was known, and the key that names it."""
    if job.base_model is None and isinstance(facts.get("config"), dict):
        from loadgauge.core.families.hf import from_dict

        return from_dict(facts["config"], job.model, Path(job.model).stem), "", ""
    named = {str(keys.plain(key)): key for name in MODELS for key in _named(keys.document, name)}
    names = {job.base_model: ""} if job.base_model else {facts.get("model"): ""} | named
    failure = ConfigError(f"{why}; with --model NAME it is counted as --task generate")
    for name, key in names.items():
        if not isinstance(name, str) or not name or "$" in name:
            continue
        beside = Path(job.model).parent / name
        try:
            read = found_model(job.replace(model=str(beside) if beside.exists() else name, hub=job.hub or False))
        except ConfigError as error:
            gone = str(error).endswith("no such file") or name.startswith((".", os.sep))
            failure = failure if gone else ConfigError(str(error), file=job.model)
            continue
        return read.spec, f"{read.spec.name} ({read.how})" if read.how else "", key
    raise failure


def _given(facts: Mapping[str, Any], program: str, assumed: dict[str, str]) -> dict[str, Any]:
    """Return the fields of `Inference`: without a context, an answer follows a prompt of `PROMPT` tokens."""
    if WRITES.search(program):
        assumed["--context"] = "2 (only the weights are loaded and written)"
        return {"context": 2, "weight_format": STORED.get(facts.get("bits", 0))}
    prompt, answer, context = facts.get("prompt"), facts.get("answer"), facts.get("context")
    if answer is not None and (context is None or context <= answer):
        context = (prompt or PROMPT) + answer
        assumed |= {} if prompt else {"--context": f"{context} (a prompt of {PROMPT} tokens)"}
    stored = STORED.get(facts.get("bits", 0))
    return {"context": context, "answer": answer, "batch": facts.get("batch"), "weight_format": stored}


def _unread(chosen: Dialect | None, keys: Keys, used: set[str]) -> list[dict[str, Any]]:
    """Return the keys that the request does not read, with what they can do: none where they have none in training either."""
    lists, ideas = (Coverage(), ()) if chosen is None else (chosen.coverage, chosen.ideas)
    told = {key for idea in ideas if not IN_A_PASS & {*idea.facts} for key in idea.keys}
    told |= {key for key in keys.document.names() if {_last(key), str(keys.plain(key))} & AS_COUNTED}
    rules = {key: None if key in told else lists.stop(key, keys.plain(key)) for key in keys.document.names()}
    return [
        {"key": keys.document.shown(key), "effect": "none" if rule is None else rule.effect or "either"}
        | ({} if rule is None or rule.idle else {"why": rule.why})
        for key, rule in rules.items()
        if key not in used
    ]


AS_COUNTED = frozenset({"bf16", "bfloat16", "fp16", "float16", "predict_with_generate"})
"""Names and values that say what a request counts where a file says nothing: 16 bits, and that it generates."""
IN_A_PASS = frozenset({"precision", "kernels", "attention", "adapter", "base"})
"""Facts of training that a pass forward may have too, and that a request does not take over; it takes models and degrees."""
