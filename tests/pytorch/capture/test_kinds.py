"""Pictures of any size, models of other libraries, frozen parts, and which road takes each type of transformers."""

from __future__ import annotations

import importlib.machinery
import json
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_pictures import QWEN, TEXT, TOWER
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

import loadgauge
from command_line import typed
from in_process import in_process
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.capture.capture import compare
from loadgauge.pytorch.capture.inputs.kinds import model_class, of_config
from loadgauge.pytorch.capture.inputs.pictures import processed
from loadgauge.pytorch.capture.inputs.target import config_keys
from loadgauge.pytorch.capture.inputs.tokens import vectors_of
from loadgauge.pytorch.capture.record import record
from loadgauge.pytorch.capture.requests.world import tried, world
from loadgauge.pytorch.trace.torch_run import TorchRun
from small_models import model_types

SIZES = ((1024, 768), (512, 512), (100, 333), (56, 56), (3000, 2000))
INTERN = {
    "text_config": TEXT | {"model_type": "qwen2"},
    "vision_config": TOWER | {"image_size": [448, 448], "patch_size": [14, 14]},
    "image_token_id": 300,
}


def tokens(kind: str, keys: dict[str, Any], sizes: Any) -> list[int]:
    config = CONFIG_MAPPING[kind](**keys)
    each = [processed(config, [size]) for size in sizes]
    return vectors_of(of_config(config, TorchRun.of(Job(model="", seq_len=1))), each)


def test_tokens_of_a_picture_are_those_of_the_processor() -> None:
    config = CONFIG_MAPPING["qwen2_vl"](**QWEN)
    from transformers import Qwen2VLImageProcessorPil

    stub = SimpleNamespace(_merge_kwargs=lambda **_: {}, image_processor=Qwen2VLImageProcessorPil())
    said = Qwen2VLProcessor._get_num_multimodal_tokens(stub, image_sizes=[[h, w] for w, h in SIZES])  # type: ignore[arg-type]
    assert tokens("qwen2_vl", QWEN, SIZES) == said["num_image_tokens"]
    assert processed(config, SIZES[:2]).given["image_grid_thw"].values == [[1, 54, 74], [1, 36, 36]]


def test_tiles_of_a_picture() -> None:
    """InternVL: 256 tokens for each of 1 to 12 tiles in the picture's proportion, and a thumbnail where there are several."""
    assert tokens("internvl", INTERN, [(1024, 768), (512, 512), (900, 450)]) == [13 * 256, 256, 3 * 256]


@pytest.mark.long
def test_two_pictures_are_those_of_a_real_run() -> None:
    config, sizes = CONFIG_MAPPING["qwen2_vl"](**QWEN), [(168, 112), (84, 56)]
    found = loadgauge.capture(config, pictures=sizes, optimizer="sgd", precision="fp32", attention="eager").at(
        b=2, s=64
    )
    assert found.pictures == (("168x112", 24), ("84x56", 6))
    assert not found.plain
    assert found.holds(b=2, s=30)
    assert not found.holds(b=2, s=29)
    module = model_class(config)._from_config(config, attn_implementation="eager")
    ids = torch.full((2, 64), 5)
    ids[:, 8:38] = 300
    with FlopCounterMode(display=False) as counter:
        module(
            input_ids=ids,
            pixel_values=torch.randn(2 * (96 + 24), 3 * 2 * 14 * 14),
            image_grid_thw=torch.tensor([[1, 8, 12], [1, 4, 6]] * 2),
            position_ids=torch.zeros(3, 2, 64, dtype=torch.long),
            labels=ids,
        ).loss.backward()
    assert found.flops(b=2, s=64) == counter.get_total_flops()


def test_a_sequence_shorter_than_its_pictures_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen2_vl", **QWEN}))
    found = typed(f"capture {file} --picture 168x112,84x56 --seq-len 29 --no-cache")
    assert (found.code, found.out) == (2, "")
    assert "s: 29 is fewer than the 30 tokens of a sequence's pictures" in found.err
    for wrong in ("3", "0x5", "5x5,", "1x1x1"):
        assert typed(f"capture {file} --picture {wrong}").code == 2


def test_frozen_parameters_have_no_gradients() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.head = nn.Linear(64, 64), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.tower(x)).square().mean()

    def step(*words: str) -> Any:
        return loadgauge.capture(Two, lambda b: torch.empty(b, 64), freeze=words, optimizer="sgd").at(b=8)

    # Neither gradients of the tower's weights nor of what goes into the head.
    assert step().flops(b=8) - step("tower").flops(b=8) == 2 * 8 * 64 * 64 + 2 * 8 * 64 * 8
    for words, why in ((("nose",), "no parameter's name contains 'nose'"), (("tower", "head"), "no parameter is left")):
        with pytest.raises(ConfigError, match=why):
            step(*words)


