"""Kimi K2, counted by hand from its published config: 1.026T, which its model card rounds to 1T and its report does not.

The report (arXiv 2507.20534) prints 1.04T and 32.6B activated. No sum over the published tensors gives either: the
weights have 1.026T (their total is in test_params), and 31.7B activated without the table of embeddings, 32.9B with it.
"""

from __future__ import annotations

from loadgauge import model
from loadgauge.estimate.parameters import parameters

LAYERS, DENSE, HIDDEN, VOCABULARY = 61, 1, 7168, 163_840
EXPERTS, CHOSEN, SHARED, EXPERT_WIDTH, DENSE_WIDTH = 384, 8, 1, 2048, 18_432
HEADS, QUERY_RANK, KEY_RANK, NOPE, ROPE, VALUE = 64, 1536, 512, 128, 64, 128


def by_hand(experts: int) -> int:
    """Parameters with so many routed experts in each sparse layer."""
    attention = (
        HIDDEN * QUERY_RANK + QUERY_RANK + QUERY_RANK * HEADS * (NOPE + ROPE)
        + HIDDEN * (KEY_RANK + ROPE) + KEY_RANK + KEY_RANK * HEADS * (NOPE + VALUE)
        + HEADS * VALUE * HIDDEN
    )  # fmt: skip
    expert = 3 * HIDDEN * EXPERT_WIDTH
    dense = attention + 3 * HIDDEN * DENSE_WIDTH + 2 * HIDDEN
    sparse = attention + HIDDEN * EXPERTS + (experts + SHARED) * expert + 2 * HIDDEN
    return DENSE * dense + (LAYERS - DENSE) * sparse + 2 * VOCABULARY * HIDDEN + HIDDEN


def test_the_config_by_hand() -> None:
    found = parameters(model("kimi-k2"))
    assert found.total == by_hand(EXPERTS) == 1_026_408_209_408
    assert found.active == by_hand(CHOSEN) == 32_861_477_888


def test_the_model_card() -> None:
    """1T in all, 32B activated: without the table of embeddings, which only looks up."""
    found = parameters(model("kimi-k2"))
    assert round(found.total / 1e12) == 1
    assert round((found.active - found.embedding) / 1e9) == 32


def test_the_report_says_otherwise() -> None:
    """1.04T and 32.6B. A multi-token prediction module as DeepSeek-V3's would make 1.04T; this model came with none."""
    spec = model("kimi-k2")
    found = parameters(spec)
    assert round(found.total / 1e12, 2) == 1.03
    assert spec.num_nextn_predict_layers == 0
    assert round(parameters(spec.with_mtp(1)).total / 1e12, 2) == 1.04
    activated = {round(size / 1e9, 1) for size in (found.active, found.active - found.embedding)}
    assert activated == {31.7, 32.9}
