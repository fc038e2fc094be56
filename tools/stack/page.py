"""Writes docs/stack.md: every case of the design, traced and by formula. `python -m stack.page`."""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stack import batch
from stack.case import Case
from stack.compare import ORDER, Row, compare
from stack.design import CASES, DIMENSIONS, SIZE, design, excluded
from stack.known import KNOWN, SMALLEST, named, within
from stack.record import Traced

PAGE = Path(__file__).parents[2] / "docs" / "stack.md"


class Compared(msgspec.Struct, frozen=True):
    """A case with its phases. `refused`: what the formula said where it has no answer."""

    case: Case
    rows: tuple[Row, ...]
    refused: str

    def within(self, row: Row) -> bool:
        """Whether the formula is right within one percent (or `SMALLEST`)."""
        return row.formula is not None and within(row.formula, row.traced)

    @property
    def peak(self) -> Row:
        """The peak of the step: what a person sees. Its phase is the traced one."""
        highest = max(self.rows, key=lambda row: row.traced)
        found = [row.formula for row in self.rows if row.formula is not None]
        return Row(highest.phase, highest.traced, max(found) if found else None)


def main() -> int:
    """Runs the design and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES, help="how many of the design")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kept", action="store_true", help="only the cases whose trace is kept; none is traced")
    given = parser.parse_args()
    cases = design()[: given.cases]
    if given.kept:
        cases = [case for case in cases if batch.read(case) is not None]
        if not cases:
            parser.error("no trace is kept")
    outcomes: dict[Case, batch.Outcome] = {}
    for outcome in batch.run(cases, given.workers):
        outcomes[outcome.case] = outcome
        print(f"\r{len(outcomes)} of {len(cases)} cases", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    ordered = [outcomes[case] for case in cases]
    failed = [one for one in ordered if isinstance(one, batch.Failed)]
    traced = [one for one in ordered if isinstance(one, Traced)]
    PAGE.write_text(page([compared(one) for one in traced], failed))
    return 0


def compared(traced: Traced) -> Compared:
    """A traced case beside the formula."""
    rows, why = compare(traced)
    return Compared(traced.case, tuple(rows), why)


def page(found: list[Compared], failed: list[batch.Failed]) -> str:
    """The text of the page."""
    answered = [one for one in found if not one.refused]
    rows = [(one, row) for one in answered for row in one.rows]
    peaks = [(one, one.peak) for one in answered]
    inside, by_name, open_ = _kinds(rows)
    errors = sorted(abs(row.error) for _, row in peaks if row.error is not None)
    peak_inside, peak_named, peak_open = _kinds(peaks)
    refusals = Counter(one.refused for one in found if one.refused)
    parts = [
        HEAD.format(
            cases=len(found), answered=len(answered), rows=len(rows), inside=inside, share=inside / max(1, len(rows)),
            named=by_name, unnamed=open_, refused=sum(refusals.values()), failed=len(failed), wanted=len(design()),
            peak_share=peak_inside / max(1, len(peaks)), peak_inside=peak_inside, peak_named=peak_named, peak_open=peak_open,
            peak_median=statistics.median(errors or [0.0]), peak_p90=errors[int(0.9 * len(errors))] if errors else 0.0,
            versions=", ".join(f"{name} {release}" for name, release in batch.versions().items()),
            date=datetime.date.today().isoformat(),
            size=", ".join(f"{name} {value}" for name, value in SIZE.items()), smallest=SMALLEST // 1024,
        ),
        "## By phase\n\n" + _summary([("peak", *peak) for peak in peaks] + [(row.phase, one, row) for one, row in rows],
                                      ("peak", *ORDER)),
    ]  # fmt: skip
    for name in DIMENSIONS:
        kinds = [(str(getattr(one.case, name)), one, row) for one, row in rows]
        order = list(dict.fromkeys(map(str, DIMENSIONS[name])))
        parts.append(f"## By {name.replace('_', ' ')}\n\n" + _summary(kinds, order))
    parts.append(_differences(rows))
    if refusals:
        lines = [f"| {why} | {number} |" for why, number in refusals.most_common()]
        parts.append("## Cases that the formula refuses\n\n| why | cases |\n|---|---:|\n" + "\n".join(lines) + "\n")
    lines = [f"| {why} | {number} |" for why, number in excluded().most_common()]
    parts.append(LEFT_OUT + "\n| why | of 10,000 draws |\n|---|---:|\n" + "\n".join(lines) + "\n")
    if failed:
        lines = [f"| `{_short(one.case)}` | {one.error.splitlines()[0][:160].replace('|', ' ')} |" for one in failed]
        parts.append("## Cases that failed\n\n| case | why |\n|---|---|\n" + "\n".join(lines) + "\n")
    parts.append(_table(found))
    return "\n".join(parts)


HEAD = """# The real stack on the simulated device, beside the formula

