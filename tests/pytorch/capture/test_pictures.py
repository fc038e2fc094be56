"""Vision-language models with a picture: formulas against plain runs, FLOPs against a real run, values that are read."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING

import loadgauge
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.package_data import read_data
from loadgauge.pytorch.capture.capture import compare
from loadgauge.pytorch.capture.inputs.inputs import number
from loadgauge.pytorch.capture.inputs.kinds import model_class
from loadgauge.pytorch.capture.record import record
from loadgauge.pytorch.capture.symbols.values import KeptValues, known
from loadgauge.pytorch.device.simulated import fake_tensors, simulated_device
from small_models import small_config

TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 320,
}
TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 14}
QWEN = {
    "text_config": TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    "image_token_id": 300,
    "vision_start_token_id": 301,
}
CASES = {
    "paligemma": {
        "text_config": TEXT | {"model_type": "gemma"},
        "vision_config": TOWER | {"model_type": "siglip_vision_model", "image_size": 56},
        "projection_dim": 64,
        "image_token_id": 300,
    },
    "idefics3": {
        "text_config": TEXT | {"model_type": "llama", "pad_token_id": 0},
        "vision_config": TOWER | {"image_size": 56},
        "image_token_id": 300,
    },
    "qwen2_vl": QWEN,
}


@pytest.mark.parametrize("kind", list(CASES))
@pytest.mark.long
def test_with_a_picture(kind: str) -> None:
    captures = loadgauge.capture(CONFIG_MAPPING[kind](**CASES[kind]), optimizer="sgd")
    found = captures.at(b=3, s=80)
    assert not found.plain
    sizes = {"b": 5, "s": 50} if found.holds(b=5, s=50) else {"b": 3, "s": 70}
    compare(captures.at(**sizes), record(captures.job, sizes), sizes)
    assert any(".vision" in one.module or ".visual" in one.module for one in found.operations)


def test_the_grid_of_a_picture_is_that_of_a_real_run() -> None:
    config = CONFIG_MAPPING["qwen2_vl"](**QWEN)
    found = loadgauge.capture(config, optimizer="sgd", precision="fp32", attention="eager").at(b=2, s=96)
    module = model_class(config)._from_config(config, attn_implementation="eager")
    ids = torch.full((2, 96), 5)
    ids[:, 8:72] = 300  # 16 x 16 patches, four of them a token
    with FlopCounterMode(display=False) as counter:
        module(
            input_ids=ids,
            pixel_values=torch.randn(2 * 256, 3 * 2 * 14 * 14),
            image_grid_thw=torch.tensor([[1, 16, 16]] * 2),
            position_ids=torch.zeros(3, 2, 96, dtype=torch.long),
            labels=ids,
        ).loss.backward()
    assert found.flops(b=2, s=96) == counter.get_total_flops()


def test_values_are_those_of_real_tensors() -> None:
    def read(grid: Any, flags: Any) -> list[Any]:
        ends = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0]).cumsum(0)
        ends[0] += 1
        chosen = torch.arange(4, device=grid.device)[flags]
        return [ends.tolist(), chosen.tolist(), int(grid.prod(-1).max()), torch.where(grid > 3)[1].tolist()]

    values, flags = [[2, 4, 6], [1, 3, 5]], [1, 0, 1, 1]
    with fake_tensors() as mode, KeptValues():
        place = simulated_device()
        fake = read(known(values, place), known(flags, place).bool())
        assert not mode.read.values
        lost = known([3, 4], place)
        lost.copy_(torch.empty(2, dtype=torch.long, device=place))
        assert lost.tolist() == [1, 1]
        assert len(mode.read.values) == 1
    assert fake == read(torch.tensor(values), torch.tensor(flags).bool())


def test_products_of_sizes() -> None:
    config = small_config("paligemma")
    sizes = {"b": 3, "s": 96}
    assert number("b*vision_config.nothing|vision_config.image_size//2+1", config, sizes) == 3 * 224 // 2 + 1
    with pytest.raises(ConfigError, match="paligemma: the config has no number nothing"):
        number("b*nothing", config, sizes)


SMALL = Path(__file__).resolve().parents[3] / "tools" / "small_models.toml"


def test_tables_name_what_there_is() -> None:
    table = tomllib.loads(read_data("capture/inputs.toml"))
    groups = {"default", "grid"}
    kinds = set(table) - groups
    assert kinds | set(tomllib.loads(SMALL.read_text(encoding="utf-8"))) <= set(CONFIG_MAPPING)
    assert {row["as"] for row in table.values() if "as" in row} <= set(table)
    for kind in sorted(kinds):
        taken = inspect.signature(model_class(CONFIG_MAPPING[kind]()).forward).parameters
        assert set(table[kind]) - {"as", "picture", "tokens"} <= set(taken), kind
        assert all(hasattr(CONFIG_MAPPING[kind](), key) for key in table[kind].get("tokens", ())), kind


# -- operations that must be as eager PyTorch has them ----------------------------------------------------------------


class Added(nn.Module):
    """What is added in place to a product of batches is no view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x).unflatten(-1, (4, 16)).transpose(1, 2)
        scores = heads @ heads.transpose(-1, -2)
        scores += 1
        return scores.softmax(-1).square().mean()


class CutBack(Added):
    """A slice that is all there is only where nothing was padded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.pad(self.linear(x), (0, 0, 0, -x.shape[1] % 16))
        return y[:, : x.shape[1]].square().mean()


@pytest.mark.parametrize("make", [Added, CutBack])
def test_as_eager(make: Any) -> None:
    captures = loadgauge.capture(make, lambda b, s: torch.empty(b, s, 64))
    for sizes in ({"b": 5, "s": 96}, {"b": 4, "s": 90}):
        found = captures.at(**sizes)
        assert not found.plain
        compare(found, record(captures.job, sizes), sizes)
