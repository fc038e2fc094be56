"""Writes `data/serving.toml`, what engines reach of a card, and `docs/decode.md`, which scores it: `make serving`.

Every figure starts at what physics or an engine's documentation suggests (`START`) and is held there, so that a group of points
without information leaves it. A point off by more than `SOFT` counts less: of pairs that differ in nothing that the table states,
a tenth differs by 30 % and more in a token and by half in a first one (`engines/page.py`). Scored with each model left out whole,
its figures fitted without it; then each card, and each
engine, whose figures are then those that all start from.

A server's queue is followed request by request (`serving/loop.py`). To fit, it is followed once for some times of a prompt around
that by the figures of before (`SCALES`), and read between them; a step's part of a token is taken as it is. Run again, until the
figures stay.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import least_squares

from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.serving.serving import EngineRates, Serving, serving
from loadgauge.core.serving.decode import Card, Kernels, Work, beside, lanes, load_of, reading
from loadgauge.core.serving.loop import Load, closed_loop
from loadgauge.evidence.validate.serving import Point, points, predicted, server, slots

OUT = Path(__file__).parents[2] / "src" / "loadgauge" / "data" / "serving.toml"
SOURCE = "aiconfigurator"
ENGINES = ("vllm", "sglang", "trtllm")
UNSAID = "model, and not told its options,"
SHARED = {
    "bandwidth": 0.8, "experts": 0.8, "cache": 0.8, "moved": 0.6, "flops": 0.7, "link": 0.6, "prompt_dense": 1.0,
    "prompt_experts": 2.5, "prompt_attention": 1.0, "prompt_rest": 1.0, "sent": 0.8, "blackwell": 1.0, "read": 3e-6, "apart": 1.0,
}  # fmt: skip
OWN = {
    "kernel": 2e-6, "host": 0.7e-3, "sequence": 1e-5, "collective": 8e-6, "prefill": 1.0, "steps": 3.0, "first": 2e-2,
    "request": 1e-3,
}  # fmt: skip
KINDS = {
    "vllm": (True, 0.5), "sglang": (False, 0.5), "trtllm": (True, 1.0), "hf": (False, 1.0),
}  # fmt: skip
"""Of each engine, whether a step reads prompts and makes tokens, and the share of an answer whose cache is held from its start on:
vLLM takes blocks as answers grow, TensorRT-LLM's usual scheduler takes them all so that none is evicted (`GUARANTEED_NO_EVICT`)."""
LOOSE = ("steps", "first", "request", "read", "apart")
"""Figures of first tokens alone, of which little is known beforehand."""
SOFT, HOLD, HOLD_LOOSE = 0.15, 8.0, 1.0
FIRST = 0.7
"""Weight of a first token beside a token."""
SCALES = (0.35, 0.55, 0.8, 1.15, 1.7, 2.6)
"""Times of a prompt at which queues are followed, over that by the figures of before."""


class Table(msgspec.Struct, frozen=True):
    """Points as arrays: their work, cards and prompts' kernels, what they were measured to take, and their queues: logarithms of
    seconds of a first token and of a token at each of `SCALES`, with a step's time at which they were followed."""

    found: list[Point]
    work: Work
    card: Card
    kernels: Kernels
    ranks: Any
    requests: Any
    prompt: Any
    engine: Any
    token: Any
    first: Any
    bare: Any
    step: Any
    queues: Any
    tokens: Any


def table(*, told: bool = True) -> Table:
    """Read all points that are layouts. told: with the options of their queues; else as an engine has them"""
    rows: list[tuple[Point, Work, Card, Kernels, Load, float]] = []
    for point in points():
        try:
            one = server(point)
        except Error:
            continue
        load = load_of(
            one, point.asked.batch, point.prompt, point.answer, slots(point, one), point.launched if told else None
        )
        running = max(1, round(min(load.slots, load.requests) / load.ranks))
        work = one.work(running, point.prompt + point.answer / 2)
        rows.append((point, work, one.card, one.kernels(point.prompt), load, load.idle + load.each * running))
    kernels = structs(Kernels, [row[3] for row in rows])
    bare = np.array([row[4].reading for row in rows])
    known: dict[Load, tuple[float, float]] = {}
    queues, tokens = np.zeros((len(rows), len(SCALES))), np.zeros((len(rows), len(SCALES)))
    for place, row in enumerate(rows):
        for column, scale in enumerate(SCALES):
            load = msgspec.structs.replace(
                row[4], reading=scale * row[4].reading, more=scale * (row[4].more or row[4].reading)
            )
            if load not in known:
                found = closed_loop(load)
                known[load] = found.first, found.token
            queues[place, column], tokens[place, column] = np.log(known[load])

    def column_of(of: Callable[[Point], float]) -> Any:
        return np.array([of(row[0]) for row in rows], float)

    return Table(
        found=[row[0] for row in rows], work=structs(Work, [row[1] for row in rows]),
        card=structs(Card, [row[2] for row in rows]), kernels=kernels, ranks=column_of(lambda p: p.attentions),
        requests=np.array([float(row[4].requests) for row in rows]), prompt=column_of(lambda p: p.prompt),
        engine=np.array([ENGINES.index(row[0].engine) for row in rows]), token=column_of(lambda p: p.token),
        first=column_of(lambda p: p.first), bare=bare, step=np.array([row[5] for row in rows]), queues=queues, tokens=tokens,
    )  # fmt: skip


def structs(kind: Any, rows: list[Any]) -> Any:
    """One struct of arrays from many of numbers."""
    return kind(**{name: np.array([float(getattr(row, name)) for row in rows]) for name in kind.__struct_fields__})


