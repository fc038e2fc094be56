"""Flat batches: the tokens of several sequences in one row, with what keeps them apart.

>>> batch = Collator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
>>> {key: batch[key].tolist() for key in ("input_ids", "position_ids", "labels", "cu_seq_lens_q")}
{'input_ids': [[5, 6, 7, 8, 9]], 'position_ids': [[0, 1, 2, 0, 1]], 'labels': [[-100, 6, 7, -100, 9]], 'cu_seq_lens_q': [0, 3, 5]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loadgauge.core.base.errors import ConfigError, refuse

IGNORED = -100
"""The label that no loss counts."""
TASKS = ("causal", "token", "sequence", "preference")
BY_TOKEN = ("labels", "token_type_ids", "completion_mask", "assistant_masks", "mm_token_type_ids", "position_ids")
KNOWN = {*BY_TOKEN, "input_ids", "attention_mask", "seq_lengths", "label", "label_ids"}

Feature = Mapping[str, Any]


@dataclass(frozen=True)
class Collator:
    """Joins features into one flat batch: `input_ids` and `position_ids` (1, T), `cu_seq_lens_q` and `_k` (n + 1),
    `max_length_q` and `_k`, and labels by `task`:

    - "causal": (1, T), the input unless the features bring labels; the first label of every sequence is -100, so that no
      sequence is asked to predict the next one's start. A `completion_mask` restricts them to the completion.
    - "token": (1, T), as the features bring them (masked language models, token classification).
    - "sequence": (n), one a sequence, from `label` or `labels`.
    - "preference": like "causal" for `prompt_ids` + `chosen_ids` of every feature, then + `rejected_ids`, counting the
      answers only; or for `chosen_input_ids` and `rejected_input_ids`. See `sequence_log_probs`.

    None takes "sequence" where the label is a number and "causal" otherwise. Padding marked in a feature's
    `attention_mask` is taken out, packed features (`seq_lengths`) are kept apart, lists of features are joined.
    `boundaries=False` leaves the lengths out, which then follow from the positions.
    Raises `ConfigError` for a key it would have to drop.
    """

    task: str | None = None
    boundaries: bool = True

    def __post_init__(self) -> None:
        refuse(
            self.task is not None and self.task not in TASKS,
            f"must be one of {', '.join(TASKS)}, got {self.task!r}",
            key="task",
        )

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        rows = list(_joined(features))
        refuse(not rows, "an empty batch", key="features")
        if self.task == "preference" or (self.task is None and {"chosen_ids", "chosen_input_ids"} & rows[0].keys()):
            rows, task = _pairs(rows), "causal"
        else:
            task = self.task or ("sequence" if _by_sequence(rows[0]) else "causal")
        sequences = [_Sequence.of(row, task) for row in rows]
        lengths = [length for sequence in sequences for length in sequence.lengths]
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        batch: dict[str, Any] = {
            "input_ids": torch.cat([s.input_ids for s in sequences])[None],
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        }
        for key in sequences[0].others:
            batch[key] = torch.cat([sequence.others[key] for sequence in sequences])[None]
        if task == "sequence":
            labels = [sequence.label for sequence in sequences]
            if any(label is not None for label in labels):
                batch["labels"] = torch.tensor(labels)
        elif sequences[0].labels is not None:
            batch["labels"] = torch.cat([s.labels for s in sequences if s.labels is not None])[None]
            if task == "causal":
                batch["labels"][0, ends[:-1].long()] = IGNORED
        if self.boundaries:
            longest = max(lengths)
            batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        return batch


@dataclass(frozen=True)
class _Sequence:
    input_ids: Tensor
    lengths: list[int]
    labels: Tensor | None
    label: Any
    others: dict[str, Tensor]

    @classmethod
    def of(cls, row: Feature, task: str) -> _Sequence:
        refuse("input_ids" not in row, "a feature needs input_ids", key="input_ids")
        if unknown := sorted(set(row) - KNOWN):
            raise ConfigError(f"a flat batch has no place for {', '.join(unknown)}: remove the column", key="features")
        input_ids = torch.as_tensor(row["input_ids"]).long()
        keep = _kept(row, len(input_ids))
        label = row.get("label", row.get("label_ids", row.get("labels"))) if task == "sequence" else None
        by_token: dict[str, Tensor] = {}
        for key in BY_TOKEN:
            if row.get(key) is None or (task == "sequence" and key == "labels"):
                continue
            value = torch.as_tensor(row[key])
            if value.shape != input_ids.shape:
                raise ConfigError(f"{len(input_ids)} tokens but {tuple(value.shape)} values", key=key)
            by_token[key] = value[keep]
        input_ids = input_ids[keep]
        by_token.pop("position_ids", None)  # positions follow from the boundaries
        labels = by_token.pop("labels", input_ids.clone() if task == "causal" else None)
        for key in ("completion_mask", "assistant_masks"):
            if (mask := by_token.pop(key, None)) is not None and labels is not None:
                labels = labels.masked_fill(mask == 0, IGNORED)
        lengths = [int(n) for n in row["seq_lengths"]] if row.get("seq_lengths") is not None else [len(input_ids)]
        refuse(
            sum(lengths) != len(input_ids) or min(lengths, default=0) < 1,
            f"a sequence of {len(input_ids)} tokens cannot have lengths {lengths[:8]}",
            key="input_ids",
        )
        return cls(input_ids, lengths, labels, label.item() if isinstance(label, Tensor) else label, by_token)


def _kept(row: Feature, length: int) -> Tensor:
    mask = row.get("attention_mask")
    keep = torch.ones(length, dtype=torch.bool) if mask is None else torch.as_tensor(mask) != 0
    refuse(len(keep) != length, f"{length} tokens but {len(keep)} values", key="attention_mask")
    return keep


def _joined(features: Iterable[Any]) -> Iterable[Feature]:
    for feature in features:
        if isinstance(feature, Mapping):
            yield feature
        else:
            yield from _joined(feature)


def _by_sequence(row: Feature) -> bool:
    label = row.get("label", row.get("label_ids", row.get("labels")))
    return isinstance(label, (int, float)) or (isinstance(label, Tensor) and label.dim() == 0)


def _pairs(rows: list[Feature]) -> list[Feature]:
    halves: list[Feature] = []
    for side in ("chosen", "rejected"):
        for row in rows:
            if f"{side}_input_ids" in row:
                halves.append({"input_ids": row[f"{side}_input_ids"]})
                continue
            refuse(
                "prompt_ids" not in row or f"{side}_ids" not in row,
                f"a pair needs prompt_ids and {side}_ids, or {side}_input_ids",
                key="features",
            )
            prompt, answer = list(row["prompt_ids"]), list(row[f"{side}_ids"])
            mask = [0] * len(prompt) + [1] * len(answer)
            halves.append({"input_ids": prompt + answer, "completion_mask": mask})
    return halves


def target_count(*batches: Mapping[str, Any]) -> int:
    """Tokens that the loss of these flat batches is a mean over: `num_items_in_batch` for gradient accumulation.

    >>> target_count(Collator()([{"input_ids": [5, 6, 7]}]), Collator()([{"input_ids": [8, 9]}]))
    3
    """
    return sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)


def sequence_log_probs(logits: Tensor, labels: Tensor, cumulative: Tensor) -> Tensor:
    """Log-probability of each sequence's targets: logits (1, T, V), labels (1, T) as `Collator` makes them, (n + 1)
    cumulated lengths; returns (n). For pairs the first half are the chosen answers, the second the rejected ones.
    """
    targets = labels[0, 1:]
    counted = targets != IGNORED
    of_token = torch.log_softmax(logits[0, :-1].float() if logits.dtype != torch.float64 else logits[0, :-1], -1)
    of_token = of_token.gather(-1, targets.clamp(min=0)[:, None])[:, 0] * counted
    lengths = cumulative.diff().to(labels.device)
    # The label at position i + 1 belongs to the sequence of that position; first labels are never counted.
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=labels.device), lengths)[1:]
    return of_token.new_zeros(len(lengths)).index_add(0, sequence, of_token)