<!-- generated by `make stack` -->

transformers' `Trainer`, TRL's `SFTTrainer`, PEFT, accelerate (DDP, FSDP2), bitsandbytes, DeepSpeed and Liger train small models
on the simulated CUDA device, unchanged, two steps each; `loadgauge estimate` is asked for the same. Compared are the bytes that are
live before the first step (`prepared`), at the peaks of the second step (forward of the layers, head and loss, backward of
the layers, gradient clipping, optimizer step), and after it (`kept`).

| {cases} cases traced, {answered} of them answered | within 1 % | accounted for by a named difference | not explained |
|---|---:|---:|---:|
| **peak of the step** ({answered}) | **{peak_inside} ({peak_share:.0%})** | {peak_named} | {peak_open} |
| phases ({rows}) | {inside} ({share:.0%}) | {named} | {unnamed} |

The error of the peak is {peak_median:.1%} in the median and {peak_p90:.1%} at the 90th percentile, without sign. A difference of at
most {smallest} KiB counts as none. A named difference counts only where the formula with its bytes added is within 1 %
(`tools/stack/known.py` computes them from the sizes of the model). The formula refuses {refused} cases; {failed} more ended
in an error. (Sizes: {size}. The design has {wanted} cases.)

Measured on {date} with {versions}.

The cases are every choice alone, and then a greedy covering design of the pairs of choices that the libraries allow together.
Kernels that need a GPU are simulated by the shapes of their results; `adamw`'s and bitsandbytes' states, PEFT's casts and
DeepSpeed's buffers are made by the libraries themselves. The models are small, so that what is neglected in a large one (a
norm, a mask, a bucket of fixed size) is percents here.
"""
LEFT_OUT = """## What is left out

Of random combinations, those that the libraries refuse, that say nothing new, or that the simulated device cannot run.
"""


def _kinds(rows: list[tuple[Compared, Row]]) -> tuple[int, int, int]:
    """How many phases are right, accounted for by a name, and neither."""
    inside = sum(one.within(row) for one, row in rows)
    by_name = sum(not one.within(row) and bool(named(one.case, row)) for one, row in rows)
    return inside, by_name, len(rows) - inside - by_name


def _summary(rows: list[tuple[str, Compared, Row]], order: Iterable[str]) -> str:
    groups: dict[str, list[tuple[Compared, Row]]] = defaultdict(list)
    for kind, one, row in rows:
        groups[kind].append((one, row))
    lines = [
        "| | number | within 1 % | named | not explained | median | worst |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in order:
        members = groups.get(kind, [])
        if not members:
            continue
        errors = [row.error for _, row in members if row.error is not None and row.traced > SMALLEST]
        shares = " | ".join(f"{number / len(members):.0%}" for number in _kinds(members))
        worst = max(errors, key=abs, default=0.0)
        lines.append(
            f"| {kind} | {len(members)} | {shares} | {statistics.median(map(abs, errors or [0])):.1%} | {worst:+.0%} |"
        )
    return "\n".join(lines) + "\n"


def _differences(rows: list[tuple[Compared, Row]]) -> str:
    lines = ["## Differences that are named", "", "| | difference | where | phases |", "|---|---|---|---:|"]
    letters = [named(one.case, row) for one, row in rows if not one.within(row)]
    for known in KNOWN:
        number = sum(known.letter in each for each in letters)
        lines.append(f"| {known.letter} | {known.what} | {known.where} | {number} |")
    lines.append(f"| | not explained | | {letters.count('')} |")
    return "\n".join(lines) + "\n"


def _table(found: list[Compared]) -> str:
    lines = [
        "## Every case", "",
        "The formula over the trace, less one; letters name what accounts for the difference, `?` stands where nothing does.", "",
        f"| case | peak | {' | '.join(ORDER)} |", f"|---|---:|{'---:|' * len(ORDER)}",
    ]  # fmt: skip
    for one in found:
        by_phase = {row.phase: row for row in one.rows}
        cells = [_cell(one, row) for row in (one.peak, *map(by_phase.get, ORDER))]
        lines.append(f"| {_short(one.case)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(one: Compared, row: Row | None) -> str:
    if row is None or row.formula is None:
        return ""
    if one.within(row):
        return f"{row.percent}" if row.traced > SMALLEST else "0"
    percent = row.percent if row.traced > SMALLEST else "much"
    return f"**{percent}** {named(one.case, row) or '?'}"


def _short(case: Case) -> str:
    """The words of a case without the sizes that all share."""
    return ", ".join(word.partition("=")[2] if word.startswith(("family", "method")) else word
                     for word in case.words.split(",") if word.partition("=")[0] not in SIZE)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
