"""What FSDP2 and DDP hold beside the model states: the estimate's peak is that of PyTorch, traced, within 1 %.

Models whose peak is in the layers, at the loss, at the embedding and the head, or in the working set of one layer.
ReLU stands in for SiLU, whose backward the tracer runs as several operations on CUDA.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from transformers import LlamaConfig

from loadgauge import Layout, RecomputePolicy, estimate, from_dict
from loadgauge.core.definitions.model.kernels import Dtypes
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS, TRANSFORMERS
from loadgauge.core.definitions.training.training import Training, training
from loadgauge.core.estimate.result import Memory
from loadgauge.pytorch.parallel.parallel import ParallelJob
from loadgauge.pytorch.record.caching_allocator import Allocator, replay
from loadgauge.pytorch.trace.programs.jobs import ConfigJob
from loadgauge.pytorch.trace.subprocess import DEFAULT_KEEP
from loadgauge.pytorch.trace.torch_run import TorchRun
from loadgauge.pytorch.trace.trace import Recorded, Trace, record, trace
from torch_runs import torch_run

TOLERANCE = 0.01
SHAPES: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 5, "vocab_size": 512, "seq_len": 64},
    "pipeline": {"num_hidden_layers": 6, "vocab_size": 512, "seq_len": 64},
    "loss": {"num_hidden_layers": 2, "vocab_size": 16000, "seq_len": 512},
    "ends": {"num_hidden_layers": 2, "vocab_size": 32000, "seq_len": 32},
    "tied": {"num_hidden_layers": 2, "vocab_size": 32000, "seq_len": 32, "tie_word_embeddings": True},
    "activations": {"num_hidden_layers": 4, "vocab_size": 512, "seq_len": 2048},
}


def config(keys: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        max_position_embeddings=2048, hidden_act="relu", architectures=["LlamaForCausalLM"],
        **{"tie_word_embeddings": False, **keys},
    )  # fmt: skip


def settings(run: TorchRun, framework: str) -> TorchRun:
    """The same as a framework shards, which for torchtitan leaves embedding and head to the root."""
    apart = training(framework).ends_apart
    own = msgspec.structs.replace(run.training, framework=FRAMEWORKS[framework], ends_apart=apart)
    return msgspec.structs.replace(run, training=own)


def how(framework: str, precision: str, zero: int) -> Training:
    """The framework's memory with the modules of transformers, which are the ones traced; FSDP casts, DDP autocasts."""
    found = training(framework, precision)
    residual = 4 if precision == "bf16-autocast" and zero == 0 else None
    dtypes = Dtypes(activation=4 if precision == "fp32" else 2, residual=residual)
    return msgspec.structs.replace(
        found, kernels=msgspec.structs.replace(TRANSFORMERS, attention="flash", dtypes=dtypes)
    )


def both(shape: str, zero: int, precision: str, recompute: str, *args: Any, **more: Any) -> tuple[Trace, Memory]:
    """One rank traced, and estimated."""
    recorded, memory = allocations(shape, zero, precision, recompute, *args, **more)
    return recorded.trace, memory


def allocations(
    shape: str, zero: int, precision: str, recompute: str, batches: int = 1, world: int = 8, pp: int = 1,
    framework: str = "torchtitan", predicted: str = "", tp: int = 1,
) -> tuple[Recorded, Memory]:  # fmt: skip
    """One rank traced, with its allocations, and estimated."""
    keys = dict(SHAPES[shape])
    s, kept = keys.pop("seq_len"), recompute == "selective"
    run = torch_run(
        keep=DEFAULT_KEEP if kept else (), optimizer="adamw-fused", precision=precision, seq_len=s, gpus=world, pp=pp,
        zero=zero, global_batch=batches * world // (pp * tp), recompute="full" if kept else recompute, tp=tp,
        sequence_parallel=tp > 1,
    )  # fmt: skip
    traced = record(ParallelJob(config(keys), settings(run, framework)), "cuda", gpus=world)
    layout = Layout(
        dp=world // (pp * tp), pp=pp, tp=tp, sequence_parallel=tp > 1, zero=zero, seq_len=s,
        global_batch=batches * world // (pp * tp),
        recompute=RecomputePolicy(mode=predicted or recompute),  # type: ignore[arg-type]
    )  # fmt: skip
    return traced, estimate(from_dict(config(keys).to_dict()), layout, how(framework, precision, zero)).memory


def peak(memory: Memory) -> float:
    return max(sum(bytes for part, bytes in moment.parts.items() if part != "outside") for moment in memory.moments)


def check(traced: Trace, memory: Memory) -> None:
    assert peak(memory) == pytest.approx(traced.peak.total, rel=TOLERANCE)


COMBINED = (((2, "full"), (3, "none")), ((2, "none"), (3, "full")))
"""Stages of ZeRO and recomputation, by turns."""
OPEN = ("activations", "huggingface", 3, "none")
"""Its peak is 2.3 % low: the last layer is gathered ahead while the head's unit runs backward, which is not counted."""


@pytest.mark.parametrize(
    ("shape", "framework", "zero", "recompute"),
    [
        pytest.param(
            *case, marks=pytest.mark.xfail(strict=True, reason="the last layer, gathered ahead") if case == OPEN else ()
        )
        for case in (
            (*kind, zero, recompute)
            for place, kind in enumerate(
                (
                    *((shape, "torchtitan") for shape in SHAPES if shape != "pipeline"),
                    ("layers", "huggingface"),
                    ("activations", "huggingface"),
                )
            )
            for zero, recompute in COMBINED[place % 2]
        )
    ],
)
def test_fsdp(shape: str, zero: int, recompute: str, framework: str) -> None:
    """torchtitan reduces gradients in float32; transformers' weights and gradients are 16-bit here."""
    precision = "bf16-autocast" if framework == "torchtitan" else "bf16-pure"
    check(*both(shape, zero, precision, recompute, framework=framework))


