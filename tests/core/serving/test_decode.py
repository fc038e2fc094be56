"""Steps of an engine: beside measured servers, limits of physics, and conservation."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.hardware.cluster import cluster
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.serving.inference import Inference
from loadgauge.core.definitions.serving.serving import serving
from loadgauge.core.families.catalogue import model
from loadgauge.core.serving.decode import Card, Kernels, Server, Work, beside, lanes, reading, serve
from loadgauge.core.serving.passes import touched
from loadgauge.core.serving.result import infer
from loadgauge.evidence.validate.serving import points, predicted, server as server_of, slots


def server(name: str, engine: str = "vllm", card: str = "h100-sxm5-80gb", **asked: object) -> Server:
    wanted = Inference(task="generate", context=2, **asked)  # type: ignore[arg-type]
    return Server(model(name), wanted, cluster(gpu(card), wanted.replica), engine)


@pytest.mark.slow
def test_tokens_take_what_measured_servers_took() -> None:
    """Every fifth of 1,823 points; the bars of a token are those of each model left out in turn (docs/decode.md)."""
    found = list(predicted(every=5))
    assert len(found) > 360
    for name, column, half, most in (("token", 1, 0.12, 0.32), ("first", 2, 0.24, 0.66)):
        off = [abs(one[column] / getattr(one[0], name) - 1) for one in found]  # type: ignore[operator]
        assert statistics.median(off) < half
        assert statistics.quantiles(off, n=10)[-1] < most


def test_first_tokens_wait_where_the_cache_was_measured_to_be_full() -> None:
    """TensorRT-LLM holds back the cache of whole answers: 46 sequences of 9,216 tokens on an H200, of 128 that ask.

    The table's row: 127.8 s until the first token.
    """
    wanted = ("trtllm", "llama-3.1-70b", "h200-sxm-141gb", "fp8", 1, 8192, 128)
    fields = ("engine", "model", "gpu", "weights", "tp", "prompt", "requests")
    (one,) = (point for point in points() if tuple(getattr(point, name) for name in fields) == wanted)
    replica = server_of(one)
    found = serve(replica, 128, one.prompt, one.answer, slots(one, replica))
    assert 35 < found.running < 50
    assert found.first == pytest.approx(one.first, rel=0.2)


def test_a_step_reads_the_weights_once_and_every_cache() -> None:
    one = server("llama-3.1-8b")
    work = one.work(16, 4096)
    table = 128256 * 4096
    assert work.dense + work.head == pytest.approx(2 * (8030261248 - table), rel=1e-3)
    assert work.cache == pytest.approx(16 * 4096 * 2 * 32 * 8 * 128 * 2, rel=2e-2)
    assert work.dense_flops + work.head_flops == pytest.approx(2 * 16 * (8030261248 - table), rel=1e-3)


def test_a_step_reads_the_experts_that_are_reached() -> None:
    one = server("qwen3-30b-a3b")
    spec = model("qwen3-30b-a3b")
    whole = one.work(100_000, 10).experts
    for batch in (1, 16, 64):
        reached = touched(128, 8, batch) / 128
        assert one.work(batch, 10).experts == pytest.approx(whole * reached, rel=1e-6)
    assert whole == pytest.approx(2 * 48 * 128 * 3 * 768 * spec.hidden_size, rel=1e-9)


def test_prompts_read_together_read_the_experts_once() -> None:
    """8 prompts of 1,024 tokens have 8 times the FLOPs of one, and read the same experts, all of which one reaches."""
    one = server("qwen3-30b-a3b")
    alone, eight = one.kernels(1024), one.kernels(1024, 8)
    assert alone.experts == pytest.approx(2 * 48 * 128 * 3 * 768 * 2048 / one.card.bandwidth, rel=1e-3)
    assert eight.experts == pytest.approx(alone.experts, rel=1e-3)
    assert alone.expert_flops == pytest.approx(2 * 1024 * 8 * 48 * 3 * 768 * 2048 / one.card.flops, rel=1e-3)
    assert eight.expert_flops == pytest.approx(8 * alone.expert_flops, rel=1e-6)
    assert one.prompts(1024, 8) < 0.8 * 8 * one.prompts(1024)
    assert 0 < one.together(1024) < 1
    assert server("llama-3.1-8b").together(1024) == 0


def test_no_step_is_faster_than_the_bandwidth() -> None:
    card = gpu("h100-sxm5-80gb")
    one = server("llama-3.1-70b", tp=4)
    assert one.step(1, 10) > 70.5e9 * 2 / 4 / card.memory_bandwidth


def test_steps_are_nearly_a_line_in_what_runs() -> None:
    """What the tail counts on: of a dense model, the middle of two batches takes the middle of their times."""
    one = server("llama-3.1-8b")
    low, middle, high = (one.step(batch, 2048) for batch in (32, 64, 96))
    assert middle == pytest.approx((low + high) / 2, rel=0.01)


def test_ranks_share_the_matrices_and_add_collectives() -> None:
    alone, four = server("llama-3.1-70b"), server("llama-3.1-70b", tp=4)
    assert four.work(8, 100).dense == pytest.approx(alone.work(8, 100).dense / 4)
    assert alone.work(8, 100).calls == 0
    assert four.work(8, 100).calls == 2 * 80


def test_a_server_whose_cache_is_full_makes_requests_wait() -> None:
    one = server("llama-3.1-8b")
    free, full = serve(one, 64, 1024, 1024), serve(one, 64, 1024, 1024, slots=16)
    assert full.token < free.token
    assert full.first > free.first + 2 * 1024 * full.token
    assert 64 / (1024 * free.token) > 16 / (1024 * full.token)


def test_a_servers_tokens_and_price_include_what_requests_wait_for() -> None:
    """Requests x tokens of an answer = tokens a second x seconds from a request to its last token; the price is that time's."""
    one = server("llama-3.1-8b")
    asked = Inference(task="generate", context=3072, answer=1024, batch=64, server="vllm")
    made = infer(one.model, asked, one.machines.gpu, one.machines, params=8, active_params=8, price=2.0)
    assert made.served is not None
    assert made.tokens_per_second is not None
    whole = made.served.first + 1023 * made.served.token
    assert made.tokens_per_second * whole == pytest.approx(64 * 1024)
    assert made.tokens_per_second < 64 / made.served.token
    assert made.money_per_million == pytest.approx(2.0 / 3600 / made.tokens_per_second * 1e6)
    parts = made.served.queue + made.served.place + made.served.waited + made.served.host
    assert parts == pytest.approx(made.served.first)


