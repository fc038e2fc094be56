"""Small models of any type in 4 bits: loaded by transformers and bitsandbytes on the CPU, and their training traced without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn

from loadgauge.pytorch.trace.programs.script import FunctionJob
from loadgauge.pytorch.trace.trace import Trace, trace
from torch_peft import CudaBackend, in_four_bits

FORMATS = {"nf4": ("nf4", True), "nf4-single": ("nf4", False), "fp4": ("fp4", False)}


def kind_of(config: Any) -> Any:
    """The class that `Auto...` takes for a config."""
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    return auto._model_mapping[type(config)]


def loaded(config: Any, folder: Path, base: str) -> Any:
    """The model as its loader puts it in 4 bits: real weights, packed by bitsandbytes' kernels for CPUs."""
    torch.manual_seed(0)
    kind_of(config)(config).to(torch.bfloat16).save_pretrained(folder)
    name, double = FORMATS[base]
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_quant_type=name,
    )
    return kind_of(config).from_pretrained(folder, quantization_config=how, dtype=torch.bfloat16, device_map="cpu")


def packed(model: Any) -> dict[str, tuple[tuple[int, ...], int]]:
    """Of each layer in 4 bits its shape, and its bytes: packed values and scales, and those of the scales."""
    found = {}
    for name, one in model.named_modules():
        state = getattr(getattr(one, "weight", None), "quant_state", None)
        if state is not None:
            outer = 0 if state.state2 is None else state.state2.absmax.nbytes
            found[name] = (tuple(state.shape), one.weight.nbytes + state.absmax.nbytes + outer)
    return found


def adapted(model: Any, upcast: str, rank: int, dropout: float = 0.0, **how: Any) -> Any:
    """The model prepared and with adapters, as PEFT's own functions make them."""
    if upcast == "all":
        peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=dropout, **({"target_modules": "all-linear"} | how)
    )
    return peft.get_peft_model(model, config)


def traced(
    config: Any, names: set[str], inputs: dict[str, tuple[int, int]], base: str, upcast: str, rank: int, *,
    checkpointed: bool = False, **how: Any,
) -> Trace:  # fmt: skip
    """Two steps on the simulated device, of a model whose layers of these names are in 4 bits. inputs: tokens by argument"""

    def build() -> Any:
        with torch.device("cuda"):
            kind, default = kind_of(config), torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            model: Any = kind._from_config(config, attn_implementation="sdpa")
            torch.set_default_dtype(default)
        model.train()
        for name in names:
            old = model.get_submodule(name)
            shape = (old.out_features, old.in_features) if isinstance(old, nn.Linear) else old.weight.shape[::-1]
            model.set_submodule(name, in_four_bits(old, tuple(shape), *FORMATS[base]))
        model.is_loaded_in_4bit, model.quantization_method = bool(names), "bitsandbytes"
        model = adapted(model, upcast, rank, **how)
        if checkpointed:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        given = {name: torch.zeros(shape, dtype=torch.long, device="cuda") for name, shape in inputs.items()}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)

        def step() -> None:
            with CudaBackend():
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(**given, use_cache=False).loss
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return step

    return trace(FunctionJob(build, "qlora"))
