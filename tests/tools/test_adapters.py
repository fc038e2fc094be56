"""Peaks that AgileRL measured: the estimate follows them from model to model and rank to rank, with nothing fitted."""

from __future__ import annotations

from statistics import mean

import pytest

pytest.importorskip("accuracy.adapters")

from accuracy.adapters import peaks


@pytest.mark.slow
def test_the_measured_peaks_of_lora_on_one_card() -> None:
    found = [peak for peak in peaks() if peak.quality == "A"]
    # Gemma 4's checkpoints hold towers of images and sounds that are loaded, adapted and not in the estimate (docs/posttrain.md).
    towers = [peak.error for peak in found if peak.model.startswith("gemma-4")]
    errors = [peak.error for peak in found if not peak.model.startswith("gemma-4")]
    assert len(errors) > 150
    # AgileRL's own formulas reach 4.1 % on these runs, 13.5 % at worst; a term of the adapters left out is more than 1 % here.
    assert mean(map(abs, errors)) < 0.03
    assert max(map(abs, errors)) < 0.1
    assert abs(mean(errors)) < 0.025
    assert towers
    assert -0.22 < min(towers) <= mean(towers) < 0
