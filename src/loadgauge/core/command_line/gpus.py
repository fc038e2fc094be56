"""`loadgauge gpus`: the catalogue of GPUs."""

import re
from typing import Any, get_args

import click

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.base import GIB, ConfigError
from loadgauge.core.command_line.options.answering import answering
from loadgauge.core.definitions.hardware.gpu_names import nearest, plain, variants
from loadgauge.core.definitions.hardware.hardware import Gpu, Segment, Vendor, gpu, gpu_ids, gpus
from loadgauge.core.text.catalogue import gpu_row
from loadgauge.core.text.show import BLOCKS
from loadgauge.core.text.table import Column, Notes, Table

VENDORS = {
    "nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel", "apple": "Apple", "google": "Google", "aws": "AWS", "huawei": "Huawei",
    "other": "",
}  # fmt: skip
SEGMENTS = {
    "datacenter": "data center", "workstation": "workstation", "consumer": "consumer", "laptop": "laptop",
    "unified": "memory shared with the system",
}  # fmt: skip


COLUMNS = (
    Column("\nGPU", whole=True),
    Column("\nname", wide=True, wrap=True),
    Column("memory\nGiB", "right"),
    Column("\nbasis", style="dim", rank=1),
    Column("memory\nGB/s", "right"),
    Column("16 bits\nTFLOP/s", "right"),
    Column("host\nGB/s", "right"),
    Column("link\nGB/s", "right"),
    Column("link\nGPUs", "right", wide=True),
    Column("NIC\nGB/s", "right", wide=True),
    Column("power\nW", "right", wide=True),
)
NOTES = (
    "memory: as the driver reports it; or (chips) what the chips hold, less error correction and what drivers keep; or"
    " (label) 1 GB = 10^9 bytes; or (default) what the GPU may use of memory that it shares",
    "16 bits: dense peak of bf16, or of fp16 where there is no bf16 (f)",
    "host, link and NIC: per GPU and direction; link GPUs: GPUs in one link domain",
    "empty cell: no trusted source states the figure",
)


@click.command("gpus")
@click.argument("name", required=False)
@answering(document="base units, null where no source states the figure")
def command(name: str | None) -> Answer:
    """List the GPUs of the catalogue: memory, bandwidths and peak rates, from the sources of each figure.

    NAME lists those that it may mean: an id or a part of one, or a name as people and drivers write it. A cell is empty if
    no trusted source states the figure.

    \b
    loadgauge gpus
    loadgauge gpus "RTX 3080"
    """
    cards = gpus() if name is None else meant(name)
    groups = {
        f"{VENDORS[vendor]}, {SEGMENTS[segment]}": [
            card for card in cards if (card.vendor, card.segment) == (vendor, segment)
        ]
        for vendor in get_args(Vendor)
        for segment in get_args(Segment)
    }
    tables = [
        Table(COLUMNS, [_row(card, gpu_row(card)) for card in sorted(group, key=_natural)], title)
        for title, group in groups.items()
        if group
    ]
    rows = [gpu_row(card) for card in cards]
    head = f"{len(rows)} GPUs; `loadgauge gpus NAME` lists those that a name may mean, as H100 or 4090"
    return Answer(
        form="gpus.catalogue",
        writer=BLOCKS,
        shown=[*([] if name else [Notes([head], mark="")]), *tables, Notes(NOTES, gap=True)],
        document={"gpus": rows},
        table=rows,
        pivots=(Pivot("Memory", "gpus.capacity", "id", "of"),),
    )


def meant(name: str) -> tuple[Gpu, ...]:
    """Return the GPUs that a name may mean. Raises `ConfigError` for none.

    >>> [card.id for card in meant("RTX 3080")]
    ['rtx3080-10gb', 'rtx3080-12gb', 'rtx3080laptop', 'rtx3080ti', 'rtx3080tilaptop']
    """
    ids = gpu_ids()
    ids_meant = {id for id in ids if plain(name) and plain(name) in id.replace("-", "")}
    if not ids_meant:
        try:
            exact = gpu(name).id
        except ConfigError:
            raise ConfigError(
                f"no GPU is called {name!r} (closest: {', '.join(nearest(name, ids))})", key="name"
            ) from None
        ids_meant = {exact, *variants(exact, ids)}
    return tuple(gpu(id) for id in sorted(ids_meant))


def _natural(card: Gpu) -> list[tuple[int, str]]:
    """Sorts a2 before a10."""
    return [(int(number or 0), word) for number, word in re.findall(r"(\d+)|(\D+)", card.id)]


def _row(card: Gpu, row: dict[str, Any]) -> list[str]:
    half, bf16 = row["peak_flops"]["bf16"] or row["peak_flops"]["fp16"], card.peaks.bf16 is not None
    return [
        card.id,
        card.name,
        f"{card.capacity / GIB:.1f}",
        _basis(card),
        _scaled(row["memory_bandwidth"], 1e9, 0),
        "" if half is None else f"{_scaled(half, 1e12, 1)}{'' if bf16 else ' f'}",
        _scaled(row["host_bandwidth"], 1e9, 0),
        _scaled(row["link"]["bandwidth"], 1e9, 0),
        _scaled(row["link"]["domain"], 1, 0),
        _scaled(row["nic_bandwidth"], 1e9, 0),
        _scaled(row["tdp"], 1, 0),
    ]


def _basis(card: Gpu) -> str:
    memory = card.memory
    return "driver" if memory.reported else "default" if memory.usable else "chips" if card.chips else "label"


def _scaled(value: float | None, unit: float, digits: int) -> str:
    return "" if value is None else f"{value / unit:,.{digits}f}"
