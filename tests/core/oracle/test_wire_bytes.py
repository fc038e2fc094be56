"""Collectives of real processes against ours: what PyTorch asks for, and what the sockets of gloo then send.

Two, three and four processes train small models (`wire_workers`). What each of them asks for is read at PyTorch's
dispatcher, what it sends from its own sockets: bytes without TCP's headers, whatever else the machine sends. Calls and
payloads are equal, and bytes are the formula's plus the headers that gloo gives its messages, which are taken from raw
collectives of two sizes. Where nothing is taken off, a collective of many megabytes is within 0.15 %.

Gloo, unlike NCCL, makes a reduce-scatter of an all-reduce and so sends it twice.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import GPTNeoXConfig, LlamaConfig

import wire_workers
from loadgauge import Layout, from_dict, training
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, stages
from loadgauge.core.estimate.time.collectives import Fabric, wire_bytes
from loadgauge.core.estimate.time.traffic import stage_traffic
from loadgauge.core.layers import View, block_layer, embedding_layer, head_layer
from loadgauge.core.layers.operations.operations import Layer
from once import once
from wire_workers import (
    CASES,
    LARGE,
    MICRO_BATCHES,
    NEEDS_FOUR,
    NEOX,
    PIECE,
    RANKS,
    RAW,
    SIZES,
    SMALL,
    WHOLE_STEPS,
    B,
    S,
)

TOLERANCE = 1.5e-3
"""Gloo's headers, three of 48 bytes for each message of up to some megabytes."""
TWICE = {"reduce_scatter": 2}


def spec_of(**keys: Any) -> ModelSpec:
    """What loadgauge makes of the Llama that the processes train."""
    return from_dict(LlamaConfig(num_key_value_heads=12, **{**SIZES, **keys}).to_dict())


SPEC = spec_of()
NEOX_SPEC = from_dict(GPTNeoXConfig(**NEOX).to_dict())
HIDDEN = SIZES["hidden_size"]
NORMS = 2 * SIZES["num_hidden_layers"] + 1
ACTIVATION = 4 * B * S * HIDDEN
"""Bytes of the float32 activations of one micro-batch."""
pytestmark = pytest.mark.thorough  # processes that train for a minute
raw_counts = pytest.mark.parametrize("n", RANKS)
rank_counts = pytest.mark.parametrize("n", WHOLE_STEPS)
kinds = pytest.mark.parametrize("kind", RAW)


class Run(msgspec.Struct):
    """What the ranks of one group of processes did."""

    ranks: list[dict[str, Any]]

    def calls(self, case: str, rank: int = 0, axes: dict[int, str] | None = None) -> Counter[tuple[str, str, int]]:
        """(phase, kind, bytes of the full tensor) of every collective that one rank asked for.

        `axes`: the axis of a group by the stride of its ranks; it then stands for the phase.
        """
        calls = self.ranks[rank]["cases"][case]["calls"]
        return Counter((axes[stride] if axes else phase, kind, nbytes) for phase, kind, _, stride, nbytes in calls)

    def sent(self, case: str) -> int:
        """Bytes that all ranks sent together."""
        return sum(rank["cases"][case]["bytes"][0] for rank in self.ranks)

    def raw(self, kind: str, pieces: int) -> list[int]:
        """Bytes that each rank sent in one collective over so many pieces a rank."""
        return [rank["raw"][kind][str(pieces)][0] for rank in self.ranks]

    def headers(self, kind: str) -> int:
        """Bytes of one collective, over all ranks, that do not grow with it: gloo's headers."""
        return 2 * sum(self.raw(kind, SMALL[0])) - sum(self.raw(kind, SMALL[1]))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """What two, three and four processes did, once for all of pytest's own workers."""
    found = once(tmp_path_factory, "wire", lambda: processes(tmp_path_factory.mktemp("wire") / "part"))
    if isinstance(found, str):
        pytest.skip(found) if found.startswith("skipped") else pytest.fail(found)
    return {int(n): Run(ranks) for n, ranks in found.items()}


def processes(target: Path) -> dict[str, Any] | str:
    """What the processes wrote, or why there is nothing. A second try is for machines that are too busy for the first."""
    command = [sys.executable, "-W", "ignore", wire_workers.__file__, str(target)]
    for _ in range(2):
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return json.loads(target.read_text(encoding="utf-8"))
        if done.returncode == wire_workers.NO_COUNTER:
            return "skipped: sockets do not say what they sent (that needs Linux 4.19 and a loopback interface)"
    return done.stderr