# -- models of other libraries ----------------------------------------------------------------------------------------


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def test_a_library_makes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("torchvision")
    fake.__spec__ = importlib.machinery.ModuleSpec("torchvision", None)
    fake.models = SimpleNamespace(  # type: ignore[attr-defined]
        get_model=lambda name, weights: Net(), get_model_builder=lambda name: lambda weights=None: None
    )
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    captures = loadgauge.capture("torchvision:net", optimizer="sgd", precision="fp32")
    found = captures.at(b=2, h=32, w=48)
    assert not found.plain
    compare(found, record(captures.job, {"b": 5, "h": 64, "w": 20}), {"b": 5, "h": 64, "w": 20})
    with FlopCounterMode(display=False) as counter:
        nn.functional.cross_entropy(Net()(torch.randn(2, 3, 32, 48)), torch.tensor([1, 2])).backward()
    assert found.flops(b=2, h=32, w=48) == counter.get_total_flops()


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgauge.pytorch.capture.inputs.libraries.find_spec", lambda _: None)
    found = typed("capture timm:resnet18")
    assert (found.code, found.out) == (2, "")
    assert "needs timm: pip install timm" in found.err
    assert "did you mean UNet2DModel?" in typed("capture diffusers:UNet2Model").err


@pytest.mark.parametrize(
    ("target", "count"), [("timm:vit_tiny_patch16_224", 5_717_416), ("torchvision:resnet18", 11_689_512)]
)
def test_published_parameters(target: str, count: int) -> None:
    pytest.importorskip(target.partition(":")[0])
    found = loadgauge.capture(target, optimizer="sgd").at(b=2, h=224, w=224)
    assert sum(found.parameters.values()) == count


def test_a_config_of_diffusers(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    (tmp_path / "config.json").write_text(json.dumps({
        "_class_name": "UNet2DConditionModel", "block_out_channels": [32, 64], "cross_attention_dim": 48, "in_channels": 4,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "layers_per_block": 1, "attention_head_dim": 8,
    }))  # fmt: skip
    found = loadgauge.capture(str(tmp_path), optimizer="sgd").at(b=2, h=16, w=32, s=9)
    assert not found.plain
    assert found.holds(b=3, h=32, w=24, s=11)


@pytest.mark.parametrize("how", [
    {"scale_factor": 2.0}, {"scale_factor": 3, "mode": "bilinear"}, {"size": (40, 40), "mode": "bicubic"},
])  # fmt: skip
def test_larger_pictures_are_one_kernel(how: dict[str, Any]) -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.interpolate(self.conv(x), **how).square().mean()

    captures = loadgauge.capture(Up, lambda b, h: torch.empty(b, 4, h, h))
    found = captures.at(b=3, h=20)
    assert not found.plain
    compare(found, record(captures.job, {"b": 5, "h": 24}), {"b": 5, "h": 24})


# -- the state of the world -------------------------------------------------------------------------------------------


def test_every_type_of_transformers_has_a_road() -> None:
    rows = {one.type: one for one in world()}
    assert set(rows) == set(model_types())
    assert set(tried().types) <= set(rows)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    assert all(rows[kind].cls == cls for kind, cls in CAUSAL.items() if isinstance(cls, str))
    assert {one.road for one in rows.values()} <= {"family", "formulas", "numbers", "not captured", "not tried"}
    assert all(one.why for one in rows.values() if one.road in ("numbers", "not captured"))


def test_check_imports_neither_library() -> None:
    alone = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers')))\n"
        "from loadgauge.core.command_line.main import run; sys.exit(run(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", alone, "models", "--check", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["roads"]["family"] > 50
    assert "longformer" in typed("models --check longformer").out
    assert typed("models --check nosuchtype").code == 2


def test_keys_of_a_library_are_no_model_type() -> None:
    with pytest.raises(ConfigError, match="what it is trained on is not known"):
        config_keys("diffusers:Nothing")


def test_a_length_that_nobody_gave_is_what_the_model_has(tmp_path: Path) -> None:
    """Published configs of SigLIP leave out its 64 positions, which its class has by itself; a length that is given stays."""
    part = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "siglip", "architectures": ["SiglipModel"], "text_config": {**part, "vocab_size": 100}}
    config["vision_config"] = {**part, "image_size": 32, "patch_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = Job(str(tmp_path / "config.json"), micro_batch=2)
    assert loadgauge.estimate(job).layout.seq_len == 64
    with pytest.raises(ConfigError, match="more than the model's 64"):
        loadgauge.estimate(job.replace(seq_len=128))
