"""Names of models on the hub: by the catalogue's rules, from the local cache, and from the hub where it is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families import catalogue, hub
from loadgauge.core.families.catalogue import config, find, models
from loadgauge.core.resolve.resolve import resolve_job


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and no network."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "LOADGAUGE_HUB", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "base", "stored"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", ""),
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "llama-3.1-8b", "nf4"),
        ("unsloth/llama-3-8b-Instruct-bnb-4bit", "llama-3-8b", "nf4"),
        ("TheBloke/Llama-2-13B-chat-GPTQ", "llama-2-13b", "gptq"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b", "awq"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2.5-7b", "gptq"),
        ("bartowski/Llama-3.2-3B-Instruct-GGUF", "llama-3.2-3b", "gguf"),
        ("mlx-community/Llama-3.2-3B-Instruct-4bit", "llama-3.2-3b", "mlx4"),
        ("mistral-7b-instruct-v0.3.Q5_K_S.gguf", "mistral-7b-v0.3", "q5_k_s"),
        ("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q6_K", "llama-3.1-8b", "q6_k"),
        ("unsloth/Qwen3-30B-A3B-GGUF:UD-Q4_K_XL", "qwen3-30b-a3b", "q4_k_m"),
        ("llama3.3:70b-instruct-q8_0", "llama-3.3-70b", "q8_0"),
        ("deepseek-r1:14b", "qwen2.5-14b", ""),
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b", "fp8"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3", ""),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b-v0.1", ""),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b", ""),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "llama-3.1-8b", ""),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2.5-7b", ""),
        ("unsloth/DeepSeek-R1-Distill-Llama-8B-unsloth-bnb-4bit", "llama-3.1-8b", "nf4"),
        ("HuggingFaceH4/zephyr-7b-beta", "mistral-7b-v0.1", ""),
        ("cognitivecomputations/dolphin-2.9-llama3-8b", "llama-3-8b", ""),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b-2507", ""),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b", ""),
        ("google/gemma-2-9b-it", "gemma-2-9b", ""),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3", ""),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b", ""),
    ],
)
def test_a_name_of_a_copy_is_its_base(name: str, base: str, stored: str) -> None:
    found = find(name)
    assert (found.spec.name, found.stored) == (base, stored)
    assert name in found.how


@pytest.mark.parametrize(
    "name",
    [
        "someone/my-model", "someone/llama-3.1-8b-eagle", "someone/llama-3-8b-4x8b-moe", "someone/llama-3.1-8b-pruned-4b",
        "someone/Falcon-H1-3B-Deep-Base", "google/gemma-4-31B-it-assistant", "someone/llama3-8b-pro",
    ],
)  # fmt: skip
def test_a_name_that_does_not_say_its_sizes_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find(name)
    assert ("--hub" in str(caught.value)) is ("/" in name)


def test_every_shipped_model_and_its_repository_stay_themselves() -> None:
    for name, source in catalogue.model_sources().items():
        assert find(name).spec.name == name
        if source.repository:
            assert find(source.repository).how == ""
    assert len(models()) == len(catalogue.model_sources())


def test_derivatives_with_other_sizes_have_the_published_number_of_parameters() -> None:
    """As the safetensors index of each repository says."""
    for name, millions in {
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1777.1, "codellama/CodeLlama-7b-hf": 6738.5,
        "mistralai/Mistral-7B-Instruct-v0.2": 7241.7, "teknium/OpenHermes-2.5-Mistral-7B": 7241.7,
        "microsoft/Phi-3.5-mini-instruct": 3821.1,
    }.items():  # fmt: skip
        assert parameters(find(name).spec).total / 1e6 == pytest.approx(millions, rel=1e-4), name


def put(folder: Path, name: str, content: dict[str, Any], revision: str = "abc", main: bool = True) -> Path:
    repository = folder / "hub" / f"models--{name.replace('/', '--')}"
    place = repository / "snapshots" / revision / "config.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(content))
    if main:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(revision)
    return place


def test_the_local_cache_comes_before_the_rules_and_main_before_other_revisions(nobody_else: Path) -> None:
    content = config("llama-3.1-8b") | {"num_hidden_layers": 3, "auto_map": {"AutoConfig": "evil.Evil"}}
    put(nobody_else, "me/llama-3.1-8b-short", content | {"num_hidden_layers": 5}, "old", main=False)
    put(nobody_else, "me/llama-3.1-8b-short", content, "new")
    found = find("me/llama-3.1-8b-short")
    assert found.spec.num_hidden_layers == 3
    assert "local Hugging Face cache" in found.how
    assert find("me/llama-3.1-8b-other").spec.name == "llama-3.1-8b"


def test_a_cached_config_says_how_it_is_stored(nobody_else: Path) -> None:
    for method, more, stored in (
        ("bitsandbytes", {"load_in_4bit": True}, "nf4"), ("bitsandbytes", {"load_in_8bit": True}, "int8"),
        ("gptq", {"bits": 4}, "gptq"), ("mxfp4", {}, ""),
    ):  # fmt: skip
        name = f"me/{method}-{stored or 'none'}"
        put(nobody_else, name, config("llama-3.2-1b") | {"quantization_config": {"quant_method": method, **more}})
        assert find(name).stored == stored


def test_a_broken_cache_is_one_line(nobody_else: Path) -> None:
    put(nobody_else, "me/broken", {}).write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: is not valid JSON"):
        find("me/broken")
    (nobody_else / "hub" / "models--me--empty" / "snapshots").mkdir(parents=True)
    with pytest.raises(ConfigError, match="neither a model"):
        find("me/empty")


def test_the_hub_is_asked_only_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(name: str) -> bytes:
        asked.append(name)
        return json.dumps(config("llama-3.2-1b")).encode()

    monkeypatch.setattr(catalogue, "fetch", fetch)
    with pytest.raises(ConfigError, match="--hub asks"):
        resolve_job(Job(model="me/mine"))
    assert asked == []
    setup = resolve_job(Job(model="me/mine", hub=True))
    assert asked == ["me/mine"]
    assert setup.assumed["model"] == "mine (config.json of me/mine on huggingface.co)"
    monkeypatch.setenv("LOADGAUGE_HUB", "1")
    resolve_job(Job(model="me/mine"))
    with pytest.raises(ConfigError):
        resolve_job(Job(model="me/mine", hub=False))
    assert len(asked) == 2


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no route to host\nsecond line")

    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    monkeypatch.setattr("urllib.request.urlopen", fail)
    with pytest.raises(ConfigError) as caught:
        hub.fetch("me/mine")
    assert str(caught.value) == "hub: huggingface.co gives no config.json of me/mine: no route to host"
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        hub.fetch("../../etc/passwd")


def test_a_quantised_copy_is_trained_as_it_is_stored() -> None:
    setup = resolve_job(Job(model="unsloth/Meta-Llama-3.1-8B-bnb-4bit", seq_len=512))
    assert setup.training.lora is not None
    assert setup.training.lora.quantised == "nf4"
    assert setup.assumed["--qlora"] == "the copy that is named is stored in nf4"
    whole = resolve_job(Job(model="unsloth/Meta-Llama-3.1-8B-bnb-4bit", qlora=False, seq_len=512))
    assert whole.training.lora is None
    with pytest.raises(NotModelled, match=r"stored in gguf: known are nf4"):
        resolve_job(Job(model="bartowski/Llama-3.2-3B-Instruct-GGUF"))
