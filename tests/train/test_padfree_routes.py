"""Padded batches flattened inside, heads of one row a sequence, generation, and going back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.train import Check, Collator, Leak, check, describe, disable, enable, enabled, paused
from loadgauge.train.layers.attention import LayerPlan
from padfree_families import CAUSAL, MASKED, Double, build, padded, ragged

LENGTHS = [6, 1, 19, 4]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def double() -> Iterator[None]:
    """What is compared to 1e-12 is computed in float64 throughout."""
    with Double():
        yield


exact = pytest.mark.usefixtures("double")


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    error = max(float((found[name] - expected[name]).abs().max()) for name in expected) / largest
    assert error <= tolerance


def tokens_seen(model: torch.nn.Module) -> list[int]:
    """Tokens that the first feed-forward part is given, per call."""
    seen: list[int] = []
    first = next(m for name, m in model.named_modules() if name.endswith(("mlp", "intermediate", "ffn", "fc1")))
    first.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:-1].numel()))
    return seen


@exact
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "xlm_roberta", "bert", "bloom", "mamba2", "qwen2_moe"])
def test_a_padded_batch_is_flattened_inside(name: str, side: str) -> None:
    if side == "left" and name in ("mamba2", "bloom", "xlm_roberta", "bert"):
        side = "right"  # see test_any_ragged_batch; these take no positions or make their own
    stock = build(name)
    stock.config.use_cache = False
    model = enable(copy.deepcopy(stock))
    batch = padded(ragged(LENGTHS), side, name in CAUSAL)
    if name in MASKED:
        batch.pop("position_ids", None)
    stock_output, output = stock(**batch), model(**batch)
    real = batch["attention_mask"].bool()
    assert output.logits.shape == stock_output.logits.shape
    error = float((output.logits - stock_output.logits)[real].abs().max())
    assert error <= 1e-12
    weights = torch.randn_like(output.logits) * real[..., None]
    (stock_output.logits * weights).sum().backward()
    seen = tokens_seen(model) if name in ("llama", "bert") else None
    (model(**batch).logits * weights).sum().backward()
    same(gradients(model), gradients(stock))
    assert seen is None or set(seen) == {sum(LENGTHS)}


@exact
def test_rows_without_a_mask_are_sequences() -> None:
    stock = build("llama")
    model = enable(copy.deepcopy(stock))
    ids = torch.tensor(ragged([5, 5, 5]))
    assert float((model(ids).logits - stock(ids).logits).abs().max()) < 1e-12


@pytest.mark.parametrize("name", ["xlm_roberta", "gpt2"])
def test_positions_follow_from_boundaries_alone(name: str) -> None:
    model = enable(build(name))
    batch = Collator("token")([{"input_ids": row} for row in ragged(LENGTHS)])
    positions = batch.pop("position_ids")
    assert torch.equal(model(**batch).logits, model(**batch, position_ids=positions).logits)
    assert check(model, batch).ok


@exact
def test_rows_may_be_packed() -> None:
    model, rows = enable(build("llama")), ragged([3, 4, 5, 2])
    ids = torch.tensor([rows[0] + rows[1], rows[2] + rows[3]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])
    logits = model(input_ids=ids, position_ids=positions).logits
    for row, (i, at) in zip(rows, [(0, 0), (0, 3), (1, 0), (1, 5)], strict=True):
        with paused(model):
            alone = model(torch.tensor([row])).logits[0]
        assert float((logits[i, at : at + len(row)] - alone).abs().max()) < 1e-12


@exact
def test_hidden_states_and_pooled_outputs_come_back_padded() -> None:
    torch.manual_seed(0)
    stock = hf.AutoModel.from_config(build("bert").config).double()
    model = enable(copy.deepcopy(stock))
    batch = padded(ragged(LENGTHS))
    batch.pop("labels")
    found, expected = model(**batch, output_hidden_states=True), stock(**batch, output_hidden_states=True)
    real = batch["attention_mask"].bool()
    assert float((found.pooler_output - expected.pooler_output).abs().max()) < 1e-12
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert float((one - other)[real].abs().max()) < 1e-12


CLASSIFIERS = ["llama", "qwen3", "gpt2", "bert", "xlm_roberta", "modernbert", "distilbert"]


@exact
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_sequence_classification(name: str) -> None:
    config = build(name).config
    config.num_labels, config.use_cache = 3, False
    for key in ("classifier_dropout", "seq_classif_dropout", "summary_first_dropout"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    stock = hf.AutoModelForSequenceClassification.from_config(config).double().train()
    model = enable(copy.deepcopy(stock))
    rows, labels = ragged(LENGTHS), [0, 2, 1, 1]
    reference = padded(rows) | {"labels": torch.tensor(labels)}
    flat = Collator()([{"input_ids": row, "label": label} for row, label in zip(rows, labels, strict=True)])
    expected = stock(**reference)
    expected.loss.backward()
    for batch in (flat, reference):
        model.zero_grad(set_to_none=True)
        found = model(**batch)
        assert found.logits.shape == (len(rows), 3)
        assert float((found.logits - expected.logits).abs().max()) < 1e-12
        assert float((found.loss - expected.loss).abs()) < 1e-12
        found.loss.backward()
        same(gradients(model), gradients(stock))
    assert check(model, flat).ok


def test_a_classifier_alone_does_not_give_one_row_a_sequence() -> None:
    config = build("llama").config
    config.use_cache = False
    stock = hf.AutoModelForSequenceClassification.from_config(config)
    flat = Collator()([{"input_ids": row, "label": 0} for row in ragged(LENGTHS)])
    flat.pop("labels")
    found = check(stock, flat)
    assert not found.ok
    assert "fit neither 30 tokens nor 4 sequences" in str(found)


def test_token_classification() -> None:
    config = build("bert").config
    config.num_labels, config.classifier_dropout = 4, 0.0
    torch.manual_seed(0)
    stock = hf.AutoModelForTokenClassification.from_config(config).double()
    model, rows = enable(copy.deepcopy(stock)), ragged(LENGTHS)
    reference = padded(rows)
    reference["labels"] = (reference["input_ids"] % 4).masked_fill(reference["attention_mask"] == 0, -100)
    flat = Collator("token")([{"input_ids": row, "labels": [token % 4 for token in row]} for row in rows])
    expected, found = stock(**reference).loss, model(**flat).loss
    assert float((found - expected).detach().abs()) < 1e-6
    assert check(model, flat).ok


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "bloom", "mamba2", "bamba", "falcon_alibi"])
def test_generation_is_as_before(name: str) -> None:
    stock = build(name, torch.float32).eval()
    model = enable(copy.deepcopy(stock)).eval()
    batch = padded(ragged([5, 3]), "left")
    for arguments in ({"input_ids": batch["input_ids"][:1]}, {k: batch[k] for k in ("input_ids", "attention_mask")}):
        expected = stock.generate(**arguments, max_new_tokens=12, do_sample=False, use_cache=True)
        found = model.generate(**arguments, max_new_tokens=12, do_sample=False, use_cache=True)
        assert torch.equal(found, expected)


def test_caches_stay_off_whatever_the_configuration_says() -> None:
    model = enable(build("llama", use_cache=True))
    assert model.config.use_cache is False
    model.config.use_cache = True  # as a trainer may set it
    output = model(**Collator()([{"input_ids": row} for row in ragged(LENGTHS)]))
    assert output.past_key_values is None


@pytest.mark.parametrize("name", ["llama", "bloom", "falcon_alibi", "mamba2", "bamba", "modernbert"])
def test_disable_puts_everything_back(name: str) -> None:
    model = build(name)
    model.eval()
    before = set(_state(model))
    rows = ragged([5])
    arguments = {"input_ids": torch.tensor(rows)}
    expected = model(**arguments).logits
    enable(enable(model))  # twice is once
    assert enabled(model)
    assert not model.training
    disable(model)
    assert not enabled(model)
    assert set(_state(model)) == before
    assert torch.equal(model(**arguments).logits, expected)
    with pytest.raises(ConfigError, match="not padding-free"):
        describe(model)


def _state(model: torch.nn.Module) -> list[Any]:
    """What of a model could be left changed: attributes of every module, hooks, configuration."""
    found: list[Any] = [
        str(model.config.to_dict()),
        model.config._attn_implementation,
        getattr(model.config, "use_cache", None),
    ]
    for name, module in model.named_modules():
        hooks = (len(module._forward_hooks), len(module._forward_pre_hooks))
        found.append((name, hooks, module.training, "forward" in module.__dict__))
        found.append((name, *sorted(key for key in module.__dict__ if key.startswith(("padding", "build")))))
    return found


def test_a_copy_is_padding_free_by_itself() -> None:
    model = enable(build("bamba"))
    twin = copy.deepcopy(model)
    batch = Collator()([{"input_ids": row} for row in ragged(LENGTHS)])
    expected = model(**batch).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(**batch).logits, expected)
    assert check(twin, batch).ok


@pytest.mark.parametrize("name", ["llama", "bamba", "bloom"])
def test_a_pickled_model_is_padding_free(name: str, tmp_path: Any) -> None:
    torch.save(enable(build(name)), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    batch = Collator()([{"input_ids": row} for row in ragged(LENGTHS)])
    assert check(loaded, batch).ok
    again = enable(disable(loaded))
    assert check(again, batch).ok


def test_a_model_with_eyes_reads_text_and_refuses_pictures() -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.Gemma3Config(
        text_config=build("gemma3").config.to_dict(),
        vision_config=vision | {"image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
    )
    model = enable(hf.Gemma3ForConditionalGeneration(config))
    batch = Collator()([{"input_ids": row} for row in ragged(LENGTHS)])
    assert check(model, batch).ok
    with pytest.raises(ConfigError, match="only text"):
        model(**batch, pixel_values=torch.zeros(1, 3, 16, 16))


def test_embeddings_that_count_masks_are_refused() -> None:
    """ESM scales embeddings by the share of masks in a sequence; in a flat row that is a share of all sequences."""
    with pytest.raises(NotModelled, match="cannot be made padding-free"):
        enable(build("esm", token_dropout=True))


def test_saved_configuration_knows_nothing_of_it(tmp_path: Any) -> None:
    model = build("llama", torch.float32)
    model.save_pretrained(tmp_path / "before")
    enable(model).save_pretrained(tmp_path / "after")
    before, after = ((tmp_path / name / "config.json").read_text() for name in ("before", "after"))
    assert "padding" not in after.replace("padding_idx", "")
    assert before.replace('"use_cache": true', '"use_cache": false') == after


@pytest.mark.parametrize("name", ["qwen3", "mistral", "llama4", "gpt_oss", "bert", "modernbert", "deepseek_v3"])
@pytest.mark.parametrize("backend", ["sdpa", "mixer"])
def test_other_backends(name: str, backend: str) -> None:
    model = build(name, torch.float32)
    rows = ragged(LENGTHS)
    batch = Collator("causal" if name in CAUSAL else "token")([{"input_ids": row, "labels": row} for row in rows])
    enable(model, backend)
    assert ("run once per sequence" if backend == "mixer" else "on sdpa") in describe(model)
    found = check(model, batch)
    assert found.ok, str(found)


def test_a_window_that_short_sequences_do_not_feel() -> None:
    """Its mask is left out of the calls that a mixer's arguments are learnt from."""
    model = enable(build("mistral", torch.float32, sliding_window=12), "mixer")
    found = check(model, Collator()([{"input_ids": row} for row in ragged(LENGTHS)]))
    assert found.ok, str(found)


def test_a_leak_alone_is_enough_to_fail() -> None:
    fine = Check(2, 5, 0.0, 0.0, 0.0, Leak(0.0, None), 1e-4)
    assert fine.ok
    assert not Check(2, 5, 0.0, 0.0, 0.0, Leak(1e-30, (1, 0)), 1e-4).ok
    assert not Check(2, 5, 0.0, 2e-4, 0.0, Leak(0.0, None), 1e-4).ok


def test_every_layer_is_called() -> None:
    model = enable(build("gemma3", torch.float32))
    plans = [m.padding_free for m in model.modules() if isinstance(getattr(m, "padding_free", None), LayerPlan)]
    before = [plan.calls for plan in plans]
    model(**Collator()([{"input_ids": row} for row in ragged(LENGTHS)]))
    assert [plan.calls - count for plan, count in zip(plans, before, strict=True)] == [1, 1]
