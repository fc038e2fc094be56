"""Speculative decoding, experts in host memory and quantising: against enumeration, printed figures and sums by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.support.command_line import typed

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.serving.inference import Inference
from loadgauge.core.families.catalogue import model
from loadgauge.core.resolve.inference import resolve_inference
from loadgauge.core.serving.draft import Draft, block_of
from loadgauge.core.serving.passes import touched
from loadgauge.core.serving.result import Answer


def ask(name: str, task: Any = "generate", card: str | None = "h100-sxm5-80gb", /, **given: Any) -> Answer:
    of_job = ("tp", "pp", "gpus", "mtp", "offload", "host_link", "host_bandwidth")
    job = {key: given.pop(key) for key in of_job if key in given}
    return resolve_inference(Job(model=name, gpu=card, **job), task, given)[0]


@pytest.mark.parametrize(("tokens", "share"), [(1, 0.85), (3, 0.5), (4, 0.7), (2, 1.0)])
def test_tokens_of_a_step_by_every_way_that_they_are_accepted(tokens: int, share: float) -> None:
    """What is accepted ends at the first that is not; the model's own token comes after it."""
    mean = 0.0
    for ways in itertools.product((True, False), repeat=tokens):
        chance = 1.0
        for accepted in ways:
            chance *= share if accepted else 1 - share
        mean += chance * (1 + len(list(itertools.takewhile(bool, ways))))
    assert Draft(name="", model=None, tokens=tokens, acceptance=share).expected == pytest.approx(mean)


def test_two_tokens_of_deepseek_make_1_8_times_as_many() -> None:
    """DeepSeek-V3's report, section 5.4.3: the second token is accepted 85 to 90 % of the time, and generation is 1.8 times as
    fast."""
    plain = ask("deepseek-v3", "generate", "h200-sxm-141gb", tp=8, weight_format="fp8", context=4096)
    more = ask("deepseek-v3", "generate", "h200-sxm-141gb", tp=8, weight_format="fp8", context=4096, mtp=True)
    assert more.draft is not None
    assert more.draft.expected == pytest.approx(1.85)
    assert more.token is not None
    assert plain.token is not None
    assert 1.3 < plain.token / more.token < 1.85


def test_a_module_of_deepseeks_has_its_own_block_and_cache() -> None:
    """Its model card: 14 B of multi-token prediction weights with 1.8 B of embedding and head; the paper: 70,272 bytes a token."""
    spec = model("deepseek-v3")
    draft = Draft(name="", model=block_of(spec.with_mtp()), tokens=1, acceptance=0.85, shares=True)
    held = draft.held(Inference(task="generate", context=1000, weight_format="fp8"))
    assert held.weights == pytest.approx(11.5e9, rel=0.02)
    assert held.cache == pytest.approx(70_272 * 1000 / 61)
    # The answer shares them out over 8 ranks, but for the latents, which each rank has.
    shown = ask("deepseek-v3", tp=8, weight_format="fp8", context=1000, mtp=True).memory
    assert shown.beside["draft"] == pytest.approx(held.weights / 8 + held.cache, rel=0.02)


def test_a_draft_model_has_weights_and_a_cache_of_its_own() -> None:
    target, own = ask("llama-3.1-8b", context=4096, batch=8), ask("llama-3.2-1b", context=4096, batch=8)
    both = ask("llama-3.1-8b", context=4096, batch=8, draft="llama-3.2-1b")
    assert both.memory.beside == {"draft": own.memory.weights + own.memory.cache}
    assert both.memory.total == target.memory.total + own.memory.weights + own.memory.cache
    assert both.largest is not None
    assert target.largest is not None
    assert both.largest < target.largest
    assert "draft" not in ask("llama-3.1-8b", context=4096, draft="ngram").memory.beside


