"""Flat batches: separators, tasks, budgets; what cannot be collated is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from loadgauge.core.base.errors import ConfigError
from loadgauge.train import Collator, TokenBudgetDataset, TokenBudgetSampler, enable, sequence_log_probs, target_count
from padfree_families import build, padded, ragged


def test_agrees_with_the_collator_of_transformers() -> None:
    from transformers import DataCollatorWithFlattening

    features = [{"input_ids": row, "labels": row} for row in ragged([5, 1, 3])]
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features)
    ours = Collator()(features)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(value)), key


def test_padding_inside_features_is_taken_out() -> None:
    left = {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1], "labels": [-100, -100, 5, 6]}
    right = {"input_ids": torch.tensor([7, 8, 0]), "attention_mask": torch.tensor([1, 1, 0])}
    batch = Collator()([left, right | {"labels": torch.tensor([7, 8, -100])}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert batch["labels"].tolist() == [[-100, 6, -100, 8]]


def test_packed_and_nested_features_are_kept_apart() -> None:
    batch = Collator()([[{"input_ids": [5, 6, 7], "seq_lengths": [1, 2]}], [{"input_ids": [8, 9]}]])
    assert batch["cu_seq_lens_q"].tolist() == [0, 1, 3, 5]
    assert batch["labels"].tolist() == [[-100, -100, 7, -100, 9]]


def test_only_the_completion_counts() -> None:
    batch = Collator()([{"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}])
    assert batch["labels"].tolist() == [[-100, -100, 7, 8]]
    assert target_count(batch) == 2


def test_labels_of_other_tasks() -> None:
    masked = Collator("token")([{"input_ids": [5, 6], "labels": [5, -100], "token_type_ids": [0, 1]}])
    assert masked["labels"].tolist() == [[5, -100]]
    assert masked["token_type_ids"].tolist() == [[0, 1]]
    classes = Collator()([{"input_ids": [5, 6], "label": 1}, {"input_ids": [7], "label": 0}])
    assert classes["labels"].tolist() == [1, 0]
    numbers = Collator("sequence")([{"input_ids": [5], "labels": 0.5}])
    assert numbers["labels"].dtype == torch.float32
    assert "labels" not in Collator("token")([{"input_ids": [5]}])


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([], "empty"),
        ([{"labels": [1]}], "needs input_ids"),
        ([{"input_ids": []}], "0 tokens"),
        ([{"input_ids": [1, 2], "labels": [1]}], "2 tokens"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], "attention_mask"),
        ([{"input_ids": [1, 2], "pixel_values": [1]}], "pixel_values"),
        ([{"input_ids": [1, 2], "seq_lengths": [1, 2]}], "lengths"),
        ([{"chosen_ids": [1], "rejected_ids": [2]}], "prompt_ids"),
    ],
)
def test_what_cannot_be_collated(features: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Collator()(features)
    with pytest.raises(ConfigError, match="task"):
        Collator("dialogue")


def test_accumulation_has_the_mean_of_one_large_batch() -> None:
    model, rows = enable(build("llama")), ragged([9, 2, 14, 5])
    features = [{"input_ids": row} for row in rows]
    whole = Collator()(features)
    model.zero_grad()
    model(**whole).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    parts = [Collator()(features[:1]), Collator()(features[1:])]
    model.zero_grad()
    for part in parts:
        model(**part, num_items_in_batch=target_count(*parts)).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-6, atol=1e-7)


def test_log_probabilities_of_pairs() -> None:
    pairs = [
        {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [10]},
        {"prompt_ids": [11], "chosen_ids": [12, 13, 14], "rejected_ids": [15, 16]},
    ]
    model = enable(build("qwen2"))
    batch = Collator()(pairs)
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    found = sequence_log_probs(logits, batch["labels"], batch["cu_seq_lens_q"])
    stock = build("qwen2")
    rows = [p["prompt_ids"] + p[f"{side}_ids"] for side in ("chosen", "rejected") for p in pairs]
    answers = [p[f"{side}_ids"] for side in ("chosen", "rejected") for p in pairs]
    padded_batch = padded(rows)
    shares = stock(padded_batch["input_ids"], attention_mask=padded_batch["attention_mask"]).logits.log_softmax(-1)
    for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        start = len(row) - len(answer)
        expected = sum(shares[i, start + j - 1, token] for j, token in enumerate(answer))
        torch.testing.assert_close(found[i], expected, rtol=1e-10, atol=1e-10)


def test_log_probabilities_count_from_the_first_target() -> None:
    batch = Collator()([{"chosen_input_ids": [5, 6, 7], "rejected_input_ids": [8, 9]}])
    logits = torch.zeros(1, 5, 97)
    found = sequence_log_probs(logits, batch["labels"], batch["cu_seq_lens_q"])
    assert (found / -torch.log(torch.tensor(97.0))).tolist() == pytest.approx([2, 1])


lengths_of_a_set = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(lengths=lengths_of_a_set, budget=st.integers(50, 120), ranks=st.integers(1, 4), shuffle=st.booleans())
def test_every_sequence_once_and_never_over_budget(lengths: list[int], budget: int, ranks: int, shuffle: bool) -> None:
    samplers = [TokenBudgetSampler(lengths, budget, shuffle=shuffle, ranks=ranks, rank=r) for r in range(ranks)]
    assert len({len(sampler) for sampler in samplers}) == 1
    batches = [batch for sampler in samplers for batch in sampler]
    assert all(sum(lengths[i] for i in batch) <= budget for batch in batches)
    distinct = {tuple(batch) for batch in batches}
    assert sorted(i for batch in distinct for i in batch) == list(range(len(lengths)))
    assert len(batches) - len(distinct) < ranks
    # Best fit: no two batches together fit the budget, so at most one is less than half full.
    fills = sorted(sum(lengths[i] for i in batch) for batch in distinct)
    assert all(one + two > budget for one, two in itertools.pairwise(fills))


def test_the_fullest_batch_with_room_is_taken() -> None:
    assert len(TokenBudgetSampler([6, 5, 4, 3, 2], 10, shuffle=False)) == 2


def test_epochs_differ_and_repeat() -> None:
    lengths = ragged_lengths = [len(row) for row in ragged(list(range(1, 40)))]
    sampler = TokenBudgetSampler(lengths, 80, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    again = TokenBudgetSampler(ragged_lengths, 80, seed=3)
    assert list(again) == first


def test_a_data_set_of_batches() -> None:
    data = [{"input_ids": row} for row in ragged([9, 2, 14, 5, 7])]
    batches = TokenBudgetDataset(data, 16)
    loader = torch.utils.data.DataLoader(batches, batch_size=1, collate_fn=Collator())
    assert sum(batch["input_ids"].shape[1] for batch in loader) == 37
    assert max(batch["input_ids"].shape[1] for batch in loader) <= 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [], "max_tokens": 5}, "no sequences"),
        ({"lengths": [3, 9], "max_tokens": 5}, "sequence 1 has 9 tokens"),
        ({"lengths": [3, 0], "max_tokens": 5}, "at least 1"),
        ({"lengths": [3], "max_tokens": 5, "ranks": 2, "rank": 2}, "rank"),
    ],
)
def test_budgets_that_cannot_be(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenBudgetSampler(**arguments)  # type: ignore[arg-type]
