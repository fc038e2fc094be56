"""`adapter_config.json` as PEFT's own classes write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.job_files.exchange import read, write

BASE = "meta-llama/Llama-3.1-8B"
FEW = ["q_proj", "v_proj"]
LORA = {"lora_rank": 16, "lora_targets": "q_proj,v_proj"}


def file_of(kind: str, folder: Path, **values: Any) -> str:
    """The file that a configuration of PEFT's is saved in."""
    peft = pytest.importorskip("peft")
    getattr(peft, f"{kind}Config")(base_model_name_or_path=BASE, **values).save_pretrained(folder)
    return (folder / "adapter_config.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "values", "facts"),
    [
        ("Lora", {"r": 16, "target_modules": FEW}, LORA),
        ("Lora", {"r": 16, "target_modules": FEW, "use_dora": True, "lora_dropout": 0.05},
         LORA | {"use_dora": True, "lora_dropout": 0.05}),
        ("Lora", {"r": 16, "target_modules": FEW, "modules_to_save": ["lm_head"], "layers_to_transform": [0, 3]},
         LORA | {"modules_to_save": "lm_head", "lora_layers": "0,3"}),
        ("Lora", {"target_modules": "all-linear", "target_parameters": ["mlp.experts.gate_up_proj"]},
         {"lora_rank": 8, "lora_targets": "all,mlp.experts.gate_up_proj"}),
        ("IA3", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
         {"adapter": "ia3"}),
        ("Vera", {"r": 64, "target_modules": FEW, "vera_dropout": 0.1},
         {"adapter": "vera", "lora_rank": 64, "lora_targets": "q_proj,v_proj", "lora_dropout": 0.1}),
        ("AdaLora", {"init_r": 12, "target_modules": FEW, "total_step": 9}, {"adapter": "adalora", "lora_rank": 12}),
        ("LoHa", {"r": 4, "target_modules": FEW}, {"adapter": "loha", "lora_rank": 4}),
        ("LoKr", {"r": 4, "target_modules": FEW}, {"adapter": "lokr", "lora_rank": 4}),
        ("OFT", {"oft_block_size": 64, "target_modules": FEW}, {"adapter": "oft", "lora_rank": 64}),
        ("PromptTuning", {"num_virtual_tokens": 20}, {"adapter": "prompt", "virtual_tokens": 20}),
        ("PromptEncoder", {"num_virtual_tokens": 20, "encoder_hidden_size": 128},
         {"adapter": "p-tuning", "virtual_tokens": 20, "lora_rank": 128}),
    ],
)  # fmt: skip
def test_what_pefts_classes_save(kind: str, values: dict[str, Any], facts: dict[str, Any], tmp_path: Path) -> None:
    found = read(file_of(kind, tmp_path, **values), file="adapter_config.json")
    assert found.dialect == "peft"
    assert found.job.model == BASE
    plain = {name: value for name, value in facts.items() if name != "lora_targets"}
    assert {name: getattr(found.job, name) for name in plain} == plain
    # PEFT keeps names as a set, whose order is any.
    if "lora_targets" in facts:
        assert set((found.job.lora_targets or "").split(",")) == set(facts["lora_targets"].split(","))


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("PrefixTuning", {"num_virtual_tokens": 8}, "PREFIX_TUNING is not modelled; LORA, IA3"),
        ("BOFT", {"target_modules": FEW}, "BOFT is not modelled"),
        ("Lora", {"target_modules": r".*\.q_proj"}, "is a pattern"),
        ("Lora", {"target_modules": ["model.layers.3.self_attn.q_proj"]}, "is one layer's"),
        ("Lora", {"target_modules": FEW, "rank_pattern": {"q_proj": 4}}, "gives layers other adapters"),
        ("LoKr", {"target_modules": FEW, "decompose_factor": 8}, "in another way"),
    ],
)
def test_what_is_not_modelled_is_said(kind: str, values: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words.replace("'", "[\"']")):
        read(file_of(kind, tmp_path, **values), file="adapter_config.json")


@pytest.mark.parametrize(
    ("kind", "key", "value", "effect", "part"),
    [
        ("Lora", "bias", "all", "costs", "optimizer"),
        ("Lora", "trainable_token_indices", [1, 2], "costs", "weights"),
        ("Lora", "exclude_modules", ["lm_head"], "saves", "gradients"),
        ("LoHa", "rank_dropout", 0.1, "either", "activations"),
    ],
)
def test_what_has_a_bound_is_named_with_it(
    kind: str, key: str, value: Any, effect: str, part: str, tmp_path: Path
) -> None:
    text = file_of(kind, tmp_path, target_modules=FEW, **{key: value})
    found = read(text, file="adapter_config.json").uncounted
    assert [(each.key.partition(".")[0], each.effect, part in each.parts) for each in found] == [(key, effect, True)]
    with pytest.raises(ConfigError, match=key):
        read(text, file="adapter_config.json", strict=True)


def test_a_key_that_is_not_known_is_named() -> None:
    text = '{"peft_type": "LORA", "target_modules": "all-linear", "%s": 3}'
    for key, effect in (("new_rank", "either"), ("colour", "")):
        assert [(each.key, each.known, each.effect) for each in read(text % key).uncounted] == [(key, False, effect)]
    with pytest.raises(ConfigError, match="new_rank: 3 is not known here"):
        read(text % "new_rank", strict=True)
    with pytest.raises(ConfigError, match="new_lora_rank: 3 is not known here, and says a size"):
        read(text % "new_lora_rank")


def test_peft_reads_what_is_written(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    job = Job(model="", adapter="lokr", lora_rank=8, lora_targets="q_proj,v_proj")
    (tmp_path / "adapter_config.json").write_text(write(job, "peft").text, encoding="utf-8")
    config = peft.PeftConfig.from_pretrained(str(tmp_path))
    assert (type(config).__name__, config.r, config.target_modules) == ("LoKrConfig", 8, {"q_proj", "v_proj"})
