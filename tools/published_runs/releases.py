"""Rows of a publication that repeats its table with every release: what a release's row leaves out, another release states.

A row without a recipe takes that of the same model, hardware and layout in the nearest release before it, else after it, of the
same publication. Only what was chosen is taken over; nothing that was measured is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from published_runs.source_rows import SourceRow

RECIPE = ("sharding", "sequence_parallel", "recompute", "optimizer", "other_flags")
"""Columns that a recipe fills."""
TABLE = re.compile(r"performance-summary\S* ## (\d\d)\.(\d\d)(?:\.(\d\d))?")
"""NVIDIA's tables of performance, and the release each is of."""
TAKEN = "recipe of the release"
"""Words of the notes of a row that took a recipe over."""


def release(row: SourceRow) -> tuple[int, ...] | None:
    """Return the release whose table a row is from, or None where it is from no such table.

    >>> release(SourceRow(id="x", source="a@1:docs/performance-summary-archive.md ## 26.06.01 / Pre-Training"))
    (26, 6, 1)
    """
    found = TABLE.search(row.source)
    return None if found is None else tuple(int(part or 0) for part in found.groups())


def _alike(row: SourceRow) -> tuple[object, ...]:
    degrees = (row.tp, row.pp, row.vpp or 1, row.cp or 1, row.ep or 1)
    return (row.task, row.model, row.hardware, row.gpus, row.precision, *degrees, row.micro_batch, row.seq_len)


def with_recipes(rows: Iterable[SourceRow]) -> tuple[SourceRow, ...]:
    """Return the rows, each without a recipe with that of another release.

    >>> table = "a@1:docs/performance-summary.md ## "
    >>> old = SourceRow(id="a", source=table + "26.06", model="m", tp=2, sharding="zero1", other_flags="dropless; graphs")
    >>> new = SourceRow(id="b", source=table + "26.08", model="m", tp=2, other_flags="dropless")
    >>> _, made = with_recipes((old, new, ))
    >>> made.sharding, made.other_flags, made.notes
    ('zero1', 'dropless; graphs', 'recipe of the release 26.6')
    """
    listed = tuple(rows)
    known: dict[tuple[object, ...], dict[tuple[int, ...], SourceRow]] = {}
    for row in listed:
        if (of := release(row)) is not None and row.sharding:
            known.setdefault(_alike(row), {})[of] = row
    return tuple(_with(row, known.get(_alike(row), {})) for row in listed)


def _with(row: SourceRow, recipes: dict[tuple[int, ...], SourceRow]) -> SourceRow:
    of = release(row)
    if of is None or row.sharding or not recipes:
        return row
    before = [other for other in recipes if other <= of]
    nearest = max(before) if before else min(recipes)
    words = f"{TAKEN} {'.'.join(map(str, nearest)).removesuffix('.0')}"
    taken = {name: getattr(recipes[nearest], name) for name in RECIPE}
    return msgspec.structs.replace(row, **taken, notes="; ".join(filter(None, (row.notes, words))))
