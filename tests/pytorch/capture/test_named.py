"""Models of transformers by their plain names: the class with the keys of each row has the parameters that are published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from loadgauge import Job  # noqa: E402
from loadgauge.core.resolve.resolve import resolve_job  # noqa: E402
from loadgauge.pytorch.capture.inputs.libraries import library_keys, published  # noqa: E402

PUBLISHED = {
    "whisper-tiny": 37.8e6, "whisper-base": 74e6, "whisper-small": 244e6, "whisper-medium": 769e6, "whisper-large-v3": 1550e6,
    "whisper-large-v3-turbo": 809e6, "t5-small": 60e6, "t5-base": 220e6, "t5-large": 738e6, "flan-t5-xl": 2.85e9,
    "bart-base": 139e6, "bart-large": 406e6, "vit-base": 86.6e6, "vit-large": 304e6, "resnet50": 25.6e6,
    "wav2vec2-base": 94.4e6, "clip-vit-base-patch32": 151e6, "siglip-base": 203e6, "dinov2-base": 87e6,
    "zaya1-8b": 8.84e9, "laguna-xs.2": 33e9, "lfm3-1.7b": 1.7e9, "xlstm-7b": 6.9e9,
    "glm-ocr": 0.8e9, "got-ocr-2.0": 560e6,
    "deberta-v3-small": 141e6, "deberta-v3-base": 184e6, "deberta-v3-large": 435e6, "mbart-large-50": 611e6,
    "nllb-200-distilled-600m": 615e6, "nllb-200-1.3b": 1.37e9, "nllb-200-3.3b": 3.35e9, "esm2-150m": 150e6, "esm2-650m": 650e6,
    "esm2-3b": 2.84e9, "detr-resnet-50": 41.3e6, "segformer-b0": 3.8e6, "swin-tiny": 28.3e6, "swin-base": 87.8e6,
    "nomic-embed-text-v1.5": 137e6, "recurrentgemma-2b": 2.68e9, "recurrentgemma-9b": 8.58e9, "t5gemma-2b-2b": 5.6e9,
    "t5gemma-9b-2b": 12.3e9, "t5gemma-9b-9b": 20.3e9, "blip2-opt-2.7b": 3.74e9, "blip2-opt-6.7b": 7.75e9,
    "convnext-tiny": 28.6e6, "convnext-base": 88.6e6, "deit-base": 86.6e6, "deit-small": 22e6, "deit-tiny": 5.7e6,
    "beit-base": 86.5e6, "beit-large": 305e6, "swin-large": 197e6, "swinv2-tiny": 28.3e6, "swinv2-base": 87.9e6,
    "convnext-large": 198e6,
    "convnextv2-tiny": 28.6e6, "convnextv2-base": 88.7e6, "yolos-small": 30.7e6, "yolos-base": 128e6, "mobilenet-v2": 3.5e6,
    "mobilenet-v1": 4.2e6, "efficientnet-b0": 5.3e6, "mobilevit-small": 5.6e6, "segformer-b2": 27.5e6, "segformer-b5": 84.7e6,
    "vit-mae-base": 112e6, "vit-mae-large": 330e6, "videomae-base": 86.5e6,
    "timesformer-base": 121e6, "vivit-base": 88.9e6, "ast-base": 86.6e6, "wavlm-base": 94.7e6, "wavlm-large": 316e6,
    "w2v-bert-2.0": 580e6, "mms-1b": 965e6, "prot-bert": 420e6, "prot-t5-xl": 2.8e9, "chronos-t5-base": 201e6,
    "chronos-t5-large": 709e6, "aimv2-large": 309e6, "bros-base": 110e6, "timesfm-2.0-500m": 500e6,
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


@pytest.mark.parametrize("name", ["deberta-v3-small", "nllb-200-distilled-600m", "segformer-b0"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.thorough
def test_names_of_every_kind_answer_in_either_16_bits(name: str, precision: str) -> None:
    """Labels chosen by their values, layers that are dropped at random, a class for each pixel; gradients scaled for fp16."""
    found = resolve_job(Job(name, gpu="v100", precision=precision)).estimate()
    assert found.params == pytest.approx(PUBLISHED[name], rel=0.025)
    assert found.memory.parts["weights"] == found.params * (4 if precision == "fp16" else 2)


def test_what_an_operator_has_no_16_bits_for_runs_in_float32(tmp_path: Path) -> None:
    """FNet's Fourier transforms: transformers' own class stops in bfloat16."""
    config = transformers.FNetConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, vocab_size=1000)
    keys = {**json.loads(config.to_json_string(use_diff=False)), "architectures": ["FNetForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(keys), "utf-8")
    module = transformers.FNetForMaskedLM(config).bfloat16()
    with pytest.raises(RuntimeError, match="BFloat16"):
        module(input_ids=torch.zeros(1, 8, dtype=torch.long))
    setup = resolve_job(Job(str(tmp_path / "config.json"), gpu="h100"))
    assert setup.training.precision.name == "fp32"
    assert setup.estimate().params == sum(one.numel() for one in module.parameters())
