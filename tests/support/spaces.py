"""Small spaces of layouts, and the loop over single estimates that the search is held against."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import msgspec

from loadgauge import Lora, cluster, gpu, model, training
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.layout.layout import SCHEDULES, Layout, RecomputePolicy
from loadgauge.core.definitions.layout.overlap import Overlap
from loadgauge.core.plan.search import Case
from loadgauge.core.plan.space.space import SIZES, Space, divisors

POLICIES = tuple(map(RecomputePolicy.parse, ("none", "selective", "full")))


def case(
    name: str,
    gpus: int,
    batch: int,
    seq_len: int = 4096,
    *,
    kind: Any = None,
    card: str = "h100-sxm5-80gb",
    **axes: Any,
) -> Case:
    """Every layout of a model on a few GPUs; `axes` narrows some of them down."""
    known = model(name)
    every = divisors(gpus)
    experts = every if any(hasattr(block.mlp, "num_experts") for block in known.blocks) else (1,)
    wide: dict[str, Any] = {
        "tp": every, "pp": every, "cp": every, "ep": experts, "etp": experts[:2], "vpp": (1, 2, 4),
        "micro_batch": divisors(batch), "replicas": every, "recompute": POLICIES, "schedule": SCHEDULES,
    }  # fmt: skip
    space = Space(model=known, gpus=gpus, global_batch=batch, seq_len=seq_len, **{**wide, **axes})
    return Case(space=space, training=kind or training("megatron"), cluster=cluster(gpu(card), gpus))


CASES: dict[str, Case] = {
    "dense, every schedule": case("llama-3.1-8b", 8, 16),
    "experts": case("mixtral-8x7b", 8, 16, schedule=("1f1b", "interleaved", "zb-v")),
    "latent attention, uneven kinds of layers": case("deepseek-v2-lite", 8, 16, schedule=("1f1b", "interleaved")),
    "gradients that come and go": case("llama-3.1-8b", 8, 16, kind=training("torchtitan"), schedule=("1f1b", "zb-v")),
    "buckets, an 8-bit optimizer, twelve heads": case(
        "gpt2", 24, 24, 1024, kind=training("deepspeed", optimizer="adamw-8bit"), schedule=("1f1b", "gpipe"),
        card="a100-sxm4-80gb",
    ),
    "adapters on 4 bits, ragged lengths, offload": case(
        "llama-3.1-8b", 4, 8, schedule=("1f1b",), card="rtx4090", lengths=Lengths.of([100, 500, 4096]),
        kind=training("huggingface", lora=Lora(rank=16, quantised=True), offload="optimizer"),
    ),
    "pools of streams that gather": case(
        "gpt2", 8, 16, 1024, kind=training("huggingface"), schedule=("1f1b",), card="rtx4090", recompute=POLICIES[::2],
    ),
    "stages numbered before the other axes, on two nodes": case(
        "llama-3.1-8b", 16, 16, schedule=("1f1b",), tp=(1, 2), vpp=(1,), recompute=POLICIES[:1],
        base=Layout(order=("tp", "pp", "cp", "ep", "dp"), seq_len=1),
    ),
    "heads exchanged for tokens, all communication beside compute": case(
        "llama-3.1-8b", 8, 8, schedule=("1f1b", "interleaved"), vpp=(1, 2), base=Layout(cp_comm="all_to_all", seq_len=1),
        kind=msgspec.structs.replace(training("megatron"), overlap=Overlap.parse("all")),
    ),
    "prediction modules, two directions": case(
        "deepseek-v3", 64, 64, schedule=("1f1b", "dualpipe"), vpp=(1,), pp=(1, 2, 4), tp=(1, 2), cp=(1, 2), ep=(1, 8),
        replicas=(1, 2), micro_batch=(1, 2),
    ),
    "some layers run again": case(
        "llama-3.1-8b", 8, 8, schedule=("1f1b", "interleaved"), kind=training("torchtitan"),
        recompute=tuple(map(RecomputePolicy.parse, ("full:every=2", "full:layers=3"))),
    ),
}  # fmt: skip


def every_layout(given: Case) -> Iterator[Layout]:
    """All combinations, in whole numbers, that `Layout.valid` allows; ZeRO needs ranks to shard over."""
    space = given.space
    for structure in space.structures():
        for values in itertools.product(*(getattr(space, name) for name in SIZES)):
            sizes = dict(zip(SIZES, values, strict=True))
            within = sizes["tp"] * sizes["cp"] * structure.pp
            if space.gpus % within:
                continue
            layout = space.layout(structure, sizes)
            if layout.zero and layout.dp * layout.cp <= layout.replicas:
                continue
            if not layout.valid(space.model):
                yield layout


def read(given: Case) -> dict[Layout, tuple[float, float]]:
    """Memory and time of every layout, by the array reading."""
    found = {}
    for batch in given.batches():
        for place, memory, step in zip(batch.places, batch.memory, batch.step, strict=True):
            layout = batch.grid.layout(batch.structure, int(place))
            assert layout not in found, "a layout is read twice"
            found[layout] = float(memory), float(step)
    return found


def alone(given: Case, layout: Layout) -> tuple[float, float]:
    """Memory and time of one layout, by its own estimate."""
    memory, _, step = ends(given, layout)
    return memory, step


def ends(given: Case, layout: Layout) -> tuple[float, float, float]:
    """Memory, its upper end, and time of one layout, by its own estimate."""
    result = given.estimate(layout)
    assert result.time is not None
    return result.memory.total, result.memory.high, result.time.step


def some(layouts: list[Layout], count: int, seed: int = 0) -> list[Layout]:
    """A sample of them, the same every time."""
    return random.Random(seed).sample(layouts, min(count, len(layouts)))
