"""The optimizer's step and the dtype of the weights against PyTorch and transformers, run on the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS, torch_optimizers
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.estimate import estimate
from loadgauge.core.families.hf import from_dict
from loadgauge.pytorch.compare.compare import _peak_of
from loadgauge.pytorch.record.allocations import TEMPORARIES
from loadgauge.pytorch.trace.programs.script import FunctionJob
from loadgauge.pytorch.trace.trace import record

WIDE, NARROW = 1024, 256
PARAMETERS = WIDE * NARROW + 4 * (NARROW * NARROW + NARROW)
"""A vector before the largest matrix, as a norm is before the head: a loop still holds what it made of the one before."""


def held(dtype: torch.dtype, make: Callable[[Any], Any], *, clip: bool = False) -> int:
    """The most that the step of an optimizer holds beside weights, gradients and states [bytes]."""

    def run() -> Callable[[], None]:
        layers = [nn.Linear(NARROW, NARROW) for _ in range(4)]
        net = nn.Sequential(*layers, nn.Linear(NARROW, WIDE, bias=False)).to(device="cuda", dtype=dtype)
        optimizer, x = make(net.parameters()), torch.empty(1, NARROW, device="cuda", dtype=dtype)

        def step() -> None:
            net(x).float().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    stream = record(FunctionJob(run), "cuda").stream
    return stream.moment(_peak_of(stream, True)).categories.get(TEMPORARIES, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [name for name in torch_optimizers() if name != "adamw"])
def test_temporaries_of_pytorchs_optimizers(name: str, dtype: torch.dtype) -> None:
    known = torch_optimizers()[name]
    cls = getattr(torch.optim, known.factory.rpartition(".")[2])
    step = OPTIMIZERS[name].step
    expected = dtype.itemsize * (step.lists * PARAMETERS + step.largest * WIDE * NARROW)
    found = held(dtype, lambda parameters: cls(parameters, **known.options))
    assert found == pytest.approx(expected, rel=0.005, abs=20_000)


def test_pytorchs_own_way_on_cuda_is_foreach() -> None:
    found = held(torch.float32, torch.optim.AdamW)
    assert found == pytest.approx(4 * PARAMETERS, rel=0.005)


def test_clipping_holds_nothing_of_the_size_of_the_gradients() -> None:
    assert held(torch.float32, lambda parameters: torch.optim.SGD(parameters, lr=0.1), clip=True) < 20_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_temporaries_of_transformers_adafactor(dtype: torch.dtype) -> None:
    from transformers.optimization import Adafactor

    step = OPTIMIZERS["adafactor-transformers"].step
    number = step.largest + (step.upcasts if dtype.itemsize < 4 else 0)
    found = held(dtype, lambda p: Adafactor(p, lr=1e-3, scale_parameter=False, relative_step=False))
    assert found == pytest.approx(4 * number * WIDE * NARROW, rel=0.01)


# -- a whole model under autocast --------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2048,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 4, "vocab_size": 2048, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip
SEQUENCES, TOKENS = 2, 256


def trained(config: dict[str, Any], weights: str, way: str) -> Callable[[], Callable[[], None]]:
    """One step of a model of transformers as its Trainer runs it with `bf16=True`, whatever the weights are."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def run() -> Callable[[], None]:
        sizes = {name: value for name, value in config.items() if name != "model_type"}
        made = AutoConfig.for_model(config["model_type"], **sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
        net = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa").to("cuda", getattr(torch, weights))
        optimizer = torch.optim.AdamW(net.train().parameters(), lr=1e-4, **{way: True})
        ids = torch.zeros(SEQUENCES, TOKENS, dtype=torch.long, device="cuda")

        def step() -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = net(input_ids=ids, labels=ids).loss
            loss.backward()
            del loss
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return run


@pytest.mark.parametrize(
    ("config", "weights", "way"),
    [
        (LLAMA, "bfloat16", "foreach"), (LLAMA, "bfloat16", "fused"), (LLAMA, "float32", "foreach"),
        (GPT2, "bfloat16", "fused"),
    ],
    ids=["llama-bf16-foreach", "llama-bf16-fused", "llama-fp32-foreach", "gpt2-bf16-fused"],
)  # fmt: skip
def test_what_is_trained_is_what_is_loaded(config: dict[str, Any], weights: str, way: str) -> None:
    stream = record(FunctionJob(trained(config, weights, way)), "cuda").stream
    kind = training("huggingface", "bf16", f"adamw-{way}", weights=weights)
    layout = Layout(micro_batch=SEQUENCES, global_batch=SEQUENCES, seq_len=TOKENS)
    moments = estimate(from_dict(config), layout, kind).memory.moments
    for stepping in (True, False):
        wanted = [moment for moment in moments if (moment.phase == "step") == stepping]
        formula = max(moment.total - moment.parts["outside"] for moment in wanted)
        assert formula == pytest.approx(stream.moment(_peak_of(stream, stepping)).total, rel=0.005)
