"""Figures: what is drawn adds up to the estimate, and files are what their ending says."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn_from, settings, strategies as st

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from command_line import document, typed
from loadgauge.core.answers.figure import plotted
from loadgauge.core.answers.figures.colours import EXPOSED, HIDDEN, IDLE, LANES, PARTS
from loadgauge.core.base.units import GIB
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.sheets.plot import blocks, steps
from loadgauge.sheets.plot.blocks import HEIGHT, squares

LINE = "estimate llama-3.1-70b --gpu h100-sxm5-80gb --gpus 256 --tp 8 --pp 4 --global-batch 512 --seq-len 8192"


@pytest.fixture(scope="module")
def result() -> Estimate:
    return resolve_job(
        Job(model="llama-3.1-70b", gpu="h100-sxm5-80gb", gpus=256, tp=8, pp=4, zero=1, seq_len=8192, global_batch=512)
    ).estimate()


def figure(draw: Any, result: Estimate) -> Any:
    axes = Figure().subplots()
    draw(axes, result)
    return axes


@settings(deadline=None)
@drawn_from(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.floats(0.1, 5), st.floats(0.1, 5))
def test_blocks_fill_their_box_without_overlap_in_proportion(sizes: list[float], width: float, height: float) -> None:
    sizes = sorted(sizes, reverse=True)
    found = squares(sizes, (0.0, 0.0, width, height))
    for size, (left, bottom, wide, high) in zip(sizes, found, strict=True):
        assert wide * high == pytest.approx(size / sum(sizes) * width * height, rel=1e-6)
        assert left >= -1e-9
        assert bottom >= -1e-9
        assert left + wide <= width * (1 + 1e-6)
        assert bottom + high <= height * (1 + 1e-6)
    for (left, bottom, wide, high), (x, y, w, h) in combinations(found, 2):
        across = min(left + wide, x + w) - max(left, x)
        up = min(bottom + high, y + h) - max(bottom, y)
        assert min(across, up) <= 1e-6 * (width + height)


def test_the_area_of_each_colour_is_its_part(result: Estimate) -> None:
    boxes = [
        patch for patch in figure(blocks.draw, result).patches if isinstance(patch, Rectangle) and patch.get_fill()
    ]
    memory = result.memory
    for part, nbytes in memory.parts.items():
        area = sum(
            box.get_width() * box.get_height()
            for box in boxes
            if box.get_facecolor()[3] and to_hex(box.get_facecolor()) == PARTS[part]
        )
        assert area == pytest.approx(HEIGHT * nbytes / memory.total, abs=1e-6), part


def test_solid_bars_of_the_lanes_add_up_to_the_step(result: Estimate) -> None:
    bars = [patch for patch in figure(steps.draw_lanes, result).patches if to_hex(patch.get_facecolor()) != HIDDEN]
    assert result.time is not None
    assert sum(bar.get_width() for bar in bars) == pytest.approx(result.time.step, rel=1e-9)
    red = sum(bar.get_width() for bar in bars if to_hex(bar.get_facecolor()) == EXPOSED)
    parts = result.time.parts
    assert red == pytest.approx(sum(parts[axis] for axis in ("tp", "cp", "ep", "pp", "zero", "dp")), rel=1e-9)
    assert set(LANES.values()).isdisjoint({EXPOSED, HIDDEN, IDLE})


def test_the_curve_reaches_the_peak_below_the_capacity(result: Estimate) -> None:
    axes = figure(steps.draw_moments, result)
    top = max(float(path.vertices[:, 1].max()) for area in axes.collections for path in area.get_paths())
    assert top == pytest.approx(result.memory.total / GIB, rel=1e-9)
    assert result.memory.capacity is not None
    assert axes.lines[0].get_ydata()[0] == pytest.approx(result.memory.capacity / GIB)


def test_every_stage_has_all_its_work(result: Estimate) -> None:
    axes = figure(steps.draw_schedule, result)
    work = [patch for patch in axes.patches if to_hex(patch.get_facecolor()) != IDLE]
    rows = [sum(1 for bar in work if abs(bar.get_y() + bar.get_height() / 2 - row) < 0.1) for row in range(4)]
    assert rows == [32] * 4  # 16 micro-batches, forward and backward


@pytest.mark.parametrize("name", ["all", *plotted()])
def test_svg_has_headings_as_text(name: str, tmp_path: Path) -> None:
    file = tmp_path / "figure.svg"
    assert typed(f"{LINE} --plot {file} --figure {name}").code in (0, 1)
    text = "".join(ElementTree.parse(file).getroot().itertext())
    for drawn in plotted().values() if name == "all" else [plotted()[name]]:
        assert drawn.title in text


@pytest.mark.long
def test_png_and_pdf_and_the_same_svg_twice(tmp_path: Path) -> None:
    for ending, magic in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        file = tmp_path / f"figure.{ending}"
        typed(f"{LINE} --plot {file} --figure time")
        assert file.read_bytes().startswith(magic)
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    typed(f"{LINE} --plot {one}")
    typed(f"{LINE} --plot {two}")
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    "line",
    [
        f"{LINE} --plot figure.jpeg",
        f"{LINE} --figure time",
        f"{LINE} --plot no-such-folder/figure.svg",
        "estimate llama-3.1-8b --plot figure.svg --figure time",
        f"{LINE} --plot figure.svg --figure pie",
    ],
)
def test_nonsense_is_one_line(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = typed(line)
    assert found.code == 2
    assert len(found.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_notebook_shows_the_numbers_of_the_estimate(result: Estimate) -> None:
    text: str = result._repr_html_()  # type: ignore[attr-defined]
    root = ElementTree.fromstring(text)
    cells = ["".join(cell.itertext()) for cell in root.iter("td")]
    for part, nbytes in result.memory.parts.items():
        if nbytes:
            assert cells[cells.index(part) + 1] == f"{nbytes / GIB:,.2f} GiB"
    assert "<script" not in text


def test_bars_of_a_table_end_at_the_sums_of_its_rows(tmp_path: Path) -> None:
    """Of any answer: here of a run after pre-training, whose table has a row a phase and a colour a role."""
    line = "estimate qwen3-0.6b --gpu h100 --gpus 4 --task dpo"
    phases = document(line)["memory"]["phases"]
    assert typed(f"{line} --plot {tmp_path / 'a.svg'}").code == 0
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for phase in phases:
        assert f">{phase['phase']}</text>" in drawn
        assert f"> {phase['total'] / GIB:,.4g}</text>" in drawn
    assert {
        role for phase in phases for part in phase["parts"] if (role := part["role"]) and f">{role}</text>" not in drawn
    } == set()
