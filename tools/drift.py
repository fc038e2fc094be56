"""What moved: the same jobs predicted by two trees, as a table by part and cause, and accuracy on measured runs beside it.

    python tools/drift.py BASE                   2,000 jobs: the commit BASE against this tree, as it lies on disk
    python tools/drift.py BASE --jobs 300 --accuracy

Jobs are those of `random_jobs.py` with the models, GPUs and files of BASE. A figure has moved where it differs by more than
0.1 %. Cause: the flag, value or model that tells the jobs that moved from the others best, with how many of either have it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from compare_answers import differences, entry_point, names_of, output
from random_jobs import job, makers

HERE = Path(__file__).absolute().parents[1]
MOVED = 1e-3
PLAIN = (
    r"^memory\.(total|low|high|verdict|parts\.|phases)", r"^time\.(step|low|high|mfu|parts\.|days|cost)",
    r"^(total|capacity|verdict)$",
    r"^(serving|rollout|phases|roles)\b", r"^flops\.", r"^model\.params", r"^error$",
)  # fmt: skip
"""Keys of the documents that the table has; what else moves is counted under its first two words."""


class Row(NamedTuple):
    """A figure that moved. jobs: of how many that have it; middle, most: relative; cause: as in the text above"""

    figure: str
    jobs: int
    of: int
    middle: float
    most: float
    cause: str
    example: str


def features(line: str) -> set[str]:
    """Words by which jobs are told apart: the command, the model, each flag, and each flag with its value.

    >>> sorted(features("estimate gpt2 --tp 2 --qlora"))
    ['--qlora', '--tp', '--tp 2', 'estimate', 'estimate gpt2']
    """
    command, *words = shlex.split(line)
    found, last = {command}, ""
    for word in words:
        if word.startswith("--"):
            last = word
            found.add(word)
        elif last:
            found.add(f"{last} {word}")
            last = ""
        else:
            found.add(f"{command} {word}")
    return found


def cause(moved: Iterable[str], others: Iterable[str]) -> str:
    """Name the feature that jobs that moved have most often more than the others.

    >>> cause(["estimate a --tp 2", "estimate b --tp 2"], ["estimate a", "estimate b"])
    '--tp: 2 of 2 that moved, 0 of 2 that did not'
    >>> cause(["estimate a", "estimate b"], [])
    'all'
    """
    with_it, without = [features(line) for line in moved], [features(line) for line in others]
    if not without:
        return "all"
    here, there = (Counter(name for each in group for name in each) for group in (with_it, without))
    best = max(sorted(here, key=len), key=lambda name: here[name] / len(with_it) - there[name] / len(without))
    return f"{best}: {here[best]} of {len(with_it)} that moved, {there[best]} of {len(without)} that did not"


def figure_of(key: str) -> str:
    """A key of a document as a row of the table: without places in lists; what is not in `PLAIN` by its first two words."""
    plain = re.sub(r"\[\d+\]", "", key)
    return plain if any(re.search(pattern, plain) for pattern in PLAIN) else ".".join(plain.split(".")[:2])


def keys(document: Any, where: str = "") -> Iterator[str]:
    """Every figure that a document has."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield from keys(value, f"{where}.{name}" if where else name)
    else:
        yield figure_of(where)


def table(before: dict[str, Any], after: dict[str, Any], tolerance: float = MOVED) -> list[Row]:
    """The figures that moved, those of most jobs first. before, after: documents by job

    >>> (row,) = table({"estimate a": {"total": 100.0}}, {"estimate a": {"total": 101.0}})
    >>> row.figure, row.jobs, row.of, round(row.most, 3)
    ('total', 1, 1, 0.01)
    """
    moved: dict[str, dict[str, float]] = {}
    have: dict[str, set[str]] = {}
    for line, document in before.items():
        for key in set(keys(document)):
            have.setdefault(key, set()).add(line)
        for one in differences(document, after.get(line), tolerance, line):
            worst = moved.setdefault(figure_of(one.where), {})
            worst[line] = max(worst.get(line, 0.0), 1.0 if one.relative is None else one.relative)
    rows = []
    for figure, sizes in moved.items():
        others = have.get(figure, set()) - sizes.keys()
        example = max(sizes, key=sizes.__getitem__)
        middle, most = statistics.median(sizes.values()), sizes[example]
        rows.append(Row(figure, len(sizes), len(sizes) + len(others), middle, most, cause(sizes, others), example))
    return sorted(rows, key=lambda row: (-row.jobs, row.figure))


