"""What training adds: both kinds of checkpointing, compilation, dropout, bf16, auxiliary losses, adapters."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from loadgauge.train import Collator, check, describe, enable
from loadgauge.train.leak_probe import leak
from padfree_families import build, padded, ragged

FIRST, SECOND = [13, 3, 22, 1, 9], [5, 20, 6, 17]  # the same number of tokens, cut differently


def flat(lengths: list[int], seed: int = 1) -> dict[str, Any]:
    return Collator()([{"input_ids": row} for row in ragged(lengths, seed)])


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    return max(float((found[name] - expected[name]).abs().max()) for name in expected) / largest


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "bloom", "falcon", "mpt", "mamba2", "bamba", "lfm2"])
def test_checkpointing_with_two_forwards_before_the_backward(name: str, reentrant: bool) -> None:
    stock = build(name)
    stock.config.use_cache = False
    for lengths, seed in ((FIRST, 1), (SECOND, 2)):
        stock(**padded(ragged(lengths, seed))).loss.backward()
    model = copy.deepcopy(stock)
    model.zero_grad(set_to_none=True)
    enable(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    losses = [model(**flat(lengths, seed)).loss for lengths, seed in ((FIRST, 1), (SECOND, 2))]
    sum(losses).backward()
    assert error(gradients(model), gradients(stock)) < 1e-5
    assert leak(model, flat(FIRST), FIRST).worst == 0.0


# Compiling takes as long as there are layers: gemma3 shows several, of two kinds; the others show one.
ONE_LAYER = {"num_hidden_layers": 1}


@pytest.mark.parametrize(("name", "sizes"), [("llama", ONE_LAYER), ("gemma3", {})])
def test_compiles_into_one_graph(name: str, sizes: dict[str, Any]) -> None:
    """New lengths, and another number of sequences, need no new graph."""
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        assert any("varlen_attention" in str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    model = enable(build(name, torch.float32, **sizes))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    for lengths in (FIRST, SECOND, [30, 2, 4, 4], [7, 21, 3, 11, 2, 1]):
        batch = flat(lengths)
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        expected = gradients(model)
        model.zero_grad(set_to_none=True)
        compiled(**batch).loss.backward()
        assert error(gradients(model), expected) < 1e-6
    assert graphs == 1


@pytest.mark.long
def test_compiles_through_autograd() -> None:
    torch._dynamo.reset()
    model = enable(build("qwen3", torch.float32, **ONE_LAYER, layer_types=["full_attention"]))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in (FIRST, SECOND):
        model.zero_grad(set_to_none=True)
        model(**flat(lengths)).loss.backward()
        expected = gradients(model)
        model.zero_grad(set_to_none=True)
        compiled(**flat(lengths)).loss.backward()
        assert error(gradients(model), expected) < 1e-6


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.skipif(" " in torch.__file__, reason="inductor does not quote the path of PyTorch for the C++ compiler")
@pytest.mark.long
def test_compiles_to_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's own compiler (inductor): the same gradients, and other lengths without compiling again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Plain loops, without trying out first which vector instructions the C++ compiler knows; and no pool of processes.
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = enable(build("llama", torch.float32, num_hidden_layers=1))
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for lengths in (FIRST, SECOND):
        model.zero_grad(set_to_none=True)
        model(**flat(lengths)).loss.backward()
        expected = gradients(model)
        model.zero_grad(set_to_none=True)
        compiled(**flat(lengths)).loss.backward()
        assert error(gradients(model), expected) < 1e-5
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["fxgraph_cache_miss"] == 2  # its forward and its backward
    assert counters["inductor"]["fxgraph_cache_hit"] == 0
    torch._dynamo.reset()


def test_dropout_drops_and_does_not_leak() -> None:
    model = enable(build("llama", attention_dropout=0.3))
    batch = flat(FIRST)
    assert leak(model, batch, FIRST).worst == 0.0
    one, other = model(**batch).logits, model(**batch).logits
    assert not torch.equal(one, other)
    assert "on sdpa" in describe(model)
    model.eval()
    still = model(**batch).logits
    assert torch.equal(still, model(**batch).logits)
    assert "on cpu_flash" in describe(model)
    # On average, what is dropped and scaled up is what was there: attention is linear in the shares.
    from loadgauge.train.layers import boundaries
    from loadgauge.train.layers.attention import per_sequence
    from loadgauge.train.layers.masks import Reach

    where = boundaries.from_lengths([6, 3])
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    for softcap in (None, 5.0):
        kept = per_sequence(q, k, v, where, Reach(), 0.0, 0.5, softcap, None)
        torch.manual_seed(0)
        draws = [per_sequence(q, k, v, where, Reach(), 0.4, 0.5, softcap, None) for _ in range(3000)]
        assert float((torch.stack(draws).mean(0) - kept).abs().max()) < 0.12
        # Values that are the unit vectors show the shares themselves: so many of them are dropped.
        q, k = (torch.randn(1, 2, 60, 4) for _ in range(2))
        shares = per_sequence(
            q,
            k,
            torch.eye(60).expand(1, 2, -1, -1),
            boundaries.from_lengths([60]),
            Reach(right=-1),
            0.4,
            0.5,
            softcap,
            None,
        )
        assert float((shares == 0).float().mean()) == pytest.approx(0.4, abs=0.03)
        q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_drawn_again_alike_when_recomputed(reentrant: bool) -> None:
    model = enable(build("llama", attention_dropout=0.3))
    batch = flat(FIRST)
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        model(**batch).loss.backward()
        found.append(gradients(model))
    assert error(found[1], found[0]) < 1e-12


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "bert"])
def test_bf16_errs_no_more_than_padded(name: str) -> None:
    exact = build(name, torch.float32)
    exact.config.use_cache = False
    rows = ragged(FIRST)
    shifted = name != "bert"
    reference = padded(rows, shifted=shifted)
    real = reference["attention_mask"].bool()
    truth = exact(**reference).logits[real]
    stock = copy.deepcopy(exact).bfloat16()
    by_padding = float((stock(**reference).logits[real].float() - truth).abs().max())
    model = enable(copy.deepcopy(exact).bfloat16())
    batch = Collator("causal" if shifted else "token")([{"input_ids": row, "labels": row} for row in rows])
    found = model(**batch).logits[0]
    assert found.dtype == torch.bfloat16
    assert float((found.float() - truth).abs().max()) <= 1.5 * by_padding
    assert leak(model, batch, FIRST).worst == 0.0


def test_autocast() -> None:
    stock = build("llama", torch.float32)
    model = enable(copy.deepcopy(stock))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(**flat(FIRST))
        expected = stock(**padded(ragged(FIRST)), use_cache=False)
    assert abs(float(found.loss.detach()) - float(expected.loss.detach())) < 1e-2
    found.loss.backward()
    expected.loss.backward()
    assert error(gradients(model), gradients(stock)) < 3e-2


def test_autocast_reaches_the_operator() -> None:
    from loadgauge.train.layers import boundaries
    from loadgauge.train.layers.attention import LayerPlan, attend
    from loadgauge.train.layers.masks import Reach

    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    marks = boundaries.from_lengths([2, 3]).marks(q.device)
    for backend in ("cpu_flash", "sdpa"):
        with torch.autocast("cpu", torch.bfloat16):
            found = attend(torch.nn.Identity(), LayerPlan(Reach(), backend), q, k, v, marks)
        assert found.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "gpt_oss", "olmoe"])
def test_the_auxiliary_loss_counts_real_tokens(name: str) -> None:
    stock = build(name, output_router_logits=True, router_aux_loss_coef=0.5)
    stock.config.use_cache = False
    model = enable(copy.deepcopy(stock))
    reference = padded(ragged(FIRST))
    expected = stock(**reference)
    expected.loss.backward()
    for batch in (flat(FIRST), reference):
        model.zero_grad(set_to_none=True)
        found = model(**batch)
        assert float((found.aux_loss - expected.aux_loss).detach().abs()) < 1e-6
        found.loss.backward()
        assert error(gradients(model), gradients(stock)) < 1e-6


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_adapters(name: str) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "in_proj"], init_lora_weights=False)

    def adapted(model: torch.nn.Module) -> torch.nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(3)
            return get_peft_model(model, config).double()

    stock = build(name)
    stock.config.use_cache = False
    inside, outside = enable(copy.deepcopy(stock)), adapted(copy.deepcopy(stock))
    reference = adapted(stock)
    reference(**padded(ragged(FIRST))).loss.backward()
    for model in (adapted(inside), enable(outside)):
        batch = flat(FIRST)
        model(**batch).loss.backward()
        assert any("lora" in key for key in gradients(model))
        assert error(gradients(model), gradients(reference)) < 1e-6
        found = check(model, batch)
        assert found.ok, str(found)
