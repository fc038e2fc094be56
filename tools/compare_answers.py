"""Do two trees of this project give the same answers? Runs the same random jobs on both and reports every difference.

    python tools/compare_answers.py trees OLD NEW --jobs 300      both trees, and the differences
    python tools/compare_answers.py jobs 3000 > jobs.txt          random command lines, the same for the same seed
    python tools/compare_answers.py answers jobs.txt out.jsonl    what the tree on PYTHONPATH answers to them
    python tools/compare_answers.py diff before.jsonl after.jsonl

A job is a command line of `estimate` or `network`; its answer is the JSON document that it prints (memory, FLOPs, time,
traffic, one explained part, what the links need), or its exit code and the line on stderr. Only the command line is used,
so that trees whose modules stand elsewhere can be compared. Numbers are compared to the last bit, unless --tolerance says
otherwise. The exit code is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ENTRY_POINTS = ("loadgauge.cli.main", "loadgauge.show.cli")
"""Modules with `run(arguments) -> exit code`, the newest first."""
PARTS = ("weights", "gradients", "optimizer", "gathered", "activations", "loss", "transient", "outside")
FRAMEWORKS = ("huggingface", "deepspeed", "torchtitan", "megatron")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe", "dualpipev")
REFUSED = 0.05
"""Of the jobs, how many may be refused: errors are compared too, but say little."""


def entry_point() -> Callable[[list[str]], int]:
    """The command line of the tree on the path."""
    for name in ENTRY_POINTS:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name).run  # type: ignore[no-any-return]
    raise SystemExit(f"none of {', '.join(ENTRY_POINTS)} can be imported; set PYTHONPATH to a tree's src")


def output(run: Callable[[list[str]], int], words: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    return code, out.getvalue(), err.getvalue()


def answer(run: Callable[[list[str]], int], line: str) -> dict[str, Any]:
    """The answer to one job."""
    code, out, err = output(run, shlex.split(line))
    try:
        return {"code": code, "answer": json.loads(out)}
    except json.JSONDecodeError:
        return {"code": code, "error": " ".join(err.split())}


# -- random jobs ------------------------------------------------------------------------------------------------------


def job(pick: random.Random, models: list[str], gpus: list[str]) -> str:
    """One random command line, often valid."""
    words = [pick.choice(models), "--gpu", pick.choice(gpus)]

    def sometimes(share: float, *flags: object) -> None:
        if pick.random() < share:
            words.extend(str(flag) for flag in flags)

    framework = pick.choice(FRAMEWORKS)
    words += ["--framework", framework]  # which one is the default is a choice of the tree's own
    megatron = framework == "megatron"
    tp = pick.choice((1, 1, 2, 4, 8)) if megatron else pick.choice((1, 1, 1, 2, 4))
    pp = pick.choice((1, 1, 1, 2, 4))
    cp = pick.choice((1, 1, 1, 1, 2, 4))
    dp = pick.choice((1, 2, 4, 8, 16, 24))
    micro = pick.choice((1, 1, 2, 4))
    batches = pick.choice((1, 2, 4, 8, 16))
    for name, degree in (("tp", tp), ("pp", pp), ("cp", cp)):
        sometimes(float(degree > 1), f"--{name}", degree)
    words += ["--gpus", str(tp * pp * cp * dp)]
    sometimes(0.9, "--micro-batch", micro)
    sometimes(0.8, "--global-batch", micro * dp * batches)
    sometimes(0.9, "--seq-len", pick.choice((512, 1024, 2048, 4096, 8192)))
    sometimes(0.2, "--ep", pick.choice((2, 4, 8)))
    sometimes(0.05, "--etp", 2)
    sometimes(0.7 if tp > 1 else 0, "--sequence-parallel")
    if pp > 1:
        schedule = pick.choice(SCHEDULES)
        sometimes(0.5, "--schedule", schedule, *(("--vpp", 2) if schedule == "interleaved" else ()))
    sometimes(0.3 if cp > 1 else 0, "--cp-comm", pick.choice(("ring", "all_to_all", "all_gather")))
    sometimes(0.7, "--zero", pick.choice((0, 1, 2, 3)))
    sometimes(0.1 if dp % 2 == 0 else 0, "--replicas", 2)
    sometimes(0.5, "--recompute", pick.choice(("selective", "full", "full:every=2", "full:layers=3", "full:group=2")))
    sometimes(0.3, "--optimizer", pick.choice(("adamw-8bit", "adafactor", "muon", "lion", "sgd-momentum", "sgd")))
    sometimes(0.4, "--precision", pick.choice(("bf16", "fp16", "fp32", "bf16-pure", "bf16-autocast", "fp8", "mxfp8")))
    sometimes(0.2, "--attention", pick.choice(("flash", "eager")))
    sometimes(0.3, "--loss", pick.choice(("float32", "inplace", "chunked", "chunked:16")))
    adapters = (("--lora-rank", 16), ("--qlora",), ("--lora-rank", 8, "--lora-targets", "attention"))
    sometimes(0.2, *pick.choice(adapters))
    sometimes(0.1, "--offload", pick.choice(("optimizer", "all")))
    sometimes(0.3, "--overlap", pick.choice(("none", "all", "dp,tp", "ep,pp", "prefetch,cp")))
    sometimes(0.1, "--order", pick.choice(("tp,cp,dp,pp", "tp,dp,cp,pp", "tp,cp,pp,dp")))
    sometimes(0.1, "--mtp")
    sometimes(0.1, "--expert-imbalance", 1.5)
    sometimes(0.2, "--nic-bandwidth", pick.choice(("12.5GB/s", "400Gbit/s")))
    sometimes(0.1, "--gpus-per-node", pick.choice((4, 8, 16)))
    if pick.random() < 0.25:
        return " ".join(["network", *words, "--json"])
    sometimes(0.2, "--tokens", "1T")
    sometimes(0.8, "--explain", pick.choice(PARTS))
    return " ".join(["estimate", *words, "--json"])


def jobs(number: int, seed: int) -> Iterator[str]:
    """So many command lines, few of which the tree on the path refuses."""
    run, pick = entry_point(), random.Random(seed)
    names = {command: json.loads(output(run, [command, "--json"])[1]) for command in ("models", "gpus")}
    models, gpus = (sorted(_names(names[command])) for command in ("models", "gpus"))
    refused = made = 0
    while made < number:
        line = job(pick, models, gpus)
        if answer(run, line)["code"] == 2:
            if refused >= REFUSED * number:
                continue
            refused += 1
        made += 1
        yield line


def _names(document: Any) -> list[str]:
    """The names in a catalogue's JSON document: a list, or a list in it, of names or of rows with a name or an id."""
    rows = (
        document if isinstance(document, list) else next(rows for rows in document.values() if isinstance(rows, list))
    )
    return [row if isinstance(row, str) else row.get("id") or row["name"] for row in rows]


