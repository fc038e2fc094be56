"""The GPU catalogue: against the table it was drawn from, against physics, and what it refuses."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import loadgauge
from loadgauge.core.base.errors import ConfigError, NotStated
from loadgauge.core.base.sources import sources
from loadgauge.core.base.units import GIB
from loadgauge.core.definitions.hardware.hardware import Cluster, Gpu, Link, Peaks, Quantity, gpu, gpu_ids, gpus

TABLE = Path(__file__).parents[3].parent / "shared" / "hardware.csv"
PRECISIONS = Peaks.__struct_fields__

# Each figure: its column of the table, the unit of the column, the unit that the file must use.
COLUMNS = {
    **{f"peak.{p}": (f"{p}_tflops", 1e12, "FLOP/s") for p in PRECISIONS if p != "int8"},
    "peak.int8": ("int8_tops", 1e12, "OP/s"),
    "memory.reported": ("mem_reported_gib", 2**30, "byte"),
    "memory.bandwidth": ("mem_bw_gb_s", 1e9, "byte/s"),
    "host.bandwidth": ("", 1e9, "byte/s"),
    "link.bandwidth": ("link_gb_s_per_dir_per_gpu", 1e9, "byte/s"),
    "link.domain": ("link_domain_gpus", 1, "GPU"),
    "nic.bandwidth": ("nic_gbit_s_per_gpu", 1e9 / 8, "byte/s"),
    "power.tdp": ("tdp_w", 1, "watt"),
    "measured.bf16_best": ("bf16_best_measured_tflops", 1e12, "FLOP/s"),
}
# What each absent figure is asked for by.
ASK = {
    **{f"peak.{p}": lambda g, p=p: g.peak(p) for p in PRECISIONS},
    "memory.bandwidth": lambda g: g.memory_bandwidth,
    "link.bandwidth": lambda g: g.link_bandwidth,
    "link.domain": lambda g: g.link_domain,
    "nic.bandwidth": lambda g: g.nic_bandwidth,
    "power.tdp": lambda g: g.tdp,
    "measured.bf16_best": lambda g: g.bf16_best,
}
# Blackwell Ultra has hardly any int8; Gaudi 3's matrix engine runs fp16 at the rate of tf32 (their `notes`).
INT8_BELOW_BF16 = {"b300-sxm-288gb", "gb300-nvl72"}
FP16_BELOW_BF16 = {"gaudi3"}

GOOD = """
name = "A card"
vendor = "nvidia"
confidence = "low"
[memory]
label = {value = "80 GB", source = ["gpuhunt"]}
"""


def figures(card: Gpu) -> Iterator[tuple[str, Quantity]]:
    sections = {
        "memory": card.memory,
        "peak": card.peaks,
        "link": card.interconnect,
        "host": card.host,
        "nic": card.nic,
        "power": card.power,
        "measured": card.measured,
    }
    for section, content in sections.items():
        for name in content.__struct_fields__:
            figure = getattr(content, name)
            if isinstance(figure, Quantity):
                yield f"{section}.{name}", figure


def band(value: float, low: float, high: float) -> bool:
    return low <= value <= high


def test_the_catalogue_lists_each_file_once():
    assert len(gpu_ids()) > 190
    assert [card.id for card in gpus()] == sorted(gpu_ids())
    assert len({card.name for card in gpus()}) == len(gpu_ids())


TWINS = {"h800-sxm5-80gb": "h100-sxm5-80gb", "a800-sxm4-80gb": "a100-sxm4-80gb"}
"""Chips that are sold with slower links under another name."""


@pytest.mark.skipif(not TABLE.exists(), reason="the table the catalogue was drawn from is not beside the repository")
def test_every_figure_equals_the_table():
    with TABLE.open(encoding="utf-8") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    assert set(rows) < set(gpu_ids())  # the others are from the sources that they name
    for id, row in rows.items():
        card = gpu(id)
        assert (card.name, card.vendor, card.confidence) == (row["name"], row["vendor"], row["confidence"])
        assert card.memory.label.text == f"{row['mem_label']} {row['mem_label_unit']}"
        assert (card.interconnect.kind or "", card.interconnect.topology or "") == (
            row["link_kind"],
            row["link_topology"],
        )
        assert card.notes or not row["notes"], id
        assert card.notes.count("CONFLICT") == row["notes"].count("CONFLICT"), id
        ours = {
            "memory.label",
            "memory.chips",
        }  # the table has no chips, and some figures of the driver's were found later
        found = {key: figure.value for key, figure in figures(card) if key not in ours}
        if id == "rtx5090":
            assert found.pop("memory.reported") == 32120 * 2**20
        if id in TWINS:  # the table has the label alone
            assert found.pop("memory.reported") == gpu(TWINS[id]).capacity
        if id in ("a100-sxm4-40gb", "b200-sxm-180gb"):
            assert found.pop("memory.reported") < card.memory.label.value * 1.08
        if id == "gb200-nvl72":  # as NVIDIA's own racks have it; the table asks for the order sheet
            assert found.pop("nic.bandwidth") == 50e9
        stated = {
            key: float(row[column]) * unit for key, (column, unit, _) in COLUMNS.items() if column and row[column]
        }
        assert found == pytest.approx(stated, rel=1e-12), id


def every_figure_is_in_the_unit_of_its_field(card):
    for key, figure in figures(card):
        assert figure.kind == ("byte" if key.startswith("memory.") and "band" not in key else COLUMNS[key][2]), key


def every_figure_has_a_known_source(card):
    for key, figure in figures(card):
        assert set(figure.sources) <= set(sources()), key
        assert len(set(figure.sources)) == len(figure.sources) == len(figure.works()) > 0, key


def memory_is_sane(card):
    assert band(card.memory.label.value, 6e9, 1000e9)
    if card.memory.bandwidth:
        assert band(card.memory_bandwidth, 60e9, 25_000e9)
        # From empty to full in 10 ms to 100 ms: what HBM and GDDR have kept to for ten years; LPDDR takes longer.
        assert band(card.capacity / card.memory_bandwidth, 0.01, 0.5 if card.memory.shared else 0.1)


def shared_memory_is_that_of_a_system(card):
    assert card.memory.shared == (card.segment == "unified")
    if card.memory.usable:
        assert card.memory.shared
        assert band(card.capacity / card.memory.label.value, 0.5, 0.81)  # half to three quarters, GiB of GB


def the_driver_reports_at_least_the_decimal_label(card):
    """The stated basis of reading a label "GB" as 10^9: never more than is there, and within 15 %."""
    if card.memory.reported:
        assert re.fullmatch(r"[0-9]+ GB", card.memory.label.text)
        assert band(card.memory.reported.value / card.memory.label.value, 0.92 if card.memory.ecc else 1.0, 1.15)
        assert card.memory.reported.value < card.memory.label.value / 10**9 * GIB
        assert (card.capacity, card.capacity_basis) == (card.memory.reported.value, "reported")
    else:
        assert card.capacity_basis == "assumed"
        assert band(card.capacity / card.memory.label.value, 0.5 if card.memory.usable else 0.92, 1.06)


def test_chips_less_ecc_less_the_driver_is_a_little_less_than_what_the_driver_reports():
    """The stated basis of the chips: of each card with a reported figure they promise nothing that is not there, and leave
    at most 2 % of what is."""
    both = [card for card in gpus() if card.memory.reported and card.memory.chips]
    assert {card.id for card in both} >= {"t4", "rtx2060-6gb", "rtx4090", "rtx5090", "l40s", "rtxpro6000-server"}
    for card in both:
        memory = msgspec.structs.replace(card.memory, reported=None)
        assert band(msgspec.structs.replace(card, memory=memory).capacity / card.capacity, 0.975, 1.0), card.id


def narrower_numbers_are_at_least_as_fast(card):
    rate = {p: card.peak(p) for p in PRECISIONS if getattr(card.peaks, p)}
    order = [p for p in ("fp32", "tf32", "bf16", "fp8", "fp4") if p in rate]
    assert [rate[p] for p in order] == sorted(rate[p] for p in order)
    assert "bf16" not in rate or card.bf16
    if {"bf16", "fp16"} <= set(rate):
        assert rate["fp16"] == rate["bf16"] or (card.id in FP16_BELOW_BF16 and rate["fp16"] < rate["bf16"])
    if {"bf16", "int8"} <= set(rate):
        assert rate["int8"] >= rate["bf16"] or (card.id in INT8_BELOW_BF16)


def peaks_keep_their_ratios(card):
    """Sparse doubles and per-die halves show as a ratio that no dense rate has."""
    figure = card.peaks.bf16 or card.peaks.fp16
    if figure is None:
        return
    half, pascal = figure.value, card.compute_capability.startswith("6.")
    bands = {"tf32": (0.25, 1.0), "fp8": (1.0, 4.0), "fp4": (3.7, 8.01), "int8": (0.05, 4.01), "fp32": (0.03, 0.51)}
    if pascal:  # no tensor cores
        bands = {"fp32": (1.0, 1.0)}
    assert band(half, 4e12, 5000e12)
    for precision, (low, high) in bands.items():
        if getattr(card.peaks, precision):
            assert band(card.peak(precision) / half, low, high), precision
    if card.memory.bandwidth:
        # FLOP per byte; the lowest with tensor cores are the H20, cut for export, and the first of GeForce.
        assert band(half / card.memory_bandwidth, 10 if pascal else 30, 600)


def links_are_faster_than_adapters_and_slower_than_memory(card):
    if card.interconnect.bandwidth:
        assert card.interconnect.kind
        assert band(card.link_bandwidth, 30e9, 2000e9)
        assert card.memory.bandwidth is None or card.link_bandwidth < card.memory_bandwidth / 2
    if card.interconnect.domain:
        assert card.interconnect.domain.value == card.link_domain
        assert band(card.link_domain, 2, 10_000)
    if card.nic.bandwidth:
        assert band(card.nic_bandwidth, 2e9, 100e9)
        if card.interconnect.kind and not card.interconnect.kind.startswith("PCIe"):
            assert card.nic_bandwidth < card.link_bandwidth


def power_and_measured_rates_are_sane(card):
    if card.power.tdp:
        assert band(card.tdp, 30, 2000)
        if (half := card.peaks.bf16 or card.peaks.fp16) is not None:
            assert band(half.value / card.tdp, 0.03e12, 4e12)
    if card.measured.bf16_best:
        assert band(card.bf16_best / card.peak("bf16"), 0.5, 0.98)


def what_is_left_empty_raises_not_stated(card):
    stated = {key for key, _ in figures(card)}
    plugged = {"link.bandwidth"} if card.form == "card" and card.host.pcie else set()  # linked by PCI Express
    for key in set(ASK) - stated - plugged:
        with pytest.raises(NotStated) as caught:
            ASK[key](card)
        message = str(caught.value)
        assert "\n" not in message
        assert card.name in message
        assert key in message
        assert f"data/gpus/{card.id}.toml" in message
    for key in set(ASK) & stated:
        assert ASK[key](card) > 0


@pytest.mark.parametrize("id", gpu_ids())
def test_a_card_is_stated_well(id):
    card = gpu(id)
    every_figure_is_in_the_unit_of_its_field(card)
    every_figure_has_a_known_source(card)
    memory_is_sane(card)
    shared_memory_is_that_of_a_system(card)
    the_driver_reports_at_least_the_decimal_label(card)
    narrower_numbers_are_at_least_as_fast(card)
    peaks_keep_their_ratios(card)
    links_are_faster_than_adapters_and_slower_than_memory(card)
    power_and_measured_rates_are_sane(card)
    what_is_left_empty_raises_not_stated(card)


ALIKE = [
    ("h800-sxm5-80gb", "h100-sxm5-80gb"), ("h100-pcie-80gb", "h100-sxm5-80gb"), ("a800-sxm4-80gb", "a100-sxm4-80gb"),
    ("a100-pcie-80gb", "a100-sxm4-80gb"), ("a100-pcie-40gb", "a100-sxm4-40gb"), ("v100-sxm2-16gb", "v100-pcie-16gb"),
    ("h20-96gb", "gh200-96gb"), ("h100-sxm-96gb-500w", "gh200-96gb"), ("mi355x", "mi350x"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_cards_of_one_chip_hold_the_same(one, other):
    """Whoever states it, or the rule that takes its place."""
    assert band(gpu(one).capacity / gpu(other).capacity, 0.985, 1.015)


def test_published_figures():
    """Datasheet numbers known to everyone in the field, not read from our files."""
    assert gpu("h100-sxm5-80gb").capacity == 79.19 * GIB
    assert gpu("h100-sxm5-80gb").nic_bandwidth == 50e9
    assert gpu("a100-sxm4-80gb").peak("bf16") == 312e12
    assert gpu("a100-sxm4-80gb").link_bandwidth == 300e9
    assert gpu("gb200-nvl72").link_domain == 72
    assert gpu("tpu-v4").capacity == 32 * GIB
    assert gpu("a100-sxm4-40gb").capacity == 39.39 * GIB
    assert gpu("rtx4090").peak("bf16") == 165.2e12  # with fp32 accumulation; the box prints the double
    assert gpu("t4").capacity == 14.75 * GIB
    for id, tflops in {
        "t4": 65,
        "rtx2080ti": 53.8,
        "titanrtx": 130.5,
        "rtx3060-12gb": 25.5,
        "rtx3090ti": 80,
        "rtxa6000": 154.8,
        "a40": 149.7,
        "a10": 125,
        "a30": 165,
        "l40": 181,
        "rtx6000ada": 364.2,
        "rtx4080": 97.5,
        "rtx5080": 112.6,
        "rtx5070ti": 87.9,
        "p40": 11.76,
    }.items():  # datasheets and whitepapers, dense, with fp32 accumulation
        assert gpu(id).peak("fp16") == pytest.approx(tflops * 1e12, rel=2e-3), id


def test_the_host_link_is_that_of_the_specification():
    """PCI Express 3.0 x16 carries 15.75 GB/s each way, and each generation doubles it; NVLink-C2C has 450."""
    known = {"t4": 15.75, "rtx3090": 31.5, "rtx5080": 63.0, "rtx4060": 15.75, "h100-sxm5-80gb": 63.0, "gh200-96gb": 450}
    for id, gigabytes in known.items():
        assert gpu(id).host_bandwidth == pytest.approx(gigabytes * 1e9, rel=1e-3), id
    assert gpu("rtx3090ti").link_bandwidth == gpu("rtx3090ti").host_bandwidth  # two cards speak over PCI Express
    for id in ("p100-sxm2-16gb", "gb10"):
        with pytest.raises(NotStated, match=r"link\.bandwidth"):
            ASK["link.bandwidth"](gpu(id))


def test_known_gaps_stay_gaps():
    """Figures that a source prints wrongly, or none prints: better none than a guess."""
    gaps = {
        "v100-sxm2-32gb": "peak.bf16",
        "h20-96gb": "peak.fp8",
        "h100-nvl-94gb": "peak.tf32",
        "h800-sxm5-80gb": "nic.bandwidth",
        "a10g": "power.tdp",
        "ascend-910b": "memory.bandwidth",
        "trainium3": "link.domain",
        "a100-sxm4-40gb": "measured.bf16_best",
    }
    for id, key in gaps.items():
        with pytest.raises(NotStated, match=key):
            ASK[key](gpu(id))
    with pytest.raises(NotStated, match=r"link\.bandwidth"):
        ASK["link.bandwidth"](gpu("h20-96gb"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("80 GB", "80 GB/s"), "not in byte"),
        (("80 GB", "80 gigs"), "80 gigs"),
        (("80 GB", "0 GB"), "positive"),
        (('["gpuhunt"]', "[]"), "no source"),
        (("[memory]", "[memory]\nspeed = 1"), "speed"),
        (('"low"', '"shaky"'), "shaky"),
        (("label", "labels"), "label"),
        (("[memory]", "[memory"), "data/gpus/card.toml"),
        (("[memory]", '[peak]\nint8 = {value = "1 TFLOP/s", source = ["gpuhunt"]}\n[memory]'), "not in OP/s"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_key(change, says):
    assert Gpu.from_toml("card", GOOD).capacity == 80e9
    with pytest.raises(ConfigError) as caught:
        Gpu.from_toml("card", GOOD.replace(*change))
    assert says in str(caught.value)
    assert str(caught.value).startswith("data/gpus/card.toml: ")


def test_an_unknown_id_names_the_closest():
    with pytest.raises(ConfigError, match=r"'h100-\?'.*h100-nvl-94gb, h100-sxm5-80gb"):
        gpu("h100-?")
    with pytest.raises(ConfigError, match=r"'rtx490'.*rtx4090"):
        gpu("rtx490")
    with pytest.raises(ConfigError, match=r"'\.\./gpus/l4'"):
        gpu("../gpus/l4")
    with pytest.raises(ConfigError, match=r"precision.*'fp7'.*fp8"):
        gpu("l4").peak("fp7")


def test_a_short_name_is_the_commonest_variant():
    """As nvidia-smi prints it, too; every name in the file is of a GPU that is there, and none hides an id."""
    for text, id in {
        "H100": "h100-sxm5-80gb", "a100": "a100-sxm4-80gb", "4090": "rtx4090", "NVIDIA A100-SXM4-80GB": "a100-sxm4-80gb",
        "NVIDIA H100 80GB HBM3": "h100-sxm5-80gb", "NVIDIA H100 PCIe": "h100-pcie-80gb", "NVIDIA L40S": "l40s",
    }.items():  # fmt: skip
        assert gpu(text).id == id
    names = tomllib.loads((Path(loadgauge.__file__).parent / "data/gpu_names.toml").read_text(encoding="utf-8"))
    assert set(names.values()) <= set(gpu_ids())
    assert not set(names) & set(gpu_ids())


def test_one_gpu_reads_one_file():
    """Import reads nothing, a GPU its own file; asked of a fresh interpreter, as the cache is warm here."""
    program = """
