"""PEFT's adapters on small models of many families, drawn at random: a step on the simulated device, and what is estimated."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import peft
import torch
import transformers
from torch import nn

import stand_ins
from loadgauge import estimate
from loadgauge.core.estimate.memory.phases import Phase
from loadgauge.core.estimate.memory.rank_memory import stages
from loadgauge.core.layers.adapters.tuners import block_size
from loadgauge.pytorch.trace.programs.script import FunctionJob
from loadgauge.pytorch.trace.trace import trace
from torch_peft import CudaBackend, in_four_bits
from torch_tuners import CONFIGS

PLAIN = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "pad_token_id": 0, "tie_word_embeddings": False}
SIZES = {
    **PLAIN,
    "intermediate_size": 352,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HEADS = {**SIZES, "head_dim": 16}
TIED = {**HEADS, "tie_word_embeddings": True}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
SHARED = {**ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 96}
LATENT = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 8,
}
DEEPSEEK = {
    **SIZES,
    **ROUTED,
    **LATENT,
    "q_lora_rank": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
         "head_dim": 16, "num_hidden_layers": 4}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_chunk_size": 32}
NEMOTRON = {**HEADS, "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 2, "chunk_size": 32}
GRANITE = {**SIZES, **MAMBA2, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 160}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", HEADS),
    "qwen2": ("qwen2", SIZES),
    "qwen3": ("qwen3", HEADS),
    "gemma2": ("gemma2", {**TIED, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", TIED),
    "phi3": ("phi3", HEADS),
    "olmo2": ("olmo2", SIZES),
    "glm4": ("glm4", HEADS),
    "mixtral": ("mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("qwen3_moe", {**HEADS, **ROUTED, "num_experts": 8}),
    "qwen2-moe": ("qwen2_moe", {**SIZES, **SHARED}),
    "olmoe": ("olmoe", {**SIZES, "intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}),
    "gpt-oss": ("gpt_oss", {**HEADS, "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "glm": ("glm4_moe", {**HEADS, **ROUTED, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
                         "topk_group": 1}),
    "deepseek": ("deepseek_v3", {**DEEPSEEK, "first_k_dense_replace": 1}),
    "deepseek-v2": ("deepseek_v2", {**DEEPSEEK, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"}),
    "llama4": ("llama4_text", {**HEADS, "intermediate_size": 96, "intermediate_size_mlp": 352, "num_local_experts": 4,
                               "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}),
    "qwen3.5": ("qwen3_5_text", {**SIZES, **DELTA}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**SIZES, **DELTA, **SHARED}),
    "qwen3-next": ("qwen3_next", {**SIZES, **DELTA, **SHARED}),
    "kimi": ("kimi_linear", {
        **SIZES, **ROUTED, **LATENT, "q_lora_rank": None, "head_dim": 32, "linear_num_heads": 4, "linear_head_dim": 32,
        "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3, "num_experts": 8, "num_shared_experts": 1,
    }),
    "mamba": ("mamba", {**PLAIN, "state_size": 16}),
    "falcon-mamba": ("falcon_mamba", {**PLAIN, "state_size": 16}),
    "mamba2": ("mamba2", {**PLAIN, "num_heads": 8, "head_dim": 32, "state_size": 32, "n_groups": 2, "chunk_size": 32}),
    "bamba": ("bamba", {**SIZES, **MAMBA2, "attn_layer_indices": [1]}),
    "granite-h": ("granitemoehybrid", {**GRANITE, "num_local_experts": 0}),
    "granite-h-moe": ("granitemoehybrid", {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}),
    "falcon-h1": ("falcon_h1", {**SIZES, **MAMBA2, "mamba_d_ssm": 256}),
    "nemotron": ("nemotron_h", {**NEMOTRON, "hybrid_override_pattern": "M*-M"}),
    "nemotron-moe": ("nemotron_h", {**NEMOTRON, **ROUTED, "hybrid_override_pattern": "ME*E", "n_routed_experts": 8,
                                    "moe_shared_expert_intermediate_size": 160}),
    "jamba": ("jamba", {**SIZES, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 8,
                        "num_experts": 4, "num_hidden_layers": 4}),
    "lfm2": ("lfm2", {**SIZES, "full_attn_idxs": [1]}),
    "lfm2-moe": ("lfm2_moe", {**SIZES, **ROUTED, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
                              "num_experts": 8}),
    "minimax": ("minimax", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 32}),
}  # fmt: skip
"""By name: the model_type, and the keys of a small config."""
EAGER = ("mamba", "mamba2", "falcon_mamba", "gpt_oss", "gemma2")
SCANNED = frozenset(
    {"mamba", "falcon_mamba", "mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "jamba"}
)
"""Types whose scan is a kernel for GPUs: its stand-in casts nothing under autocast and takes no room in backward."""
UNREAD = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Types whose `out_proj` PEFT refuses."""
CODES = 16 * 4 + 256 * 4 + 4
"""Bytes of the tables that turn codes into values, of a 4-bit matrix."""
OWN_METHODS = ("ia3", "vera", "adalora", "loha", "lokr", "oft")
PRECISIONS = {
    "autocast": ("bf16-mixed-16", torch.bfloat16), "pure": ("bf16-pure", torch.bfloat16), "fp32": ("fp32", torch.float32),
    "wide": ("bf16-autocast", torch.float32),
}  # fmt: skip
"""A recipe, and what the frozen weights are in."""


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """A combination. targets: last parts of the names of linear layers, or `all-linear`; experts: parameters of experts;
    upcast: of a quantised base, "" where none is; layers: those that are adapted, all where empty; saved: trained whole."""

    family: str
    method: str = "lora"
    targets: tuple[str, ...] = ("all-linear",)
    experts: tuple[str, ...] = ()
    precision: str = "autocast"
    narrow: bool = False
    upcast: str = ""
    recompute: bool = False
    batch: int = 2
    length: int = 64
    rank: int = 8
    dropout: float = 0.0
    layers: tuple[int, ...] = ()
    saved: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The combination on a line."""
        usual = Draw(family="")
        facts = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("family", "method")}
        more = [f"{name}={value}" for name, value in facts.items() if value != getattr(usual, name)]
        return " ".join([self.family, self.method, *more]).replace("'", "").replace(", ", ",")


def build(name: str, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A small model of a family."""
    kind, keys = FAMILIES[name]
    config = transformers.AutoConfig.for_model(kind, **keys)
    config.use_cache = False
    with torch.device(device):
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        attention = "eager" if kind in EAGER else "sdpa"
        model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        torch.set_default_dtype(usual)
    return model.to(dtype).train()


