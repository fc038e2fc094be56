"""TRL's trainers after supervised tuning, as a script calls them, with rows of token ids in place of texts."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from stack.case import Case


def trainer(
    case: Case, model: Any, given: dict[str, Any], callbacks: list[Any], load: Callable[[Case], Any], words: Any
) -> Any:
    """The trainer of a case. given: fields of its arguments; load: makes another model, the reference; words: a tokenizer"""
    datasets, trl = import_module("datasets"), import_module("trl")
    kinds: dict[str, tuple[Any, Any]] = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig), "kto": (trl.KTOTrainer, trl.KTOConfig),
        "rm": (trl.RewardTrainer, trl.RewardConfig),
    }  # fmt: skip
    if case.trainer in EXPERIMENTAL:
        folder, word = EXPERIMENTAL[case.trainer]
        module = import_module(f"trl.experimental.{folder}")
        kinds[case.trainer] = getattr(module, f"{word}Trainer"), getattr(module, f"{word}Config")
    if case.trainer == "grpo":
        kinds["grpo"] = updates(trl.GRPOTrainer, case), trl.GRPOConfig
    kind, arguments = kinds[case.trainer]
    base: Any = kind

    class Ready(base):  # type: ignore[misc]
        """The trainer with rows that are token ids already."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def tokenize_row(self, feature: Any, *_: Any) -> Any:
            return feature

    given = {**given, "remove_unused_columns": False}
    if case.trainer == "grpo":
        given |= {"num_generations": 2, "max_completion_length": case.seq_len // 2}
    else:
        given["max_length"] = case.seq_len
    if case.trainer in ("simpo", "cpo"):
        given |= {"loss_type": "simpo" if case.trainer == "simpo" else "sigmoid", "cpo_alpha": case.likelihood}
    if case.trainer == "gkd":
        given |= {"lmbda": 0.0, "beta": case.mixture}
    if case.trainer == "kto" and not case.shifted:
        given["loss_type"] = "apo_zero_unpaired"
    if case.trainer in ("dpo", "kto") and case.reference == "precomputed":
        given["precompute_ref_log_probs"] = True
    rows = datasets.Dataset.from_list([dict(ROW)] * (8 * case.gpus * case.micro_batch * case.accumulate))
    more: dict[str, Any] = {}
    if case.trainer in ("dpo", "kto") and case.reference == "model" and not case.adapters:
        more["ref_model"] = load(case)
    if case.trainer == "gkd":
        more["teacher_model"] = load(case)
    if case.trainer == "grpo":
        more["reward_funcs"] = lambda prompts, **_: [0.0] * len(prompts)
    else:
        more["data_collator"] = collator(case)
    return Ready(
        model, args=arguments(**given), train_dataset=rows, processing_class=words, callbacks=callbacks, **more,
    )  # fmt: skip


EXPERIMENTAL = {"orpo": ("orpo", "ORPO"), "simpo": ("cpo", "CPO"), "cpo": ("cpo", "CPO"), "gkd": ("gkd", "GKD")}
"""Folder and class of the trainers that TRL calls experimental."""
ROW = {"input_ids": [1], "prompt": "", "chosen": "", "rejected": ""}
"""A row of a data set, of which the collator takes nothing but that it is there."""


def updates(base: Any, case: Case) -> Any:
    """A trainer that generates, with answers that are there already: half of a sequence is its prompt."""

    class Updates(base):  # type: ignore[misc]
        """The trainer from its inputs on."""

        def _prepare_inputs(self, rows: Any) -> Any:
            device, prompt = self.accelerator.device, case.seq_len // 2
            sides = {"prompt": prompt, "completion": case.seq_len - prompt}
            made: dict[str, Any] = {}
            for name, length in sides.items():
                made[f"{name}_ids"] = torch.ones((case.micro_batch, length), dtype=torch.long, device=device)
                made[f"{name}_mask"] = torch.ones_like(made[f"{name}_ids"])
            answered = torch.tensor(case.rows * case.accumulate * sides["completion"], device=device)
            return {**made, "advantages": torch.ones(case.micro_batch, device=device), "num_items_in_batch": answered}

    return Updates


def collator(case: Case) -> Callable[[list[Any]], dict[str, Any]]:
    """Makes a batch as the trainer's own collator does, every token one of the answer."""

    def collate(rows: list[Any]) -> dict[str, Any]:
        count = len(rows) * (1 if case.trainer in ("kto", "gkd") else 2)
        ids = torch.ones((count, case.seq_len), dtype=torch.long)
        mask = torch.ones_like(ids)
        if case.trainer in ("orpo", "simpo", "cpo"):
            half = ids[: len(rows)]
            return {
                f"{side}_{name}": half.clone()
                for side in ("chosen", "rejected") for name in ("input_ids", "attention_mask", "labels")
            } | {"prompt_input_ids": half[:, :1].clone(), "prompt_attention_mask": half[:, :1].clone()}  # fmt: skip
        made = {"input_ids": ids, "attention_mask": mask}
        if case.trainer == "rm":
            return made
        if case.trainer == "gkd":
            return {**made, "labels": ids.clone()}
        made["completion_mask"] = mask.clone()
        if case.trainer == "kto":
            if case.shifted:
                made |= {f"KL_{name}": one.clone() for name, one in list(made.items())}
            made["label"] = torch.tensor([index % 2 == 0 for index in range(len(rows))])
        if case.reference == "precomputed":
            names = (
                ("ref_logps", "ref_KL_logps") if case.trainer == "kto" else ("ref_chosen_logps", "ref_rejected_logps")
            )
            made |= {name: torch.zeros(len(rows)) for name in names}
        return made

    return collate


def with_score(model: Any) -> Any:
    """The model with a head of one column in place of its own, as `AutoModelForSequenceClassification` has it."""
    import transformers

    with torch.device("cuda"):
        made = type(model).__name__.replace("ForCausalLM", "ForSequenceClassification")
        config = model.config
        config.num_labels, config.pad_token_id = 1, 0
        other = getattr(transformers, made)(config)
    other.to(next(model.parameters()).dtype)
    decoder = model.get_decoder()
    other.model = decoder
    for name, module in list(model.named_children()):
        if isinstance(module, nn.Linear):
            delattr(model, name)
    return other
