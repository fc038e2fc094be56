"""The catalogues of GPUs and of models as plain values, for JSON and for the page."""

from typing import Any

from loadgauge.core.base.errors import NotStated
from loadgauge.core.definitions.hardware.hardware import Gpu, Quantity
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.estimate.states.parameters import parameters


def gpu_row(card: Gpu) -> dict[str, Any]:
    """Return a GPU as plain values: bytes, byte/s, FLOP/s, W; None where no source states the figure."""

    def value(figure: Quantity | None) -> float | None:
        return None if figure is None else figure.value

    def stated(name: str) -> float | None:
        try:
            figure: float = getattr(card, name)
        except NotStated:
            return None
        return figure

    return {
        "id": card.id,
        "name": card.name,
        "vendor": card.vendor,
        "segment": card.segment,
        "form": card.form,
        "confidence": card.confidence,
        "capacity": card.capacity,
        "capacity_basis": card.capacity_basis,
        "shared_memory": card.memory.shared,
        "memory_bandwidth": value(card.memory.bandwidth),
        "peak_flops": {name: value(getattr(card.peaks, name)) for name in card.peaks.__struct_fields__},
        "host_bandwidth": stated("host_bandwidth"),
        "link": {
            "kind": card.interconnect.kind,
            "bandwidth": stated("link_bandwidth"),
            "domain": value(card.interconnect.domain),
        },
        "nic_bandwidth": value(card.nic.bandwidth),
        "tdp": value(card.power.tdp),
        "notes": card.notes,
    }


def model_row(spec: ModelSpec) -> dict[str, Any]:
    """Return a model as plain values: its type, number of parameters and sizes."""
    return {
        "name": spec.name,
        "model_type": spec.model_type,
        "params": parameters(spec).total,
        "num_hidden_layers": spec.num_hidden_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "positions": spec.max_position_embeddings,
        "source": spec.source,
    }