# -- raw collectives ------------------------------------------------------------------------------------------------------


def by_all(kind: str, nbytes: int, n: int) -> int:
    """Bytes that all ranks send together: each of them the same, but for a broadcast and a message of one to another.

    `wire_bytes` is the busiest rank's share. Every rank but the first receives a broadcast, once; who sends it to whom
    (a chain, or gloo's tree) does not matter for the sum.
    """
    senders = {"broadcast": n - 1, "send_recv": 1}.get(kind, n)
    return TWICE.get(kind, 1) * senders * wire_bytes(kind, nbytes, n)


@raw_counts
@kinds
def test_what_a_collective_adds(kind: str, n: int, runs: dict[int, Run]) -> None:
    """Twice the tensor costs what the formula says for once, to the byte: headers are the same and drop out."""
    run = runs[n]
    small, large = (run.raw(kind, pieces) for pieces in SMALL)
    grown = [after - before for before, after in zip(small, large, strict=True)]
    assert sum(grown) == by_all(kind, n * PIECE, n)
    if kind == "send_recv":
        assert grown == [n * PIECE] + [0] * (n - 1)
    elif kind != "broadcast":
        assert set(grown) == {TWICE.get(kind, 1) * wire_bytes(kind, n * PIECE, n)}


@raw_counts
@kinds
def test_a_large_collective(kind: str, n: int, runs: dict[int, Run]) -> None:
    """Headers and all, and whatever is sent is received."""
    run, want = runs[n], by_all(kind, LARGE * n * PIECE, n)
    assert sum(run.raw(kind, LARGE)) == pytest.approx(want, rel=TOLERANCE)
    received = sum(rank["raw"][kind][str(LARGE)][1] for rank in run.ranks)
    assert received == pytest.approx(want, rel=TOLERANCE)


@raw_counts
def test_gloo_reduces_and_scatters_by_an_all_reduce(n: int, runs: dict[int, Run]) -> None:
    run = runs[n]
    assert all(run.raw("reduce_scatter", pieces) == run.raw("all_reduce", pieces) for pieces in SMALL)


# -- every case: the calls account for every byte ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "n"), [(case, n) for case in CASES for n in WHOLE_STEPS if n == 4 or case not in NEEDS_FOUR]
)
def test_bytes_of_a_step(case: str, n: int, runs: dict[int, Run]) -> None:
    """Formula and headers of the calls give what the sockets sent, to the byte, so no call is missing."""
    run = runs[n]
    asked = Counter(
        (kind, members, nbytes) for rank in run.ranks for _, kind, members, _, nbytes in rank["cases"][case]["calls"]
    )
    want = 0
    for (kind, members, nbytes), times in asked.items():
        calls = times if kind == "send_recv" else times // members  # every member of a group asks for the same one
        want += calls * (by_all(kind, nbytes, members) + runs[members].headers(kind))
    assert run.sent(case) == want


@rank_counts
def test_ranks_ask_alike(n: int, runs: dict[int, Run]) -> None:
    run = runs[n]
    for case in run.ranks[0]["cases"]:
        if case != "pp":
            assert all(run.calls(case, rank) == run.calls(case) for rank in range(n)), case


# -- tensor parallelism: the lists of the layers ----------------------------------------------------------------------------


def layers(spec: ModelSpec, n: int, framework: str = "torchtitan", sequence: bool = False) -> list[Layer]:
    """Embedding, blocks and head of one rank."""
    kernels = training(framework, "fp32").kernels
    view = View.of(S, B, tp=n, sequence_parallel=sequence, kernels=kernels)
    blocks = [block_layer(spec.blocks[index], spec.hidden_size, view) for index in spec.pattern]
    return [embedding_layer(spec, view), *blocks, head_layer(spec, view)]


def listed(lists: list[Layer]) -> Counter[tuple[str, str, int]]:
    """Their collectives, as `Run.calls` tells them."""
    found: Counter[tuple[str, str, int]] = Counter()
    for operation in (operation for layer in lists for operation in layer):
        found.update(("forward", one.kind, one.nbytes) for one in operation.forward_comm)
        found.update(("backward", one.kind, one.nbytes) for one in operation.backward_comm)
    return found


