"""Inference: what is kept, computed and read, against printed figures, brute force and real caches."""

from __future__ import annotations

import itertools
import re
from typing import Any

import msgspec
import pytest
from tests.support.command_line import document, typed

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.hardware.cluster import cluster
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.serving.inference import Inference
from loadgauge.core.families.catalogue import model
from loadgauge.core.resolve.inference import resolve_inference
from loadgauge.core.serving.memory import cache, memory
from loadgauge.core.serving.passes import of_chunk, of_token, parts, split, touched
from loadgauge.core.serving.result import Answer, known_range
from loadgauge.core.serving.time import Clock


def ask(name: str, task: Any = "generate", card: str | None = None, /, **given: Any) -> Answer:
    job = {key: given.pop(key) for key in ("tp", "pp", "ep", "gpus", "price") if key in given}
    return resolve_inference(Job(model=name, gpu=card, **job), task, given)[0]


@pytest.mark.parametrize(
    ("name", "tp", "tokens", "nbytes"),
    [
        ("llama-3.1-8b", 1, 20 * 1024, 2.5 * 2**30),  # Unsloth's announcement of GRPO, 2025-02-21: 2.5 GB
        ("qwen3-235b-a22b", 4, 178_880, 8_609_136_640),  # vllm#21348: a pool of 8.11 GiB, blocks rounded down
        ("deepseek-v3", 1, 1000, 70_272_000),  # "Insights into DeepSeek-V3", table 1: 70.272 KB a token
        ("llama-3.1-405b", 1, 1000, 516_096_000),  # the same table
    ],
)
def test_printed_caches(name: str, tp: int, tokens: int, nbytes: float) -> None:
    spec = model(name)
    asked = Inference(task="generate", context=tokens, tp=tp)
    assert cache(spec, asked, split(spec, asked)[0]) == nbytes


def test_printed_weights() -> None:
    """vllm#10511: Llama-3.1-8B takes 14.96 GiB, and 7.48 on each of two ranks."""
    for tp, gib in ((1, 14.96), (2, 7.48)):
        assert ask("llama-3.1-8b", tp=tp).memory.weights / 2**30 == pytest.approx(gib, abs=0.005)


def test_a_window_bounds_the_cache() -> None:
    """Mistral 7B sees 4,096 tokens: a longer context keeps no more."""
    spec = model("mistral-7b-v0.1")
    kept = [
        cache(spec, (asked := Inference(task="generate", context=n)), split(spec, asked)[0])
        for n in (2048, 4096, 32768)
    ]
    assert kept[0] * 2 == kept[1] == kept[2] == 32 * 4096 * 2 * 8 * 128 * 2


def test_ranks_that_cannot_share_a_key_head_each_hold_one() -> None:
    one, eight, sixteen = (ask("llama-3.1-70b", tp=tp, context=1000).memory.cache for tp in (1, 8, 16))
    assert one == 8 * eight
    assert eight == sixteen


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "deepseek-v2-lite", "qwen3-30b-a3b", "falcon-7b"])
def test_a_prompt_is_as_much_work_as_its_tokens(name: str) -> None:
    """Every token meets s keys in a prompt, as counted, and one more at a context of s as well: s passes of one are the prompt.

    But for latent attention, whose products with a cache are of the latents' width.
    """
    spec, s = model(name), 512
    asked = Inference(task="forward", context=s)
    clock = Clock(spec, asked, split(spec, asked), cluster(gpu("h100-sxm5-80gb"), 1))
    whole, one = clock.prompts().flops, clock.token(s).flops
    if name.startswith("deepseek"):
        mixer: Any = spec.blocks[0].attention
        wider = 2 * mixer.kv_lora_rank + mixer.qk_rope_head_dim
        usual = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim + mixer.v_head_dim
        one -= 2 * s * spec.num_hidden_layers * mixer.num_attention_heads * (wider - usual)
    assert s * one == pytest.approx(whole, rel=1e-12)


