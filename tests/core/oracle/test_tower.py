"""A tower of pictures against transformers' classes on a CPU: bytes kept for backward, FLOPs of products, and peaks."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from loadgauge import estimate
from loadgauge.core.definitions.training.training import training
from loadgauge.core.families.encoders.towers import towers
from loadgauge.core.layers import View, block_layer
from torch_kept import keeping, owned, total
from torch_peak import highest

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


def pixels(kind: str) -> dict[str, Any]:
    """Arguments of a tower: a loop holds the pixels in float32, whatever a model makes of them."""
    if kind.startswith(("qwen", "glm")):
        rows = PICTURES * GRID[0] * GRID[1]
        grids = torch.tensor([[1, *GRID]] * PICTURES)
        return {"pixel_values": torch.randn(rows, 3 * 2 * 14 * 14), "image_grid_thw": grids}
    squares = torch.randn(PICTURES, 3, SIDE, SIDE)
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
    given = pixels(kind)
    with keeping(owned(model)) as seen, FlopCounterMode(display=False) as counted:
        held = model.model.get_image_features(**given)
        # The loop holds the pixels, whether the tower reads them or a copy.
        apart = given["pixel_values"].untyped_storage().data_ptr() not in seen
        kept = total(seen) + given["pixel_values"].nbytes * apart
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


LANGUAGE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1,
            "intermediate_size": 256, "vocab_size": 400, "head_dim": 128}  # fmt: skip
SEES = {"depth": 4, "hidden_size": 128, "num_heads": 4, "intermediate_size": 256, "out_hidden_size": 128, "patch_size": 14,
        "num_position_embeddings": 256, "deepstack_visual_indexes": [1], "in_channels": 3, "spatial_merge_size": 2,
        "temporal_patch_size": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("tower", "recompute"),
    [("frozen", "none"), ("trained", "full"), ("trained", "none")],
)
def test_the_peak_of_a_step_with_a_picture(tower: str, recompute: str, tmp_path: Path) -> None:
    maker, length, tokens = CONFIG_MAPPING["qwen3_vl"], 512, 24 * 16
    config = maker(text_config=LANGUAGE, vision_config=SEES, image_token_id=399)
    config._attn_implementation, config.text_config.use_cache = "sdpa", False
    model = AutoModelForImageTextToText.from_config(config).train()
    model.model.visual.requires_grad_(tower == "trained")
    if recompute == "full":
        model.gradient_checkpointing_enable()
    ids = torch.randint(0, 300, (1, length))
    ids[0, :tokens] = 399
    batch = {"input_ids": ids, "labels": ids, "mm_token_type_ids": (ids == 399).int(),
             "pixel_values": torch.randn(4 * tokens, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 48, 32]])}  # fmt: skip
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], foreach=False)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    measured = sum(one.nbytes for one in (*model.parameters(), ids, batch["pixel_values"])) + highest(profiler)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    how: Any = {"precision": "fp32", "optimizer": "sgd", "seq_len": length, "tower": tower, "recompute": recompute}
    memory = estimate(str(file), pictures="1x448x672", **how).memory
    assert memory.total - memory.parts["outside"] == pytest.approx(measured, rel=0.01)
