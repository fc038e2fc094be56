"""The papers that the articles quote: Korthikanti et al., Narayanan et al., ZeRO, LLaMA, and a column (624740065)."""

from __future__ import annotations

from typing import Any

import pytest

import published_formulas as published
from loadgauge.core.base.units import GB
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.layout.layout import RecomputePolicy
from loadgauge.core.definitions.model.kernels import PAPER
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.precision import PRECISIONS
from loadgauge.core.estimate.memory.recompute import applied, checkpointed
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.estimate.states.states import model_states
from loadgauge.core.estimate.time.cost import DAY
from loadgauge.core.estimate.time.flops import Flops, microbatch_flops
from loadgauge.core.families.catalogue import model as catalogue
from loadgauge.core.families.reference import gpt_block, gpt_model
from loadgauge.core.layers import View
from published_formulas import kv_cache_bytes, matrix_parameters, rule_of_thumb, training_days, utilisation
from theory import activations, cases, computed, layer_of, meets, refutes, reproduces, rounding

NONE, SELECTIVE, FULL = (RecomputePolicy(mode=mode) for mode in ("none", "selective", "full"))
A100 = gpu("a100-sxm4-80gb").peak("bf16")
LLAMA_PAPER = {"7B": 6.7e9, "13B": 13.0e9, "33B": 32.5e9, "65B": 65.2e9}
"""LLaMA's table 2."""


def flops_of(model: ModelSpec, seq_len: int, policy: RecomputePolicy = NONE) -> Flops:
    return microbatch_flops(model, View.of(seq_len, 1, kernels=PAPER), policy)


# -- Korthikanti et al. -----------------------------------------------------------------------------------------------


@cases("S-KORTH-MFU-*", "S-KORTH-HFU-*")
def test_utilisation_of_table_5(case: dict[str, Any]) -> None:
    i = case["inputs"]
    model = catalogue(f"megatron-gpt-{case['id'].rsplit('-', 1)[1].lower()}")
    assert (model.num_hidden_layers, model.hidden_size, model.vocab_size) == (i["L"], i["h"], i["v"])
    assert i["peak"] == A100

    def percent(flops: float) -> float:
        return 100 * utilisation(flops * i["B"], i["iter_s"], i["gpus"], i["peak"])

    # Times are printed to 0.01 s.
    how = {"inputs": rounding(i["iter_s"], 0.01)}
    flops = flops_of(model, i["s"], SELECTIVE)
    if "-MFU-" in case["id"]:
        reproduces(case, percent(flops.model), **how)
        return
    printed = published.korthikanti_hardware_flops(i["L"], i["h"], i["v"], i["s"], 1)
    reproduces(case, percent(printed), **how)
    # The column follows equation 8, which counts what runs again three times.
    assert printed - flops.model == pytest.approx(3 * flops.recompute)
    assert not meets(case, percent(flops.hardware), **how)


def kept(i: dict[str, Any]) -> tuple[int, int]:
    """Bytes a layer keeps without recomputation, and with selective recomputation."""
    layer = layer_of(gpt_block(i["h"], i["a"]), i["h"], i["s"], 1)
    return layer.saved(), layer.saved(applied(SELECTIVE, layer))


@cases("S-KORTH-5ASH-*")
def test_bytes_of_the_attention_core(case: dict[str, Any]) -> None:
    i = case["inputs"]
    everything, selective = kept(i)
    reproduces(case, (everything - selective) / (i["s"] * i["h"]))


@cases("S-KORTH-SAVE-*")
def test_bytes_saved_by_selective_recomputation(case: dict[str, Any]) -> None:
    everything, selective = kept(case["inputs"])
    # Printed as whole per cents.
    reproduces(case, 1 - selective / everything, unit=0.01)


@cases("S-KORTH-OVH-*")
def test_flops_of_selective_recomputation(case: dict[str, Any]) -> None:
    s, h = case["inputs"]["s"], case["inputs"]["h"]
    computed(case, published.korthikanti_selective_overhead(h, s))
    model = catalogue({12288: "megatron-gpt-175b", 20480: "megatron-gpt-530b"}[h])
    flops = flops_of(model, s, SELECTIVE)
    # Equation 9 itself does not round to what the text prints; equation 8 over equation 7 does.
    assert not meets(case, case["computed"])
    printed = published.korthikanti_hardware_flops(model.num_hidden_layers, h, model.vocab_size, s, 1)
    assert meets(case, printed / flops.model - 1)
    # The right overhead is a third.
    assert flops.recompute / flops.model == pytest.approx((printed / flops.model - 1) / 3)


# -- Narayanan et al. -------------------------------------------------------------------------------------------------