def test_two_flops_a_parameter_and_token() -> None:
    """Of a short context; embedding tables are looked up, and an MLP's norms are no products."""
    answer = ask("llama-3.1-8b", "forward", "h100-sxm5-80gb", context=16, batch=4)
    assert answer.first is not None
    matrices = answer.params - 128_256 * 4096
    assert answer.first.flops / (2 * matrices * 64) == pytest.approx(1, abs=0.001)


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(4, 2, 1), (4, 2, 2), (5, 1, 3), (4, 3, 2)])
def test_experts_that_are_reached(experts: int, chosen: int, tokens: int) -> None:
    """Every way in which the tokens can choose, equally likely."""
    choices = list(itertools.combinations(range(experts), chosen))
    reached = [len(set().union(*ways)) for ways in itertools.product(choices, repeat=tokens)]
    assert touched(experts, chosen, tokens) == pytest.approx(sum(reached) / len(reached))


def test_a_token_takes_no_less_than_the_weights_and_the_cache_at_the_bandwidth() -> None:
    card = gpu("h100-sxm5-80gb")
    for batch, form in ((1, "bf16"), (16, "bf16"), (16, "nf4"), (64, "fp8")):
        answer = ask("llama-3.1-8b", "generate", card.id, context=2048, batch=batch, weight_format=form)
        assert answer.last is not None
        table = 128_256 * 4096 * 2  # looked up, not read
        least = (answer.memory.weights - table + answer.memory.cache) / card.memory_bandwidth
        assert 1 < answer.last.seconds / least < 2


def test_few_bits_are_faster_to_read_and_smaller() -> None:
    seconds, nbytes = [], []
    for form in ("bf16", "fp8", "awq"):
        answer = ask("llama-3.1-8b", "generate", "h100-sxm5-80gb", weight_format=form)
        assert answer.last is not None
        seconds.append(answer.last.seconds)
        nbytes.append(answer.memory.weights)
    assert seconds == sorted(seconds, reverse=True)
    ends = 2 * 2 * 128_256 * 4096
    assert (nbytes[0] - ends) / (nbytes[1] - ends) == pytest.approx(2, abs=0.001)


def test_the_cache_in_fewer_bits() -> None:
    wide, narrow = (ask("llama-3.1-8b", batch=8, cache_format=form).memory.cache for form in ("bf16", "fp8"))
    assert wide == 2 * narrow


def test_the_largest_batch_is_the_largest() -> None:
    spec, card = model("llama-3.1-8b"), gpu("h100-sxm5-80gb")
    found = ask("llama-3.1-8b", "generate", card.id, context=4096).largest
    assert found is not None
    for batch, fits in ((found, True), (found + 1, False)):
        asked = Inference(task="generate", context=4096, batch=batch)
        assert memory(spec, asked, split(spec, asked), card).fits is fits


def test_stages_share_layers_and_a_token_passes_them_all() -> None:
    one, two = (ask("llama-3.1-70b", "generate", "h100-sxm5-80gb", pp=pp, tp=4, batch=4) for pp in (1, 2))
    assert one.last is not None
    assert two.last is not None
    assert one.last.flops == two.last.flops
    assert two.memory.weights < 0.52 * one.memory.weights
    sends = sum(row.seconds for row in two.last.traffic if row.axis == "pp")
    assert two.last.seconds == pytest.approx(one.last.seconds + sends)


def test_tensor_parallel_traffic_is_two_all_reduces_a_layer() -> None:
    """And one of the embedding: 2 (t - 1) / t of 2 b s h bytes each (article 3)."""
    answer = ask("llama-3.1-70b", "generate", "h100-sxm5-80gb", tp=4, batch=16, context=1025, prefill_tokens=None)
    assert answer.first is not None
    (row,) = answer.first.traffic
    assert row.calls == 2 * 80 + 1
    assert row.wire == 161 * 2 * 3 / 4 * 2 * 16 * 1024 * 8192


