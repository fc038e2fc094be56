"""Predictions compared with published runs, some rows at a time: all of them take about a minute.

Each row has what ran in words and as flags, where its source is, and where it is far off the cause that is known.
"""

from __future__ import annotations

import json
import re
import time
from functools import cache
from typing import TYPE_CHECKING, Any

from loadgauge.core.base import Door, read_data
from loadgauge.core.definitions.training.software import software

if TYPE_CHECKING:
    from loadgauge.evidence.validate.runs import Run
    from loadgauge.evidence.validate.validate import Record

EVIDENCE = Door("evidence")

FIRST, SECONDS = 0.3, 1.0
"""Seconds of work for the first answer, and for each later one."""
STRIDE = 617
"""Step through the rows, so that the first ones cover every source."""


class Done:
    """The records so far, and the number of runs they cover."""

    records: tuple[Record, ...] = ()
    runs = 0


@cache
def order() -> tuple[Run, ...]:
    """Return the published runs, mixed so that the first rows are of many sources."""
    runs = EVIDENCE.published().runs
    stride = STRIDE if len(runs) % STRIDE else STRIDE + 2
    return tuple(runs[index * stride % len(runs)] for index in range(len(runs)))


REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)@([\w.-]+)(?::([\w./-]*[\w/-]))?")
PAPER = re.compile(r"arXiv[: ](\d{4}\.\d{4,5})")


def link(source: str) -> str:
    """Return where a source is, or nothing.

    >>> link("NVIDIA/NeMo@v2.0.0:docs/performance_summary.md / Finetuning")
    'https://github.com/NVIDIA/NeMo/blob/v2.0.0/docs/performance_summary.md'
    >>> link("arXiv 2401.10241 Table 4"), link("a talk")
    ('https://arxiv.org/abs/2401.10241', '')
    """
    paper = PAPER.match(source)
    if paper is not None:
        return f"https://arxiv.org/abs/{paper[1]}"
    match = REPOSITORY.match(source)
    if match is None:
        return ""
    return f"https://github.com/{match[1]}/{'blob' if match[3] else 'tree'}/{match[2]}/{match[3] or ''}"


def name(source: str) -> str:
    """Return a source's name in a legend: the repository or the paper.

    >>> name("NVIDIA/NeMo@v2.0.0:docs/performance_summary.md / Finetuning"), name("arXiv 2401.10241 Table 4")
    ('NVIDIA/NeMo', 'arXiv 2401.10241')
    """
    paper, match = PAPER.match(source), REPOSITORY.match(source)
    return f"arXiv {paper[1]}" if paper is not None else match[1] if match is not None else source[:40]


@cache
def _details() -> dict[str, dict[str, object]]:
    why = json.loads(read_data("runs/causes.json"))
    details: dict[str, dict[str, object]] = {}
    for run in EVIDENCE.published().runs:
        cause = why["rows"].get(run.id, "")
        details[run.id] = {
            "name": name(run.source),
            "where": run.source,
            "link": link(run.source),
            "model": run.model,
            "hardware": run.hardware,
            "layout": run.layout,
            "flags": "" if run.job is None else run.job.flags(),
            "cause": why["causes"].get(cause, ""),
        }
    return details


def about(run: str) -> dict[str, object]:
    """Return what is shown of a run beside its numbers, by its id."""
    return _details().get(run, {})


def some(since: int = 0) -> dict[str, Any]:
    """Validate more runs for about a second; return the records from number `since` on, the progress and the summary."""
    runs = order()
    end = time.perf_counter() + (SECONDS if Done.runs else FIRST)
    while Done.runs < len(runs) and time.perf_counter() < end:
        Done.records += EVIDENCE.validate(runs[Done.runs : Done.runs + 1])
        Done.runs += 1
    start = since if since <= len(Done.records) else 0
    spread = software()
    return {
        "rows": [record.to_dict() | about(record.id) for record in Done.records[start:]],
        "left_out": {"median": spread.median, "p90": spread.most, "covered": spread.covered},
        "since": start,
        "done": Done.runs,
        "of": len(runs),
        "complete": Done.runs == len(runs),
        "summary": EVIDENCE.summary(Done.records),
    }
