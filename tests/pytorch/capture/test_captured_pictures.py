"""Pictures of stated sizes in captured models: against the same models as they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgauge import ConfigError, Job, estimate
from loadgauge.core.base import NotModelled
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.families.encoders.pictures import stated

pytest.importorskip("transformers")

TOWER = {"model_type": "siglip_vision_model", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
         "num_attention_heads": 4, "image_size": 224, "patch_size": 14, "vision_use_head": False}  # fmt: skip
TEXT = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 4096}  # fmt: skip
AYA = {"model_type": "aya_vision", "text_config": {"model_type": "cohere2", **TEXT}, "vision_config": TOWER,
       "downsample_factor": 2, "alignment_intermediate_size": 512, "vision_feature_layer": -1}  # fmt: skip
SAID: dict[str, Any] = {
    "gpu": "h200", "seq_len": 1024, "pictures": "1x448x224", "precision": "bf16-pure", "optimizer": "sgd"
}  # fmt: skip


def trained(result: Estimate) -> float:
    """Bytes of gradients, which what is trained has."""
    return float(result.memory.largest("gradients").parts["gradients"])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(AYA))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_what_is_captured_is_what_is_written(tower: str, place: Path) -> None:
    ours, theirs = (estimate(str(place), **SAID | {"tower": tower, "road": road}) for road in ("written", "captured"))
    assert ours.params == theirs.params
    assert trained(ours) == pytest.approx(trained(theirs), rel=1e-3)  # a norm whose output nothing reads
    assert ours.flops.model == pytest.approx(theirs.flops.model, rel=0.01)
    kept = [result.memory.largest("activations").parts["activations"] for result in (ours, theirs)]
    # Processors make pixels in float32, and captures in the dtype of weights; what is trained keeps a copy.
    pixels = 3 * 3 * 224**2 * (4 if tower == "trained" else 2)
    assert kept[0] == pytest.approx(kept[1] + pixels, rel=0.01)


@pytest.mark.slow
def test_a_frozen_tower_has_no_adapters(place: Path) -> None:
    both = [estimate(str(place), tower=tower, road="captured", lora_rank=4, **SAID) for tower in ("frozen", "adapters")]
    written = [estimate(str(place), tower=tower, lora_rank=4, **SAID) for tower in ("frozen", "adapters")]
    assert list(map(trained, both)) == list(map(trained, written))
    assert trained(both[0]) < trained(both[1])


def test_pictures_are_made_smaller_before_they_are_cut() -> None:
    assert stated(Job("", seq_len=8, pictures="2x1024x768,64x64", max_pixels=196608)) == "2x512x384,1x64x64"
    with pytest.raises(NotModelled, match="a video in a captured model"):
        stated(Job("", seq_len=8, video="8x64x64"))


def test_a_sequence_holds_its_pictures(place: Path) -> None:
    with pytest.raises(ConfigError, match="are 197 tokens"):
        estimate(str(place), **SAID | {"seq_len": 64})


def test_a_tower_without_layers_is_left_out_and_said() -> None:
    said: dict[str, Any] = {"gpu": "h100", "lora_rank": 8}
    alone, seen = estimate("molmo-7b-d", **said), estimate("molmo-7b-d", pictures="1x640x480", **said)
    assert [name for name, _, _ in seen.towers_left_out] == ["vision_config"]
    assert seen.memory.peak == alone.memory.peak
