"""LoRA and QLoRA as PEFT and bitsandbytes run them, on the simulated device: kept bytes to 0.1 %, states and peaks to 1 %.

What the list says otherwise is named: small tables of code values that each 4-bit matrix has (1.1 KB, 0.5 % of these
small models), and with `norms` the first layer, whose input is still 16 bits wide.
"""

from __future__ import annotations

from typing import Any

import pytest

from loadgauge import Layout, Lora, RecomputePolicy
from loadgauge.core.definitions.model.lora import SAVED_MODULES
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.memory.phases import Phase, moments
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, stages
from loadgauge.core.estimate.workings import view_of
from loadgauge.core.families.reference import llama_model
from loadgauge.core.resolve.adapters import TARGETS
from loadgauge.core.resolve.trained import adapt_only
from torch_peft import BATCH, LINEARS, RANK, SIZES, traced

USUAL: dict[str, Any] = {
    "quantised": False, "upcast": "none", "adapters": "float32", "autocast": True, "dropout": 0.0, "targets": LINEARS,
    "checkpointed": False, "saved": (), "attention": "sdpa", "layers": None,
}  # fmt: skip
MATRICES = len(LINEARS) * SIZES["num_hidden_layers"]
CODES = {False: 0, "nf4-single": MATRICES * 16 * 4, "nf4": MATRICES * (16 * 4 + 256 * 4 + 4)}
"""Bytes of the tables that turn codes into values, of all 4-bit matrices."""
CASES = {
    "lora": {},
    "lora, dropout": {"dropout": 0.1},
    "lora, no autocast": {"autocast": False},
    "lora, 16-bit adapters": {"adapters": "bfloat16"},
    "lora, query and value": {"targets": ("q_proj", "v_proj")},
    "lora, eager": {"attention": "eager"},
    "lora, embedding and head": {"saved": ("embed_tokens", "lm_head")},
    "lora, checkpointed": {"checkpointed": True},
    "lora, embedding adapted": {"targets": (*LINEARS, "embed_tokens")},
    "lora, head adapted": {"targets": (*LINEARS, "lm_head")},
    "lora, embedding and head adapted, 16-bit adapters": {
        "targets": ("q_proj", "v_proj", "embed_tokens", "lm_head"), "adapters": "bfloat16",
    },
    "lora, middle layer, dropout": {"layers": (1,), "dropout": 0.1},
    "lora, last layer, checkpointed": {"layers": (2,), "checkpointed": True},
    "qlora, last layer": {"quantised": "nf4", "layers": (2,)},
    "qlora, as trl": {"quantised": "nf4", "adapters": "bfloat16"},
    "qlora, not cast": {"quantised": "nf4-single"},
    "qlora, as peft, eager": {"quantised": "nf4", "upcast": "all", "attention": "eager"},
    "qlora, as peft, embedding and head": {"quantised": "nf4", "upcast": "all", "saved": ("embed_tokens", "lm_head")},
    "qlora, as peft, checkpointed, dropout": {
        "quantised": "nf4", "upcast": "all", "checkpointed": True, "dropout": 0.05,
    },
    "qlora, as peft, no autocast": {"quantised": "nf4", "upcast": "all", "autocast": False},
    "qlora, as peft, no autocast, checkpointed": {
        "quantised": "nf4", "upcast": "all", "autocast": False, "checkpointed": True, "dropout": 0.05,
    },
    "qlora, norms": {"quantised": "nf4", "upcast": "norms", "adapters": "bfloat16"},
}  # fmt: skip


def model_of(how: dict[str, Any], s: int) -> MemoryModel:
    lora = Lora(
        rank=RANK, targets=frozenset(TARGETS[name] for name in how["targets"]), dropout=how["dropout"],
        quantised=how["quantised"], itemsize=4 if how["adapters"] == "float32" else 2, upcast=how["upcast"],
        saved=frozenset(SAVED_MODULES[name] for name in how["saved"]),
    )  # fmt: skip
    attention = "eager" if how["attention"] == "eager" else "flash"
    kind = training("huggingface", "bf16-mixed-16" if how["autocast"] else "bf16-pure", "adamw", attention, lora=lora)
    mode: Any = "full" if how["checkpointed"] else "none"
    layout = Layout(micro_batch=BATCH, global_batch=BATCH, seq_len=s, recompute=RecomputePolicy(mode=mode))
    model = llama_model(
        SIZES["num_hidden_layers"], SIZES["hidden_size"], SIZES["num_attention_heads"], SIZES["vocab_size"],
        num_key_value_heads=SIZES["num_key_value_heads"], intermediate_size=SIZES["intermediate_size"],
    )  # fmt: skip
    if how["layers"] is not None:
        model = adapt_only(model, ",".join(map(str, how["layers"])))
    return MemoryModel(model, layout, kind, view_of(layout, kind))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_as_peft_runs_it(case: dict[str, Any]) -> None:
    how = USUAL | case
    if how["quantised"]:
        pytest.importorskip("bitsandbytes")
    s = 256 if how["checkpointed"] else 64
    memory = model_of(how, s)
    stage = next(iter(stages(memory.model, memory.layout)))
    seen = traced(s, **how)
    held = memory.of_chunk(stage, stage.chunks[0])
    if not how["checkpointed"]:
        assert held.kept + held.head == pytest.approx(seen.saved_nbytes, rel=1.2e-3)
    found = {moment.name: moment.total - moment.parts["outside"] for moment in moments(memory, stage)}
    codes = CODES[how["quantised"]]
    assert max(found.values()) + codes == pytest.approx(seen.peak.total, rel=0.01)
    states = sum(memory.states(memory.weights(memory.counts(stage, 0, 3)) + memory.ends(stage)).total for _ in (0,))
    assert states + codes == pytest.approx(seen.phases["optimizer step"], rel=0.01)
    assert Phase.STEP in {moment.phase for moment in moments(memory, stage)}
