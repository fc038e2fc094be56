"""A quantised base is made in 16 bits for every product: what that adds to a step."""

from __future__ import annotations

import pytest

from command_line import document
from loadgauge.core.base.errors import NotModelled
from loadgauge.core.definitions.hardware.calibration import efficiencies
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.training.software import factor
from loadgauge.core.resolve.resolve import resolve_job


def step(framework: str, **flags: object) -> float:
    values = {"gpu": "a100-sxm4-80gb", "lora_rank": 16, "seq_len": 2048, "micro_batch": 1, "framework": framework}
    time = resolve_job(Job.of("llama-3.1-8b", {**values, "recompute": "none", **flags})).estimate().time
    assert time is not None
    return time.step


# Not among them: PEFT's float32 adapters under autocast without its casts of the base. There LoRA casts each input twice, which
# QLoRA does not (`tuners/lora/bnb.py`), and that costs as much.
@pytest.mark.parametrize(
    ("framework", "more"),
    [
        ("unsloth", {}), ("torchtune", {}), ("litgpt", {}), ("huggingface", {}),
        ("huggingface", {"lora_dtype": "bfloat16", "kbit_upcast": "none"}),
    ],
)  # fmt: skip
def test_a_step_on_a_quantised_base_is_slower(framework: str, more: dict[str, object]):
    # Published: LoRA 4.55 s, QLoRA 4.78 s with tuned kernels, 5.96 s with the stock ones.
    plain = {name: value for name, value in more.items() if name != "kbit_upcast"}
    ratio = step(framework, qlora=True, **more) / step(framework, **plain)
    assert 1.02 < ratio < 1.40


def test_what_it_adds_is_the_bytes_of_each_pass():
    # 6.98e9 elements of the blocks' matrices, read in 4.127 bits, written in 16; forward and backward, once more recomputed.
    seconds = 6.98e9 * (0.5 + 1 / 64 + 4 / (64 * 256) + 2) / (2.039e12 * 2.5 / 3.35)
    launched = 32 * 7 * 3 * efficiencies("a100-sxm4-80gb").launch
    for recompute, passes in (("none", 2), ("full", 3)):
        more = step("unsloth", qlora=True, recompute=recompute) - step("unsloth", recompute=recompute)
        # The factor of software is on all compute.
        assert more == pytest.approx(factor().factor * passes * (seconds + launched), rel=0.005)


def test_bitsandbytes_before_0_48_branches_on_every_bit():
    plain = step("unsloth")
    new, old = (step("unsloth", qlora=True, version=f"bitsandbytes={release}") - plain for release in ("0.48", "0.47"))
    assert 1.36 < old / new < 2.07
    cards = {"gpu": "rtx4090", "qlora": True}
    assert step("unsloth", **cards, version="bitsandbytes=0.47") == step(
        "unsloth", **cards, version="bitsandbytes=0.48"
    )


def test_eight_bits_cost_passes_over_inputs_and_results():
    # The longer the batch, the more, where the matrices of 4 bits cost the same.
    def added(base: str, length: int) -> float:
        return step("unsloth", qlora=True, base=base, seq_len=length) - step("unsloth", seq_len=length)

    assert added("int8", 4096) > 1.3 * added("int8", 1024)
    assert added("nf4", 4096) == pytest.approx(added("nf4", 1024))


def test_prepared_and_without_autocast_all_of_it_runs_in_float32():
    # Kept bytes of the same are in tests/core/oracle/test_peft.py; measured, such a step took 10 times as long as one in 16 bits.
    pure = {"qlora": True, "precision": "bf16-pure"}
    assert step("huggingface", **pure) == step("huggingface", qlora=True, precision="fp32")
    assert step("huggingface", **pure) > 5 * step("huggingface", **pure, kbit_upcast="none")
    # Shards are one flat tensor of one dtype, so that nothing is prepared.
    sharded = {**pure, "gpus": 2, "zero": 3}
    assert step("huggingface", **sharded) == step("huggingface", **sharded, kbit_upcast="none")


def test_a_base_of_few_bits_is_in_no_flat_unit_with_its_adapters() -> None:
    """FSDP1 makes gradients of frozen weights that share a unit with trained ones (pytorch, `_flat_param.py`); PEFT's and
    fsdp_qlora's policies wrap adapters apart."""
    line = "estimate llama-3.1-8b --framework fsdp --gpu h100-sxm5-80gb --gpus 2 --zero 3 --recompute full"
    plain, few = (document(f"{line} {method}")["memory"]["parts"] for method in ("--lora-rank 16", "--qlora"))
    frozen = 7.5e9  # what the layers have, of which two are gathered at once
    assert plain["gathered"] > 2 * frozen
    assert few["gathered"] < frozen / 2


def test_an_nvfp4_base_is_its_packed_halves_its_block_scales_and_one_float():
    """The tensors that unsloth's kernel reads (`kernels/nvfp4.py`) and ModelOpt packs; torchao's `NVFP4Tensor` has as many."""
    torch = pytest.importorskip("torch")
    rows, columns = 14336, 4096
    tensors = (
        torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta"),
        torch.empty(rows, columns // 16, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(1, dtype=torch.float32, device="meta"),
    )
    each = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / (rows * columns)
    flags = {"gpu": "a100-sxm4-80gb", "lora_rank": 16, "seq_len": 2048, "framework": "unsloth", "recompute": "none"}
    plain, packed = (
        resolve_job(Job.of("llama-3.1-8b", {**flags, **more})).estimate()
        for more in ({}, {"qlora": True, "base": "nvfp4"})
    )
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    saved = plain.memory.parts["weights"] - packed.memory.parts["weights"]
    assert saved == pytest.approx((2 - each) * matrices, rel=1e-6)
    seconds = matrices * (each + 2) / (2.039e12 * 2.5 / 3.35) + 32 * 7 * efficiencies("a100-sxm4-80gb").launch
    more = step("unsloth", qlora=True, base="nvfp4") - step("unsloth")
    assert more == pytest.approx(factor().factor * 2 * seconds, rel=0.005)


def test_an_nvfp4_base_is_of_the_libraries_that_keep_it_packed():
    with pytest.raises(NotModelled, match=r"nvfp4 with --framework litgpt: it is in deepspeed, huggingface, unsloth"):
        step("litgpt", qlora=True, base="nvfp4")
    copied = resolve_job(Job.of("RedHatAI/Llama-3.1-8B-Instruct-NVFP4", {"gpu": "rtx4090", "lora_rank": 8}))
    assert copied.job.base == "nvfp4"
    assert "16 bits from its first pass" in copied.assumed["--base"]
