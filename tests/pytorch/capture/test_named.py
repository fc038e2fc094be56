"""Models of transformers by their plain names: the class with the keys of each row has the parameters that are published."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from loadgauge.pytorch.capture.inputs.libraries import library_keys, published  # noqa: E402

PUBLISHED = {
    "whisper-tiny": 37.8e6, "whisper-base": 74e6, "whisper-small": 244e6, "whisper-medium": 769e6, "whisper-large-v3": 1550e6,
    "whisper-large-v3-turbo": 809e6, "t5-small": 60e6, "t5-base": 220e6, "t5-large": 738e6, "flan-t5-xl": 2.85e9,
    "bart-base": 139e6, "bart-large": 406e6, "vit-base": 86.6e6, "vit-large": 304e6, "resnet50": 25.6e6,
    "wav2vec2-base": 94.4e6, "clip-vit-base-patch32": 151e6, "siglip-base": 203e6, "dinov2-base": 87e6,
    "zaya1-8b": 8.84e9, "laguna-xs.2": 33e9, "lfm3-1.7b": 1.7e9, "xlstm-7b": 6.9e9,
    "glm-ocr": 0.8e9, "got-ocr-2.0": 560e6,
}  # fmt: skip
"""As the publishers' cards, papers and names state them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    keys = dict(library_keys(name))
    kind = getattr(transformers, keys.pop("architectures")[0])
    config = transformers.AutoConfig.for_model(**keys)
    with torch.device("meta"):
        module = kind(config)
    assert sum(one.numel() for one in module.parameters()) == pytest.approx(PUBLISHED[name], rel=0.025)


def test_repositories_stand_for_their_names() -> None:
    assert published("nyrahealth/CrisperWhisper") == "whisper-large-v3"
    assert published("zai-org/GLM-OCR") == "glm-ocr"
