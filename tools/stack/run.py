"""Traces cases and compares them with the formula: `python -m stack.run family=llama,method=lora ...` prints JSON."""

from __future__ import annotations

import argparse
import json
import sys

import msgspec

from stack import batch
from stack.case import Case
from stack.compare import compare
from stack.record import Traced


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", help="field=value,field=value of stack.case.Case")
    parser.add_argument("--table", action="store_true", help="a table for people instead of JSON")
    parser.add_argument("--held", type=int, default=0, metavar="N", help="the N largest groups of tensors of each peak")
    given = parser.parse_args()
    failed = 0
    for outcome in batch.run(map(Case.of, given.cases)):
        if isinstance(outcome, batch.Failed):
            failed = 1
            print(f"{outcome.case.words}   {outcome.error}", file=sys.stderr)
        else:
            shown(outcome, given.table, given.held)
    return failed


def shown(traced: Traced, table: bool, held: int) -> None:
    """Prints a case."""
    rows, why = compare(traced)
    if not table:
        document = {"compared": msgspec.to_builtins(rows), "formula": why, "traced": msgspec.to_builtins(traced)}
        json.dump(document, sys.stdout)
        print()
        return
    case = traced.case
    print(f"{case.words}   ({traced.seconds:.1f} s, {traced.trainable:,} trained)  {why}")
    for row in rows:
        print(f"  {row.phase:<10} {row.traced / 2**20:10.2f} MiB traced {_mib(row.formula)} MiB formula {row.percent}")
    for name, peak in traced.second.items() if held else ():
        print(f"  {name}: { ({what: round(n / 2**20, 2) for what, n in peak.categories.items()}) }")
        for one in peak.held[:held]:
            print(f"    {one.nbytes / 2**20:8.2f} MiB {one.count:3} x {one.dtype}{list(one.shape)} {one.category}, {one.op}"
                  f" in {one.module or '-'}  {one.line}")  # fmt: skip


def _mib(nbytes: float | None) -> str:
    return f"{'-':>10}" if nbytes is None else f"{nbytes / 2**20:10.2f}"


if __name__ == "__main__":
    sys.exit(main())
