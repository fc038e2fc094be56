"""Writes `data/runs/*.jsonl` of the package from the tables in `raw`; with `--check` says whether they agree.

    python tools/published_runs/convert.py [--check]
    python tools/published_runs/convert.py runs.csv > runs.jsonl     # one's own table, in the columns of README.md

A source in another form needs a reader: a function from a path to `SourceRows`, and a line in `SOURCES`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from loadgauge.evidence.published.rows import row_of
from loadgauge.evidence.published.source_rows import SourceRow, SourceRows, read
from published_runs.tables import RAW, read_memory

PACKAGE = Path(__file__).parents[2] / "src" / "loadgauge" / "data" / "runs"
SOURCES: dict[str, tuple[tuple[str, Callable[[Path], SourceRows]], ...]] = {
    "throughput.jsonl": (("throughput.csv", read),),
    "memory.jsonl": (("memory.csv", read_memory),),
}
"""For each file of the package the files it is made of, and what reads them."""


def lines(rows: Iterable[SourceRow]) -> str:
    """The package's rows, one a line."""
    return "".join(f"{msgspec.json.encode(row_of(row)).decode()}\n" for row in rows)


def made(name: str) -> str:
    """What a file of the package should hold."""
    return "".join(lines(reader(RAW / file).rows) for file, reader in SOURCES[name])


def main(arguments: Sequence[str]) -> int:
    """0, or 1 where `--check` found a file that is not what the tables make of it."""
    files = [name for name in arguments if name != "--check"]
    for name in files:
        source = read(Path(name))
        print(lines(source.rows), end="")
        for row in source.rejected:
            print(f"line {row.line}: {row.id}: {row.reason}", file=sys.stderr)
    if files:
        return 0
    stale = []
    for name in SOURCES:
        text, place = made(name), PACKAGE / name
        if "--check" not in arguments:
            place.write_text(text, encoding="utf-8")
        elif place.read_text(encoding="utf-8") != text:
            stale.append(name)
    for name in stale:
        print(f"{name} is not what tools/published_runs makes of its tables", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
