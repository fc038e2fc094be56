"""Lists the keys of tools that change nothing of an answer and are not named in it: silent facts, if they matter.

    python tools/silent_keys.py [TOOL ...] [--judge]

For each tool the shortest files of its programs (`silent_keys.toml`) are read, and read again with a key set to another value
than its default, for every key of the tool's own classes (`tests/job_files/keys`). A key is heard where the job, what stands
beside it or a named note moves with one of the values, or an error names it. `--judge` lists the keys that the lists call
harmless and whose names do not say so (logs, data, learning): those are for a reader.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from loadgauge.core.base.errors import ConfigError
from loadgauge.job_files.dialects import dialect
from loadgauge.job_files.exchange import read
from loadgauge.job_files.reading.documents import document

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
sections_of = import_module("extract_keys").sections_of

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WORDS: list[Any] = TABLE["values"]["words"]
PLAIN = re.compile(TABLE["values"]["plain"])
FILES = {"argv": "run.sh", "toml": "job.toml", "yaml": "job.yaml", "json": "job.json"}
OF_TYPE = re.compile(r"must be|is not one that is read|another trainer")
"""Errors about the value that was tried, not about the key."""


def tools() -> list[str]:
    """The tools of the table."""
    return [name for name in TABLE if name != "values"]


def others(default: Any) -> list[Any]:
    """Plausible other values of a key, by the type of its default."""
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int):
        return [default * 2 or 2, default + 1, 8, 1, 0]
    if isinstance(default, float):
        return [default / 2 or 0.5, default * 2 + 1, 0.0, 8]
    if isinstance(default, str):
        return WORDS
    return [["q_proj"], ["x"]] if isinstance(default, list) else [True, 2, 8, 0.5, *WORDS, ["q_proj"]]


def answer(text: str, name: str, file: str) -> Any:
    """All of an answer that a key can change: its job, what stands beside it, and what it names."""
    found = read(text, name, file=file, alone=True)
    return found.job, found.extra, [(item.note, item.effect) for item in found.uncounted], found.remarks


def listed(name: str) -> dict[str, Any]:
    """The keys of a tool's own classes, each with its default."""
    return {
        key: default for file in TABLE[name]["keys"] for _, keys in sections_of(file) for key, default in keys.items()
    }


def heard(name: str, text: str, keys: dict[str, Any]) -> set[str]:
    """The keys that change the answer of a file."""
    syntax = TABLE[name].get("syntax") or ("argv" if " " in text.partition(":")[0].partition("\n")[0] else "yaml")
    base, chosen, moving = answer(text, name, FILES[syntax]), dialect(name), set()
    for key, default in keys.items():
        for value in others(default):
            opened = document(text, syntax, chosen, "", None)
            try:
                opened.put(key, value)
                moved = answer(opened.text(), name, FILES[syntax]) != base
            except ConfigError as error:
                moved = not OF_TYPE.search(str(error))
            if moved:
                moving.add(key)
                break
    return moving


def silent(name: str) -> set[str]:
    """The keys of a tool that no start file hears, but for those that the lists or the table say to change nothing."""
    chosen, told = dialect(name), " ".join(TABLE[name].get("nothing", {}).values()).split()
    left = {
        key: default for key, default in listed(name).items() if chosen.kinds(key) != ("harmless",) and key not in told
    }
    for text in TABLE[name]["files"]:
        for key in heard(name, text, left):
            del left[key]
    return set(left)


def judged(name: str) -> Iterator[str]:
    """The keys that are called harmless and whose names do not say so, with their defaults."""
    chosen = dialect(name)
    for key, default in listed(name).items():
        if chosen.kinds(key) == ("harmless",) and not PLAIN.search(key):
            yield f"{key} = {default}"


def main() -> None:
    """Prints a line for each key."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*")
    parser.add_argument("--judge", action="store_true")
    given = parser.parse_args()
    for name in given.tools or tools():
        for key in judged(name) if given.judge else sorted(silent(name)):
            print(f"{name}\t{key}")


if __name__ == "__main__":
    main()
