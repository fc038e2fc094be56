"""Whole models with pictures or a sound beside adapters: what transformers' and PEFT's own code keeps, and its peak, on a CPU.

On a CPU attention with a mask returns heads one after another; the layout is made that of CUDA's kernel, by token.
"""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from loadgauge import estimate
from loadgauge.core.estimate.memory.rank_memory import stages
from torch_kept import owned
from torch_peak import highest
from tower_sizes import EXPERTS, FIXED, FREE, GRIDS

TEXT = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 8,
        "num_hidden_layers": 3, "max_position_embeddings": 2048, "head_dim": 16, "use_cache": False, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (TEXT, {**FIXED, "vision_use_head": False}, {"mm_tokens_per_image": 16}),
    "idefics3": (TEXT, FIXED, {"scale_factor": 2, "pad_token_id": 0}),
    "llava_next": (TEXT, FIXED, GRIDS),
    "llava_onevision": (TEXT, FIXED, GRIDS),
    "qwen3_vl": (TEXT, {**FREE, "num_position_embeddings": 64, "deepstack_visual_indexes": [1]}, {}),
    "glm4v": ({**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
              {**FREE, "image_size": 112}, {}),
    "llama4": ({**TEXT, **EXPERTS}, {**FIXED, "intermediate_size": 384, "projector_input_dim": 160, "projector_output_dim": 160,
                                     "vision_output_dim": 160}, {}),
    "qwen2_audio": (TEXT, {"d_model": 96, "encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 256}, {}),
}  # fmt: skip
"""The keys of a text model, of a tower, and of what joins them."""
SEEN = {"idefics3": (17, 17 * 16), "llava_next": (3, 136), "llava_onevision": (3, 136), "qwen3_vl": (768, 192),
        "glm4v": (768, 192), "qwen2_audio": (0, 747)}  # fmt: skip
"""Tiles or patches, and tokens, of a picture of 112 x 112 (or 448 x 336) pixels, or of 29.9 s; else (1, 16)."""
CASES = [
    ("gemma3", "frozen"), ("gemma3", "trained"), ("idefics3", "trained"), ("llava_next", "trained"),
    ("llava_onevision", "trained"), ("qwen3_vl", "projector"), ("glm4v", "projector"), ("glm4v", "adapters"),
    *(("llama4", tower) for tower in ("frozen", "projector", "trained", "adapters")), ("qwen2_audio", "trained"),
]  # fmt: skip
TOKEN = 500
PROJECTORS = ("multi_modal_projector", "connector", "merger", "downsample", "visual.post_layernorm")
TOWERS = ("visual", "vision_tower", "vision_model", "audio_tower")


class ByToken(torch.autograd.Function):
    """Attention with a mask, whose context lies token by token."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, scale: Any) -> Any:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, mask, out, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return (*kernel(grad, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=ctx.scale), None, None)


USUAL = functional.scaled_dot_product_attention


def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, scale: Any = None, **rest: Any) -> Any:
    if attn_mask is None:
        return USUAL(q, k, v, scale=scale, **rest)
    if attn_mask.dtype == torch.bool:  # as PyTorch makes it, in each call
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
    return ByToken.apply(q, k, v, attn_mask, scale)


def config_of(kind: str) -> Any:
    text, tower, more = MODELS[kind]
    maker = transformers.CONFIG_MAPPING[kind]
    usual = maker()
    section = "audio_config" if kind == "qwen2_audio" else "vision_config"
    sections = {
        name: {**keys, "model_type": getattr(usual, name).model_type}
        for name, keys in (("text_config", text), (section, tower))
    }
    config = maker(**sections, **more)
    for name in ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index"):
        if hasattr(config, name):
            setattr(config, name, TOKEN)
    config._attn_implementation = "sdpa"
    return config


def batch_of(kind: str, length: int) -> dict[str, Any]:
    tiles, tokens = SEEN.get(kind, (1, 16))
    ids = torch.full((1, length), 5)
    ids[0, :tokens] = TOKEN
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "qwen2_audio":
        heard = (torch.arange(3000) < 2990)[None].long()
        return {**batch, "input_features": torch.rand(1, 128, 3000), "feature_attention_mask": heard,
                "attention_mask": torch.ones_like(ids)}  # fmt: skip
    if kind in ("qwen3_vl", "glm4v"):
        return {**batch, "pixel_values": torch.rand(tiles, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 24, 32]]),
                "mm_token_type_ids": (ids == TOKEN).int()}  # fmt: skip
    pixels = torch.rand(tiles, 3, 112, 112) + 0.1
    if kind.startswith(("llava", "idefics")):
        pixels = pixels[None]
    more = {"image_sizes": torch.tensor([[112, 112]])} if kind.startswith("llava") else {}
    return {
        **batch,
        "pixel_values": pixels,
        **more,
        **({"token_type_ids": (ids == TOKEN).int()} if kind == "gemma3" else {}),
    }


def tune(model: Any, tower: str) -> Any:
    """The model with adapters on all linear layers of its language model, and what of the tower is trained."""

    def joins(name: str) -> bool:
        return any(word in name for word in PROJECTORS)

    def sees(name: str) -> bool:
        return not joins(name) and any(word in name for word in TOWERS)

    adapted = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear)
        and not name.endswith(("lm_head", "router"))
        and (tower == "adapters" or not (sees(name) or joins(name)))
    ]
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=adapted))
    for name, parameter in model.named_parameters():
        joined = tower in ("trained", "projector") and joins(name)
        own = tower == "trained" and sees(name) and "embed_positions" not in name
        if "lora" not in name and (joined or own):
            parameter.requires_grad_(True)
    return tuned


class Saved:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # no cycle through an output that is kept


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "tower"), CASES)
def test_a_step_is_what_its_code_runs(kind: str, tower: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    config, sound = config_of(kind), kind == "qwen2_audio"
    maker = transformers.Qwen2AudioForConditionalGeneration if sound else transformers.AutoModelForImageTextToText
    model: Any = maker._from_config(config) if sound else maker.from_config(config)
    tuned = tune(model.train(), tower)
    length = -(-(SEEN.get(kind, (1, 16))[1] + 64) // 64) * 64
    batch = batch_of(kind, length)
    inputs = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    own = owned(model) | {value.untyped_storage().data_ptr() for value in inputs}
    saved: weakref.WeakSet[Saved] = weakref.WeakSet()  # what the graph let go of is not kept

    def pack(tensor: torch.Tensor) -> Saved:
        saved.add(held := Saved(tensor))
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        loss = tuned(**batch).loss
    gc.collect()
    storages = [held.tensor.untyped_storage() for held in saved]
    kept = sum({each.data_ptr(): each.nbytes() for each in storages if each.data_ptr() not in own}.values())
    kept += sum(value.nbytes for value in inputs if value.dtype == torch.float32)  # the loop holds them
    loss.backward()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.grad is not None)
    model.zero_grad(set_to_none=True)
    del loss
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], foreach=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(2):
            tuned(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    peak = sum(each.nbytes for each in (*model.parameters(), *inputs)) + highest(profiler)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    seen: dict[str, Any] = {"pictures": "1x448x336" if kind in ("qwen3_vl", "glm4v") else "1x112x112"}
    result = estimate(str(file), precision="fp32", optimizer="sgd", seq_len=length, tower=tower, recompute="none", lora_rank=8,
                      **({"audio": 29.9} if sound else seen))  # fmt: skip
    memory = result.workings.memory
    stage = next(iter(stages(memory.model, memory.layout)))
    held = memory.of_chunk(stage, stage.chunks[0])
    assert memory.weighed(stage)[1].all.trainable == trained
    assert held.kept + held.head == pytest.approx(kept, rel=0.01)
    moments = [float(moment.total - moment.parts["outside"]) for moment in result.workings.phases]
    assert max(moments) == pytest.approx(peak, rel=0.01)
