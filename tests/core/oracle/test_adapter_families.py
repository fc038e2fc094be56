"""Adapters over families, by the names that people type: PEFT's own code on the simulated device against the list.

Trained parameters exactly; kept bytes, and states at the optimizer's step, to 1 %; the peak to 1 % where no kernel stands in.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import stand_ins
from loadgauge import estimate
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.estimate.memory.phases import Phase
from loadgauge.core.estimate.memory.rank_memory import stages
from loadgauge.pytorch.trace.programs.script import FunctionJob
from loadgauge.pytorch.trace.trace import trace
from torch_peft import CudaBackend, in_four_bits
from torch_tuners import CONFIGS

SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "max_position_embeddings": 512, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 8,
}
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
         "head_dim": 16, "num_hidden_layers": 4}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_chunk_size": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("gpt_oss", {**SIZES, "head_dim": 16, "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "deepseek": ("deepseek_v3", {**SIZES, **ROUTED, **LATENT, "q_lora_rank": 64, "n_routed_experts": 8, "n_shared_experts": 1,
                                 "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}),
    "glm": ("glm4_moe", {**SIZES, **ROUTED, "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1,
                         "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    "qwen3.5": ("qwen3_5_text", {**SIZES, **DELTA}),
    "qwen3-next": ("qwen3_next", {**SIZES, **DELTA, **ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 96}),
    "kimi": ("kimi_linear", {
        **SIZES, **ROUTED, **LATENT, "q_lora_rank": None, "head_dim": 32, "linear_num_heads": 4, "linear_head_dim": 32,
        "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3, "num_experts": 8, "num_shared_experts": 1,
    }),
    "llama4": ("llama4_text", {**SIZES, "head_dim": 16, "intermediate_size": 96, "intermediate_size_mlp": 352,
                               "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}),
    "lfm2": ("lfm2", {**SIZES, "full_attn_idxs": [1]}),
    "bamba": ("bamba", {**SIZES, **MAMBA2, "attn_layer_indices": [1]}),
    "mamba": ("mamba", {"vocab_size": 512, "hidden_size": 128, "state_size": 16, "num_hidden_layers": 3, "pad_token_id": 0,
                        "tie_word_embeddings": False}),
}  # fmt: skip
"""By name: the model_type, and the keys of a small config."""
METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora, 16 bits": {"dtype": "bfloat16", "autocast": False},
    "dora": {"dora": True},
    "qlora": {"upcast": "none", "dtype": "bfloat16"},
    "qlora, as peft": {"upcast": "all"},
    "vera": {"method": "vera"},
    "lokr": {"method": "lokr"},
    "adalora": {"method": "adalora"},
}
CASES = [
    *((family, method) for family in FAMILIES for method in ("lora", "lora, 16 bits")),
    *((family, "dora") for family in ("gpt-oss", "qwen3.5", "kimi", "lfm2", "bamba", "llama4")),
    *((family, method) for family in ("gpt-oss", "deepseek", "glm", "qwen3.5", "qwen3-next", "kimi", "lfm2")
      for method in ("qlora", "qlora, as peft")),
    *((family, method) for family in ("qwen3.5", "bamba", "mamba", "lfm2") for method in ("vera", "lokr", "adalora")),
]  # fmt: skip
BATCH, S, RANK = 2, 64, 8
CODES = 16 * 4 + 256 * 4 + 4
"""Bytes of the tables that turn codes into values, of a 4-bit matrix."""


def build(name: str, device: str) -> Any:
    kind, keys = FAMILIES[name]
    config = transformers.AutoConfig.for_model(kind, **keys)
    config.use_cache = False
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        attention = "eager" if kind in ("mamba", "gpt_oss") else "sdpa"
        model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        torch.set_default_dtype(default)
    return model.to(torch.bfloat16).train()


def linears(name: str) -> list[str]:
    """Paths of the linear layers of the blocks; Llama 4's router returns two tensors, which no adapter takes."""
    modules = build(name, "meta").named_modules()
    return [
        path for path, module in modules if isinstance(module, nn.Linear) and not path.endswith(("lm_head", "router"))
    ]


