"""A GPU whose tables nobody has seen: the rules of `core/definitions/hardware/calibration.py` without its own measurements."""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.core.base.package_data import read_table
from loadgauge.core.definitions.hardware import calibration
from loadgauge.core.definitions.hardware.calibration import PER_WATT, Efficiencies, Figure, efficiencies, transferred
from loadgauge.core.definitions.hardware.hardware import gpu as card_named, gpu_ids
from loadgauge.evidence.validate.operators import Score, scores
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


__all__ = ["Figure", "left_out", "own_figures", "without"]