@pytest.mark.parametrize(("shape", "zero", "precision"), [("layers", 2, "bf16-autocast"), ("ends", 3, "fp32")])
def test_fsdp_accumulates_in_shards(shape: str, zero: int, precision: str) -> None:
    check(*both(shape, zero, precision, "full", batches=2, world=4))


@pytest.mark.parametrize(
    ("shape", "zero", "precision", "recompute", "batches"),
    [
        ("layers", 2, "bf16-autocast", "none", 3),
        ("layers", 3, "bf16-pure", "full", 2),
        ("loss", 3, "bf16-autocast", "none", 2),
        ("ends", 3, "bf16-pure", "full", 3),
        ("activations", 2, "bf16-autocast", "none", 2),
    ],
)
def test_gradients_are_whole_until_the_last_micro_batch(
    shape: str, zero: int, precision: str, recompute: str, batches: int
) -> None:
    """Trainer accumulates under `no_sync`: every rank holds the gradients of the whole model."""
    traced, memory = both(shape, zero, precision, recompute, batches=batches, framework="huggingface")
    assert peak(memory) == pytest.approx(traced.peak.total, rel=0.0015)  # whole gradients are some 20 % of the peak


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", ["loss", "activations"])
def test_ddp(shape: str, recompute: str) -> None:
    """Gradients stand in buckets a second time; autocast's copies of weights go with the layers' backward."""
    check(*both(shape, 0, "bf16-autocast", recompute, framework="huggingface"))


def test_a_pipeline_keeps_weights_gathered_and_gradients_whole() -> None:
    check(*both("pipeline", 2, "bf16-autocast", "none", batches=4, pp=2))


def test_selective_checkpointing_leaves_what_is_gathered_alone() -> None:
    """Which operations PyTorch keeps is not what Megatron keeps, but stage 2 holds as much more than stage 3."""
    (traced, memory), (traced_3, memory_3) = (
        both("loss", zero, "bf16-autocast", "selective", predicted="none") for zero in (2, 3)
    )
    assert memory.moment == memory_3.moment == "loss"
    assert peak(memory) - peak(memory_3) == pytest.approx(traced.peak.total - traced_3.peak.total, rel=TOLERANCE)


def test_recomputation_can_raise_the_peak_of_few_layers() -> None:
    """A checkpointed layer is whole at once, its input beside it; one that is not gives back its MLP before that."""
    keys, kernels = {"num_hidden_layers": 1, "vocab_size": 512}, how("huggingface", "bf16-pure", 3).kernels
    chosen = msgspec.structs.replace(
        how("huggingface", "bf16-pure", 3), kernels=msgspec.structs.replace(kernels, attention="eager")
    )
    peaks = {}
    for recompute in ("none", "full"):
        run = torch_run(optimizer="adamw-fused", seq_len=1024, attention="eager", recompute=recompute)
        traced = trace(ConfigJob(config(keys), run), "cuda")
        layout = Layout(seq_len=1024, recompute=RecomputePolicy(mode=recompute))  # type: ignore[arg-type]
        memory = estimate(from_dict(config(keys).to_dict()), layout, chosen).memory
        check(traced, memory)
        peaks[recompute] = traced.peak.total, peak(memory)
    assert all(more > less for less, more in zip(*peaks.values(), strict=True))


def test_the_loss_over_tensor_parallel_ranks_makes_one_more_copy() -> None:
    """`loss_parallel` has the exponentials, the gradient and their sum beside the log-probabilities."""
    traced, memory = both("loss", 3, "bf16-autocast", "full", tp=2)
    assert memory.moment == "loss"
    check(traced, memory)


@pytest.mark.parametrize(
    ("shape", "zero", "precision", "framework", "loss"),
    [
        ("ends", 3, "bf16-autocast", "torchtitan", False),
        ("loss", 2, "bf16-autocast", "torchtitan", True),
        ("activations", 3, "bf16-pure", "huggingface", False),
        ("ends", 3, "bf16-pure", "huggingface", False),
    ],
)
def test_streams_of_fsdp(shape: str, zero: int, precision: str, framework: str, loss: bool) -> None:
    """What PyTorch allocates on the streams of its collectives, each at its own moment, and on the main one.

    At the loss the main pool is said to hold what nothing fits in too, the logits of 16 bits.
    """
    recorded, memory = allocations(shape, zero, precision, "full", framework=framework)
    stream = recorded.stream
    live: dict[int, int] = {}
    most: dict[int, int] = {}
    for number, change in zip(stream.ids, stream.changes, strict=True):
        on = stream.records[number].stream
        live[on] = live.get(on, 0) + change
        most[on] = max(most.get(on, 0), live[on])
    main = most.pop(0)
    pools, keys = memory.margins.pools, SHAPES[shape]
    hole = 2 * keys["seq_len"] * keys["vocab_size"] if loss else 0
    assert len(most) == 2  # of gathering and of reduction
    assert pools.most == pytest.approx(sum(most.values()), rel=TOLERANCE)
    assert peak(memory) - pools.beside == pytest.approx(main + hole, rel=TOLERANCE)
    reserved = replay(stream, Allocator(expandable=True)).result().reserved
    assert main + sum(most.values()) < reserved