def check_bytes(run: Run, case: str, lists: list[Layer], n: int) -> None:
    """What the lists say one rank sends, against what all ranks sent."""
    wire = sum(TWICE.get(one.kind, 1) * one.wire for layer in lists for one in layer.comm)
    headers = sum(count * run.headers(kind) for (_, kind, _), count in listed(lists).items())
    assert run.sent(case) - headers == n * wire


@rank_counts
@pytest.mark.parametrize(("case", "spec"), [("tp", SPEC), ("tp-neox", NEOX_SPEC)])
def test_tensor_parallel(case: str, spec: ModelSpec, n: int, runs: dict[int, Run]) -> None:
    """Llama with shared inputs, GPT-NeoX with fused matrices: an all-reduce a half of a block, forward and backward.

    The embedding has one forward, the logits one backward, and the loss three of a value a token.
    """
    run, lists = runs[n], layers(spec, n)
    assert run.calls(case) == listed(lists)
    check_bytes(run, case, lists, n)


@rank_counts
def test_sequence_parallel(n: int, runs: dict[int, Run]) -> None:
    """DTensor keeps what it gathers; Megatron gathers it again in backward, once for each column-parallel region."""
    run, kept = runs[n], layers(SPEC, n, sequence=True)
    assert run.calls("sp") == listed(kept)
    check_bytes(run, "sp", kept, n)
    again = listed(layers(SPEC, n, "megatron", sequence=True))
    assert again - run.calls("sp") == Counter({("backward", "all_gather", ACTIVATION): NORMS})
    assert not run.calls("sp") - again


@rank_counts
def test_matrices_that_take_in_their_input_alone(n: int, runs: dict[int, Run]) -> None:
    """What is not modelled: without a shared input, the gradient is reduced for q, k, v, gate and up each."""
    extra = runs[n].calls("tp-each-gathers") - listed(layers(SPEC, n))
    assert extra == Counter({("backward", "all_reduce", ACTIVATION): 3 * SPEC.num_hidden_layers})
    assert not listed(layers(SPEC, n)) - runs[n].calls("tp-each-gathers")


@rank_counts
def test_gathered_logits(n: int, runs: dict[int, Run]) -> None:
    """What is not modelled: where the loss wants all the logits, they are gathered, and its three all-reduces are gone."""
    ours, real = listed(layers(SPEC, n)), runs[n].calls("tp-gathered-logits")
    assert ours - real == Counter({("forward", "all_reduce", 4 * B * S): 3})
    assert real - ours == Counter({("forward", "all_gather", 4 * B * S * SPEC.vocab_size): 1})


@rank_counts
def test_gradients_of_norms(n: int, runs: dict[int, Run]) -> None:
    """Sequence parallelism leaves each rank a part of the gradients of the norms. AdamW sums them whenever it reads them.

    It reads a gradient three times: for the first moment, and twice for the second.
    """
    run = runs[n]
    extra = run.calls("sp-optimizer") - run.calls("sp")
    assert extra == Counter({("optimizer", "all_reduce", 4 * HIDDEN): 3 * NORMS})


# -- data and pipeline parallelism: the table of a step -------------------------------------------------------------------

FABRIC = Fabric(domain=8, inner_bandwidth=1, outer_bandwidth=1, inner_latency=0, outer_latency=0)
FP32, BF16 = training("torchtitan", "fp32"), training("torchtitan", "bf16-autocast")


def table(spec: ModelSpec, layout: Layout, how: Training = FP32, rank: int = 0) -> Counter[tuple[str, str, int]]:
    """(axis, kind, bytes of the full tensor) of every collective of a step on one pipeline stage."""
    memory = MemoryModel(spec, layout, how, view_of(layout, how))
    found: Counter[tuple[str, str, int]] = Counter()
    for row in stage_traffic(memory, FABRIC, list(stages(spec, layout))[rank]):
        assert row.wire == wire_bytes(row.collective, row.payload, row.ranks)
        found[row.axis, row.collective, row.payload] += row.calls_per_step
    return found


def summed(calls: Counter[tuple[str, str, int]]) -> Counter[tuple[str, str]]:
    """Bytes by axis and kind, in however many calls."""
    total: Counter[tuple[str, str]] = Counter()
    for (axis, kind, nbytes), count in calls.items():
        total[axis, kind] += count * nbytes
    return total


def data_parallel(n: int, zero: int) -> Layout:
    return Layout(dp=n, zero=zero, micro_batch=B, global_batch=n * B * MICRO_BATCHES, seq_len=S)