@functools.cache
def linears(name: str) -> dict[str, tuple[int, int]]:
    """Paths of the linear layers of the blocks, with rows and columns; Llama 4's router returns two tensors, which none adapts."""
    modules = build(name, "meta").named_modules()
    return {
        path: (part.out_features, part.in_features)
        for path, part in modules
        if isinstance(part, nn.Linear) and not path.endswith(("lm_head", "router"))
    }


@functools.cache
def experts_of(name: str) -> tuple[str, ...]:
    """Parameters that hold the matrices of all experts, as `target_parameters` has them."""
    parameters = build(name, "meta").named_parameters()
    return tuple(
        sorted({".".join(path.split(".")[-2:]) for path, value in parameters if value.dim() == 3 and "experts" in path})
    )


def draw(source: random.Random) -> Draw:
    """A combination at random; one that PEFT itself refuses, too."""
    family = source.choice(list(FAMILIES))
    method = source.choice(
        ["lora"] * 5
        + ["rslora", "dora", "dora", "qlora", "qlora", "qlora, as peft", "experts", "experts", *OWN_METHODS]
    )
    precision = source.choice(["autocast"] * 4 + ["pure", "pure", "fp32", "wide"])
    if precision == "wide" and FAMILIES[family][0] in SCANNED:
        precision = "fp32"
    if method == "experts" and not experts_of(family):
        method = "lora"
    if method in ("qlora", "qlora, as peft"):
        precision = source.choice(["autocast", "autocast", "pure"])
    if method == "loha" and precision in ("autocast", "wide"):
        precision = "pure"  # under autocast its own matrices are left out, which its record says
    names = sorted(
        {path.rpartition(".")[2] for path in linears(family)}
        - ({"out_proj"} if FAMILIES[family][0] in UNREAD else set())
    )
    usual = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(FAMILIES[family][0])
    targets = source.choice([["all-linear"], names, source.sample(names, min(len(names), source.randint(1, 3))),
                             usual if isinstance(usual, list) else names])  # fmt: skip
    if method in OWN_METHODS and targets == ["all-linear"]:
        targets = names
    if method == "ia3":
        targets = [name for name in ("k_proj", "v_proj", "down_proj", "qkv_proj") if name in names] or names[:2]
    parameters = (
        source.sample(experts_of(family), source.randint(1, len(experts_of(family)))) if method == "experts" else []
    )
    if parameters:
        targets = source.sample(names, min(len(names), 2))
    plain = method in ("lora", "rslora", "qlora", "qlora, as peft")
    layers = FAMILIES[family][1]["num_hidden_layers"]
    tied = FAMILIES[family][1].get("tie_word_embeddings") is not False
    return Draw(
        family=family,
        method=method,
        targets=tuple(sorted(targets)),
        experts=tuple(sorted(parameters)),
        precision=precision,
        narrow=plain and precision == "autocast" and source.random() < 0.4,
        upcast={"qlora": "none", "qlora, as peft": "all"}.get(method, ""),
        recompute=source.random() < 0.35,
        batch=source.choice([1, 2, 3]),
        length=source.choice([64, 96, 128, 192]),
        rank={"oft": 32}.get(method, source.choice([4, 8, 16])),
        dropout=0.05 if plain and source.random() < 0.3 else 0.0,
        layers=(source.randrange(layers),) if plain and source.random() < 0.15 else (),
        saved=source.choice([(), (), ("lm_head",), ("embed_tokens", "lm_head")]) if method == "lora" and not tied else (),
    )  # fmt: skip