POINTS = [  # model, GPU, format, prompt, answer, sequences, tp, ms a token (aiconfigurator, silicon_sample.csv)
    ("minimax-m2", "h100-sxm5-80gb", "fp8", 1024, 1024, 16, 4, 15.5408),
    ("llama-3.1-70b", "b200-sxm-180gb", "fp8", 1024, 1024, 64, 4, 9.7201),
    ("llama-3.1-70b", "b200-sxm-180gb", "fp8", 8192, 1024, 32, 4, 14.7777),
    ("llama-3.1-70b", "h100-sxm5-80gb", "fp8", 1024, 8192, 64, 8, 16.4892),
    ("llama-3.1-70b", "h200-sxm-141gb", "fp8", 1024, 1024, 8, 2, 12.4248),
    ("llama-3.1-70b", "h200-sxm-141gb", "fp8", 1024, 8192, 4, 2, 14.2016),
    ("llama-3.1-8b", "h100-sxm5-80gb", "bf16", 1024, 512, 32, 2, 6.6483),
]


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_measured_tokens_lie_in_the_range(point: tuple[str, str, str, int, int, int, int, float]) -> None:
    """With the share of prompts that a server's steps run beside; every fortieth of the points, one at random, nothing fitted."""
    name, card, form, prompt, answer, batch, tp, milliseconds = point
    spec, asked = model(name), Inference(
        task="generate", context=prompt + answer, answer=answer, batch=batch, tp=tp, weight_format=form
    )  # fmt: skip
    clocks = [
        Clock(spec, one, split(spec, one), cluster(gpu(card), tp))
        for one in (asked, msgspec.structs.replace(asked, batch=1))
    ]
    predicted = clocks[0].token(prompt + answer / 2).seconds + batch / answer * clocks[1].prompts().seconds
    known = known_range()
    assert known.token_low < milliseconds / 1e3 / predicted < known.token_high


def test_linear_mixers_keep_a_state_whatever_the_context() -> None:
    short, long = (ask("mamba2-2.7b", context=n).memory.cache for n in (128, 65536))
    assert short == long > 0


def test_what_cannot_be_generated() -> None:
    with pytest.raises(NotModelled):
        ask("bert-base-uncased")
    with pytest.raises(ConfigError, match="positions"):
        ask("gpt2", context=2048)
    assert ask("bert-base-uncased", "forward", context=512).memory.cache == 0


def test_the_command() -> None:
    line = "estimate llama-3.1-8b --gpu h100-sxm5-80gb --task generate --context 4096 --answer 512 --batch 16"
    found = document(f"{line} --price 2")
    assert found["memory"]["parts"]["cache"] == 16 * 4096 * 32 * 2 * 8 * 128 * 2
    assert found["token"]["low"] == found["token"]["seconds"] * known_range().token_low
    whole = found["first"]["seconds"] + 512 * found["mean_token"]
    assert found["money_per_million"] == pytest.approx(2 * whole / 3600 / (16 * 512) * 1e6)
    text = typed(line).out
    assert "no planner of serving" in text
    assert "Time to first token" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--task generate --zero 3", "zero"),
        ("--task forward --answer 3", "--task generate"),
        ("--task generate --context 16 --answer 16", "below"),
        ("--task generate --ep 2", "experts"),
        ("--task generate --table flops", "table: needs --task train"),
    ],
)
def test_what_does_not_go_together_is_said(words: str, said: str) -> None:
    found = typed(f"estimate llama-3.1-8b {words}")
    assert found.code == 2
    assert said in found.err


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_without_an_answer_a_token_of_a_server_is_a_step_of_decoding(engine: str) -> None:
    """It reads the weights and the cache; with one request there are no prompts of others, so longer answers take as long."""
    line = f"estimate llama-3.1-8b --gpu h100-sxm5-80gb --task generate --context 4096 --server {engine}"
    one, many = document(line), document(f"{line} --answer 64")
    table = 128_256 * 4096 * 2
    least = (one["memory"]["parts"]["weights"] - table + one["memory"]["parts"]["cache"]) / 3.35e12
    assert least < one["mean_token"] < 2 * least
    assert one["mean_token"] == pytest.approx(many["mean_token"], rel=0.01)
    for batch in (1, 8):
        said = typed(f"{line} --batch {batch}").out.partition("Where it goes")
        assert not re.search(
            r"\b0 (us|tokens/s)", said[0] + said[2].partition("The server")[2].partition("Work and time")[0]
        )
    # Requests that ask for one token each: no more are answered than their prompts can be read, two FLOPs a parameter and token.
    eight = document(f"{line} --batch 8")
    assert 0 < eight["tokens_per_second"] < 989e12 / (2 * 8.03e9 * 4095)


