"""torchtitan's own registries say what `data/titan_recipes.toml` says of them, where the package can be imported."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from loadgauge.job_files.exchange import read

FOLDERS = ("llama3", "deepseek_v3", "qwen3", "gpt_oss", "qwen3_5", "kimi_k2_7", "muse_glimmer")
AGAIN = {"NoneType": "none", "FullAC": "full", "SelectiveAC": "per-op"}


def facts_of(config: Any) -> dict[str, Any]:
    """What a configuration of the registry says, in the words of a job."""
    layout, policy = config.parallelism, config.activation_checkpoint
    named = {group.optimizer_name for group in config.optimizer.param_groups}
    return {
        "micro_batch": config.training.local_batch_size if layout.pipeline_parallel_degree == 1 else None,
        "seq_len": config.training.seq_len,
        "tp": layout.tensor_parallel_degree,
        "cp": layout.context_parallel_degree,
        "pp": layout.pipeline_parallel_degree,
        "ep": layout.expert_parallel_degree,
        "recompute": AGAIN[type(policy).__qualname__.partition(".")[0]],
        "compile": config.compile.enable and "model" in config.compile.components,
        "optimizer": "muon" if any("Muon" in name for name in named) else "adamw",
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_configuration_of_a_registry_is_read_as_it_is(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    try:
        registry = importlib.import_module(f"torchtitan.models.{folder}.config_registry")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchtitan cannot be imported here: {error}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (10, 0))
    wrong, compared = {}, 0
    for name, make in vars(registry).items():
        if not callable(make) or isinstance(make, type) or make.__module__ != registry.__name__ or name.startswith("_"):
            continue
        try:
            config = make()
        except (ImportError, RuntimeError, ValueError, TypeError):
            continue  # asks the card, or an extra package
        if not hasattr(config, "training"):
            continue
        text = f"torchrun -m torchtitan.train --module {folder} --config {name}\n"
        job = read(text, "torchtitan", file="run.sh", given={"gpus": 512}).job
        said = facts_of(config)
        differ = {
            fact: (getattr(job, fact), value) for fact, value in said.items() if value not in (None, getattr(job, fact))
        }
        wrong |= {name: differ} if differ else {}
        compared += 1
    assert not wrong
    assert compared >= 2
