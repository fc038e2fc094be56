"""The table of Megatron-Bridge's recipes: a name means what the file that uses it says."""

from __future__ import annotations

from pathlib import Path

import bridge_recipes

BASE = """
from bridge import AutoBridge
def small_pretrain_8gpu_config():
    cfg.model = AutoBridge.from_hf_pretrained("maker/model-1b")
    cfg.model.tensor_model_parallel_size = 8
    return cfg
def _wide_pretrain_64gpu_config():
    cfg = small_pretrain_8gpu_config()
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.recompute_granularity = "selective"
    return cfg
"""
ALIAS = """
from recipes.base import _wide_pretrain_64gpu_config
def model_pretrain_config():
    return _wide_pretrain_64gpu_config()
"""
OTHER = """
from recipes.base import small_pretrain_8gpu_config as model_pretrain_config
def fast_config():
    cfg = model_pretrain_config()
    return cfg
"""

PLACED = """
from bridge import AutoBridge, SizesProvider
def _sizes(length):
    return SizesProvider(cross_entropy_loss_fusion=True, seq_length=length)
def model_sft_1gpu_config():
    cfg.model = AutoBridge.from_hf_pretrained("maker/model-1b")
    cfg.model.recompute_granularity = "full"
    opt_cfg, scheduler_cfg = fused_muon(lr=1.0)
    cfg.optimizer = opt_cfg
    return cfg
def model_sft_2gpu_config():
    cfg = model_sft_1gpu_config()
    cfg.model = _sizes(8192)
    return cfg
"""


def test_another_file_s_name_for_a_recipe_is_not_the_recipe(tmp_path: Path) -> None:
    """`model_pretrain_config` is a function of its own; that another file imports one of 8 GPUs by this name says nothing of it."""
    root = tmp_path / "src/megatron/bridge"
    for name, text in (("recipes/base", BASE), ("recipes/model", ALIAS), ("perf_recipes/fast", OTHER)):
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    functions = bridge_recipes.Functions(root)
    found = functions.read("model_pretrain_config")
    assert found["model.tensor_model_parallel_size"] == 2
    assert found["model.recompute_granularity"] == "selective"
    assert functions.read("fast_config")["model.tensor_model_parallel_size"] == 8
    assert "model_pretrain_config" in bridge_recipes.main(str(tmp_path), "abc", "2026-08-22")


def test_what_takes_the_place_of_a_section_leaves_nothing_of_it(tmp_path: Path) -> None:
    """A model by its sizes has none of the switches of the model before it; of an optimizer's pair the first counts."""
    path = tmp_path / "src/megatron/bridge/recipes/placed.py"
    path.parent.mkdir(parents=True)
    path.write_text(PLACED)
    functions = bridge_recipes.Functions(tmp_path / "src/megatron/bridge")
    one, two = (functions.read(f"model_sft_{gpus}gpu_config") for gpus in (1, 2))
    assert (one["model.recompute_granularity"], one["optimizer.optimizer"]) == ("full", "dist_muon")
    assert "model.recompute_granularity" not in two
    assert (two["model.cross_entropy_loss_fusion"], two["model.seq_length"]) == (True, 8192)
    assert two["optimizer.optimizer"] == "dist_muon"