def of_peft(how: Draw) -> peft.PeftConfig:
    """PEFT's configuration of a combination."""
    targets: Any = "all-linear" if how.targets == ("all-linear",) else list(how.targets)
    if how.method in OWN_METHODS:
        return CONFIGS[how.method](targets, how.rank)
    return peft.LoraConfig(
        r=how.rank, lora_dropout=how.dropout, target_modules=targets, use_dora=how.method == "dora",
        use_rslora=how.method == "rslora", modules_to_save=list(how.saved) or None, target_parameters=list(how.experts) or None,
        layers_to_transform=list(how.layers) or None, task_type="CAUSAL_LM",
    )  # fmt: skip


@contextlib.contextmanager
def kernels(kind: str) -> Iterator[None]:
    """Stand-ins for kernels that run on GPUs only, in a family's module."""
    folder = kind.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    before = {name: getattr(module, name) for name in stand_ins.KERNELS if hasattr(module, name)}
    for name in before:
        setattr(module, name, stand_ins.KERNELS[name])
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def quantised(how: Draw) -> dict[str, tuple[int, int]]:
    """Paths and sizes of the layers that are held in 4 bits: not those whose matrix Mamba's kernel reads itself."""
    read = ("mamba.out_proj", "mixer.out_proj", "mamba.x_proj", "mixer.x_proj", "mamba.dt_proj", "mixer.dt_proj")
    return {path: size for path, size in linears(how.family).items() if how.upcast and not path.endswith(read)}


FIGURES = ("trained", "gradients", "optimizer", "kept", "backward", "peak", "step")


def measured(how: Draw) -> dict[str, float]:
    """Figures of a step: parameters, bytes of states, what forward leaves, the highest of backward, of all, of the update."""
    kind, dtype = FAMILIES[how.family][0], PRECISIONS[how.precision][1]
    autocast = how.precision in ("autocast", "wide")
    facts: dict[str, float] = {}

    def made() -> Any:
        model = build(how.family, "cuda", dtype)
        for path, shape in quantised(how).items():
            model.set_submodule(path, in_four_bits(model.get_submodule(path), shape, "nf4", True))
        if how.upcast:
            model.is_loaded_in_4bit, model.quantization_method = True, "bitsandbytes"
        if how.upcast == "all":
            peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model = peft.get_peft_model(model, of_peft(how))
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in parameters if how.narrow else ():
            parameter.data = parameter.data.to(torch.bfloat16)
        if how.recompute:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        facts["trained"] = sum(parameter.numel() for parameter in parameters)
        ids = torch.zeros((how.batch, how.length), dtype=torch.long, device="cuda")
        optimizer = torch.optim.AdamW(parameters, fused=True)

        def step() -> None:
            with CudaBackend() if how.upcast else contextlib.nullcontext():
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                del loss
                facts["gradients"] = sum(
                    parameter.grad.nbytes for parameter in parameters if parameter.grad is not None
                )
                facts["optimizer"] = 2 * facts["gradients"]
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return step

    with kernels(kind):
        seen = trace(FunctionJob(made, "adapters"))
    return facts | {
        "kept": seen.saved_nbytes, "backward": seen.phases["backward"], "peak": seen.peak.total,
        "step": seen.phases["optimizer step"],
    }  # fmt: skip


