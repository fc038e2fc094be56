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
from typing import Any

import msgspec

from loadgauge.errors import ConfigError, Error
from loadgauge.families.catalogue import model as catalogued
from loadgauge.families.hf import LARGEST_FILE as LARGEST_CONFIG
from loadgauge.families.hf import decode, from_dict
from loadgauge.formats.dialects import dialect, recognise
from loadgauge.formats.exchange import BESIDE, LARGEST_FILE, JobFile, _syntax, combine, document, read
from loadgauge.formats.facts import FIELDS
from loadgauge.formats.table import Keys
from loadgauge.resolve.job_file import fill_in, find_alike, flags_given, note
from loadgauge.spec.model import ModelSpec
from loadgauge.web.traces import read_measurement, read_trace
from loadgauge.web.uploads import own_name, plain_name

CONFIG_KEYS = ("model_type", "architectures", "hidden_size", "text_config")
"""Keys of which a Hugging Face `config.json` has at least one."""
LARGEST_DOCUMENT = 200_000_000
"""Largest trace or measurement [bytes]; a trace of 32 layers has a few MB."""
PICKLE = b"\x80"
"""First byte of a pickle."""


def text(name: str, text: str = "", content: str = "", others: dict[str, str] | None = None) -> dict[str, Any]:
    """Read a dropped file: flags, or why memory ran out. Raises `ConfigError`. content: base64, instead of `text`.

    others: texts of files dropped earlier, by name, because a job file may name one of them

    kind: config, job, deepspeed, oom, trace, measurement, lengths or snapshot; dots: what goes back with the page's next
    questions, to be drawn; model: the config that is to be kept, where there is one
    """
    name = plain_name(name)
    if content:
        raw = _bytes(content, name)
        if raw.startswith(PICKLE):
            return _pickled(raw)
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ConfigError("is neither text (UTF-8) nor a snapshot of PyTorch's allocator", file=name) from None
    text = text.removeprefix("\ufeff")
    start = text.lstrip()
    if not start:
        raise ConfigError("is empty", file=name)
    if not start.startswith("{") and "ried to allocate" in text:
        return _oom(text)
    if start.startswith("{"):
        found = decode(text.encode("utf-8", "replace"), name)
        if isinstance(found, dict) and any(key in found for key in CONFIG_KEYS):
            return _config(text, found, name)
        if isinstance(found, dict) and "at_peak" in found:
            return _trace(text, name)
        if isinstance(found, dict) and "backward_peak" in found:
            return _measured(text, name)
    if _is_lengths(start, name):
        return _lengths(text, name)
    return _job(text, name, others or {})


def snapshot(path: str, device: int = 0) -> dict[str, Any]:
    """Diagnose a snapshot of PyTorch's allocator. The pickle is read without classes or functions, so none of it runs."""
    from loadgauge.oom.diagnose import of_file

    with Path(path).open("rb") as file:
        # A trace of a large model is larger than what is handed in as text.
        if file.read(1) == b"{":
            return _document(Path(path))
    try:
        found, why = of_file(Path(path), device)
    except ConfigError as error:
        # Where the server keeps it says nothing to the user.
        raise ConfigError(str(error).replace(f"{path}: ", "")) from None
    causes = [msgspec.to_builtins(cause) for cause in why.causes]
    return {
        "kind": "snapshot",
        "flags": {},
        "unread": [],
        "message": why.causes[0].name if why.causes else "nothing stands out",
        "why": {**msgspec.to_builtins(found), "causes": causes, "parts": why.parts},
    }


def _document(path: Path) -> dict[str, Any]:
    if path.stat().st_size > LARGEST_DOCUMENT:
        raise ConfigError(f"is larger than {LARGEST_DOCUMENT // 1_000_000} MB")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError("is neither text (UTF-8) nor a snapshot of PyTorch's allocator") from None
    if '"at_peak"' not in content and '"backward_peak"' not in content and len(content) <= LARGEST_CONFIG:
        found = decode(content.encode(), "the document")
        if isinstance(found, dict) and any(key in found for key in CONFIG_KEYS):
            raise ConfigError(
                f"is a config.json of {len(content) / 1e6:.1f} MB; one has some kB, and at most 3 MB here"
            )
    return _trace(content, "the document") if '"at_peak"' in content else _measured(content, "the document")


def _bytes(content: str, name: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError("is not base64", file=name) from None


def _pickled(raw: bytes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="loadgauge-") as folder:
        place = Path(folder) / "snapshot"
        place.write_bytes(raw)
        return snapshot(str(place))


def _oom(text: str) -> dict[str, Any]:
    from loadgauge.oom.message import REMEDIES, parse

    found = parse(text)
    why = {**msgspec.structs.asdict(found), "cause": found.cause}
    return {"kind": "oom", "flags": {}, "unread": [], "message": f"{found.cause}: {REMEDIES[found.cause]}", "why": why}


def _trace(text: str, name: str) -> dict[str, Any]:
    from loadgauge.optional_deps import needs_torch

    needs_torch("why")
    from loadgauge.oom.diagnose import of_trace
    from loadgauge.trace.trace import Trace

    try:
        trace = msgspec.json.decode(text, type=Trace)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"is no trace: {error}", file=name) from None
    found = of_trace(trace)
    why = {
        "causes": [msgspec.to_builtins(cause) for cause in found.causes], "parts": found.parts, "peak": trace.peak.total
    }  # fmt: skip
    message = found.causes[0].name if found.causes else "nothing stands out"
    return {"kind": "trace", "flags": {}, "unread": [], "message": message, "why": why, "dots": read_trace(text, name)}