import pathlib, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from loadgauge.core.definitions.hardware.hardware import gpu
assert not [p for p in opened if p.endswith(".toml")]
gpu("l4").capacity, gpu("l4").tdp
print(*[pathlib.Path(p).name for p in opened if p.endswith(".toml")])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["l4.toml"]


def test_links_and_clusters_refuse_what_cannot_be():
    inner = Link(bandwidth=450e9, latency=2e-6, domain=8)
    outer = Link(bandwidth=50e9, latency=5e-6, domain=64)
    card = gpu("h100-sxm5-80gb")
    assert Cluster(gpu=card, gpus=64, gpus_per_node=8, links=(inner, outer)).links[1] is outer
    assert Cluster(gpu=card, gpus=2, gpus_per_node=8, links=(inner,)).gpus == 2
    assert Cluster(gpu=card, gpus=1, gpus_per_node=8, links=()).gpus == 1
    for gpus_, per_node, links in (
        (12, 8, (inner, outer)),
        (0, 8, (inner,)),
        (16, 8, (inner,)),
        (8, 8, (outer, inner)),
    ):
        with pytest.raises(ConfigError):
            Cluster(gpu=card, gpus=gpus_, gpus_per_node=per_node, links=links)
    for bandwidth, latency, domain in ((0.0, 0.0, 8), (1e9, -1e-6, 8), (1e9, 0.0, 0), (float("nan"), 0.0, 8)):
        with pytest.raises(ConfigError):
            Link(bandwidth=bandwidth, latency=latency, domain=domain)


@pytest.mark.parametrize(("bin_of", "chip"), TWINS.items())
def test_a_chip_with_slower_links_has_the_memory_of_its_twin(bin_of: str, chip: str) -> None:
    assert gpu(bin_of).capacity == gpu(chip).capacity
    assert gpu(bin_of).peak("bf16") == gpu(chip).peak("bf16")
