"""What a model of transformers is trained on, by its kind: tokens, two lengths, or pictures."""

from __future__ import annotations

from typing import Any

import torch

from loadgauge.capture.record import Sized
from loadgauge.errors import ConfigError
from loadgauge.trace.jobs import build_model, mean_loss
from loadgauge.trace.torch_run import TorchRun
from loadgauge.trace.transformers_api import text_config


def of_config(config: Any, run: TorchRun) -> Sized:
    """The training of a model of transformers, from its configuration object. Raises ConfigError where it is of no known kind."""

    def inputs(device: str, module: Any, b: Any, s: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if longest and s > longest:  # with a symbol, this is a guard
            raise ConfigError(f"s: {s} is more than the model's {longest}")
        ids = torch.empty((b, s), dtype=torch.long, device=device)
        return (), {"input_ids": ids, "labels": ids}

    longest = getattr(text_config(config), "max_position_embeddings", None)
    return Sized(lambda device: build_model(config, run, device), inputs, mean_loss, run)
