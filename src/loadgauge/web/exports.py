"""The run as a job file of another tool."""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.formats.dialects import FILES, dialect
from loadgauge.resolve.export import FLAGS, export
from loadgauge.web.flags import command_line, job_of, named
from loadgauge.web.handlers import Export
from loadgauge.web.uploads import Uploads

ENDINGS = {"json": "json", "yaml": "yaml", "toml": "toml", "argv": "sh"}
NAMES = {"deepspeed": "ds_config"}
"""What a tool's own documentation calls its file."""


def exported(question: Export, uploads: Uploads) -> dict[str, Any]:
    """A file's name and text, and what the tool's words cannot say."""
    given = job_of(question.flags, uploads)
    if question.dialect == FLAGS:
        return {
            "filename": "loadgauge.sh",
            "text": f"{command_line(given, given.estimate(), uploads)}\n",
            "not_expressed": [],
        }
    if question.dialect not in FILES:
        raise ConfigError(f"unknown {question.dialect[:40]!r} (known: {', '.join(FILES)})", key="dialect")
    given = msgspec.structs.replace(given, job=named(given.job, uploads))
    written = export(given, question.dialect)
    ending = ENDINGS[dialect(question.dialect).syntaxes[0]]
    name = NAMES.get(question.dialect, question.dialect)
    return {"filename": f"{name}.{ending}", "text": written.text, "not_expressed": list(written.left_out)}
