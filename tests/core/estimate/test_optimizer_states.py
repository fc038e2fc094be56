"""The states of each optimizer, tensor by tensor.

Elements that GaLore, APOLLO, Adam-mini, StableAdamW, SOAP and Muon kept after two steps on a CPU (galore-torch 1.0, apollo-torch
1.0.3, adam-mini 1.1.1, pytorch-optimizer 4.1.0, torch 2.13), on a table of 1000 x 256, a matrix of 256 x 704 in a block, a norm of
256 and a head of 1000 x 256. Those of bitsandbytes 0.50.2, torchao 0.18, schedule-free, LOMO, BAdam and GrokAdamW were read in
their sources and not run.
"""

from __future__ import annotations

import pytest

from loadgauge import estimate, model, training
from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.training.optimizers import parse
from loadgauge.core.estimate.states.host import off_card
from loadgauge.core.estimate.states.states import state_elements
from loadgauge.core.layers.operations.operations import Weight

TABLE = Weight("table", 256_000, kind="table", shape=(1000, 256))
MATRIX = Weight("matrix", 180_224, shape=(256, 704))
NORM = Weight("norm", 256, kind="vector")
HEAD = Weight("head", 256_000, kind="head", shape=(1000, 256))


@pytest.mark.parametrize(
    ("name", "moments", "plain", "float32"),
    [
        # Moments of (32, 704) twice, a projector of (256, 32); all else as AdamW keeps it.
        ("galore:rank=32", 2 * (256_000 + 32 * 704 + 256 + 256_000), 256 * 32, 0),
        ("galore:rank=32,head", 2 * (256_000 + 32 * 704 + 256 + 1000 * 32), 256 * 32 + 32 * 256, 0),
        ("apollo-mini", 2 * (256_000 + 704 + 256 + 256_000), 256, 0),
        # A rank beyond the shorter side is that side.
        ("apollo:rank=512", 2 * (256_000 + 256 * 704 + 256 + 256_000), 256 * 256, 0),
        ("galore-adafactor:rank=32", 0, 0, 1256 + (32 + 704) + 256 * 32 + 256 + 1256),
        ("adafactor", 0, 0, 1256 + 960 + 256 + 1256),
        ("adam-mini", (256_000 + 1000) + (180_224 + 256) + (256 + 1) + (256_000 + 1000), 0, 0),
        ("soap", 2 * 692_480 + 2 * (1000**2 + 256**2) * 2 + 2 * (256**2 + 704**2), 0, 0),
        ("muon", 2 * 256_000 + 180_224 + 2 * 256 + 2 * 256_000, 0, 0),
        # bitsandbytes under Trainer: embeddings and small tensors in float32; torchao: small ones in the weights' dtype.
        ("adamw-8bit", 2 * (180_224 + 256_000), 0, 2 * (256_000 + 256)),
        ("adamw-4bit", 2 * (256_000 + 180_224 + 256_000), 2 * 256, 0),
    ],
)
def test_elements_are_those_of_the_implementation(name: str, moments: int, plain: int, float32: int) -> None:
    found = state_elements((TABLE, MATRIX, NORM, HEAD), parse(name))
    assert (found["moments"], found["plain"], found["float32"]) == (moments, plain, float32)


def test_large_tensors_of_a_paged_optimizer_are_off_the_card() -> None:
    whole, paged = (
        estimate(model("llama-3.2-1b"), Layout(seq_len=64), training("huggingface", "bf16-pure", name)).memory
        for name in ("adamw-bnb-32bit", "paged-adamw-32bit")
    )
    assert whole.parts["optimizer"] - paged.parts["optimizer"] == paged.host > 0.99 * whole.parts["optimizer"]
    assert paged.pinned == 0


@pytest.mark.parametrize("name", ["lomo", "galore-layerwise", "adamw-8bit:in-backward"])
def test_gradients_that_are_freed_one_by_one_are_never_all_alive(name: str) -> None:
    memory = estimate(model("llama-3.1-8b"), Layout(seq_len=64), training("huggingface", "bf16-pure", name)).memory
    assert max(moment.parts["gradients"] for moment in memory.moments) == 0
    head = 2 * 128_256 * 4096
    assert max(moment.parts["loss"] for moment in memory.moments) > head


def test_badam_has_gradients_and_states_of_one_layer() -> None:
    found = model("llama-3.2-1b")
    layer = estimate(found, Layout(seq_len=64), training("huggingface", "bf16-pure", "badam")).memory
    elements = 60_821_504
    assert layer.parts["gradients"] == 2 * elements
    assert layer.parts["optimizer"] == 12 * elements


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("shampoo", NotModelled, "modelled: adamw"),
        ("galor", ConfigError, "did you mean 'galore'"),
        ("galore:rang=3", ConfigError, "rank=N, every=N"),
        ("galore:rank=0", ConfigError, "from 1"),
    ],
)
def test_what_is_not_known_stops_the_answer(name: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        parse(name)


@pytest.mark.parametrize(
    ("name", "each", "away"),
    [
        ("adamw:moments=bf16", 8, 0),
        ("adamw:moments=fp8", 6, 0),
        ("adamw:ema", 16, 0),
        ("adamw:moments=bf16,ema=host", 8, 4),
    ],
)
def test_moments_in_a_format_and_an_average_of_the_weights(name: str, each: int, away: int) -> None:
    """Megatron's recipe keeps 4 bytes of a master weight and two moments of 4, the distributed optimizer an eighth of them;
    DeepSeek-V3 (3.3.2, 3.2.3) has moments of 2 and an average on the host."""
    chosen, method = model("llama-3.2-1b"), training("megatron", "bf16", name)
    result = estimate(chosen, Layout(dp=8, global_batch=8, seq_len=64, zero=1), method)
    share = result.params / 8
    assert result.memory.largest("optimizer").parts["optimizer"] == pytest.approx(each * share, rel=1e-3)
    assert off_card(result.workings.memory, result.workings.stages[0]).host == pytest.approx(away * share, rel=1e-3)
    plain = training("megatron", "bf16").optimizer.moved(method.precision)
    on_the_card = each - 12
    assert method.optimizer.moved(method.precision) == plain + 2 * on_the_card