def ends_bytes(spec: ModelSpec = SPEC, tp: int = 1) -> int:
    """Bytes of the weights of embedding and head, the root of FSDP2, in float32."""
    lists = layers(spec, tp, sequence=tp > 1)
    return 4 * (lists[0].params + lists[-1].params)


@rank_counts
@pytest.mark.parametrize("case", ["ddp", "ddp-buckets"])
def test_ddp(case: str, n: int, runs: dict[int, Run]) -> None:
    """All gradients once a step, in as many calls as there are buckets.

    What is not modelled: before each step DDP hands out the model's buffers, here two of half a head's width.
    """
    real = runs[n].calls(case, axes={1: "dp"})
    buffers = 2 * 4 * SPEC.blocks[0].attention.head_dim // 2
    assert real.pop(("dp", "broadcast", buffers)) == 1
    assert summed(real) == summed(table(SPEC, data_parallel(n, 0)))
    assert (real.total() > 1) == (case == "ddp-buckets")


@rank_counts
@pytest.mark.parametrize("zero", [1, 2])
def test_fsdp_keeps_weights(zero: int, n: int, runs: dict[int, Run]) -> None:
    """FSDP2 that keeps its weights until their backward is ZeRO-2; until the step, with whole gradients, ZeRO-1."""
    real = runs[n].calls(f"fsdp-zero{zero}", axes={1: "dp"})
    assert summed(real) == summed(table(SPEC, data_parallel(n, zero)))


@rank_counts
@pytest.mark.parametrize(("case", "how"), [("fsdp", FP32), ("fsdp-bf16", BF16)])
def test_fsdp(case: str, how: Training, n: int, runs: dict[int, Run]) -> None:
    """ZeRO-3, call by call: 16-bit weights where the recipe has them, 32-bit gradients."""
    assert runs[n].calls(case, axes={1: "dp"}) == table(SPEC, data_parallel(n, 3), how)


@rank_counts
def test_fsdp_reshards_its_root(n: int, runs: dict[int, Run]) -> None:
    """What is not modelled: told to, FSDP2 gathers embedding and head in backward too."""
    again = runs[n].calls("fsdp-resharded-root") - runs[n].calls("fsdp")
    assert again == Counter({("backward", "all_gather", ends_bytes()): MICRO_BATCHES})
    assert not runs[n].calls("fsdp") - runs[n].calls("fsdp-resharded-root")


@rank_counts
def test_fsdp_pads(n: int, runs: dict[int, Run]) -> None:
    """What is not modelled: FSDP2 pads the rows of each matrix to a multiple of the ranks. Here 241 of two tables."""
    spec = spec_of(vocab_size=SIZES["vocab_size"] + 1)
    real, ours = runs[n].calls("fsdp-padded", axes={1: "dp"}), table(spec, data_parallel(n, 3))
    padding = 4 * 2 * (-spec.vocab_size % n) * HIDDEN
    assert padding
    for kind in ("all_gather", "reduce_scatter"):
        exact = ends_bytes(spec)
        assert ours.pop(("dp", kind, exact)) == real.pop(("dp", kind, exact + padding)) == MICRO_BATCHES
    assert real == ours


def test_fsdp_over_sequence_parallel(runs: dict[int, Run]) -> None:
    """Two axes at once, call by call. Gradients of norms are summed over tp: FSDP2 does each alone, we all together."""
    layout = Layout(dp=2, tp=2, zero=3, sequence_parallel=True, micro_batch=B, global_batch=2 * B, seq_len=S)
    real, ours = runs[4].calls("fsdp-sp", axes={1: "tp", 2: "dp"}), table(SPEC, layout)
    alone = real.pop(("tp", "all_reduce", 4 * HIDDEN))
    assert alone == NORMS * ours.pop(("tp", "all_reduce", 4 * HIDDEN * NORMS)) == NORMS
    assert real == ours


@rank_counts
def test_pipeline(n: int, runs: dict[int, Run]) -> None:
    """A stage sends each micro-batch on, unless it is the last, and its gradient back, unless it is the first."""
    spec = spec_of(num_hidden_layers=n)
    layout = Layout(pp=n, micro_batch=B, global_batch=n * B, seq_len=S)
    for rank in range(n):
        assert runs[n].calls("pp", rank, axes={1: "pp"}) == table(spec, layout, rank=rank)
