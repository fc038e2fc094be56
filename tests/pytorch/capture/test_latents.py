"""Models of other libraries in an estimate: sizes of latents, the library that is missing, and the class's own parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import typed
from loadgauge import estimate
from loadgauge.pytorch.capture.inputs.libraries import latents, usual_sizes

SIZES = {
    ("FluxTransformer2DModel", "1x1024x1024", ""): {"h": 128, "w": 128},
    ("SanaTransformer2DModel", "1024x1024", ""): {"h": 32, "w": 32},
    ("WanTransformer3DModel", "", "81x832x480"): {"f": 21, "h": 60, "w": 104},
    ("CogVideoXTransformer3DModel", "", "49x720x480"): {"f": 13, "h": 60, "w": 90},
}
"""Sizes with which these models were published, and those of their latents."""


@pytest.mark.parametrize("case", SIZES)
def test_pictures_say_how_large_latents_are(case: tuple[str, str, str], tmp_path: Path) -> None:
    name, pictures, video = case
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"_class_name": name}))
    text = latents(str(file), pictures, video)
    assert text == ",".join(
        f"{size}={number}" for size, number in sorted(SIZES[case].items(), key=lambda item: "hwf".find(item[0]))
    )
    assert usual_sizes({"_class_name": name}, "") | SIZES[case] == usual_sizes({"_class_name": name}, "")
    file.write_text(json.dumps({"model_type": "llama"}))
    assert latents(str(file), "1x64x64", "") == ""


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("loadgauge.pytorch.capture.inputs.libraries.find_spec", lambda _: None)
    assert "needs diffusers: pip install diffusers" in typed("estimate diffusers:sd3-medium --gpu h100").err


@pytest.mark.long
def test_a_transformer_of_diffusers_is_estimated(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    keys = {
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "caption_projection_dim": 64,
        "sample_size": 32,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"_class_name": "SD3Transformer2DModel", **keys}))
    found = estimate(str(file), pictures="1x256x256")
    theirs = diffusers.SD3Transformer2DModel(**keys)
    assert found.params == sum(one.numel() for one in theirs.parameters())
    assert any("encodes texts and pictures" in line for line in found.not_counted)