Values = dict[str, float]


def start() -> Values:
    """The figures before any point is read."""
    return SHARED | {f"{engine}.{name}": value for engine in ENGINES for name, value in OWN.items()}


def known_of(values: Values, engines: dict[str, EngineRates] | None = None) -> Serving:
    """The figures as `core/definitions/serving/serving.py` has them."""
    return Serving(
        date=datetime.date.today().isoformat(), source=SOURCE, points=0, token_low=1, token_high=1, first_low=1, first_high=1,
        **{name: values[name] for name in SHARED}, engines=engines or {},
    )  # fmt: skip


def predict(values: Values, data: Table) -> tuple[Any, Any]:
    """Seconds of a token and of a first one, of all points."""
    rates = {
        name: np.array([values[f"{engine}.{name}"] for engine in ENGINES])[data.engine] for name in OWN
    }  # fmt: skip
    engine = EngineRates(**rates, mixed=True, reserved=0.5)
    known = known_of(values)
    step = sum(lanes(data.work, data.card, known, engine).values())
    at = np.log(reading(data.kernels, data.card, known, engine) / data.bare)
    queue, token = between(data.queues, at), between(data.tokens, at)
    # What prompts add to a token, beside the step that was followed: at least a part of a step is left.
    token = np.maximum(step + token - data.step, 0.3 * step)
    waited, host = beside(token, data.prompt, data.requests, data.ranks, known, engine)
    return token, queue + waited + host


def between(rows: Any, at: Any) -> Any:
    """Values between columns, whose logarithms are given, at logarithms of scales."""
    scales = np.log(SCALES)
    at = np.clip(at, scales[0], scales[-1])
    low = np.clip(np.searchsorted(scales, at) - 1, 0, len(scales) - 2)
    share = (at - scales[low]) / (scales[low + 1] - scales[low])
    row = np.arange(len(at))
    return np.exp(rows[row, low] * (1 - share) + rows[row, low + 1] * share)


def fit(data: Table, keep: Any) -> Values:
    """Figures fitted to tokens and first tokens of the points kept together."""
    names = list(start())
    begin = np.log([start()[name] for name in names])
    hold = np.array([HOLD_LOOSE if name.rpartition(".")[2] in LOOSE else HOLD for name in names])

    def residuals(x: Any) -> Any:
        token, first = predict(dict(zip(names, np.exp(x), strict=True)), data)
        return np.concatenate([
            np.log(token / data.token)[keep], FIRST * np.log(first / data.first)[keep], hold * (x - begin),
        ])  # fmt: skip

    found = least_squares(residuals, begin, loss="soft_l1", f_scale=SOFT)
    return dict(zip(names, map(float, np.exp(found.x)), strict=True))


def left_out(data: Table, *fields: str, seen: Table | None = None) -> tuple[Any, Any]:
    """Predictions of every point by figures that were fitted without those equal to it in all fields. seen: the points as they are
    predicted; None: as they are fitted"""
    models = np.array([" ".join(getattr(point, field) for field in fields) for point in data.found])
    token, first = np.zeros(len(models)), np.zeros(len(models))
    for name in sorted(set(models)):
        out = models == name
        tokens, firsts = predict(fit(data, ~out), seen or data)
        token[out], first[out] = tokens[out], firsts[out]
    return token, first


def main() -> None:
    """Fit, write the figures and the page."""
    from engines.page import write

    data = table()
    values = fit(data, np.ones(len(data.found), bool))
    token, first = left_out(data, "model")
    bare = left_out(data, "model", seen=table(told=False))
    others = {word: left_out(data, field) for word, field in (("GPU", "gpu"), ("engine", "engine"))}
    low, high = np.quantile(data.token / token, (0.1, 0.9))
    first_low, first_high = np.quantile(data.first / first, (0.1, 0.9))
    waits, of = (
        np.array([point.launched.queues for point in data.found]),
        np.array([point.engine for point in data.found]),
    )
    lines = [
        "# Written by `make serving`: what engines of inference reach, fitted to measured points of servers; low, high: measured",
        "# over predicted, each model left out in turn, what 10 % and 90 % of the points lie below; unsaid: over first_high,",
        "# what 90 % of the servers whose prompts wait by an option lie below, predicted without it.",
        f'date = "{datetime.date.today().isoformat()}"', f'source = "{SOURCE}"', f"points = {len(data.found)}",
        *(f"{name} = {values[name]:.3g}" for name in SHARED),
        f"token_low = {low:.2f}", f"token_high = {high:.2f}", f"first_low = {first_low:.2f}", f"first_high = {first_high:.2f}",
    ]  # fmt: skip
    # transformers' generate is in no table of servers: the figures that the others start from.
    for engine, (mixed, reserved) in KINDS.items():
        own = {name: values.get(f"{engine}.{name}", start) for name, start in OWN.items()}
        lines += ["", f"[engines.{engine}]", *(f"{name} = {value:.3g}" for name, value in own.items())]
        lines += [f"mixed = {str(mixed).lower()}", f"reserved = {reserved}"]
        if (rows := waits & (of == engine)).any():
            lines.append(f"unsaid = {max(1.0, np.quantile((data.first / bare[1])[rows], 0.9) / first_high):.2f}")
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    serving.cache_clear()
    whole = {point: (took, until) for point, took, until in predicted()}
    took, until = (np.array([whole[point][which] for point in data.found]) for which in (0, 1))
    write(data, (took, until), (token, first), others | {UNSAID: bare})


if __name__ == "__main__":
    main()