def test_what_is_printed_lies_in_its_range() -> None:
    line = "estimate llama-3.1-8b --gpu h100-sxm5-80gb --context 4096 --batch 4"
    for more in ("--task generate --answer 512", "--task generate", "--task generate --server vllm", "--task forward"):
        found = document(f"{line} {more}")
        for name in ("first", "token"):
            one = found.get(name, {})
            if "low" in one:
                assert one["low"] <= one["seconds"] < one["high"]
        if "mean_token" in found:
            assert found["mean_token_range"][0] < found["mean_token"] < found["mean_token_range"][1]
        assert "low" in found["token" if "generate" in more else "first"]
    # A score's kernels are those of training's forward, and software adds the same to them.
    scored, trained = document(f"{line} --task forward"), document(
        "estimate llama-3.1-8b --gpu h100-sxm5-80gb --seq-len 4096 --micro-batch 4 --framework megatron --memory 140GiB"
    )  # fmt: skip
    parts = trained["time"]["parts"]
    assert scored["first"]["seconds"] == pytest.approx(parts["forward"] + parts["loss"] / 3, rel=0.04)


def test_an_engine_reads_its_prompts_in_pieces() -> None:
    """What a prompt's forward needs does not grow with the requests of a server, and does where all are read at once."""
    job = Job("llama-3.1-8b", gpu="h100-sxm5-80gb")
    asked = {"context": 4096, "answer": 256}

    def needs(batch: int, **more: object) -> float:
        return resolve_inference(job, "generate", {**asked, "batch": batch, **more})[0].memory.activations

    assert needs(8, server="vllm") == needs(8, prefill_tokens=8192)
    assert needs(32, server="vllm") == pytest.approx(needs(8, server="vllm"), rel=0.01)
    assert needs(32) == pytest.approx(4 * needs(8), rel=0.01)
    assumed = resolve_inference(job, "generate", {**asked, "batch": 8, "server": "vllm"})[1]
    assert assumed["--prefill-tokens"].startswith("8192")
    assert needs(8, server="vllm", prefill_tokens=2048) < needs(8, server="vllm")


@pytest.mark.parametrize(("name", "gigabytes"), [("llama-3.1-70b", 43.1), ("llama-3.1-405b", 249.1)])
def test_a_copy_of_llama_cpp_is_as_large_as_its_own_table_says(name: str, gigabytes: float) -> None:
    """The bits are those of the 8B copy; source: llama.cpp, tools/quantize/README.md, commit 311c2c9f0ebd."""
    told = document(f"estimate {name}-Q4_K_M.gguf --task generate")
    assert told["memory"]["parts"]["weights"] == pytest.approx(gigabytes * 1e9, rel=0.005)


def test_a_format_that_is_not_modelled_is_named() -> None:
    assert "stored in exl2, which is not modelled" in " ".join(
        typed("estimate turboderp/Llama-3.1-8B-4.0bpw --task generate").out.split()
    )
    assert "whose type is not said" in " ".join(typed("estimate unsloth/Qwen3-8B-GGUF --task generate").out.split())
    assert "names no model" in typed("estimate mine.gguf --task generate").err


def test_experts_in_host_memory_need_a_node_that_holds_them() -> None:
    line = "estimate deepseek-v3 --task generate --offload experts --gpu h100-sxm5-80gb --host-memory"
    small, large = typed(f"{line} 512GiB"), typed(f"{line} 1TiB")
    assert (small.code, large.code) == (1, 0)
    assert "of 512GiB: DOES NOT FIT" in " ".join(small.out.split())
    assert "is an option of training" in typed("estimate gpt2 --task generate --host-memory 1GiB").err


