"""An estimate in a notebook: the verdict, the parts of the memory and the lanes of the step, as plain HTML."""

from __future__ import annotations

from html import escape

from loadgauge.estimate.result import Estimate
from loadgauge.show.plot.colours import COMPUTE, EXPOSED, PARTS
from loadgauge.show.report import verdict
from loadgauge.show.timing import LANES, headline, seconds
from loadgauge.units import GIB

Row = tuple[str, str, float, str]
"""Name, amount, share, colour."""
COMPUTES = ("forward", "backward", "recompute", "loss", "optimizer", "fixed")


def html(result: Estimate) -> str:
    """Self-contained HTML: no script, no file, readable on light and dark ground."""
    memory, time = result.memory, result.time
    parts: list[Row] = [
        (part, f"{nbytes / GIB:,.2f} GiB", nbytes / memory.total, PARTS[part])
        for part, nbytes in memory.parts.items()
        if nbytes
    ]
    title = f"Memory of a rank of stage {memory.rank.stage}, at its peak: {memory.moment}"
    tables = [_table(title, parts)]
    said = [verdict(result)]
    if time is not None:
        said.append(headline(time))
        lanes: list[Row] = [
            (lane, seconds(value), value / time.step, COMPUTE if lane in COMPUTES else EXPOSED)
            for lane, value in time.parts.items()
            if value > 0 and lane in LANES
        ]
        tables.append(_table("Time of a step", lanes))
    lines = "".join(f"<p style='margin:2px 0'>{escape(line)}</p>" for line in said)
    return f"<div><b>{escape(result.model.name)}</b>{lines}{''.join(tables)}</div>"


def _table(title: str, rows: list[Row]) -> str:
    cells = "".join(
        f"<tr><td style='text-align:left'>{escape(name)}</td><td style='text-align:right'>{amount}</td>"
        f"<td style='text-align:right'>{share:.1%}</td><td style='text-align:left;width:16em'>"
        f"<div style='background:{colour};height:.7em;width:{share:.2%}'></div></td></tr>"
        for name, amount, share, colour in rows
    )
    return f"<table><caption style='text-align:left;padding:6px 0'>{escape(title)}</caption>{cells}</table>"
