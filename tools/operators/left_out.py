"""A GPU whose tables nobody has seen: the rules of `core/definitions/hardware/calibration.py` without its own measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from loadgauge.core.base.package_data import read_table
from loadgauge.core.definitions.hardware import calibration
from loadgauge.core.definitions.hardware.calibration import PER_WATT, Efficiencies, Figure, efficiencies, transferred
from loadgauge.core.definitions.hardware.hardware import gpu as card_named, gpu_ids
from loadgauge.core.estimate.time.roofline import Machine, gemm_seconds
from loadgauge.core.layers.operations.operations import Gemm
from loadgauge.evidence.validate.operators import Score, scores, table
from operators.chips import chips, completed


def own_figures() -> dict[str, dict[str, Any]]:
    """The figures of each measured GPU, as the fit makes them: without those that were completed by rule."""
    found: dict[str, dict[str, Any]] = {}
    for card in gpu_ids():
        known = efficiencies(card)
        if known.basis != "measured":
            continue
        fields: dict[str, Any] = {
            name: getattr(known, name)
            for name in ("matmul", "fp8_matmul", "fp8_block_matmul", "fp4_matmul")
            if name in known.figures
        }
        fields |= {"throttle": known.throttle, "figures": known.figures}
        fields["attention"] = {
            name: [way.forward, way.backward]
            for name, way in known.attention.items()
            if f"attention.{name}" in known.figures
        }
        if any(name.startswith("wires.") for name in known.figures):
            fields["wires"] = {name: list(msgspec.structs.astuple(wire)) for name, wire in known.wires.items()}
        if known.nvls:
            fields["nvls"] = known.nvls
        found[card] = fields
    return found


def without(card: str, own: dict[str, dict[str, Any]]) -> Efficiencies:
    """What the rules say of a GPU if it had not been measured."""
    rest = {
        name: dict(fields, attention={k: list(v) for k, v in fields["attention"].items()})
        for name, fields in own.items()
    }
    hopper = rest["h100-sxm5-80gb"]
    rest.pop(card)
    found = chips(rest, PER_WATT)
    completed(rest | {"h100-sxm5-80gb": hopper}, found)
    common = dict(read_table("calibration/common.toml"))
    wires = common["chips"]["any"]["wires"]
    pcie = common["chips"][calibration.PCIE_CHIP]
    made: dict[str, Any] = {
        name: {**chip, "wires": {way: list(msgspec.structs.astuple(wire)) for way, wire in chip["wires"].items()}}
        for name, chip in found.items()
    }
    made["any"]["wires"] = wires
    made.setdefault(calibration.PCIE_CHIP, {**pcie, "gpus": ()})
    fields = transferred(card_named(card), common | {"chips": made}) | {"gpu": card}
    return msgspec.convert(fields, Efficiencies)


def left_out() -> tuple[Score, ...]:
    """The errors of each GPU's operations where its own measurements are not used."""
    own = own_figures()
    made = {card: without(card, own) for card in own}
    return tuple(
        score for score in scores(lambda card: made[card] if card in made else efficiencies(card)) if score.gpu in made
    )


PLAIN_CARDS = {"other:v100-pcie-32gb": (250.0, 14e12, 900e9), "a100-pcie-40gb": (250.0, 19.5e12, 1555e9)}
"""Cards with products in float32 that the catalogue lacks, or whose watts it does: watts, peak [FLOP/s], bandwidth
[byte/s] (NVIDIA's datasheets)."""
SHARES = np.arange(0.2, 1.2, 0.005)


def plain_shares() -> dict[str, tuple[float, float, float]]:
    """By card, the watts for each TFLOP/s of float32, the share of it at which its products are predicted best, and how far off
    they are then: dense ones of a GFLOP and more, which no tensor core computes.
    """
    found = {}
    rows = [row for row in table("gemm") if row["dtype"] == "fp32" and row["kind"] == "dense"]
    for card in sorted({row["gpu"] for row in rows}):
        if card in PLAIN_CARDS:
            watts, peak, bandwidth = PLAIN_CARDS[card]
        else:
            known = card_named(card)
            watts, peak, bandwidth = known.tdp, known.peak("fp32"), known.memory_bandwidth
        products = [
            (Gemm(*(int(row[side]) for side in "mnk")), float(row["time_us"]) * 1e-6)
            for row in rows
            if row["gpu"] == card
        ]
        errors = {}
        for share in SHARES:
            rates = msgspec.structs.replace(efficiencies(card), float32=float(share))
            machine = Machine(peak=peak, bandwidth=bandwidth, efficiencies=rates, plain=True)
            errors[float(share)] = [
                math.log(gemm_seconds(one, machine) / seconds) for one, seconds in products if one.flops > 1e9
            ]
        best = min(errors, key=lambda share: abs(statistics.median(errors[share])))
        found[card] = watts / (peak / 1e12), best, statistics.median(map(abs, errors[best]))
    return found


def fit_plain(cards: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the share at 1 W for each TFLOP/s, and the power of the watts, of cards given by both: a line through logarithms."""
    watts, shares = zip(*cards, strict=True)
    power, start = np.polyfit(np.log(watts), np.log(shares), 1)
    return math.exp(start), float(power)


__all__ = ["Figure", "fit_plain", "left_out", "own_figures", "plain_shares", "without"]
