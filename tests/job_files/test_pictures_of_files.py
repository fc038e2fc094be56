"""Settings of towers and of pictures' sizes in job files: what is trained, and how large a picture stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import typed
from loadgauge import Job
from loadgauge.core.resolve.resolve import resolve_job

LLAMAFACTORY = {"stage": "sft", "cutoff_len": 4096, "template": "qwen2_vl", "image_max_pixels": 262144}
CASES = {
    "freeze_vision_tower: false\nfinetuning_type: lora": "adapters",
    "freeze_vision_tower: false\nfinetuning_type: full": "trained",
    "freeze_multi_modal_projector: false\nfinetuning_type: full": "projector",
    "finetuning_type: full": "frozen",
}


@pytest.mark.parametrize("lines", CASES)
def test_what_of_a_tower_is_trained(lines: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    told = {"model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", **LLAMAFACTORY}
    file.write_text("\n".join([lines, *(f"{key}: {value}" for key, value in told.items())]))
    setup = resolve_job(Job(str(file), pictures="2x4000x3000"))
    assert (setup.job.tower, setup.job.max_pixels) == (CASES[lines], 262144)
    seen = next(block.tower for block in setup.model.blocks if block.tower)
    assert seen.tiles == 2
    assert seen.patches * 14 * 14 <= 2 * 262144


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dpo.yaml", "model_name_or_path: Qwen/Qwen3-VL-4B-Instruct\nstage: dpo\ndo_train: true\nfinetuning_type: lora\n"
         "image_max_pixels: 262144\ncutoff_len: 2048\ntemplate: qwen3_vl\n"),
        ("sft.sh", "torchrun --nnodes=1 --nproc_per_node=$1 -m verl.trainer.sft_trainer data.micro_batch_size_per_gpu=4 "
         "model.path=google/gemma-2b-it engine=fsdp\n"),
    ],
)  # fmt: skip
def test_what_the_command_line_says_or_no_picture_needs_is_not_asked_for(name: str, text: str, tmp_path: Path) -> None:
    """How large pictures of a task may be, without pictures; and GPUs that an argument gives, beside --gpus."""
    (tmp_path / name).write_text(text)
    assert typed(f"estimate {tmp_path / name} --gpu h100 --gpus 8").code in (0, 1)


def test_variables_of_videos_are_named(tmp_path: Path) -> None:
    """`FPS_MAX_FRAMES` and others of `qwen_vl_utils`, which ms-swift's scripts set before the command."""
    file = tmp_path / "sft.sh"
    file.write_text(
        "FPS_MAX_FRAMES=8 \\\nVIDEO_MAX_PIXELS=40000 \\\nswift sft --model Qwen/Qwen2.5-VL-7B-Instruct --max_length 1024\n"
    )
    for video, effect in ((None, ""), ("8x448x448", "saves")):
        named = {item.key: item.effect for item in resolve_job(Job(str(file), video=video)).uncounted}
        assert named == {"FPS_MAX_FRAMES": effect, "VIDEO_MAX_PIXELS": effect}


def test_keys_of_videos_are_named(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    told = {
        "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct",
        **LLAMAFACTORY,
        "video_maxlen": 8,
        "finetuning_type": "lora",
    }
    file.write_text("\n".join(f"{key}: {value}" for key, value in told.items()))
    named = {item.key: item.effect for item in resolve_job(Job(str(file), video="16x448x448")).uncounted}
    assert named == {"video_maxlen": "saves"}
