"""DeepSpeed configurations that are known by name where the file is not at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.job_files.exchange import read
from loadgauge.job_files.reading.known_files import known_file

FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: full
cutoff_len: 2048
per_device_train_batch_size: 1
bf16: true
deepspeed: {}
"""
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
sequence_len: 2048
micro_batch_size: 1
bf16: auto
datasets:
  - path: a
    type: alpaca
deepspeed: {}
"""


@pytest.mark.parametrize(
    ("text", "name", "zero", "offload"),
    [
        (FACTORY, "examples/deepspeed/ds_z0_config.json", 0, "none"),
        (FACTORY, "examples/deepspeed/ds_z2_config.json", 2, "none"),
        (FACTORY, "ds_z2_offload_config.json", 2, "optimizer"),
        (FACTORY, "examples/deepspeed/ds_z3_config.json", 3, "none"),
        (FACTORY, "examples/deepspeed/ds_z3_offload_config.json", 3, "all"),
        (AXOLOTL, "deepspeed_configs/zero1.json", 1, "none"),
        (AXOLOTL, "deepspeed_configs/zero2.json", 2, "optimizer"),
        (AXOLOTL, "/workspace/axolotl/deepspeed_configs/zero3_bf16.json", 3, "none"),
        (AXOLOTL, "deepspeed_configs/zero3_bf16_cpuoffload_all.json", 3, "all"),
    ],
)
def test_a_known_name_is_read_as_the_tool_has_it_and_said_so(text: str, name: str, zero: int, offload: str) -> None:
    file = read(text.format(name), file="job.yaml")
    assert (file.job.zero, file.job.offload or "none") == (zero, offload)
    assert len(file.remarks) == 1
    assert f"{name} is not there, and is taken to be " in file.remarks[0]


def test_the_file_itself_comes_first_and_other_names_stay_unknown(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(FACTORY.format("ds_z3_config.json"))
    setup = resolve_job(Job(model=str(job)))
    assert setup.layout.zero == 3
    assert "taken to be LLaMA-Factory's" in setup.file
    (tmp_path / "ds_z3_config.json").write_text('{"zero_optimization": {"stage": 1}}')
    own = resolve_job(Job(model=str(job)))
    assert own.layout.zero == 1
    assert "taken to be" not in own.file
    assert known_file("zero2.json") is None
    with pytest.raises(ConfigError, match=r"mine/zero2\.json, which is not there"):
        read(AXOLOTL.format("mine/zero2.json"), file="job.yaml", strict=True)


@pytest.mark.parametrize(("name", "stage"), [("mine/zero2.json", 2), ("a/my_z3_b.json", 3), ("a/test.json", 0)])
def test_the_stage_of_a_configuration_that_is_not_there_is_that_of_its_name_and_in_the_range(
    name: str, stage: int
) -> None:
    file = read(AXOLOTL.format(name), file="job.yaml")
    assert file.job.zero == stage
    assert [item.effect for item in file.uncounted if name in item.note] == ["either"]
