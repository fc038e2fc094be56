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
