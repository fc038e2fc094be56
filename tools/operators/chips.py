"""What the measured GPUs of a chip have in common, for those of it that nobody measured: `chips` in `common.toml`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from loadgauge.core.definitions.hardware.calibration import Wire, chip_of
from loadgauge.core.definitions.hardware.hardware import gpu as card_named
from loadgauge.evidence.validate import operators as ops

FP4 = 2.8
"""The rate of 4-bit products over that of 16-bit ones where no card of a chip was measured: 0.7 of four times as many."""


def _rate_of_fp4(card: str, fields: dict[str, Any]) -> float:
    """The FLOP/s of 4-bit products over those of 16-bit ones: alike where the peaks' ratio is not, as power sets both."""
    known = card_named(card)
    rate: float = fields["fp4_matmul"] * known.peak("fp4") / (fields["matmul"] * known.peak("bf16"))
    return rate


def middle_of(values: Sequence[float]) -> float:
    """Return the median, to three digits."""
    return float(f"{statistics.median(values):.3g}")


def chips(own: dict[str, dict[str, Any]], per_watt: float) -> dict[str, dict[str, Any]]:
    """Return by chip what its measured GPUs have in common, and under `any` what all have."""
    groups: dict[str, list[str]] = {}
    for card, fields in own.items():
        if "matmul" in fields:
            groups.setdefault(chip_of(card_named(card)), []).append(card)

    def middle(values: Sequence[float]) -> float:
        return round(statistics.median(values), 3)

    found: dict[str, dict[str, Any]] = {}
    everything = [card for some in groups.values() for card in some]
    for name, cards in {**groups, "any": everything}.items():
        watts = {card: card_named(card).tdp / (card_named(card).peak("bf16") / 1e12) for card in cards}

        def ratio(share: str, cards: list[str] = cards) -> list[float]:
            return [own[card][share] / own[card]["matmul"] for card in cards if share in own[card]]

        known = [own[card].get("throttle", 0.9) for card in cards]
        chip: dict[str, Any] = {
            "per_watt": middle(
                [own[card]["matmul"] * own[card].get("throttle", 0.9) / watts[card] ** per_watt for card in cards]
            ),
            "throttle": middle(known),
            "fp8": middle(ratio("fp8_matmul") or [0.9]),
            "fp8_block": middle(ratio("fp8_block_matmul") or ratio("fp8_matmul") or [0.9]),
            "fp4": middle([_rate_of_fp4(card, own[card]) for card in cards if "fp4_matmul" in own[card]] or [FP4]),
            "attention": {},
        }
        kernels = sorted({kernel for card in cards for kernel in own[card].get("attention", {})})
        for kernel in kernels:
            with_it = [card for card in cards if kernel in own[card].get("attention", {})]
            forward = middle([own[card]["attention"][kernel][0] / own[card]["matmul"] for card in with_it])
            backs = [
                own[card]["attention"][kernel][1] / own[card]["matmul"]
                for card in with_it
                if own[card]["attention"][kernel][1]
            ]
            chip["attention"][kernel] = [forward, middle(backs) if backs else None]
        if name != "any" and any("nvls" in own[card] for card in cards):
            chip["nvls"] = middle([own[card]["nvls"] for card in cards if "nvls" in own[card]])
        chip["wires"] = {
            way: Wire(
                *(
                    middle_of([own[card]["wires"][way][place] for card in cards if way in own[card].get("wires", ())])
                    for place in range(4)
                )
            )
            for way in (*ops.WAYS, "dispatch")
            if any(way in own[card].get("wires", ()) for card in cards)
        }
        chip["gpus"] = sorted(cards)
        found[name] = chip
    return found


def completed(own: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]]) -> None:
    """Add the kernels of attention that were not measured on a chip, by rules that need no run.

    A kernel without backward rows: its forward times the ratio of cuDNN's. FlashAttention-1: FA2 over 1.9 (the paper of the second
    says 1.7 to 3 times the first, 1.3 to 2.5 times Triton's). FA4 is as fast as cuDNN on Blackwell. FA2 on Blackwell issues the
    same instructions as on Hopper, so that each multiprocessor keeps its rate. A chip with neither: 0.95 and 0.7 of its products.
    """
    everywhere = found["any"]["attention"]
    backs = [way[1] / way[0] for chip in found.values() for way in [chip["attention"].get("cudnn")] if way and way[1]]
    back = statistics.median(backs)
    hopper = own["h100-sxm5-80gb"]
    rate = card_named("h100-sxm5-80gb").peak("bf16") / 132
    for name, chip in sorted(found.items(), key=lambda item: item[0] != "any"):
        ways = chip["attention"]
        for way in ways.values():
            way[1] = way[1] or round(way[0] * back, 3)
        if name == "10":
            mate = card_named(chip["gpus"][0])
            scale = rate * mate.multiprocessors / mate.peak("bf16")
            middle = statistics.median(own[card]["matmul"] for card in chip["gpus"])
            ways["fa2"] = [round(share * scale / middle, 3) for share in hopper["attention"]["fa2"]]
            ways["fa4"] = list(ways["cudnn"])
        usual = ways.get("fa2") or everywhere.get("fa2")
        for kernel, way in (("fa2", usual), ("fa1", None), ("cudnn", [0.95, 0.7]), ("vendor", [0.8, 0.6])):
            ways.setdefault(kernel, [round(share / 1.9, 3) for share in ways["fa2"]] if way is None else list(way))
        for kernel in ("fa3", "fa4"):
            ways.setdefault(kernel, list(ways["cudnn"]))
        ways.setdefault("aiter", list(everywhere.get("aiter") or ways["fa2"]))
    for card, fields in own.items():
        chip = found.get(chip_of(card_named(card)), found["any"])
        ways = fields.setdefault("attention", {})
        share = fields.get("matmul") or own["a100-sxm4-80gb"]["matmul"]
        for kernel, both in chip["attention"].items():
            if kernel not in ways:
                ways[kernel] = [round(part * share, 3) for part in both]
            elif ways[kernel][1] is None:
                ways[kernel][1] = round(ways[kernel][0] * both[1] / both[0], 3)
        wires = fields.get("wires", {})
        measured = [other for other in chip["gpus"] if "dispatch" in own.get(other, {}).get("wires", ())]
        if wires and "dispatch" not in wires and measured:
            # Of several, the one whose links join as many.
            room = card_named(card).link_domain
            nearest = min(measured, key=lambda name: abs(card_named(name).link_domain - room))
            wires["dispatch"] = list(own[nearest]["wires"]["dispatch"])
