"""Do two trees of this project give the same answers? Runs the same random jobs on both and reports every difference.

    python tools/compare_answers.py trees OLD NEW --jobs 3000     both trees, and the differences
    python tools/compare_answers.py trees OLD NEW --only plan --seed 2 --keep FOLDER --ignore 'schema$'
    python tools/compare_answers.py jobs 3000 FOLDER              random jobs (FOLDER/jobs.txt) and what the tree on PYTHONPATH
                                                                  answers to them (FOLDER/before.jsonl)
    python tools/compare_answers.py answers FOLDER after.jsonl    what another tree answers to the same jobs
    python tools/compare_answers.py diff FOLDER/before.jsonl after.jsonl

A job is a command line (`random_jobs.py`); its answer is the JSON document, the lines on stdout and stderr, and the exit
code. The same seed and older tree give the same jobs: names of models, GPUs and job files are the older tree's. Only the
command line is used, so that trees whose modules stand elsewhere can be compared. Numbers are compared to the last bit,
unless --tolerance says otherwise; what a command says of its own wall-clock time is left out. Differences are listed by key of
the document, or by line of the text with # for its numbers (a bar and spaces between columns are drawn by numbers, and do not
count beside these). The exit code is 1 where anything differs.

Without PyTorch and transformers the jobs on captured models and on expressions are left out. Of jobs that the older tree
refuses, a tenth is kept: errors are compared too, but say little. 3,000 jobs take about ten minutes a tree.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import io
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from random_jobs import TOKENS, Names, job, makers, write_files

Run = Callable[[list[str]], int]
ENTRY_POINTS = ("loadgauge.core.command_line.main", "loadgauge.cli.main", "loadgauge.show.cli")
"""Modules with `run(arguments) -> exit code`, the newest first."""
KEPT = 0.1
"""Of the jobs that the older tree refuses, how many are kept."""
TRIES = 100
"""After so many jobs of a maker that are refused, or there already, it has no more."""
NO_JSON = {"--brief", "--csv", "--latex", "--markdown", "--export", "convert", "completion"}
"""Commands and flags beside which there is no JSON document."""
CLOCKS = (
    (r"(combinations searched: .*; )[\d,.]+ s\.", r"\1"),
    (r"(captured from its own code, )(kept from before|\d+ s)", r"\1"),
)
"""What texts say of the wall-clock time that an answer took, and what is left of it."""


def entry_point() -> Run:
    """The command line of the tree on the path."""
    for name in ENTRY_POINTS:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name).run  # type: ignore[no-any-return]
    raise SystemExit(f"none of {', '.join(ENTRY_POINTS)} can be imported; set PYTHONPATH to a tree's src")


def output(run: Run, words: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    return code, out.getvalue(), err.getvalue()


def answer(run: Run, line: str) -> dict[str, Any]:
    """The answer to one job: exit code, the lines of stdout and stderr, and the JSON document where there is one."""
    words = shlex.split(line)
    code, out, err = output(run, words)
    answered: dict[str, Any] = {"code": code, "out": timeless(out).splitlines(), "err": timeless(err).splitlines()}
    if NO_JSON.isdisjoint(words):
        code, out, err = output(run, [*words, "--json"])
        try:
            answered["json"] = document(json.loads(timeless(out)))
        except json.JSONDecodeError:
            answered["json"] = {"no document": " ".join(timeless(out + err).split())}
        answered["json_code"] = code
    return answered


def timeless(text: str) -> str:
    """A text without the wall-clock time that its answer took.

    >>> timeless("9 combinations searched: 8 valid, 7 fit; 1.2 s.")
    '9 combinations searched: 8 valid, 7 fit; '
    """
    for pattern, rest in CLOCKS:
        text = re.sub(pattern, rest, text)
    return text


def document(value: Any) -> Any:
    """A JSON document without the seconds that its searches took."""
    if isinstance(value, dict):
        searched = "evaluated" in value
        return {key: document(item) for key, item in value.items() if not (searched and key == "seconds")}
    return [document(item) for item in value] if isinstance(value, list) else value


# -- jobs -------------------------------------------------------------------------------------------------------------


def names_of(run: Run, folder: Path, pick: random.Random) -> Names:
    """What jobs may name of the tree on the path; writes the files that they read to the folder."""
    tree = Path(importlib.import_module("loadgauge").__file__ or "").parents[2]
    candidates, errors = write_files(tree, folder, pick)
    lists = {command: json.loads(output(run, [command, "--json"])[1]) for command in ("models", "gpus")}
    models, gpus = (sorted(_names(lists[command])) for command in ("models", "gpus"))
    help_lines = re.findall(
        r"^  ([a-z][a-z-]*(?:, [a-z-]+)*)  +\S", output(run, ["equation", "--help"])[1], re.MULTILINE
    )
    sources = re.search(r"there are: ([^)]*)\)", output(run, ["validate", "--source", "none"])[2])
    files = [file for file in candidates if output(run, ["convert", file, "--to", "flags"])[0] == 0]
    return Names(
        models,
        gpus,
        [name for line in help_lines for name in line.split(", ")],
        sources[1].split(", ") if sources else ["SM"],
        files,
        [file for file in files if output(run, ["check", file, "--memory", "80GiB", *TOKENS])[0] != 2],
        errors,
        all(importlib.util.find_spec(library) for library in ("torch", "transformers")),
    )


def _names(document: Any) -> list[str]:
    """The names in a catalogue's JSON document: a list, or a list in it, of names or of rows with a name or an id."""
    rows = (
        document if isinstance(document, list) else next(rows for rows in document.values() if isinstance(rows, list))
    )
    return [row if isinstance(row, str) else row.get("id") or row["name"] for row in rows]