def text(rows: list[Row], jobs: int) -> str:
    """The table as Markdown."""
    if not rows:
        return f"{jobs:,} jobs: nothing moved by more than {MOVED:.1%}."
    head = f"{jobs:,} jobs; what moved by more than {MOVED:.1%} (100 %: a word, or there in one tree alone):\n\n"
    lines = ["| figure | jobs | median | most | cause | the job that moved most |", "|---|---|---|---|---|---|"]
    for row in rows:
        example = row.example.replace("|", "\\|")
        lines.append(
            f"| {row.figure} | {row.jobs} of {row.of} | {row.middle:.2%} | {row.most:.2%} | {row.cause} | `{example}` |"
        )
    return head + "\n".join(lines)


# -- the trees ---------------------------------------------------------------------------------------------------------


def document_of(line: str) -> Any:
    """What the tree on the path answers to a job: its JSON document, or what it refuses."""
    _, out, err = output(entry_point(), [*shlex.split(line), "--json"])
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(out)
    return {"error": " ".join(err.split())}


def write_jobs(folder: Path, number: int, seed: int) -> None:
    """Write random estimates that the tree on the path answers, a line each, with its answers."""
    run, pick, done = entry_point(), random.Random(seed), dict[str, Any]()
    with contextlib.chdir(folder):
        names = names_of(run, folder, pick)._replace(torch=False)
        among = makers(names, "estimate")
        for _ in range(20 * number):
            if len(done) == number:
                break
            (maker,) = pick.choices(among, [maker.weight for maker in among])
            words = [
                word for word in shlex.split(job(pick, names, maker)) if word not in ("--brief", "--csv", "--full")
            ]
            line = shlex.join(words)
            if line not in done and "error" not in (found := document_of(line)):
                done[line] = found
    (folder / "before.json").write_text(json.dumps(done), encoding="utf-8")


def write_answers(folder: Path) -> None:
    """Write what the tree on the path answers to the same jobs."""
    before = json.loads((folder / "before.json").read_text(encoding="utf-8"))
    with contextlib.chdir(folder):
        done = {line: document_of(line) for line in before}
    (folder / "after.json").write_text(json.dumps(done), encoding="utf-8")


def accuracy(found: Any) -> str:
    """The summary of `validate --json` in a line."""
    parts = []
    for quantity, summary in found["summary"].items():
        each = summary["all"]
        parts.append(f"{quantity} {each['median']:.2%} off in the median, {each['p90']:.2%} at the 90th percentile")
    return "; ".join(parts)


def against(base: str, number: int, seed: int, measured: bool) -> str:
    """Predict the jobs by a commit and by this tree; the table, and with `measured` both trees' accuracy."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, old = Path(temporary, "jobs"), Path(temporary, "tree")
        folder.mkdir()
        old.mkdir()
        packed = subprocess.run(["git", "archive", base], cwd=HERE, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x"], cwd=old, input=packed, check=True)
        settings = {name: value for name, value in os.environ.items() if not name.startswith(("LOADGAUGE_", "COLUMNS"))}
        settings |= {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0", "XDG_CACHE_HOME": f"{temporary}/cache"}

        def run(tree: Path, *words: object) -> str:
            environment = settings | {"PYTHONPATH": str(tree / "src")}
            done = subprocess.run(
                [sys.executable, *map(str, words)], env=environment, check=True, stdout=subprocess.PIPE, text=True
            )
            return done.stdout

        run(old, __file__, "--write", folder, "--jobs", number, "--seed", seed)
        run(HERE, __file__, "--answer", folder)
        before, after = (json.loads((folder / f"{name}.json").read_text()) for name in ("before", "after"))
        told = text(table(before, after), len(before))
        if measured:
            each = [json.loads(run(tree, "-m", "loadgauge", "validate", "--json")) for tree in (old, HERE)]
            told += f"\n\nMeasured runs, before: {accuracy(each[0])}\nMeasured runs, after: {accuracy(each[1])}"
        return told


def main() -> None:
    """Where the script begins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", default="HEAD", help="a commit")
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accuracy", action="store_true", help="measured runs beside it (some minutes)")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_jobs(options.write, options.jobs, options.seed)
    elif options.answer:
        write_answers(options.answer)
    else:
        print(against(options.base, options.jobs, options.seed, options.accuracy))


if __name__ == "__main__":
    main()
