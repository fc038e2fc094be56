"""Models of other libraries in an estimate: sizes of latents, the library that is missing, and the class's own parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import typed
from loadgauge import estimate
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.capture.inputs.libraries import encoders, latents, library_keys, usual_fields, usual_sizes

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
    for name in ("diffusers:sd3-medium", "Lightricks/LTX-Video"):
        assert "needs diffusers: pip install diffusers" in typed(f"estimate {name} --gpu h100").err
    assert "needs a diffusion model" in typed("estimate gpt2 --road captured --encoders all").err


PUBLISHED = {"flux.1-dev": 11.9e9, "wan2.1-14b": 14.3e9, "wan2.2-5b": 5.0e9, "hunyuan-video": 12.8e9, "qwen-image": 20.4e9,
             "cogvideox-5b": 5.57e9, "ltx-video-2b": 1.92e9, "sd-1.5": 0.86e9, "sdxl": 2.57e9, "sd3.5-large": 8.06e9,
             "sd-2.1": 0.866e9,
             "flux.2-dev": 32.2e9, "flux.2-klein-4b": 3.88e9, "flux.2-klein-9b": 9.08e9, "chroma1": 8.9e9, "lumina-2": 2.61e9,
             "z-image": 6.15e9, "cogview4-6b": 6.37e9, "wan2.1-i2v-14b": 16.4e9, "wan2.2-i2v-14b": 14.3e9,
             "ddpm": 113.7e6}  # fmt: skip
"""Parameters as the models' cards and papers round them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters(name: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    import torch

    keys = library_keys(name)
    given = {key: value for key, value in keys.items() if key != "library" and not key.startswith("_")}
    with torch.device("meta"):
        model = getattr(diffusers, keys["_class_name"]).from_config(given)
    assert sum(one.numel() for one in model.parameters()) == pytest.approx(PUBLISHED[name], rel=0.005)


def test_adapters_are_as_diffusers_makes_them() -> None:
    diffusers, peft = pytest.importorskip("diffusers"), pytest.importorskip("peft")
    import torch

    keys = {
        "num_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "caption_projection_dim": 16,
        "sample_size": 32,
    }
    job = Job(model="sd3-medium", lora_rank=4)
    usual = dict(usual_fields(job, {"_class_name": "SD3Transformer2DModel"}))
    with torch.device("meta"):
        model = diffusers.SD3Transformer2DModel(**keys).to(torch.bfloat16).requires_grad_(False)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=usual["lora_targets"].split(",")))
    assert {str(one.dtype) for one in model.parameters() if one.requires_grad} == {f"torch.{usual['lora_dtype']}"}
    assert dict(usual_fields(job.replace(precision="fp16"), {"_class_name": ""}))["lora_dtype"] == "float32"
    assert usual_fields(job, {"library": "timm", "_class_name": ""}) == ()


def test_encoders_have_the_parameters_of_their_classes() -> None:
    keys = {"_class_name": "UNet2DConditionModel", "_vae": "kl-4-fp32", "_texts": ["clip-l", "t5-xxl"]}
    parts = {which: encoders(keys, "", which, "h=128,w=128") for which in ("cached", "vae", "texts", "all")}
    assert parts["cached"].nbytes == 0
    assert parts["all"].nbytes == parts["vae"].nbytes + parts["texts"].nbytes == 4 * 83_653_863 + 2 * 4_885_371_136
    # 4.88 TFLOP to encode 1024 x 1024 (torch's FlopCounterMode), two for each weight and token of 77 of the texts
    assert parts["vae"].flops == pytest.approx(4.8790e12, rel=1e-3)
    assert parts["texts"].flops == 2 * 77 * (123_060_480 - 38_004_480 + 4_762_310_656 - 131_596_288)
    with pytest.raises(ConfigError, match="which they are is known of published models"):
        encoders({"_class_name": "UNet2DModel"}, "own", "vae", "")


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


def test_a_base_in_four_bits_is_as_diffusers_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loader on the CPU, which it asks a GPU for, puts the same layers in as many bytes."""
    diffusers, bnb = pytest.importorskip("diffusers"), pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    import torch

    from loadgauge.pytorch.capture.lists.quantised import elements, quantise
    from loadgauge.pytorch.capture.requests.regime import Regime, Tuned

    loader = "diffusers.quantizers.bitsandbytes.bnb_quantizer.BnB4BitDiffusersQuantizer.validate_environment"
    monkeypatch.setattr(loader, lambda *_, **__: None)
    keys = {
        "num_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 20,
        "caption_projection_dim": 40,
        "sample_size": 32,
    }
    whole = diffusers.SD3Transformer2DModel(**keys)
    whole.save_pretrained(tmp_path)
    how = diffusers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    theirs = diffusers.SD3Transformer2DModel.from_pretrained(
        tmp_path, quantization_config=how, torch_dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    with torch.device("meta"):
        ours = diffusers.SD3Transformer2DModel(**keys).to(torch.bfloat16)
    quantise(ours, Regime(tuned=Tuned(rank=4, base="nf4", upcast="none")))

    def packed(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
        return {
            name: (
                one.weight.numel(),
                one.weight.quant_state.absmax.numel(),
                one.weight.quant_state.state2.absmax.numel(),
            )
            for name, one in module.named_modules()
            if isinstance(one, bnb.nn.Linear4bit)
        }

    assert packed(ours) == packed(theirs)
    assert len(packed(ours)) > 10
    assert elements(ours) == sum(one.numel() for one in whole.parameters())
