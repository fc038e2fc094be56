"""The view with sliders: moved in this process, and in a notebook that nbclient runs."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

import loadgauge
from loadgauge.core.answers.figures.colours import PARTS
from loadgauge.core.text import drawings

ipywidgets = pytest.importorskip("ipywidgets", reason="it comes with the extra notebook, and with dev")
FLAGS: dict[str, Any] = {"gpu": "h100-sxm5-80gb", "gpus": 8, "zero": 3}


def test_a_slider_moves_the_estimate() -> None:
    from loadgauge.sheets.notebook import view

    shown = view("llama-3.1-8b", **FLAGS)
    assert shown.result == loadgauge.estimate("llama-3.1-8b", **FLAGS)
    for name, value in (("micro_batch", 4), ("seq_len", 8192), ("recompute", "full"), ("tp", 2)):
        shown.controls[name].value = value
        FLAGS[name] = value
        assert shown.result == loadgauge.estimate("llama-3.1-8b", **FLAGS)
    assert loadgauge.estimate(shown.job) == shown.result
    assert shown.job.command() in shown.text.replace("&#x27;", "'")
    assert f"{shown.result.memory.total / 2**30:,.1f} GiB" in shown.text
    # Whatever was not moved still follows from the others, as on the command line.
    assert shown.job.global_batch is None
    shown.controls["gpus"].value = 16
    assert shown.result is not None
    assert shown.result.layout.dp == 8


def test_what_cannot_be_is_said_in_place() -> None:
    from loadgauge.sheets.notebook import view

    shown = view("gpt2", gpu="rtx4090", gpus=2, micro_batch=3)
    assert shown.controls["micro_batch"].value == 3
    shown.controls["tp"].value = 8
    assert shown.result is None
    assert "tp" in shown.text
    assert "<svg" not in shown.text
    shown.controls["tp"].value = 1
    assert shown.result is not None
    assert shown.text.count("<svg") == 2


def test_the_drawing_has_the_heights_of_the_memory() -> None:
    result = loadgauge.estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3)
    drawn = drawings.memory(result, height=1000)
    corners = [[float(number) for number in re.split("[ ,]", one)] for one in re.findall(r"points='([^']*)'", drawn)]
    (line,) = (float(y) for y in re.findall(r"<line x1='0' x2='640' y1='([\d.]+)'", drawn))
    top = min(min(points[1::2]) for points in corners)
    assert result.memory.capacity is not None
    assert (1000 - top) / (1000 - line) == pytest.approx(result.memory.total / result.memory.capacity, rel=2e-3)
    assert len(corners) == len([part for part in PARTS if f">{part}: " in drawn])
    assert drawings.time(result).count("<rect") > 5


NOTEBOOK = """
import loadgauge
from loadgauge.sheets.notebook import view
shown = view("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3)
shown
""", """
shown.controls["micro_batch"].value = 4
print(round(shown.result.memory.total))
""", """
loadgauge.estimate("gpt2", gpu="rtx4090")
"""  # fmt: skip


def test_a_notebook_runs_it() -> None:
    nbclient = pytest.importorskip("nbclient", reason="it comes with the extra dev")
    pytest.importorskip("ipykernel", reason="it comes with the extra dev")
    import nbformat
    from jupyter_client import KernelManager

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in NOTEBOOK])
    manager = KernelManager()
    # This process's Python, whatever kernels are installed.
    manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    nbclient.NotebookClient(book, timeout=600, km=manager).execute()
    (widget,) = book.cells[0].outputs
    assert "application/vnd.jupyter.widget-view+json" in widget["data"]
    states = book.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"].values()
    sliders = [one["state"]["description"] for one in states if one["model_name"] == "SelectionSliderModel"]
    assert {"micro batch", "seq len", "zero"} <= set(sliders)
    (shown,) = (one["state"]["value"] for one in states if one["model_name"] == "HTMLModel")
    wanted = loadgauge.estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, micro_batch=4).memory.total
    assert book.cells[1].outputs[0]["text"] == f"{round(wanted)}\n"
    assert "--micro-batch 4" in shown
    assert "<table>" in book.cells[2].outputs[0]["data"]["text/html"]
