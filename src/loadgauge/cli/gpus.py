"""`loadgauge gpus`: the catalogue of GPUs."""

from __future__ import annotations

import click

from loadgauge.spec.hardware import Gpu, Quantity, gpus
from loadgauge.units import GIB


@click.command("gpus")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON document: base units, null where no source states the figure."
)
def command(as_json: bool) -> None:
    """List the GPUs of the catalogue: memory, bandwidths and peak rates, from the sources of each figure.

    A cell is empty if no trusted source states the figure.
    """
    from loadgauge.report.catalogue import gpu_row
    from loadgauge.report.table import Column, console, document, draw, points

    if as_json:
        document({"gpus": [gpu_row(card) for card in gpus()]})
        return
    target = console()
    columns = [
        Column("\nGPU"),
        Column("\nname", wide=True, wrap=True),
        Column("memory\nGiB", "right"),
        Column("\nbasis", style="dim", rank=1),
        Column("memory\nTB/s", "right"),
        Column("bf16\nTFLOP/s", "right"),
        Column("link\nGB/s", "right"),
        Column("link\nGPUs", "right"),
        Column("NIC\nGB/s", "right"),
        Column("power\nW", "right", wide=True),
        Column("\nconfidence", wide=True),
    ]
    draw(target, columns, [_row(card) for card in gpus()])
    notes = [
        "memory: as the driver reports it, or, where no report is known, by the label (1 GB = 10^9 bytes)",
        "bf16: dense peak; link and NIC: per GPU and direction; link GPUs: GPUs in one link domain",
        "empty cell: no trusted source states the figure",
    ]
    target.print()
    points(target, notes)


def _row(card: Gpu) -> list[str]:
    return [
        card.id,
        card.name,
        f"{card.capacity / GIB:.1f}",
        "driver" if card.capacity_basis == "reported" else "label",
        _scaled(card.memory.bandwidth, 1e12, 2),
        _scaled(card.peaks.bf16, 1e12, 1),
        _scaled(card.interconnect.bandwidth, 1e9, 0),
        _scaled(card.interconnect.domain, 1, 0),
        _scaled(card.nic.bandwidth, 1e9, 0),
        _scaled(card.power.tdp, 1, 0),
        card.confidence,
    ]


def _scaled(figure: Quantity | None, unit: float, digits: int) -> str:
    return "" if figure is None else f"{figure.value / unit:,.{digits}f}"
