"""Captured lists against the trace of the very step at sizes never captured, against written families, and what they refuse."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

import loadgauge
from in_process import in_process
from loadgauge.core.base.errors import ConfigError, LayoutError, NotModelled
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.result import Estimate
from loadgauge.pytorch.capture import road
from loadgauge.pytorch.capture.inputs.small import shallow
from loadgauge.pytorch.trace import child, subprocess

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "vocab_size": 640,
    "intermediate_size": 160,
}
KEYS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"model_type": "llama", "num_key_value_heads": 2},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 4, "vocab_size": 640, "n_positions": 256},
    "bitnet": SMALL | {"model_type": "bitnet", "num_key_value_heads": 2},
    "mixtral": SMALL | {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "num_hidden_layers": 3},
}  # fmt: skip
"""bitnet has no written family."""
SIZES: dict[str, Any] = {"micro_batch": 6, "seq_len": 96}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where captures are kept, so that each model is captured once here, by whichever worker."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return folder / "captured lists"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:
    """Captures in this process, and a disk of their own."""

    in_process(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
    monkeypatch.setattr(road, "_FAMILIES", {})


def file_of(kind: str, folder: Path) -> str:
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(KEYS[kind]))
    return str(path)


def captured(kind: str, folder: Path, **fields: Any) -> Estimate:
    given = (
        SIZES | {"precision": "bf16-pure", "optimizer": "sgd", "framework": "huggingface", "road": "captured"} | fields
    )
    return loadgauge.estimate(file_of(kind, folder), **given)


def peak(result: Estimate) -> float:
    """Bytes of tensors at the peak."""
    return max(moment.total - moment.parts["outside"] for moment in result.workings.phases)


@pytest.mark.parametrize("kind", ["gpt2", "bitnet"])
@pytest.mark.long
def test_the_peak_is_that_of_the_trace_with_and_without_recomputation(kind: str, tmp_path: Path) -> None:
    # Captured at two sequences and at one; asked for at six, another length, and more layers than were run.
    captured(kind, tmp_path, micro_batch=2, seq_len=64)
    for recompute in ("none", "full"):
        found = captured(kind, tmp_path, recompute=recompute)
        config = CONFIG_MAPPING[KEYS[kind]["model_type"]](**KEYS[kind])
        traced = loadgauge.trace(config, **SIZES, precision="bf16-pure", optimizer="sgd", recompute=recompute)
        states = sum(traced.peak.categories.get(name, 0) for name in ("weights", "gradients", "optimizer states"))
        assert peak(found) - states == pytest.approx(traced.peak.total - states, rel=2e-3)
        if recompute == "none":
            assert found.flops.hardware == traced.flops.total


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.thorough
def test_it_is_what_the_written_family_says(kind: str, tmp_path: Path) -> None:
    own, written = captured(kind, tmp_path), captured(kind, tmp_path, road="written")
    assert (own.params, own.flops) == (written.params, written.flops)
    # Beside what the family counts: buffers, and numbers of the loss.
    assert peak(own) == pytest.approx(peak(written), rel=1e-4)


def parts(result: Estimate) -> list[Any]:
    """One layer, what stands before the first, and what follows the last."""
    memory = result.workings.memory
    return [memory.block_layers()[-1], *memory.end_layers()]


def sent(layer: Any, axis: str) -> list[tuple[str, float]]:
    """The exchanges of an axis in one forward and one backward, and their bytes."""
    return sorted((one.kind, float(one.nbytes)) for one in layer.comm if one.axis == axis)


@pytest.mark.parametrize(("kind", "axis"), [("llama", "tp"), ("mixtral", "ep")])
@pytest.mark.thorough
def test_a_rank_has_what_the_written_family_says(kind: str, axis: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"gpus": 2, axis: 2}
    own, written = captured(kind, tmp_path, **fields), captured(kind, tmp_path, road="written", **fields)
    assert (own.params, own.flops) == (written.params, written.flops)
    for mine, theirs in zip(parts(own), parts(written), strict=True):
        assert mine.params == theirs.params
        assert (mine.forward_flops, mine.backward_flops) == (theirs.forward_flops, theirs.backward_flops)
        assert sent(mine, axis) == sent(theirs, axis)
    # Beside what the family counts: ids of the rows of each expert, masks of the ids of other ranks' tables, numbers of the loss.
    block, of_family = (parts(one)[0].saved() for one in (own, written))
    assert block == pytest.approx(of_family, rel=1e-4 if axis == "tp" else 6e-3)
    assert peak(own) == pytest.approx(peak(written), rel=4e-3)


def test_sequences_of_unequal_lengths(tmp_path: Path) -> None:
    data = tmp_path / "lengths.txt"
    data.write_text("\n".join(map(str, (10, 20, 30, 40, 64, 96, 96, 50))))
    for batch in (6, 1):
        fields: dict[str, Any] = {"micro_batch": batch, "seq_len": None, "lengths": str(data)}
        own, written = captured("llama", tmp_path, **fields), captured("llama", tmp_path, road="written", **fields)
        assert float(own.flops.hardware) == pytest.approx(float(written.flops.hardware), rel=1e-12)
        assert parts(own)[0].saved() == pytest.approx(parts(written)[0].saved(), rel=1e-3)
        assert peak(own) == pytest.approx(peak(written), rel=2e-3)


def test_ranks_of_fsdp_and_ddp_are_those_of_a_dry_run(tmp_path: Path) -> None:
    for zero in (0, 3):
        found = captured("llama", tmp_path, gpus=4, zero=zero)
        config = CONFIG_MAPPING["llama"](**KEYS["llama"])
        traced = loadgauge.trace(
            config, **SIZES, precision="bf16-pure", optimizer="sgd", gpus=4, zero=zero, global_batch=24
        )
        assert peak(found) == pytest.approx(traced.peak.total, rel=1e-3)


def test_the_second_time_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = captured("bitnet", tmp_path, road=None, micro_batch=2, seq_len=64)
    assert "no family here reads it" in first.assumed["model"]
    monkeypatch.setattr(subprocess, "named_in_child", None)
    monkeypatch.setattr(road, "_FAMILIES", {})
    again = captured("bitnet", tmp_path, road=None, micro_batch=9, seq_len=33)
    assert "kept from before" in again.assumed["model"]
    assert again.params == first.params


def test_a_plan_has_the_axes_that_are_known(tmp_path: Path) -> None:
    captured("bitnet", tmp_path, precision="bf16-pure")
    answer = loadgauge.plan(
        file_of("bitnet", tmp_path), gpu="l4", gpus=4, global_batch=16, seq_len=96, precision="bf16-pure"
    )
    assert {"tp", "cp"} <= {text.split()[0] for text in answer.to_dict()["out_of_reach"]}


@pytest.mark.long
def test_a_plan_searches_the_ranks_that_split_the_model(tmp_path: Path) -> None:
    captured("llama", tmp_path, gpus=2, tp=2)
    asked: dict[str, Any] = {"gpu": "l4", "gpus": 2, "global_batch": 8, "seq_len": 96, "precision": "bf16-pure"}
    file = file_of("llama", tmp_path)
    answer = loadgauge.plan(file, **asked, road="captured")
    assert answer.cases[-1].space.tp == (1, 2)
    best = loadgauge.plan(file, **asked, road="captured", tp=2).layouts[0].estimate
    layout = best.layout
    again = loadgauge.estimate(
        file, **asked, framework="huggingface", road="captured", tp=2, zero=layout.zero, micro_batch=layout.micro_batch,
        recompute=str(layout.recompute),
    )  # fmt: skip
    assert layout.tp == 2
    assert (best.memory.total, best.time.step) == (again.memory.total, again.time.step)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "error", "why"),
    [
        ({"gpus": 2, "cp": 2}, LayoutError, "how cp splits them is not known"),
        ({"gpus": 2, "tp": 2, "sequence_parallel": True}, LayoutError, "whose plan does not state it"),
        ({"gpus": 4, "tp": 4}, LayoutError, "num_key_value_heads over tp: 2 over 4 leaves 2"),
        ({"qlora": True, "base": "gptq"}, NotModelled, "a base of captured layers in gptq"),
        ({"loss": "liger"}, NotModelled, "which the loss liger replaces"),
        ({"compile": True}, NotModelled, "which torch.compile replaces"),
        ({"inputs": "x.py:f"}, ConfigError, "needs script.py:function"),
    ],
)
def test_what_is_not_known_of_a_captured_list_is_refused(
    fields: dict[str, Any], error: type[Exception], why: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=why):
        captured("llama", tmp_path, **fields)


@pytest.mark.long
def test_a_module_of_ones_own(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "def model():\n"
        "    block = lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))\n"
        "    blocks = [block() for _ in range(4)]\n"
        "    return nn.Sequential(nn.Embedding(50, 32), *blocks, nn.Linear(32, 50))\n"
        "def batch(b, s):\n    return torch.zeros(b, s, dtype=torch.long)\n"
    )
    given = {"inputs": f"{script}:batch", "framework": "huggingface", **SIZES}
    found = loadgauge.estimate(f"{script}:model", optimizer="sgd", **given)
    # Sources: shapes by hand; a product keeps its input, GELU its input, a norm its input and two numbers a row.
    assert found.params == 50 * 32 + 4 * (2 * 32 + 2 * 32 * 96 + 96 + 32) + 33 * 50
    with pytest.raises(ConfigError, match="has the dtype that its function gives it"):
        loadgauge.estimate(f"{script}:model", precision="bf16-pure", **given)
    script.write_text(script.read_text() + "def rows(b):\n    return torch.zeros(b, 7, dtype=torch.long)\n")
    rows = {"inputs": f"{script}:rows", "framework": "huggingface", "micro_batch": 4}
    assert loadgauge.estimate(f"{script}:model", optimizer="sgd", **rows).layout.seq_len == 1
    with pytest.raises(ConfigError, match="has no size s"):
        loadgauge.estimate(f"{script}:model", optimizer="sgd", seq_len=8, **rows)


def test_a_script_that_ends_the_program_is_refused() -> None:
    call = subprocess.Call("sys", "exit", subprocess.Request(Job("own.py:model")), {})
    assert "own.py:model cannot be run: it ends the program" in child._answer(call).error


def test_layers_whose_outputs_are_taken_are_there_when_a_model_is_cut() -> None:
    """Llama 3.2 Vision joins the outputs of five layers of 32: as many of fewer layers, as what follows is as wide."""
    tower = shallow(CONFIG_MAPPING["mllama"](), 5).vision_config
    assert (tower.num_hidden_layers, tower.intermediate_layers_indices) == (5, [3, 4, 4, 4, 4])
