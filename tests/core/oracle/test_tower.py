"""A tower of pictures against transformers' classes on a CPU: bytes kept for backward, and FLOPs of products."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from loadgauge.core.definitions.training.training import training
from loadgauge.core.families.encoders.towers import towers
from loadgauge.core.layers import View, block_layer
from torch_kept import keeping, owned, total

OF_SIGLIP = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 112,
             "patch_size": 14}  # fmt: skip
OF_QWEN = {
    "depth": 4,
    "hidden_size": 96,
    "num_heads": 4,
    "intermediate_size": 200,
    "out_hidden_size": 64,
    "patch_size": 14,
}
TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {**OF_SIGLIP, "vision_use_head": False},
    "internvl": {**OF_SIGLIP, "image_size": [112, 112], "patch_size": [14, 14]},
    "mistral3": {**OF_SIGLIP, "head_dim": 24},
    "idefics3": OF_SIGLIP,
    "qwen2_vl": {"depth": 4, "embed_dim": 96, "num_heads": 4, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {**OF_QWEN, "fullatt_block_indexes": [2]},
    "qwen3_vl": {**OF_QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [1]},
    "glm4v": {**OF_QWEN, "image_size": 112},
}
MORE: dict[str, dict[str, Any]] = {"gemma3": {"mm_tokens_per_image": 16}, "idefics3": {"scale_factor": 2}}
TEXT = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        "vocab_size": 300, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
PICTURES, SIDE, GRID = 2, 112, (8, 12)


def pixels(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """What a tower is called with."""
    if kind.startswith(("qwen", "glm")):
        rows = PICTURES * GRID[0] * GRID[1]
        grids = torch.tensor([[1, *GRID]] * PICTURES)
        return {"pixel_values": torch.randn(rows, 3 * 2 * 14 * 14, dtype=dtype), "image_grid_thw": grids}
    squares = torch.randn(PICTURES, 3, SIDE, SIDE, dtype=dtype)
    sizes = {"image_sizes": torch.tensor([[SIDE, SIDE]] * PICTURES)} if kind == "mistral3" else {}
    return {"pixel_values": squares[None] if kind == "idefics3" else squares, **sizes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", TOWERS)
def test_a_tower_keeps_what_its_class_keeps(kind: str, dtype: torch.dtype) -> None:
    maker = CONFIG_MAPPING[kind]
    of = {name: getattr(maker(), name).model_type for name in ("text_config", "vision_config")}
    vision = {**TOWERS[kind], "model_type": of["vision_config"]}
    config = maker(text_config={**TEXT, "model_type": of["text_config"]}, vision_config=vision, **MORE.get(kind, {}))
    config._attn_implementation = "sdpa"
    model = AutoModelForImageTextToText.from_config(config).to(dtype).train()
    with keeping(owned(model)) as seen, FlopCounterMode(display=False) as counted:
        held = model.model.get_image_features(**pixels(kind, dtype))
        kept = total(seen)
    (tower, *_) = towers(config.to_dict(), kind, True)
    assert tower.rule is not None
    each = GRID[0] * GRID[1] if tower.rule.kind == "area" else (SIDE // 14) ** 2 + tower.rule.spare
    joined = PICTURES if tower.rule.kind == "edge" else 1
    seen_as = {"tiles": PICTURES // joined, "patches": PICTURES * each, "pairs": PICTURES * joined * each**2}
    how = training("huggingface", precision="fp32" if dtype == torch.float32 else "bf16-pure")
    blocks = [
        msgspec.structs.replace(block, tower=msgspec.structs.replace(block.tower, **seen_as), reached=place > 0)
        for place, block in enumerate(tower.layers)
    ]
    layers = [block_layer(block, TEXT["hidden_size"], View.of(128, 1, kernels=how.kernels)) for block in blocks]
    assert sum(layer.saved() for layer in layers) == pytest.approx(kept, rel=0.01)
    # PyTorch's counter leaves out the CPU's kernel of attention.
    flops = sum(one.forward_flops for layer in layers for one in layer if one.kind != "attention")
    assert flops == pytest.approx(counted.get_total_flops(), rel=0.01)
    del held