def command(how: Draw) -> dict[str, Any]:
    """What a user asks of `estimate`."""
    words = how.targets if not how.experts else (*how.targets, *(name.removesuffix(".weight") for name in how.experts))
    kind = FAMILIES[how.family][0]
    return {
        "micro_batch": how.batch, "global_batch": how.batch, "seq_len": how.length, "framework": "huggingface",
        "optimizer": "adamw", "precision": PRECISIONS[how.precision][0], "recompute": "full" if how.recompute else "none",
        "lora_targets": ",".join(words),
        **({} if how.method == "ia3" else {"lora_rank": how.rank}),
        **({"adapter": how.method} if how.method in OWN_METHODS else {}),
        **({"use_dora": True} if how.method == "dora" else {}),
        **({"lora_dropout": how.dropout} if how.dropout else {}),
        **({"lora_dtype": "bfloat16"} if how.narrow else {}),
        **({"lora_layers": ",".join(map(str, how.layers))} if how.layers else {}),
        **({"modules_to_save": ",".join(how.saved)} if how.saved else {}),
        **({"qlora": True, "base": "nf4", "kbit_upcast": how.upcast} if how.upcast else {}),
        **({"attention": "eager"} if kind in ("gpt_oss", "gemma2") else {}),
    }  # fmt: skip


def unsaid(how: Draw) -> int:
    """Bytes that the list leaves out and says so: tables of 4-bit codes, indices of OFT's blocks."""
    if how.method == "oft":
        adapted = [size for path, size in linears(how.family).items() if path.rpartition(".")[2] in how.targets]
        sizes = [block_size(columns, how.rank) for _, columns in adapted]
        return sum(16 * (b * (b - 1) // 2) for b in sizes)
    return CODES * len(quantised(how))


def predicted(how: Draw, folder: Path, **more: Any) -> tuple[dict[str, float], Any]:
    """The same figures as estimated, and the answer."""
    kind, keys = FAMILIES[how.family]
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": kind, **keys}))
    result = estimate(str(file), **command(how), **more)
    memory, left_out = result.workings.memory, unsaid(how)
    stage = next(iter(stages(memory.model, memory.layout)))
    held = memory.of_chunk(stage, stage.chunks[0])
    moments: dict[Phase, float] = {}
    for each in result.workings.phases:
        moments[each.phase] = max(moments.get(each.phase, 0), float(each.total - each.parts["outside"]) + left_out)
    states = memory.states(memory.weighed(stage)[1])
    # Autocast's copies of frozen matrices are among what forward leaves.
    copies = max(float(each.parts["gathered"]) for each in result.workings.phases if each.phase is Phase.LOSS)
    backward = max(moments.get(phase, 0) for phase in (Phase.LOSS, Phase.BACKWARD, Phase.EMBEDDING))
    return {
        "trained": int(memory.weighed(stage)[1].all.trainable), "gradients": float(states.gradients),
        "optimizer": float(states.optimizer),
        "kept": float(held.kept + held.head) + copies, "backward": backward,
        "peak": max(moments.values()), "step": moments[Phase.STEP],
    }, result  # fmt: skip


def off(how: Draw, seen: dict[str, float], folder: Path) -> dict[str, float]:
    """How far each figure of an estimate is off, as a share of what was measured."""
    said, left_out = predicted(how, folder)[0], {"kept"} if how.recompute else set()
    if FAMILIES[how.family][0] in SCANNED:
        left_out |= {"backward", "peak"}
    return {name: said[name] / seen[name] - 1 for name in FIGURES if name not in left_out}


def written(file: Path, seed: int, share: tuple[int, int] = (0, 1), count: int = 160) -> None:
    """Write what `count` combinations of a seed measure, or a share of them; those that a library refuses are left out."""
    source, draws = random.Random(seed), list[Draw]()
    while len(draws) < count:
        if (how := draw(source)) not in draws:
            draws.append(how)
    with file.open("w") as table:
        for how in draws[share[0] :: share[1]]:
            with contextlib.suppress(Exception):
                table.write(json.dumps([msgspec.to_builtins(how), measured(how)]) + "\n")
                table.flush()


def read(file: Path) -> list[tuple[Draw, dict[str, float]]]:
    """The rows of such a table."""
    return [(msgspec.convert(row[0], Draw), row[1]) for row in map(json.loads, file.read_text().splitlines())]


if __name__ == "__main__":
    written(Path(sys.argv[1]), int(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 4 else (0, 1))
