"""The callback in a real training by transformers' Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.measure.benchmarks import FlopCounter
from loadgauge.pytorch.measure.callback import MeasureCallback
from torch_models import build

S, B, ACCUMULATE, STEPS = 32, 2, 2, 6


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(S) % 90 + 3
        return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[MeasureCallback, list[dict[str, float]], Any]:
    built = build("llama-gqa", "eager", torch.float32)
    callback = MeasureCallback(peak_flops=1e12)
    arguments = TrainingArguments(
        output_dir=str(tmp_path_factory.mktemp("out")), max_steps=STEPS, per_device_train_batch_size=B,
        gradient_accumulation_steps=ACCUMULATE, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=built.model, args=arguments, train_dataset=Rows(), callbacks=[callback])
    trainer.train()
    return callback, trainer.state.log_history, built


def test_flops_are_those_of_the_step(trained: tuple[MeasureCallback, list[dict[str, float]], Any]) -> None:
    callback, _, built = trained
    ids = built.ids(S, B)
    with FlopCounter() as counter:
        built.model(ids, labels=ids).loss.backward()
    found = callback.result
    assert found.model_flops == found.hardware_flops == ACCUMULATE * counter.model


def test_memory_of_one_step(trained: tuple[MeasureCallback, list[dict[str, float]], Any]) -> None:
    callback, _, built = trained
    found = callback.result
    weights = sum(one.numel() * 4 for one in built.model.parameters())
    assert found.states["gradients"] == weights
    assert found.states["optimizer states"] == pytest.approx(2 * weights, rel=1e-3)
    assert found.peak > weights  # gradients, at the least
    layers = {name for name in found.modules if name.endswith("mlp.down_proj")}
    assert len(layers) == built.config.num_hidden_layers
    assert {found.modules[name].persistent for name in layers} == {4 * S * B * built.config.hidden_size}


def test_time_and_logs(trained: tuple[MeasureCallback, list[dict[str, float]], Any]) -> None:
    callback, logs, _ = trained
    found = callback.result
    assert len(found.seconds) == STEPS - 3  # the first, and the two with instruments
    assert found.step is not None
    assert found.step > 0
    assert found.mfu == pytest.approx(found.model_flops / found.step / 1e12)
    last = [one for one in logs if "step_seconds" in one][-1]
    assert last["mfu"] > 0
    assert not torch._C._autograd._profiler_enabled()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_steps_differ() -> None:
    with pytest.raises(ConfigError, match="differ"):
        MeasureCallback(count_at=2, watch_at=2)