def _measured(text: str, name: str) -> dict[str, Any]:
    found = read_measurement(text, name)
    return {"kind": "measurement", "flags": {}, "unread": [], "message": "", "dots": found}


def _config(text: str, config: dict[str, Any], name: str) -> dict[str, Any]:
    spec = from_dict(config, name, own_name(name))
    unread = [f"{key}" for key in spec.unused_keys]
    return {
        "kind": "config", "flags": {}, "clears": [], "unread": unread, "model": text, "name": name,
        "message": f"{spec.name}: {spec.model_type}, {spec.num_hidden_layers} layers",
    }  # fmt: skip


# -- lengths of sequences ----------------------------------------------------------------------------------------------


def _is_lengths(start: str, name: str) -> bool:
    """Whether a text is numbers and little else: a list, one a line, or a table with a column of that name."""
    first = start.split("\n", 1)[0].lower()
    if Path(name).suffix.lower() in (".csv", ".jsonl") or re.match(r"\[\s*-?\d", start):
        return True
    return all(word.strip().isdecimal() for word in first.strip().split(",")) if first.strip() else False


def _lengths(text: str, name: str) -> dict[str, Any]:
    from loadgauge.lengths import Lengths

    with tempfile.TemporaryDirectory(prefix="loadgauge-") as folder:
        place = Path(folder) / "lengths"
        place.write_text(text, encoding="utf-8")
        try:
            found = Lengths.from_file(place)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(place), name)) from None
    counts = [one - before for before, one in itertools.pairwise((0, *found.cumulative))]
    histogram = {str(length): count for length, count in zip(found.values, counts, strict=True)}
    return {
        "kind": "lengths", "flags": {}, "clears": ["seq-len"], "unread": [], "lengths": json.dumps(histogram), "name": name,
        "message": f"lengths of sequences: mean {found.mean:,.0f}, longest {found.longest:,} tokens",
    }  # fmt: skip


# -- job files ---------------------------------------------------------------------------------------------------------


def _job(text: str, name: str, others: dict[str, str]) -> dict[str, Any]:
    """Read a job file of another tool. Files that it names are not read from disk: they must have been dropped too."""
    if len(text.encode("utf-8", "replace")) > LARGEST_FILE:
        raise ConfigError(f"is larger than {LARGEST_FILE // 1000} kB; a job file has some kB", file=name)
    jobs, missing = [read(text, file=name, alone=True)], []
    for other in _named(text, name):
        beside = plain_name(other)
        if beside in others:
            jobs.append(read(others[beside], "deepspeed", file=beside, alone=True))
        else:
            missing.append(
                f"it names {beside}, which says more of the run: drop that file too, and then this one again"
            )
    job, extra = combine(jobs)
    spec, model, remark = _model(jobs[0])
    flags = {
        key.replace("_", "-"): "true" if value is True else str(value)
        for key, value in flags_given(fill_in(job, extra, spec)).items()
        if value is not False
    }
    lines = [*(note(file) for file in jobs), *([remark] if remark else []), *missing]
    found: dict[str, Any] = {
        "kind": "deepspeed" if jobs[0].dialect == "deepspeed" else "job",
        "dialect": jobs[0].dialect,
        "flags": flags,
        "clears": [field.replace("_", "-") for field in FIELDS if field != "model"],
        "unread": [key for file in jobs for key in file.unread],
        "message": "; ".join(lines),
        "name": name,
    }
    if extra.config is not None:
        found.update(model=json.dumps(extra.config), name=f"{Path(name).stem}.json")
    elif model:
        flags["model"] = model
    return found


def _named(text: str, name: str) -> list[str]:
    """The files that a job file names."""
    syntax = _syntax(text, name)
    chosen = recognise(document(text, syntax, None, name))
    if chosen is None and syntax == "yaml":
        chosen = recognise(document(text, syntax, dialect("megatron"), name))
    if chosen is None:
        return []
    keys = Keys(document(text, syntax, chosen, name), name, chosen.auto)
    values = [keys.raw(key) for key in BESIDE]
    return [value for value in values if isinstance(value, str) and value.endswith(".json")]


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
        similar = find_alike(name)
    shown = plain_name(name) if os.sep in name else name
    if similar is None:
        return None, "", f"its model {shown} is not in the catalogue: choose one, or drop its config.json"
    return catalogued(similar), similar, f"its model {shown} is taken for {similar}"
