"""Estimates of models with two lengths, and with sounds, against the very step at those lengths."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from transformers import CONFIG_MAPPING  # noqa: E402

import loadgauge  # noqa: E402
from in_process import in_process  # noqa: E402
from loadgauge.core.base.errors import ConfigError, NotModelled  # noqa: E402
from loadgauge.core.definitions.job.job import Job  # noqa: E402
from loadgauge.pytorch.capture import road  # noqa: E402
from loadgauge.pytorch.capture.inputs.kinds import of_config  # noqa: E402
from loadgauge.pytorch.capture.record import record  # noqa: E402
from loadgauge.pytorch.capture.requests import list_request  # noqa: E402
from loadgauge.pytorch.trace.torch_run import TorchRun  # noqa: E402

BART = {
    "d_model": 64, "vocab_size": 320, "max_position_embeddings": 128, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
}  # fmt: skip
SOUND = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": [16] * 7,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16, "layerdrop": 0.0,
    "apply_spec_augment": False,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, int]]] = {
    "encoder and decoder": ("bart", BART, {"seq_len": 96, "target_len": 40}, {"s": 96, "t": 40}),
    "sound": ("wav2vec2", SOUND | {"architectures": ["Wav2Vec2ForSequenceClassification"]}, {"audio": 0.5}, {"n": 8000}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Captures in this process, with numbers alone, kept nowhere else."""

    def refused(*_: Any) -> Any:
        raise NotModelled("numbers")

    in_process(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(road, "_FAMILIES", {})
    monkeypatch.setattr(list_request, "recorded", refused)


@pytest.mark.parametrize(("kind", "keys", "lengths", "sizes"), CASES.values(), ids=CASES.keys())
def test_an_estimate_has_its_own_lengths(
    kind: str, keys: dict[str, Any], lengths: dict[str, Any], sizes: dict[str, int], tmp_path: Path
) -> None:
    file = tmp_path / f"{kind}.json"
    file.write_text(json.dumps(keys | {"model_type": kind}))
    given: dict[str, Any] = {"micro_batch": 6, "precision": "bf16-pure", "optimizer": "sgd", "framework": "huggingface"}
    found = loadgauge.estimate(str(file), road="captured", **given, **lengths)
    run = TorchRun.of(Job(model="", seq_len=1, precision="bf16-pure", optimizer="sgd"))
    truth = record(of_config(CONFIG_MAPPING[kind](**keys), run), {"b": 6, **sizes})
    assert found.flops.hardware == sum(op.flops for op in truth.ops[truth.second :] if op.flops)
    peak = max(float(moment.total) - float(moment.parts["outside"]) for moment in found.workings.phases)
    assert peak == pytest.approx(max(itertools.accumulate(truth.changes)), rel=2e-3)
    if kind == "bart":
        assert "--target-len 40" in found.setup.job.flags()
        script = tmp_path / "run.sh"
        words = "--max_source_length 96 --max_target_length 40 --per_device_train_batch_size 6 --output_dir out"
        script.write_text(f"python run_summarization.py --model_name_or_path {file} {words}\n")
        assert loadgauge.estimate(str(script), precision="bf16-pure", optimizer="sgd").flops == found.flops
        with pytest.raises(ConfigError, match="takes no sound"):
            loadgauge.estimate(str(file), road="captured", **given, **lengths, audio=3.0)
    else:
        with pytest.raises(ConfigError, match="takes sounds and no text"):
            loadgauge.estimate(str(file), road="captured", **given, **lengths, seq_len=64)


def test_a_written_family_has_one_text() -> None:
    with pytest.raises(ConfigError, match="one text"):
        loadgauge.estimate("gpt2", target_len=64)
