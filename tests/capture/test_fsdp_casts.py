"""FSDP2 casts whole parameters as it gathers them, so that autocast has none to cast (docs/captured-dry-runs.md compares peaks)."""

from __future__ import annotations

from loadgauge.spec.training import training


def test_the_residual_stream_is_in_16_bits_under_fsdp_alone() -> None:
    recipe = training("huggingface", "bf16-autocast")
    assert [recipe.under(zero).kernels.dtypes.residual for zero in (0, 1, 2, 3)] == [4, 4, None, None]
    assert [recipe.under(zero).precision.weight for zero in (0, 3)] == [4, 4]
    assert recipe.under(3).under(0).kernels == recipe.kernels
