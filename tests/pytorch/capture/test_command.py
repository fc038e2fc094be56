"""`loadgauge capture`: a configuration that no family reads, a script, what is kept on disk, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import loadgauge
from command_line import Outcome, typed
from in_process import in_process
from loadgauge.core.families import model_types
from loadgauge.pytorch.capture.call import capture
from loadgauge.pytorch.capture.captured import Captured
from loadgauge.pytorch.capture.inputs.kinds import model_class
from loadgauge.pytorch.capture.inputs.target import config_keys
from loadgauge.pytorch.capture.lists import store
from loadgauge.pytorch.capture.symbols.sizes import Formula
from loadgauge.pytorch.trace.programs.target import config_object, with_layers

KIND = "bitnet"
CONFIG = {
    "model_type": KIND, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 4096,
}  # fmt: skip
SCRIPT = """
import torch
from torch import nn

print("read")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        h = self.a(x)
        if h.mean().item() > 0:
            h = h.relu()
        return self.b(h).square().mean()

def model():
    return Net()

def batch(b, width):
    return torch.empty(b, width, 64)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where captures are kept in a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "loadgauge" / "captures"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What children do is done in this process; the list has what ran, and for which target."""
    return in_process(monkeypatch)


def written(folder: Path, **more: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**CONFIG, **more}))
    return file


def answered(line: str) -> dict[str, Any]:
    found = typed(f"capture {line} --json")
    assert found.code == 0, found.err
    result: dict[str, Any] = json.loads(found.out)
    return result


def test_a_type_without_a_family_is_answered_as_its_trace(tmp_path: Path, here: list[str]) -> None:
    """At the sizes of the capture, and at others from the disk, for which nothing is run."""
    assert KIND not in model_types()
    file = written(tmp_path, num_hidden_layers=1)
    refused = typed(f"estimate {file} --road written")
    assert refused.code == 2
    assert "`loadgauge capture`" in refused.err
    for b, s in ((2, 96), (5, 333)):
        found = answered(f"{file} --micro-batch {b} --seq-len {s}")
        traced = loadgauge.trace(str(file), micro_batch=b, seq_len=s)
        assert found["peak"] == traced.peak.total
        assert found["allocated"] == traced.allocated
        assert found["phases"] == traced.phases
        assert found["at_peak"] == {name: size for name, size in traced.peak.categories.items() if size}
        assert found["kept"]["value"] == traced.saved_nbytes
        assert found["flops"]["value"] == traced.flops.total
        for names in (found["kept"]["formula"], found["flops"]["formula"]):
            assert eval(names, {"b": b, "s": s}) in (traced.saved_nbytes, traced.flops.total)
        assert "s <= 4096" in found["holds"]
        assert found["cached"] == (b == 5)
    assert [one for one in here if "capture_request" in one] == [
        f"loadgauge.pytorch.capture.requests.list_request:capture_request {file}"
    ]


@pytest.mark.long
def test_a_step_of_several_micro_batches(tmp_path: Path, here: list[str]) -> None:
    file = written(tmp_path, num_hidden_layers=1)
    found = answered(f"{file} --micro-batch 2 --global-batch 4 --seq-len 40 --no-cache")
    traced = loadgauge.trace(str(file), micro_batch=2, global_batch=4, seq_len=40)
    assert (found["peak"], found["flops"]["value"]) == (traced.peak.total, traced.flops.total)


def test_layers_are_those_of_the_language_model() -> None:
    """Beside a tower, too: each Llama layer has its two norms, four projections and three matrices."""
    text = {key: value for key, value in CONFIG.items() if key != "model_type"} | {"num_hidden_layers": 3}
    keys = {"model_type": "llava", "text_config": {"model_type": "llama", **text}}
    counts = []
    for layers in (None, 1):
        config = with_layers(config_object(keys, "llava"), layers)
        with torch.device("meta"):
            counts.append(sum(one.numel() for one in model_class(config)(config).parameters()))
    assert counts[0] - counts[1] == 2 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)


def test_from_the_disk_needs_no_pytorch(tmp_path: Path, here: list[str]) -> None:
    file = written(tmp_path, num_hidden_layers=1)
    line = f"{file} --micro-batch 2 --seq-len 64 --gpu h100"
    first = answered(line)
    alone = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'sympy')))\n"
        "from loadgauge.core.command_line.main import run; sys.exit(run(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", alone, "capture", *line.split(), "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout)
    assert second.pop("cached")
    assert not first.pop("cached")
    assert second.pop("seconds") < first.pop("seconds")
    assert first == second
    shown = typed(f"capture {line}").out
    assert shown.startswith("FITS")
    assert "holds where b >= 2, s >= 2, s <= 4096" in shown
    assert f"= {first['kept']['formula']} bytes" in shown
    assert second["needed"]["verdict"] == "fits"
    assert second["needed"]["low"] <= second["needed"]["value"] <= second["needed"]["high"]


@pytest.fixture(scope="module")
def linear() -> Captured:
    return capture(lambda: torch.nn.Linear(8, 8), lambda b: torch.empty(b, 8), optimizer="sgd").at(b=8)


def test_what_decides_is_captured_again(
    tmp_path: Path, linear: Captured, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is run is not the point here: a capture of something else stands for each."""

    def call(work: str, result: type, request: Any, shown: Any, own_sizes: dict[str, int], **_: Any) -> Captured:
        return msgspec.structs.replace(
            linear, names=("b", "s"), sizes={"b": own_sizes.get("b", 1), "s": own_sizes["s"]}
        )

    monkeypatch.setattr("loadgauge.pytorch.trace.subprocess.named_in_child", call)
    file = written(tmp_path)
    asked = f"{file} --micro-batch 2 --seq-len 64"
    assert not answered(asked)["cached"]
    assert answered(asked)["cached"]
    assert not answered(f"{asked} --no-cache")["cached"]
    assert len(list(cache.iterdir())) == 1
    # A sequence alone is another capture, in the same file.
    assert not answered(f"{file} --seq-len 64")["cached"]
    assert answered(f"{file} --seq-len 65")["cached"]
    assert answered(asked)["cached"]
    assert len(list(cache.iterdir())) == 1
    changes = [
        "--optimizer sgd",
        "--precision fp32",
        "--attention eager",
        "--recompute full",
        "--layers 1",
        "--global-batch 4",
    ]
    for more in changes:
        assert not answered(f"{asked} {more}")["cached"], more
        assert answered(f"{asked} {more}")["cached"], more
    assert len(list(cache.iterdir())) == 1 + len(changes)
    written(tmp_path, vocab_size=321)
    assert not answered(asked)["cached"]
    for name in ("version_of", "_code"):
        monkeypatch.setattr(store, name, lambda *_: "another")
        assert not answered(asked)["cached"]