def stepping(name: str, how: dict[str, Any], targets: list[str], trained: list[int]) -> Any:
    """A function that builds model and adapters and returns a training step; notes what is trained."""

    def made() -> Any:
        model = build(name, "cuda")
        for path in linears(name) if "upcast" in how else ():
            layer = model.get_submodule(path)
            model.set_submodule(path, in_four_bits(layer, tuple(layer.weight.shape), "nf4", True))
        if "upcast" in how:
            model.is_loaded_in_4bit, model.quantization_method = True, "bitsandbytes"
        if how.get("upcast") == "all":
            peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        usual = peft.LoraConfig(r=RANK, target_modules=targets, use_dora="dora" in how, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, CONFIGS[how["method"]](targets, RANK) if "method" in how else usual)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in parameters if "dtype" in how else ():
            parameter.data = parameter.data.to(torch.bfloat16)
        trained.append(sum(parameter.numel() for parameter in parameters))
        ids = torch.zeros((BATCH, S), dtype=torch.long, device="cuda")
        optimizer = torch.optim.AdamW(parameters, fused=True)

        def step() -> None:
            with CudaBackend() if "upcast" in how else contextlib.nullcontext():
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=how.get("autocast", True)):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return step

    return made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following .* keys did not match")
@pytest.mark.parametrize(("name", "method"), CASES)
def test_as_peft_runs_it(name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how, (kind, keys) = METHODS[method], FAMILIES[name]
    if "upcast" in how:
        pytest.importorskip("bitsandbytes")
    folder = kind.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    for kernel, function in stand_ins.KERNELS.items():
        if hasattr(module, kernel):
            monkeypatch.setattr(module, kernel, function)
    paths = linears(name)
    targets = sorted({path.rpartition(".")[2] for path in paths} - ({"out_proj"} if name == "mamba" else set()))
    trained: list[int] = []
    seen = trace(FunctionJob(stepping(name, how, targets, trained), "adapters"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **keys}))
    job: dict[str, Any] = {
        "micro_batch": BATCH, "global_batch": BATCH, "seq_len": S, "framework": "huggingface", "optimizer": "adamw",
        "precision": "bf16-mixed-16" if how.get("autocast", True) else "bf16-pure", "recompute": "none", "lora_rank": RANK,
        "lora_targets": ",".join(targets), "use_dora": "dora" in how, "adapter": how.get("method"),
        "lora_dtype": how.get("dtype"), "attention": "eager" if name == "gpt-oss" else None,
    }  # fmt: skip
    if "upcast" in how:
        job |= {"qlora": True, "base": "nf4", "kbit_upcast": how["upcast"]}
    result = estimate(str(file), **{key: value for key, value in job.items() if value not in (None, False)})
    memory = result.workings.memory
    stage = next(iter(stages(memory.model, memory.layout)))
    held = memory.of_chunk(stage, stage.chunks[0])
    assert memory.weighed(stage)[1].all.trainable == trained[0]
    assert held.kept + held.head == pytest.approx(seen.saved_nbytes, rel=0.01)
    codes = CODES * len(paths) if "upcast" in how else 0
    moments = {phase: codes + max(
        (float(moment.total - moment.parts["outside"]) for moment in result.workings.phases if moment.phase is phase), default=0
    ) for phase in Phase}  # fmt: skip
    assert moments[Phase.STEP] == pytest.approx(seen.phases["optimizer step"], rel=0.01)
    if name not in ("bamba", "mamba"):
        assert max(moments.values()) == pytest.approx(seen.peak.total, rel=0.01)


def test_one_half_of_a_tensor_is_not_adapted(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = build("glm", "meta")
    with pytest.raises(ValueError, match="without also targeting"):
        peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=["gate_proj"], task_type="CAUSAL_LM"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": FAMILIES["glm"][0], **FAMILIES["glm"][1]}))
    with pytest.raises(ConfigError, match="gate and up are one tensor"):
        estimate(str(file), lora_rank=RANK, lora_targets="gate_proj")
