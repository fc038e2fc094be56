"""A figure that only its function knows: registered, it is drawn, chosen, served and carried with no word about it elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure as Sheet

from command_line import typed
from loadgauge.core.answers.figure import FIGURES, Figure, figures, plotted
from loadgauge.core.answers.figures.colours import PARTS
from loadgauge.core.base.units import GIB
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.text import drawings
from loadgauge.sheets.plot.forms import FORMS

JOB = Job(model="gpt2", gpu="l4")
LINE = "estimate gpt2 --gpu l4"


def by_moment(result: Estimate) -> dict[str, Any]:
    """Bytes by part at each moment of the step."""
    rows = {moment.name: moment.parts for moment in result.memory.moments}
    return {"rows": rows, "unit": "byte", "limit": result.memory.capacity}


def over_moments(result: Estimate) -> dict[str, Any]:
    """The same as series."""
    moments = result.memory.moments
    series = {part: [moment.parts[part] for moment in moments] for part in PARTS}
    x = list(range(len(moments)))
    return {"x": x, "along": "moment", "series": series, "unit": "byte", "limit": result.memory.capacity}


@pytest.fixture(params=["bars", "lines", "areas"])
def probe(request: pytest.FixtureRequest) -> Iterator[Figure]:
    """A figure of a form, registered for one test."""
    data = by_moment if request.param == "bars" else over_moments
    shown = ("run", "single", "notebook")
    Figure(title="A probe", chinese="试", form=request.param, order=99, plot="probe", shown=shown)(data)
    yield FIGURES[data.__name__]
    del FIGURES[data.__name__]


def test_every_figure_has_an_order_of_its_own() -> None:
    orders = [each.order for each in figures()]
    assert orders == sorted(set(orders))
    assert len(plotted()) == len([each for each in figures() if each.plot])


def test_a_new_figure_is_chosen_and_drawn(probe: Figure, tmp_path: Path) -> None:
    assert "probe" in typed(f"{LINE} --figure none --plot a.svg").err
    for name in ("probe", "all"):
        assert typed(f"{LINE} --plot {tmp_path / name}.svg --figure {name}").code in (0, 1)
        assert "A probe" in (tmp_path / f"{name}.svg").read_text(encoding="utf-8")


def test_a_new_figure_is_in_the_notebook_as_high_as_its_numbers(probe: Figure) -> None:
    result = resolve_job(JOB).estimate()
    text = drawings.drawn(result)
    assert text.count("<svg") == 3
    own = text[text.index("A probe") :]
    largest = max(moment.parts["weights"] for moment in result.memory.moments)
    assert f"weights: {largest / GIB:,.2f} GiB" in own
    if probe.form == "bars":
        widths = [float(width) for width in re.findall(r"width='([\d.]+)' fill='#", own)]
        wide = (drawings.WIDTH - drawings.LEFT) / (result.memory.capacity or 0)
        sizes = [size for moment in result.memory.moments for size in moment.parts.values()]
        assert widths == pytest.approx([max(size * wide, 0.5) for size in sizes], abs=0.06)


def test_forms_draw_the_numbers(probe: Figure) -> None:
    result = resolve_job(JOB).estimate()
    axes = Sheet().subplots()
    FORMS[probe.form](axes, probe.data(result))
    most = max(moment.total for moment in result.memory.moments) / GIB
    if probe.form == "bars":
        ends = [patch.get_x() + patch.get_width() for patch in axes.patches]
        assert max(ends) == pytest.approx(most)
    elif probe.form == "areas":
        tops = [path.vertices[:, 1].max() for area in axes.collections for path in area.get_paths()]
        assert max(tops) == pytest.approx(most)
    else:
        series = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
        for part, sizes in probe.data(result)["series"].items():
            if any(sizes):
                assert series[part] == pytest.approx([size / GIB for size in sizes])
