"""Settings of towers and of pictures' sizes in job files: what is trained, and how large a picture stays."""

from __future__ import annotations

from pathlib import Path

import pytest

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
