"""Job files of diffusion trainers: what their programs take for granted, and what a file says, as fields of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import typed
from extract_keys import sections_of
from loadgauge import estimate
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.package_data import read_table
from loadgauge.job_files.exchange import JobFile, read
from loadgauge.job_files.hugging_face.diffusers import OTHERWISE
from loadgauge.job_files.job_file import is_job_file

TABLE: dict[str, dict[str, Any]] = read_table("diffusion.toml")["diffusers"]
PROGRAMS = {
    title.rpartition(": train_")[2]: keys for title, keys in sections_of("diffusers") if ": train_" in title
}  # fmt: skip
READ = {
    program: name
    for program in PROGRAMS
    for name in TABLE
    if set(program.split("_")) - OTHERWISE == set(name.split("_"))
}


def of(text: str, **given: Any) -> JobFile:
    return read(text, file="run.sh", **given)


def launched(program: str, options: str = "") -> JobFile:
    return of(f"accelerate launch train_{program}.py --output_dir x {options}")


@pytest.mark.parametrize("program", READ)
def test_defaults_are_the_programs_own(program: str) -> None:
    """As its `add_argument` calls have them (`extract_keys.py`)."""
    theirs, job = PROGRAMS[program], launched(program).job
    row = TABLE[READ[program]]
    assert job.micro_batch == theirs["train_batch_size"]
    assert (job.lora_rank or 0) == (theirs.get("rank") or theirs.get("lora_rank") or 0)
    if "max_num_frames" in theirs:
        assert job.video == f"{theirs['max_num_frames']}x{theirs['width']}x{theirs['height']}"
    else:
        assert job.pictures == "1x{0}x{0}".format(theirs["resolution"])
    if "text" in row:
        assert job.inputs == f"s={theirs.get('max_sequence_length', row['text'][0]) + row['text'][1]}"


def test_every_row_is_of_a_program() -> None:
    assert set(TABLE) - {"diffusion_dpo_sdxl"} == set(READ.values())  # that one is a research project
    named = read_table("capture/libraries.toml")["named"]
    assert {row["model"] for row in TABLE.values()} <= named.keys()


FLUX = """export MODEL_NAME="black-forest-labs/FLUX.1-dev"
accelerate launch --num_processes 2 train_dreambooth_lora_flux.py --pretrained_model_name_or_path=$MODEL_NAME \\
  --instance_data_dir=dog --output_dir=out --mixed_precision="bf16" --resolution=1024 --train_batch_size=3 --rank=16 \\
  --max_sequence_length 256 --gradient_accumulation_steps=4 --optimizer="adamw" --use_8bit_adam --gradient_checkpointing
"""
FULL = """accelerate launch --multi_gpu --num_processes=8 --mixed_precision=fp16 train_text_to_image.py \\
  --pretrained_model_name_or_path=CompVis/stable-diffusion-v1-4 --dataset_name=x --use_ema --train_batch_size=1
"""
KONTEXT = """accelerate launch train_dreambooth_lora_flux_kontext.py --pretrained_model_name_or_path=m/y --cond_image_column c \\
  --caption_column t --with_prior_preservation --aspect_ratio_buckets "512,768;1024,768" --mixed_precision=bf16 --cache_latents
"""
WAN = """accelerate launch --mixed_precision bf16 src/musubi_tuner/wan_train_network.py --task i2v-14B --dit w.safetensors \\
  --dataset_config data.toml --sdpa --fp8_base --optimizer_type adamw8bit --gradient_checkpointing \\
  --network_module networks.lora_wan --network_dim 32 --blocks_to_swap 20
"""
WHOLE = "accelerate launch qwen_image_train.py --dataset_config d.toml --full_bf16 --fused_backward_pass --optimizer_type adafactor"
FINETRAINERS = """torchrun --nproc_per_node=4 train.py --parallel_backend ptd --dp_degree 2 --dp_shards 2 --model_name wan \\
  --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-14B-Diffusers --dataset_config data.json --training_type lora --rank 32 \\
  --target_modules "blocks.*(to_q|to_v)" --batch_size 2 --gradient_checkpointing --optimizer adamw-bnb-8bit --enable_precomputation