def narayanan(i: dict[str, Any]) -> ModelSpec:
    # Parameters and FLOPs do not depend on the number of heads, which the cases leave out.
    return gpt_model(i["l"], i["h"], i["h"] // 128, i["V"], positions=i["s"])


@cases("S-NARA-P-*")
def test_parameters_of_table_1(case: dict[str, Any]) -> None:
    counted = parameters(narayanan(case["inputs"]))
    # Equation 2 leaves out the final norm.
    assert counted.head == 2 * case["inputs"]["h"]
    reproduces(case, (counted.embedding + counted.layers) / 1e9)


@cases("S-NARA-AGG-*")
def test_aggregate_rate_of_table_1(case: dict[str, Any]) -> None:
    n, each = case["inputs"]["n"], case["inputs"]["X"]
    flops = 1e24
    seconds = training_days(flops, n, each * 1e12) * DAY
    # Rates per GPU are printed in whole TFLOP/s.
    reproduces(case, flops / seconds / 1e15, inputs=rounding(each, 1))
    assert utilisation(flops, seconds, n, A100) == pytest.approx(each * 1e12 / A100)


@cases("S-NARA-T2-*")
def test_days_of_table_2(case: dict[str, Any]) -> None:
    i = case["inputs"]
    flops = flops_of(narayanan(i), i["s"], FULL).hardware * i["T"] / i["s"]
    reproduces(case, training_days(flops, i["n"], i["X"]), inputs=rounding(i["X"], 1e12))


@cases("S-NARA-34D")
def test_the_34_days(case: dict[str, Any]) -> None:
    i = case["inputs"]
    flops = rule_of_thumb(i["P"], i["T"], full_recompute=True).hardware
    reproduces(case, training_days(flops, i["n"], i["X"]))


# -- ZeRO -------------------------------------------------------------------------------------------------------------


@cases("S-ZERO-0", "S-ZERO-1", "S-ZERO-2", "S-ZERO-3")
def test_states_by_stage(case: dict[str, Any]) -> None:
    i, stage = case["inputs"], int(case["id"][-1])
    recipe = PRECISIONS["fp16-mixed-16"]
    assert i["K"] == recipe.master + 2 * recipe.moment
    reproduces(case, model_states(int(i["P"]), recipe, zero=stage, dp=i["Nd"]).total / GB)


@cases("S-ZERO-ACT")
def test_zeros_count_of_activations(case: dict[str, Any]) -> None:
    i = case["inputs"]
    printed = published.zero_activations(i["l"], i["h"], i["s"], i["b"])
    reproduces(case, printed / GB)
    # It counts 24 bytes where 34 are kept, and leaves out the scores: GPT-2 XL has 25 heads.
    layer = layer_of(gpt_block(i["h"], 25), i["h"], i["s"], i["b"])
    assert i["l"] * layer.saved(applied(SELECTIVE, layer)) == pytest.approx(printed * 34 / 24)
    assert i["l"] * layer.saved() == pytest.approx(printed * (34 + 5 * 25 * i["s"] / i["h"]) / 24)


@cases("S-ZERO-ACT-CK")
def test_zeros_eight_gigabytes_cannot_be_derived(case: dict[str, Any]) -> None:
    i = case["inputs"]
    total = published.zero_activations(i["l"], i["h"], i["s"], i["b"])
    layer = layer_of(gpt_block(i["h"], 25), i["h"], i["s"], i["b"])
    inputs = layer.saved(applied(FULL, layer))
    refutes(case, checkpointed(i["l"], i["l"], inputs, total / i["l"]) / GB, by=-0.2136)
    # The square root of the gigabytes comes to the printed 8.
    assert meets(case, published.square_root_checkpointing(total / GB))


# -- LLaMA, and the column --------------------------------------------------------------------------------------------


@cases("S-LLAMA-21D")
def test_the_21_days(case: dict[str, Any]) -> None:
    i = case["inputs"]
    per_token = flops_of(catalogue("llama-65b"), 2048).model / 2048
    reproduces(case, training_days(per_token * i["T"], i["n"], per_token * i["tps"]))


@cases("S-LLAMA-MFU")
def test_utilisation_of_the_21_days(case: dict[str, Any]) -> None:
    i = case["inputs"]
    reproduces(case, utilisation(rule_of_thumb(i["P"], i["tps"]).model, 1, 1, A100))


@cases("S-ZHIHU-ACT-*")
def test_activations_of_gpt_3(case: dict[str, Any]) -> None:
    i = case["inputs"]
    reproduces(case, activations(gpt_model(i["l"], i["h"], i["a"], 0), i["s"], i["b"]))


@cases("S-ZHIHU-KV")
def test_key_value_cache_of_gpt_3(case: dict[str, Any]) -> None:
    i = case["inputs"]
    reproduces(case, kv_cache_bytes(gpt_model(i["l"], i["h"], 96, 0), i["b"], i["s"] + i["n"]))


@cases("S-ZHIHU-12LH2-*")
def test_the_short_form_against_the_real_llamas(case: dict[str, Any]) -> None:
    i = case["inputs"]
    short = matrix_parameters(gpt_model(i["l"], i["h"], i["h"] // 128, 0))
    reproduces(case, short)
    size = case["id"].rsplit("-", 1)[1]
    assert f"real {LLAMA_PAPER[size]:.3g}: {100 * (short / LLAMA_PAPER[size] - 1):.1f} %" == case["note"]
    real = parameters(catalogue(f"llama-{size.lower().replace('33', '30')}")).total
    assert real == pytest.approx(LLAMA_PAPER[size], rel=0.006)
