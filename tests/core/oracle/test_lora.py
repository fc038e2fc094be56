"""LoRA on a frozen Llama block: what stays to be kept when only the adapters are trained, to the byte."""

from __future__ import annotations

import pytest
import torch

from loadgauge.core.definitions.model.lora import ALL_TARGETS, ATTENTION_TARGETS
from torch_kept import cuda_dropout, kept_by  # noqa: F401
from torch_lora import B, S, frozen

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TARGETS = {
    "all": ALL_TARGETS,
    "attention": ATTENTION_TARGETS,
    "query and value": frozenset({"query", "value"}),
    "down": frozenset({"down"}),
}


@pytest.mark.usefixtures("cuda_dropout")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS.keys())
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gemma"])
def test_adapters(name: str, attention: str, dtype: torch.dtype, targets: frozenset[str], dropout: float) -> None:
    block = frozen(name, attention, dtype, targets, dropout)
    assert kept_by(block.run, block.own, B, S, 64) == block.layer.saved()


def test_what_freezing_spares() -> None:
    """A frozen matrix keeps no input, a frozen gain no normalised copy."""
    block = frozen("llama-gqa", "sdpa", torch.bfloat16, frozenset({"query"}), 0.0)
    names = {tensor.name for tensor in block.layer.kept()}
    assert "attention.norm" in names  # the input of the one adapter
    assert not names & {"mlp.norm", "mlp.multiply", "attention.norm.normalised", "mlp.norm.normalised"}