"""
SIMPLETUNER = {
    "--model_family": "flux", "--model_type": "lora", "--lora_rank": 8, "--train_batch_size": 2, "--resolution": 1.0,
    "--resolution_type": "area", "--mixed_precision": "bf16", "--base_model_precision": "int8-quanto",
    "--data_backend_config": "nowhere.json", "--pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
    "--gradient_checkpointing": "true", "--num_processes": 2,
}  # fmt: skip
ENVIRONMENT = """export MODEL_TYPE='full'
export MODEL_FAMILY='sdxl'
export DATALOADER_CONFIG="nowhere.json"
export TRAIN_BATCH_SIZE=4
export GRADIENT_ACCUMULATION_STEPS=2
export RESOLUTION=768
export USE_GRADIENT_CHECKPOINTING=false
export OPTIMIZER=bnb-adamw8bit
export TRAINING_NUM_PROCESSES=2
"""
SAID: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flux": ("run.sh", FLUX, {
        "model": "black-forest-labs/FLUX.1-dev", "micro_batch": 3, "global_batch": 24, "gpus": 2, "pictures": "1x1024x1024",
        "inputs": "s=256", "precision": "bf16", "weights": "bfloat16", "optimizer": "adamw-8bit", "recompute": "full",
        "lora_rank": 16, "encoders": "vae"}),
    "whole": ("run.sh", FULL, {"weights": "float32", "precision": "fp16", "gpus": 8, "encoders": "all", "recompute": "none",
                               "lora_rank": 0}),
    "kontext": ("run.sh", KONTEXT, {"model": "flux.1-dev", "pictures": "1x768x2048", "micro_batch": 8, "encoders": "texts"}),
    "musubi": ("run.sh", WAN, {
        "model": "wan2.1-i2v-14b", "video": "81x832x480", "micro_batch": 2, "lora_rank": 32, "lora_dtype": "float32",
        "lora_targets": "all", "optimizer": "adamw-8bit", "encoders": "cached", "recompute": "full"}),
    "musubi, whole": ("run.sh", WHOLE, {"model": "qwen-image", "precision": "bf16-pure", "optimizer": "adafactor:in-backward",
                                        "lora_rank": 0}),
    "finetrainers": ("run.sh", FINETRAINERS, {
        "model": "Wan-AI/Wan2.1-T2V-14B-Diffusers", "gpus": 4, "zero": 3, "replicas": 2, "video": "49x832x480",
        "precision": "bf16-pure", "lora_rank": 32, "lora_targets": "blocks.*(to_q|to_v)", "lora_dtype": "bfloat16",
        "micro_batch": 2, "optimizer": "adamw-8bit", "encoders": "cached"}),
    "SimpleTuner": ("config.json", json.dumps(SIMPLETUNER), {
        "model": "black-forest-labs/FLUX.1-dev", "gpus": 2, "pictures": "1x1024x1024", "micro_batch": 2, "precision": "bf16-pure",
        "lora_rank": 8, "lora_dropout": 0.1, "recompute": "full", "optimizer": "stable-adamw", "encoders": "cached"}),
    "SimpleTuner's variables": ("config.env", ENVIRONMENT, {
        "model": "sdxl", "gpus": 2, "global_batch": 16, "pictures": "1x768x768", "recompute": "none", "optimizer": "adamw-8bit",
        "lora_rank": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_a_file_says_the_job(name: str, tmp_path: Path) -> None:
    file, text, fields = SAID[name]
    (tmp_path / "data.toml").write_text(
        '[general]\nresolution = [832, 480]\nbatch_size = 2\n[[datasets]]\nvideo_directory = "v"\ntarget_frames = [1, 25, 81]\n'
        '[[datasets]]\nimage_directory = "i"\nresolution = 1024\n'
    )
    (tmp_path / "data.json").write_text('{"datasets": [{"video_resolution_buckets": [[1, 512, 512], [49, 480, 832]]}]}')
    path = tmp_path / file
    path.write_text(text)
    assert is_job_file(str(path))
    job = read(text, file=str(path)).job
    assert {field: getattr(job, field) for field in fields} == fields


def test_what_is_not_modelled_is_named_with_what_it_can_do() -> None:
    effects = {item.key: (item.effect, item.parts, item.share) for item in of(WAN).uncounted if item.effect}
    assert effects["--fp8_base"] == ("saves", ("weights",), 0.5)
    assert effects["--blocks_to_swap"] == ("saves", ("weights",), 0.5)  # 20 of 40
    assert effects["--dataset_config"][0] == "either"  # which is not there
    (ema,) = (item for item in of(FULL).uncounted if item.key == "--use_ema")
    assert ema.parameter == 4  # float32
    file = read(json.dumps(SIMPLETUNER), file="config.json")
    assert {item.key: item.share for item in file.uncounted}["--base_model_precision"] == 0.5


def test_a_file_says_the_format_of_the_base(tmp_path: Path) -> None:
    text = "accelerate launch train_dreambooth_lora_flux2.py --mixed_precision bf16 --bnb_quantization_config_path bits.json"
    run = str(tmp_path / "run.sh")
    (unseen,) = (item for item in read(text, file=run).uncounted if "bnb" in item.key)
    assert (unseen.effect, unseen.parts) == ("saves", ("weights",))
    for kind, double, base in (("nf4", True, "nf4"), ("nf4", False, "nf4-single"), ("fp4", False, "fp4")):
        said = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
        (tmp_path / "bits.json").write_text(json.dumps(said))
        job = read(text, file=run).job
        assert (job.qlora, job.base, job.kbit_upcast) == (True, base, "all")  # `prepare_model_for_kbit_training`


ENCODERS = {
    ("text_to_image", ""): "all", ("text_to_image_sdxl", ""): "cached", ("dreambooth_lora_flux", "--cache_latents"): "cached",
    ("dreambooth_lora_flux", "--dataset_name d --caption_column c"): "all", ("dreambooth_lora_qwen_image", ""): "vae",
    ("dreambooth_lora_qwen_image", "--offload"): "cached", ("dreambooth", "--pre_compute_text_embeddings"): "vae",
    ("unconditional", ""): "cached", ("cogvideox_lora", ""): "texts",
}  # fmt: skip
"""Encoders that a program does not delete before it trains."""


@pytest.mark.parametrize("case", ENCODERS)
def test_encoders_that_stay_on_the_card(case: tuple[str, str]) -> None:
    assert launched(*case).job.encoders == ENCODERS[case]


def test_a_model_is_never_guessed_for_a_program_of_another() -> None:
    """Of its own programs an unknown name is one of the model that they are for, which is said; of others it is asked for."""
    own = launched("text_to_image", "--pretrained_model_name_or_path me/finetuned")
    assert own.job.model == "sd-1.5"
    assert any("me/finetuned is taken for sd-1.5" in line for line in own.remarks)
    assert launched("dreambooth_lora_krea9", "--pretrained_model_name_or_path krea/krea-9").job.model == ""
    assert launched("sd_distil_lora", "--pretrained_model_name_or_path stabilityai/stable-diffusion-2-1-base").job.model


def test_files_of_data_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    musubi = "accelerate launch hv_train_network.py --dataset_config x.toml"
    for text, file in (
        (musubi, "run.sh"),
        ('{"model_family": "flux", "data_backend_config": "x.json"}', "config.json"),
    ):
        for content in (
            "{",
            "a = 1",
            "[1]",
            '{"datasets": 3}',
            "[[datasets]]\nresolution = []",
            '[{"resolution": {}, "video": 3}]',
        ):
            for name in ("x.toml", "x.json"):
                (tmp_path / name).write_text(content)
            if content[:2] == "[{" and file == "config.json":
                continue  # a set of data whose sizes are the usual ones
            with pytest.raises(ConfigError, match="is no file of data that is read"):
                read(text, file=str(tmp_path / file))


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("loadgauge.pytorch.capture.inputs.libraries.find_spec", lambda _: None)
    (tmp_path / "run.sh").write_text(
        "accelerate launch train_dreambooth_lora_flux.py --pretrained_model_name_or_path=x\n"
    )
    assert "needs diffusers: pip install diffusers" in typed(f"estimate {tmp_path / 'run.sh'}").err


@pytest.mark.long
def test_a_file_is_answered_as_its_flags_are(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    path = tmp_path / "run.sh"
    path.write_text(
        "accelerate launch --num_processes 1 train_dreambooth_lora_sd3.py --pretrained_model_name_or_path"
        " stabilityai/stable-diffusion-3-medium-diffusers --mixed_precision fp16 --resolution 256 --train_batch_size 1\n"
    )
    file = estimate(str(path), gpu="h100")
    flags = estimate(
        "sd3-medium", gpu="h100", pictures="1x256x256", lora_rank=4, precision="fp16", weights="float16", encoders="vae",
        inputs="s=154",
    )  # fmt: skip
    assert file.model.own.resident == flags.model.own.resident == 2 * 83_819_683
    assert file.memory.total == flags.memory.total
    assert file.time is not None
    assert flags.time is not None
    assert file.time.step == pytest.approx(flags.time.step)
    longer, shorter = (
        estimate("sd3-medium", pictures="1x256x256", lora_rank=4, inputs=f"s={size}") for size in (512, 256)
    )
    # 256 tokens of the picture are beside them, and attention takes more than in proportion.
    assert (512 + 256) / (256 + 256) < longer.flops.model / shorter.flops.model < 1.1 * (512 + 256) / (256 + 256)
    assert "is read as diffusers" in " ".join(typed(f"estimate {path} --gpu h100").out.split())