def test_eager_kernels_take_longer_than_a_graph() -> None:
    one = server("qwen3-0.6b")
    eager = Server(one.model, one.asked, one.machines, "vllm", graphs=False)
    assert eager.step(1, 100) > 2 * one.step(1, 100)


def test_lanes_scale_with_their_shares() -> None:
    """A share 1 % lower is seen where it counts."""
    one = server("llama-3.1-8b")
    work, known = one.work(1, 100), serving()
    less = msgspec.structs.replace(known, bandwidth=known.bandwidth * 0.99)
    before, after = (lanes(work, one.card, shares, one.engine)["matrices"] for shares in (known, less))
    assert after / before == pytest.approx(1 / 0.99, rel=1e-3)


CARD = Card(bandwidth=1e12, flops=1e15, usual=1e15, link=1e11, blackwell=1.0)
KNOWN = msgspec.structs.replace(
    serving(), bandwidth=0.5, experts=0.5, cache=0.25, moved=0.5, flops=0.5, link=0.5, prompt_dense=0.5, prompt_experts=5.0,
    prompt_attention=0.25, prompt_rest=0.1, sent=0.5, blackwell=2.0, read=1e-5, apart=2.0,
)  # fmt: skip
ENGINE = msgspec.structs.replace(
    serving().engines["vllm"], kernel=1e-6, host=1e-3, sequence=1e-5, collective=1e-5, prefill=1.5, steps=3.0, first=0.1,
    request=0.01,
)  # fmt: skip


def test_seconds_of_a_step_by_hand() -> None:
    work = Work(
        dense=1e9, dense_flops=0.0, experts=2e9, expert_flops=0.0, head=5e8, head_flops=0.0, moved=1e8, cache=3e8, kernels=100,
        sequences=4, calls=10, sent=1e6, ranks=4.0, beyond=0.002,
    )  # fmt: skip
    expected = {
        "matrices": 0.003,
        "experts": 0.004,
        "cache": 0.0012,
        "kernels": 0.0003,
        "all-reduce": 0.00233,
        "host": 0.00104,
    }
    assert lanes(work, CARD, KNOWN, ENGINE) == pytest.approx(expected)
    busy = msgspec.structs.replace(work, dense=0.0, dense_flops=1e12, experts=0.0, expert_flops=2e12, head=0.0)
    found = lanes(busy, CARD, KNOWN, ENGINE)
    assert (found["matrices"], found["experts"]) == pytest.approx((0.002, 0.004))


