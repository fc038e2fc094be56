"""Config files, whole and broken, and the catalogue of models that comes with loadgauge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.families import find_model, from_hf, model, model_sources, models
from loadgauge.core.families.hf import LARGEST_FILE

SMALL = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}

# Files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b'{"model_type": "lla', "is not valid JSON"),
        (b'{"model_type": "llama", "vocab_size": NaN}', "NaN is not a JSON number"),
        (b'{"model_type": "llama", "hidden_size": -Infinity}', "hidden_size"),
        (b'{"vocab_size": 1, "model_type": "llama", "vocab_size": 2}', "the key 'vocab_size' appears twice"),
        (b"[" * 200_000, "is nested too deeply"),
        (b'{"a":' * 200_000, "is nested too deeply"),
        (b"[1, 2]", "must be a JSON object"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b" " * (LARGEST_FILE + 1), "is larger than 10 MB"),
    ],
    ids=range(12),
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        from_hf(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_folder_and_a_file_give_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({**SMALL, "vocab_size": 99}).encode())  # with a byte order mark
    assert from_hf(folder) == from_hf(path) == from_hf(str(path))
    assert from_hf(path).name == "my-llama"
    assert from_hf(path).source == str(path)


def test_unreadable_places(tmp_path: Path) -> None:
    for place, message in (
        (tmp_path, "config.json: no such file"),
        (tmp_path / "absent.json", "no such file"),
        (tmp_path / "absent" / "config.json", "no such file"),
        ("/dev/null", "is not a file"),
        ("a\0b", "no such file|cannot be read"),
        ("x" * 5000, "no such file|cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_hf(place)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="is not a file"):
        from_hf(tmp_path)


# The catalogue


def test_catalogue_is_complete_and_sourced() -> None:
    assert len(models()) >= 180
    assert set(models()) == set(model_sources())
    for name in models():
        source = model_sources()[name]
        assert bool(source.repository) != bool(source.paper)
        assert model(name).name == name
        assert model(name).source == str(source)
    repositories = [source.repository for source in model_sources().values() if source.repository]
    assert len(set(repositories)) == len(repositories)


def test_names_are_found_whatever_their_capitals_and_by_repository() -> None:
    assert find_model("Llama-3.1-8B") == model("llama-3.1-8b")
    assert find_model("qwen/qwen2.5-7b").name == "qwen2.5-7b"


@pytest.mark.parametrize("text", ["llama-3.1-8", "meta-llama/Llama-3.1-9B", "llama31-8b"])
def test_a_near_miss_names_its_neighbours(text: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*llama-3\.1-8b"):
        find_model(text)
    with pytest.raises(ConfigError, match="loadgauge models"):
        find_model("zzzzzzzzzzzz")


def test_resolve_takes_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    monkeypatch.chdir(tmp_path)
    assert find_model("gpt2").model_type == "gpt2"  # the catalogue comes first
    assert find_model("./gpt2").model_type == "llama"
    assert find_model(str(folder / "config.json")).model_type == "llama"
    with pytest.raises(ConfigError, match="no such file"):
        find_model("absent.json")


def test_reading_a_model_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from loadgauge.core.families import find_model; find_model('llama-7b')\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
