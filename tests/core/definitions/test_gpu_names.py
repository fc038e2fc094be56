"""Names of GPUs as people type them and as drivers print them, cards of one's own, and cards of which only the memory is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgauge.core.base.errors import ConfigError, NotStated
from loadgauge.core.base.package_data import read_table
from loadgauge.core.base.units import GIB
from loadgauge.core.definitions.hardware.calibration import efficiencies
from loadgauge.core.definitions.hardware.hardware import card_of, gpu, gpu_ids, with_memory
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job

OWN = """
name = "My card"
multiprocessors = 77
[memory]
label = "24 GB"
bandwidth = "900 GB/s"
[peak]
bf16 = {value = "100 TFLOP/s"}
"""


@pytest.mark.parametrize(
    ("text", "id"),
    [
        # as torch.cuda.get_device_name and nvidia-smi print them
        ("Tesla T4", "t4"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb"),
        ("Tesla P100-PCIE-16GB", "p100-pcie-16gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090laptop"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000-server"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("Quadro RTX 8000", "quadrortx8000"),
        ("AMD Radeon RX 7900 XTX", "rx7900xtx"),
        ("Intel(R) Arc(TM) A770 Graphics", "arc-a770"),
        # as people type them
        ("A100-80GB", "a100-sxm4-80gb"),
        ("a100 40gb", "a100-sxm4-40gb"),
        ("rtx_3090", "rtx3090"),
        ("4090 24GB", "rtx4090"),
        ("3080", "rtx3080-10gb"),
        ("3080 12g", "rtx3080-12gb"),
        ("1080 Ti", "gtx1080ti"),
        ("a6000", "rtxa6000"),
        ("M4 Max 64GB", "m4-max-64gb"),
        ("Strix Halo", "strix-halo-128gb"),
        ("DGX Spark", "gb10"),
        ("dgx-h100", "h100-sxm5-80gb"),
        ("3060 laptop", "rtx3060laptop"),  # another card than the desktop's
        ("4080s", "rtx4080super"),
        ("4070 Ti S", "rtx4070tisuper"),
        ("4090m", "rtx4090laptop"),
        ("4090 D", "rtx4090d"),
        ("8060s", "strix-halo-128gb"),
        ("910B3", "ascend-910b"),
        ("trn2", "trainium2"),
        ("p4de.24xlarge", "a100-sxm4-80gb"),
        ("ml.g5.12xlarge", "a10g"),
        ("p5e", "h200-sxm-141gb"),
        ("Standard_ND96isr_H100_v5", "h100-sxm5-80gb"),
        ("a2-ultragpu", "a100-sxm4-80gb"),
        ("p4", "p4"),  # Tesla P4, not the machines of A100
    ],
)
def test_a_name_is_one_card(text: str, id: str) -> None:
    assert gpu(text).id == id


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rtx6000", "rtx6000ada, quadrortx6000"),  # three cards have this name
        ("nd96", "closest: "),  # machines of several cards
        ("4090 48gb", "--gpu rtx4090 --memory 48GB"),
        ("h100x", "h100-sxm5-80gb"),
        ("voodoo 2", "closest: "),
        ("", "closest: "),
    ],
)
def test_another_name_is_refused_in_a_line_that_helps(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gpu(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 200


def test_every_id_is_its_own_name_however_it_is_written() -> None:
    for id in gpu_ids():
        assert gpu(id.upper().replace("-", " ")).id == id


def test_a_chosen_variant_is_said_and_a_spelling_is_not_called_one() -> None:
    assumed = resolve_job(Job(model="gpt2", gpu="RTX 3080")).assumed["--gpu"]
    assert assumed == "rtx3080-10gb (the commonest RTX 3080; there is also rtx3080-12gb)"
    assert resolve_job(Job(model="gpt2", gpu="RTX 3090")).assumed["--gpu"] == "rtx3090 (GeForce RTX 3090 24GB)"
    assert "--gpu" not in resolve_job(Job(model="gpt2", gpu="rtx3090")).assumed


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "card.toml"
    file.write_text(OWN)
    card = gpu(str(file))
    assert (card.name, card.capacity, card.memory_bandwidth, card.peak("bf16")) == ("My card", 24e9, 900e9, 100e12)
    assert card.memory.label.works()[0].title == "Given by the user"
    own, usual = efficiencies(str(file)), efficiencies("")
    assert (own.basis, own.multiprocessors, own.matmul, own.memory) == ("assumed", 77, usual.matmul, usual.memory)
    result = resolve_job(Job(model="gpt2", gpu=str(file))).estimate()
    assert result.memory.capacity == 24e9
    assert result.time is not None
    assert result.time.low < result.time.step < result.time.high
    file.write_text(OWN.replace("900", "450"))  # read anew
    assert gpu(str(file)).memory_bandwidth == 450e9


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('"24 GB"', '"24 gigs"'), "24 gigs"),
        (('label = "24 GB"', ""), "label"),
        (("[peak]", "[peaks]"), "peaks"),
        (("[memory]", "[memory"), "card.toml"),
        (('"24 GB"', "24"), "card.toml"),
        (("[peak]", '[host]\npcie = {generation = 9, lanes = 16, source = ["yours"]}\n[peak]'), "PCI Express 9"),
        (('"900 GB/s"', '{value = "900 GB/s", source = ["nobody"]}'), "nobody"),
    ],
)
def test_a_wrong_card_of_ones_own_is_refused_in_one_line(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    file = tmp_path / "card.toml"
    file.write_text(OWN.replace(*change))
    with pytest.raises(ConfigError) as caught:
        gpu(str(file))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
    with pytest.raises(ConfigError, match="no such file"):
        gpu(str(tmp_path / "other.toml"))


def test_memory_alone_gives_a_verdict_and_no_time() -> None:
    setup = resolve_job(Job(model="llama-3.2-1b", memory="16GiB", qlora=True, seq_len=512))
    result = setup.estimate()
    assert result.memory.capacity == 16 * GIB
    assert result.memory.verdict == "fits"
    assert result.time is None
    assert "--gpu" in setup.untimed
    tight = resolve_job(Job(model="llama-3.2-1b", memory="1GB", qlora=True, seq_len=512)).estimate()
    assert tight.memory.capacity == 1e9
    assert tight.memory.verdict not in ("fits", "tight")
    with pytest.raises(NotStated):
        _ = card_of("16GiB").memory_bandwidth


def test_memory_beside_a_gpu_is_what_a_program_may_use() -> None:
    whole = resolve_job(Job(model="llama-3.2-1b", gpu="rtx4090")).estimate()
    part = resolve_job(Job(model="llama-3.2-1b", gpu="rtx4090", memory="10GiB")).estimate()
    assert part.memory.capacity == 10 * GIB
    assert part.memory.allocated == pytest.approx(
        whole.memory.allocated
    )  # which shows less idle on the card that is full
    assert part.memory.capacity < part.memory.total < whole.memory.total == whole.memory.capacity
    assert part.time == whole.time
    assert with_memory(gpu("rtx4090"), "48GiB").capacity == 48 * GIB


@pytest.mark.parametrize("text", ["16", "much", "16GB/s", "-1GiB", "0GiB"])
def test_memory_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"memory: must be a size such as 16GiB"):
        resolve_job(Job(model="gpt2", memory=text))


def test_shared_memory_is_said() -> None:
    assert "48.0 GiB of 64 GB, shared" in resolve_job(Job(model="gpt2", gpu="m4-max-64gb")).assumed["--memory"]


def test_a_card_without_bf16_trains_in_fp16_and_says_so() -> None:
    setup = resolve_job(Job(model="gpt2", gpu="t4"))
    assert setup.training.precision.name.startswith("fp16")
    assert "Tesla T4 16GB has no bf16" in setup.assumed["--precision"]
    assert "memory-efficient kernel" in setup.assumed["--attention"]
    assert setup.estimate().time is not None
    forced = resolve_job(Job(model="gpt2", gpu="t4", precision="bf16"))
    result = forced.estimate()
    assert forced.training.precision.name.startswith("bf16")
    assert result.time is None
    assert any("bf16 on Tesla T4 16GB, which has none" in line for line in result.not_counted)
    for id in ("rtx3060-12gb", "rx7900xtx", "tpu-v4"):
        assert resolve_job(Job(model="gpt2", gpu=id)).training.precision.name.startswith("bf16")


def test_qlora_recomputes_unless_it_is_told_not_to() -> None:
    job = Job(model="llama-3.2-1b", qlora=True, seq_len=512)
    assert resolve_job(job).layout.recompute.mode == "full"
    assert "QLoRA's tools" in resolve_job(job).assumed["--recompute"]
    assert resolve_job(job.replace(recompute="none")).layout.recompute.mode == "none"
    assert resolve_job(job.replace(qlora=None, lora_rank=16)).layout.recompute.mode == "none"


@pytest.mark.parametrize(
    "flags",
    [
        {"qlora": True, "recompute": "none"},
        {"qlora": True},
        {"gpu": "t4"},
        {"gpu": "t4", "precision": "bf16"},
        {"memory": "12GiB"},
        {"gpu": "rtx4090", "memory": "12GiB"},
    ],
)
def test_the_command_that_reproduces_it_does(flags: dict[str, object]) -> None:
    from loadgauge.core.resolve.reproduce import completer

    setup = resolve_job(Job(model="llama-3.2-1b", seq_len=512).replace(**flags))
    result = setup.estimate()
    again = resolve_job(completer(setup.job)(result)).estimate()
    assert (again.memory.total, again.memory.low, again.memory.high) == (
        result.memory.total,
        result.memory.low,
        result.memory.high,
    )
    assert (again.memory.capacity, again.time) == (result.memory.capacity, result.time)


def test_machines_of_clouds_hold_cards_of_the_catalogue() -> None:
    """In the numbers that one machine is built with."""
    for name, machine in read_table("instances.toml").items():
        count, _, card = machine.partition(" ")
        assert card in gpu_ids(), name
        assert int(count) in (1, 2, 4, 8, 16), name
        assert name == name.lower()