# -- differences ------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Where two answers to one job differ, and how."""

    where: str
    before: Any
    after: Any
    relative: float | None
    job: str


def differences(before: Any, after: Any, tolerance: float, job: str, where: str = "") -> Iterator[Difference]:
    """Every value that is not the same."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            inner = f"{where}.{key}" if where else key
            if key not in before or key not in after:
                yield Difference(inner, before.get(key, "-"), after.get(key, "-"), None, job)
            else:
                yield from differences(before[key], after[key], tolerance, job, inner)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, tolerance, job, f"{where}[{place}]")
    elif isinstance(before, (int, float)) and isinstance(after, (int, float)):
        size = max(abs(before), abs(after))
        relative = abs(before - after) / size if size else 0.0
        if before != after and relative > tolerance:
            yield Difference(where, before, after, relative, job)
    elif before != after:
        yield Difference(where, before, after, None, job)


def read(file: Path) -> dict[str, dict[str, Any]]:
    """The answers of a file, by job."""
    rows = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    return {row.pop("job"): row for row in rows}


def report(before: Path, after: Path, tolerance: float) -> int:
    """Prints the differences by key: how many, the largest relative one, and a job that shows it; returns their number."""
    first, second = read(before), read(after)
    both = first.keys() & second.keys()
    found: dict[str, list[Difference]] = {}
    for line in sorted(both):
        for one in differences(first[line], second[line], tolerance, line):
            found.setdefault(re.sub(r"\[\d+\]", "[]", one.where), []).append(one)
    for key, group in sorted(found.items()):
        worst = max(group, key=lambda one: one.relative or 0.0)
        jobs = len({one.job for one in group})
        size = f"up to {worst.relative:.3g} relative" if worst.relative else "not numbers"
        print(f"{key}: {len(group)} values in {jobs} jobs, {size}")
        print(f"    {_short(worst.before)} -> {_short(worst.after)}   {worst.job}")
    refused = sum(first[line]["code"] == 2 for line in both)
    print(f"{len(both)} jobs ({refused} refused), {len({one.job for g in found.values() for one in g})} differ")
    return len(found)


def _short(value: Any, most: int = 160) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else f"{text[:most]} ..."


# -- the command line -------------------------------------------------------------------------------------------------


def write_answers(lines: list[str], file: Path) -> None:
    """One JSON document a job."""
    run = entry_point()
    with file.open("w", encoding="utf-8") as stream:
        for line in lines:
            stream.write(json.dumps({"job": line, **answer(run, line)}) + "\n")


def compare_trees(old: Path, new: Path, number: int, seed: int, tolerance: float) -> int:
    """Runs the jobs on both trees, each in a process of its own."""

    def script(tree: Path, *words: object) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        command = [sys.executable, __file__, *map(str, words)]
        return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "jobs.txt").write_text(script(old, "jobs", number, "--seed", seed), encoding="utf-8")
        for name, tree in (("old", old), ("new", new)):
            script(tree, "answers", place / "jobs.txt", place / f"{name}.jsonl")
        return report(place / "old.jsonl", place / "new.jsonl", tolerance)


def main() -> int:
    """Where the script begins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    trees = commands.add_parser("trees", help="compare two trees")
    trees.add_argument("old", type=Path)
    trees.add_argument("new", type=Path)
    trees.add_argument("--jobs", type=int, default=300)
    trees.add_argument("--seed", type=int, default=0)
    trees.add_argument("--tolerance", type=float, default=0.0)
    made = commands.add_parser("jobs", help="print random command lines")
    made.add_argument("number", type=int)
    made.add_argument("--seed", type=int, default=0)
    told = commands.add_parser("answers", help="answer command lines with the tree on PYTHONPATH")
    told.add_argument("jobs", type=Path)
    told.add_argument("out", type=Path)
    compared = commands.add_parser("diff", help="compare two files of answers")
    compared.add_argument("before", type=Path)
    compared.add_argument("after", type=Path)
    compared.add_argument("--tolerance", type=float, default=0.0)
    given = parser.parse_args()
    if given.command == "trees":
        return int(compare_trees(given.old, given.new, given.jobs, given.seed, given.tolerance) > 0)
    if given.command == "jobs":
        for line in jobs(given.number, given.seed):
            print(line)
        return 0
    if given.command == "answers":
        write_answers(given.jobs.read_text(encoding="utf-8").splitlines(), given.out)
        return 0
    return int(report(given.before, given.after, given.tolerance) > 0)


if __name__ == "__main__":
    sys.exit(main())
