"""Models of text and sound, with sounds of a stated length: formulas against real steps of transformers' classes on a CPU."""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

from in_process import in_process  # noqa: E402
from loadgauge.core.base.errors import ConfigError  # noqa: E402
from loadgauge.core.base.package_data import read_data  # noqa: E402
from loadgauge.core.text.estimate.setup import length_words  # noqa: E402
from loadgauge.pytorch.capture.capture import Captures  # noqa: E402
from loadgauge.pytorch.capture.inputs.kinds import model_class  # noqa: E402
from loadgauge.pytorch.capture.inputs.sounds import sound_of  # noqa: E402
from loadgauge.pytorch.device.facts.fact_kinds import Known, Number, Placed, Rows, Run, Same, Tiled  # noqa: E402
from loadgauge.pytorch.device.simulated import fake_tensors, simulated_device  # noqa: E402
from sound_models import Step, config_of, job_of  # noqa: E402

SECOND = 16_000
TOLD = {"qwen2_audio": 25, "granite_speech": 12, "qwen3_asr": 13}
"""Tokens of a second, as each model's processor counts them."""


@pytest.mark.parametrize(
    ("kind", "tower"), [("qwen2_audio", "audio_tower"), ("granite_speech", "encoder"), ("qwen3_asr", "audio_tower")]
)
@pytest.mark.long
def test_a_step_with_a_sound(kind: str, tower: str) -> None:
    captures = Captures(job_of(kind), kind)
    first = captures.at(b=2, s=96, n=SECOND)
    assert not first.plain
    sizes = {"b": 2 if kind == "qwen3_asr" else 3, "s": 77, "n": SECOND}  # which reads the length of each sound
    assert first.holds(**sizes)
    assert first.of_sound == TOLD[kind]
    real = Step(
        kind, first.of_sound, **sizes
    )  # whose class raises where the text has other places than there are vectors
    assert sum(first.parameters.values()) == real.parameters
    assert first.flops(**sizes) == real.flops
    assert first.kept_bytes(**sizes) == pytest.approx(real.kept, rel=1e-4)
    layers = {name for name in real.ran if f"{tower}.layers.0" in name}
    assert layers
    assert any(f"{tower}.layers.0" in one.module and one.flops for one in first.operations)
    with pytest.raises(
        ConfigError, match=f"s: 8 is fewer than the {TOLD[kind]} tokens of a sequence's pictures or sounds"
    ):
        captures.at(b=2, s=8, n=SECOND)


def test_a_longer_sound_is_more_windows() -> None:
    """A processor cuts what is longer than half a minute; the places in the text follow its last window."""
    config = config_of("audioflamingo3")
    taken = inspect.signature(model_class(config).forward).parameters
    short, long = (sound_of(config, taken, seconds * SECOND) for seconds in (30, 45))
    assert (short.given["input_features"].shape[0], long.given["input_features"].shape[0]) == (1, 2)
    assert (short.tokens, long.tokens) == (750, 1125)
    assert int(long.given["input_features_mask"].values.sum()) == 4500


def test_shapes_that_are_stated_are_those_of_the_extractors() -> None:
    pytest.importorskip("torchaudio")
    numpy = pytest.importorskip("numpy")
    for name in ("GraniteSpeech", "FunAsrNano"):
        made, config = (getattr(transformers, name + kind)() for kind in ("FeatureExtractor", "Config"))
        for samples in (8000, 48_000, 320_208):
            given = sound_of(config, {}, samples).given
            real = made([numpy.zeros(samples, dtype=numpy.float32)])
            assert {key: one.shape for key, one in given.items()} == {key: tuple(real[key].shape) for key in given}


