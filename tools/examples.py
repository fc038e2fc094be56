"""How many of the example files of other tools are answered, how many of them in part, and why the others are not.

    make examples DIR=CHECKOUTS
    python tools/examples.py CHECKOUTS [TOOL ...] [--write docs/dialects.md] [--refused refused.tsv]

CHECKOUTS has a folder for each tool, `files.txt` with the examples that count (`TOOL/path`, one a line), and optionally a
`README.md` with a table of tools, repositories and commits; without it the commit is that of the checkout. Each file is estimated
in its tool's folder for an H100, as `loadgauge estimate FILE --gpu h100-sxm5-80gb --json` does, in processes of its own; with
`--gpus 8` where the answer asks for a number of GPUs, `--task generate` where it says that the file
trains nothing. Nothing of the files is run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from loadgauge.core.command_line.main import run

GPU = "h100-sxm5-80gb"
ASKED = (("--gpus", "8"), ("--task", "generate"))
"""What is added where a number of GPUs, or a task, is asked for."""
SECONDS = 90
"""After which a file counts as refused."""
BEGIN, END = "<!-- examples -->", "<!-- /examples -->"
"""Around the table in a page."""
SHOWN = 3
"""Reasons and keys that the table names of a tool, the commonest first."""


class Scored(NamedTuple):
    """What came of a file. state: answered, in part, or refused; why: of a refusal; keys: that were not read and may matter"""

    tool: str
    path: str
    state: str
    why: str = ""
    keys: tuple[str, ...] = ()


def scored(root: str, name: str) -> Scored:
    """Estimate one file, in its tool's folder. name: `TOOL/path`"""
    tool, _, path = name.partition("/")
    os.chdir(Path(root, tool))
    code, out, err = estimated([path])
    for flag, value in ASKED:
        if code not in (0, 1) and flag in err:
            code, out, err = estimated([path, flag, value])
    if code not in (0, 1):
        return Scored(tool, path, "refused", err.removeprefix("loadgauge: ").strip())
    unread = json.loads(out).get("unread", [])
    keys = tuple(one["key"] for one in unread if one["effect"] != "none")
    return Scored(tool, path, "in part" if keys else "answered", keys=keys)


def estimated(words: Sequence[str]) -> tuple[int, str, str]:
    """Return the exit code of an estimate, and what it printed on both streams."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"takes more than {SECONDS} seconds")

    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(["estimate", *words, "--gpu", GPU, "--json"])
    except TimeoutError as error:
        return 2, "", str(error)
    finally:
        signal.alarm(0)
    return code, out.getvalue(), err.getvalue()


def reason(why: str, path: str) -> str:
    """Return what refuses a file, without what is this file's alone.

    >>> reason("a/b.yaml: model.rank: 8 is not known here, and says a size", "a/b.yaml")
    'rank: is not known here, and says a size'
    """
    text = why.removeprefix(f"{path}: ")
    text = re.sub(r" \(so do .*\)$|; without it there is an estimate", "", text)
    key, colon, rest = text.partition(": ")
    plain = re.sub(r"'[^']*'|\b\d[\d.,]*\b", "", rest).strip()
    last = re.split(r"[.\s]", key)[-1].lstrip("-")
    return f"{last}: {plain}"[:100] if colon and " " not in key else text[:100]


def named(root: Path) -> dict[str, tuple[str, str]]:
    """Return the repository and the commit of each tool: of the table in `README.md`, else of the checkout."""
    known: dict[str, tuple[str, str]] = {}
    readme = root / "README.md"
    for line in readme.read_text(encoding="utf-8").splitlines() if readme.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) >= 3 and re.fullmatch(r"[0-9a-f]{7,40}", cells[2]):
            known[cells[0]] = (cells[1], cells[2])
    for folder in root.iterdir():
        if folder.name not in known and (folder / ".git").exists():
            words = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            known[folder.name] = ("", done.stdout.strip())
    return known


def commonest(things: Iterable[str]) -> str:
    """Return the commonest of things, with how often each comes.

    >>> commonest(["a", "b", "a"])
    '2 a; 1 b'
    """
    counts = Counter(things).most_common(SHOWN)
    return "; ".join(f"{count} {thing}" for thing, count in counts)


def table(results: Sequence[Scored], about: dict[str, tuple[str, str]], date: str) -> Iterator[str]:
    """Yield the lines of the table in Markdown: a tool each, and all of them together."""
    yield f"On {date}, `loadgauge estimate FILE --gpu {GPU}` (with `--gpus 8` where it asks for a number of GPUs,"
    yield "`--task generate` where it says that the file trains nothing):"
    yield ""
    yield "| tool | commit | examples | answered | of them in part | keys that these leave unread | why others are not |"
    yield "|---|---|--:|--:|--:|---|---|"
    tools = dict.fromkeys(result.tool for result in results)
    for tool in tools:
        own = [result for result in results if result.tool == tool]
        part = [result for result in own if result.state == "in part"]
        refused = [result for result in own if result.state == "refused"]
        repository, commit = about.get(tool, ("", ""))
        name = f"[{tool}](https://github.com/{repository})" if repository else tool
        keys = commonest(f"`{key}`" for result in part for key in result.keys)
        whys = commonest(reason(result.why, result.path).replace("|", "/") for result in refused)
        answered = len(own) - len(refused)
        yield f"| {name} | {commit} | {len(own)} | {answered} | {len(part)} | {keys} | {whys} |"
    answered = sum(result.state != "refused" for result in results)
    part_of_all = sum(result.state == "in part" for result in results)
    yield f"| all | | {len(results)} | {answered} ({answered / max(1, len(results)):.0%}) | {part_of_all} | | |"


def written(page: str, lines: Sequence[str]) -> str:
    r"""Return a page with the lines between its marks.

    >>> written("a\n<!-- examples -->\nold\n<!-- /examples -->\nb\n", ["new"])
    'a\n<!-- examples -->\nnew\n<!-- /examples -->\nb\n'
    """
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tools", nargs="*")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    parser.add_argument("--refused", type=Path, help="file for each refusal, a line each")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    root = given.folder.resolve()
    names = (root / "files.txt").read_text(encoding="utf-8").split("\n")
    names = [name for name in names if name and (not given.tools or name.partition("/")[0] in given.tools)]
    page = None if given.write is None else given.write.resolve()
    with ProcessPoolExecutor() as pool:
        results = list(pool.map(scored, [str(root)] * len(names), names, chunksize=4))
    lines = list(table(results, named(root), datetime.datetime.now(datetime.UTC).date().isoformat()))
    if given.refused is not None:
        rows = [f"{one.tool}\t{one.path}\t{one.why}" for one in results if one.state == "refused"]
        given.refused.write_text("\n".join(rows) + "\n", encoding="utf-8")
    if page is None:
        print("\n".join(lines))
    else:
        page.write_text(written(page.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main()
