"""Unspecified settings that could change a job's memory, and the one question that decides its verdict."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from loadgauge.core.base import RANK, Verdict, gib, judge
from loadgauge.core.estimate.memory.counters import Reading


class Alternative(msgspec.Struct, frozen=True):
    """Another value of something unsaid, and the bytes by which the peak is higher with it."""

    value: str
    change: float


class Unsaid(msgspec.Struct, frozen=True):
    """Something that the job does not say: the flag that says it, the value assumed, and what it may be as well.

    key: instead of a flag, a key of a job file that was not read
    endless: whether it may change the peak by no amount that is known
    """

    flag: str
    assumed: str
    others: tuple[Alternative, ...]
    key: bool = False
    endless: bool = False

    @property
    def eases(self) -> bool:
        """Return whether it may make a run fit that does not as assumed: what was not read, or which release runs."""
        return self.key or self.flag == "--version"

    @property
    def fewer(self) -> float:
        """Bytes by which the peak may be lower."""
        return max([0.0, *(-other.change for other in self.others)])

    @property
    def least(self) -> Alternative:
        """The value with the lowest peak."""
        return min(self.others, key=lambda other: other.change)

    @property
    def most(self) -> Alternative:
        """The value with the highest peak."""
        return max(self.others, key=lambda other: other.change)

    @property
    def more(self) -> float:
        """Bytes by which the peak may be higher."""
        return max([0.0, *(other.change for other in self.others)])

    def fields(self, value: str) -> dict[str, Any]:
        """Return the field of a job that says a value; nothing for a key of a file."""
        typed: Any = {"on": True, "off": False}.get(value, int(value) if value.isdecimal() else value)
        return {} if self.key else {self.flag.strip("-").replace("-", "_"): typed}


class Choice(msgspec.Struct, frozen=True):
    """One answer to a question: its value, the memory with it [bytes], the verdict, and the fields of a job that say it."""

    value: str
    assumed: bool
    total: float
    low: float
    high: float
    verdict: Verdict
    fields: Mapping[str, Any]


class Question(msgspec.Struct, frozen=True):
    """The one thing that decides a verdict: its flag, or the key of a job file that was not read, and each answer."""

    flag: str
    choices: tuple[Choice, ...]
    key: bool = False

    @property
    def endless(self) -> bool:
        """Return whether a key decides of which no amount is known, so that no change of the run is an answer."""
        return len(self.choices) == 1

    def words(self) -> str:
        """Return the deciding choice, and the verdict of each of its values.

        >>> choices = [Choice("bfloat16", True, 2.0**30, 0, 0, "fits", {}), Choice("float32", False, 2.0**31, 0, 0, "tight", {})]
        >>> Question("--weights", tuple(choices)).words()
        '--weights decides: bfloat16 (assumed) 1.0 GiB, FITS; float32 2.0 GiB, TIGHT'
        """
        answers = [
            f"{choice.value}{' (assumed)' if choice.assumed and not self.key else ''} {gib(choice.total, 1)},"
            f" {choice.verdict.upper()}"
            for choice in self.choices
        ]
        asked = f"{self.flag} of the file, not read, decides" if self.key else f"{self.flag} decides"
        if self.endless:
            asked = f"{self.flag} of the file, not read, may change memory by an amount that is not known"
        return f"{asked}: {'; '.join(answers)}"


def ask(
    unsaid: Sequence[Unsaid], verdict: Verdict, ends: Callable[[float], Reading], capacity: float | None
) -> Question | None:
    """Return the unspecified choice that decides the verdict, with the verdict of each of its values; None where none decides.

    Of several, the one with the largest effect on memory; where none decides alone, all of them together at their largest. One
    whose effect is not known decides where no other does.
    ends: the memory a card must have, from the bytes that a choice adds to the peak

    >>> dtype = Unsaid("--weights", "bfloat16", (Alternative("float32", 30.0),))
    >>> asked = ask([dtype], "depends", lambda more: Reading(50 + more, 60 + more, 70 + more), 79.0)
    >>> asked.flag, [(choice.value, choice.verdict) for choice in asked.choices]
    ('--weights', [('bfloat16', 'fits'), ('float32', 'does not fit')])
    """
    if verdict not in ("depends", "tight"):
        return None

    def choice(value: str, change: float, fields: Mapping[str, Any], assumed: bool = False) -> Choice:
        needed = ends(change)
        word = judge(needed.low, needed.high, capacity)
        return Choice(value, assumed, needed.value, needed.low, needed.high, word, fields)

    def answers(thing: Unsaid) -> tuple[Choice, ...]:
        return tuple(choice(other.value, other.change, thing.fields(other.value)) for other in thing.others)

    def own(thing: Unsaid) -> Choice:
        return choice(thing.assumed, 0.0, thing.fields(thing.assumed), assumed=True)

    alone = RANK[choice("", 0.0, {}).verdict]
    beyond = alone > RANK["tight"]
    if beyond:  # which what is not read may change
        moving = sorted((thing for thing in unsaid if thing.eases and thing.fewer > 0), key=lambda thing: -thing.fewer)
        ends_of = [(thing, thing.least) for thing in moving]
    else:
        moving = sorted((thing for thing in unsaid if thing.more > 0), key=lambda thing: -thing.more)
        ends_of = [(thing, thing.most) for thing in moving]
    bar = RANK[max(verdict, "depends", key=RANK.__getitem__)]

    def decides(answer: Choice) -> bool:
        return RANK[answer.verdict] < alone if beyond else RANK[answer.verdict] > bar

    for thing in moving:
        if any(map(decides, others := answers(thing))):
            return Question(thing.flag, (own(thing), *others), thing.key)
    if verdict == "tight":
        return None
    if ends_of:
        (thing, end), *rest = ends_of
        words = [end.value, *(f"with {each.flag} {other.value}" for each, other in rest)]
        fields = {name: value for each, other in ends_of for name, value in each.fields(other.value).items()}
        whole = choice(" ".join(words), sum(other.change for _, other in ends_of), fields)
        if decides(whole):
            return Question(thing.flag, (own(thing), whole), thing.key)
    endless = next((thing for thing in unsaid if thing.endless), None)
    return None if endless is None else Question(endless.flag, (own(endless),), endless.key)
