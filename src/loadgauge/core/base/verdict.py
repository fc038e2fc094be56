"""The words of a verdict and their exit codes: every command, document and page takes them from here.

A verdict compares the memory of a card with the 80 % range of what a run needs on it:

- `fits`: the card holds the upper end, whatever the job leaves unsaid.
- `tight`: its memory lies inside the range of the run as assumed.
- `depends`: as assumed it fits, or does not, and something that was not said, or not read, decides.
- `does not fit`: it does not hold the lower end of the run as assumed, nor with what was not read at its least.
- `unknown`: no card was given.
"""

from typing import Any, Literal, Protocol

from loadgauge.core.base.errors import NO, YES, ConfigError
from loadgauge.core.base.units import parse

Verdict = Literal["fits", "tight", "depends", "does not fit", "unknown"]
RANK: dict[Verdict, int] = {"fits": 0, "unknown": 0, "depends": 1, "tight": 2, "does not fit": 3}
"""The worse, the higher: what fits is ranked first."""


class Needs(Protocol):
    """Memory that a run needs of a card [bytes], whatever its task."""

    @property
    def total(self) -> float:
        """The predicted memory [bytes]."""

    @property
    def low(self) -> float:
        """The lower end of the 80 % range."""

    @property
    def high(self) -> float:
        """The upper end."""

    @property
    def capacity(self) -> float | None:
        """Return the memory of the card; None without one."""

    @property
    def verdict(self) -> Verdict:
        """Return whether it holds the run."""


def needs(memory: Needs) -> dict[str, Any]:
    """Return the fields on memory of every document, whatever the task: bytes, and the verdict.

    >>> from loadgauge import estimate
    >>> needs(estimate("gpt2", gpu="rtx4090", seq_len=1024).memory)["verdict"]
    'fits'
    """
    verdict = memory.verdict
    return {
        "total": memory.total,
        "low": memory.low,
        "high": memory.high,
        "capacity": memory.capacity,
        "fits": None if verdict == "unknown" else verdict == "fits",
        "verdict": verdict,
    }


def host_holds(nbytes: float, stated: str | None) -> bool:
    """Return whether a node's memory holds so many bytes; a node of which nothing is stated does. Raises `ConfigError`.

    >>> host_holds(300 * 2**30, "256GiB"), host_holds(300 * 2**30, None)
    (False, True)
    """
    if stated is None:
        return True
    size, unit = parse(stated, "host_memory", "byte")
    if unit != "byte":
        raise ConfigError(f"must be a size such as 512GiB, got {stated!r}", key="host_memory")
    return nbytes <= size


def judge(
    low: float, high: float, capacity: float | None, widest: float | None = None, least: float | None = None
) -> Verdict:
    """Return the verdict of a range on a card.

    low, high: ends of the range of the run as assumed [bytes]; widest: the upper end whatever is unsaid, where that is higher
    least: the lower end with what was not read at its least, where that is lower

    >>> [judge(low, high, 80, widest) for low, high, widest in ((60, 70, 75), (60, 70, 90), (70, 85, 85), (81, 90, 90))]
    ['fits', 'depends', 'tight', 'does not fit']
    >>> judge(81, 90, 80, least=75)
    'depends'
    """
    if capacity is None:
        return "unknown"
    if low > capacity:
        return "depends" if least is not None and least <= capacity else "does not fit"
    if high > capacity:
        return "tight"
    return "depends" if widest is not None and widest > capacity else "fits"


def exit_code(verdict: Verdict, *, allow_tight: bool = False) -> int:
    """Return the exit code of a command with this verdict: 0 where it fits or no card is given, else 1.

    allow_tight: 0 for `tight` too, and for nothing else

    >>> exit_code("fits"), exit_code("tight"), exit_code("tight", allow_tight=True), exit_code("depends", allow_tight=True)
    (0, 1, 0, 1)
    """
    return YES if verdict in ("fits", "unknown") or (allow_tight and verdict == "tight") else NO
