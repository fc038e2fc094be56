"""The ways in which a flat batch leaks with transformers alone: each must make the check fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.train import Check, Collator, check, enable, enabled
from padfree_families import build, ragged

LENGTHS = [7, 3, 11, 5]


def flat(keep: tuple[str, ...] = ("input_ids", "position_ids", "labels")) -> dict[str, Any]:
    batch = Collator()([{"input_ids": row} for row in ragged(LENGTHS)])
    return {key: batch[key] for key in keep}


def stock(name: str, batch: dict[str, Any], implementation: str = "sdpa", **changes: Any) -> Check:
    model = build(name, torch.float32, **changes)
    model.set_attn_implementation(implementation)
    return check(model, batch, LENGTHS)


def leaks(found: Check) -> bool:
    assert "NOT padding-free" in str(found) or found.ok
    return not found.ok and found.leak.worst > 1e-6 and found.output_error > 1e-5


def test_used_as_documented_it_does_not_leak() -> None:
    found = stock("llama", flat() | {"use_cache": False})
    assert found.ok
    assert found.leak.worst == 0.0


def test_a_cache_leaks() -> None:
    assert leaks(stock("llama", flat() | {"use_cache": True}))


def test_the_default_of_the_configuration_leaks() -> None:
    assert leaks(stock("llama", flat(), use_cache=True))


def test_a_mask_of_ones_leaks() -> None:
    batch = flat() | {"use_cache": False, "attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.long)}
    assert leaks(stock("llama", batch))


def test_missing_positions_leak() -> None:
    batch = flat(("input_ids", "labels", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
    assert leaks(stock("llama", batch | {"use_cache": False}))


@pytest.mark.parametrize("name", ["opt", "falcon", "bloom", "mpt"])
def test_families_that_leak_even_as_documented(name: str) -> None:
    implementation = "sdpa" if name == "opt" else "eager"
    assert leaks(stock(name, flat() | {"use_cache": False}, implementation))
    assert enabled(model := enable(build(name, torch.float32)))
    assert check(model, flat(), LENGTHS).ok


@pytest.mark.parametrize("name", ["gpt_oss", "mamba", "mamba2", "bamba", "lfm2", "qwen3_next"])
def test_sinks_and_states_leak_even_as_documented(name: str) -> None:
    assert leaks(stock(name, flat() | {"use_cache": False}, "eager"))


def test_missing_separators_change_the_loss() -> None:
    model, batch = enable(build("llama", torch.float32)), flat()
    wrong = batch | {"labels": batch["input_ids"].clone()}
    assert check(model, batch).ok
    found = check(model, wrong)
    assert not found.ok
    assert found.leak.worst == 0.0
    assert found.loss_error is not None
    assert found.loss_error > 3e-4


def test_a_model_that_mixes_outside_its_layers_is_refused() -> None:
    class Mixing(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids).cumsum(1)

    model = build("llama", torch.float32)
    model.model.embed_tokens = Mixing(97, 32)
    model.model.norm.forward = lambda hidden: hidden + hidden.roll(1, 1)
    with pytest.raises(NotModelled, match="cannot be made padding-free"):
        enable(model)
    assert not enabled(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_leak_too_small_to_see_is_refused() -> None:
    model = build("llama", torch.float32)
    model.model.norm.forward = lambda hidden: hidden + 1e-6 * hidden.roll(1, 1)
    with pytest.raises(NotModelled, match="gradient from one sequence to another"):
        enable(model)


def test_encoder_decoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(NotModelled, match="encoder-decoder"):
        enable(model)


def test_a_model_that_exchanges_its_layers_is_refused() -> None:
    """BigBird's sparse attention becomes full attention on short sequences, and stays so."""
    from transformers import BigBirdConfig, BigBirdForCausalLM

    config = BigBirdConfig(
        vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.is_decoder = True
    with pytest.raises(NotModelled, match="exchanges its attention layers"):
        enable(BigBirdForCausalLM(config))


def test_no_weights_and_no_model_are_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=16, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="meta"):
        enable(model)
    with pytest.raises(NotModelled, match="no transformers model"):
        enable(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="backend"):
        enable(build("llama"), backend="fast")


def test_calls_that_would_be_ambiguous_are_refused() -> None:
    model = enable(build("llama", torch.float32))
    batch = flat()
    with pytest.raises(ConfigError, match="one sequence or several"):
        model(input_ids=batch["input_ids"])
    with pytest.raises(ConfigError, match="cache"):
        model(**batch, use_cache=True)
    with pytest.raises(ConfigError, match="mask of its own shape"):
        model(**batch, attention_mask=torch.zeros(1, 1, 26, 26))
    with pytest.raises(ConfigError, match="must rise from 0"):
        model(input_ids=batch["input_ids"], cu_seq_lens_q=torch.tensor([0, 5, 20]))


@pytest.mark.parametrize("backend", ["varlen", "flash_attn"])
def test_a_backend_that_is_not_there_is_refused(backend: str) -> None:
    model = build("llama", torch.float32)
    with pytest.raises(ConfigError, match=f"{backend} cannot run this layer"):
        enable(model, backend=backend)
    assert not enabled(model)
    assert model.config.use_cache
    with pytest.raises(ConfigError, match="no attention that sdpa could run"):
        enable(build("falcon", torch.float32), backend="sdpa")
