"""Engines with options: releases that are older than the measured ones, and what they leave for the cache."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.hardware.cluster import cluster
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.serving.releases import Age, age_of, numbered
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.definitions.serving.serving import serving
from loadgauge.core.resolve.inference import resolve_inference
from loadgauge.core.serving.decode import Server, reading
from loadgauge.core.serving.result import Answer

BATCH = 128


def ask(server: str, **more: Any) -> Answer:
    asked = {"context": 4096, "answer": 512, "batch": BATCH, "server": server} | more
    return resolve_inference(Job("llama-3.1-8b", gpu="h100-sxm5-80gb"), "generate", asked)[0]


def test_the_host_of_older_releases_takes_what_their_makers_say() -> None:
    """vLLM 0.6's own account of 0.5.3: 38 % of the time on the GPU; V1's of V0: up to 1.7 times the throughput (128 sequences)."""
    asked: dict[str, Any] = {"context": 756, "answer": 512}
    steps = {}
    for version in ("0.12", "0.7", "0.5.3"):
        served = ask(f"vllm:version={version}", **asked).served
        assert served is not None
        steps[version] = served.step / age_of("vllm", version).taken
    own = serving().engines["vllm"]
    card = steps["0.12"] - own.host - 128 * own.sequence
    assert 0.33 < card / (card + 128 * 1.5e-4) < 0.43
    assert 1.2 < (card + own.host + 128 * 5e-5) / steps["0.12"] < 1.7


@pytest.mark.parametrize(
    ("engine", "old", "years"), [("vllm", "0.6.3", 1.243), ("vllm", "0.9.2", 0.517), ("trtllm", "0.16", 0.749)]
)
def test_a_release_is_as_old_as_the_index_says(engine: str, old: str, years: float) -> None:
    """Days between dates on the Python package index; a token lies in the middle between no and all of what years take."""
    age = age_of(engine, old)
    assert age.most == pytest.approx(math.exp(0.47 * years), rel=2e-3)
    assert age.taken == pytest.approx(math.sqrt(age.most))
    assert age.least == 1


def test_releases_that_were_measured_change_nothing() -> None:
    plain, named, newest = (ask(server) for server in ("vllm", "vllm:version=0.17", "vllm==0.33"))
    assert plain.served == named.served == newest.served
    assert named.token_range == newest.token_range == (serving().token_low, serving().token_high)
    assert plain.token_range[0] == named.token_range[0]
    assert plain.token_range[1] > named.token_range[1]
    assert age_of("vllm", "0.12.0") == Age()


def test_older_releases_take_longer_and_their_range_holds_both_ends() -> None:
    now, then = ask("vllm:version=0.19"), ask("vllm:version=0.8")
    assert now.token is not None
    assert then.token is not None
    low, high = (then.token * factor for factor in then.token_range)
    assert now.token < then.token
    assert low < now.token * serving().token_high
    assert high / low > 1.3 * serving().token_high / serving().token_low


def test_tokens_of_cache_are_what_a_share_leaves() -> None:
    """vLLM's of the card, SGLang's of what is free, TensorRT-LLM's of what is left; 131,072 bytes a token."""
    card = gpu("h100-sxm5-80gb").capacity
    more = {name: ask(f"vllm:utilization={name}").pool for name in (0.8, 0.9)}
    assert more[0.8] is not None
    assert more[0.9] is not None
    assert more[0.9][0] - more[0.8][0] == pytest.approx(0.1 * card)
    assert more[0.9][1] == int(more[0.9][0] / 131072)
    answer = ask("sglang:mem_fraction_static=0.8")
    assert answer.pool is not None
    assert answer.pool[0] == pytest.approx(0.8 * (card - answer.memory.outside) - answer.memory.weights)
    rest = ask("trtllm:free_gpu_memory_fraction=0.8").pool
    assert rest is not None
    assert rest[0] > more[0.8][0]


def test_an_engine_without_graphs_launches_its_kernels() -> None:
    with_graphs, without = ask("vllm"), ask("vllm:graphs=false")
    assert "graphs" in with_graphs.memory.parts
    assert "graphs" not in without.memory.parts
    assert with_graphs.token is not None
    assert without.token is not None
    assert without.token > with_graphs.token


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("vlm", "did you mean vllm"),
        ("hf", "known: vllm, sglang, trtllm"),
        ("vllm:tp=2", "it is --tp"),
        ("vllm:version=new", "such as 0.6"),
        ("sglang:utilization=0.9", "no option of SGLang"),
    ],
)
def test_what_a_server_has_no_option_for_is_said(server: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ask(server)


def test_versions_sort_as_numbers() -> None:
    assert numbered("0.5.10.post1") > numbered("0.5.9") > numbered("v0.5")
    assert Engine.parse("vllm==0.6.3,utilization=0.8", "server").text() == "vllm:utilization=0.8,version=0.6.3"


def test_graphs_are_of_the_batches_that_are_captured() -> None:
    """Sizes up to the largest, by hand: 1, 2, 4 and 8, 16, 24, 32 of vLLM, 1, 2, 4, 8, 12, 16, 24, 32 of SGLang."""
    for server, sizes in (("vllm:captured=32", 7), ("sglang:cuda_graph_max_bs=32", 8)):
        assert ask(server).memory.beside["graphs"] == sizes * 16 * 2**20
    within, beyond, without = (
        ask(f"vllm:{option}") for option in (f"captured={BATCH}", f"captured={BATCH - 1}", "graphs=0")
    )
    assert within.token is not None
    assert (within.token, beyond.token) == (ask("vllm").token, without.token)


def test_a_prompt_that_the_cache_holds_is_not_read_again() -> None:
    """What is left is read as a prompt of its own, but that it meets what is held; the cache has one copy of that."""
    whole, held = ask("vllm"), ask("vllm:cached=1024")
    assert whole.served is not None
    assert held.served is not None
    one = Server(whole.model, whole.asked, cluster(gpu("h100-sxm5-80gb"), 1), "vllm")
    new = whole.asked.prompt - 1024
    attention = one.kernels(whole.asked.prompt).attention - one.kernels(1024).attention
    kernels = msgspec.structs.replace(one.kernels(new), attention=attention)
    assert held.served.prompt == pytest.approx(float(reading(kernels, one.card, one.known, one.engine)), rel=1e-9)
    assert one.prompts(new) < held.served.prompt < whole.served.prompt
    copies = 1024 * (BATCH - 1) * one.cache(1)
    assert whole.memory.cache - held.memory.cache == pytest.approx(copies, rel=1e-9)
    assert whole.pool is not None
    with pytest.raises(ConfigError, match="below the prompt"):
        ask(f"vllm:cached={whole.asked.prompt}")
    with pytest.raises(ConfigError, match="option of --server"):
        Engine.parse("vllm:cached=100")
