"""The lines of a log as the process wrote them: without what Ray, torchrun, srun and mpirun put before each."""

from __future__ import annotations

import re

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
REPEATED = re.compile(r" ?\[repeated \d+x across cluster\].*")
MARK = re.compile(
    r"(?:(?:\([^()\n]{1,80}? pid=\d+[^()\n]{0,80}\)|\[[^\]\n]{1,60}\](?:<std\w+>)?:?| {0,3}\d{1,5}:(?= )) ?)+"
)
"""Of Ray `(WorkerDict pid=7, ip=10.0.0.1)`, PyTorch `[rank3]:`, torchrun `[default3]:`, srun `3:`, mpirun `[1,3]<stderr>:`."""
BORDER = re.compile(r"(?:(?:ERROR|WARNING|INFO) \d\d-\d\d [\d:]+ \[[^\]\n]{1,60}\] ?)?(?:[│|] ?)?")
"""Of vLLM's logger, and of rich."""
REACH = 1_000_000
"""Letters before an error in which its traceback is looked for."""
LENGTH = 2000
"""Letters of an error."""


def around(text: str, place: int) -> tuple[str, str]:
    """Return what the process that wrote at `place` wrote before that line, and from it on, without prefixes.

    Lines of other ranks between them are left out; lines without a prefix belong to all.

    >>> around("[rank0]: a\\n[rank1]: b\\n[rank1]: c", 25)
    ('b\\n', 'c')
    """
    begin = text.rfind("\n", 0, place) + 1
    mark = _split(text[begin : begin + LENGTH].partition("\n")[0])[0]
    before, after = text[max(0, begin - REACH) : begin], text[begin : place + LENGTH]
    return plain(before, mark), plain(after, mark)


def plain(text: str, mark: str = "") -> str:
    """Return a text without prefixes; of one process alone where its prefix (`mark`) is named.

    >>> plain("(WorkerDict pid=7) [rank3]:   loss.backward()")
    '  loss.backward()'
    """
    lines = (_split(line) for line in text.split("\n"))
    return "\n".join(rest for found, rest in lines if not mark or found in ("", mark))


def _split(line: str) -> tuple[str, str]:
    """Return what stands before a line, and the line."""
    line = REPEATED.sub("", COLOUR.sub("", line))
    match = MARK.match(line)
    mark, rest = (match[0].strip(), line[match.end() :]) if match else ("", line)
    return mark, rest[BORDER.match(rest).end() :]  # type: ignore[union-attr]