@pytest.mark.parametrize(
    ("server", "card", "tp", "tokens", "graphs"),
    [
        ("vllm", "l4", 1, 2048, 67), ("vllm", "a100-sxm4-80gb", 1, 2048, 67), ("vllm", "h100-sxm5-80gb", 1, 8192, 67),
        ("sglang", "t4", 1, 2048, 4), ("sglang", "rtx4090", 1, 2048, 7), ("sglang", "l40s", 1, 4096, 8),
        ("sglang", "h100-sxm5-80gb", 1, 8192, 36), ("sglang", "h100-sxm5-80gb", 8, 8192, 52),
        ("sglang", "b200-sxm-180gb", 1, 16384, 52), ("trtllm", "l4", 1, 8192, 67),
        ("vllm:max_num_batched_tokens=8192", "l4", 1, 8192, 67), ("sglang:chunked_prefill_size=1024", "l4", 1, 1024, 7),
    ],
)  # fmt: skip
def test_a_server_reads_and_captures_what_its_engine_chooses_by_the_card(
    server: str, card: str, tp: int, tokens: int, graphs: int
) -> None:
    """vLLM's `get_batch_defaults` and SGLang's `_handle_gpu_memory_settings`; what is said goes before."""
    job = Job("qwen3-0.6b", gpu=card, gpus=tp, tp=tp)
    answer, assumed = resolve_inference(job, "generate", {"context": 1024, "batch": 2, "server": server})
    assert answer.asked.prefill_tokens == tokens
    assert answer.engine is not None
    assert answer.engine.max_batched_tokens == tokens
    assert answer.memory.beside["graphs"] == graphs * 16 * 2**20
    assert ("--prefill-tokens" in assumed) is (":" not in server)


def seeing(name: str, job: dict[str, Any], /, **asked: Any) -> tuple[Answer, Answer]:
    """The same request with pictures and without."""
    both = (Job(model=name, gpu="h100", **more) for more in (job, {"tp": job.get("tp")}))
    with_them, without = (resolve_inference(each, "generate", {"context": 4096, **asked})[0] for each in both)
    return with_them, without


@pytest.mark.parametrize("tp", [None, 2])
def test_a_prompt_waits_for_its_pictures_and_the_card_has_the_tower(tp: int | None) -> None:
    """SigLIP of Gemma 3 by hand: 27 layers 1,152 wide with MLPs of 4,304, 64 x 64 patches, 256 tokens of 2,560 a picture."""
    width, inner, layers, patches = 1152, 4304, 27, 4096
    with_them, without = seeing("gemma-3-4b", {"pictures": "2x896x896", "tp": tp})
    seen = (
        2 * patches * (layers * (2 * (4 * width**2 + 2 * width * inner) + 4 * patches * width) + 2 * 3 * 14**2 * width)
    )
    seen += 2 * 256 * 2 * width * 2560
    assert with_them.first.flops - without.first.flops == pytest.approx(seen, rel=1e-3)
    weights = layers * (4 * width**2 + 2 * width * inner + 9 * width + inner) + patches * width + 3 * 14**2 * width
    weights += width * 2560 + 6 * width
    assert with_them.memory.parts["tower"] * (tp or 1) == pytest.approx(2 * weights, rel=2e-3 if tp is None else 0.05)
    assert with_them.memory.weights == without.memory.weights
    assert with_them.memory.cache == without.memory.cache
    assert with_them.first.seconds > without.first.seconds
    assert with_them.token == without.token
    assert not with_them.model.left_out


