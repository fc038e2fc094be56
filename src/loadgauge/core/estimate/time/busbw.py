"""Bus bandwidths that somebody measured with nccl-tests, in place of those of the table.

`KIND=340GB/s:1GiB` is a bus bandwidth (`algbw:340GB/s:1GiB`: an algorithm bandwidth) at a size of the whole tensor, between the
GPUs of a domain or, after another colon, between so many ranks; `KIND=FILE` is the text of a run, a file or pasted. What the text
leaves out, its collective or its ranks, is read off the ratio of the two bandwidths in its largest row.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec

from loadgauge.core.base import ConfigError, lists, parse, parse_count, read_text
from loadgauge.core.definitions.hardware.calibration import Wire
from loadgauge.core.estimate.time.collectives import Fabric, Group, Kind, bus_factor, seconds

LARGEST = 2**20
"""Bytes of the text of a run."""
USUAL = "1GiB"
"""Size of the whole tensor, where nobody says it: of messages that are large."""
NOTHING = 1e-12
"""Seconds that stand for no start of a collective."""


class Measured(NamedTuple):
    """A collective that was timed: its kind, bytes of the whole tensor, seconds, and ranks (0: those of a domain)."""

    kind: str
    nbytes: float
    seconds: float
    ranks: int


def measured(text: str, domain: int) -> list[Measured]:
    """Read what was measured. domain: GPUs that the inner link joins. Raises `ConfigError`.

    >>> (one,) = measured("all_reduce=350GB/s:1GiB", 8)
    >>> round(one.seconds * 350e9 / 2**30, 3), one.ranks
    (1.75, 8)
    >>> measured("allreduce=350", 8) == [one]
    True
    """
    head, _, rest = text.partition("=") if re.match(r"\s*[\w-]+\s*=", text) else ("", "", text)
    run = rest if "\n" in rest else read_text(rest, LARGEST) if Path(rest).is_file() else ""
    kind = head or next(iter(re.findall(r"(\w+)_perf\b", run)), "")
    of_words = {word.replace("_", ""): word for word in get_args(Kind)}
    kind = of_words.get(re.sub(r"[-_]", "", kind.lower()), kind)
    if run and (kind in get_args(Kind) or not kind):
        return list(_of_run(kind, run))
    if kind not in get_args(Kind) or not rest:
        raise ConfigError(f"must be such as all_reduce=340GB/s:1GiB or all_reduce=FILE, got {text[:60]!r}", key="busbw")
    word, _, others = rest.partition(":")
    speed, _, others = others.partition(":") if word in ("algbw", "busbw") else (word, "", others)
    size, _, ranks = others.partition(":")
    speed = f"{speed}GB/s" if re.fullmatch(r"[\d.]+", speed) else speed  # as nccl-tests prints it
    (rate, unit), (nbytes, of) = parse(speed, "busbw", "byte/s"), parse(size or USUAL, "busbw", "byte")
    if unit != "byte/s" or of != "byte" or rate <= 0 or nbytes <= 0:
        raise ConfigError(f"must be a bandwidth and a size such as 340GB/s:1GiB, got {rest[:60]!r}", key="busbw")
    among = int(parse_count(ranks, "busbw")) if ranks else domain
    if among < 2:
        raise ConfigError(f"must be measured between 2 or more ranks, got {among}", key="busbw")
    passes = 1 if word == "algbw" else float(bus_factor(kind, among))
    return [Measured(kind, nbytes, nbytes * passes / rate, among)]


def _of_run(kind: str, text: str) -> Iterable[Measured]:
    """The rows of a table of nccl-tests: size, count, type, redop, root, and twice time [us], algbw, busbw, errors."""
    ranks = len(re.findall(r"^#\s+Rank\s+\d+", text, re.M))
    table = re.findall(r"^\s*(\d+)\s+\d+\s+\w+\s+(\S+)\s+(\S+)" + 3 * r"\s+([\d.]+)" + r"\s", text, re.M)
    rows = [(float(size), *words, float(took)) for size, *words, took, _, _ in table if float(size) and float(took)]
    if not rows:
        raise ConfigError("the text of nccl-tests has no row of sizes and times", key="busbw")
    *_, (_, redop, root, _, alone, bus) = table
    passes = float(bus) / (float(alone) or 1)
    if not kind and root == "-1" and redop != "none":
        kind = "all_reduce" if passes >= 1 else "reduce_scatter"
    if not kind:
        raise ConfigError("the text does not name its collective: all_gather=FILE, all_to_all=FILE, ...", key="busbw")
    share = passes / float(bus_factor(kind, 2)) / 2  # (n - 1) / n, for at two ranks it is a half
    if ranks < 2 and 0.4 < share < 1:
        ranks = round(1 / (1 - share))
    if ranks < 2:
        raise ConfigError("the text lists no ranks (`#  Rank  0 ...`): is it what nccl-tests printed?", key="busbw")
    return [Measured(kind, size, 1e-6 * took, ranks) for size, _, _, took in rows]


def on(fabric: Fabric, points: Iterable[Measured]) -> Fabric:
    """Return the fabric on which collectives take what was measured: a start, that of the fastest, and a rate, that of the largest.

    Between more ranks than a domain has, the network's rate for all collectives follows from it.
    """
    for (kind, ranks), timed in lists(((point.kind, point.ranks), point) for point in points).items():
        largest = max(timed, key=lambda point: point.nbytes)
        start = min(point.seconds for point in timed) if len(timed) > 1 else NOTHING
        rate = largest.nbytes * float(bus_factor(kind, ranks)) / max(largest.seconds - start, NOTHING)
        if ranks <= fabric.domain:
            wires = fabric.wires | {kind: Wire(start, 0.0, rate / fabric.inner_bandwidth, 0.0)}
            nvls = 0.0 if kind == "all_reduce" else fabric.nvls
            fabric = msgspec.structs.replace(fabric, wires=wires, nvls=nvls)
            continue
        fabric = _across(msgspec.structs.replace(fabric, outer_start=start, outer_root=0.0), kind, largest)
    return fabric


def _across(fabric: Fabric, kind: str, timed: Measured) -> Fabric:
    """The fabric whose network is as fast as a collective over several domains took, by halving the factor of its rate."""
    low, high = 1e-6, 1e3
    for _ in range(80):
        share = (low * high) ** 0.5
        slower = msgspec.structs.replace(fabric, outer_efficiency=share)
        slow = seconds(kind, timed.nbytes, Group("dp", timed.ranks, 1), slower) > timed.seconds
        low, high = (share, high) if slow else (low, share)
    return msgspec.structs.replace(fabric, outer_efficiency=high)
