"""Writes `data/serving.toml`, what engines reach of a card, and `docs/decode.md`, which scores it: `make serving`.

Every figure starts at what physics or an engine's documentation suggests (`START`) and is held there, so that a group of points
without information leaves it. A point off by more than `SOFT` counts less: of pairs that differ in nothing that the table states,
a tenth differs by 30 % and more (`engines/page.py`). Scored with each model left out whole, its figures fitted without it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import least_squares

from loadgauge.errors import Error
from loadgauge.inference.decode import Card, Work, lanes, steady
from loadgauge.spec.serving import EngineRates, Serving
from loadgauge.validate.serving import Point, points, server, slots

OUT = Path(__file__).parents[2] / "src" / "loadgauge" / "data" / "serving.toml"
SOURCE = "aiconfigurator"
ENGINES = ("vllm", "sglang", "trtllm")
SHARED = {
    "bandwidth": 0.8, "experts": 0.8, "cache": 0.8, "moved": 0.6, "flops": 0.7, "link": 0.6, "blackwell": 1.0, "steps": 1.0,
    "queue": 1.0,
}  # fmt: skip
OWN = {
    "kernel": 2e-6, "host": 0.7e-3, "sequence": 1e-5, "collective": 8e-6, "prefill": 0.8, "first": 2e-2, "prompt": 1.0,
    "burst": 0.1, "request": 1e-3,
}  # fmt: skip
OF_FIRST = ("steps", "queue", "first", "prompt", "burst", "request")
"""Figures of first tokens, fitted after the rest, to first tokens."""
SOFT, HOLD, HOLD_FIRST = 0.15, 3.0, 0.3


class Table(msgspec.Struct, frozen=True):
    """Points as arrays: their work, cards, prompts' seconds of kernels and wire, and what was measured."""

    found: list[Point]
    work: Work
    card: Card
    kernels: Any
    wire: Any
    running: Any
    requests: Any
    answer: Any
    attentions: Any
    engine: Any
    token: Any
    first: Any


def table() -> Table:
    """Read all points that are layouts."""
    rows: list[tuple[Point, Work, Card, float, float, float]] = []
    for point in points():
        try:
            one = server(point)
        except Error:
            continue
        batch, run = point.asked.batch, slots(point, one)
        running = min(float(batch), run)
        bare = msgspec.structs.replace(one.engine, prefill=1.0)
        one.engine, known = bare, one.known
        one.known = msgspec.structs.replace(known, blackwell=1.0, link=1e18)
        kernels = one._read(point.prompt, 1)
        one.known = msgspec.structs.replace(known, blackwell=1.0, link=1.0)
        wire = one._read(point.prompt, 1) - kernels
        work = one.work(max(1, round(running)), point.prompt + point.answer / 2)
        rows.append((point, work, one.card, kernels, wire, running))
    found = [row[0] for row in rows]

    def column(of: Callable[[Any], float], part: int = 0) -> Any:
        return np.array([of(row[part]) for row in rows], float)

    return Table(
        found=found,
        work=Work(**{name: column(lambda w, n=name: getattr(w, n), 1) for name in Work.__struct_fields__}),  # type: ignore[misc]
        card=Card(**{name: column(lambda c, n=name: getattr(c, n), 2) for name in Card.__struct_fields__}),  # type: ignore[misc]
        kernels=np.array([row[3] for row in rows]), wire=np.array([row[4] for row in rows]),
        running=np.array([row[5] for row in rows]), requests=column(lambda p: p.asked.batch),
        answer=column(lambda p: p.answer), attentions=column(lambda p: p.attentions),
        engine=np.array([ENGINES.index(row[0].engine) for row in rows]),
        token=column(lambda p: p.token), first=column(lambda p: p.first),
    )  # fmt: skip


Values = dict[str, float]


def start() -> Values:
    """The figures before any point is read."""
    return SHARED | {f"{engine}.{name}": value for engine in ENGINES for name, value in OWN.items()}


