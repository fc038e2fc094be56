"""Files dropped on the page: recognised by their content and read as data, in a separate process."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from loadgauge.core.base import ConfigError, Door, Error, NotModelled, needs_capture, refuse
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.families.catalogue import model as catalogued
from loadgauge.core.families.hf import LARGEST_FILE as LARGEST_CONFIG, decode, from_dict
from loadgauge.page.inputs.uploads import own_name, plain_name
from loadgauge.page.panels.traces import read_measurement, read_trace

if TYPE_CHECKING:
    from loadgauge.job_files.exchange import JobFile

PYTORCH, JOB_FILES = Door("pytorch"), Door("job_files")

LARGEST_DOCUMENT = 200_000_000
"""Largest trace or measurement [bytes]; a trace of 32 layers has a few MB."""
LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Keys of a config that say how many tokens a sequence may have."""
PICKLE = b"\x80"
"""First byte of a pickle."""
BINARY = "is neither text (UTF-8) nor a snapshot of PyTorch's allocator; of a model, drop its config.json"


def text(
    name: str,
    text: str = "",
    base64_text: str = "",
    others: dict[str, str] | None = None,
    flags: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Read a dropped file: flags, or why memory ran out. Raises `ConfigError`. base64_text: instead of `text`.

    others: texts of files dropped earlier, by name, because a job file may name one of them
    flags: what was chosen on the page, such as `gpus`, which goes before what a job file says

    kind: config, job, deepspeed, oom, trace, measurement, lengths or snapshot; dots: what goes back with the page's next
    questions, to be drawn; model: the config that is to be kept, where there is one
    """
    name = plain_name(name)
    if base64_text:
        raw = _bytes(base64_text, name)
        if raw.startswith(PICKLE):
            return _pickled(raw)
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ConfigError(BINARY, file=name) from None
    text = text.removeprefix("\ufeff")
    start = text.lstrip()
    refuse(not start, "is empty", file=name)
    refuse("\0" in text, BINARY, file=name)
    if not start.startswith("{") and PYTORCH.tells_of_memory(text):
        return _oom(text)
    if start.startswith("{"):
        content = decode(text.encode("utf-8", "replace"), name)
        if _is_config(content):
            return _config(text, content, name)
        if isinstance(content, dict) and "at_peak" in content:
            return _trace(text, name)
        if isinstance(content, dict) and "backward_peak" in content:
            return _answer("measurement", dots=read_measurement(text, name))
    if _is_lengths(start, name):
        return _lengths(text, name)
    return _job(text, name, others or {}, flags or {})


def snapshot(path: str, device: int = 0) -> dict[str, Any]:
    """Return the diagnosis of a snapshot of PyTorch's allocator as plain values [bytes]. device: index of the GPU in it

    The pickle is read without classes or functions, so none of it runs. Raises `ConfigError` for what is no snapshot.
    """

    with Path(path).open("rb") as file:
        start = file.read(4096)
    # A trace of a large model is larger than what is handed in as text.
    if start.startswith(b"{"):
        return _document(Path(path))
    if not start.startswith(PICKLE):
        _too_long(Path(path), b"\0" not in start)
    try:
        diagnosis = PYTORCH.of_snapshot(Path(path), device)
    except ConfigError as error:
        # The path where the server keeps it means nothing to the user.
        raise ConfigError(str(error).replace(f"{path}: ", "")) from None
    return _answer("snapshot", diagnosis.verdict, why=diagnosis.to_dict())


def _answer(kind: str, message: str = "", **more: Any) -> dict[str, Any]:
    """An answer without flags."""
    return {"kind": kind, "flags": {}, "unread": [], "message": message, **more}


def _is_config(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and "model_family" not in content
        and any(key in content for key in JOB_FILES.CONFIG_KEYS)
    )


def _too_long(path: Path, is_text: bool) -> NoReturn:
    """Refuse what is handed in as a snapshot for its size, and is none."""
    refuse(not is_text, BINARY)
    size = path.stat().st_size / 1e6
    raise ConfigError(
        f"is {size:.1f} MB of text; a job file has some kB, and of a log the lines of the error are enough"
    )


def _document(path: Path) -> dict[str, Any]:
    refuse(path.stat().st_size > LARGEST_DOCUMENT, f"is larger than {LARGEST_DOCUMENT // 1_000_000} MB")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(BINARY) from None
    if '"at_peak"' in content:
        return _trace(content, "the document")
    if '"backward_peak"' not in content:
        if len(content) <= LARGEST_CONFIG and _is_config(decode(content.encode(), "the document")):
            size = f"{len(content) / 1e6:.1f} MB"
            raise ConfigError(f"is a config.json of {size}; one has some kB, and at most 3 MB here")
        refuse(
            '"nbformat"' in content,
            f"is a notebook of {len(content) / 1e6:.1f} MB; clear its outputs, and drop it again",
        )
        _too_long(path, True)
    return _answer("measurement", dots=read_measurement(content, "the document"))


def _bytes(content: str, name: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError("is not base64", file=name) from None


def _pickled(raw: bytes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="loadgauge-") as folder:
        file = Path(folder) / "snapshot"
        file.write_bytes(raw)
        return snapshot(str(file))


def _oom(text: str) -> dict[str, Any]:
    diagnosis = PYTORCH.answer(text)
    return _answer("oom", diagnosis.verdict, why=diagnosis.to_dict())


def _trace(text: str, name: str) -> dict[str, Any]:
    from loadgauge.core.base.optional_deps import needs_torch

    needs_torch("why")

    try:
        trace = msgspec.json.decode(text, type=PYTORCH.Trace)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"is no trace: {error}", file=name) from None
    trace_read = PYTORCH.of_recording(trace, again=False)
    return _answer("trace", trace_read.verdict, why=trace_read.to_dict(), dots=read_trace(text, name))


def _config(text: str, config: dict[str, Any], name: str) -> dict[str, Any]:
    try:
        spec = from_dict(config, name, own_name(name))
    except NotModelled as error:
        return _to_capture(text, config, name, error)
    message = f"{spec.name}: {spec.model_type}, {spec.num_hidden_layers} layers"
    return _answer("config", message, model=text, name=name) | {"unread": list(spec.unused_keys)}


def _to_capture(text: str, config: dict[str, Any], name: str, unread: NotModelled) -> dict[str, Any]:
    """The answer for a config that no family reads: it is captured from its own code. Raises `ConfigError` where it cannot be."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise unread
    try:
        needs_capture()
    except ConfigError as error:
        raise ConfigError(f"no family here reads {kind[:40]!r}; {error}", file=name) from None
    if not PYTORCH.may_be_known(kind):
        own = "; its own code (auto_map) is not run" if config.get("auto_map") else ""
        raise ConfigError(f"no family here reads {kind[:40]!r}; transformers has no model of that type{own}", file=name)
    message = f"{kind}: no family here reads it; it is captured from its own code"
    parts = [config, *(part for part in (config.get("text_config"),) if isinstance(part, dict))]
    stated = (part.get(key) for part in parts for key in LONGEST)
    longest = next((size for size in stated if isinstance(size, int) and size > 0), None)
    return _answer("config", message, model=text, name=name, longest=longest)


# -- lengths of sequences ----------------------------------------------------------------------------------------------


def _is_lengths(start: str, name: str) -> bool:
    """Return whether a text is numbers and little else: a list, one a line, or a table with a column of that name."""
    first = start.split("\n", 1)[0].lower()
    if Path(name).suffix.lower() in (".csv", ".jsonl") or re.match(r"\[\s*-?\d", start):
        return True
    return all(word.strip().isdecimal() for word in first.strip().split(",")) if first.strip() else False


def _lengths(text: str, name: str) -> dict[str, Any]:
    from loadgauge.core.base.lengths import Lengths

    with tempfile.TemporaryDirectory(prefix="loadgauge-") as folder:
        file = Path(folder) / "lengths"
        file.write_text(text, encoding="utf-8")
        try:
            lengths = Lengths.from_file(file)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(file), name)) from None
    counts = [end - start for start, end in itertools.pairwise((0, *lengths.cumulative))]
    histogram = {str(length): count for length, count in zip(lengths.values, counts, strict=True)}
    message = f"lengths of sequences: mean {lengths.mean:,.0f}, longest {lengths.longest:,} tokens"
    return _answer("lengths", message, clears=["seq-len"], lengths=json.dumps(histogram), name=name)


