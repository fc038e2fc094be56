"""PEFT's methods beside LoRA: parameters as PEFT itself counts them, and memory on the simulated device to 1 %.

What the list says otherwise is named in each method's `left_out`: autocast's copies for LoHa, and the indices of OFT's blocks.
"""

from __future__ import annotations

from typing import Any

import msgspec
import peft
import pytest
import torch
import transformers

from loadgauge import Layout, RecomputePolicy
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.memory.phases import moments
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, stages
from loadgauge.core.estimate.workings import view_of
from loadgauge.core.families.hf import from_dict
from loadgauge.core.resolve.adapters import adapters
from torch_peft import BATCH, LINEARS, SIZES, traced
from torch_tuners import CONFIGS

COMMON = {"vocab_size": 384, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6}
WIDE = COMMON | {"intermediate_size": 272}
GROUPED = WIDE | {"num_key_value_heads": 2, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "llama": ("Llama", GROUPED, LINEARS, ("k_proj", "v_proj", "down_proj")),
    "qwen2": ("Qwen2", GROUPED, LINEARS, ("k_proj", "v_proj", "down_proj")),
    "gemma": ("Gemma", GROUPED, LINEARS, ("k_proj", "v_proj", "down_proj")),
    "phi3": ("Phi3", GROUPED | {"pad_token_id": 0}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
             ("qkv_proj", "down_proj")),
}  # fmt: skip
"""The class, its sizes, all linear layers of a block, and those that (IA)3 adapts by default."""
SIZE = {"vera": 24, "adalora": 12, "loha": 8, "lokr": 8, "oft": 20, "prompt": 7, "p-tuning": 5}
"""A rank or block size, or a number of virtual tokens; 20 is no divisor of a width, and PEFT takes another."""


def given(method: str, size: int, job: dict[str, Any]) -> Job:
    words = {"ia3": {}, "prompt": {"virtual_tokens": size}, "p-tuning": {"virtual_tokens": size}}
    return Job("x", adapter=method, **words.get(method, {"lora_rank": size}), **job)


def model_of(
    model: ModelSpec, method: str, size: int, s: int, *, autocast: bool, checkpointed: bool = False, **job: Any
) -> MemoryModel:
    asked = given(method, size, job)

    def fill(name: str, default: Any, why: str = "") -> Any:
        value = getattr(asked, name)
        return default if value is None else value

    kind = training("huggingface", "bf16-mixed-16", lora=adapters(asked, model, "huggingface", fill, {}))
    assert kind.lora is not None
    kind = msgspec.structs.replace(kind, lora=msgspec.structs.replace(kind.lora, autocast=autocast))
    recompute = RecomputePolicy(mode="full" if checkpointed else "none")
    layout = Layout(micro_batch=BATCH, global_batch=BATCH, seq_len=s, recompute=recompute)
    return MemoryModel(model, layout, kind, view_of(layout, kind))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", CONFIGS)
def test_parameters(method: str, family: str) -> None:
    kind, sizes, linears, few = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    # AdaLoRA's number of the rank becomes a parameter where it is moved to where the model is, which meta is not.
    with torch.device("cpu" if method == "adalora" else "meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        size = SIZE.get(method, 0)
        adapted = peft.get_peft_model(model, CONFIGS[method](few if method == "ia3" else linears, size))
    job: dict[str, Any] = {"lora_targets": "all"} if method == "vera" else {}
    memory = model_of(from_dict(config.to_dict()), method, size, 32, autocast=True, **job)
    stage = next(iter(stages(memory.model, memory.layout)))
    assert memory.weighed(stage)[1].all.trainable == adapted.get_nb_trainable_parameters()[0]


QUANTISED = {"quantised": "nf4", "upcast": "all"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "(IA)3": ("ia3", {}),
    "(IA)3, checkpointed": ("ia3", {"checkpointed": True}),
    "VeRA": ("vera", {}),
    "VeRA, no autocast, checkpointed": ("vera", {"autocast": False, "checkpointed": True}),
    "VeRA, quantised base": ("vera", QUANTISED),
    "AdaLoRA": ("adalora", {}),
    "LoHa, no autocast": ("loha", {"autocast": False}),
    "LoKr": ("lokr", {}),
    "LoKr, checkpointed": ("lokr", {"checkpointed": True}),
    "OFT": ("oft", {}),
    "prompt tuning, checkpointed": ("prompt", {"checkpointed": True}),
    "p-tuning": ("p-tuning", {}),
}
USUAL: dict[str, Any] = {
    "quantised": False, "upcast": "none", "adapters": "float32", "autocast": True, "dropout": 0.0, "targets": LINEARS,
    "checkpointed": False, "saved": (), "attention": "sdpa", "layers": None,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_memory(case: tuple[str, dict[str, Any]]) -> None:
    method, ways = case
    how = USUAL | ways
    if how["quantised"]:
        pytest.importorskip("bitsandbytes")
    size = {"oft": 32, "prompt": 32, "p-tuning": 32}.get(method, 8)
    s = 256 if how["checkpointed"] else 64
    few = method == "ia3"
    seen = traced(s, **how, method=CONFIGS[method](("k_proj", "v_proj", "down_proj") if few else LINEARS, size))
    model = from_dict(transformers.LlamaConfig(**SIZES).to_dict())
    job: dict[str, Any] = {"lora_targets": "all"} if method == "vera" else {}
    if how["quantised"]:
        job |= {"qlora": True, "base": how["quantised"], "kbit_upcast": how["upcast"]}
    memory = model_of(model, method, size, s, autocast=how["autocast"], checkpointed=how["checkpointed"], **job)
    stage = next(iter(stages(memory.model, memory.layout)))
    held = memory.of_chunk(stage, stage.chunks[0])
    if not how["checkpointed"]:
        assert held.kept + held.head == pytest.approx(seen.saved_nbytes, rel=1e-3)
    # Two 8-byte indices of each number of a block, in each of the matrices.
    unsaid = 16 * (size * (size - 1) // 2) * len(LINEARS) * SIZES["num_hidden_layers"] if method == "oft" else 0
    found = max(moment.total - moment.parts["outside"] for moment in moments(memory, stage))
    assert found + unsaid == pytest.approx(seen.peak.total, rel=0.01)


@pytest.mark.slow
def test_dora_under_deepspeeds_engine() -> None:
    """The engine casts adapters to 16 bits and there is no autocast: what PEFT's modules keep then,
    but for single vectors of each magnitude's norm."""
    dora = peft.LoraConfig(r=8, target_modules=list(LINEARS), use_dora=True, task_type="CAUSAL_LM")
    seen = traced(64, **USUAL | {"adapters": "bfloat16", "autocast": False}, method=dora)
    job = Job("x", lora_rank=8, use_dora=True, framework="deepspeed")
    model = from_dict(transformers.LlamaConfig(**SIZES).to_dict())
    lora = adapters(job, model, "deepspeed", lambda name, default, why="": getattr(job, name) or default, {})
    kind = training("deepspeed", "bf16-mixed-16", lora=lora)
    layout = Layout(micro_batch=BATCH, global_batch=BATCH, seq_len=64)
    memory = MemoryModel(model, layout, kind, view_of(layout, kind))
    stage = next(iter(stages(memory.model, memory.layout)))
    held = memory.of_chunk(stage, stage.chunks[0])
    assert held.kept + held.head == pytest.approx(seen.saved_nbytes, rel=0.01)
