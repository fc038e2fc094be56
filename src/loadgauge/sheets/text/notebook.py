"""An estimate where Python shows it: as a line, as text (`print`), and as plain HTML (in a notebook)."""

from html import escape

from loadgauge.core.answers.figures.colours import COMPUTE, EXPOSED, PARTS
from loadgauge.core.answers.figures.lanes import MEANING
from loadgauge.core.base.units import GIB, count, gib, seconds
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.text.estimate.estimate import text as report_text, verdict
from loadgauge.core.text.estimate.setup import batch_words
from loadgauge.core.text.estimate.step_time import headline

Row = tuple[str, str, float, str]
"""Name, amount, share, colour."""
COMPUTES = ("forward", "backward", "recompute", "loss", "optimizer", "fixed")


def line(result: Estimate) -> str:
    """Return the model and the verdict in one line, as a Python prompt shows it.

    >>> from loadgauge import Layout, estimate
    >>> repr(estimate("gpt2", Layout(seq_len=1024))).partition(", 80 % range")[0][-25:]
    'worst rank (stage 0 of 1)'
    """
    return f"<Estimate of {result.model.name}: {' '.join(verdict(result).split())}>"


def text(result: Estimate) -> str:
    """Return the text that `print` shows: the command's report where the estimate knows its job, otherwise a shorter one.

    That has the verdict, the parts of the memory, the components of the step and the assumptions.
    """
    if result.setup is not None:
        return report_text(result.setup, result)
    memory, time, layout = result.memory, result.time, result.layout
    lines = [
        verdict(result),
        f"{result.model.name}, {count(result.params)} parameters, on {layout.gpus:,} x {result.gpu or 'GPU'};"
        f" a step of {batch_words(result.model, layout.global_batch, layout.seq_len)}",
        f"Memory of that rank at its peak, {memory.moment}:",
    ]
    lines += [
        f"  {part:<12}{nbytes / GIB:>10,.2f} GiB {nbytes / memory.total:>6.1%}"
        for part, nbytes in memory.parts.items()
        if nbytes
    ]
    if time is not None:
        lines.append(headline(time))
        lines += [
            f"  {lane:<12}{seconds(value):>10} {value / time.step:>10.1%}"
            for lane, value in time.parts.items()
            if value > 0
        ]
    if result.assumed:
        lines.append("Assumed: " + ", ".join(f"{name} {value}" for name, value in result.assumed.items()))
    lines.append("Not counted: " + "; ".join(result.not_counted))
    return "\n".join(lines)


def html(result: Estimate) -> str:
    """Return self-contained HTML: no script, no file, readable on light and dark ground."""
    memory, time = result.memory, result.time
    parts: list[Row] = [
        (part, f"{gib(nbytes)}", nbytes / memory.total, PARTS[part]) for part, nbytes in memory.parts.items() if nbytes
    ]
    title = f"Memory of a rank of stage {memory.rank.stage}, at its peak: {memory.moment}"
    tables = [_table(title, parts)]
    headlines = [verdict(result)]
    if time is not None:
        headlines.append(headline(time))
        lanes: list[Row] = [
            (lane, seconds(value), value / time.step, COMPUTE if lane in COMPUTES else EXPOSED)
            for lane, value in time.parts.items()
            if value > 0 and lane in MEANING
        ]
        tables.append(_table("Time of a step", lanes))
    lines = "".join(f"<p style='margin:2px 0'>{escape(line)}</p>" for line in headlines)
    return f"<div><b>{escape(result.model.name)}</b>{lines}{''.join(tables)}</div>"


def _table(title: str, rows: list[Row]) -> str:
    cells = "".join(
        f"<tr><td style='text-align:left'>{escape(name)}</td><td style='text-align:right'>{amount}</td>"
        f"<td style='text-align:right'>{share:.1%}</td><td style='text-align:left;width:16em'>"
        f"<div style='background:{colour};height:.7em;width:{share:.2%}'></div></td></tr>"
        for name, amount, share, colour in rows
    )
    return f"<table><caption style='text-align:left;padding:6px 0'>{escape(title)}</caption>{cells}</table>"