def jobs(
    run: Run, names: Names, number: int, pick: random.Random, only: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """So many command lines, few of which the tree on the path refuses, with its answers."""
    among, made = makers(names, only), set[str]()
    while len(made) < number and among:
        (maker,) = pick.choices(among, [maker.weight for maker in among])
        for _ in range(TRIES):
            line = job(pick, names, maker)
            if line in made:
                continue
            answered = answer(run, line)
            if answered["code"] != 2 or pick.random() < KEPT:
                made.add(line)
                yield line, answered
                break
        else:
            among.remove(maker)


def write_jobs(folder: Path, number: int, seed: int, only: str) -> None:
    """Random jobs and their answers, in a folder with the files that they read."""
    run, pick = entry_point(), random.Random(seed)
    with contextlib.chdir(folder):
        names = names_of(run, folder, pick)
        if not names.torch:
            print("no PyTorch or transformers: captured models and saved expressions are not compared", file=sys.stderr)
        lines = _write(folder / "before.jsonl", jobs(run, names, number, pick, only))
    (folder / "jobs.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_answers(folder: Path, file: Path) -> None:
    """What the tree on the path answers to a folder's jobs."""
    run = entry_point()
    lines = (folder / "jobs.txt").read_text(encoding="utf-8").splitlines()
    with contextlib.chdir(folder):
        _write(file, ((line, answer(run, line)) for line in lines))


def _write(file: Path, answers: Iterator[tuple[str, dict[str, Any]]]) -> list[str]:
    """Write a JSON document a job, and return the jobs; says on stderr how long each command took."""
    took: dict[str, list[float]] = {}
    lines = []
    with file.open("w", encoding="utf-8") as stream:
        begun = time.perf_counter()
        for line, answered in answers:
            stream.write(json.dumps({"job": line, **answered}) + "\n")
            lines.append(line)
            now = time.perf_counter()
            took.setdefault(line.split()[0], []).append(now - begun)
            begun = now
    each = ", ".join(f"{len(spent)} {command} {sum(spent):.0f} s" for command, spent in took.items())
    print(f"{file.stem}: {each}", file=sys.stderr)
    return lines


# -- differences ------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Where two answers to one job differ, and how."""

    where: str
    before: Any
    after: Any
    relative: float | None
    job: str


def differences(before: Any, after: Any, tolerance: float, line: str, where: str = "") -> Iterator[Difference]:
    """Every value of a document that is not the same."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            inner = f"{where}.{key}" if where else key
            if key not in before or key not in after:
                yield Difference(inner, before.get(key, "-"), after.get(key, "-"), None, line)
            else:
                yield from differences(before[key], after[key], tolerance, line, inner)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (first, second) in enumerate(zip(before, after, strict=True)):
            yield from differences(first, second, tolerance, line, f"{where}[{index}]")
    elif _is_number(before) and _is_number(after):
        relative = _relative(before, after)
        if before != after and relative > tolerance:
            yield Difference(where, before, after, relative, line)
    elif before != after:
        yield Difference(where, before, after, None, line)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _relative(before: float, after: float) -> float:
    size = max(abs(before), abs(after))
    return abs(before - after) / size if size else 0.0


NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
DRAWN = r"[\s\u2500-\u259f]+"


def pattern(line: str) -> str:
    """A line of text with # for its numbers, and one space for spaces, rules and bars.

    >>> pattern("weights     0.23     9.1%   ▉   2 B per parameter")
    'weights # #% # B per parameter'
    """
    return re.sub(DRAWN, " ", re.sub(NUMBER, "#", line)).strip()


def text_differences(
    before: list[str], after: list[str], tolerance: float, line: str, where: str
) -> Iterator[Difference]:
    """Every line that is not the same: numbers in it, spaces, rules or bars alone, or the line itself."""
    if before == after:
        return
    old, new = ([pattern(line) for line in lines] for lines in (before, after))
    for tag, start, end, begin, stop in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        pairs = zip_longest(before[start:end], after[begin:stop], fillvalue="")
        for key, (first, second) in zip_longest(old[start:end], pairs):
            numbers = [re.findall(NUMBER, text) for text in (first, second)]
            if tag != "equal":
                yield Difference(f"{where}: {key or pattern(second)}", first or "-", second or "-", None, line)
            elif numbers[0] != numbers[1]:
                values = [[float(number.replace(",", "")) for number in each] for each in numbers]
                relative = max(map(_relative, *values))
                if relative > tolerance or not relative:  # not: they are written in another way
                    yield Difference(f"{where}: {key}", first, second, relative or None, line)
            elif first != second:
                yield Difference(f"{where}, spaces, rules or bars alone", first, second, None, line)


def answer_differences(
    before: dict[str, Any], after: dict[str, Any], tolerance: float, line: str
) -> Iterator[Difference]:
    """Every difference of two answers to a job."""
    command = line.split()[0]
    for name in ("code", "json_code", "json"):
        yield from differences(before.get(name), after.get(name), tolerance, line, f"{command} {name}")
    for name in ("out", "err"):
        yield from text_differences(before[name], after[name], tolerance, line, f"{command} {name}")


def read(file: Path) -> dict[str, dict[str, Any]]:
    """The answers of a file, by job."""
    rows = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    return {row.pop("job"): row for row in rows}


def report(before: Path, after: Path, tolerance: float = 0.0, ignored: str = "") -> int:
    """Prints the differences by key: how many, the largest relative one, and a job that shows it; returns how many keys.

    ignored: a regular expression of keys that are left out
    """
    first, second = read(before), read(after)
    both = sorted(first.keys() & second.keys())
    groups: dict[str, list[Difference]] = {}
    for line in both:
        for row in answer_differences(first[line], second[line], tolerance, line):
            key = re.sub(r"\[\d+\]", "[]", row.where)
            if not ignored or not re.search(ignored, key):
                groups.setdefault(key, []).append(row)
    for key, group in sorted(groups.items()):
        worst = max(group, key=lambda row: row.relative or 0.0)
        size = f"up to {worst.relative:.3g} relative" if worst.relative else "not numbers"
        print(f"{_short(key)}: {len(group)} values in {len({row.job for row in group})} jobs, {size}")
        print(f"    {_short(worst.before)} -> {_short(worst.after)}   {worst.job}")
    for line in sorted(first.keys() ^ second.keys()):
        print(f"answered once: {line}")
    commands = [line.split()[0] for line in both]
    refused = sum(first[line]["code"] == 2 for line in both)
    differ = len({row.job for group in groups.values() for row in group})
    print(", ".join(f"{commands.count(command)} {command}" for command in sorted(set(commands))))
    print(f"{len(both)} jobs ({refused} refused), {differ} differ")
    return len(groups) + len(first.keys() ^ second.keys())


def _short(value: Any, most: int = 160) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else f"{text[:most]} ..."


# -- the command line -------------------------------------------------------------------------------------------------


def compare_trees(old: Path, new: Path, options: argparse.Namespace) -> int:
    """Runs the jobs on both trees, each in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        settings = {name: text for name, text in os.environ.items() if not name.startswith(("LOADGAUGE_", "COLUMNS"))}
        settings |= {
            "LC_ALL": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "COLUMNS": "1000",
        }

        def script(tree: Path, *words: object) -> None:
            environment = {**settings, "PYTHONPATH": str(tree.absolute() / "src")}
            subprocess.run([sys.executable, __file__, *map(str, words)], env=environment, check=True)

        script(old, "jobs", options.jobs, folder, "--seed", options.seed, "--only", options.only)
        script(new, "answers", folder, folder / "after.jsonl")
        return report(folder / "before.jsonl", folder / "after.jsonl", options.tolerance, options.ignore)


def main() -> int:
    """Where the script begins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    trees = commands.add_parser("trees", help="compare two trees")
    trees.add_argument("old", type=Path)
    trees.add_argument("new", type=Path)
    trees.add_argument("--jobs", type=int, default=300)
    trees.add_argument("--keep", type=Path, help="a folder for the jobs and answers, instead of a temporary one")
    made = commands.add_parser("jobs", help="write random jobs and what the tree on PYTHONPATH answers")
    made.add_argument("number", type=int)
    made.add_argument("folder", type=Path)
    for each in (trees, made):
        each.add_argument("--seed", type=int, default=0)
        each.add_argument(
            "--only", default="", metavar="COMMAND", help="jobs of this command, or of a maker of random_jobs.py"
        )
    again = commands.add_parser("answers", help="answer a folder's jobs with the tree on PYTHONPATH")
    again.add_argument("folder", type=Path)
    again.add_argument("out", type=Path)
    compared = commands.add_parser("diff", help="compare two files of answers")
    compared.add_argument("before", type=Path)
    compared.add_argument("after", type=Path)
    for each in (trees, compared):
        each.add_argument("--tolerance", type=float, default=0.0)
        each.add_argument(
            "--ignore", default="", metavar="REGEX", help="keys that are meant to differ, such as 'schema$|verdict'"
        )
    options = parser.parse_args()
    if options.command == "trees":
        return int(compare_trees(options.old, options.new, options) > 0)
    if options.command == "jobs":
        options.folder.mkdir(parents=True, exist_ok=True)
        write_jobs(options.folder.absolute(), options.number, options.seed, options.only)
        return 0
    if options.command == "answers":
        write_answers(options.folder.absolute(), options.out.absolute())
        return 0
    return int(report(options.before, options.after, options.tolerance, options.ignore) > 0)


if __name__ == "__main__":
    sys.exit(main())