def test_pictures_take_places_of_a_prompt_and_time_of_a_server() -> None:
    """Twice the pictures take twice as long, in a server too; where they are too many for a prompt, it says so."""
    served = {"server": "vllm", "batch": 4, "answer": 128}
    prompts = []
    for pictures in ("1x896x896", "2x896x896"):
        with_them, without = seeing("gemma-3-4b", {"pictures": pictures}, **served)
        prompts.append(with_them.served.prompt - without.served.prompt)
        assert with_them.served.first > without.served.first
        assert with_them.served.step == pytest.approx(without.served.step)
        assert with_them.pool[0] < without.pool[0]
    assert prompts[1] == pytest.approx(2 * prompts[0], rel=0.05)
    line = "estimate gemma-3-4b --gpu h100 --task generate --pictures 20x896x896 --context 4096"
    assert "5,120 tokens of each prompt" in typed(line).err
    usual = document("estimate gemma-3-4b --gpu h100 --task generate --pictures 2x896x896")
    assert usual["layout"]["context"] == 4096 + 2 * 256
    assert usual["first"]["lanes"]["pictures"] > 0
    plan = document(
        "plan gemma-3-4b --gpu h100 --gpus 1 --task generate --context 4096 --answer 128 --pictures 1x896x896"
    )
    best = plan["choices"][0]
    again = document(best["command"].removeprefix("loadgauge "))
    assert again["mean_token"] == best["token_seconds"]
    assert again["served"]["first"] == best["first_seconds"]


def test_sparse_attention_is_served_as_its_recipe_says() -> None:
    """vLLM's recipe of DeepSeek-V3.2 serves it on eight H200 with tp 8; its indexer holds 512 MiB of scores at most, and of
    prompts no longer than what it chooses from, all pairs. `VLLM_SPARSE_INDEXER_MAX_LOGITS_MB`, `split_indexer_prefill_chunks`."""
    served = {"tp": 8, "gpus": 8, "batch": 4, "weight_format": "fp8", "server": "vllm"}
    for context in (32 * 1024, 128 * 1024):
        assert ask("deepseek-v3.2", "generate", "h200", context=context, **served).memory.fits
    spec = model("deepseek-v3.2")
    scores = {}
    for context in (1024, 8192, 128 * 1024):
        asked = Inference(task="generate", context=context, tp=8, server="vllm")
        (layer, *_) = [part.layer for part in parts(spec, split(spec, asked)[0], of_chunk(spec, asked), 1)]
        (index,) = [operation for operation in layer if operation.name == "attention.index"]
        scores[context] = index.outputs[0].nbytes
        assert not index.workspace
        assert not any(operation.name == "attention.chosen" for operation in layer)
        # Queries of 64 heads, keys of one, 128 wide; a key before its query.
        products = 2 * 64 * 128 * context * context / 2
        assert index.gemms[-1].flops == pytest.approx(products, rel=3e-3)  # one of the tokens is generated
    assert scores[1024] == pytest.approx(4 * 1024**2, rel=0.01)
    assert scores[8192] == pytest.approx(4 * 8192**2, rel=0.01)
    assert scores[128 * 1024] == 512 * 2**20


def test_a_token_of_sparse_attention_reads_all_keys_of_its_indexer() -> None:
    spec = model("deepseek-v3.2")
    asked = Inference(task="generate", context=65536, batch=3, tp=8)
    (layer, *_) = [part.layer for part in parts(spec, split(spec, asked)[0], of_token(spec, asked, 65536), 3)]
    (index,) = [operation for operation in layer if operation.name == "attention.index"]
    (attention,) = [operation for operation in layer if operation.kind == "attention"]
    assert index.inputs[-1].nbytes == 3 * 65536 * 128 * 2
    assert sum(gemm.flops for gemm in index.gemms[3:]) == 2 * 3 * 65536 * 64 * 128
    assert max(tensor.nbytes for tensor in attention.inputs) == 3 * 2048 * (512 + 64) * 2  # of the chosen alone


def test_a_server_that_was_never_measured_is_answered_by_its_kernels() -> None:
    line = "estimate qwen3-8b --gpu rtx3090 --task generate --context 4096"
    named, bare = document(f"{line} --server ollama"), document(line)
    assert named["memory"] == bare["memory"]
    assert named["token"]["seconds"] == bare["token"]["seconds"]
    assert "ollama" in named["assumed"]["--server"]
