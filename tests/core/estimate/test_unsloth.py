"""Unsloth's kernels: what its autograd functions save, by their source (`kernels/fast_lora.py`, `rms_layernorm.py`)."""

from __future__ import annotations

import msgspec
import pytest

from loadgauge import Job, Layout, Lora, model
from loadgauge.core.definitions.model.lora import BASE_FORMATS
from loadgauge.core.definitions.training.training import Training, training
from loadgauge.core.estimate.memory.liveness import backward_peak
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.states.gathered import shared_matrix
from loadgauge.core.estimate.workings import view_of
from loadgauge.core.layers.block import block_layer
from loadgauge.core.layers.operations.operations import Layer
from loadgauge.core.resolve.resolve import resolve_job

LLAMA = model("llama-3.1-8b")
H, F, HEADS, KV, S = 4096, 14336, 32, 1024, 2048
LAYOUT = Layout(seq_len=S)


def trained(**how: object) -> Training:
    return training("unsloth", lora=Lora(rank=16, quantised="nf4", **how))  # type: ignore[arg-type]


def layer(kind: Training) -> Layer:
    return block_layer(LLAMA.blocks[0], LLAMA.hidden_size, view_of(LAYOUT, kind))


def test_functions_save_their_input_and_both_factors() -> None:
    """Two norms save X and r; QKV its X; attention Q, K, V, its result and a value a head; MLP its X, e and g."""
    norms = 2 * (2 * H + 4)
    projections = 2 * H
    attention = 2 * (2 * H + 2 * KV) + 4 * HEADS
    mlp = 2 * (H + 2 * F)
    assert layer(trained()).saved() == S * (norms + projections + attention + mlp)


def test_dropout_saves_a_mask_for_each_matrix() -> None:
    more = layer(trained(dropout=0.1)).saved() - layer(trained()).saved()
    assert more == S * (6 * H + F)  # six matrices read H wide, the last one F wide


def test_adapters_are_float32_and_have_gradients() -> None:
    found = [w for w in layer(trained()).weights if w.trainable]
    wide = sum(16 * (i + o) for i, o in ((H, H), (H, KV), (H, KV), (H, H), (H, F), (H, F), (F, H)))
    assert sum(w.numel for w in found) == wide
    assert all(w.wide for w in found)


def test_others_run_as_pefts() -> None:
    """Without an adapter on each of query, key and value, Unsloth calls PEFT's modules for them."""
    part = trained(targets=frozenset({"query", "value"}))
    names = layer(part).names
    assert "attention.query.cloned" in names
    assert "attention.query.cloned" not in layer(trained()).names


def test_gradients_of_the_factors_are_written_over_them() -> None:
    fused = trained()
    apart = msgspec.structs.replace(fused, kernels=msgspec.structs.replace(fused.kernels, activation_in_place=False))
    in_place, beside = (backward_peak(layer(kind)) for kind in (fused, apart))
    assert beside - in_place == pytest.approx(2 * S * F, rel=2e-3)  # then another moment is the largest


def test_one_matrix_in_16_bits_stays_beside_a_quantised_base() -> None:
    """The buffer is as large as the largest matrix, and has a float32 scale for each block of 64."""
    kind = trained()
    assert shared_matrix(MemoryModel(LLAMA, LAYOUT, kind, view_of(LAYOUT, kind))) == pytest.approx(H * F * (2 + 4 / 64))


def test_experts_are_quantised_whatever_transformers_does() -> None:
    """24 layers of 32 experts of 3 x 2,880 x 2,880 in 4 bits and a scale for each block; transformers 5 leaves them in 16 bits.

    The shared buffer holds the largest matrix of attention: an expert's are made in 16 bits by the layer.
    """
    mixture = model("gpt-oss-20b")
    experts = 24 * 32 * 3 * 2880 * 2880
    job = Job("gpt-oss-20b", qlora=True, gpu="h100", seq_len=S, kbit_upcast="none", lora_targets="attention")
    kept = [
        resolve_job(job.replace(framework=framework)).estimate().memory.parts["weights"]
        for framework in ("huggingface", "unsloth")
    ]
    assert kept[0] - kept[1] == pytest.approx(experts * (2 - BASE_FORMATS["nf4"].nbytes), rel=0.01)
    kind, mixture = trained(), model("gpt-oss-20b")
    assert shared_matrix(MemoryModel(mixture, LAYOUT, kind, view_of(LAYOUT, kind))) == 2880 * 4096 * (2 + 4 / 64)


@pytest.mark.parametrize(
    ("name", "targets", "trained"),
    [
        # 48 layers of 128 experts: gate and up in one tensor (2048 -> 1536), and down (768 -> 2048), beside attention.
        ("qwen3-30b-a3b", "all", 6_684_672 + 48 * 128 * 8 * (2048 + 1536 + 768 + 2048)),
        ("qwen3-30b-a3b", "q_proj,down_proj", 48 * 8 * (2048 + 4096) + 48 * 128 * 8 * (768 + 2048)),
        # 24 layers of 32 experts, whose width is that of the model.
        ("gpt-oss-20b", "all", 3_981_312 + 24 * 32 * 8 * (2880 + 5760 + 2880 + 2880)),
    ],
)
def test_adapters_of_the_mlp_are_those_of_experts_too(name: str, targets: str, trained: int) -> None:
    """Unsloth since 2026.2 (`get_moe_target_parameters`); before, attention alone was adapted."""
    job = Job(model=name, gpu="h100-sxm5-80gb", framework="unsloth", lora_rank=8, lora_targets=targets, seq_len=S)
    assert adapted(job) == trained
    assert adapted(msgspec.structs.replace(job, version="unsloth=2026.1", lora_targets="all")) < 7e6


def adapted(job: Job) -> int:
    setup = resolve_job(job)
    return sum(
        int(weight.numel)
        for kind in setup.model.pattern
        for weight in block_layer(
            setup.model.blocks[kind], setup.model.hidden_size, view_of(LAYOUT, setup.training)
        ).weights
        if weight.trainable
    )


def test_adapters_of_experts_are_grouped_products() -> None:
    """No copy of the experts' matrices is made of them, as PEFT makes one (`_apply_lora_grouped_mm`)."""
    layers = [
        block_layer(
            model("qwen3-30b-a3b").blocks[0],
            2048,
            view_of(LAYOUT, training(name, lora=Lora(rank=8, targets=frozenset({"experts.down"})))),
        )
        for name in ("unsloth", "huggingface")
    ]
    copies = [[item.name for item in each.operations if item.name.endswith("adapted_weight")] for each in layers]
    assert (len(copies[0]), len(copies[1])) == (0, 1)
    low = next(item for item in layers[0].operations if item.name.endswith("down.lora_a"))
    assert low.forward_flops == 2 * S * 8 * 768 * 8  # eight experts a token, of width 768
    assert low.keeps[0].numel == S * 8 * 768