def known_of(values: Values, engines: dict[str, EngineRates] | None = None) -> Serving:
    """The figures as `spec/serving.py` has them."""
    return Serving(
        date=datetime.date.today().isoformat(), source=SOURCE, points=0, token_low=1, token_high=1, first_low=1, first_high=1,
        **{name: values[name] for name in SHARED}, engines=engines or {},
    )  # fmt: skip


def predict(values: Values, data: Table) -> tuple[Any, Any]:
    """Seconds of a token and of a first one, of all points."""
    rates = {
        name: np.array([values[f"{engine}.{name}"] for engine in ENGINES])[data.engine] for name in OWN
    }  # fmt: skip
    engine = EngineRates(**rates)
    known = known_of(values)
    step = sum(lanes(data.work, data.card, known, engine).values())
    chip = np.where(data.card.blackwell > 0, values["blackwell"], 1.0)
    prompt = engine.prefill * chip * (data.kernels + data.wire / values["link"])
    token, first = steady(step, prompt, data.running, data.requests, data.answer, data.attentions, known, engine)
    return token, first


def fit(data: Table, keep: Any) -> Values:
    """Figures fitted to the points kept: first those of tokens, then those of first tokens."""
    values = start()
    for of_first, hold in ((False, HOLD), (True, HOLD_FIRST)):
        names = [name for name in values if (name.rpartition(".")[2] in OF_FIRST) == of_first]
        begin = np.log([values[name] for name in names])
        measured = np.log(data.first if of_first else data.token)[keep]
        fixed, which = dict(values), 1 if of_first else 0

        def residuals(
            x: Any, names: list[str] = names, begin: Any = begin, measured: Any = measured, fixed: Values = fixed,
            which: int = which, hold: float = hold,
        ) -> Any:  # fmt: skip
            trial = fixed | dict(zip(names, np.exp(x), strict=True))
            return np.concatenate([np.log(predict(trial, data)[which])[keep] - measured, hold * (x - begin)])

        found = least_squares(residuals, begin, loss="soft_l1", f_scale=SOFT)
        values |= dict(zip(names, map(float, np.exp(found.x)), strict=True))
    return values


def left_out(data: Table) -> tuple[Any, Any]:
    """Predictions of every point by figures that were fitted without its model."""
    models = np.array([point.model for point in data.found])
    token, first = np.zeros(len(models)), np.zeros(len(models))
    for name in sorted(set(models)):
        out = models == name
        tokens, firsts = predict(fit(data, ~out), data)
        token[out], first[out] = tokens[out], firsts[out]
    return token, first


def main() -> None:
    """Fit, write the figures and the page."""
    from engines.page import write

    data = table()
    values = fit(data, np.ones(len(data.found), bool))
    token, first = left_out(data)
    low, high = np.quantile(data.token / token, (0.1, 0.9))
    first_low, first_high = np.quantile(data.first / first, (0.1, 0.9))
    lines = [
        "# Written by `make serving`: what engines of inference reach, fitted to measured points of servers; low, high: measured",
        "# over predicted, each model left out in turn, what 10 % and 90 % of the points lie below.",
        f'date = "{datetime.date.today().isoformat()}"', f'source = "{SOURCE}"', f"points = {len(data.found)}",
        *(f"{name} = {values[name]:.3g}" for name in SHARED),
        f"token_low = {low:.2f}", f"token_high = {high:.2f}", f"first_low = {first_low:.2f}", f"first_high = {first_high:.2f}",
    ]  # fmt: skip
    for engine in ENGINES:
        lines += ["", f"[engines.{engine}]", *(f"{name} = {values[f'{engine}.{name}']:.3g}" for name in OWN)]
    # transformers' generate is in no table of servers: the figures that the others start from.
    lines += ["", "[engines.hf]", *(f"{name} = {OWN[name]:.3g}" for name in OWN)]
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    whole = predict(values, data)
    write(data, whole, (token, first))


if __name__ == "__main__":
    main()