def test_a_capture_is_made_again_where_the_code_that_captures_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_by = Path(store.__file__)
    assert written_by.is_relative_to(store.PACKAGE / "pytorch")
    code = tmp_path / "pytorch" / "capture.py"
    code.parent.mkdir()
    code.write_text("one = 1\n", encoding="utf-8")
    monkeypatch.setattr(store, "PACKAGE", tmp_path)
    before = store._code()
    assert before == store._code()
    code.write_text("one = 1 + 1\n", encoding="utf-8")
    assert store._code() != before


def test_a_file_is_data(tmp_path: Path, linear: Captured) -> None:
    file = tmp_path / "some" / "file.bin"
    store.save(file, [linear])
    assert store.load(file) == [linear]
    assert store.load(tmp_path / "none") == []
    content = file.read_bytes()
    file.write_bytes(content[:-9])
    assert store.load(file) == []
    file.write_bytes(b"no capture")
    assert store.load(file) == []
    number = linear.events[0][0]
    wrong: list[dict[str, Any]] = [
        {"guards": ("__import__('os').abort()",)}, {"guards": ("b.real",)}, {"guards": ("q == 2",)},
        {"guards": ("b**b**b",)}, {"events": ((number, Formula((("q", 1),))),)},
        {"events": ((len(linear.storages), Formula((("b", 1),))),)}, {"second": 10**6}, {"sizes": {}},
    ]  # fmt: skip
    for one in wrong:
        store.save(file, [msgspec.structs.replace(linear, **one)])
        assert store.load(file) == [], one


def test_code_that_a_config_names_is_never_run(tmp_path: Path, here: list[str]) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Net: pass\n")
    own = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Net"}
    file = written(tmp_path, model_type="own_kind", auto_map=own)
    refused = typed(f"capture {tmp_path}")
    assert refused.code == 2
    assert "auto_map) is not run" in refused.err
    assert refused.err.count("\n") == 1
    # transformers' own class of that type is what is asked for.
    file = written(tmp_path, auto_map=own)
    assert config_object(config_keys(str(file)), "").model_type == KIND
    assert not (tmp_path / "ran").exists()


def test_what_a_config_has_wrong_is_named(tmp_path: Path, here: list[str]) -> None:
    refused = typed(f"capture {written(tmp_path, hidden_size='7B')}")
    assert refused.code == 2
    assert "hidden_size" in refused.err
    assert refused.err.count("\n") == 1


def test_a_script(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(SCRIPT)
    line = f"{file}:model --inputs {file}:batch"
    found: Outcome = typed(f"capture {line} --micro-batch 8 --size width=32 --json")
    assert found.code == 0, found.err
    assert found.err == "read\n"
    answer = json.loads(found.out)
    assert answer["parameters"] == 2 * 64 * 256 + 64 + 256
    assert answer["sizes"] == {"b": 8, "width": 32}
    # The hidden layer in float32, which is both relu's result and the second product's factor, and the result, which square keeps.
    assert answer["kept"]["value"] == 4 * 8 * 32 * (256 + 64)
    assert answer["flops"]["value"] == 2 * 8 * 32 * 64 * 256 * 5
    assert [Path(line).name for line in answer["values"]] == ["own.py:13"]
    assert not cache.exists()


def test_flags_that_a_target_cannot_have(tmp_path: Path, here: list[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(SCRIPT)
    line = f"{file}:model --inputs {file}:batch"
    for more, text in (
        ("", "--size width=NUMBER"), ("--size width=0", "must be such as"), ("--seq-len 4 --size width=3", "no size s"),
        ("--size width=3 --layers 2", "--layers"), ("--size width=3 --recompute full", "--recompute"),
        ("--size width=3 --precision bf16-pure", "dtype"),
    ):  # fmt: skip
        refused = typed(f"capture {line} {more}")
        assert refused.code == 2, more
        assert text in refused.err.splitlines()[-1], refused.err
    for words, text in (
        (f"{file}:model", "--size width=NUMBER"), (f"gpt2 --inputs {file}:batch", "--inputs"), ("gpt3000", "catalogue"),
        (str(written(tmp_path, quantization_config={"quant_method": "gptq"})), "quantization_config"),
    ):  # fmt: skip
        refused = typed(f"capture {words}")
        assert refused.code == 2, words
        assert text in refused.err
