"""Collectives that share the network: the closed form against flows that are played, and the step that has it."""

import pytest

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.kernels import PAPER
from loadgauge.core.estimate.time.contention import beside, beside_gradients
from loadgauge.core.estimate.time.roofline import OperationTime
from loadgauge.core.families.reference import gpt_block
from loadgauge.core.layers import View, block_layer
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.fleets.flows import Flow, fair_shares


def played(whole: float, computes: float, sends: float, layers: int) -> float:
    """Seconds that a background flow of `whole` seconds adds to layers that compute, then send: event by event, by fair shares."""
    now, left, link = 0.0, whole, {"adapter": 1.0}
    for _ in range(layers):
        now += computes
        left = max(left - computes, 0.0)
        mine = sends
        while mine > 1e-12:
            flows = [Flow(nbytes=mine, links=("adapter",))] + [Flow(nbytes=left, links=("adapter",))] * (left > 1e-12)
            rates = fair_shares(flows, link)
            turn = min(flow.nbytes / rate for flow, rate in zip(flows, rates, strict=True))
            now += turn
            mine -= rates[0] * turn
            left -= rates[1] * turn if len(rates) > 1 else 0.0
    return now + left - layers * (computes + sends)


@pytest.mark.parametrize("whole", [0.0, 2.5, 20.0, 60.0, 79.0, 120.0])
@pytest.mark.parametrize(("computes", "sends"), [(1.0, 0.5), (1.0, 3.0), (2.0, 0.0)])
def test_fair_shares_over_many_layers(whole: float, computes: float, sends: float) -> None:
    """Layers in which both meet as often as the layer sends; a flow that is short against a layer meets it by chance."""
    layers = 400
    scale = layers / 40
    pass_, exposed = layers * (computes + sends), layers * sends
    expected = played(whole * scale, computes, sends, layers)
    assert beside(whole * scale, pass_, exposed, exposed) == pytest.approx(
        expected, rel=0.01, abs=2 * (computes + sends)
    )


def step(**more: object) -> dict[str, float]:
    """Parts of the step of a model with experts on 16 nodes, its gradients reduced beside the backward."""
    job = Job(model="mixtral-8x7b", gpu="h100-sxm5-80gb", gpus=128, tp=4, etp=4, zero=1, sequence_parallel=True, global_batch=32,
              seq_len=4096, framework="megatron", overlap="dp")  # fmt: skip
    found = resolve_job(job.replace(**more)).estimate().time
    assert found is not None
    return found.parts


def test_gradients_meet_the_tokens_of_experts_on_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts over nodes send in every layer: gradients that hide there take their half of the link; inside a node they do not."""
    inside, over = step(ep=1), step(ep=8)
    monkeypatch.setattr("loadgauge.core.estimate.time.step.beside", lambda whole, under, *_: max(whole - under, 0.0))
    assert step(ep=1) == inside
    apart = step(ep=8)
    assert over["ep"] == apart["ep"] > 0
    assert over["dp"] > 1.2 * apart["dp"] > 0


@pytest.mark.parametrize(
    ("shared", "expected"),
    [(True, [("all_gather", 2), ("reduce_scatter", 3)] * 2), (False, [("all_reduce", 3)] * 2)],
)
def test_what_megatron_sends_beside_its_gradients(shared: bool, expected: list[tuple[str, int]]) -> None:
    """megatron-core, tensor_parallel/layers.py: of qkv and of the first matrix of the MLP, never of the row-parallel ones."""
    layer = block_layer(gpt_block(64, 4), 64, View.of(16, 2, tp=2, sequence_parallel=shared, kernels=PAPER))
    found = [(one.kind, under) for one, under in beside_gradients(layer, [OperationTime(1, 2, 3)] * len(list(layer)))]
    assert found == expected


def test_a_job_that_overlaps_nothing_waits_for_them() -> None:
    def exposed(**more: object) -> float:
        job = Job(
            model="llama-3.1-8b", gpu="a100-sxm4-80gb", gpus=8, tp=8, sequence_parallel=True, micro_batch=4, **more
        )
        time = resolve_job(job).estimate().time
        assert time is not None
        return time.parts["tp"]

    # Ten collectives of one size a layer, four of them beside long enough products; the head and embedding have some more.
    assert 0.55 < exposed() / exposed(overlap="none") < 0.75
