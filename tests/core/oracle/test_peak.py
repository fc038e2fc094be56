"""The peak of a real training step against `estimate`, for small models: within 0.1 %.

Measured on a CPU by the allocator's events, less the scratch of kernels. What a CPU does otherwise is named: the
checkpoint's copy of the generator, LayerNorm's 16-bit statistics (below the tolerance), and the step of an optimizer
that is not fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from loadgauge import Layout, RecomputePolicy, estimate
from loadgauge.core.estimate.result import Memory
from torch_models import Built, build
from torch_peak import CPU_GENERATOR, largest_update, measured_peak

TOLERANCE = 1e-3
WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
checkpoints = pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])


def predicted(built: Built, s: int, b: int, optimizer: str, checkpointed: bool, batches: int = 1) -> Memory:
    layout = Layout(
        micro_batch=b, global_batch=b * batches, seq_len=s,
        recompute=RecomputePolicy(mode="full" if checkpointed else "none"),
    )  # fmt: skip
    return estimate(built.spec, layout, built.training(optimizer=optimizer)).memory


def check(
    built: Built, s: int, b: int, optimizer: str = "adamw", checkpointed: bool = False, batches: int = 1
) -> Memory:
    """Measured and predicted agree; returns the prediction."""
    if checkpointed:
        built.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    memory = predicted(built, s, b, optimizer, checkpointed, batches)
    states = sum(memory.parts[part] for part in ("weights", "optimizer")) + built.training().precision.gradient * sum(
        parameter.numel() for parameter in built.model.parameters()
    )
    step = states + (largest_update(built) if optimizer == "adamw" else 0)
    want = max(memory.allocated, step)
    generators = CPU_GENERATOR * built.spec.num_hidden_layers if checkpointed else 0
    got = measured_peak(built, s, b, optimizer, batches=batches)
    # At the loss all checkpoints are there, in the backward of the first layer only its own.
    assert want * (1 - TOLERANCE) <= got <= want * (1 + TOLERANCE) + generators, f"{got / want - 1:+.4%}"
    return memory


def in_turn(cases: Sequence[Any]) -> list[Any]:
    """Each case in float32, with checkpoints in every second one; each third in bfloat16 too, the other way round.

    CPUs without 16-bit instructions take ten times as long in bfloat16.
    """
    types = list(DTYPES.items())
    return [
        pytest.param(case, dtype, checkpointed, id=f"{case}-{name}-{'checkpointed' if checkpointed else 'kept'}")
        for turn, case in enumerate(cases)
        for (name, dtype), checkpointed in zip(types, (turn % 2 == 1, turn % 2 == 0), strict=True)
        if name == "float32" or turn % 3 == 0
    ]


# A wide loss is over after all attention, whose kind is then no matter. CPUs without 16-bit instructions are slow at these.
LOSSES = [
    (name, vocab, attention)
    for name, rows in (
        ("llama-gqa", [(64, "eager"), (64, "sdpa"), (6000, "sdpa")]), ("gpt2", [(64, "sdpa"), (64, "eager"), (6000, "sdpa")]),
    )
    for vocab, attention in rows
]  # fmt: skip


@pytest.mark.parametrize(("case", "dtype", "checkpointed"), in_turn(LOSSES))
def test_vocabularies(case: tuple[str, int, str], dtype: torch.dtype, checkpointed: bool) -> None:
    name, vocab, attention = case
    built = build(name, attention, dtype, vocab_size=vocab, **WIDE)
    memory = check(built, 256, 2 if dtype == torch.float32 else 1, checkpointed=checkpointed)
    if vocab == 6000:  # the least, in thousands, with which all these models need the most there
        assert memory.moment == "loss"


@pytest.mark.parametrize(
    ("name", "dtype", "checkpointed"), in_turn(["llama-mqa", "qwen3", "phi3", "gemma3", "opt", "bert"])
)
def test_families(name: str, dtype: torch.dtype, checkpointed: bool) -> None:
    keys = {"head_dim": 32} if name.startswith(("qwen3", "gemma")) else {}
    if name == "opt":
        keys.update(ffn_dim=704, word_embed_proj_dim=256)
    built = build(name, "eager", dtype, **{**WIDE, "vocab_size": 64, **keys})
    wide = dtype == torch.float32
    memory = check(built, 256 if wide else 128, 2, "adamw" if wide else "sgd", checkpointed)
    assert memory.moment != "optimizer step"


@checkpoints
@pytest.mark.parametrize(("s", "b", "optimizer"), [(1024, 1, "adamw"), (64, 8, "sgd")])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_shapes(name: str, s: int, b: int, optimizer: str, checkpointed: bool) -> None:
    built = build(name, "sdpa", torch.float32, vocab_size=1000, max_position_embeddings=1024, **WIDE)
    check(built, s, b, optimizer, checkpointed)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_the_embedding_can_be_the_peak(name: str, batches: int, tied: bool) -> None:
    """A short batch and a large table: all gradients are there, and of a tied table the head's part and a sum too."""
    built = build(name, "sdpa", torch.float32, vocab_size=20000, tie_word_embeddings=tied, **WIDE)
    memory = check(built, 32, 1, "sgd", batches=batches)
    if tied:
        assert memory.moment == "backward of the embedding"


@checkpoints
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_accumulated_gradients(name: str, checkpointed: bool) -> None:
    built = build(name, "eager", torch.float32, vocab_size=64, **WIDE)
    check(built, 128, 2, "sgd", checkpointed, batches=2)


@pytest.mark.parametrize(("name", "dtype"), [("llama-gqa", torch.float32), ("gpt2", torch.bfloat16)])
def test_outputs_held_through_backward(name: str, dtype: torch.dtype) -> None:
    """transformers' Trainer lets go of the outputs before backward; a loop that does not has the logits on top."""
    s, b, vocab = 128, 2, 8000
    built = build(name, "eager", dtype, vocab_size=vocab, **WIDE)
    memory = predicted(built, s, b, "sgd", False)
    assert memory.moment == "loss"
    want = memory.allocated + s * b * vocab * dtype.itemsize
    assert measured_peak(built, s, b, "sgd", held=True) == pytest.approx(want, rel=TOLERANCE)
