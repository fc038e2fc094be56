"""What is kept for backward falls with the tokens: counted by hooks, each storage once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from loadgauge.core.base.errors import ConfigError
from loadgauge.train import Collator, disable, enable, report, saved_bytes
from padfree_families import build, padded, ragged

BATCH = 8


def uniform(longest: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randint(1, longest) for _ in range(BATCH)]


def kept(model: torch.nn.Module, batch: dict[str, Any]) -> int:
    return saved_bytes(lambda: model(**batch), model.parameters())


@pytest.mark.parametrize("longest", [512, 1024, 2048])
@pytest.mark.parametrize("groups", [4, 2])
def test_falls_at_least_by_the_token_ratio(longest: int, groups: int) -> None:
    """Against padded SDPA, batches of 8, lengths U{1..N}."""
    model = build("llama", torch.float32, max_position_embeddings=longest, num_key_value_heads=groups, use_cache=False)
    lengths = uniform(longest, longest)
    rows = ragged(lengths)
    reference = padded(rows)
    before = kept(model, reference)
    reference.pop("attention_mask")
    without_mask = kept(model, reference)
    after = kept(enable(model), Collator()([{"input_ids": row} for row in rows]))
    ratio = sum(lengths) / (BATCH * max(lengths))
    assert after / before <= ratio
    # Without its mask, padding keeps as much for each of its tokens as a flat batch does, but for the angles of the
    # rotary positions: one set for all rows there, one a token here. They weigh 1 % in a model as narrow as this one.
    assert after / without_mask == pytest.approx(ratio, rel=0.015)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "deepseek_v3", "bert", "qwen3_moe"])
def test_grows_with_tokens_alone(name: str) -> None:
    """No square of anything: the same bytes for the same number of tokens, however they are cut; linear in them."""
    model = enable(build(name, torch.float32, max_position_embeddings=512))

    def of(lengths: list[int]) -> int:
        rows = [[5 + i % 3 for i in range(length)] for length in lengths]  # routers send equal tokens alike
        return kept(model, Collator("token")([{"input_ids": row} for row in rows]))

    one, cut, two = of([240]), of([200, 40]), of([480])
    assert one == pytest.approx(cut, rel=2e-3)
    assert two == pytest.approx(2 * one, rel=2e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "bert"])
def test_report_forecasts_what_is_measured(name: str) -> None:
    model = enable(build(name, torch.float32))
    lengths = [60, 3, 17, 44, 1]
    rows = ragged(lengths)
    shifted = name != "bert"
    found = report(lengths, model)
    batch = Collator("causal" if shifted else "token")([{"input_ids": row} for row in rows])
    assert found.saved == pytest.approx(kept(model, batch), rel=5e-3)
    assert found.tokens == 125
    assert found.padded_tokens == 300
    assert found.pairs == sum(length**2 for length in lengths)
    assert "measured on this model" in str(found)
    stock = disable(model)
    stock.config.use_cache = False
    reference = padded(rows) if shifted else {k: v for k, v in padded(rows).items() if k != "labels"}
    assert found.padded_saved <= kept(stock, reference)
    if name != "mistral":  # whose window is a mask too
        reference.pop("attention_mask")
        assert found.padded_saved == pytest.approx(kept(stock, reference), rel=0.05)


def test_report_needs_lengths_and_an_enabled_model() -> None:
    assert "58 % padding" in str(report([60, 3, 17, 44, 1]))
    for lengths in ([], [3, 0]):
        with pytest.raises(ConfigError, match="lengths"):
            report(lengths)
    with pytest.raises(ConfigError, match="not padding-free"):
        report([3], build("llama"))
