"""PEFT's adapters on linear mixers and shared experts: trained parameters exactly, kept bytes to 0.1 %.

transformers' classes on the simulated device, with stand-ins for the kernels that run on GPUs only.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
import transformers

import stand_ins
from hybrid_models import CASES, CLASSES
from loadgauge import estimate
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, stages
from loadgauge.core.estimate.workings import view_of
from loadgauge.pytorch.trace.programs.script import FunctionJob
from loadgauge.pytorch.trace.trace import trace

BATCH, S, RANK = 2, 96, 8


def model_of(name: str, dtype: torch.dtype) -> Any:
    model_type, keys = CASES[name]
    config = transformers.AutoConfig.for_model(model_type, **keys)
    config.use_cache, config._attn_implementation = False, "eager" if "mamba" in model_type else "sdpa"
    config._experts_implementation = "grouped_mm" if "experts" in name else None
    return getattr(transformers, CLASSES[model_type])(config).to(dtype)


def estimated(name: str, folder: Path, targets: str, **more: Any) -> Any:
    model_type, keys = CASES[name]
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **keys}))
    sizes = {"micro_batch": BATCH, "global_batch": BATCH, "seq_len": S, "lora_rank": RANK, "lora_targets": targets}
    return estimate(str(path), **sizes, **more)


def memory_of(result: Any, *, autocast: bool) -> tuple[MemoryModel, Any]:
    kind = result.training
    kind = msgspec.structs.replace(kind, lora=msgspec.structs.replace(kind.lora, autocast=autocast))
    memory = MemoryModel(result.setup.model, result.layout, kind, view_of(result.layout, kind))
    return memory, next(iter(stages(memory.model, memory.layout)))


def trained(result: Any) -> int:
    memory, stage = memory_of(result, autocast=True)
    return int(memory.weighed(stage)[1].all.trainable)


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *((name, "all-linear") for name in ("bamba", "granite", "granite, experts", "qwen3.5, experts", "lfm2", "jamba")),
        *((name, "all-linear") for name in ("qwen3-next, experts", "minimax")),
        ("granite, experts", "input_linear"),
        ("qwen3.5, experts", "shared_expert_gate"),
        ("nemotron", "in_proj"),
        ("falcon", "in_proj"),
        ("mamba", "in_proj"),
        ("falcon mamba", "in_proj"),
        ("minimax", "output_gate"),
        ("bamba", "all-linear dora"),
        ("qwen3.5", "all-linear dora"),
        ("lfm2", "all-linear dora"),
    ],
)  # fmt: skip
def test_what_is_trained(name: str, targets: str, tmp_path: Path) -> None:
    targets, _, dora = targets.partition(" ")
    with torch.device("meta"):
        model = model_of(name, torch.bfloat16)
    how = peft.LoraConfig(
        r=RANK,
        target_modules=targets if targets == "all-linear" else [targets],
        task_type="CAUSAL_LM",
        use_dora=bool(dora),
    )
    assert (
        trained(estimated(name, tmp_path, targets, use_dora=bool(dora)))
        == peft.get_peft_model(model, how).get_nb_trainable_parameters()[0]
    )


def test_the_matrices_of_experts_beside_a_regular_expression(tmp_path: Path) -> None:
    """`target_modules` as one text, and `target_parameters`, which it says nothing of."""
    name, pattern, experts = "qwen3.5, experts", r".*\.self_attn\.(q|v)_proj", ["mlp.experts.down_proj"]
    with torch.device("meta"):
        model = model_of(name, torch.bfloat16)
    how = peft.LoraConfig(r=RANK, target_modules=pattern, target_parameters=experts, task_type="CAUSAL_LM")
    found = trained(estimated(name, tmp_path, ",".join([pattern, *experts])))
    assert found == peft.get_peft_model(model, how).get_nb_trainable_parameters()[0]


@pytest.mark.parametrize("name", ["mamba", "falcon mamba", "mamba2", "nemotron", "falcon"])
def test_what_peft_refuses(name: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = model_of(name, torch.bfloat16)
    with pytest.raises(ValueError, match="incompatible with Mamba"):
        peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=["out_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(ConfigError, match="PEFT refuses 'out_proj'"):
        estimated(name, tmp_path, "out_proj")
    assert "mamba.output" not in estimated(name, tmp_path, "all-linear").training.lora.targets


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "16-bit adapters"])
@pytest.mark.parametrize("name", ["mamba", "bamba", "nemotron", "qwen3.5", "lfm2"])
def test_what_is_kept(name: str, autocast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CASES[name][0].removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    for kernel, function in stand_ins.KERNELS.items():
        if hasattr(module, kernel):
            monkeypatch.setattr(module, kernel, function)
    with torch.device("meta"):
        linears = {
            path.rpartition(".")[2]
            for path, each in model_of(name, torch.bfloat16).named_modules()
            if isinstance(each, torch.nn.Linear)
        }
    targets = (
        ["in_proj"]
        if name == "mamba"
        else sorted(linears - {"lm_head"} - ({"out_proj"} if name in ("mamba", "nemotron") else set()))
    )

    def build() -> Any:
        with torch.device("cuda"):
            model = model_of(name, torch.bfloat16).train()
        model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=targets, task_type="CAUSAL_LM"))
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in adapters if not autocast else ():
            parameter.data = parameter.data.to(torch.bfloat16)
        ids = torch.zeros((BATCH, S), dtype=torch.long, device="cuda")

        def step() -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()

        return step

    seen = trace(FunctionJob(build, "adapters"))
    result = estimated(name, tmp_path, ",".join(targets), lora_dtype="float32" if autocast else "bfloat16")
    memory, stage = memory_of(result, autocast=autocast)
    held = memory.of_chunk(stage, stage.chunks[0])
    assert held.kept + held.head == pytest.approx(seen.saved_nbytes, rel=1e-3)
