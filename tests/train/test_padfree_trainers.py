"""With the trainers of transformers and TRL, nothing subclassed: the same steps as with padding."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import transformers as hf

from loadgauge.train import Collator, TokenBudgetDataset, TokenBudgetSampler, disable, enable, target_count
from padfree_families import build, padded, ragged

os.environ["HF_HUB_OFFLINE"] = "1"
LENGTHS = [7, 2, 19, 11, 5, 1, 23, 4, 13, 8, 3, 17, 6, 29, 9, 12]
ROWS = ragged(LENGTHS)


class Padding:
    """The padded collator, with targets as a flat batch has them."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return padded([feature["input_ids"] for feature in features])


def dataset() -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"input_ids": row, "labels": row} for row in ROWS])


def train(model: torch.nn.Module, collator: Any, tmp_path: Any, data: Any = None, **arguments: Any) -> list[float]:
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "seed": 1,
        "disable_tqdm": True,
    }
    trainer = hf.Trainer(
        model=model,
        args=hf.TrainingArguments(**(settings | arguments)),
        train_dataset=dataset() if data is None else data,
        eval_dataset=dataset(),
        data_collator=collator,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    evaluation = trainer.evaluate()["eval_loss"] if arguments.get("per_device_eval_batch_size") else 0.0
    return [*losses, *norms, evaluation]


def model(**changes: Any) -> torch.nn.Module:
    return build("llama", torch.float32, **changes)


@pytest.mark.parametrize(
    "arguments",
    [
        {"per_device_eval_batch_size": 16, "gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True, "use_cache": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
)
@pytest.mark.long
def test_trainer(arguments: dict[str, Any], tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    expected = train(model(), Padding(), tmp_path, **arguments)
    assert train(enable(model()), Collator(), tmp_path, **arguments) == pytest.approx(expected, rel=1e-4)
    # The same trainer with padded batches, flattened inside.
    assert train(enable(model()), Padding(), tmp_path, **arguments) == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_trainer_with_a_token_budget(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    batches = TokenBudgetDataset(rows, 48)
    arguments = {"per_device_train_batch_size": 1, "max_steps": len(batches)}
    flat = train(enable(model()), Collator(), tmp_path, batches, **arguments)
    nested = lambda features: Padding()(features[0])  # noqa: E731
    assert flat == pytest.approx(train(model(), nested, tmp_path, batches, **arguments), rel=1e-4)
    assert max(sum(len(r["input_ids"]) for r in batches[i]) for i in range(len(batches))) <= 48


@pytest.mark.long
def test_trainer_classifies(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from datasets import Dataset

    config = model().config
    config.num_labels = 3
    torch.manual_seed(0)
    stock = hf.AutoModelForSequenceClassification.from_config(config)
    data = Dataset.from_list([{"input_ids": row, "labels": len(row) % 3} for row in ROWS])

    def padding(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return Padding()(features) | {"labels": torch.tensor([f["labels"] for f in features])}

    twin = enable(copy.deepcopy(stock))
    expected = train(stock, padding, tmp_path, data)
    assert train(twin, Collator(), tmp_path, data) == pytest.approx(expected, rel=1e-4)


def test_a_loop_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    sampler = TokenBudgetSampler(LENGTHS, 40, seed=2)
    losses: dict[str, list[float]] = {"flat": [], "padded": []}
    for kind, current, collate in (
        ("flat", enable(model()), Collator()),
        ("padded", model(use_cache=False), Padding()),
    ):
        loader = torch.utils.data.DataLoader(
            [{"input_ids": row} for row in ROWS], batch_sampler=sampler, collate_fn=collate
        )
        optimizer = torch.optim.AdamW(current.parameters(), lr=1e-2)
        parts: list[Any] = []
        for batch in loader:
            parts.append(batch)
            if len(parts) == 2:  # two micro-batches a step
                for part in parts:
                    loss = current(**part, num_items_in_batch=target_count(*parts)).loss
                    loss.backward()
                    losses[kind].append(float(loss.detach()))
                optimizer.step()
                optimizer.zero_grad()
                parts = []
    assert len(losses["flat"]) >= 4
    assert losses["flat"] == pytest.approx(losses["padded"], rel=1e-4)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 97)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def sft(current: torch.nn.Module, tmp_path: Any, collator: Any = None, **arguments: Any) -> list[float]:
    import trl
    from datasets import Dataset

    text = Dataset.from_list([{"text": " ".join(f"w{token}" for token in row)} for row in ROWS])
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "seed": 1,
        "disable_tqdm": True,
        "max_length": None,
        "gradient_checkpointing": False,
    }
    trainer = trl.SFTTrainer(
        model=current,
        args=trl.SFTConfig(**(settings | arguments)),
        train_dataset=text,
        processing_class=tokenizer(),
        data_collator=collator,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_sft_trainer(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    expected = sft(model(), tmp_path)
    assert len(expected) == 2
    enabled = [
        sft(enable(model()), tmp_path),  # TRL pads, the model flattens inside
        sft(enable(model()), tmp_path, padding_free=True),  # TRL flattens
        sft(enable(model()), tmp_path, collator=Collator()),
        sft(enable(model()), tmp_path, padding_free=True, gradient_checkpointing=True),
    ]
    for losses in enabled:
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_sft_trainer_packs(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    packed = {"packing": True, "max_length": 64, "per_device_train_batch_size": 2}
    losses = sft(enable(model()), tmp_path, **packed)
    assert losses == pytest.approx(sft(model(), tmp_path, **packed), rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_sft_trainer_with_an_adapter(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted(current: torch.nn.Module) -> torch.nn.Module:
        torch.manual_seed(5)
        return get_peft_model(current, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))

    expected = sft(adapted(model()), tmp_path)
    assert sft(adapted(enable(model())), tmp_path, padding_free=True) == pytest.approx(expected, rel=1e-4)
    current = enable(adapted(model()))
    assert sft(current, tmp_path, padding_free=True) == pytest.approx(expected, rel=1e-4)
    disable(current)


@pytest.mark.filterwarnings("ignore")
def test_preference_trainer(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import trl
    from datasets import Dataset

    pairs = Dataset.from_list(
        [
            {
                key: " ".join(f"w{t}" for t in row)
                for key, row in zip(("prompt", "chosen", "rejected"), rows, strict=True)
            }
            for rows in zip(ROWS[::3], ROWS[1::3], ROWS[2::3], strict=False)
        ]
    )

    def dpo(current: torch.nn.Module) -> list[float]:
        args = trl.DPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=2, learning_rate=1e-2, report_to=[],
            logging_steps=1, save_strategy="no", use_cpu=True, bf16=False, seed=1, disable_tqdm=True, max_length=None,
            gradient_checkpointing=False,
        )  # fmt: skip
        trainer = trl.DPOTrainer(
            model=current,
            ref_model=copy.deepcopy(current),
            args=args,
            train_dataset=pairs,
            processing_class=tokenizer(),
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert dpo(enable(model())) == pytest.approx(dpo(model()), rel=1e-4)
