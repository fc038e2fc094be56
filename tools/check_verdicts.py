"""Do verdict, range, capacity, exit code, JSON, text and `--brief` of random jobs agree by the definitions of the four verdicts?

    PYTHONPATH=src:tests/support python tools/check_verdicts.py --jobs 5000 [--seed 1]

Prints every violation with the command line that has it, and how many jobs had which verdict; the exit code is 1 where there
is a violation. The definitions are recomputed by plain comparisons (`tests/support/verdicts.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compare_answers import Run, entry_point, names_of, output
from loadgauge.core.answers import post_training
from loadgauge.core.plan.advise import advice
from random_jobs import Names, job, makers
from verdicts import code_of, violations

QUESTIONS = {"--explain": 2, "--table": 2, "--sweep": 2, "--brief": 1, "--csv": 1, "--counter": 2}
"""Flags that ask for something else than the whole answer, and how many words each is."""
ASKED = ("estimate", "post_training")


def plain(line: str) -> list[str]:
    """Return a job's words without what asks for a part of its answer.

    >>> plain("estimate gpt2 --explain logits --gpu h100 --csv")
    ['estimate', 'gpt2', '--gpu', 'h100']
    """
    words, kept = shlex.split(line), []
    while words:
        count = QUESTIONS.get(words[0], 0)
        if not count:
            kept.append(words[0])
        del words[: max(count, 1)]
    return kept


def checked(run: Run, words: list[str]) -> tuple[str, list[str]]:
    """Return a job's verdict and its violations; "refused" for one that is not answered."""
    code, out, _ = output(run, words)
    json_code, text, error = output(run, [*words, "--json"])
    if code == 2 or json_code == 2:
        return "refused", [] if code == json_code else [f"exit code {code}, with --json {json_code}: {error}"]
    memory = json.loads(text)["memory"]
    faults = violations(memory, json_code, out.partition("\n")[0])
    if code != json_code:
        faults.append(f"exit code {code}, with --json {json_code}")
    verdict = str(memory["verdict"])
    brief_code, brief, _ = output(run, [*words, "--brief"])
    if (brief_code, brief.partition("\n")[0].split("  ")[0]) != (code, out.partition("\n")[0].split("  ")[0]):
        faults.append(f"--brief: {brief_code}, {brief[:60]!r}")
    if verdict != "fits":
        allowed = output(run, [*words, "--allow-tight"])[0]
        if allowed != code_of(verdict, allow_tight=True):
            faults.append(f"exit code {allowed} with --allow-tight, of {verdict}")
    return verdict, faults


def once(module: Any, name: str) -> None:
    """Work out once a job what its four commands ask for alike: the changes that are tried, most of their time."""
    work, memory = getattr(module, name), dict[str, Any]()

    def kept(run: Any, *more: Any, **named: Any) -> Any:
        key = repr(getattr(run, "job", run))
        if key not in memory:
            memory.clear()
            memory[key] = work(run, *more, **named)
        return memory[key]

    setattr(module, name, kept)


def drawn(names: Names, pick: random.Random) -> Iterator[list[str]]:
    """Yield random jobs for ever, each once."""
    among = [makers(names, name)[0] for name in ASKED]
    seen: set[str] = set()
    while True:
        (maker,) = pick.choices(among, [maker.weight for maker in among])
        words = plain(job(pick, names, maker))
        if shlex.join(words) not in seen:
            seen.add(shlex.join(words))
            yield words


def main() -> int:
    """Check jobs until so many are answered."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    once(advice, "advice")
    once(post_training, "remedies")
    run, pick, counts, wrong = entry_point(), random.Random(options.seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        jobs = drawn(names_of(run, Path(folder), pick), pick)
        while counts.total() - counts["refused"] < options.jobs:
            words = next(jobs)
            verdict, faults = checked(run, words)
            counts[verdict] += 1
            wrong += bool(faults)
            for fault in faults:
                print(f"{fault}: loadgauge {shlex.join(words)}", flush=True)
            if counts.total() % 100 == 0:
                print(f"{counts.total()} jobs, {wrong} wrong", file=sys.stderr)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