@pytest.mark.parametrize("samples", [8000, 48_000, 320_208])
def test_stated_shapes_without_torchaudio(samples: int) -> None:
    """Granite Speech's extractor counts tokens by itself; torchaudio's spectra are `torch.stft`."""
    from transformers.models.granite_speech import feature_extraction_granite_speech as granite

    config = transformers.GraniteSpeechConfig()
    given = sound_of(config, {}, samples).given
    made = object.__new__(granite.GraniteSpeechFeatureExtractor)
    vars(made).update(melspec_kwargs={"hop_length": 160}, projector_window_size=15, projector_downsample_rate=5)
    frames = torch.stft(torch.zeros(samples), 512, 160, 400, window=torch.ones(400), return_complex=True).shape[-1]
    assert given["input_features"].shape == (1, frames // 2, 160)
    assert given["input_features_mask"].shape == (1, *made._get_num_audio_features([samples]))


def test_rows_of_the_table_are_of_types_and_arguments_there_are() -> None:
    table = tomllib.loads(read_data("capture/sounds.toml"))
    keys = {
        "extractor",
        "options",
        "names",
        "ids",
        "windows",
        "settings",
        "given",
        "rows",
        "token",
        "counted",
        "seen",
        "alike",
    }
    for kind, row in table.items():
        if kind == "default":
            continue
        assert set(row) <= keys, kind
        taken = inspect.signature(model_class(transformers.CONFIG_MAPPING[kind]()).forward).parameters
        assert {*row.get("rows", {}), *row.get("names", {}).values()} <= set(taken), kind
        assert hasattr(transformers, row.get("extractor", "WhisperFeatureExtractor")), kind


# -- what is known of masks that all sequences have alike ---------------------------------------------------------------


@pytest.fixture
def mode() -> Iterator[Any]:
    with fake_tensors() as found:
        yield found


def fake(mode: Any, real: Any, b: int) -> Any:
    made = torch.empty((len(real) * b, *real.shape[1:]), dtype=real.dtype, device=simulated_device())
    mode.facts.keep(made, Tiled(real))
    return made


def test_what_follows_from_a_mask_is_what_real_tensors_have(mode: Any) -> None:
    with _disable_current_modes():
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])

    def lengths(mask: Any) -> list[Any]:
        each = (mask.sum(-1) - 1) // 2 + 1
        kept = torch.arange(6, device=mask.device)[None, :] < each[:, None]
        wide = kept[:, None, None, :].expand(-1, 1, 3, 6)
        return [each, kept, wide.any(-1), mask.view(-1, 2).sum(-1), mask[:, ::2].bool()]

    made = lengths(fake(mode, mask, 3))
    with _disable_current_modes():
        real = lengths(mask.repeat(3, 1))
        for one, other in zip(made, real, strict=True):
            fact = mode.facts.of(one)
            assert torch.equal(
                fact.value.repeat(other.shape[0] // len(fact.value), *(1 for _ in other.shape[1:])), other
            )
        count = int(real[1].sum())
    assert torch.empty(6, 6, 5, device=made[1].device)[made[1]].shape == (count, 5)
    assert made[1].nonzero().shape == (count, 2)
    assert made[0].max().item() == 2
    assert isinstance(mode.facts.of(made[1].sum()), Number)
    assert mode.facts.of(made[1].all()) == Same(mode.facts.of(made[1].all()).value)
    assert not made[1].all().item()
    assert isinstance(mode.facts.of(made[0][1]), Known)


def test_a_mask_that_is_written_to_is_unknown(mode: Any) -> None:
    with _disable_current_modes():
        ones = torch.ones(1, 4, dtype=torch.long)
    mask = fake(mode, ones, 3)
    mask[:, 1:] = 0
    assert mode.facts.of(mask.sum(-1)) is None


def test_places_in_a_text(mode: Any) -> None:
    ids = torch.empty((3, 20), dtype=torch.long, device=simulated_device())
    mode.facts.keep(ids, Placed(7, 5))
    mask = ids == 7
    assert mode.facts.of(mask) == Run(5, 0)
    assert (mask[:, :-1] & mask[:, 1:]).sum().item() == 12  # four neighbours each
    assert not ((mask[:, :-1] & mask[:, 1:]).sum() == 0).item()
    assert mode.facts.of(mask.unsqueeze(-1).expand(3, 20, 8)) == Rows(120)
    assert mode.facts.of(ids == 8) is None
    assert torch.where(torch.diff(torch.nn.functional.pad(mask.int(), (1, 1)), dim=1) == 1)[0].shape == (3,)


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate names the sound, and takes the seconds of one where the model hears any."""
    import loadgauge
    from loadgauge.core.base.errors import NotModelled
    from loadgauge.pytorch.capture import road
    from loadgauge.pytorch.capture.record import record
    from loadgauge.pytorch.capture.requests import list_request

    def refused(*_: Any) -> Any:
        raise NotModelled("numbers")

    in_process(monkeypatch)
    monkeypatch.setattr(list_request, "recorded", refused)
    monkeypatch.setattr(road, "_FAMILIES", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of("qwen2_audio").to_dict()))
    given: dict[str, Any] = {"precision": "fp32", "optimizer": "sgd", "attention": "eager", "framework": "huggingface"}
    found = loadgauge.estimate(str(file), road="captured", seq_len=64, micro_batch=2, audio=1.5, **given)
    truth = record(job_of("qwen2_audio"), {"b": 2, "s": 64, "n": 24_000})
    assert found.flops.hardware == sum(op.flops for op in truth.ops[truth.second :] if op.flops)
    assert length_words(found.setup.model, 64) == "64 tokens and 1.5 s of sound, in place of 37 of its tokens"
