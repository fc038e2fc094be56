"""A job file's own text with what changes in it: its lines and their spelling stay, and `patch` takes the difference."""

import re
from difflib import SequenceMatcher, unified_diff
from io import StringIO

from loadgauge.core.base import is_command, place_of, refuse
from loadgauge.job_files.reading.documents import read_whole
from loadgauge.job_files.reading.held import HEAD, held

TRUTH = re.compile(r": (?:true|false)\b")
"""Words of YAML that some files begin with a capital."""


def difference(source: str, text: str, file: str, around: int = 3) -> str:
    r"""Return a unified diff that `patch` takes, also where a file ends without a line break.

    >>> print(difference("a", "b", "x", 0), end="")
    --- x
    +++ x
    @@ -1 +1 @@
    -a
    \ No newline at end of file
    +b
    \ No newline at end of file
    """
    was, now = (StringIO(each, newline="\n").readlines() for each in (source, text))
    rows = unified_diff(was, now, file, file, n=around)
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows)


def of_file(file: str, source: str, text: str) -> str:
    """Return a job's text as its file has it: of the script of a manifest, the manifest. source: as it is read

    Raises `ConfigError` where a changed line of the script is no line of the manifest.
    """
    if not HEAD.match(source) or is_command(file):
        return text
    name = place_of(file)[0]
    return rewrapped(read_whole(name), source, text, name)


def rewrapped(manifest: str, script: str, changed: str, file: str) -> str:
    r"""Return a manifest whose script is changed. Raises `ConfigError` where its lines are not those of the manifest.

    >>> text = "run: |\n  # 8 cards\n  torchrun a.py --bf16\n"
    >>> (run,) = held(text, "a.yaml")
    >>> print(rewrapped(text, run.whole, run.whole.replace("bf16", "fp16"), "a.yaml"), end="")
    run: |
      # 8 cards
      torchrun a.py --fp16
    """
    new, was, now = manifest.splitlines(True), script.splitlines(), changed.splitlines()
    for kind, a, b, c, d in SequenceMatcher(None, was, now, autojunk=False).get_opcodes()[::-1]:
        if kind == "equal":
            continue
        a, c = (a, c) if b > a else (a - 1, c - 1)  # what comes in follows a line
        old = [line.strip() for line in was[a:b]]
        for at in range(len(new)):
            if [line.strip() for line in new[at : at + b - a]] == old:
                depth = " " * (len(new[at]) - len(new[at].lstrip()) - len(was[a]) + len(was[a].lstrip()))
                new[at : at + b - a] = [f"{depth}{line}\n" for line in now[c:d]]
                break
    text = "".join(new)
    refuse(
        changed not in {part.whole for part in held(text, file)},
        "the script stands in a manifest in other words; change it there",
    )
    return text


BLANKS = re.compile(r"(?:\s|#[^\n]*\n)*")
PIECE = re.compile(BLANKS.pattern + r"""(?:"(?:\\.|[^"\\])*"(?:\s*:)?|[^\s"{}\[\],]+|[{}\[\],"])|\s+\Z""")
BARE = re.compile(r"^(\s*)(?!(?:true|false|null)$)([A-Za-z_][\w.-]*)(:?)$")
"""A word that JSON, and YAML in its form, has within quotes."""
LINE = re.compile(r"[^\n]*\n|[^\n]+")
"""Parts of a text within braces, each with the blanks before it, and of any other."""


def merged(source: str, plain: str, changed: str) -> str:
    """Return a text with what differs between two rewritten copies of it, its own lines elsewhere; within braces, its own words.

    >>> merged("a: True;b: 1".replace(";", "\\n"), "a: true;b: 1".replace(";", "\\n"), "a: true;b: 2".replace(";", "\\n"))
    'a: True\\nb: 2'
    >>> print(merged('{"a":1, "b": [2]}', '{"a": 1, "b": [2]}', '{"b": [2], "c": 3}'))
    {"b": [2], "c": 3}
    """
    if source == plain:
        return changed
    flow = re.match(r"(?:\s*#.*\n)*\s*\{", source) is not None
    mine, was, now = map((PIECE if flow else LINE).findall, (source, plain, changed))
    of_mine, of_was = (
        [_bare(BLANKS.sub("", each, count=1) if flow else each) for each in part] for part in (mine, was)
    )
    alike = SequenceMatcher(None, of_mine, of_was, autojunk=False).get_matching_blocks()
    own = {b + n: a + n for a, b, size in alike for n in range(size)} | {-1: -1, len(was): len(mine)}
    # Items of a list may stand further out than they are written.
    keys = [(was[at], mine[it]) for at, it in own.items() if at in range(len(was)) and was[at].lstrip()[:1] not in "-"]
    depth = {} if flow else {_depth(written): _depth(line) for written, line in keys}
    titled = bool(re.search(r": (?:True|False)\b", source)) and not TRUTH.search(source)
    lines: list[str] = []
    end = 0
    for kind, a, b, c, d in SequenceMatcher(None, was, now, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        first = next(at for at in range(a - 1, -2, -1) if at in own)
        last = next(at for at in range(b, len(was) + 1) if at in own)
        if own[first] + 1 < end:
            return changed
        lines += mine[end : own[first] + 1]
        if lines and lines[-1][-1] != "\n" and not flow:
            lines[-1] += "\n"
        rows = [*was[first + 1 : a], *now[c:d], *was[b:last]]  # what is wrapped otherwise is written anew
        rows = [BARE.sub(r'\1"\2"\3', each) for each in rows] if flow and '"' in source else rows
        for at, each in enumerate(rows if flow else ()):
            if each[-1] == ":" and "\n" not in each and rows[at - 1 : at] in ([], [","]):
                rows[at] = (_gap(lines) or each[: -len(each.lstrip())]) + each.lstrip()
        new = [" " * depth.get(_depth(line), _depth(line)) + line.lstrip(" ") for line in rows]
        lines += [TRUTH.sub(lambda word: word[0].title(), line) for line in new] if titled else new
        end = own[last]
    return "".join([*lines, *mine[end:]])


def _gap(pieces: list[str]) -> str:
    """Return the blanks before the last key of the mapping that some pieces leave open, if it has one.

    >>> _gap(["{", "\\n  'a':", " {", "'b':", " 1", "}", ","])
    '\\n  '
    """
    level = 0
    for piece in pieces[::-1]:
        level += (piece[-1] in "}]") - (piece[-1] in "{[")
        if not level and piece[-1] == ":":
            return "".join(BLANKS.match(piece)[0].rpartition("\n")[1:])  # type: ignore[index]
    return ""


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _bare(line: str) -> str:
    """Return a line without what a rewriting may spell otherwise: ``_bare("a: Null  # b") == _bare("a: # b")``."""
    return re.sub(r"\s|\bnull\b|~$|['\"]", "", line.lower())
