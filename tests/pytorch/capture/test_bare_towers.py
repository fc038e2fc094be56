"""Models without a head: towers of pictures, videos and sounds, encoders of text, and types whose config names no class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from in_process import in_process  # noqa: E402
from loadgauge.core.definitions.job.job import Job  # noqa: E402
from loadgauge.core.estimate.states.parameters import parameters  # noqa: E402
from loadgauge.pytorch.capture.inputs.heads import head_class  # noqa: E402
from loadgauge.pytorch.capture.inputs.kinds import model_class  # noqa: E402
from loadgauge.pytorch.capture.road import road  # noqa: E402
from loadgauge.pytorch.trace.transformers_api import without_initial_values  # noqa: E402

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
PICTURE = SMALL | {"image_size": 32, "patch_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Dinov2Model": PICTURE,
    "SiglipVisionModel": PICTURE,
    "Siglip2VisionModel": SMALL | {"num_patches": 256, "patch_size": 8},
    "ConvNextModel": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "image_size": 64},
    "VJEPA2Model": SMALL | {"pred_hidden_size": 32, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 2,
                            "crop_size": 32, "patch_size": 8, "frames_per_clip": 4},
    "Wav2Vec2ConformerModel": SMALL | {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
    "DebertaModel": SMALL | {"vocab_size": 64, "max_position_embeddings": 64},
    "CLIPTextModel": SMALL | {"vocab_size": 64, "max_position_embeddings": 32},
}  # fmt: skip


def config_of(name: str) -> Any:
    made = getattr(transformers, name).config_class(**MODELS[name])
    made.architectures = [name]
    return made


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_a_head_has_the_parameters_of_its_class(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, file = config_of(name), tmp_path / "config.json"
    file.write_text(config.to_json_string(use_diff=False))
    found = road(Job(str(file), micro_batch=2, precision="fp32"), "").spec
    with torch.device("meta"), without_initial_values():
        model = getattr(transformers, name)(config)
    assert parameters(found).total == sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize(
    ("kind", "word", "named"),
    [("dinov2", "picture", "Dinov2ForImageClassification"), ("siglip", "pair", "SiglipModel"),
     ("sam_vision_model", "tower", "SamVisionModel"), ("vjepa2", "video", "VJEPA2ForVideoClassification"),
     ("encodec", "hearing", "EncodecModel"), ("wav2vec2", "sound", "")],
)  # fmt: skip
def test_a_config_that_names_no_class_has_the_first_that_is_trained(kind: str, word: str, named: str) -> None:
    config = transformers.CONFIG_MAPPING[kind]()
    found = head_class(config, "")
    assert found is not None
    assert found[0] == word
    assert named in ("", found[1].__name__)


def test_a_language_model_is_trained_as_one() -> None:
    assert head_class(transformers.GPT2Config(), "") is None
    assert head_class(transformers.T5Config(architectures=["T5Model"]), "") is None
    assert model_class(transformers.T5Config(architectures=["T5Model"])).__name__ == "T5ForConditionalGeneration"
    named = head_class(transformers.T5Config(architectures=["T5EncoderModel"]), "")
    assert named is not None
    assert named[1].__name__ == "T5EncoderModel"


def test_configs_with_python_s_infinity_are_read(tmp_path: Path) -> None:
    from loadgauge.core.families.hf import decode

    keys = {"time_step_limit": [0.0, float("inf")]}
    assert decode(json.dumps(keys).encode()) == keys
