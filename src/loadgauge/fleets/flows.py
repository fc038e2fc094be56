"""Collectives that share links at the same time: max-min fair shares, and when each is done (source: bertsekas1992)."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from loadgauge.core.base.errors import ConfigError


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that go over some links, each by its name; most: the rate that the sender can reach alone [byte/s]."""

    nbytes: float
    links: tuple[str, ...]
    most: float = math.inf


def fair_shares(flows: Sequence[Flow], links: Mapping[str, float]) -> tuple[float, ...]:
    """Return the max-min fair rate of each flow [byte/s], on links of so many byte/s.

    All rates grow together; those on a link that is full stop growing. Raises `ConfigError` for a link that is not there.

    >>> two = [Flow(nbytes=1, links=("a",)), Flow(nbytes=1, links=("a", "b")), Flow(nbytes=1, links=("b",))]
    >>> fair_shares(two, {"a": 10, "b": 4})
    (8.0, 2.0, 2.0)
    """
    for flow in flows:
        missing = [link for link in flow.links if link not in links]
        if missing:
            raise ConfigError(f"no link {missing[0]!r}", key="flows")
    rates = [0.0] * len(flows)
    left = {link: float(capacity) for link, capacity in links.items()}
    growing = set(range(len(flows)))
    while growing:
        users = {link: sum(link in flows[index].links for index in growing) for link in links}
        steps = [left[link] / count for link, count in users.items() if count]
        steps += [flows[index].most - rates[index] for index in growing]
        step = min(steps, default=math.inf)
        if math.isinf(step):
            return tuple(math.inf if index in growing else rate for index, rate in enumerate(rates))
        full = {link for link, count in users.items() if count and left[link] / count <= step}
        for link, count in users.items():
            left[link] -= step * count
        done = set()
        for index in growing:
            rates[index] += step
            if rates[index] >= flows[index].most or full.intersection(flows[index].links):
                done.add(index)
        growing -= done
    return tuple(rates)


def finish(flows: Sequence[Flow], links: Mapping[str, float]) -> tuple[float, ...]:
    """Return when each flow ends if all begin at once [s]; shares are divided again whenever one ends.

    >>> finish([Flow(nbytes=10, links=("a",)), Flow(nbytes=30, links=("a",))], {"a": 10})
    (2.0, 4.0)
    """
    left = [flow.nbytes for flow in flows]
    ends = [0.0] * len(flows)
    open_ = [index for index, nbytes in enumerate(left) if nbytes > 0]
    now = 0.0
    while open_:
        rates = fair_shares([flows[index] for index in open_], links)
        wait = min(left[index] / rate for index, rate in zip(open_, rates, strict=True))
        now += wait
        still = []
        for index, rate in zip(open_, rates, strict=True):
            if left[index] / rate <= wait * (1 + 1e-12):
                ends[index] = now
            else:
                left[index] -= rate * wait
                still.append(index)
        open_ = still
    return tuple(ends)
