"""Writes `data/calibration/<gpu>.toml` from the published runs: `make calibration`."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import msgspec

from accuracy.fit import CHIPS, FITTED, Sample, fit_chip
from accuracy.held_out import held_out, samples
from loadgauge.spec.calibration import DEFAULT, Rates
from loadgauge.validate.runs import Run, published
from loadgauge.validate.summary import configuration_weights

WIDER = 1.5
"""How much wider the range of a GPU is that only its chip's other GPUs calibrate, as a power of the factors."""
QUALITY = "A"
"""Of the rows that calibrate: their configuration is known whole."""


def spread(errors: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The factors on a prediction between which 80 % of the measured times lie, from (predicted / measured, weight)."""
    ordered = sorted((1 / ratio, weight) for ratio, weight in errors)
    total, so_far = sum(weight for _, weight in ordered), 0.0
    low, high = ordered[0][0], ordered[-1][0]
    for factor, weight in ordered:
        if so_far < 0.1 * total:
            low = factor
        if so_far < 0.9 * total:
            high = factor
        so_far += weight
    return min(low, 0.95), max(high, 1.05)


def fitted(runs: Sequence[Run], chip: str, date: str) -> dict[str, Rates]:
    """The calibration of each GPU of a chip, with the rows it comes from and its range.

    The range is that of rows which the fit had not seen: each source predicted by the fit to the others. Where there is
    record source only, it is the default's.
    """
    by_gpu = samples([run for run in runs if run.quality == QUALITY])
    own: Mapping[str, list[Sample]] = {gpu: [s for _, s in by_gpu[gpu]] for gpu in CHIPS[chip] if gpu in by_gpu}
    made = fit_chip(own, chip)
    members = [run for gpu in own for run, _ in by_gpu[gpu]]
    low, high = DEFAULT.low, DEFAULT.high
    if len({run.series for run in members}) > 1:
        unseen = [record for record in held_out(members, say=print) if record.error is not None]
        weights = configuration_weights(unseen)
        low, high = spread([(1 + (record.error or 0), weight) for record, weight in zip(unseen, weights, strict=True)])
    every = tuple(sample.id for gpu in own for sample in own[gpu])
    finished = {}
    for gpu, known in made.items():
        rows = tuple(sample.id for sample in own.get(gpu, ()))
        power = 1.0 if rows else WIDER
        finished[gpu] = msgspec.structs.replace(
            known, low=round(low**power, 3), high=round(high**power, 3), date=date, rows=rows or every,
            basis="measured" if rows else "measured on other GPUs of the chip",
        )  # fmt: skip
    return finished


def text(known: Rates) -> str:
    """A calibration as a TOML file."""
    lines = [
        f"# Efficiencies of {known.gpu}, fitted to published runs by `make calibration`; their sources are in data/runs.",
        f'gpu = "{known.gpu}"',
        f'basis = "{known.basis}"',
        f'date = "{known.date}"',
    ]
    lines += [f"{name} = {_digits(getattr(known, name))}" for name in FITTED]
    lines += [f"multiprocessors = {known.multiprocessors}"]
    lines += [f"{name} = {getattr(known, name)}" for name in ("low", "high", "low_measured", "high_measured")]
    return "\n".join([*lines, "rows = [", *(f'  "{row}",' for row in known.rows), "]", ""])


def _digits(value: float) -> str:
    """Three digits that count, as a float of TOML."""
    if value == 0 or abs(value) < 1e-12:
        return "0.0"
    places = 2 - math.floor(math.log10(abs(value)))
    return repr(round(value, max(places, 1)))


def main() -> None:
    """Fits every chip and writes its files."""
    folder = Path(str(resources.files("loadgauge"))) / "data" / "calibration"
    folder.mkdir(exist_ok=True)
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    runs = published().runs
    for chip in CHIPS:
        for gpu, known in fitted(runs, chip, date).items():
            (folder / f"{gpu}.toml").write_text(text(known), encoding="utf-8")
            print(f"{gpu}: {len(known.rows)} rows, {known.basis}, range {known.low} to {known.high}", flush=True)


if __name__ == "__main__":
    main()