@pytest.mark.parametrize("server", [None, "vllm"])
def test_what_is_never_accepted_costs_and_what_always_is_nearly_multiplies(server: str | None) -> None:
    """One sequence of a dense model: a step reads the weights, whether it makes one token or five."""

    def token(**more: Any) -> float:
        took = ask("llama-3.1-8b", context=1024, answer=512, server=server, **more).token
        assert took is not None
        return took

    plain = token()
    never, always = (token(draft="ngram", draft_tokens=4, acceptance=share) for share in (1e-9, 1.0))
    assert plain < never < 1.1 * plain
    assert plain / 5 < always < 1.1 * plain / 5
    # A draft of the same model takes as long as the model does, five times in all.
    assert token(draft="llama-3.1-8b", draft_tokens=4, acceptance=1.0) == pytest.approx(
        always + 4 / 5 * plain, rel=0.01
    )


def test_graphs_of_a_server_are_of_every_size_that_it_captures() -> None:
    """vLLM captures 67 sizes for 256 sequences, and says that they take 1 to 3 GiB."""
    alone, served = (ask("llama-3.1-8b", context=1024, server=server).memory for server in (None, "vllm"))
    assert set(served.beside) == {"graphs"}
    assert 1 * 2**30 <= served.beside["graphs"] <= 3 * 2**30
    assert served.total == alone.total + served.beside["graphs"]
    assert served.high - served.low > alone.high - alone.low


def test_experts_in_host_memory_come_over_the_link() -> None:
    on_card, off = (
        ask("qwen3-30b-a3b", context=1024, **more) for more in ({}, {"offload": "experts", "host_link": "10GB/s"})
    )
    experts = 48 * 128 * 3 * 768 * 2048 * 2
    assert off.memory.host == experts
    assert off.memory.weights == on_card.memory.weights - experts
    assert on_card.memory.host == 0
    assert off.last is not None
    reached = touched(128, 8, 1) / 128
    assert off.last.seconds == pytest.approx(experts * reached / 10e9, rel=0.02)
    served = ask("qwen3-30b-a3b", context=1024, server="vllm", offload="experts", host_bandwidth="100GB/s")
    assert served.token == pytest.approx(experts * reached / 100e9, rel=0.35)
    assert served.token > experts * reached / 100e9


def test_quantising_has_hessians_of_one_input() -> None:
    """Llama 3.1 8B: down's Hessian is 14,336 squared; solving it takes two more, and its matrix three times, in float32."""
    gptq, awq = (ask("llama-3.1-8b", "quantise", context=2048, weight_format=name).memory for name in ("gptq", "awq"))
    assert gptq.beside == {"calibration": 2 * 128 * 2048 * 4096 * 2, "statistics": 4 * 14336**2}
    assert gptq.activations == 2 * 4 * 14336**2 + 3 * 4 * 14336 * 4096
    assert gptq.weights == 2 * 218_112_000
    assert gptq.host == 2 * 8_030_261_248
    # Inputs of attention's norm, its output, the MLP's norm and down.
    assert awq.beside["statistics"] == 128 * 2048 * (3 * 4096 + 14336) * 2
    assert awq.activations == 2 * 218_112_000


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--task generate --acceptance 0.5", "acceptance: needs --draft or --mtp"),
        ("--task generate --draft gpt2 --acceptance 1.5", "must be a share"),
        ("--task generate --draft gpt2 --pp 2", "a draft beside pipeline stages"),
        ("--task generate --mtp", "no multi-token prediction layers"),
        ("--task generate --offload experts", "has no experts"),
        ("--task generate --offload all", "is an option of training"),
        ("--offload experts", "needs --task generate"),
        ("--recompute least", "needs `loadgauge plan`"),
        ("--task quantise --weight-format nf4", "must be gptq or awq"),
        ("--task quantise --gpus 2 --tp 2", "on one GPU"),
        ("--task forward --draft gpt2", "needs --task generate"),
    ],
)
def test_what_does_not_go_together_says_so(words: str, why: str) -> None:
    found = typed(f"estimate llama-3.1-8b --gpu h100 {words}")
    assert found.code == 2
    assert why in found.err