# -- job files ---------------------------------------------------------------------------------------------------------


def _job(text: str, name: str, others: dict[str, str], flags: dict[str, str]) -> dict[str, Any]:
    """Read a job file of another tool. Files that it names are not read from disk: they must have been dropped too."""
    if len(text.encode("utf-8", "replace")) > JOB_FILES.largest(name):
        raise ConfigError(f"is larger than {JOB_FILES.largest(name) // 1000} kB; a job file has some kB", file=name)
    chosen = {
        field: value for field, value in JOB_FILES.flags_given(Job.of("", flags)).items() if field in JOB_FILES.FIELDS
    }
    jobs, missing = [JOB_FILES.read(text, file=name, alone=True, given=chosen)], []
    for other in JOB_FILES.named_documents(text, name):
        beside = plain_name(other)
        if beside in others:
            jobs.append(JOB_FILES.read(others[beside], "deepspeed", file=beside, alone=True, given=chosen))
        else:
            missing.append(
                f"it names {beside}, which says more of the run: drop that file too, and then this one again"
            )
    job, extra = JOB_FILES.combine(jobs, chosen)
    spec, model, remark = _model(jobs[0])
    asked = {
        key.replace("_", "-"): "true" if value is True else str(value)
        for key, value in JOB_FILES.flags_given(JOB_FILES.fill_in(job, extra, spec)).items()
        if value is not False
    }
    answer: dict[str, Any] = {
        "kind": "deepspeed" if jobs[0].dialect == "deepspeed" else "job",
        "dialect": jobs[0].dialect,
        "flags": asked,
        "unread": [key for file in jobs for key in file.unread],
        "message": "; ".join([*(JOB_FILES.note(file) for file in jobs), *([remark] if remark else []), *missing]),
        "name": name,
    }
    if extra.config is not None:
        answer.update(model=json.dumps(extra.config), name=f"{Path(name).stem}.json")
    elif model:
        asked["model"] = model
    return answer


def _model(file: JobFile) -> tuple[ModelSpec | None, str, str]:
    """The model whose sizes a job file states or whose name is in the catalogue, its name, and a remark."""
    if file.extra.config is not None:
        return from_dict(file.extra.config, file.file, own_name(file.file)), "", ""
    name = file.job.model
    if not name:
        return None, "", "it names no model: choose one, or drop its config.json"
    try:
        return catalogued(name), catalogued(name).name, ""
    except Error:
        similar = JOB_FILES.find_alike(name)
    shown = plain_name(name) if os.sep in name else name
    if similar is None:
        return None, "", f"its model {shown} is not in the catalogue: choose one, or drop its config.json"
    return catalogued(similar), similar, f"its model {shown} is taken for {similar}"