def test_seconds_of_prompts_and_of_what_a_first_token_waits_for_by_hand() -> None:
    kernels = Kernels(dense=1.0, experts=0.4, expert_flops=0.0, attention=2.0, rest=3.0, wire=0.5, beyond=0.1)
    assert reading(kernels, CARD, KNOWN, ENGINE) == pytest.approx(1.5 * 2 * (0.5 + 0.8 + 0.5 + 0.3 + 1.0 + 0.1))
    computed = msgspec.structs.replace(kernels, experts=0.0, expert_flops=0.2)
    assert reading(computed, CARD, KNOWN, ENGINE) == pytest.approx(1.5 * 2 * (0.5 + 1.0 + 0.5 + 0.3 + 1.0 + 0.1))
    assert beside(0.02, 1000, 8, 4, KNOWN, ENGINE) == pytest.approx((3 * 2 * 0.02, 0.1 + 8 * 0.01 + 0.01))


def test_options_of_a_queue_reach_a_server_s_first_token() -> None:
    """A poll every 30 steps: 14.5 of them more in the mean where nothing else waits; a patience of 20 steps, all of them."""

    def first(options: str, **more: Any) -> float:
        asked = Inference(
            task="generate", context=1600, answer=1500, batch=2, server=options, prefill_tokens=8192, **more
        )
        card = gpu("h100-sxm5-80gb")
        served = infer(
            model("qwen3-8b"), asked, card, cluster(card, 1), params=8_190_735_360, active_params=8_190_735_360
        ).served
        assert served is not None
        return served.first / served.token

    plain = first("sglang")
    assert first("sglang:scheduler_recv_interval=30") - plain == pytest.approx(14.5, abs=1.5)
    waits = "trtllm:batch_wait_timeout_iters=20,batch_wait_max_tokens_ratio=0.9"
    assert first(waits) - first("trtllm") == pytest.approx(20, abs=2.5)
    assert first("trtllm:timeout_iters=60") == first("trtllm")  # one rank has nothing to balance
    with pytest.raises(ConfigError, match="scheduler_recv_interval is no option of vLLM"):
        first("vllm:scheduler_recv_interval=30")


def test_a_first_token_goes_further_up_where_nobody_says_how_prompts_wait() -> None:
    """90 % of the servers with such options, predicted without them, lie below the upper end; a default that is said is known."""
    card = gpu("h100-sxm5-80gb")

    def upper(options: str) -> float:
        asked = Inference(task="generate", context=1600, answer=1500, batch=2, server=options, prefill_tokens=8192)
        answer = infer(
            model("qwen3-8b"), asked, card, cluster(card, 1), params=8_190_735_360, active_params=8_190_735_360
        )
        return answer.served_range[1]

    assert upper("sglang") / upper("sglang:scheduler_recv_interval=1") == pytest.approx(
        serving().engines["sglang"].unsaid
    )
    assert upper("trtllm") / upper("trtllm:batch_wait_timeout_iters=0") == pytest.approx(
        serving().engines["trtllm"].unsaid
    )
    assert upper("vllm") == upper("sglang:scheduler_recv_interval=30")
    for engine in ("sglang", "trtllm"):
        rows = [one for one in points() if one.engine == engine and one.launched.queues][::3]
        most = serving().first_high * serving().engines[engine].unsaid
        untold = (
            serve(replica, one.asked.batch, one.prompt, one.answer, slots(one, replica))
            for one in rows
            for replica in (server_of(one),)
        )
        held = sum(one.first <= most * steady.first for one, steady in zip(rows, untold, strict=True)) / len(rows)
        assert 0.85 < held < 1


def test_what_a_rank_sends_in_a_ring() -> None:
    """Of 8 tokens of 8,192 numbers of 16 bits, to and from three others of four: 2 x 3/4 of the tensor."""
    assert server("llama-3.1-70b", tp=4).work(8, 100).sent == pytest.approx(2 * 8 * 2 * 8192 * 3 / 4)
